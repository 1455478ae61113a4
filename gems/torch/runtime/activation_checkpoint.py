"""Activation checkpointing of a run of calls: it saves its inputs, and is recomputed in backward.

              forward                                   backward
    inputs ──► run, without autograd ──► outputs        gradients of outputs
      └─ saved ─────────────────────────────────────►   1. recompute, with autograd, from the inputs
                                                        2. backward: weights get their gradients
    gradients of inputs  ◄───────────────────────────   3. gradients that reached the inputs

Recomputation must repeat the forward: random numbers are keyed, running statistics count once, and
a buffer that the run changes has its earlier value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gems.torch.autograd.split_backward import receive
from gems.torch.spatial.partitioned_activations import PartitionedActivations
from gems.torch.tracing.calls import Call

Tensor = torch.Tensor
Buffer = tuple[nn.Module, str]  # a module, and what it calls its buffer


@dataclass(frozen=True)
class Run:
    """A run of calls as a function, and what is known about its inputs and outputs."""

    function: Callable[..., tuple[Tensor, ...]]
    mutated: tuple[bool, ...]  # inputs that it changes in place: it gets copies of them
    differentiable: tuple[bool, ...]  # outputs that a gradient comes back for
    buffers: Sequence[Buffer]  # that it changes
    shardings: Sequence[PartitionedActivations | None]  # of inputs that a spatial group shards
    device: str  # whose autocast state is restored


class Recomputation:
    """Recomputes runs on this rank, inside the context that `around` makes."""

    def __init__(self) -> None:
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, run: Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        # Weights may want a gradient if no input does.
        anchor = torch.empty(0, requires_grad=not any(x.requires_grad for x in inputs))
        return _Checkpointed.apply(anchor, run, self, *inputs)  # type: ignore[no-any-return]


class _Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, run: Run, recomputation: Recomputation, *inputs: Tensor
    ) -> Any:
        ctx.run, ctx.recomputation, ctx.autocast = run, recomputation, _autocast(run.device)
        ctx.set_materialize_grads(False)
        steps = zip(inputs, run.shardings, strict=True)
        saved = [(None, x) if step is None else step.shard(x) for x, step in steps]
        ctx.forms = [form for form, _ in saved]
        ctx.save_for_backward(*(x for _, x in saved))
        ctx.before = snapshot(run.buffers)
        # Detached on both sides: to autograd this is one operation that makes new tensors.
        found = run.function(*(x.detach() for x in _own(run, inputs)))
        outputs = tuple(x.detach() for x in found)
        pairs = zip(outputs, run.differentiable, strict=True)
        ctx.mark_non_differentiable(*(x for x, differentiable in pairs if not differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # type: ignore[override]
        run: Run = ctx.run
        wanted = ctx.needs_input_grad[3:]
        arrived: list[Tensor | None] = [None] * len(wanted)
        pairs = zip(ctx.saved_tensors, ctx.forms, strict=True)
        inputs = [x if form is None else form.unshard(x) for x, form in pairs]  # in one order
        around, buffers = ctx.recomputation.around(), as_it_was(run.buffers, ctx.before)
        with around, torch.autocast(run.device, **ctx.autocast), buffers, torch.enable_grad():
            given = (
                receive(x, lambda g, at=at: arrived.__setitem__(at, g)) if wanted[at] else x
                for at, x in enumerate(_own(run, inputs))
            )
            results = run.function(*given)
        pairs = [
            (get_gradient_edge(x), g)
            for x, g in zip(results, gradients, strict=True)
            if g is not None and x.requires_grad
        ]
        del results
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [g for _, g in pairs])
        return None, None, None, *arrived


def _autocast(device: str) -> dict[str, Any]:
    """The arguments of `torch.autocast` that restore its present state."""
    return {
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _own(run: Run, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs, copied where the run would change them."""
    return [x.clone() if m else x for x, m in zip(inputs, run.mutated, strict=True)]


def touched(calls: Sequence[Call], model: nn.Module) -> list[Buffer]:
    """The buffers that calls change, but for running statistics: nothing is computed from those."""
    names = (n for c in calls for n in c.touches if n.rpartition(".")[0] not in c.norms)
    found = []
    for name in dict.fromkeys(names):
        path, _, key = name.rpartition(".")
        found.append((model.get_submodule(path), key))
    return found


def snapshot(buffers: Sequence[Buffer]) -> list[Tensor]:
    return [getattr(module, key).detach().clone() for module, key in buffers]


@contextmanager
def as_it_was(buffers: Sequence[Buffer], before: Sequence[Tensor]) -> Iterator[None]:
    """With buffers as they were when a snapshot was taken; they are as they are now afterwards."""
    now = [module._buffers[key] for module, key in buffers]
    for (module, key), value in zip(buffers, before, strict=True):
        module._buffers[key] = value.clone()
    try:
        yield
    finally:
        for (module, key), value in zip(buffers, now, strict=True):
            module._buffers[key] = value
