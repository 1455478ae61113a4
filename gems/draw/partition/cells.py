"""A model as its stages: cells of blocks in order, and the values that cross between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gems.draw.units import seconds, size
from gems.model.costs import Cost, Costs, of_stages
from gems.model.graph import Graph, crossings
from gems.plans.plan import Plan

CELLS = 48  # as many as can be told apart side by side; more blocks are folded


@dataclass(frozen=True)
class Cell:
    """A run of blocks of one stage: a single block, a layer, or a module that holds several."""

    name: str
    stage: int
    blocks: tuple[int, ...]
    activations: float
    seconds: float | None


@dataclass(frozen=True)
class Crossing:
    """Values that a cell of one stage writes and a later stage first reads in another cell."""

    source: int
    target: int
    names: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Partition:
    """The cells stage by stage, what crosses, and what each stage costs per micro-batch.

    Of a stage that several ranks run together, seconds and bytes are those of each of them.
    """

    cells: tuple[Cell, ...]
    crossings: tuple[Crossing, ...]
    stages: tuple[Cost, ...]
    sizes: tuple[int, ...]
    timed: bool

    def spent(self, stage: int) -> str:
        """`1.2 ms`, or `1.2 ms each`."""
        return f"{seconds(self.stages[stage].seconds)}{self._each(stage)}"

    def kept(self, stage: int) -> str:
        return f"keeps {size(self.stages[stage].activations)}{self._each(stage)}"

    def _each(self, stage: int) -> str:
        return " each" if self.sizes[stage] > 1 else ""

    def of(self, stage: int) -> list[int]:
        """The cells of a stage, by position."""
        return [n for n, cell in enumerate(self.cells) if cell.stage == stage]

    def sent(self, stage: int) -> list[tuple[int, int]]:
        """To which stages a stage sends, and how many bytes to each, nearest first."""
        found: dict[int, int] = {}
        for c in self.crossings:
            if self.cells[c.source].stage == stage:
                target = self.cells[c.target].stage
                found[target] = found.get(target, 0) + c.bytes
        return sorted(found.items())


def partitioned(
    graph: Graph, stage_of: Sequence[int], costs: Costs | None = None, sizes: Sequence[int] = ()
) -> Partition:
    """The picture's data. `costs`, per block, add seconds to what the graph knows of bytes.

    `sizes` is the number of ranks of each stage; one, unless given.
    """
    sizes = tuple(sizes) or (1,) * (max(stage_of, default=0) + 1)
    cells = _cells(graph, stage_of, costs, sizes)
    known = costs or Costs((Cost(0.0, 0.0, 0.0),) * len(graph.blocks))
    stages = of_stages(known, graph, stage_of).shared(sizes).items
    return Partition(cells, _crossings(graph, stage_of, cells), stages, sizes, costs is not None)


def stays_put(plan: Plan, source: int, target: int) -> bool:
    """Whether what crosses between two stages stays on the ranks that have both."""
    return all(row[source] == row[target] for row in plan.spatial_groups)


def _cells(
    graph: Graph, stage_of: Sequence[int], costs: Costs | None, sizes: Sequence[int]
) -> tuple[Cell, ...]:
    order = sorted(range(len(graph.blocks)), key=lambda i: (stage_of[i], i))
    runs = _folded(graph, stage_of, order)
    return tuple(
        Cell(
            name,
            stage_of[run[0]],
            tuple(run),
            graph.activations(run) / sizes[stage_of[run[0]]],
            sum(costs[i].seconds for i in run) / sizes[stage_of[run[0]]] if costs else None,
        )
        for name, run in runs
    )


def _folded(graph: Graph, stage_of: Sequence[int], order: list[int]) -> list[tuple[str, list[int]]]:
    """Runs of blocks with their names, in the finest way that leaves few enough of them."""
    most = max(CELLS, 3 * (max(stage_of, default=0) + 1))
    runs: list[tuple[str, list[int]]] = []
    for name in _foldings(graph):
        runs = []
        for i in order:
            last = runs[-1] if runs else None
            if last and last[0] == name(i) and stage_of[last[1][-1]] == stage_of[i]:
                last[1].append(i)
            else:
                runs.append((name(i), [i]))
        if len(runs) <= most:
            break
    return runs


def _foldings(graph: Graph) -> Iterator[Callable[[int], str]]:
    """Names to fold by: blocks, layers, then modules from the innermost to the outermost."""
    paths = [block.name.partition(":")[0].split(".") for block in graph.blocks]
    yield lambda i: graph.blocks[i].name
    yield lambda i: graph.blocks[i].layer
    for depth in range(max(map(len, paths), default=1) - 1, 0, -1):
        yield lambda i, depth=depth: ".".join(paths[i][:depth])
    yield lambda i: ""


def _crossings(
    graph: Graph, stage_of: Sequence[int], cells: tuple[Cell, ...]
) -> tuple[Crossing, ...]:
    cell_of = {block: n for n, cell in enumerate(cells) for block in cell.blocks}
    found: dict[tuple[int, int], list[str]] = {}
    for (_, reader), names in crossings(graph, stage_of).items():
        for name in names:
            readers = [
                i
                for i, block in enumerate(graph.blocks)
                if stage_of[i] == reader and name in block.reads
            ]
            last = max(n for n, cell in enumerate(cells) if cell.stage == reader)
            target = cell_of[readers[0]] if readers else last  # an output, wanted by the loss
            found.setdefault((cell_of[graph.producer[name]], target), []).append(name)
    return tuple(
        Crossing(source, target, tuple(names), sum(graph.value[n].bytes for n in names))
        for (source, target), names in sorted(found.items())
    )
