"""Measure what blocks cost here: each distinct call runs once, forward and backward, on noise."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from gems.hardware import machine
from gems.model.costs import Cost, Costs, together
from gems.model.estimate import estimate
from gems.torch.tracing.calls import Attr, Call, Record, Ref, is_placeholder
from gems.torch.tracing.trace import Trace

REPEATS = 5


def measure(traced: Trace, model: nn.Module, device: torch.device) -> Costs:
    """Seconds of every block, the middle of a few runs; bytes as in the estimate.

    Two calls of the same kind, shapes and settings are measured once.
    """
    guess = estimate(traced.graph, machine("cpu"))
    known: dict[str, Cost] = {}
    items = []
    for i, cost in enumerate(guess.items):
        found = []
        for call in traced.calls(i):
            signature = _signature(call, traced.record, model)
            if signature not in known:
                known[signature] = _time(call, traced.record, model, device)
            found.append(known[signature])
        block = together(found)
        seconds = {name: getattr(block, name) for name in ("f", "i", "w", "halves")}
        items.append(replace(cost, **seconds, launch=min(cost.launch, block.f)))
    return Costs(tuple(items))


def _signature(call: Call, record: Record, model: nn.Module) -> str:
    def spell(x: Any) -> Any:
        if isinstance(x, Ref):
            value = record.values[x.name]
            return value.shape, value.strides, value.dtype, value.grad
        return (x.name and "weight") if isinstance(x, Attr) else x

    what = repr(model.get_submodule(call.module)) if call.module else repr(call.function)
    parts = pytree.tree_map(spell, (call.args, call.kwargs), is_leaf=is_placeholder)
    return f"{what} {parts!r} {[record.values[n].shape for n in call.writes]}"


def _time(call: Call, record: Record, model: nn.Module, device: torch.device) -> Cost:
    """Forward, input gradient and weight gradient; and what both cost more if done apart."""

    def run(through: bool, learns: bool) -> tuple[float, float]:
        return _run(call, record, model, device, through=through, learns=learns)

    module = model.get_submodule(call.module) if call.module is not None else nn.Module()
    f, i = run(True, False)
    if not call.attrs and not any(p.requires_grad for p in module.parameters()):
        return Cost(f, i, 0.0, 0.0)
    (f, both), (_, w) = run(True, True), run(False, True)
    i = min(i, both)
    return Cost(f, i, both - i, 0.0, halves=max((i + w) / both, 1.0) if i and both else 1.0)


def _run(
    call: Call,
    record: Record,
    model: nn.Module,
    device: torch.device,
    *,
    through: bool,
    learns: bool,
) -> tuple[float, float]:
    """Forward and backward of a call on noise, to its inputs and to its weights, as wanted."""
    target: Any = call.function
    if call.module is not None:
        target = copy.deepcopy(model.get_submodule(call.module)).to_empty(device=device)
        target.requires_grad_(learns)
        with torch.no_grad():
            for weight in (*target.parameters(), *target.buffers()):
                weight.zero_()

    def noise(x: Any) -> Any:
        if isinstance(x, Attr):
            held = {**record.parameters, **record.buffers}[x.name]
            made = torch.zeros(held.shape, dtype=getattr(torch, held.dtype), device=device)
            return made.requires_grad_(learns and x.name in record.parameters)
        if not isinstance(x, Ref):
            return x
        value = record.values[x.name]
        dtype = getattr(torch, value.dtype)
        made = torch.empty_strided(value.shape, value.strides, dtype=dtype, device=device)
        if not dtype.is_floating_point:
            return made.zero_()
        made.normal_()
        return made.requires_grad_(True).view_as(made) if value.grad and through else made

    given = pytree.tree_map(noise, (call.args, call.kwargs), is_leaf=is_placeholder)
    own = list(target.parameters()) if isinstance(target, nn.Module) else []
    forward, backward = [], []
    for _ in range(REPEATS):
        args, kwargs = pytree.tree_map(_writable, given)
        wanted = [x for x in (*pytree.tree_leaves((args, kwargs)), *own) if _wants(x)]
        ends = [get_gradient_edge(x) for x in wanted]  # before anything is changed in place
        start = _now(device)
        with torch.set_grad_enabled(call.grad):
            result = target(*args, **kwargs)
        forward.append(_now(device) - start)
        roots = [x for x in pytree.tree_leaves(result) if _wants(x)]
        backward.append(_backward(roots, ends, device))
    return median(forward), max(median(backward) - _start_of_backward(device), 0.0)


def _backward(roots: list[torch.Tensor], ends: list[Any], device: torch.device) -> float:
    """Seconds of a backward from here to there, and no further."""
    if not roots or not ends:
        return 0.0
    seeds = [torch.ones_like(x) for x in roots]
    start = _now(device)
    torch.autograd.grad(roots, ends, seeds, allow_unused=True)
    return _now(device) - start


@cache
def _start_of_backward(device: torch.device) -> float:
    """Seconds that a backward takes before it does anything: once per stage, not per call."""
    found = float("inf")
    for _ in range(20):
        x = torch.ones(1, device=device, requires_grad=True) * 1
        found = min(found, _backward([x], [get_gradient_edge(x)], device))
    return found


def _writable(x: Any) -> Any:
    """In-place calls need a non-leaf."""
    return x * 1 if isinstance(x, torch.Tensor) and x.requires_grad else x


def _wants(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
