"""Measure what blocks cost here: each distinct call runs once, forward and backward, on noise.

A call that would not fit the memory budget runs on fewer samples, then on a smaller image, and its
seconds are scaled by the cells that it reads; so does every call of a plan that runs images in
tiles or patches. Seconds of convolutions, pools, norms and pointwise calls are proportional to
cells, but for what a launch costs. A call that cannot run on a smaller image is measured whole
where that fits, and estimated where it does not.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf, prod
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from gems.hardware import Machine, machine
from gems.model.costs import Cost, Costs, together
from gems.model.estimate import estimate
from gems.model.graph import ITEMSIZE, Value
from gems.torch.tensors.strides import tile_strides
from gems.torch.tracing.calls import Attr, Call, Record, Ref, is_placeholder
from gems.torch.tracing.trace import Trace

log = logging.getLogger(__name__)
REPEATS = 5
LEAST = 16  # cells along a side of a smaller image
Shapes = Mapping[str, tuple[int, ...]]


def measure(
    traced: Trace,
    model: nn.Module,
    device: torch.device,
    *,
    on: Machine | None = None,
    precision: torch.dtype | None = None,
    memory: float = inf,
    parts: int = 1,
) -> Costs:
    """Seconds of every block, the middle of a few runs; bytes as in the estimate.

    Two calls of the same kind, shapes and settings are measured once. `precision` is autocast's;
    `memory` what a call may take, in bytes; `parts` the tiles and patches of an image. Blocks that
    cannot be measured so are estimated for the machine `on`.
    """
    guess = estimate(traced.graph, on or machine("cpu"))
    known: dict[str, Cost | None] = {}
    items, estimated = [], []
    for i, cost in enumerate(guess.items):
        found = []
        for call in traced.calls(i):
            signature = _signature(call, traced.record, model)
            if signature not in known:
                trial = Trial(call, traced.record, model, device, precision)
                known[signature] = _measured(trial, memory, parts)
            found.append(known[signature])
        measured = [one for one in found if one is not None]
        if len(measured) < len(found):
            estimated.append(traced.graph.blocks[i].name)
            items.append(cost)
            continue
        block = together(measured)
        seconds = {name: getattr(block, name) for name in ("f", "i", "w", "halves")}
        items.append(replace(cost, **seconds, launch=min(cost.launch, block.f)))
    if estimated:
        log.info(
            "%d blocks do not fit %.3g bytes and cannot run on a smaller image: their seconds are "
            "estimated (%s)", len(estimated), memory, ", ".join(estimated[:8]),
        )  # fmt: skip
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


@dataclass(frozen=True)
class Trial:
    """A call to be run on noise; `shapes` are of inputs that are smaller than recorded."""

    call: Call
    record: Record
    model: nn.Module
    device: torch.device
    precision: torch.dtype | None
    shapes: Shapes | None = None

    @cached_property
    def reads(self) -> list[Value]:
        """The inputs, as large as they are here."""
        shapes = self.shapes or {}
        found = (self.record.values[name] for name in self.call.reads)
        return [replace(x, shape=shapes.get(x.name, x.shape)) for x in found]

    @property
    def cells(self) -> int:
        return max((prod(x.shape) for x in self.reads), default=1)

    def bytes(self) -> float:
        """What a run takes: inputs, copies and gradients of them; results, and their gradients;
        weights, and theirs."""
        if self.shapes is None:
            made = sum(self.record.values[name].bytes for name in self.call.writes)
        else:
            made = self._made
        weights = {**self.record.parameters, **self.record.buffers}
        held = sum(prod(weights[n].shape) * ITEMSIZE[weights[n].dtype] for n in self.call.attrs)
        return 3 * sum(x.bytes for x in self.reads) + 2 * made + 2 * held

    @cached_property
    def _made(self) -> int:
        """Bytes of the results, found without memory. Raises if the call takes no such inputs."""
        (args, kwargs), target = replace(self, device=torch.device("meta"))._arguments(False, False)
        with torch.no_grad():
            results = pytree.tree_leaves(target(*args, **kwargs))
        return sum(x.numel() * x.element_size() for x in results if isinstance(x, torch.Tensor))

    def smaller(self) -> Trial | None:
        """On half the samples, or on half the image; None if it is small already."""
        main = max(self.reads, key=lambda x: prod(x.shape), default=None)
        if main is None or len(main.shape) < 1:
            return None
        dim, sides = 0, range(2, len(main.shape)) if len(main.shape) > 3 else ()
        if main.shape[0] < 2:
            dim = max(sides, key=lambda d: main.shape[d], default=0)
            if not dim or main.shape[dim] < 2 * LEAST:
                return None
        length = main.shape[dim]
        shapes = {}
        for x in self.reads:
            like = len(x.shape) > dim and x.shape[dim] == length
            if like and (not dim or len(x.shape) == len(main.shape)):
                shapes[x.name] = (*x.shape[:dim], -(-length // 2), *x.shape[dim + 1 :])
        return replace(self, shapes={**(self.shapes or {}), **shapes})

    def time(self) -> Cost:
        """Forward, input gradient and weight gradient; and what both cost more if done apart."""
        call = self.call
        module = self.model.get_submodule(call.module) if call.module is not None else nn.Module()
        f, i = self.run(True, False)
        if not call.attrs and not any(p.requires_grad for p in module.parameters()):
            return Cost(f, i, 0.0, 0.0)
        (f, both), (_, w) = self.run(True, True), self.run(False, True)
        i = min(i, both)
        return Cost(f, i, both - i, 0.0, halves=max((i + w) / both, 1.0) if i and both else 1.0)

    def run(self, through: bool, learns: bool) -> tuple[float, float]:
        """Seconds of forward and backward, to its inputs and to its weights, as wanted."""
        device = self.device
        given, target = self._arguments(through, learns)
        own = list(target.parameters()) if isinstance(target, nn.Module) else []
        forward, backward = [], []
        for _ in range(REPEATS):
            args, kwargs = pytree.tree_map(_writable, given)
            wanted = [x for x in (*pytree.tree_leaves((args, kwargs)), *own) if _wants(x)]
            ends = [get_gradient_edge(x) for x in wanted]  # before anything is changed in place
            start = _now(device)
            with torch.set_grad_enabled(self.call.grad), self._autocast():
                result = target(*args, **kwargs)
            forward.append(_now(device) - start)
            roots = [x for x in pytree.tree_leaves(result) if _wants(x)]
            del result
            backward.append(_backward(roots, ends, device))
        return median(forward), max(median(backward) - _start_of_backward(device), 0.0)

    def _autocast(self) -> Any:
        """The plan's precision, or what the model itself has around the call."""
        if self.call.autocast is not None:
            enabled, dtype = self.call.autocast
            return torch.autocast(self.device.type, dtype, enabled=enabled)
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.precision)

    def _arguments(self, through: bool, learns: bool) -> tuple[Any, Any]:
        """Noise for the inputs, and what to call: a copy of the module, or the function."""
        device, sizes = self.device, {x.name: x.shape for x in self.reads}
        target: Any = self.call.function
        if self.call.module is not None:
            target = copy.deepcopy(self.model.get_submodule(self.call.module))
            target = target.to_empty(device=device).requires_grad_(learns)
            with torch.no_grad():
                for weight in (*target.parameters(), *target.buffers()):
                    weight.zero_()
        weights = {**self.record.parameters, **self.record.buffers}

        def noise(x: Any) -> Any:
            if isinstance(x, Attr):
                held = weights[x.name]
                made = torch.zeros(held.shape, dtype=getattr(torch, held.dtype), device=device)
                return made.requires_grad_(learns and x.name in self.record.parameters)
            if not isinstance(x, Ref):
                return x
            value = self.record.values[x.name]
            shape, strides, dtype = value.shape, value.strides, getattr(torch, value.dtype)
            if sizes[x.name] != shape:
                shape = sizes[x.name]
                strides = tile_strides(value, shape)
            made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            if not dtype.is_floating_point:
                return made.zero_()
            made.normal_()
            return made.requires_grad_(True).view_as(made) if value.grad and through else made

        call = self.call.args, self.call.kwargs
        return pytree.tree_map(noise, call, is_leaf=is_placeholder), target


def _measured(trial: Trial, memory: float, parts: int) -> Cost | None:
    """Seconds of a whole call, measured on as much of it as a rank may run at a time; None if that
    is not to be had."""
    small = _within(trial, memory, trial.cells / parts)
    if small is None:
        return trial.time() if trial.bytes() <= memory else None
    found, scale = small.time(), trial.cells / small.cells
    return replace(found, f=found.f * scale, i=found.i * scale, w=found.w * scale)


def _within(trial: Trial, memory: float, cells: float) -> Trial | None:
    """The call on as large a part of its inputs as has no more bytes and cells than these."""
    found: Trial | None = trial
    try:
        while found is not None and (found.bytes() > memory or found.cells > cells):
            found = found.smaller()
    except Exception:  # whatever a call raises that wants the image it was recorded with
        log.debug("%s cannot run on a smaller image", trial.call.name, exc_info=True)
        return None
    return found


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
