"""What a streamed stage takes: patches overlap where a layer reads around its outputs.

    image     ├───────────┼───────────┼───────────┤        3 patches of L / 3 outputs
    boxes     ├─────────────┤                              read  L / 3 + R / 2
                      ├───────────────┤                          L / 3 + R
                                  ├───────────────┤              L / 3 + R / 2

R adds up over the layers from the last to the first: the first layers do most of the work twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from gems.model.costs import Cost, Costs
from gems.model.graph import Graph, Value

ENTERING = -1  # in place of a block: what enters the stage


@dataclass(frozen=True)
class Overlap:
    """Of what a block of the model makes: the part of it that the largest patch has, and how much
    all of them have together, in wholes."""

    largest: float = 1.0
    total: float = 1.0


def overlaps(graph: Graph, blocks: Sequence[int], grid: Sequence[int]) -> dict[int, Overlap]:
    """The overlap of what each of a stage's blocks makes, and of what enters it.

    Branches beside each other count one after the other: rather too much than too little.
    """
    found: dict[int, Overlap] = {}
    beyond = [0.0] * len(grid)  # what later blocks read around this one, as a part of the image
    for i in (*reversed(blocks), ENTERING):
        # Of a mean over the image, most is what it reads.
        near = (*graph.blocks[i].writes, *graph.blocks[i].reads) if i >= 0 else graph.inputs
        images = [graph.value[n] for n in near if _image(graph.value[n], grid)]
        found[i] = _overlap(max(images, key=lambda v: v.bytes, default=None), grid, beyond)
        around = graph.blocks[i].reach if i >= 0 else ()
        for axis, reach in enumerate(around[-len(grid) :]):
            beyond[axis] += reach
    return found


def _overlap(value: Value | None, grid: Sequence[int], beyond: Sequence[float]) -> Overlap:
    if value is None:
        return Overlap(1.0, prod(grid))  # every patch makes all of it
    largest, total = [], []
    for length, parts, reach in zip(value.shape[-len(grid) :], grid, beyond, strict=True):
        share = ceil(length / parts) / max(length, 1)
        sides = {1: 0.0, 2: 0.5}.get(parts, 1.0)  # of a patch that are not the image's own
        largest.append(min(share + sides * reach, 1.0))
        total.append(min(1 + (parts - 1) * reach, parts))
    return Overlap(prod(largest), prod(total))


def _image(value: Value, grid: Sequence[int]) -> bool:
    return len(value.shape) >= 2 + len(grid)


def workspace(graph: Graph, blocks: Sequence[int], grid: Sequence[int]) -> float:
    """Bytes that backward keeps for the largest patch, each storage once.

    What the stage received is kept anyway, whole; of the model's own inputs, a box is read again.
    """
    overlap, mine = overlaps(graph, blocks, grid), set(blocks)
    makers: dict[int, int] = {}
    for value in graph.values:
        makers.setdefault(value.storage, graph.producer.get(value.name, ENTERING))
    found: dict[int, float] = {}
    for i in blocks:
        for storage, size in graph.blocks[i].saves:
            maker = makers.get(storage, i)
            if maker == ENTERING or maker in mine:
                found.setdefault(storage, size * overlap[maker].largest)
    return sum(found.values())


def streamed(
    cost: Cost,
    graph: Graph,
    costs: Costs,
    blocks: Sequence[int],
    grid: Sequence[int],
    call: float = 0.0,
) -> Cost:
    """What a stage costs that runs patch by patch, and again in backward, weights and all. Python
    takes `call` for each, however small.

    It keeps what it receives; and if it is the last, the model's output, for the loss.
    """
    overlap, count = overlaps(graph, blocks, grid), prod(grid)
    seconds = {"f": call * count * len(blocks), "i": 0.0, "w": 0.0}
    for i in blocks:
        part = costs[i]
        for kind in seconds:
            if had := getattr(part, kind):
                seconds[kind] += (had - part.launch) * overlap[i].total + part.launch * count
    back = sum(seconds.values()) if cost.b else 0.0
    made = {n for i in blocks for n in graph.blocks[i].writes}
    entering = {n for i in blocks for n in graph.blocks[i].reads} - made
    received = [graph.value[n] for n in entering if n in graph.producer]
    others = {n for i, b in enumerate(graph.blocks) if i not in set(blocks) for n in b.reads}
    given = [graph.value[n] for n in made if n in others or n in graph.outputs]
    last = len(graph.blocks) - 1 in blocks
    ends = [v for v in given if v.name in graph.outputs and last]
    gradients = sum(v.bytes for v in (*received, *given) if v.grad)
    return replace(
        cost,
        f=seconds["f"],
        i=back,
        w=0.0,
        halves=1.0,
        activations=float(sum(v.bytes for v in (*received, *ends))),
        temporary=workspace(graph, blocks, grid) + gradients,
        workspace=max((costs[i].workspace * overlap[i].largest for i in blocks), default=0.0),
    )
