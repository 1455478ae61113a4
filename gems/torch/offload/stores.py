"""Memory that is put away, on the host or on disk, and fetched again: each a slot of a store.

Both ways run beside the compute: on a GPU copies go over a stream of their own, to and from pinned
memory; on disk a thread reads and writes. Whoever asks gets a handle, and must keep the tensor as
it is until the handle was waited for. What a slot is told first, it does first.

    slot = store.slot(tensor.nbytes)
    slot.write(tensor).wait()        the bytes are there, and the tensor may go
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
    """So many bytes of a store."""

    size: int

    @property
    def memory(self) -> Tensor | None:
        """Its bytes, where they are memory of the host."""
        ...

    def write(self, tensor: Tensor, start: int = 0) -> Work:
        """Take a tensor's bytes, from byte `start` of the slot on."""
        ...

    def read(self, into: Tensor, start: int = 0) -> Work:
        """Give the bytes that were written last, from byte `start` on."""
        ...

    def free(self) -> None:
        """Somebody else may have the room."""
        ...


class Store(Protocol):
    def slot(self, size: int) -> Slot: ...

    def finish(self) -> None:
        """Wait until all that was asked for is done, and the host may look at it."""
        ...

    def close(self) -> None: ...

    @property
    def used(self) -> int:
        """Bytes of all slots that were not freed."""
        ...


def store(place: str, device: torch.device, folder: str | Path | None = None) -> Store:
    """What is put away from a device: to the `host`, or on `disk`, in a folder for such files."""
    return Host(device) if place == "host" else Disk(device, folder)


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as bytes."""
    assert tensor.is_contiguous(), "only memory in one piece is put away"
    return tensor.detach().view(-1).view(torch.uint8)


def _view(memory: Tensor) -> memoryview:
    """A host tensor's bytes, for as long as it lives. By `numpy()` its memory could never be given
    back again."""
    here = ctypes.c_char * len(memory)
    return memoryview(here.from_address(memory.data_ptr())).cast("B") if len(memory) else EMPTY


class _Copied:
    """A copy on a GPU's other stream: the stream that goes on with the tensor waits, not we."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class Host:
    """Pinned memory of the host; for a rank that computes on the host itself, other memory."""

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
            self.finish()  # of memory on the host the stream may still be writing
            into.copy_(source)
            return Done()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)
            on_device = source if source.is_cuda else into
            on_device.record_stream(self.stream)  # its memory is not given away before
            event = torch.cuda.Event()
            event.record(self.stream)
        return _Copied(event)

    def finish(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def close(self) -> None:
        self.spare.clear()


class _HostSlot:
    def __init__(self, home: Host, memory: Tensor) -> None:
        self.home, self.memory, self.size = home, memory, memory.numel()

    def write(self, tensor: Tensor, start: int = 0) -> Work:
        return self.home.copy(self.memory[start : start + tensor.nbytes], flat_bytes(tensor))

    def read(self, into: Tensor, start: int = 0) -> Work:
        return self.home.copy(flat_bytes(into), self.memory[start : start + into.nbytes])

    def free(self) -> None:
        self.home.used -= self.size
        self.home.spare[self.size].append(self.memory)  # pinning anew takes long


class Disk:
    """A file without a name, read and written by a thread. [Note: a file without a name]"""

    def __init__(self, device: torch.device, folder: str | Path | None = None) -> None:
        self.device = device
        try:
            self.file = tempfile.TemporaryFile(dir=folder, prefix="gems-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise GemsError(
                f"no file can be made in {folder or tempfile.gettempdir()} to put memory away: "
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
        """Have the thread do it, on a GPU after all that is asked of the device so far: whoever
        wrote the memory, or had it before, must be through with it."""
        event = torch.cuda.Event() if memory.is_cuda else None
        if event is not None:
            event.record(torch.cuda.current_stream(self.device))

        def in_turn() -> None:
            if event is not None:
                event.synchronize()
            work(memory, at)

        return _Written(self.worker.submit(in_turn))

    def finish(self) -> None:
        self.worker.submit(lambda: None).result()

    def close(self) -> None:
        self.worker.shutdown(wait=True)
        self.file.close()


class _Written:
    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


class _DiskSlot:
    def __init__(self, home: Disk, at: int, size: int) -> None:
        self.home, self.at, self.size = home, at, size
        self.memory = None

    def write(self, tensor: Tensor, start: int = 0) -> Work:
        return self.home.begin(self._write, flat_bytes(tensor), self.at + start)

    def read(self, into: Tensor, start: int = 0) -> Work:
        return self.home.begin(self._read, flat_bytes(into), self.at + start)

    def free(self) -> None:
        self.home.used -= self.size
        self.home.spare[self.size].append(self.at)

    def _write(self, memory: Tensor, at: int) -> None:
        here = memory.cpu()
        left = _view(here)
        while left:
            try:
                done = os.pwrite(self.home.file.fileno(), left, at)
            except OSError as error:
                raise GemsError(
                    f"{self.size:,} bytes could not be put away on disk: {error}. Give a folder "
                    "with more room"
                ) from error
            left, at = left[done:], at + done

    def _read(self, memory: Tensor, at: int) -> None:
        here = (
            memory if memory.device.type == "cpu" else torch.empty(len(memory), dtype=torch.uint8)
        )
        left = _view(here)
        while left:
            done = os.preadv(self.home.file.fileno(), [left], at)
            if not done:
                raise GemsError(f"{len(left):,} bytes that were put away on disk are not there")
            left, at = left[done:], at + done
        if here is not memory:
            memory.copy_(here)  # from memory that is not pinned: it is there when this returns
