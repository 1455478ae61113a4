"""A streamed stage: the patches of an image run one after another, and are recomputed in backward.

               forward, without autograd                    backward
    inputs ──► for each patch of the outputs:               for each patch:
      │          1. read the box that it needs                1. and 2. again, with autograd
      │          2. run the calls on it                       3. backward from the patch's part of
      │          3. write the patch to its place                 the gradients: weights accumulate
      └─ saved ─► outputs, whole                              4. accumulate the box's gradient into
                                                                 the gradients of the inputs

Patches of the outputs are disjoint, so every gradient enters once, and backward is linear in it:
sums over patches are exact. Boxes of the inputs overlap, and are padded only where the image ends.
Of an output that is a sum or mean over the image, every patch gives the summand of its cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gems.geometry.box import Box
from gems.model.graph import Value
from gems.torch.autograd.saved_tensors import SavedTensors, unpacked
from gems.torch.autograd.split_backward import receive
from gems.torch.runtime.codegen import write
from gems.torch.runtime.microbatch import read_box
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.op import Run
from gems.torch.spatial.partition import StageLayout
from gems.torch.spatial.patch_layout import one_patch
from gems.torch.spatial.saved_tiles import SavedTiles
from gems.torch.spatial.tiled_stage import TiledStage, bind
from gems.torch.tensors.memory_format import MemoryFormat
from gems.torch.tensors.rng import Draws
from gems.torch.tensors.storage import storage_of
from gems.torch.tensors.strides import strided
from gems.torch.tracing.calls import Call, Record
from gems.transport.protocol import Work

Tensor = torch.Tensor
KNOWN = 2048  # calls of all patches that a stage remembers, of some 3 KB each


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
    """One patch: what to call, the boxes of the inputs that it reads, its part of each output."""

    bound: TiledStage
    reads: Mapping[str, Box | None]  # None: all of it
    parts: Mapping[str, tuple[Box, tuple[slice, ...]]]  # output -> its place, and where it is here


class Stream:
    """A streamed stage: `run(*inputs)` gives its outputs, both in the order of their names.

    Of the model's own inputs, tensors or arrays, only boxes are read. Patches are recomputed inside
    the context that `around` makes. `temporary` is the peak memory of the last backward, without
    the inputs.
    """

    def __init__(
        self,
        record: Record,
        model: nn.Module,
        calls: Sequence[Call],
        outputs: Sequence[str],
        laid: StageLayout,
        draws: Draws,
        *,
        device: torch.device,
        weights: Set[int],
        around: Callable[[], AbstractContextManager[Any]],
        memory_format: MemoryFormat | None = None,
    ) -> None:
        self.laid, self.device, self.weights, self.around = laid, device, weights, around
        self.memory_format = memory_format or MemoryFormat()
        self.values: dict[str, Value] = record.values
        cut = (c.name for c, rule in zip(laid.calls, laid.rules, strict=True) if rule is not None)
        instead = {name: self._dispatch(name) for name in cut}
        program = write(record, model, calls, outputs, draws, None, instead)
        self.inputs, self.outputs, self.program = program.inputs, program.outputs, program
        self.own = set(record.inputs)  # not received from another stage
        self.changed = {n for call in calls for n in call.overwrites}
        self.grid = next(iter(laid.layouts.values())).grid
        self.known: list[Patch] = []
        self.now: TiledStage | None = None
        self.saved = SavedTensors()  # of this forward
        self.temporary = 0

    def _dispatch(self, name: str) -> Run:
        """The call as the current patch makes it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            assert self.now is not None
            return self.now.runs[name](*args, **kwargs)

        return run

    def run(self, *inputs: Any) -> tuple[Tensor, ...]:
        anchor = torch.empty(0, requires_grad=True)  # weights may want a gradient if no input does
        return _Streamed.apply(anchor, self, *inputs)  # type: ignore[no-any-return]

    # --- patches --------------------------------------------------------------------------------

    def patches(self) -> Iterable[Patch]:
        """All patches that have a part of some output. Few are remembered; many would take the
        memory that streaming saves."""
        if prod(self.grid) * len(self.laid.calls) > KNOWN:
            return self._patches()
        self.known = self.known or list(self._patches())
        return self.known

    def _patches(self) -> Iterator[Patch]:
        """The first patch gives outputs that are whole; every patch a summand of those that are
        sums."""
        whole = {
            name: (Box.whole(self.values[name].shape), (...,))
            for name in self.outputs
            if name not in self.laid.layouts
        }
        added = {name: part for name, part in whole.items() if name in self.laid.added}
        for place in itertools.product(*map(range, self.grid)):
            laid = one_patch(self.laid, place)
            parts: dict[str, Any] = dict(whole)
            for name in self.outputs:
                if (layout := laid.layouts.get(name)) is not None:
                    (own,), (have,) = layout.own_boxes(), layout.boxes()
                    if not own.empty:
                        parts[name] = (own, own.relative_to(have).slices())
            if parts:
                bound = bind(laid, PatchGroup((1,) * len(self.grid), (0,), 0, None))  # type: ignore[arg-type]
                yield Patch(bound, {name: bound.box(name) for name in self.inputs}, parts)
            whole = added

    def read(self, name: str, x: Any, box: Box | None) -> Tensor:
        """What a patch reads of an input: a view of what this rank received; a copy of the model's
        own inputs, and of what the patch changes."""
        if name in self.own:
            part = read_box(x, box).to(self.device, non_blocking=True)
            part = self.memory_format(part)
        else:
            part = x if box is None else x[box.slices()]
        return part.clone() if name in self.changed else part

    def compute(self, patch: Patch, given: Sequence[Tensor]) -> dict[str, Tensor]:
        """A patch's part of every output. It stays the current one: what the model itself
        checkpoints is recomputed in backward."""
        self.now = patch.bound
        results = dict(zip(self.outputs, self.program.run(*given), strict=True))
        return {name: results[name][here] for name, (_, here) in patch.parts.items()}

    def pack(self, name: str, x: Any) -> Any:
        """What is saved of an input for backward."""
        if name in self.own:
            return x.detach() if isinstance(x, Tensor) else x
        return self.saved.pack(x.detach(), x._version)

    def empty(self, name: str) -> Tensor:
        value = self.values[name]
        like = torch.empty(0, dtype=getattr(torch, value.dtype), device=self.device)
        found = strided(value.shape, value.strides, like)
        return found.zero_() if name in self.laid.added else found


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, stream: Stream, *inputs: Any) -> Any:
        ctx.stream = stream
        ctx.inputs = [stream.pack(n, x) for n, x in zip(stream.inputs, inputs, strict=True)]
        ctx.set_materialize_grads(False)
        outputs = {name: stream.empty(name) for name in stream.outputs}
        for patch in stream.patches():
            pairs = zip(stream.inputs, inputs, strict=True)
            given = [stream.read(name, x, patch.reads[name]) for name, x in pairs]
            for name, part in stream.compute(patch, given).items():
                place = patch.parts[name][0].slices()
                if name in stream.laid.added:
                    outputs[name][place] += part
                else:
                    outputs[name][place] = part
        fixed = (x for name, x in outputs.items() if not stream.values[name].grad)
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # type: ignore[override]
        stream: Stream = ctx.stream
        pairs = zip(stream.outputs, gradients, strict=True)
        arrived = {name: g for name, g in pairs if g is not None}
        pairs = zip(stream.inputs, ctx.inputs, strict=True)
        inputs = [x if name in stream.own else unpacked(x) for name, x in pairs]
        back = _Backward(stream, inputs, ctx.needs_input_grad[2:], arrived)
        for patch in stream.patches() if arrived else ():
            back.through(patch)
        stream.temporary = back.peak
        return None, None, *(back.sums.get(name) for name in stream.inputs)


