"""What a streamed stage takes: patches overlap where a layer reads around its outputs.

    image     ├───────────┼───────────┼───────────┤        3 patches of L / 3 outputs
    boxes     ├─────────────┤                              read  L / 3 + R / 2
                      ├───────────────┤                          L / 3 + R
                                  ├───────────────┤              L / 3 + R / 2

R adds up over the layers from the last to the first of a sweep: the first layers do most of the
work twice. Where all of the image is needed a sweep ends, and what the next ones read is stored.
Patches that carry do no work twice, and save halos (carried_cost.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from gems.hardware import Link
from gems.model.costs import Cost, Costs, StoredBytes
from gems.model.graph import Graph, Value, crossings
from gems.model.sweeps import Step, assign
from gems.plans.plan import Plan
from gems.predict.carried_cost import CarriedSweep

TARGET = 8  # bytes of a class in a target
ROUNDING = 1e-6  # of a cell
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
    for i, (beyond, _) in _reaches(graph, blocks, len(grid)).items():
        # Of a mean over the image, most is what it reads.
        near = (*graph.blocks[i].writes, *graph.blocks[i].reads) if i >= 0 else graph.inputs
        images = [graph.value[n] for n in near if _image(graph.value[n], grid)]
        found[i] = _overlap(max(images, key=lambda v: v.bytes, default=None), grid, beyond)
    return found


Reach = tuple[float, ...]  # cells around a value that are read, as a part of the image, by axis


def _reaches(graph: Graph, blocks: Sequence[int], axes: int) -> dict[int, tuple[Reach, Reach]]:
    """What is read around what each block makes, by later ones, and around what it reads, by it
    too; and around what enters the stage."""
    found, beyond = {}, (0.0,) * axes
    for i in reversed(blocks):
        own = graph.blocks[i].reach[-axes:]
        own = (0.0,) * (axes - len(own)) + tuple(own)
        around = tuple(a + b for a, b in zip(beyond, own, strict=True))
        found[i], beyond = (beyond, around), around
    found[ENTERING] = (beyond, beyond)
    return found


def _overlap(value: Value | None, grid: Sequence[int], beyond: Sequence[float]) -> Overlap:
    if value is None:
        return Overlap(1.0, prod(grid))  # every patch makes all of it
    largest, total = [], []
    for length, parts, reach in zip(value.shape[-len(grid) :], grid, beyond, strict=True):
        sides = min(parts - 1, 2)  # of a patch that are not the image's own
        cells = ceil(length / parts) + sides * ceil(reach / 2 * length - ROUNDING)
        largest.append(min(cells / max(length, 1), 1.0))
        total.append(min(1 + (parts - 1) * reach, parts))
    return Overlap(prod(largest), prod(total))


def tile_bytes(
    graph: Graph, name: str, tiles: Sequence[int], rows: Iterable[Sequence[int]]
) -> float:
    """Of a value, on the rank that has most of it: its tile, with the halo that is read by rows of
    blocks, each of which runs at once."""
    value, around = graph.value[name], (0.0,) * len(tiles)
    if prod(tiles) == 1 or not _image(value, tiles):
        return value.bytes
    for row in rows:
        reaches = _reaches(graph, row, len(tiles))
        for _, reach in (reaches[i] for i in row if name in graph.blocks[i].reads):
            around = tuple(map(max, around, reach))
    return value.bytes * _overlap(value, tiles, around).largest


def stored_values(graph: Graph, stage_of: Sequence[int], plan: Plan) -> dict[str, tuple[int, ...]]:
    """The values that streamed stages hand each other by way of a store, with the stages that read
    them: of one rank each, or of the same tiles of the same ranks. What another stage reads too, or
    the loss, is on the device anyway."""
    readers: dict[str, list[int]] = {}
    for (_, target), names in crossings(graph, stage_of).items():
        for name in names:
            readers.setdefault(name, []).append(target)
    found = {}
    for name, stages in readers.items():
        value, source = graph.value[name], stage_of[graph.producer[name]]
        policies = [plan.activations[s] for s in (source, *stages)]
        alone = all(plan.sizes[s] == 1 for s in (source, *stages))
        boxed = alone or _same_tiles(plan, (source, *stages))
        boxed = boxed and all(p.values and _image(value, p.patches) for p in policies)
        if boxed and name not in graph.outputs:
            found[name] = tuple(sorted(stages))
    return found


def _same_tiles(plan: Plan, stages: Sequence[int]) -> bool:
    """Whether the same ranks have the same tiles of all these stages."""
    places = {(plan.grids[s], plan.spatial_group_of(s, 0)) for s in stages}
    return len(places) == 1 and bool(plan.grids[stages[0]].tiles)


def _image(value: Value, grid: Sequence[int]) -> bool:
    return len(value.shape) >= 2 + len(grid)


@dataclass(frozen=True)
class Sweeps:
    """The blocks of a streamed stage by sweep, and what is stored between them. A norm is in two:
    its sums in one, the rest in the next."""

    blocks: tuple[tuple[int, ...], ...]
    made: dict[str, int]  # value -> the sweep that makes it
    read: dict[str, tuple[int, ...]]  # value that is made earlier -> the sweeps that read it


def sweeps(graph: Graph, blocks: Sequence[int]) -> Sweeps:
    """As the runtime has them, of blocks instead of calls. Many plans ask for the same."""
    if (known := graph.known_sweeps.get(tuple(blocks))) is None:
        known = graph.known_sweeps[tuple(blocks)] = _sweeps(graph, blocks)
    return known


def _sweeps(graph: Graph, blocks: Sequence[int]) -> Sweeps:
    rows: dict[int, list[int]] = {0: []}
    made: dict[str, int] = {}
    mine = [graph.blocks[i] for i in blocks]
    steps = [Step(b.reads, b.writes, b.mutates, b.tiled, b.joins) for b in mine]
    inside = set(blocks)
    others = {n for i, b in enumerate(graph.blocks) if i not in inside for n in b.reads}
    sizes = {v.name: v.bytes for v in graph.values}
    for i, at in zip(blocks, assign(steps, sizes, others.union(graph.outputs)), strict=True):
        block = graph.blocks[i]
        if block.tiled:
            rows.setdefault(at, []).append(i)
        if block.joins == 2:
            rows.setdefault(at + 1, []).append(i)
        for name in block.writes:
            made[name] = at + (block.joins == 2)
    rows = {at: sorted(row) for at, row in rows.items()}
    read: dict[str, list[int]] = {}
    for at, row in sorted(rows.items()):
        for name in dict.fromkeys(n for i in row for n in graph.blocks[i].reads):
            if made.get(name, ENTERING) < at:
                read.setdefault(name, []).append(at)
    return Sweeps(
        tuple(tuple(row) for _, row in sorted(rows.items())),
        made,
        {name: tuple(at) for name, at in read.items()},
    )


def inner_stored(
    graph: Graph, stage: int, blocks: Sequence[int], grid: Sequence[int], tiles: Sequence[int],
    *, carries: bool,
) -> list[StoredBytes]:  # fmt: skip
    """What the sweeps of a stage hand each other by way of a store, and their patches."""
    found = sweeps(graph, blocks)
    tiles, fine = _grids(grid, tiles)
    memory = _Memory(graph, blocks, found, fine, tiles, carries=carries)
    halos = round(memory.halos())
    return [StoredBytes(stage, (stage,), halos, False)] * bool(halos) + [
        StoredBytes(stage, (stage,), round(memory.bytes(n)), graph.value[n].grad)
        for n in memory.stored
        if n not in memory.given
    ]


def workspace(
    graph: Graph, blocks: Sequence[int], grid: Sequence[int], stored: Collection[str] = ()
) -> float:
    """Bytes that backward keeps for the largest patch of a sweep, each storage once.

    What the sweep reads is kept anyway, whole, but a norm copies its box of it; of the model's own
    inputs, and of what is `stored`, a box is read again.
    """
    overlap, mine = overlaps(graph, blocks, grid), set(blocks)
    makers: dict[int, int] = {}
    for value in graph.values:
        maker = graph.producer.get(value.name, ENTERING)
        makers.setdefault(
            value.storage, ENTERING if value.name in stored and maker not in mine else maker
        )
    found: dict[int, float] = {}
    for i in blocks:
        for storage, size in graph.blocks[i].saves:
            maker = makers.get(storage, i)
            if maker == ENTERING or maker in mine:
                found.setdefault(storage, size * overlap[maker].largest)
            elif graph.blocks[i].joins == 2:
                found.setdefault(storage, size * overlap[i].largest)
    return sum(found.values())


def saved_storages(
    graph: Graph, blocks: Sequence[int], stored: Collection[str]
) -> list[tuple[int, str, int]]:
    """What backward keeps of a sweep, each storage once: the block that saves it, the image of
    which it is the memory, if of any, and its bytes. Of what the sweep reads as in `workspace`."""
    mine, images = set(blocks), {v.storage: v.name for v in reversed(graph.values)}
    found: dict[int, tuple[int, str, int]] = {}
    for i in blocks:
        for storage, size in graph.blocks[i].saves:
            name = images.get(storage, "")
            maker = graph.producer.get(name, ENTERING) if name else i
            if maker in mine or maker == ENTERING or name in stored or graph.blocks[i].joins == 2:
                found.setdefault(storage, (i, name, size))
    return list(found.values())


def streamed(
    cost: Cost,
    graph: Graph,
    costs: Costs,
    blocks: Sequence[int],
    grid: Sequence[int],
    call: float = 0.0,
    tiles: Sequence[int] = (),
    stored: Collection[str] = (),
    link: Link | None = None,
    *,
    carries: bool = False,
) -> Cost:
    """What a stage costs that runs patch by patch, and again in backward, weights and all. Python
    takes `call` for each, however small. On `tiles`, each rank runs the patches of its own.

    It keeps what it receives and what sweeps read of each other. Of what is `stored` it keeps
    nothing; boxes of that, and with a `link` to a store of what its sweeps hand each other, go over
    the link beside the work.
    """
    tiles, fine = _grids(grid, tiles)
    found, count = sweeps(graph, blocks), prod(grid)
    memory = _Memory(graph, blocks, found, fine, tiles, stored, carries=carries)
    if link is not None:
        memory.stored_too(memory.stored)
        memory.halos_stored = True
    rows = [memory.overlaps(at) for at in range(len(found.blocks))]
    forward = back = 0.0
    for at, row in enumerate(found.blocks):
        overlap, unread = rows[at], memory.unread(at)
        for i in row:
            part, share = costs[i], 0.5 if graph.blocks[i].joins == 2 else 1.0
            much, launch = share * overlap[i].total / prod(tiles), part.launch * count
            f, g, w = (
                (x - part.launch) * much + launch if x else 0.0 for x in (part.f, part.i, part.w)
            )
            f += call * count
            forward += 0.0 if memory.late(at) and not memory.hands_on(at) else f
            back += g + w + (0.0 if i in unread else f)
    back = back if cost.b else 0.0
    if link is not None:
        there, again = memory.moved()
        forward = max(forward, there / link.bandwidth)
        back = max(back, again / link.bandwidth) if back else 0.0
    pairs = [(costs[i], rows[k][i]) for k, row in enumerate(found.blocks) for i in row]
    return replace(
        cost,
        f=forward,
        i=back,
        w=0.0,
        halves=1.0,
        activations=memory.activations(),
        temporary=memory.temporary(),
        workspace=max((c.workspace * o.largest for c, o in pairs), default=0.0),
    )


def _grids(grid: Sequence[int], tiles: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tiles, and the patches of all of them, over as many axes."""
    tiles = (1,) * (len(grid) - len(tiles)) + tuple(tiles)
    grid = (1,) * (len(tiles) - len(grid)) + tuple(grid)
    return tiles, tuple(a * b for a, b in zip(tiles, grid, strict=True))


