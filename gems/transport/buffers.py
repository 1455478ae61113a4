"""Flat buffers of any framework by their addresses: tensors of PyTorch, arrays of NumPy.

Nothing is imported: a tensor has `data_ptr`, an array `__array_interface__`, and both are assigned
by `buffer[...] = other`. (`tensor.numpy()` would do, too, but a tensor whose memory NumPy shares
cannot be resized any more, which ZeRO-3 does.)
"""

from __future__ import annotations

import sys
from typing import Any

from gems.errors import GemsError

NARROW = ("bfloat16", "float16")  # summed as float32


def location(buffer: Any) -> tuple[int, int]:
    """Address and bytes of a buffer, which must be contiguous."""
    if hasattr(buffer, "data_ptr"):
        contiguous, found = buffer.is_contiguous(), buffer.data_ptr()
        size = buffer.numel() * buffer.element_size()
    else:
        contiguous, size = buffer.flags.c_contiguous, buffer.nbytes
        found = buffer.__array_interface__["data"][0]
    if not contiguous:
        raise GemsError(
            f"a buffer of shape {tuple(buffer.shape)} is not contiguous, and ranks send memory as "
            "it is; make it contiguous"
        )
    return found, size


def type_name(buffer: Any) -> str:
    """`float32`, `int64`, as PyTorch and NumPy both call it."""
    return str(buffer.dtype).removeprefix("torch.")


def on_device(buffer: Any) -> bool:
    """Whether a buffer is in the memory of a GPU."""
    kind = getattr(getattr(buffer, "device", "cpu"), "type", "cpu")
    return kind != "cpu"


def copied(buffer: Any) -> Any:
    return buffer.clone() if hasattr(buffer, "clone") else buffer.copy()


def widened(buffer: Any) -> Any:
    """A copy in float32."""
    return buffer.float() if hasattr(buffer, "float") else buffer.astype("float32")


def pinned(buffer: Any) -> Any:
    """Host memory for a buffer on a GPU, that the GPU reads and writes directly."""
    return buffer.new_empty(buffer.shape, device="cpu", pin_memory=True)


def wait_for_device(buffer: Any) -> None:
    """Until kernels that this thread has launched have written the buffer."""
    device = sys.modules["torch"].cuda  # a buffer on a device has loaded it
    device.current_stream(buffer.device).synchronize()
