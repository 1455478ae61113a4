"""What the model is: blocks in the order they run, and the values that pass between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from gems.geometry.window import Line

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A tensor that one block writes and others read. `grad`: a gradient comes back for it.

    `storage` is the number of its memory, as in `Block.saves`; -1 where nobody has looked. `image`
    are the dims that tiles divide, rows and columns with depth before them: none in a tensor that
    is no image; None: the last ones.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    grad: bool
    storage: int = -1
    image: tuple[int, ...] | None = None

    @cached_property
    def bytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Flow:
    """A call on an image as cuts of it see the call.

    `reads` has for each image the windows through which its results see it, one per spatial dim;
    None for what is summed up over. `sizes` are the lengths along these dims, and the bytes, of the
    images that it reads and `writes`.
    """

    reads: tuple[tuple[str, tuple[Line, ...] | None], ...]
    writes: tuple[str, ...]
    sizes: tuple[tuple[str, tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, by the first of its names in the user's model."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def bytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Block:
    """The smallest piece that is never split: one recorded call, or a few that share memory.

    `layer` is what `balance` counts: the child of an `nn.Sequential`, or the block itself.
    `mutates` are values changed in place. `saves` are the storages kept for backward, as
    (storage, bytes): two blocks that save the same storage keep it once. `moved` are the bytes
    read and written.

    If the image is tiled, `halos` are the bytes that cross a boundary of tiles along each spatial
    dim, both ways together, in `exchanges`, and `sums` those that every rank adds up with every
    other, in `totals`; a `whole` block cannot be tiled. `reach` is what it reads around its outputs
    along each spatial dim, both sides together, as a part of the image; with `streams`, the image
    may run in patches, one after the other, to the end of this block, and `tiled` blocks work on
    it. With `joins`, what a block gives needs all of the image: 1 if it is whole, 2 if the block
    then reads the image again (a norm). `blind` blocks run backward without a look at what they
    make: 1 a convolution, 2 a sum, which does not look at what it reads either. `flows` are its
    calls on the image. Empty and 0 where
    nobody has looked.
    """

    name: str
    layer: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    saves: tuple[tuple[int, int], ...] = ()
    flops: int = 0
    moved: int = 0
    halos: tuple[int, ...] = ()
    exchanges: int = 0
    sums: int = 0
    totals: int = 0
    whole: bool = False
    reach: tuple[float, ...] = ()
    streams: bool = False
    tiled: bool = False
    joins: int = 0
    flows: tuple[Flow, ...] = ()
    blind: int = 0


@dataclass(frozen=True)
class Graph:
    """Blocks in recorded order. `inputs` and `outputs` are the model's own, in order."""

    blocks: tuple[Block, ...]
    values: tuple[Value, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Weight, ...]
    buffers: tuple[Weight, ...]

    @cached_property
    def value(self) -> dict[str, Value]:
        return {v.name: v for v in self.values}

    @cached_property
    def weight(self) -> dict[str, Weight]:
        return {w.name: w for w in (*self.parameters, *self.buffers)}

    @cached_property
    def known_sweeps(self) -> dict[tuple[int, ...], Any]:
        """Of runs of blocks, once asked for: see gems/predict/streaming_cost.py."""
        return {}

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each block, by name."""
        return {b.name: i for i, b in enumerate(self.blocks)}

    @cached_property
    def producer(self) -> dict[str, int]:
        """The block that writes each value; the model's inputs have none."""
        return {name: i for i, b in enumerate(self.blocks) for name in b.writes}

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Runs of blocks of one layer: the things that `balance` counts."""
        runs: list[list[int]] = []
        for i, block in enumerate(self.blocks):
            if runs and self.blocks[runs[-1][-1]].layer == block.layer:
                runs[-1].append(i)
            else:
                runs.append([i])
        return tuple(map(tuple, runs))

    @cached_property
    def crossing(self) -> list[int]:
        """For each block, the bytes that a boundary right before it would send."""
        last_read: dict[str, int] = dict.fromkeys(self.outputs, len(self.blocks))
        for i, block in enumerate(self.blocks):
            for name in block.reads:
                last_read[name] = max(last_read.get(name, 0), i)
        change = [0] * (len(self.blocks) + 2)
        for name, producer in self.producer.items():
            if last_read.get(name, -1) > producer:
                change[producer + 1] += self.value[name].bytes
                change[min(last_read[name], len(self.blocks)) + 1] -= self.value[name].bytes
        return list(accumulate(change))[: len(self.blocks)]

    @cached_property
    def first_saved(self) -> list[int]:
        """Activations that each block adds: a storage counts where it is saved first."""
        seen: set[int] = set()
        found = []
        for block in self.blocks:
            fresh = {storage: size for storage, size in block.saves if storage not in seen}
            seen.update(fresh)
            found.append(sum(fresh.values()))
        return found

    def activations(self, blocks: Iterable[int]) -> int:
        """Bytes that one micro-batch keeps for backward over these blocks, each storage once."""
        return sum(dict(pair for i in blocks for pair in self.blocks[i].saves).values())

    def held(self, blocks: Iterable[int]) -> int:
        """Bytes of the parameters and buffers of these blocks, each once."""
        names = {n for i in blocks for n in (*self.blocks[i].parameters, *self.blocks[i].buffers)}
        return sum(self.weight[n].bytes for n in names)

    def trained(self, blocks: Iterable[int]) -> int:
        """Bytes of the parameters of these blocks, each once: so many gradients there are."""
        names = {n for i in blocks for n in self.blocks[i].parameters}
        return sum(self.weight[n].bytes for n in names)


def covering(name: str, listed: Mapping[str, object]) -> str | None:
    """The longest listed name that is this block or a module around it."""
    return next((at for at in around(name) if at in listed), None)


def around(name: str) -> Iterator[str]:
    """Names that cover a block: its own, then those of the modules around it from the inside out,
    the model's "" last. The first of several calls of a module has the module's name; `relu:1`
    names it alone."""
    yield name
    at, _, call = name.partition(":")
    if not call:
        yield f"{name}:1"
    while at:
        yield at
        at = at.rpartition(".")[0]
    yield ""


def members(stage_of: Sequence[int]) -> list[list[int]]:
    """The blocks of every stage."""
    found: list[list[int]] = [[] for _ in range(max(stage_of, default=0) + 1)]
    for block, stage in enumerate(stage_of):
        found[stage].append(block)
    return found


def tied_stages(graph: Graph, stage_of: Sequence[int]) -> dict[tuple[int, ...], int]:
    """The stages that share parameters, in sets that have no stage in common, and how many bytes
    of parameters each set shares."""
    used: dict[str, set[int]] = {}
    for block, stage in zip(graph.blocks, stage_of, strict=True):
        for name in block.parameters:
            used.setdefault(name, set()).add(stage)
    found: list[tuple[set[int], int]] = []
    for name, stages in ((n, stages) for n, stages in used.items() if len(stages) > 1):
        joined = [(known, size) for known, size in found if not known.isdisjoint(stages)]
        apart = [(known, size) for known, size in found if known.isdisjoint(stages)]
        size = graph.weight[name].bytes + sum(size for _, size in joined)
        found = [*apart, (stages.union(*(known for known, _ in joined)), size)]
    return dict(sorted((tuple(sorted(stages)), size) for stages, size in found))


def crossings(
    graph: Graph, stage_of: Sequence[int], stages: int = 0
) -> dict[tuple[int, int], tuple[str, ...]]:
    """The values that each stage sends to each other stage, in a fixed order. The last of `stages`
    may have no blocks.

    They go straight from the stage that writes them to every stage that reads them. The model's
    inputs are at hand everywhere; its outputs are wanted by the last stage, where the loss is.
    """
    last = max((stages - 1, *stage_of), default=0)
    wanted = [(name, stage_of[i]) for i, b in enumerate(graph.blocks) for name in b.reads]
    wanted += [(name, last) for name in graph.outputs]
    found: dict[tuple[int, int], dict[str, None]] = {}
    for name, reader in wanted:
        if name in graph.producer and (writer := stage_of[graph.producer[name]]) != reader:
            found.setdefault((writer, reader), {})[name] = None
    return {pair: tuple(names) for pair, names in sorted(found.items())}
