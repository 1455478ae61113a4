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
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gems.geometry.box import Box
from gems.torch.autograd.saved_tensors import SavedTensors
from gems.torch.runtime.codegen import Program, write
from gems.torch.runtime.patch_progress import patch_done
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.moments import merged
from gems.torch.spatial.op import Run
from gems.torch.spatial.partition import StageLayout
from gems.torch.spatial.patch_layout import StreamLayout, alike, one_patch
from gems.torch.spatial.saved_tiles import SavedTiles
from gems.torch.spatial.tile import ForwardContext
from gems.torch.spatial.tiled_stage import TiledStage, bind
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
    """One patch: what to call, the boxes that it reads, its part of each output."""

    bound: TiledStage
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
        places: Sequence[Iterable[int]],
        *,
        keep: bool,
    ) -> None:
        self.layout, self.laid = layout, laid
        self.places, self.keep = places, keep
        self.kept: list[Patch] = []
        self.context = ForwardContext()
        self.alike = alike(laid)
        self.known: dict[tuple[int, ...], dict[str, Run]] = {}  # of patches that are alike
        self.now: TiledStage | None = None
        self.model, self.draws = model, draws
        self.program = self.back = self._program(self.laid.calls, outputs)
        self.inputs, self.outputs = self.program.inputs, self.program.outputs
        self.changed = {n for call in laid.calls for n in call.overwrites}
        self.unread = unread(laid.calls, model)
        self.measuring: Swept | None = None

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
            assert self.now is not None
            return self.now.runs[name](*args, **kwargs)

        return run

    # --- patches --------------------------------------------------------------------------------

    def patches(self) -> Iterable[Patch]:
        """All patches that have a part of some output."""
        if not self.keep:
            return self._patches()
        self.kept = self.kept or list(self._patches())
        return self.kept

    def _patches(self) -> Iterator[Patch]:
        added = {
            name: (Box.whole(self.layout.record.values[name].shape), (...,))
            for name in self.outputs
            if name in self.laid.added
        }
        count = sum(rule is not None for rule in self.laid.rules)
        ends = {*self.inputs, *self.outputs}
        for place in itertools.product(*self.places):
            kind = tuple(row[at] for row, at in zip(self.alike, place, strict=True))
            known = self.known.setdefault(kind, {})
            shared = len(known) == count
            laid = one_patch(self.laid, place, ends if shared else None)
            parts: dict[str, Any] = dict(added)
            for name in self.outputs:
                if (layout := laid.layouts.get(name)) is not None:
                    (own,), (have,) = layout.own_boxes(), layout.boxes()
                    if not own.empty:
                        parts[name] = (own, own.relative_to(have).slices())
            if parts:
                group = PatchGroup((1,) * len(place), (0,), 0, None)  # type: ignore[arg-type]
                if shared:
                    bound = TiledStage(group, laid, known, self.context)
                else:
                    bound = bind(laid, group, self.context, known)
                yield Patch(bound, {name: bound.box(name) for name in self.inputs}, parts)

    def compute(
        self, patch: Patch, program: Program, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """A patch's part of every output of the program. It stays the current one: what the model
        itself checkpoints is recomputed in backward."""
        self.now = patch.bound
        found = program.run(*(given[name] for name in program.inputs))
        results = dict(zip(program.outputs, found, strict=True))
        return {n: results[n][here] for n, (_, here) in patch.parts.items() if n in results}

    # --- passes ---------------------------------------------------------------------------------

    def forward(
        self, read: Read, write: Callable[[str, Box, Tensor], None], sums: dict[str, Tensor]
    ) -> None:
        """Write every patch to its place in the outputs, or merge it into `sums`."""

        def begin(patch: Patch) -> dict[str, Later]:
            return {name: read(name, patch.reads[name]) for name in self.inputs}

        for patch, begun, _ in ahead(self.patches(), begin):
            given = {name: self._own(name, begun[name]()) for name in self.inputs}
            for name, part in self.compute(patch, self.program, given).items():
                if name in self.layout.moments:
                    sums[name] = merged(sums[name], part)
                elif name in self.laid.added:
                    sums[name] += part
                else:
                    write(name, patch.parts[name][0], part)

    def _own(self, name: str, x: Tensor) -> Tensor:
        """A value that may be changed."""
        return x.clone() if name in self.changed else x

    def backward(
        self, read: Read, receive: Receive, gradients: Read, present: Set[str],
        known: Mapping[str, Tensor], around: Callable[[], AbstractContextManager[Any]],
        uncounted: Set[int], sizes: Sizes, sums: Mapping[str, Tensor],
    ) -> int:  # fmt: skip
        """Recompute every patch, and run backward through it. `present` are the outputs that have
        gradients, of which boxes are read; to `sums` summands are added that forward left out. The
        most bytes that one patch had, without those of the `uncounted` storages."""

        def begin(patch: Patch) -> dict[str, Later]:
            return {name: read(name, patch.reads[name]) for name in self.inputs}

        most, context = 0, self.context
        context.known, context.unread = known, self.unread
        for patch, begun, following in ahead(self.patches(), begin):
            context.saved = saved = SavedTiles(uncounted)
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
            most = max(most, saved.bytes + sizes(patch, following))
            if pairs:
                torch.autograd.backward([edge for edge, _ in pairs], [g for _, g in pairs])
        context.known, context.unread = {}, frozenset()
        return most


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
