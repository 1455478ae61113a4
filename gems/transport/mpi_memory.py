"""Buffers of any framework as MPI takes them: addresses, types, pieces that it can count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from gems.errors import GemsError
from gems.transport import buffers

PIECE = 1 << 30  # bytes; MPI counts in 31 bits
GPU_AWARE = "GEMS_MPI_GPU_AWARE"
TYPES = {
    "float32": "FLOAT", "float64": "DOUBLE", "int64": "INT64_T", "int32": "INT32_T",
    "int16": "INT16_T", "int8": "INT8_T", "uint8": "UINT8_T", "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}  # fmt: skip


class Memory:
    """What a rank hands to `MPI` in place of its buffers."""

    def __init__(self, MPI: Any) -> None:
        self.MPI, self.gpu_aware = MPI, gpu_aware()

    def pieces(self, buffer: Any) -> Iterator[tuple[list[Any], int]]:
        """The bytes of a buffer, each piece with its size."""
        address, size = buffers.location(buffer)
        for at in range(0, size, PIECE) or (0,):
            width = min(PIECE, size - at)
            yield [self.MPI.buffer.fromaddress(address + at, width), self.MPI.BYTE], width

    def is_one_piece(self, buffer: Any) -> bool:
        return buffers.location(buffer)[1] <= PIECE

    def numbers(self, buffer: Any) -> Iterator[list[Any]]:
        """The numbers of a buffer, with their type."""
        address, size = buffers.location(buffer)
        kind = getattr(self.MPI, TYPES[buffers.type_name(buffer)])
        for at in range(0, size, PIECE):
            piece = self.MPI.buffer.fromaddress(address + at, min(PIECE, size - at))
            yield [piece, kind]

    def host(self, buffer: Any) -> Any:
        """Memory that MPI reads and writes for a buffer: its own, if MPI can."""
        if not buffers.on_device(buffer):
            return buffer
        if self.gpu_aware:
            buffers.wait_for_device(buffer)
            return buffer
        return buffers.pinned(buffer)

    def filled(self, buffer: Any) -> Any:
        """The same, with the buffer's numbers."""
        host = self.host(buffer)
        if host is not buffer:
            host[...] = buffer
        return host

    def summable(self, buffer: Any, what: str) -> Any:
        """The same, of a type that MPI sums."""
        name = buffers.type_name(buffer)
        if name in buffers.NARROW:
            return self.filled(buffers.widened(buffer))
        if name not in TYPES:
            known = ", ".join((*TYPES, *buffers.NARROW))
            raise GemsError(f"{what}: MPI sums numbers of {known}, not {name}; convert them")
        return self.filled(buffer)


def gpu_aware() -> bool:
    """Whether MPI may be given addresses of GPU memory, by the environment."""
    given = os.environ.get(GPU_AWARE, "0")
    if given not in ("0", "1"):
        raise GemsError(f"{GPU_AWARE} is {given!r}; set it to 0 or 1")
    return given == "1"
