"""What each block or stage costs: seconds and bytes, wherever they were learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gems.hardware import Link
from gems.model.graph import Graph, crossings, members, tied_stages


@dataclass(frozen=True)
class Cost:
    """Seconds of forward (f), input gradient (i) and weight gradient (w), and bytes.

    `activations` is what one micro-batch saves for backward, `weights` what is held all the time,
    `gradients` the part of them that is trained, `workspace` the most that is live for a moment
    beside all that. Of each of f, i and w, `launch` seconds are no fewer on a part of the image;
    where a stage is tiled, `exchange` bytes are sent inside it, forward and again backward.
    Backward in two halves, i and then w, takes `halves` times as long as in one. Where blocks are
    recomputed inside backward, `temporary` is what is live then beyond the activations. The
    activations are `tensors` pieces of memory, the gradients `trained`.
    """

    f: float = 1.0
    i: float = 1.0
    w: float = 1.0
    activations: float = 1.0
    weights: float = 0.0
    gradients: float = 0.0
    workspace: float = 0.0
    launch: float = 0.0
    exchange: float = 0.0
    halves: float = 1.0
    temporary: float = 0.0
    tensors: float = 0.0
    trained: float = 0.0

    @property
    def b(self) -> float:
        return self.i + self.w

    def of(self, kind: str) -> float:
        """Seconds of an action: F, B, I, W, or R, which is F once more."""
        return {
            "F": self.f,
            "R": self.f,
            "B": self.b,
            "I": self.i * self.halves,
            "W": self.w * self.halves,
        }[kind]

    @property
    def seconds(self) -> float:
        return self.f + self.i + self.w

    def part(self, share: float, exchange: float = 0.0, seconds: float = 0.0) -> Cost:
        """What a rank pays that does a share of the work; it has all the weights. Inside it so many
        bytes are sent, which takes so many seconds, forward and again backward."""
        if share == 1 and not exchange and not seconds:
            return self
        f, i, w = (
            (had - self.launch) * share + self.launch if had else 0.0
            for had in (self.f, self.i, self.w)
        )
        return replace(
            self,
            f=f + seconds,
            i=i + seconds if i else 0.0,
            w=w,
            activations=self.activations * share,
            workspace=self.workspace * share,
            exchange=self.exchange + exchange,
        )


def together(costs: Iterable[Cost]) -> Cost:
    """The cost of several things one after the other; the largest of them needs the workspace."""
    f = i = w = apart = activations = weights = gradients = workspace = launch = exchange = 0.0
    for c in costs:
        f, i, w, activations, weights = (
            f + c.f,
            i + c.i,
            w + c.w,
            activations + c.activations,
            weights + c.weights,
        )
        apart += c.b * c.halves
        gradients, launch = gradients + c.gradients, launch + c.launch
        workspace, exchange = max(workspace, c.workspace), exchange + c.exchange
    halves = apart / (i + w) if i + w else 1.0
    return Cost(f, i, w, activations, weights, gradients, workspace, launch, exchange, halves)


@dataclass(frozen=True)
class Edge:
    """What one stage sends another for one micro-batch: bytes, and bytes of gradients back.

    `kept` is what a rank of the target keeps of it to compute from it again; None: its even share.
    What `stays` each rank has already, but for halos: the same ranks have the same tiles next.
    Of outputs and gradients, `stored_output` and `stored_gradient` bytes are in a store.
    """

    source: int
    target: int
    output: int
    gradient: int
    kept: int | None = None
    stays: bool = False
    stored_output: int = 0
    stored_gradient: int = 0

    def size(self, what: str) -> int:
        return self.output if what == "output" else self.gradient

    def stored(self, what: str) -> int:
        return self.stored_output if what == "output" else self.stored_gradient


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of a micro-batch that the stage `source` puts in a store, until backward of all
    `readers`; and as many of gradients by each of these, if it has `gradients`."""

    source: int
    readers: tuple[int, ...]
    size: int
    gradients: bool


