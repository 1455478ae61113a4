"""The loss of an output that is cut: recorded like the model, and cut by the same table.

Per-pixel losses, with class weights and cells that do not count, and losses made of sums (Dice,
IoU) come out as on one device, because every sum in them is one over all ranks. Targets are cut
like the output that they are compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.errors import PlanError
from gems.layout import Layout
from gems.torch.batch import read_box, signature, stand_ins
from gems.torch.program import Program, write
from gems.torch.random import Draws
from gems.torch.record import record
from gems.torch.spatial.stage import Bound, Uncuttable, bind, lay_out

Tensor = torch.Tensor
Loss = Callable[[Any, Any], Any]


class _Compared(nn.Module):
    """A loss as a module, so that it can be recorded."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Any, target: Any) -> Any:
        return self.loss(output, target)


@dataclass
class _Ready:
    """A loss on one rank. `inputs` are the output's tensors, then the target's."""

    program: Program
    bound: Bound
    targets: list[str]
    inputs: list[str]


def cut_loss(
    loss: Loss,
    values: dict[str, Any],
    names: list[str],
    bound: Bound,
    output: Any,
    target: Any,
    draws: Draws,
    device: torch.device,
    known: dict[Any, Any],
) -> Tensor:
    """The loss of the whole output, the same on every rank; its gradient is each rank's part.

    `names` are the output's tensors as values of the model, `known` remembers recordings.
    """
    key = (bound.team.ranks, signature(target), torch.is_grad_enabled())
    if key not in known:
        known[key] = _bind(loss, values, names, bound, output, target, draws, device)
    made = known[key]
    parts = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
    for name, x in zip(made.targets, _leaves(target), strict=True):
        parts.append(read_box(x, made.bound.box(name)).to(device, non_blocking=True))
    by_name = dict(zip(made.inputs, parts, strict=True))
    memory = made.bound.memory
    memory.now = bound.memory.now
    try:
        (found,) = made.program.run(*(by_name[name] for name in made.program.inputs))
    finally:
        memory.now = None
    return found


def _leaves(tree: Any) -> list[Any]:
    return [x for x in pytree.tree_leaves(tree) if hasattr(x, "shape")]


def _bind(
    loss: Loss, values: dict[str, Any], names: list[str], bound: Bound, output: Any, target: Any,
    draws: Draws, device: torch.device,
) -> _Ready:  # fmt: skip
    module = _Compared(loss)
    outputs = iter(names)

    def whole(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        value = values[next(outputs)]
        made = torch.empty(value.shape, dtype=x.dtype, device="meta")
        return made.requires_grad_(x.requires_grad)

    args = (pytree.tree_map(whole, output), stand_ins(target))
    traced = record(module, args, device=device)
    layouts = [bound.laid.layouts.get(name) for name in names]
    given = {n: x for n, x in zip(traced.inputs, layouts, strict=False) if x is not None}
    targets = list(traced.inputs[len(names) :])
    cuts = [x for x in layouts if x is not None]
    entering = {}
    for name in targets:
        layout = _like(traced.values[name].shape, cuts)
        if layout is not None:
            entering[name] = layout
    try:
        laid = lay_out(traced, module, traced.calls, entering, draws, given=given)
    except Uncuttable as error:
        raise PlanError(
            f"the model's output is cut {bound.team.grid}, but in the loss {error}; an exact cut "
            "of it does not exist or is not known. Let the last stage be one that is not cut"
        ) from error
    result = traced.outputs[0]
    if result in laid.layouts or len(traced.outputs) != 1:
        raise PlanError(
            f"the loss of a cut output must give one number; it gives "
            f"{[traced.values[n].shape for n in traced.outputs]}"
        )
    placed = bind(laid, bound.team)
    program = write(traced, module, traced.calls, [result], draws, None, placed.runs)
    return _Ready(program, placed, targets, list(traced.inputs))


def _like(shape: tuple[int, ...], outputs: list[Layout]) -> Layout | None:
    """A target's cut: that of an output with the same cells, channels or not."""
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
