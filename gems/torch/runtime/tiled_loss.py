"""The loss of a tiled output: recorded like the model, and run on tiles by the same layer rules.

Per-pixel losses, with class weights and ignored cells, and losses made of sums (Dice, IoU) are
those of one device, because every sum in them is one over all ranks. Targets are tiled like the
output that they are compared with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.errors import PlanError, TraceError
from gems.geometry.layout import Layout
from gems.torch.runtime.codegen import Program, write
from gems.torch.runtime.microbatch import read_box, signature, stand_ins, tensors
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.partition import CallNotTileable, StageLayout, lay_out
from gems.torch.spatial.tiled_stage import TiledStage, bind
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Attr, Record, Ref, is_placeholder, leaves_of
from gems.torch.tracing.record import record
from gems.torch.tracing.unrecordable import REMEDY

log = logging.getLogger(__name__)
Tensor = torch.Tensor
Loss = Callable[[Any, Any], Any]
LAST = "Let the last stage be one that is not tiled"
PENALTY = "For a penalty on weights use the optimizer's weight_decay, or Trainer(regularizer=...)."
PICKED = "If it picks cells by a mask, write x[mask].mean() as (x * mask).sum() / mask.sum()."


class _Called(nn.Module):
    """A loss function as a module: if it cannot be recorded, it is a leaf and runs on all cells."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    def __deepcopy__(self, memo: Any) -> _Called:
        return _Called(self.function)

    def forward(self, output: Any, target: Any) -> Any:
        return self.function(output, target)


class _Compared(nn.Module):
    """A loss as a module, so that it can be recorded."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss if isinstance(loss, nn.Module) else _Called(loss)

    def forward(self, output: Any, target: Any) -> Any:
        return self.loss(output, target)


@dataclass
class TiledLoss:
    """A loss, recorded for outputs and targets of some shapes, and tiled over a grid."""

    module: nn.Module
    record: Record
    laid: StageLayout
    targets: list[str]  # the values of the record that are the target's tensors
    fingerprint: tuple[Any, ...]
    bound: dict[tuple[int, ...], tuple[Program, TiledStage]] = field(default_factory=dict)

    def opaque(self, loss: Loss) -> bool:
        """Whether this is the same loss, and nothing of it could be recorded."""
        mine: Any = self.module.loss
        same = mine is loss or (isinstance(mine, _Called) and mine.function is loss)
        return same and "loss" in self.record.leaves

    def on(self, group: SpatialGroup, draws: Draws) -> tuple[Program, TiledStage]:
        """The loss on this rank of a spatial group."""
        if group.ranks not in self.bound:
            placed, calls = bind(self.laid, group), self.record.calls
            outputs = self.record.outputs
            program = write(self.record, self.module, calls, outputs, draws, None, placed.runs)
            self.bound[group.ranks] = program, placed
        return self.bound[group.ranks]

    def run(self, bound: TiledStage, output: Any, target: Any, draws: Draws) -> Tensor:
        """The loss of the whole output, the same on every rank; its gradient is a rank's part."""
        program, placed = self.on(bound.group, draws)
        parts = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        device = parts[0].device
        for name, x in zip(self.targets, tensors(target), strict=True):
            parts.append(read_box(x, placed.box(name)).to(device, non_blocking=True))
        by_name = dict(zip(self.record.inputs, parts, strict=True))
        placed.context.saved = bound.context.saved
        try:
            (found,) = program.run(*(by_name[name] for name in program.inputs))
        finally:
            placed.context.saved = None
        return found


