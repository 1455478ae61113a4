"""torch.distributed as it is over NCCL, with threads for ranks and tensors of the CPU. Not a test.

What it has of NCCL: operations on one communicator run one after the other, in the order in which a
rank issued them, and pair up with those of the other ranks by that order; the first use of a
communicator, or of the connection between two of its ranks, blocks the host until the others come.
Unlike on a GPU, `wait` blocks the host. When no rank can go on, all of them raise at once.

What is on the host there is told by its type: sums of float64 and int64. Models must be of float32.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from gems.errors import PeerError
from gems.torch import lifetime
from gems.transport import communicators, torch_distributed
from gems.transport.torch_distributed import TorchDist

Tensor = torch.Tensor
Key = tuple[Any, ...]


@dataclass
class Op:
    """One launch: a collective, or messages by peer."""

    name: str
    rank: int
    given: Tensor | None = None
    into: Tensor | None = None
    sends: dict[int, Tensor] = field(default_factory=dict)
    receives: dict[int, Tensor] = field(default_factory=dict)
    done: bool = False
    aborted: bool = False


class Group:
    """One rank's handle of a process group."""

    def __init__(self, fabric: Fabric, number: int, ranks: tuple[int, ...], nccl: bool, me: int):
        self.fabric, self.number, self.ranks, self.nccl, self.me = fabric, number, ranks, nccl, me

    def abort(self) -> None:
        self.fabric.abort(self)


class Work:
    def __init__(self, fabric: Fabric, op: Op) -> None:
        self.fabric, self.op = fabric, op

    def wait(self) -> None:
        self.fabric.wait(self.op.rank, lambda: self.op.done, f"an operation {self.op.name}")
        if self.op.aborted:
            raise RuntimeError(f"{self.op.name}: the communicator was aborted")


class Store:
    """A torch store in memory."""

    def __init__(self) -> None:
        self.lines: dict[str, bytes] = {}

    def set(self, key: str, line: str) -> None:
        self.lines[key] = line.encode()

    def get(self, key: str) -> bytes:
        return self.lines[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.lines for key in keys)

    def has_extended_api(self) -> bool:
        return False


class Fabric:
    """What the ranks share. `alone`: the other ranks are no threads of this process, and never
    come. `deaf`: an abort never returns, and ends nothing."""

    def __init__(self, world: int, *, alone: bool = False, deaf: bool = False) -> None:
        self.world, self.store = world, Store()
        self.alone, self.deaf = alone, deaf
        self.changed = threading.Condition()
        self.here = threading.local()
        self.made: list[tuple[tuple[int, ...], str]] = []  # groups, in order
        self.count = Counter[int]()  # groups that each rank has asked for
        self.queues: dict[Key, dict[int, deque[Op]]] = defaultdict(lambda: defaultdict(deque))
        self.used: dict[Key, set[int]] = defaultdict(set)  # by the ranks that came
        self.mail: dict[Key, deque[Tensor]] = defaultdict(deque)
        self.launches = Counter[int]()
        self.waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self.ended: set[int] = set()
        self.hung = ""

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        with self.changed:
            self.waiting[rank] = (ready, what)
            self._look()
            self.changed.wait_for(lambda: ready() or self.hung)
            self.waiting.pop(rank, None)
            if not ready():
                raise RuntimeError(self.hung)

    def end(self, rank: int) -> None:
        with self.changed:
            self.ended.add(rank)
            self._look()

    def _look(self) -> None:
        """Whether no rank will ever go on."""
        alive = set(range(self.world)) - self.ended
        if (
            not self.alone
            and alive
            and alive == set(self.waiting)
            and not any(r() for r, _ in self.waiting.values())
        ):
            rows = [f"rank {rank} waits for {what}" for rank, (_, what) in self.waiting.items()]
            self.hung = "hang: " + "; ".join(sorted(rows))
        self.changed.notify_all()

    def _first_use(self, rank: int, key: Key, members: Iterable[int]) -> None:
        """[Note: the first use of a communicator]"""
        with self.changed:
            self.used[key].add(rank)
            self.changed.notify_all()
        self.wait(rank, lambda: self.used[key] >= set(members), f"the first use of {key}")

    # --- operations -------------------------------------------------------------------------------

    def begin(self, group: Group, op: Op, pair: tuple[int, int] | None = None) -> Work:
        key: Key = (group.number, *(pair or ()))
        if group.nccl and not self.alone:
            self._first_use(op.rank, key, pair or group.ranks)
            for peer in sorted({*op.sends, *op.receives}):
                ends = tuple(sorted((op.rank, peer)))
                self._first_use(op.rank, (*key, "pair", *ends), ends)
            self.launches[op.rank] += 1
        with self.changed:
            self.queues[key][op.rank].append(op)
            while self._advance(key, group.ranks):
                pass
            self.changed.notify_all()
        return Work(self, op)

    def _advance(self, key: Key, ranks: tuple[int, ...]) -> bool:
        heads = {rank: queue[0] for rank, queue in self.queues[key].items() if queue}
        if len(heads) == len(ranks) and all(op.given is not None for op in heads.values()):
            assert len({op.name for op in heads.values()}) == 1, [op.name for op in heads.values()]
            COLLECTIVES[heads[ranks[0]].name]([heads[rank] for rank in ranks])
            for rank in ranks:
                self.queues[key][rank].popleft().done = True
            return True
        for a, op in heads.items():
            for b in [b for b in op.sends if b in heads and a in heads[b].receives]:
                into, given = heads[b].receives.pop(a), op.sends.pop(b)
                assert into.shape == given.shape and into.dtype == given.dtype
                into.copy_(given)
                for rank in (a, b):
                    if not heads[rank].sends and not heads[rank].receives:
                        self.queues[key][rank].popleft().done = True
                return True
        return False

    def abort(self, group: Group) -> None:
        if self.deaf:
            threading.Event().wait()
        with self.changed:
            for key, queues in self.queues.items():
                for op in queues[group.me] if key[0] == group.number else ():
                    op.done = op.aborted = True
            self.changed.notify_all()

    def communicators(self, rank: int) -> int:
        """That a rank has used."""
        return sum(rank in ranks and "pair" not in key for key, ranks in self.used.items())


