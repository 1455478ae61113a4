"""Stores for offloaded memory, on the host or on disk; each tensor is a slot of a store.

Copies overlap with compute: on a GPU they run on a stream of their own, to and from pinned memory;
on disk a thread reads and writes. Calls return a `Work`; the tensor must stay as it is until it was
waited for. The operations of a slot run in the order in which they were called.

    slot = store.slot(tensor.nbytes)
    slot.write(tensor).wait()        the bytes are there, and the tensor may be freed
    slot.read(into).wait()           `into` has them
    slot.free()

[Note: a file without a name] The file of a disk store has no name from the moment it exists, so
that it is gone with the process, however that ends. Its folder should be on a real disk: /tmp is
memory on some systems, and nothing would be saved.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from gems.errors import GemsError
from gems.transport.protocol import Done, Work

Tensor = torch.Tensor
EMPTY = memoryview(b"")


class Slot(Protocol):
    """A fixed number of bytes of a store."""

    size: int

    @property
    def memory(self) -> Tensor | None:
        """Its bytes, if they are host memory."""
        ...

    def write(self, tensor: Tensor, start: int = 0) -> Work:
        """Copy a tensor's bytes into the slot, from byte `start` on."""
        ...

    def read(self, into: Tensor, start: int = 0) -> Work:
        """Copy the bytes that were written last, from byte `start` on."""
        ...

    def free(self) -> None:
        """Let another slot have the space."""
        ...


class Store(Protocol):
    def slot(self, size: int) -> Slot: ...

    def finish(self) -> None:
        """Wait until all calls are done, and the host may read the result."""
        ...

    def close(self) -> None: ...

    @property
    def used(self) -> int:
        """Bytes of all slots that were not freed."""
        ...


def make_store(tier: str, device: torch.device, folder: str | Path | None = None) -> Store:
    """A store for memory of `device`: on the `host`, or on `disk`, in a file of `folder`."""
    return HostStore(device) if tier == "host" else DiskStore(device, folder)


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as bytes."""
    assert tensor.is_contiguous(), "only contiguous memory is offloaded"
    return tensor.detach().view(-1).view(torch.uint8)


def _view(memory: Tensor) -> memoryview:
    """A host tensor's bytes, for as long as it lives. After `numpy()` its storage could not be
    resized any more."""
    here = ctypes.c_char * len(memory)
    return memoryview(here.from_address(memory.data_ptr())).cast("B") if len(memory) else EMPTY


class _CopyWork:
    """A copy on the store's CUDA stream. The current stream waits for it, not the host."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class HostStore:
    """Host memory; pinned, if the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.gpu else None
        self.spare: dict[int, list[Tensor]] = defaultdict(list)
        self.used = 0

    def slot(self, size: int) -> Slot:
        spare = self.spare[size]
        memory = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=self.gpu)
        self.used += size
        return _HostSlot(self, memory)

    def copy(self, into: Tensor, source: Tensor) -> Work:
        if self.stream is None or not (into.is_cuda or source.is_cuda):
            self.finish()  # the stream may still be writing to this host memory
            into.copy_(source)
            return Done()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)
            on_device = source if source.is_cuda else into
            on_device.record_stream(self.stream)  # the allocator does not reuse it before
            event = torch.cuda.Event()
            event.record(self.stream)
        return _CopyWork(event)

    def finish(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def close(self) -> None:
        self.spare.clear()


class _HostSlot:
    def __init__(self, store: HostStore, memory: Tensor) -> None:
        self.store, self.memory, self.size = store, memory, memory.numel()

    def write(self, tensor: Tensor, start: int = 0) -> Work:
        return self.store.copy(self.memory[start : start + tensor.nbytes], flat_bytes(tensor))

    def read(self, into: Tensor, start: int = 0) -> Work:
        return self.store.copy(flat_bytes(into), self.memory[start : start + into.nbytes])

    def free(self) -> None:
        self.store.used -= self.size
        self.store.spare[self.size].append(self.memory)  # pinning anew takes long


class DiskStore:
    """A file without a name, read and written by a thread. [Note: a file without a name]"""

    def __init__(self, device: torch.device, folder: str | Path | None = None) -> None:
        self.device = device
        try:
            self.file = tempfile.TemporaryFile(dir=folder, prefix="gems-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise GemsError(
                f"cannot make a file for offloaded memory in {folder or tempfile.gettempdir()}: "
                f"{error}. Give another folder"
            ) from error
        self.worker = ThreadPoolExecutor(1, "gems-disk")
        self.spare: dict[int, list[int]] = defaultdict(list)
        self.end = self.used = 0

    def slot(self, size: int) -> Slot:
        spare = self.spare[size]
        at = spare.pop() if spare else self.end
        if at == self.end:
            self.end += size
        self.used += size
        return _DiskSlot(self, at, size)

    def begin(self, work: Callable[[Tensor, int], None], memory: Tensor, at: int) -> Work:
        """Have the thread do it; on a GPU after all kernels that were launched so far, which may
        still use the memory."""
        event = torch.cuda.Event() if memory.is_cuda else None
        if event is not None:
            event.record(torch.cuda.current_stream(self.device))

        def after_event() -> None:
            if event is not None:
                event.synchronize()
            work(memory, at)

        return _FileWork(self.worker.submit(after_event))

    def finish(self) -> None:
        self.worker.submit(lambda: None).result()

    def close(self) -> None:
        self.worker.shutdown(wait=True)
        self.file.close()


class _FileWork:
    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


class _DiskSlot:
    def __init__(self, store: DiskStore, at: int, size: int) -> None:
        self.store, self.at, self.size = store, at, size
        self.memory = None

    def write(self, tensor: Tensor, start: int = 0) -> Work:
        return self.store.begin(self._write, flat_bytes(tensor), self.at + start)

    def read(self, into: Tensor, start: int = 0) -> Work:
        return self.store.begin(self._read, flat_bytes(into), self.at + start)

    def free(self) -> None:
        self.store.used -= self.size
        self.store.spare[self.size].append(self.at)

    def _write(self, memory: Tensor, at: int) -> None:
        here = memory.cpu()
        left = _view(here)
        while left:
            try:
                done = os.pwrite(self.store.file.fileno(), left, at)
            except OSError as error:
                raise GemsError(
                    f"cannot offload {self.size:,} bytes to disk: {error}. Give a folder with more "
                    "free space"
                ) from error
            left, at = left[done:], at + done

    def _read(self, memory: Tensor, at: int) -> None:
        here = (
            memory if memory.device.type == "cpu" else torch.empty(len(memory), dtype=torch.uint8)
        )
        left = _view(here)
        while left:
            done = os.preadv(self.store.file.fileno(), [left], at)
            if not done:
                raise GemsError(f"{len(left):,} bytes that were offloaded to disk are missing")
            left, at = left[done:], at + done
        if here is not memory:
            memory.copy_(here)  # synchronous: `here` is not pinned