@dataclass(frozen=True)
class Costs:
    """A cost per item (blocks of a graph, or stages of a plan), and messages between stages.

    A message takes `latency` seconds and `per_byte` for every byte; none by default. Where stages
    are split over groups of ranks, `group_sizes` has how many, and items are what one rank pays.
    `tied` are the bytes of parameters that stages share, by the first stage of each set; `stored`
    are values that are in a store on their way.
    """

    items: tuple[Cost, ...]
    messages: tuple[Edge, ...] = ()
    latency: float = 0.0
    per_byte: float = 0.0
    group_sizes: tuple[int, ...] = ()
    tied: tuple[tuple[int, int], ...] = ()
    stored: tuple[StoredBytes, ...] = ()

    @cached_property
    def _received(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for edge in self.messages:
            even = -(-(edge.output - edge.stored_output) // self.group_size(edge.target))
            size = even if edge.kept is None else edge.kept
            found[edge.target] = found.get(edge.target, 0) + size
        return found

    @cached_property
    def _given(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for edge in self.messages:
            size = -(-(edge.output - edge.stored_output) // self.group_size(edge.source))
            found[edge.source] = found.get(edge.source, 0) + size
        return found

    @cached_property
    def _edges(self) -> dict[tuple[int, int], Edge]:
        return {(e.source, e.target): e for e in self.messages}

    def bytes(self, what: str, source: int, target: int) -> int:
        """Of the output or the gradient that one stage sends another, all parts together."""
        edge = self._edge(what, source, target)
        return edge.size(what) if edge else 0

    def on_device(self, what: str, source: int, target: int) -> int:
        """The part of them that is in the memory of devices."""
        edge = self._edge(what, source, target)
        return edge.size(what) - edge.stored(what) if edge else 0

    def _edge(self, what: str, source: int, target: int) -> Edge | None:
        """Gradients go back over the edge that outputs come by."""
        return self._edges.get((source, target) if what == "output" else (target, source))

    def tied_bytes(self, stage: int) -> int:
        """Of parameters that a stage, the first that uses them, shares with later ones."""
        return dict(self.tied).get(stage, 0)

    def stays(self, what: str, source: int, target: int) -> bool:
        """Whether every rank of the target has its part already."""
        edge = self._edge(what, source, target)
        return edge is not None and edge.stays

    def group_size(self, stage: int) -> int:
        """How many ranks run a stage together."""
        return self.group_sizes[stage] if self.group_sizes else 1

    def received(self, stage: int) -> int:
        """Bytes that a rank of a stage keeps of what it is sent for one micro-batch."""
        return self._received.get(stage, 0)

    def given(self, stage: int) -> int:
        """Bytes that a rank of a stage has for others when a micro-batch's forward is done."""
        return self._given.get(stage, 0)

    def part(self, what: str, source: int, target: int) -> int:
        """Bytes on one link: a message has as many parts as the larger of its two groups."""
        if self.stays(what, source, target):
            return 0
        ranks = max(self.group_size(source), self.group_size(target))
        return -(-self.bytes(what, source, target) // ranks)

    def travel(self, what: str, source: int, target: int) -> float:
        """Seconds of a message between two stages."""
        return self.latency + self.per_byte * self.part(what, source, target)

    def over(self, link: Link) -> Costs:
        """The same, with messages over this link."""
        return replace(self, latency=link.latency, per_byte=1 / link.bandwidth)

    def shared(self, sizes: Sequence[int]) -> Costs:
        """What each rank pays if `sizes[s]` ranks run stage s together and share it evenly.

        Weights are not shared: every rank of a group holds them all.
        """
        items = tuple(cost.part(1 / n) for cost, n in zip(self.items, sizes, strict=True))
        return replace(self, items=items, group_sizes=tuple(sizes))

    def __getitem__(self, index: int) -> Cost:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def counts_micro_batches(self) -> bool:
        """Whether these are unit costs, where activations are one and not bytes."""
        return all(cost.activations == 1 and not cost.weights for cost in self.items)


def mean(several: Sequence[Costs]) -> Costs:
    """The same things as several measured them: mean seconds, and the bytes of the first."""
    items = []
    for costs in zip(*(c.items for c in several), strict=True):
        sums = {name: sum(getattr(c, name) for c in costs) for name in ("f", "i", "w")}
        items.append(replace(costs[0], **{n: total / len(costs) for n, total in sums.items()}))
    return replace(several[0], items=tuple(items))


def unit(stages: int) -> Costs:
    """Each stage takes f = i = w = 1 and saves 1: the unit of the closed forms."""
    return Costs((Cost(),) * stages)


def of_stages(blocks: Costs, graph: Graph, stage_of: Sequence[int]) -> Costs:
    """Costs per stage out of costs per block: seconds add up, shared storages count once."""
    stages = []
    for mine in members(stage_of):
        whole = together(blocks[i] for i in mine)
        stages.append(
            replace(
                whole,
                activations=graph.activations(mine),
                weights=graph.held(mine),
                gradients=graph.trained(mine),
            )
        )
    tied = tuple((s[0], size) for s, size in tied_stages(graph, stage_of).items())
    return Costs(tuple(stages), edges(graph, stage_of), tied=tied)


def edges(graph: Graph, stage_of: Sequence[int]) -> tuple[Edge, ...]:
    """What stages send each other for one micro-batch."""
    found = []
    for (a, b), names in crossings(graph, stage_of).items():
        values = [graph.value[n] for n in names]
        back = sum(v.bytes for v in values if v.grad)
        found.append(Edge(a, b, sum(v.bytes for v in values), back))
    return tuple(found)