def prepare(
    loss: Loss,
    model: Record,
    last: StageLayout,
    target: Any,
    draws: Draws,
    known: dict[Any, TiledLoss],
) -> TiledLoss:
    """The loss for targets like this, recorded again if need be; `known` has those so far.

    A loss may change from step to step, for instance by a weight that grows. So it is recorded in
    every step, which takes milliseconds, and compared.
    """
    key = signature(target)
    if key in known and known[key].opaque(loss):  # which is called as it is, whatever it does
        return known[key]
    module, traced = record_loss(loss, model, target)
    fingerprint = fingerprint_of(traced)
    if key not in known or known[key].fingerprint != fingerprint:
        known[key] = _laid(module, traced, model, last, draws, fingerprint)
    return known[key]


def record_loss(loss: Loss, model: Record, target: Any) -> tuple[nn.Module, Record]:
    """A loss as a module, recorded on the model's whole outputs and on targets like this."""
    module = _Compared(loss)
    args = (pytree.tree_map(_whole(model), model.output, is_leaf=is_placeholder), stand_ins(target))
    try:
        return module, record(module, args, device=model.device)
    except TraceError as error:
        reason = str(error).removeprefix(f"{_Compared.__name__}.forward ").removesuffix(REMEDY)
        advice = PENALTY if "wants a gradient" in reason else PICKED
        raise PlanError(
            f"the model's output is tiled, but the loss {reason.rstrip('. ')}. {advice} {LAST}"
        ) from error


def _whole(model: Record) -> Callable[[Any], Any]:
    """Meta tensors in place of the model's whole outputs."""

    def stand_in(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        value = model.values[x.name]
        made = torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
        return made.requires_grad_(value.grad)

    return stand_in


def fingerprint_of(traced: Record) -> tuple[Any, ...]:
    """The calls of a recording, and all their arguments."""
    plain = (Ref, Attr, int, float, complex, str, type(None), torch.dtype)

    def spelled(x: Any) -> Any:
        return x if isinstance(x, plain) else id(x)

    return tuple(
        (
            call.name,
            *map(spelled, pytree.tree_leaves((call.args, call.kwargs), is_leaf=is_placeholder)),
        )
        for call in traced.calls
    )


def _laid(
    module: nn.Module, traced: Record, model: Record, last: StageLayout, draws: Draws,
    fingerprint: tuple[Any, ...],
) -> TiledLoss:  # fmt: skip
    layouts = [last.layouts.get(ref.name) for ref in leaves_of(model.output)]
    given = {n: x for n, x in zip(traced.inputs, layouts, strict=False) if x is not None}
    targets = list(traced.inputs[len(layouts) :])
    entering = {}
    for name in targets:
        layout = layout_of_target(traced.values[name].shape, list(given.values()))
        if layout is not None:
            entering[name] = layout
    try:
        laid = lay_out(traced, module, traced.calls, entering, draws, given=given)
    except CallNotTileable as error:
        raise PlanError(
            f"the model's output is tiled, but in the loss {error}; no exact form of it on "
            f"tiles is known. {PICKED + ' ' if traced.leaves else ''}{LAST}"
        ) from error
    for line in laid.gathered():
        log.info("in the loss, %s: every rank gathers its inputs and runs all of it", line)
    if len(traced.outputs) != 1 or traced.outputs[0] in laid.layouts:
        shapes = [traced.values[name].shape for name in traced.outputs]
        raise PlanError(f"the loss of a tiled output must give one number; it gives {shapes}")
    return TiledLoss(module, traced, laid, targets, fingerprint)


def layout_of_target(shape: tuple[int, ...], outputs: list[Layout]) -> Layout | None:
    """A target's layout: that of an output with the same cells, channels or not."""
    for layout in outputs:
        out, own = layout.shape, layout.own
        pixels = out[:1] + out[2:]
        if shape == out or (len(shape) == len(out) and shape[:1] + shape[2:] == pixels):
            return Layout(shape, layout.dims, own, own)
        if shape == pixels and len(out) > 2 and 1 not in layout.dims:
            return Layout(shape, tuple(d - (d > 1) for d in layout.dims), own, own)
        if layout.dims == (0,) and shape[:1] == out[:1]:
            return Layout(shape, (0,), own, own)
    return None
