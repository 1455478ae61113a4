"""Stores for offloaded memory, on the host or on disk; each tensor is a slot of a store.

Copies overlap with compute: on a GPU they run on two streams of their own, to pinned memory and
back; on disk a thread reads and writes. Calls return a `Work`; the tensor must stay as it is until
it was waited for. The operations of a slot run in the order in which they were called.

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
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import torch

from gems.errors import GemsError
from gems.torch.offload.arena import Arena, Span
from gems.torch.offload.worker import worker
from gems.torch.tensors.strides import as_bytes
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
        """Let another slot have the space. All calls must have been waited for."""
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
    return as_bytes(tensor)


def _view(memory: Tensor) -> memoryview:
    """A host tensor's bytes, for as long as it lives. After `numpy()` its storage could not be
    resized any more."""
    here = ctypes.c_char * len(memory)
    return memoryview(here.from_address(memory.data_ptr())).cast("B") if len(memory) else EMPTY


class _CopyWork:
    """A copy on a CUDA stream of the store. The current stream waits for it, not the host; until
    then it has the device's tensor, so that its memory is not reused."""

    def __init__(self, event: torch.cuda.Event, tensor: Tensor) -> None:
        self.event, self.tensor = event, tensor
        self.device = tensor.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)
        del self.tensor


class HostStore:
    """Host memory; pinned, if the device is a GPU. Copies there and back have a stream each, so
    that one direction does not wait for the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = device.type == "cuda"
        self.out, self.back = (torch.cuda.Stream(device) if self.gpu else None for _ in range(2))
        self.arena = Arena(pinned=self.gpu)
        self.used = 0

    def slot(self, size: int) -> Slot:
        self.used += size
        return _HostSlot(self, *self.arena.take(size), size)

    def finish(self) -> None:
        for stream in (self.out, self.back):
            if stream is not None and not stream.query():
                stream.synchronize()

    def close(self) -> None:
        self.arena = Arena(pinned=self.gpu)


class _HostSlot:
    """Its copies run in order, although on two streams: each waits for the one before."""

    def __init__(self, store: HostStore, span: Span, memory: Tensor, size: int) -> None:
        self.store, self.span, self.memory, self.size = store, span, memory, size
        self.last: torch.cuda.Event | None = None  # copy

    def write(self, tensor: Tensor, start: int = 0) -> Work:
        host, given = self.memory[start : start + tensor.nbytes], flat_bytes(tensor)
        return self._copy(host, given, given, self.store.out)

    def read(self, into: Tensor, start: int = 0) -> Work:
        host, given = self.memory[start : start + into.nbytes], flat_bytes(into)
        return self._copy(given, host, given, self.store.back)

    def _copy(
        self, into: Tensor, source: Tensor, given: Tensor, stream: torch.cuda.Stream | None
    ) -> Work:
        if stream is None or not given.is_cuda:
            self.store.finish()  # a stream may still be writing to this host memory
            into.copy_(source)
            return Done()
        stream.wait_stream(torch.cuda.current_stream(self.store.device))
        if self.last is not None:
            stream.wait_event(self.last)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        self.last = torch.cuda.Event()
        self.last.record(stream)
        return _CopyWork(self.last, given)

    def free(self) -> None:
        self.store.used -= self.size
        self.store.arena.give(self.span)


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
        self.worker = worker("gems-disk", device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
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
        still use the memory, and on a stream of its own, beside those that are launched later."""
        event = torch.cuda.Event() if memory.is_cuda else None
        if event is not None:
            event.record(torch.cuda.current_stream(self.device))

        def after_event() -> None:
            if event is not None:
                event.synchronize()
            with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
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
