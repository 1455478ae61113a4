"""One sweep of a streamed stage: the same calls on one patch after the other.

               forward, without autograd                    backward
    values ──► for each patch of the outputs:               for each patch:
      │          1. read the box that it needs                1. and 2. again, with autograd
      │          2. run the calls on it                       3. backward from the patch's part of
      │          3. write the patch to its place                 the gradients: weights accumulate
      └─ saved ─► outputs, whole                              4. accumulate the box's gradient into
                                                                 the gradients of the values

Patches of the outputs are disjoint, so every gradient enters once, and backward is linear in it:
sums over patches are exact. Boxes of the values overlap, and are padded only where the image ends.
Of what sums up over the image, every patch gives the summand of its cells.

Patches that carry (carried_halos.py) take halos of earlier ones as well; backward then takes them
from the last to the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gems.geometry.box import Box
from gems.torch.autograd.saved_tensors import SavedTensors
from gems.torch.runtime.carried_halos import Carrier, CarryGroup, Halos
from gems.torch.runtime.codegen import Program, write
from gems.torch.runtime.patch_progress import patch_done
from gems.torch.spatial.carried_layout import carrying, near, one_tile
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.moments import merged
from gems.torch.spatial.op import Run
from gems.torch.spatial.partition import StageLayout
from gems.torch.spatial.patch_layout import StreamLayout, alike, one_patch
from gems.torch.spatial.saved_tiles import SavedTiles
from gems.torch.spatial.tile import ForwardContext
from gems.torch.spatial.tiled_stage import bind
from gems.torch.spatial.unread_calls import unread
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Call
from gems.transport.protocol import Work

Tensor = torch.Tensor
Later = Callable[[], Tensor]  # what was begun to be read
Read = Callable[[str, Box | None], Later]  # a box of a value, or all of it
Receive = Callable[[str, Box | None, Tensor], Tensor]  # the same, ready for a gradient
Sizes = Callable[["Patch", "Patch | None"], int]  # bytes of boxes beside what a patch saves


class PatchGroup(SpatialGroup):
    """A spatial group of one patch, without neighbours."""

    def exchange(
        self, parts: Mapping[int, Sequence[Tensor]], counts: Mapping[int, int], like: Tensor
    ) -> tuple[dict[int, Tensor], Work]:
        raise AssertionError("a patch cannot exchange with another one")

    def all_reduce(self, mine: Tensor) -> Tensor:
        """A summand: the caller sums over patches."""
        return mine

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        raise AssertionError("a patch cannot gather the others")


@dataclass(frozen=True)
class Patch:
    """One patch: its number, what to call, the boxes that it reads, its part of each output."""

    number: int
    runs: Mapping[str, Run]
    reads: Mapping[str, Box | None]  # None: all of it
    parts: Mapping[str, tuple[Box, tuple[slice, ...]]]  # output -> its place, and where it is here


class Swept:
    """The calls of a sweep on one rank, which runs the patches at `places` of the layout's grid.

    Patches are `kept` from pass to pass if asked to: many would take the memory that streaming
    saves.
    """

    def __init__(
        self,
        layout: StreamLayout,
        laid: StageLayout,
        model: nn.Module,
        outputs: Sequence[str],
        draws: Draws,
        places: Sequence[range],
        *,
        keep: bool,
    ) -> None:
        if layout.carry:
            laid, places = one_tile(laid, places), [range(len(row)) for row in places]
        self.layout, self.laid = layout, laid
        self.places, self.keep = [list(row) for row in places], keep
        self.carrying = carrying(laid) if layout.carry else set()
        self.carrier = Carrier(tuple(map(len, self.places)))
        self.near: dict[tuple[int, int], range] = {}
        self.kept: list[Patch] = []
        self.context = ForwardContext()
        self.alike = alike(laid)
        self.known: dict[tuple[int, ...], dict[str, Run]] = {}  # of patches that are alike
        self.now: Mapping[str, Run] = {}
        self.model, self.draws = model, draws
        self.program = self.back = self._program(self.laid.calls, outputs)
        self.inputs, self.outputs = self.program.inputs, self.program.outputs
        self.changed = {n for call in laid.calls for n in call.overwrites}
        self.unread = unread(laid.calls, model)
        self.measuring: Swept | None = None
        self.handing: tuple[Program, frozenset[str]] | None = None

    def measure_apart(self, measuring: Swept) -> None:
        """Let another sweep run backward through moments of what this one makes, from where that is
        stored. Then this one need not make it again."""
        self.measuring = measuring
        apart = {call.name for call in measuring.laid.calls}
        calls = [call for call in self.laid.calls if call.name not in apart]
        self.back = self._program(calls, [n for n in self.outputs if n not in measuring.outputs])
        self.unread = unread(calls, self.model)

    def _program(self, calls: Sequence[Call], outputs: Sequence[str]) -> Program:
        instead = {call.name: self._dispatch(call.name) for call in calls}
        return write(self.layout.record, self.model, calls, outputs, self.draws, None, instead)

    def _dispatch(self, name: str) -> Run:
        """The call as the current patch makes it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return self.now[name](*args, **kwargs)

        return run

    # --- patches --------------------------------------------------------------------------------

    def patches(self, *, back: bool = False) -> Iterable[Patch]:
        """All patches that have a part of some output, or that carry; those from the last to the
        first if they run `back`."""
        step = -1 if back and self.layout.carry else 1
        if not self.keep:
            return self._patches(step)
        self.kept = self.kept or list(self._patches(1))
        return self.kept[::step]

    def _patches(self, step: int) -> Iterator[Patch]:
        added = {
            name: (Box.whole(self.layout.record.values[name].shape), (...,))
            for name in self.outputs
            if name in self.laid.added
        }
        count = sum(rule is not None for rule in self.laid.rules)
        ends = {*self.inputs, *self.outputs}
        for number, place in list(enumerate(itertools.product(*self.places)))[::step]:
            kind = tuple(row[at] for row, at in zip(self.alike, place, strict=True))
            known = self.known.setdefault(kind, {})
            shared = len(known) == count
            boxes = one_patch(self.laid, place, ends).layouts
            parts: dict[str, Any] = dict(added)
            for name in self.outputs:
                if name in boxes:
                    (own,), (have,) = boxes[name].own_boxes(), boxes[name].boxes()
                    if not own.empty:
                        parts[name] = (own, own.relative_to(have).slices())
                    elif self.layout.carry:  # backward goes through what it hands on
                        parts[name] = (own, tuple(slice(0, n) for n in own.shape))
            if parts or self.carrying:
                reads = {n: boxes[n].boxes()[0] if n in boxes else None for n in self.inputs}
                runs = known if shared else self._bind(place, known)
                yield Patch(number, runs, reads, parts)

    def _bind(self, place: Sequence[int], known: dict[str, Run]) -> dict[str, Run]:
        """What to call for a patch instead of each call."""
        if not self.layout.carry:
            group: SpatialGroup = PatchGroup((1,) * len(place), (0,), 0, None)  # type: ignore
            return bind(one_patch(self.laid, place), group, self.context, known).runs
        around = [self._near(axis, at) for axis, at in enumerate(place)]
        grid, me = tuple(map(len, around)), 0
        for row, at in zip(around, place, strict=True):
            me = me * len(row) + row.index(at)
        members = tuple(range(prod(grid)))
        group = CarryGroup(grid, members, me, None, carrier=self.carrier)  # type: ignore[arg-type]
        return bind(one_tile(self.laid, around), group, self.context, known).runs

    def _near(self, axis: int, at: int) -> range:
        """The places along an axis with which one exchanges halos."""
        if (axis, at) not in self.near:
            self.near[axis, at] = near(self.laid, axis, at)
        return self.near[axis, at]

    def compute(
        self, patch: Patch, program: Program, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """A patch's part of every output of the program. It stays the current one: what the model
        itself checkpoints is recomputed in backward."""
        self.now, self.carrier.patch = patch.runs, patch.number
        found = program.run(*(given[name] for name in program.inputs))
        results = dict(zip(program.outputs, found, strict=True))
        return {n: results[n][here] for n, (_, here) in patch.parts.items() if n in results}

    # --- passes ---------------------------------------------------------------------------------

    def forward(
        self, read: Read, write: Callable[[str, Box, Tensor], None], sums: dict[str, Tensor],
        halos: Halos,
    ) -> None:  # fmt: skip
        """Write every patch to its place in the outputs, or merge it into `sums`."""

        def begin(patch: Patch) -> dict[str, Later]:
            halos.begin(patch.number)
            return {name: read(name, patch.reads[name]) for name in self.inputs}

        with self.carrier.carrying(halos, recomputing=False):
            for patch, begun, _ in ahead(self.patches(), begin):
                halos.arrive(patch.number)
                given = {name: self._own(name, begun[name]()) for name in self.inputs}
                for name, part in self.compute(patch, self.program, given).items():
                    if name in self.layout.moments:
                        sums[name] = merged(sums[name], part)
                    elif name in self.laid.added:
                        sums[name] += part
                    elif part.numel():
                        write(name, patch.parts[name][0], part)
                halos.ran(patch.number)

    def hand_on(self, read: Read, halos: Halos) -> None:
        """Run what makes halos, and nothing behind it; the last patch hands nothing on."""
        if self.handing is None:
            calls = _up_to(self.laid.calls, self.carrying)
            self.handing = self._program(calls, ()), unread(calls, self.model, self.carrying)
        program, unread_here = self.handing

        def begin(patch: Patch) -> dict[str, Later]:
            halos.begin(patch.number)
            return {name: read(name, patch.reads[name]) for name in program.inputs}

        with self._reading({}, unread_here), self.carrier.carrying(halos, recomputing=False):
            all_but_last = (patch for patch, _ in itertools.pairwise(self.patches()))
            for patch, begun, _ in ahead(all_but_last, begin):
                halos.arrive(patch.number)
                self.compute(patch, program, {n: self._own(n, begun[n]()) for n in begun})
                halos.ran(patch.number)

    @contextmanager
    def _reading(self, known: Mapping[str, Tensor], unread: Set[str]) -> Iterator[None]:
        """While some sums are known, and the results of some calls are not looked at."""
        self.context.known, self.context.unread = known, unread
        try:
            yield
        finally:
            self.context.known, self.context.unread, self.context.saved = {}, frozenset(), None

    def _own(self, name: str, x: Tensor) -> Tensor:
        """A value that may be changed."""
        return x.clone() if name in self.changed else x

    def backward(
        self, read: Read, receive: Receive, gradients: Read, present: Set[str],
        known: Mapping[str, Tensor], around: Callable[[], AbstractContextManager[Any]],
        uncounted: Set[int], sizes: Sizes, sums: Mapping[str, Tensor], halos: Halos,
    ) -> int:  # fmt: skip
        """Recompute every patch, and run backward through it. `present` are the outputs that have
        gradients, of which boxes are read; to `sums` summands are added that forward left out. The
        most bytes that one patch had, without those of the `uncounted` storages."""

        def begin(patch: Patch) -> dict[str, Later]:
            halos.begin(patch.number)
            return {name: read(name, patch.reads[name]) for name in self.inputs}

        most, context, carried = 0, self.context, halos.bytes
        with self._reading(known, self.unread), self.carrier.carrying(halos, recomputing=True):
            for patch, begun, following in ahead(self.patches(back=True), begin):
                halos.arrive(patch.number)
                context.saved = saved = SavedTiles(uncounted | halos.storages(patch.number))
                with around(), torch.enable_grad(), SavedTensors(saved).hooks():
                    given = {
                        name: self._own(name, receive(name, patch.reads[name], begun.pop(name)()))
                        for name in self.inputs
                    }
                    results = self.compute(patch, self.back, given)
                    del given
                context.saved = None
                pairs = []
                for name, total in sums.items():
                    total += results[name].detach()
                for name, x in results.items():
                    if name in present and x.requires_grad:
                        box = None if name in self.laid.added else patch.parts[name][0]
                        pairs.append((get_gradient_edge(x), gradients(name, box)()))
                del results
                kept = halos.bytes - carried  # those of patches that have run are gone
                if pairs:
                    torch.autograd.backward([edge for edge, _ in pairs], [g for _, g in pairs])
                most = max(most, saved.bytes + sizes(patch, following) + kept + halos.most())
                halos.done(patch.number)
        halos.finished()
        return most


def _up_to(calls: Sequence[Call], names: Set[str]) -> list[Call]:
    """The calls of these names, and what they need of the others."""
    found, needed = list[Call](), set[str]()
    for call in reversed(calls):
        if call.name in names or needed.intersection(call.writes):
            found.insert(0, call)
            needed.update(call.reads)
    return found


def ahead(
    patches: Iterable[Patch], begin: Callable[[Patch], dict[str, Later]]
) -> Iterator[tuple[Patch, dict[str, Later], Patch | None]]:
    """Each patch with what was begun for it, and the one after it, for which as much is begun
    before it runs."""
    begun = ((patch, begin(patch)) for patch in patches)
    now = next(begun, None)
    while now is not None:
        following = next(begun, None)
        yield *now, None if following is None else following[0]
        patch_done()
        now = following
