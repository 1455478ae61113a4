"""Ranks as processes, over torch.distributed: gloo on CPUs, NCCL on GPUs.

gloo pairs messages by tag, so both ends of a link count its messages. NCCL pairs them by order,
per communicator; each direction of a link gets a communicator, hence a stream, of its own, so that
a receive that waits never stands in front of a send. (NCCL was never run where this was written.)

[Note: how a failure spreads] gloo ends what waits for a peer as soon as the connection to that peer
closes. It has no way to close one early, and a process that ends waits for its own sums first: two
ranks, one in a sum and ending, the other expecting a message, would wait for each other until the
timeout. So we talk over groups of our own, know their connections, and shut them down when this
rank fails or has lost another. That ends its own sums, and the next rank notices within
milliseconds, and does the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gems.errors import PeerError
from gems.transport.core import Done, Handle, Link, own_part
from gems.transport.sockets import hang_up, open_sockets

# As torch calls them since 2.13, or did before.
GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
TAGS = 1 << 20  # per channel
SAME = "All ranks must be given the same model, sample and plan"
Lost = Callable[[str, BaseException], PeerError]


class _Work:
    """A torch handle, with an error that names the peer, and what to do once it is through."""

    def __init__(self, work: Any, what: str, lost: Lost, keep: Any, after: Any = None) -> None:
        self.work, self.what, self.lost, self.keep, self.after = work, what, lost, keep, after

    def wait(self) -> None:
        if self.work is None:
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.lost(self.what, error) from error
        self.work = None
        if self.after is not None:
            self.after()
        self.keep = self.after = None


class TorchDist:
    """This process's end of groups over all ranks of the default one, which must be initialised.

    `owner` says that the default group is ours to end as well.
    """

    def __init__(self, timeout: float | None = None, *, owner: bool = False) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.backend = dist.get_backend()
        self.timeout = timedelta(seconds=timeout) if timeout else None
        self.owner = owner
        self.failed: BaseException | None = None
        self.connections: dict[int, str] = {}  # of our groups
        self.counts: dict[Link, int] = defaultdict(int)
        self.everyone = tuple(range(self.world))
        self.groups: dict[tuple[int, ...], Any] = {}
        self.links: dict[Link, Any] = {}
        self.groups[self.everyone] = self._group(self.everyone)
        # Small things (losses, shapes, names) never touch the device.
        gloo = self.backend == "gloo"
        self.host = self.groups[self.everyone] if gloo else self._group(self.everyone, "gloo")

    def _group(self, ranks: Sequence[int], backend: str | None = None) -> Any:
        """A new group, and a note of the connections it opened."""
        before = open_sockets().items()
        try:
            group = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
        except RuntimeError as error:
            raise self._lost(f"rank {self.rank} meeting ranks {_listed(ranks)}", error) from error
        self.connections |= dict(open_sockets().items() - before)
        return group

    def prepare(self, groups: Sequence[tuple[int, ...]], links: Sequence[Link]) -> None:
        # A new group waits for its members without noticing that one died, or failed and is
        # elsewhere: first see that all have come here, to prepare the same.
        mine = (tuple(groups), tuple(links))
        for rank, theirs in enumerate(self.gather(mine)):
            if theirs != mine:
                why = theirs if isinstance(theirs, str) else "came to another plan"
                self.fail(error := PeerError(f"rank {rank} {why}. {SAME}"))
                raise error
        for ranks in sorted(set(groups)):
            if ranks not in self.groups and len(ranks) > 1:
                self.groups[ranks] = self._group(ranks)
        if self.backend == "nccl":
            for link in sorted(set(links)):
                if link not in self.links:
                    self.links[link] = self._group(sorted(link[:2]))

    def send(self, buffer: torch.Tensor, target: int, channel: int = 0) -> Handle:
        link = (self.rank, target, channel)
        group, tag = self._link(link)
        host = self._host(buffer)
        if host is not buffer:
            host.copy_(buffer)
        what = f"sending from rank {self.rank} to rank {target}"
        try:
            return _Work(dist.isend(host, target, group=group, tag=tag), what, self._lost, host)
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def receive(self, buffer: torch.Tensor, source: int, channel: int = 0) -> Handle:
        link = (source, self.rank, channel)
        group, tag = self._link(link)
        host = self._host(buffer)
        after = None if host is buffer else lambda: buffer.copy_(host, non_blocking=True)
        what = f"receiving on rank {self.rank} from rank {source}"
        try:
            work = dist.irecv(host, source, group=group, tag=tag)
            return _Work(work, what, self._lost, host, after)
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def add_up(self, buffer: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        if len(ranks) < 2:
            return Done()
        what = f"summing on rank {self.rank} over ranks {_listed(ranks)}"
        on_host = buffer.device.type == "cpu" and self.backend != "gloo"
        group: Any = self.host if on_host else self.groups[ranks]
        try:
            work = dist.all_reduce(buffer, group=group, async_op=True)
            return _Work(work, what, self._lost, buffer)
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def scatter_sum(self, buffer: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """gloo's own reduce-scatter takes longer than its all-reduce (3 ranks, 12 MB on two busy
        cores: 103 ms and 61 ms), so only NCCL's is used."""
        if len(ranks) < 2 or self.backend != "nccl":
            return self.add_up(buffer, ranks)
        what = f"summing shares on rank {self.rank} over ranks {_listed(ranks)}"
        part = own_part(buffer, self.rank, ranks)
        return self._collective(what, SCATTER, part, buffer, ranks)

    def all_gather(self, buffer: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        if len(ranks) < 2:
            return Done()
        what = f"gathering shares on rank {self.rank} from ranks {_listed(ranks)}"
        host = self._host(buffer)
        if host is not buffer:
            own_part(host, self.rank, ranks).copy_(own_part(buffer, self.rank, ranks))
        after = None if host is buffer else lambda: buffer.copy_(host, non_blocking=True)
        return self._collective(what, GATHER, host, own_part(host, self.rank, ranks), ranks, after)

    def _collective(
        self,
        what: str,
        collective: Any,
        into: torch.Tensor,
        given: torch.Tensor,
        ranks: tuple[int, ...],
        after: Any = None,
    ) -> Handle:
        """One of torch's that read and write parts of the same memory."""
        try:
            work = collective(into, given, group=self.groups[ranks], async_op=True)
            return _Work(work, what, self._lost, (into, given), after)
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Over the host: the buffer must be in its memory."""
        what = f"broadcasting from rank {source} to rank {self.rank}"
        try:
            dist.broadcast(buffer, source, group=self.host)
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def gather(self, thing: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(found, thing, group=self.host)
        except RuntimeError as error:
            raise self._lost(f"gathering on rank {self.rank} from all ranks", error) from error
        return found

    def fail(self, error: BaseException) -> None:
        """Hang up on all ranks, so that none waits for this one. [Note: how a failure spreads]"""
        self.failed = self.failed or error
        hang_up(self.connections)
        self.connections = {}

    def _lost(self, what: str, error: BaseException) -> PeerError:
        """What to raise when a peer cannot be reached: the first failure is the one to tell."""
        if isinstance(self.failed, PeerError):
            return self.failed
        if self.failed is not None:
            why = f"this rank has failed before ({self.failed!r})"
        else:
            why = f"the other process died, was stopped or timed out ({first_line(error)})"
        lost = PeerError(
            f"{what} failed: {why}. Look at the output of the rank that ended first, then start "
            "again from a checkpoint"
        )
        self.fail(lost)
        return lost

    def close(self) -> None:
        self.connections = {}
        if dist.is_initialized():
            groups = {id(g): g for g in (*self.groups.values(), *self.links.values(), self.host)}
            for group in (None,) if self.owner else groups.values():
                dist.destroy_process_group(group)
        self.groups, self.links, self.host = {}, {}, None

    def _link(self, link: Link) -> tuple[Any, int]:
        """The group and the tag of the next message of a link."""
        self.counts[link] += 1
        group = self.links.get(link, self.groups[self.everyone])
        return group, self.counts[link] % TAGS + TAGS * link[2]

    def _host(self, buffer: torch.Tensor) -> torch.Tensor:
        """gloo reads host memory only: a buffer on a device crosses through a pinned one."""
        if buffer.device.type == "cpu" or self.backend != "gloo":
            return buffer
        return torch.empty_like(buffer, device="cpu", pin_memory=True)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def first_line(error: BaseException) -> str:
    """What torch or gloo have to say, without source files and good wishes."""
    said = re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", str(error).strip()).partition("\n")[0]
    return said.partition(". This is typically")[0] or type(error).__name__
