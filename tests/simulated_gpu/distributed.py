"""`torch.distributed` of one rank, over simulated NCCL and gloo. The other ranks do not exist, and
are assumed to do the same: what they send over gloo is what this rank sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated_gpu import cuda

Tensor = torch.Tensor


class Group:
    """A process group. An NCCL one has a communicator, with a stream of its own, for its
    collectives and batched messages; and one for every pair of ranks that sends without a batch."""

    def __init__(self, ranks: Sequence[int], backend: str) -> None:
        self.ranks, self.backend = tuple(ranks), backend
        self.streams: dict[Any, cuda.Stream] = {}
        self.sent: list[Tensor] = []  # over gloo

    def stream(self, key: Any, index: int) -> cuda.Stream:
        if key not in self.streams:
            self.streams[key] = cuda.Stream(index)
        return self.streams[key]


class Work:
    """As NCCL's: waiting lets the current stream wait, not the host, and drops the tensors."""

    def __init__(self, event: cuda.Event, index: int, kept: Any) -> None:
        self.event, self.index, self.kept = event, index, kept
        shelf.append(self)

    def wait(self, timeout: Any = None) -> bool:
        cuda.current_stream(self.index).wait_event(self.event)
        self.kept = None
        return True

    def is_completed(self) -> bool:
        return self.event.query()


class Done:
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


shelf: list[Work] = []  # torch keeps the tensors of what nobody waits for


