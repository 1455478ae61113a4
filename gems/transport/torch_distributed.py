"""Ranks as processes, over torch.distributed: gloo on CPUs, NCCL on GPUs.

gloo pairs messages by tag, so both ends of a link count its messages. NCCL pairs them by order,
per communicator; each direction of a link gets a communicator, hence a stream, of its own, so that
a receive that waits never stands in front of a send. (NCCL was never run where this was written.)

[Note: how a failure spreads] gloo ends what waits for a peer as soon as the connection to that peer
closes. It has no way to close one early, and a process that ends waits for its own sums first: two
ranks, one in a sum and ending, the other expecting a message, would wait for each other until the
timeout. So we talk over groups of our own, know their connections, and shut them down when this
rank fails or has lost another. That ends its own sums, and the next rank notices within
milliseconds, and does the same. Before it hangs up, a rank writes why on the board that all ranks
read (gems.transport.heartbeat), so that each of them can name the first cause. A rank that is
stopped hangs up on nobody: there the heartbeat's thread notices, and shuts down ours.

Operations have no time limit of their own: how long a rank may take is between it and its user, as
long as it gives signs of life. (NCCL keeps one, because a GPU gives no such signs.)
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gems.errors import PeerError
from gems.transport.board import CLOSED, ENDED, FAILED, LOST, StoreBoard
from gems.transport.encoding import MOST, pack, unpack_all
from gems.transport.heartbeat import AGAIN, Heartbeat
from gems.transport.protocol import Done, Link, Work, own_part
from gems.transport.sockets import hang_up, open_sockets, strangers

# As torch calls them since 2.13, or did before.
GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
TAGS = 1 << 20  # per channel
TIMEOUT = 60.0  # seconds without a sign of life
SETTING_UP = 30.0  # seconds, at least, that ranks get to set up a group once all have come
FOREVER = timedelta(days=30)
NCCL = timedelta(minutes=30)
SAME = "All ranks must be given the same model, sample and plan"
OnLoss = Callable[[str, BaseException], PeerError]
_numbers = itertools.count()


def setting_up(timeout: float) -> timedelta:
    return timedelta(seconds=max(timeout, SETTING_UP))


def next_name() -> str:
    """Of a board: all ranks make them in the same order."""
    return f"gems/{next(_numbers)}"


def default_heartbeat(timeout: float) -> Heartbeat | None:
    """Over the store of the default group; None for a rank that is alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    own = store.clone() if hasattr(store, "clone") else store  # torch 2.6 has none for all stores
    board = StoreBoard(own, next_name(), rank, world)
    return Heartbeat(board, rank, world, timeout, "the store of the process group")


