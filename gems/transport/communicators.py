"""The process groups of one rank, by what they are for: made in one order, used once, aborted.

gloo pairs messages by tag, so that one group of all ranks carries those of every link and exchange.
NCCL pairs operations by their order on a communicator, and runs those of one communicator one after
the other. So each use has its own:

    links[a, b]       messages from rank a to rank b, between stages: one per direction, so that a
                      receive that waits never stands in front of a send
    exchanges[ranks]  halos and statistics of a spatial group, which all of its ranks issue in one
                      order
    groups[ranks]     sums of gradients, gathers of weights: never behind an exchange

Small things that stay on the host (losses, shapes, names) use a gloo group of all ranks. There is
none of fewer: where the default group is bound to a device, making one deadlocks
(pytorch#145376), so the few sums of that kind are messages.

[Note: the first use of a communicator] torch makes an NCCL communicator, and NCCL its connections,
at first use, and that blocks the host until the other ranks have come, too (pytorch#136248). A
schedule assumes that beginning an operation never blocks: two ranks that come to two new
communicators in different order would wait for each other for ever. So each is used as soon as it
is made, and all ranks go through them in the same sorted order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gems.errors import GemsError, PeerError
from gems.transport.protocol import Exchanges, Link
from gems.transport.sockets import open_sockets, strangers

SETTING_UP = 30.0  # seconds, at least, that ranks get to set up a group once all have come
FOREVER = timedelta(days=30)
NCCL = timedelta(minutes=30)
Ranks = tuple[int, ...]


def setting_up(timeout: float) -> timedelta:
    return timedelta(seconds=max(timeout, SETTING_UP))


class Communicators:
    """Made once per use. `lost` gives what to raise when one cannot be made."""

    def __init__(
        self,
        rank: int,
        world: int,
        backend: str,
        timeout: float,
        lost: Callable[[str, BaseException], PeerError],
    ) -> None:
        self.rank, self.backend, self.timeout, self.lost = rank, backend, timeout, lost
        self.everyone = tuple(range(world))
        self.connections: dict[int, str] = {}  # of our groups
        self.groups: dict[Ranks, Any] = {}
        self.exchanges: dict[Ranks, Any] = {}
        self.links: dict[Link, Any] = {}
        self.host: Any = None

    def open(self) -> None:
        """Make the groups of all ranks."""
        self.host = self._make(self.everyone, "gloo")
        if self.backend != "nccl":
            gloo = self.backend == "gloo"
            self.groups[self.everyone] = self.host if gloo else self._make(self.everyone)

    def _make(self, ranks: Sequence[int], backend: str | None = None) -> Any:
        """A new group, and a note of the connections it opened."""
        before = open_sockets().items()
        wait, backend = setting_up(self.timeout), backend or self.backend
        try:
            group = dist.new_group(list(ranks), timeout=wait, backend=backend)
        except RuntimeError as error:
            raise self.lost(
                f"rank {self.rank} in rendezvous with ranks {listed(ranks)}", error
            ) from error
        if isinstance(group, dist.ProcessGroup):  # else this rank is not in it
            limit = NCCL if backend == "nccl" else FOREVER
            dist.distributed_c10d._set_pg_timeout(limit, group)
        opened = dict(open_sockets().items() - before)
        self.connections.update(opened)
        if users := strangers(opened):
            raise PeerError(
                f"rank {self.rank} was to be connected to ranks {listed(ranks)}, but a "
                f"process of user {min(users)} is at the other end of a connection, and this "
                f"run is user {os.geteuid()}'s. Somebody else on this node may want to get in"
            )
        return group

    # --- set up -----------------------------------------------------------------------------------

    def prepare(self, groups: Iterable[Ranks], links: Iterable[Link], exchanges: Exchanges) -> None:
        """Make those that are new; all ranks must call it with the same."""
        nccl = self.backend == "nccl"
        wanted = {ranks for ranks in groups if len(ranks) > 1}
        made = self._make_all(self.groups, wanted)
        exchanging = self._make_all(self.exchanges, exchanges if nccl else ())
        linked = self._make_all(self.links, links if nccl else ())
        if nccl:
            try:
                self._warm_up(linked, [*made, *exchanging], exchanging, exchanges)
            except RuntimeError as error:
                what = f"the first use of communicators on rank {self.rank}"
                raise self.lost(what, error) from error

    def _make_all(self, known: dict[Ranks, Any], wanted: Iterable[Ranks]) -> list[Any]:
        """Those of `wanted` that are not `known`, made in sorted order: key and group."""
        new = sorted(set(wanted) - known.keys())
        for key in new:
            known[key] = self._make(key if known is not self.links else sorted(key))
        return [(key, known[key]) for key in new]

    def _warm_up(
        self,
        links: Sequence[tuple[Link, Any]],
        groups: Sequence[tuple[Ranks, Any]],
        exchanging: Sequence[tuple[Ranks, Any]],
        neighbours: Exchanges,
    ) -> None:
        """One number over everything that is new. [Note: the first use of a communicator]"""
        device = _device()
        number = torch.zeros(1, device=device)
        for (source, target), group in links:
            if self.rank == source:
                _end(dist.isend(number, target, group=group))
            elif self.rank == target:
                _end(dist.irecv(torch.zeros_like(number), source, group=group))
        for ranks, group in groups:
            if self.rank in ranks:
                _end(dist.all_reduce(torch.zeros_like(number), group=group, async_op=True))
        for ranks, group in exchanging:
            pairs = sorted(pair for pair in set(neighbours[ranks]) if self.rank in pair)
            sends = [(number, target) for source, target in pairs if source == self.rank]
            receives = [
                (torch.zeros_like(number), source)
                for source, target in pairs
                if target == self.rank
            ]
            for work in batch(sends, receives, group):
                _end(work)
        if device.type != "cpu":
            torch.cuda.synchronize(device)

    # --- look up ----------------------------------------------------------------------------------

    def find(self, known: dict[Any, Any], key: Ranks, what: str) -> Any:
        if key not in known:
            raise GemsError(
                f"{what}: there is no communicator of ranks {listed(key)} for it, and making one "
                "now could hang; name these ranks in prepare(), on all ranks"
            )
        return known[key]

    def own(self) -> list[Any]:
        """The groups that this rank is in."""
        tables = (self.groups, self.exchanges, self.links)
        groups = [self.host, *(group for table in tables for group in table.values())]
        return list({id(g): g for g in groups if isinstance(g, dist.ProcessGroup)}.values())

    # --- end --------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End what NCCL runs, so that whoever waits for it returns. It may take for ever."""
        groups = [group for group in self.own() if group is not self.host]
        if self.backend != "nccl" or not groups:
            return
        # Aborts of several communicators may wait for each other (pytorch#119797) unless NCCL is
        # told of all of them at once.
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(Exception):
                nccl = groups[0]._get_backend(torch.device("cuda"))
                nccl._group_start()
                stack.callback(nccl._group_end)
            for group in groups:
                with contextlib.suppress(Exception):  # it is lost anyway
                    group.abort()

    def destroy(self) -> None:
        if dist.is_initialized():
            for group in self.own():
                with contextlib.suppress(ValueError):  # its owner has ended the default group
                    dist.destroy_process_group(group)
        self.groups, self.exchanges, self.links, self.host = {}, {}, {}, None


def batch(
    sends: Sequence[tuple[torch.Tensor, int]],
    receives: Sequence[tuple[torch.Tensor, int]],
    group: Any,
) -> list[Any]:
    """All of these messages as one operation on the communicator of the group."""
    operations = [dist.P2POp(dist.irecv, buffer, source, group) for buffer, source in receives]
    operations += [dist.P2POp(dist.isend, buffer, target, group) for buffer, target in sends]
    return dist.batch_isend_irecv(operations) if operations else []


def _end(work: Any) -> None:
    work.wait()


def bound(backend: str) -> dict[str, Any]:
    """What `init_process_group` is given besides: communicators of a group that is bound to this
    rank's device are made when the group is, not at their first use."""
    return {"device_id": _device()} if backend == "nccl" else {}


def on_host(buffer: Any) -> bool:
    """Tensors tell their device; arrays of numpy are always there."""
    return not isinstance(buffer, torch.Tensor) or buffer.device.type == "cpu"


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
