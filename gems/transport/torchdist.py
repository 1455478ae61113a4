"""Ranks as processes, over torch.distributed: gloo on CPUs, NCCL on GPUs.

gloo pairs messages by tag, so both ends of a link count its messages. NCCL pairs them by order,
per communicator; each direction of a link gets a communicator, hence a stream, of its own, so that
a receive that waits never stands in front of a send. (NCCL was never run where this was written.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gems.errors import PeerError
from gems.transport.core import Done, Handle


class _Work:
    """A torch handle, with an error that names the peer, and what to do once it is through."""

    def __init__(self, work: Any, what: str, keep: Any, after: Any = None) -> None:
        self.work, self.what, self.keep, self.after = work, what, keep, after

    def wait(self) -> None:
        if self.work is None:
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _lost(self.what, error) from error
        self.work = None
        if self.after is not None:
            self.after()
        self.keep = self.after = None


def _lost(what: str, error: BaseException) -> PeerError:
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return PeerError(
        f"{what} failed: the other process died, was stopped or timed out ({line}). "
        "Look at the output of the rank that ended first, then start again from a checkpoint"
    )


class TorchDist:
    """This process's end of the default process group, which must be initialised."""

    def __init__(self, timeout: float | None = None) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.backend = dist.get_backend()
        self.timeout = timedelta(seconds=timeout) if timeout else None
        self.counts: dict[tuple[int, int], int] = defaultdict(int)
        self.groups: dict[tuple[int, ...], Any] = {tuple(range(self.world)): dist.group.WORLD}
        self.links: dict[tuple[int, int], Any] = {}
        # Small things (losses, shapes, names) never touch the device.
        gloo = self.backend == "gloo"
        self.host: Any = dist.group.WORLD if gloo else dist.new_group(backend="gloo")

    def prepare(self, groups: Sequence[tuple[int, ...]], links: Sequence[tuple[int, int]]) -> None:
        for ranks in sorted(set(groups)):
            if ranks not in self.groups and len(ranks) > 1:
                self.groups[ranks] = dist.new_group(list(ranks), timeout=self.timeout)
        if self.backend == "nccl":
            for link in sorted(set(links)):
                if link not in self.links:
                    self.links[link] = dist.new_group(sorted(link), timeout=self.timeout)

    def send(self, buffer: torch.Tensor, target: int) -> Handle:
        link = (self.rank, target)
        group, tag = self.links.get(link), self._tag(link)
        host = self._host(buffer)
        if host is not buffer:
            host.copy_(buffer)
        what = f"sending from rank {self.rank} to rank {target}"
        try:
            return _Work(dist.isend(host, target, group=group, tag=tag), what, host)
        except RuntimeError as error:
            raise _lost(what, error) from error

    def receive(self, buffer: torch.Tensor, source: int) -> Handle:
        link = (source, self.rank)
        group, tag = self.links.get(link), self._tag(link)
        host = self._host(buffer)
        after = None if host is buffer else lambda: buffer.copy_(host, non_blocking=True)
        what = f"receiving on rank {self.rank} from rank {source}"
        try:
            return _Work(dist.irecv(host, source, group=group, tag=tag), what, host, after)
        except RuntimeError as error:
            raise _lost(what, error) from error

    def add_up(self, buffer: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        if len(ranks) < 2:
            return Done()
        what = f"summing on rank {self.rank} over ranks {', '.join(map(str, ranks))}"
        on_host = buffer.device.type == "cpu" and self.backend != "gloo"
        group: Any = self.host if on_host else self.groups[ranks]
        try:
            return _Work(dist.all_reduce(buffer, group=group, async_op=True), what, buffer)
        except RuntimeError as error:
            raise _lost(what, error) from error

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Over the host: the buffer must be in its memory."""
        try:
            dist.broadcast(buffer, source, group=self.host)
        except RuntimeError as error:
            raise _lost(f"broadcasting from rank {source} to rank {self.rank}", error) from error

    def gather(self, thing: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(found, thing, group=self.host)
        except RuntimeError as error:
            raise _lost(f"gathering on rank {self.rank} from all ranks", error) from error
        return found

    def fail(self, error: BaseException) -> None:
        """Nothing to say: this process is about to end, and its closed connections say it all."""

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _tag(self, link: tuple[int, int]) -> int:
        self.counts[link] += 1
        return self.counts[link] % (1 << 20)

    def _host(self, buffer: torch.Tensor) -> torch.Tensor:
        """gloo reads host memory only: a buffer on a device crosses through a pinned one."""
        if buffer.device.type == "cpu" or self.backend != "gloo":
            return buffer
        return torch.empty_like(buffer, device="cpu", pin_memory=True)