class _Memory:
    """Bytes of a streamed stage on a rank."""

    def __init__(
        self, graph: Graph, blocks: Sequence[int], found: Sweeps, fine: Sequence[int],
        tiles: Sequence[int], in_store: Collection[str] = (), *, carries: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.found, self.fine, self.tiles = graph, found, fine, tiles
        mine = set(blocks)
        others = {n for i, b in enumerate(graph.blocks) if i not in mine for n in b.reads}
        entering = {n for i in blocks for n in graph.blocks[i].reads} - found.made.keys()
        self.received = [n for n in entering if n in graph.producer]
        self.given = [n for n in found.made if n in others or n in graph.outputs]
        self.compared: list[str] = []  # the loss is computed patch by patch, too
        if len(graph.blocks) - 1 in mine:
            self.compared = [n for n in self.given if n in graph.outputs and self._image(n)]
            self.given = [n for n in self.given if n not in self.compared]
        self.ends = [n for n in self.given if n in graph.outputs]
        self.stored = [n for n in found.read if n in found.made and self._image(n)]
        self.in_store = set(in_store)
        self.carried: list[CarriedSweep] = []
        self.halos_stored = False
        if carries:
            parts = [n // t for n, t in zip(fine, tiles, strict=True)]
            later = {*self.given, *self.compared, *found.read}
            self.carried = [
                CarriedSweep(graph, row, found.made, at, tiles, parts, later)
                for at, row in enumerate(found.blocks)
            ]

    def overlaps(self, at: int) -> dict[int, Overlap]:
        """Of each block of a sweep, as `overlaps` has it."""
        row = self.found.blocks[at]
        if not self.carried:
            return overlaps(self.graph, row, self.fine)
        sweep, count, made = self.carried[at], prod(self.tiles), {}
        for i in row:
            name = sweep.image(i)
            made[i] = Overlap(sweep.largest(name), sweep.all_of(name) * count)
        return made

    def stored_too(self, names: Iterable[str]) -> None:
        """Of what sweeps hand each other; of what leaves the stage, that was decided."""
        self.in_store.update(n for n in names if n not in self.given)

    def moved(self) -> tuple[float, float]:
        """Bytes that patches read and write of stores, forward and backward."""
        written = sum(self.bytes(n) for n in self.in_store if n in self.found.made)
        read = sum(self.bytes(n) * len(self.found.read.get(n, ())) for n in self.in_store)
        halos = 2 * self.halos()  # there and back
        return read + written + halos, 3 * read + written + 1.5 * halos

    def _image(self, name: str) -> bool:
        i = self.graph.producer[name]
        return self.graph.blocks[i].tiled and self.graph.blocks[i].joins != 1

    def bytes(self, name: str) -> float:
        """Of a rank's tile, with the halo that is read of it."""
        rows = [self.found.blocks[k] for k in self.found.read.get(name, ())]
        return tile_bytes(self.graph, name, self.tiles, rows)

    def activations(self) -> float:
        kept = (*self.received, *self.stored, *self.ends)
        whole = sum(self.bytes(n) for n in dict.fromkeys(kept) if n not in self.in_store)
        return whole + (0 if self.halos_stored else self.halos())

    def hands_on(self, at: int) -> bool:
        """Whether patches of a sweep carry anything, so that they run forward."""
        return bool(self.carried) and self.carried[at].halos > 0

    def halos(self) -> float:
        """Of all patches that carry."""
        return sum(sweep.halos for sweep in self.carried)

    def temporary(self) -> float:
        """The most beyond these: a patch, gradients, without what later sweeps needed."""
        found, value = self.found, self.graph.value
        most = 0.0
        for at, row in enumerate(found.blocks):
            alive = {n for n in self.given if found.made[n] <= at}
            for name, readers in found.read.items():
                if (name in self.received or name in self.stored) and (
                    found.made.get(name, ENTERING) <= at <= readers[-1]
                ):
                    alive.add(name)
            alive -= self.in_store
            gradients = sum(self.bytes(n) for n in alive if value[n].grad)
            freed = sum(
                self.bytes(n)
                for n in self.stored
                if found.read[n][0] > at and n not in self.in_store
            )
            if not self.halos_stored:
                freed += sum(sweep.halos for sweep in self.carried[at + 1 :])
            again = [i for i in row if not self._measured(at, i)]
            patch = self._patch(at, again) + self._boxes(at, row)
            patch += self._loss(at) + self._weights(row)
            most = max(most, patch + gradients - freed)
        return most

    def _patch(self, at: int, again: Sequence[int]) -> float:
        """What backward keeps for the largest patch of a sweep."""
        if not self.carried:
            return workspace(self.graph, again, self.fine, self.in_store)
        sweep = self.carried[at]
        sizes = saved_storages(self.graph, again, self.in_store)
        return max(
            sum(size * sweep.share(name or sweep.image(i), place) for i, name, size in sizes)
            + (sweep.beyond_store(place) if self.halos_stored else sweep.beyond(place))
            for place in sweep.places
        )

    def _weights(self, row: Sequence[int]) -> float:
        """The gradient that one of several patches makes of the largest weight, before it is added
        to that of the patches before."""
        names = {n for i in row for n in self.graph.blocks[i].parameters}
        sizes = (self.graph.weight[n].bytes for n in names)
        return max(sizes, default=0) if prod(self.fine) > prod(self.tiles) else 0

    def _measured(self, at: int, i: int) -> bool:
        """Whether a norm begins in a sweep, with what the sweep makes: backward then reads that
        where it is stored, before the patches."""
        block, made = self.graph.blocks[i], self.found.made
        here = [n for n in block.reads if made.get(n) == at and n not in self.in_store]
        return block.joins == 2 and bool(here) and any(made[n] > at for n in block.writes)

    def late(self, at: int) -> bool:
        """Whether patches run in backward only: their loss is not known before, and not needed."""
        last = at == len(self.found.blocks) - 1
        return last and any(self.found.made[n] == at for n in self.compared)

    def unread(self, at: int) -> set[int]:
        """The blocks that backward does not run again: nobody looks at what they make, as norms
        that begin there read it where it is stored."""
        blocks, found = self.graph.blocks, set[int]()
        read = {n for n in self.compared if self.found.made[n] == at}
        for i in reversed(self.found.blocks[at]):
            block = blocks[i]
            if self._measured(at, i):
                continue
            seen = not read.isdisjoint(block.writes)
            if block.blind == 1 and not seen:
                found.add(i)
            if block.blind != 2 or seen:
                read.update((*block.reads, *block.mutates))
        return found

    def _loss(self, at: int) -> float:
        """What a cross-entropy saves of a patch: log-probabilities, and the targets."""
        found = 0.0
        for name in self.compared:
            if self.found.made[name] == at:
                value = self.graph.value[name]
                largest = self._own(at, name)
                cells = prod(value.shape) / max(value.shape[1], 1)
                found += largest * (value.bytes + TARGET * cells)
        return found

    def _boxes(self, at: int, row: Sequence[int]) -> float:
        """Boxes of stored values in a sweep: of the next patch, read while one runs; of gradients
        that are added to; and of those of what it made, twice."""
        reaches, value = _reaches(self.graph, row, len(self.fine)), self.graph.value
        found = 0.0
        for name in self.in_store:
            readers = [i for i in row if name in self.graph.blocks[i].reads]
            if readers and at in self.found.read.get(name, ()):
                around = [reaches[i][1] for i in readers]
                largest = max(_overlap(value[name], self.fine, one).largest for one in around)
                largest = self.carried[at].largest(name) if self.carried else largest
                found += value[name].bytes * largest * (1 + value[name].grad)
            if self.found.made.get(name) == at and value[name].grad:
                found += value[name].bytes * self._own(at, name)
        return found

    def _own(self, at: int, name: str) -> float:
        """The part of a value that the largest patch gives to it."""
        if self.carried:
            return self.carried[at].largest(name)
        return _overlap(self.graph.value[name], self.fine, [0.0] * len(self.fine)).largest