def _copied(ops: list[Op], results: list[Tensor]) -> None:
    for op, result in zip(ops, results, strict=True):
        assert op.into is not None
        op.into.copy_(result)


def _given(ops: list[Op]) -> list[Tensor]:
    return [op.given.clone() for op in ops if op.given is not None]


def _all_reduce(ops: list[Op]) -> None:
    first, *others = _given(ops)
    for other in others:
        first += other
    _copied(ops, [first] * len(ops))


def _reduce_scatter(ops: list[Op]) -> None:
    first, *others = _given(ops)
    for other in others:
        first += other
    _copied(ops, list(first.view(len(ops), -1)))


COLLECTIVES: dict[str, Callable[[list[Op]], None]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": lambda ops: _copied(ops, [torch.cat(_given(ops))] * len(ops)),
    "broadcast": lambda ops: _copied(ops, [next(x for x in _given(ops) if len(x))] * len(ops)),
}


class FakeDist:
    """The functions of torch.distributed that TorchDist calls."""

    ProcessGroup = Group

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.distributed_c10d = SimpleNamespace(
            _set_pg_timeout=lambda limit, group: None, _get_default_store=lambda: fabric.store
        )

    def get_rank(self) -> int:
        return self.fabric.here.rank

    def get_world_size(self) -> int:
        return self.fabric.world

    def get_backend(self) -> str:
        return "nccl"

    def is_initialized(self) -> bool:
        return True

    def destroy_process_group(self, group: Group) -> None:
        return None

    def new_group(self, ranks: list[int], timeout: Any, backend: str | None) -> Any:
        """All ranks make the same groups in the same order, or names would not fit."""
        fabric, me = self.fabric, self.get_rank()
        with fabric.changed:
            number, fabric.count[me] = fabric.count[me], fabric.count[me] + 1
            asked = (tuple(sorted(ranks)), backend or "nccl")
            if number == len(fabric.made):
                fabric.made.append(asked)
            assert fabric.made[number] == asked, (number, fabric.made[number], asked)
        if me not in ranks:
            return object()
        return Group(fabric, number, asked[0], asked[1] == "nccl", me)

    def isend(self, buffer: Tensor, target: int, group: Group, tag: int = 0) -> Work:
        if not group.nccl:
            with self.fabric.changed:
                box = self.fabric.mail[group.number, group.me, target, tag]
                box.append(buffer.clone())
                self.fabric.changed.notify_all()
            return Work(self.fabric, Op("isend", group.me, done=True))
        op = Op(f"isend to {target}", group.me, sends={target: buffer})
        return self.fabric.begin(group, op, _pair(group.me, target))

    def irecv(self, buffer: Tensor, source: int, group: Group, tag: int = 0) -> Any:
        if not group.nccl:
            return _Arrival(self.fabric, group, buffer, (group.number, source, group.me, tag))
        op = Op(f"irecv from {source}", group.me, receives={source: buffer})
        return self.fabric.begin(group, op, _pair(group.me, source))

    def P2POp(self, function: Any, buffer: Tensor, peer: int, group: Group) -> Any:
        return function.__name__, buffer, peer, group

    def batch_isend_irecv(self, operations: list[Any]) -> list[Work]:
        group = operations[0][3]
        op = Op("batch", group.me)
        for name, buffer, peer, _ in operations:
            parts = op.sends if name == "isend" else op.receives
            assert peer not in parts
            parts[peer] = buffer
        return [self.fabric.begin(group, op)]

    def all_reduce(self, buffer: Tensor, group: Group, async_op: bool = False) -> Work:
        return self._collective("all_reduce", buffer, buffer, group, async_op)

    def all_gather_single(
        self, into: Tensor, given: Tensor, group: Group, async_op: bool = False
    ) -> Work:
        return self._collective("all_gather", into, given, group, async_op)

    def reduce_scatter_single(
        self, into: Tensor, given: Tensor, group: Group, async_op: bool = False
    ) -> Work:
        return self._collective("reduce_scatter", into, given, group, async_op)

    def broadcast(self, buffer: Tensor, source: int, group: Group) -> None:
        given = buffer.view(-1) if source == group.me else buffer.new_empty(0)
        self._collective("broadcast", buffer.view(-1), given, group, False)

    def _collective(
        self, name: str, into: Tensor, given: Tensor, group: Group, async_op: bool
    ) -> Work:
        work = self.fabric.begin(group, Op(name, group.me, given=given, into=into))
        if not async_op:
            work.wait()
        return work