class _Work:
    """A torch handle, with an error that names the peer, and what to do once it is through."""

    def __init__(self, work: Any, what: str, lost: OnLoss, keep: Any, after: Any = None) -> None:
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

    A rank that gives no sign of life for `timeout` seconds is lost. `heartbeat` may have begun
    before; `leave` is called when this transport is closed and has left the default group. A group
    with a backend for each kind of device (`init_process_group()`) needs to be told which is used.
    """

    def __init__(
        self,
        timeout: float = TIMEOUT,
        *,
        heartbeat: Heartbeat | None = None,
        leave: Callable[[], None] | None = None,
        backend: str | None = None,
    ) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.backend = backend or dist.get_backend()
        self.timeout = timeout
        self.leave = leave
        self.failed: BaseException | None = None
        self.closed = False
        self.failing = threading.Lock()
        self.heartbeat = heartbeat or default_heartbeat(timeout)
        self.pid = os.getpid()
        atexit.register(self._at_exit)
        self.connections: dict[int, str] = {}  # of our groups
        self.counts: dict[Link, int] = defaultdict(int)
        self.everyone = tuple(range(self.world))
        self.groups: dict[tuple[int, ...], Any] = {}
        self.links: dict[Link, Any] = {}
        self.groups[self.everyone] = self._group(self.everyone)
        # Small things (losses, shapes, names) never touch the device.
        gloo = self.backend == "gloo"
        self.host = self.groups[self.everyone] if gloo else self._group(self.everyone, "gloo")
        if self.heartbeat is not None:
            self.heartbeat.on_loss(self.fail)

    def _group(self, ranks: Sequence[int], backend: str | None = None) -> Any:
        """A new group, and a note of the connections it opened."""
        before = open_sockets().items()
        try:
            wait, backend = setting_up(self.timeout), backend or self.backend
            group = dist.new_group(list(ranks), timeout=wait, backend=backend)
        except RuntimeError as error:
            raise self._lost(
                f"rank {self.rank} in rendezvous with ranks {_listed(ranks)}", error
            ) from error
        if isinstance(group, dist.ProcessGroup):  # else this rank is not in it
            limit = NCCL if backend == "nccl" else FOREVER
            dist.distributed_c10d._set_pg_timeout(limit, group)
        opened = dict(open_sockets().items() - before)
        self.connections |= opened
        if users := strangers(opened):
            self.fail(
                error := PeerError(
                    f"rank {self.rank} was to be connected to ranks {_listed(ranks)}, but a "
                    f"process of user {min(users)} is at the other end of a connection, and this "
                    f"run is user {os.geteuid()}'s. Somebody else on this node may want to get in"
                )
            )
            raise error
        return group

    def prepare(self, groups: Sequence[tuple[int, ...]], links: Sequence[Link]) -> None:
        # A new group waits for its members without noticing that one died, or failed and is
        # elsewhere: first see that all have come here, to prepare the same.
        mine = (tuple(groups), tuple(links))
        for rank, theirs in enumerate(self.all_gather_object(mine)):
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

    def isend(self, buffer: torch.Tensor, target: int, channel: int = 0) -> Work:
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

    def irecv(self, buffer: torch.Tensor, source: int, channel: int = 0) -> Work:
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

    def all_reduce(self, buffer: torch.Tensor, ranks: tuple[int, ...]) -> Work:
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

    def reduce_scatter(self, buffer: torch.Tensor, ranks: tuple[int, ...]) -> Work:
        """gloo's own reduce-scatter takes longer than its all-reduce (3 ranks, 12 MB on two busy
        cores: 103 ms and 61 ms), so only NCCL's is used."""
        if len(ranks) < 2 or self.backend != "nccl":
            return self.all_reduce(buffer, ranks)
        what = f"summing shares on rank {self.rank} over ranks {_listed(ranks)}"
        part = own_part(buffer, self.rank, ranks)
        return self._collective(what, SCATTER, part, buffer, ranks)

    def all_gather(self, buffer: torch.Tensor, ranks: tuple[int, ...]) -> Work:
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
    ) -> Work:
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

    def all_gather_object(self, thing: Any) -> list[Any]:
        if self.world == 1:
            return [thing]
        try:
            return unpack_all(self._gathered(pack(thing)))
        except PeerError as error:  # nothing after that can be trusted
            self.fail(error)
            raise
        except RuntimeError as error:
            raise self._lost(f"gathering on rank {self.rank} from all ranks", error) from error

    def _gathered(self, mine: bytes) -> list[bytes]:
        """The bytes of every rank, which may be of different lengths."""
        sizes = torch.zeros(self.world, dtype=torch.int64)
        GATHER(sizes, torch.tensor([len(mine)]), group=self.host)
        lengths = sizes.tolist()
        if bad := [rank for rank, n in enumerate(lengths) if not 0 < n <= MOST]:
            raise PeerError(
                f"rank {bad[0]} announced {lengths[bad[0]]} bytes; a rank tells at most {MOST}"
            )
        own = torch.zeros(max(lengths), dtype=torch.uint8)
        own[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        every = torch.empty(self.world * len(own), dtype=torch.uint8)
        GATHER(every, own, group=self.host)
        rows = every.numpy().reshape(self.world, len(own))
        return [row[:n].tobytes() for row, n in zip(rows, lengths, strict=True)]

    def fail(self, error: BaseException) -> None:
        """Hang up on all ranks, so that none waits for this one. [Note: how a failure spreads]

        The heartbeat's thread may call it, too.
        """
        with self.failing:
            first, self.failed = self.failed is None, self.failed or error
        if first and self.heartbeat is not None:
            why = (error.cause or str(error)) if isinstance(error, PeerError) else _short(error)
            self.heartbeat.tell(LOST if isinstance(error, PeerError) else FAILED, why)
        self._hang_up()

    def _hang_up(self) -> None:
        connections, self.connections = self.connections, {}
        hang_up(connections)
        if self.backend == "nccl":
            for group in self._own_groups():
                with contextlib.suppress(Exception):  # it is lost anyway
                    getattr(group, "abort", _nothing)()

    def _own_groups(self) -> list[Any]:
        groups = (*self.groups.values(), *self.links.values(), self.host)
        return list({id(g): g for g in groups if isinstance(g, dist.ProcessGroup)}.values())

    def _lost(self, what: str, error: BaseException) -> PeerError:
        """What to raise when a peer cannot be reached: the first failure is the one to tell."""
        if isinstance(self.failed, PeerError):
            return self.failed
        if self.failed is not None:
            why = f"this rank has failed before ({self.failed!r})"
        elif self.closed:
            why = "this rank has closed its trainer"
        else:
            why = self.heartbeat.cause() if self.heartbeat is not None else None
            if isinstance(self.failed, PeerError):  # the heartbeat was first
                return self.failed
            why = why or f"the other process died, was stopped or timed out ({first_line(error)})"
        lost = PeerError(
            f"{what} failed: {why}. Look at the output of the rank that ended first, then {AGAIN}"
        )
        lost.cause = why
        self.fail(lost)
        return lost

    def close(self) -> None:
        """Leave the other ranks; those that still need this one are told that it has gone."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self._at_exit)
        if self.heartbeat is not None:
            self.heartbeat.end(CLOSED)
        if dist.is_initialized():
            for group in self._own_groups():
                with contextlib.suppress(ValueError):  # its owner has ended the default group
                    dist.destroy_process_group(group)
        self.groups, self.links, self.host = {}, {}, None
        if self.failed is not None:  # else ending the groups has closed their connections
            self._hang_up()
        if self.leave is not None:
            self.leave()

    def _at_exit(self) -> None:
        """This process ends without having closed the transport; others may wait for it."""
        if os.getpid() != self.pid or self.closed:  # a fork is not the rank
            return
        if self.heartbeat is not None:
            raised = getattr(sys, "last_value", None)
            self.heartbeat.end(ENDED, "" if raised is None else _short(raised))
        self._hang_up()

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


def _nothing() -> None:
    return None


def _short(error: BaseException) -> str:
    """Type and first line, as others are told of it."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def first_line(error: BaseException) -> str:
    """The first line of an error of torch or gloo, without source files and advice."""
    line = re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", str(error).strip()).partition("\n")[0]
    return line.partition(". This is typically")[0] or type(error).__name__