class P2POp:
    """One message of a batch."""

    def __init__(self, op: Any, tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> None:
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag


class World:
    """This rank's `torch.distributed`."""

    def __init__(self) -> None:
        self.start(0, 1)

    def start(self, rank: int, world: int) -> None:
        self.rank, self.size = rank, world
        self.everyone = Group(range(world), "nccl")
        self.groups = [self.everyone]
        shelf.clear()

    @property
    def communicators(self) -> int:
        """Of NCCL, on this rank."""
        return sum(len(group.streams) for group in self.groups)

    def new_group(self, ranks: Any = None, backend: str | None = None, **_: Any) -> Any:
        members = tuple(range(self.size)) if ranks is None else tuple(ranks)
        if self.rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        self.groups.append(Group(members, backend or "nccl"))
        return self.groups[-1]

    # --- NCCL -----------------------------------------------------------------------------------

    def _launch(
        self, what: str, group: Group, key: Any, reads: list[Tensor], writes: list[Tensor]
    ) -> Work:
        for x in (*reads, *writes):
            if not cuda.is_gpu(x):
                cuda.device.record.misplaced.append(f"{what} of a {x.device} tensor over NCCL")
                raise RuntimeError(f"{what}: NCCL takes tensors on CUDA, not on {x.device}")
            if not x.is_contiguous():
                raise ValueError(f"{what}: tensors must be contiguous")
        index = (*reads, *writes)[0].device.index
        stream = group.stream(key, index)
        stream.wait_stream(cuda.current_stream(index))
        record = cuda.device.record
        record.launch(stream.cuda_stream, what, cuda.spans(reads), cuda.spans(writes))
        record.counts.messages[what] += 1
        return Work(stream.record_event(), index, (reads, writes))

    def _one(self, what: str, group: Any, reads: list[Tensor], writes: list[Tensor]) -> Work:
        return self._launch(what, group or self.everyone, "group", reads, writes)

    # --- what gems calls ------------------------------------------------------------------------

    def isend(
        self, tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, **_: Any
    ) -> Any:
        group = group or self.everyone
        if group.backend == "gloo":
            group.sent.append(_on_host("isend", tensor).clone())
            return Done()
        return self._launch("isend", group, frozenset((self.rank, dst)), [tensor], [])

    def irecv(
        self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, **_: Any
    ) -> Any:
        group = group or self.everyone
        if group.backend == "gloo":
            _on_host("irecv", tensor).zero_()
            alike = [x for x in group.sent if (x.shape, x.dtype) == (tensor.shape, tensor.dtype)]
            if alike:
                tensor.copy_(alike[-1])
            return Done()
        return self._launch("irecv", group, frozenset((self.rank, src)), [], [tensor])

    def batch_isend_irecv(self, ops: Sequence[P2POp]) -> list[Any]:
        """One launch on the group's communicator."""
        group = ops[0].group or self.everyone
        if any((op.group or self.everyone) is not group for op in ops):
            raise ValueError("All ops need to use the same group.")
        if group.backend == "gloo":
            return [op.op(op.tensor, op.peer, group) for op in ops]
        reads = [op.tensor for op in ops if op.op is dist.isend]
        writes = [op.tensor for op in ops if op.op is dist.irecv]
        return [self._one("batch_isend_irecv", group, reads, writes)]

    def all_reduce(
        self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        group = group or self.everyone
        if group.backend == "nccl":
            return self._waited(self._one("all_reduce", group, [], [tensor]), async_op)
        flat, count = _on_host("all_reduce", tensor).view(-1), len(group.ranks)
        rows = flat.view(count, -1) if len(flat) % count == 0 else None
        mine = group.ranks.index(self.rank)
        if rows is not None and not flat.is_floating_point() and _alone(rows, mine):
            rows.copy_(rows[mine].clone().expand_as(rows))  # each rank fills its row
        else:
            flat.mul_(count)
        return self._waited(Done(), async_op)

    def all_gather_into_tensor(
        self, output: Tensor, given: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        group = group or self.everyone
        if group.backend == "nccl":
            return self._waited(self._one("all_gather", group, [given], [output]), async_op)
        rows = _on_host("all_gather", output).view(len(group.ranks), -1)
        rows.copy_(given.reshape(1, -1).expand_as(rows))
        return self._waited(Done(), async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, given: Tensor, op: Any = None, group: Any = None, **options: Any
    ) -> Any:
        work = self._one("reduce_scatter", group, [given], [output])
        return self._waited(work, options.get("async_op", False))

    def all_to_all_single(
        self, output: Tensor, given: Tensor, *_: Any, group: Any = None, **options: Any
    ) -> Any:
        work = self._one("all_to_all", group, [given], [output])
        return self._waited(work, options.get("async_op", False))

    def broadcast(
        self, tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False
    ) -> Any:
        group = group or self.everyone
        if group.backend == "nccl":
            return self._waited(self._one("broadcast", group, [], [tensor]), async_op)
        _on_host("broadcast", tensor)
        return self._waited(Done(), async_op)

    def _waited(self, work: Any, async_op: bool) -> Any:
        if async_op:
            return work
        work.wait()
        return None


def _on_host(what: str, tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        cuda.device.record.misplaced.append(f"{what} of a {tensor.device} tensor over gloo")
        raise RuntimeError(f"{what}: gloo takes host tensors, not on {tensor.device}")
    return tensor


def _alone(rows: Tensor, mine: int) -> bool:
    return not bool(rows[:mine].any()) and not bool(rows[mine + 1 :].any())


def install() -> World:
    """Replace `torch.distributed` in this process, for good; before gems is imported."""
    world = World()
    changes: dict[str, Any] = {
        "ProcessGroup": Group,
        "P2POp": P2POp,
        "is_available": lambda: True,
        "is_initialized": lambda: world.size > 1,
        "get_rank": lambda group=None: world.rank,
        "get_world_size": lambda group=None: world.size,
        "get_backend": lambda group=None: "nccl",
        "destroy_process_group": lambda group=None: None,
        "all_gather_single": world.all_gather_into_tensor,
        "reduce_scatter_single": world.reduce_scatter_tensor,
    }
    for name in (
        *("new_group", "isend", "irecv", "batch_isend_irecv", "all_reduce", "broadcast"),
        *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    ):
        changes[name] = getattr(world, name)
    for name, value in changes.items():
        setattr(dist, name, value)
    dist.distributed_c10d._set_pg_timeout = lambda *_: None
    return world