class _Arrival:
    """A message that gloo receives, by its tag."""

    def __init__(self, fabric: Fabric, group: Group, buffer: Tensor, key: Key) -> None:
        self.fabric, self.rank, self.buffer, self.key = fabric, group.me, buffer, key

    def wait(self) -> None:
        box = self.fabric.mail[self.key]
        self.fabric.wait(self.rank, lambda: bool(box), f"a message {self.key}")
        self.buffer.copy_(box.popleft())


def _pair(a: int, b: int) -> tuple[int, int]:
    return min(a, b), max(a, b)


def _on_host(buffer: Tensor) -> bool:
    return buffer.dtype in (torch.int64, torch.float64)


@contextmanager
def patched(fabric: Fabric) -> Iterator[None]:
    fake = FakeDist(fabric)
    with (
        mock.patch.object(torch_distributed, "dist", fake),
        mock.patch.object(communicators, "dist", fake),
        mock.patch.object(communicators, "on_host", _on_host),
        # Tensors are on the CPU, and NCCL would be rejected for that.
        mock.patch.object(lifetime, "device_of", lambda transport, device: torch.device("cpu")),
    ):
        yield


def run_nccl(size: int, work: Callable[[TorchDist], Any]) -> tuple[list[Any], Fabric]:
    """`work` on ranks that are threads, each with a TorchDist over this: what each gave. Raises
    the error of the first rank that has one of its own."""
    fabric = Fabric(size)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        fabric.here.rank = rank
        transport = None
        try:
            transport = TorchDist(timeout=600.0)
            results[rank] = work(transport)
            transport.all_gather_object("done")
        except BaseException as error:
            errors[rank] = error
        finally:
            fabric.end(rank)
            if transport is not None:
                transport.close()

    with patched(fabric):
        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "ranks hang outside of the double"
    if errors:
        own = [rank for rank, error in errors.items() if not isinstance(error, PeerError)]
        raise errors[min(own or errors)]
    return results, fabric
