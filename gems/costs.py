"""What each block or stage costs: seconds and bytes, wherever they were learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gems.graph import Graph, crossings
from gems.machine import Link


@dataclass(frozen=True)
class Cost:
    """Seconds of forward (f), input gradient (i) and weight gradient (w), and bytes.

    `stash` is what one micro-batch keeps for backward, `weights` what is held all the time.
    """

    f: float = 1.0
    i: float = 1.0
    w: float = 1.0
    stash: float = 1.0
    weights: float = 0.0

    @property
    def b(self) -> float:
        return self.i + self.w

    def of(self, kind: str) -> float:
        """Seconds of an action: F, B, I or W."""
        return {"F": self.f, "B": self.b, "I": self.i, "W": self.w}[kind]

    @property
    def seconds(self) -> float:
        return self.f + self.i + self.w

    def shared(self, ranks: int) -> Cost:
        """What each of so many ranks pays that share the work; all of them have the weights."""
        parts = {name: getattr(self, name) / ranks for name in ("f", "i", "w", "stash")}
        return replace(self, **parts) if ranks > 1 else self


@dataclass(frozen=True)
class Costs:
    """A cost per item (blocks of a graph, or stages of a plan), and messages between stages.

    `messages` lists (writer, reader, bytes) of one micro-batch; gradients come back as large.
    Each takes `latency` seconds and `per_byte` for every byte; none by default.
    """

    items: tuple[Cost, ...]
    messages: tuple[tuple[int, int, int], ...] = ()
    latency: float = 0.0
    per_byte: float = 0.0

    @cached_property
    def _sizes(self) -> dict[tuple[int, int], int]:
        return {(writer, reader): size for writer, reader, size in self.messages}

    def bytes_between(self, one: int, other: int) -> int:
        """Of a message between two stages, either way."""
        return self._sizes.get((min(one, other), max(one, other)), 0)

    def travel(self, one: int, other: int) -> float:
        """Seconds of a message between two stages, either way."""
        return self.latency + self.per_byte * self.bytes_between(one, other)

    def over(self, link: Link) -> Costs:
        """The same, with messages over this link."""
        return replace(self, latency=link.latency, per_byte=1 / link.bandwidth)

    def shared(self, sizes: Sequence[int]) -> Costs:
        """What each rank pays, and each link carries, if `sizes[s]` ranks run stage s together.

        Work and stash are divided, weights are not: every rank of a team holds them all. A message
        goes in as many parts, over links of their own, as the larger of its two teams has ranks.
        """
        items = tuple(cost.shared(n) for cost, n in zip(self.items, sizes, strict=True))
        messages = tuple(
            (a, b, -(-size // max(sizes[a], sizes[b]))) for a, b, size in self.messages
        )
        return replace(self, items=items, messages=messages)

    def __getitem__(self, index: int) -> Cost:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


def unit(stages: int) -> Costs:
    """Each stage takes f = i = w = 1 and keeps one stash: the unit of the closed forms."""
    return Costs((Cost(),) * stages)


def of_stages(blocks: Costs, graph: Graph, stage_of: Sequence[int]) -> Costs:
    """Costs per stage out of costs per block: seconds add up, shared storages count once."""
    stages = []
    for s in range(max(stage_of, default=0) + 1):
        mine = [i for i, stage in enumerate(stage_of) if stage == s]
        stages.append(
            Cost(
                f=sum(blocks[i].f for i in mine),
                i=sum(blocks[i].i for i in mine),
                w=sum(blocks[i].w for i in mine),
                stash=graph.stash(mine),
                weights=graph.held(mine),
            )
        )
    pairs = crossings(graph, stage_of).items()
    messages = tuple((a, b, sum(graph.value[n].bytes for n in names)) for (a, b), names in pairs)
    return Costs(tuple(stages), messages)