class _Backward:
    """One backward through a stream: the gradients given, and those accumulated so far."""

    def __init__(
        self,
        stream: Stream,
        inputs: Sequence[Any],
        wanted: Sequence[bool],
        gradients: Mapping[str, Tensor],
    ) -> None:
        self.stream, self.inputs, self.wanted = stream, inputs, wanted
        self.gradients = gradients
        self.sums: dict[str, Tensor] = {}  # gradients of the inputs
        pairs = zip(stream.inputs, inputs, strict=True)
        received = [x for name, x in pairs if name not in stream.own]
        self.storages = stream.weights | {storage_of(x) for x in received}  # not counted
        wants = (x for x, wants in zip(inputs, wanted, strict=True) if wants)
        self.resident = sum(x.numel() * x.element_size() for x in (*gradients.values(), *wants))
        self.peak = 0

    def through(self, patch: Patch) -> None:
        """Recompute a patch, and run backward through it; nothing of it is left."""
        stream, context = self.stream, patch.bound.context
        context.saved = saved = SavedTiles(self.storages)
        with stream.around(), torch.enable_grad(), SavedTensors(saved).hooks():
            results = stream.compute(
                patch, [self._given(patch, k) for k in range(len(self.inputs))]
            )
        context.saved = None
        pairs = [
            (get_gradient_edge(x), self.gradients[name][patch.parts[name][0].slices()])
            for name, x in results.items()
            if name in self.gradients and x.requires_grad
        ]
        del results
        self.peak = max(self.peak, saved.bytes + self.resident)
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [g for _, g in pairs])

    def _given(self, patch: Patch, k: int) -> Tensor:
        name = self.stream.inputs[k]
        box = patch.reads[name]
        x = self.stream.read(name, self.inputs[k], box)
        if not self.wanted[k]:
            return x

        def arrive(gradient: Tensor) -> None:
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(self.inputs[k])
            self.sums[name][... if box is None else box.slices()] += gradient

        return receive(x, arrive)
