"""A streamed stage: its sweeps (sweep.py), what is between them, and backward through all of it.

    inputs ──► whole calls ──► sweep ──► sums merged, over ranks too ──► whole calls ──► ... outputs
                                 └─────► values, stored; on tiles with the halo that is read later

Backward takes the sweeps in reverse (stream_pass.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from gems.torch.offload.stored_value import StoredValue
from gems.torch.runtime.stream_code import StreamCode
from gems.torch.runtime.stream_pass import Pass

Tensor = torch.Tensor


@dataclass
class InStore:
    """What one forward through a stream handed on by way of a store: its outputs, then for backward
    their gradients, each a sum of several, and then the gradients of its inputs. And the loss, if
    its patches run in backward only."""

    made: dict[str, StoredValue] = field(default_factory=dict)
    given: dict[str, list[StoredValue]] = field(default_factory=dict)
    sums: dict[str, StoredValue] = field(default_factory=dict)
    late: bool = False  # the loss comes with backward
    loss: tuple[Tensor, ...] = ()  # once it is there


class Stream(StreamCode):
    """A streamed stage: `run(*inputs)` gives its outputs, both in the order of their names."""

    in_store: tuple[InStore, Any] | None = None  # of the last run

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """The outputs. `in_store` of this run is taken by whoever runs backward."""
        anchor = torch.empty(0, requires_grad=True)  # weights may want a gradient if no input does
        saves, found = torch.is_grad_enabled(), InStore()
        token, *tensors = _Streamed.apply(anchor, self, saves, found, *inputs)  # type: ignore[misc]
        if token.requires_grad:
            self.in_store = found, get_gradient_edge(token)
        made, found.made = found.made, {}  # whoever receives it holds it
        rest = iter(tensors)
        return tuple(made[n] if n in self.stored else next(rest) for n in self.outputs)

    def take_in_store(self) -> tuple[InStore, Any]:
        """What the last run handed on by way of the store, and where backward enters if only such
        outputs have a gradient."""
        found, self.in_store = self.in_store, None
        assert found is not None
        return found


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, stream: Stream, saves: bool, in_store: InStore, *inputs: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.one, ctx.in_store = Pass(stream, inputs, saves), in_store
        outputs, in_store.late = ctx.one.forward(), ctx.one.late is not None
        in_store.made = {n: x for n, x in outputs.items() if n in stream.stored}
        tensors = {n: outputs[n] for n in stream.outputs if n not in stream.stored}
        fixed = (x for n, x in tensors.items() if not stream.values[n].grad)
        ctx.mark_non_differentiable(*fixed)
        return torch.empty(0), *tensors.values()

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, *gradients: Tensor | None) -> Any:  # type: ignore[override]
        one, in_store = ctx.one, ctx.in_store
        stream: Stream = one.stream
        pairs = zip((n for n in stream.outputs if n not in stream.stored), gradients, strict=True)
        found = one.backward(
            {n: g for n, g in pairs if g is not None}, in_store.given, ctx.needs_input_grad[4:]
        )
        in_store.loss = () if one.loss is None else (one.loss,)
        group = stream.group is not None  # all of its ranks do the same
        stored = {n: x for n, x in found.items() if n in stream.stored}
        in_store.sums = {n: x for n, x in stored.items() if x.written or group}
        for x in in_store.sums.values():
            x.settle()
        tensors = (None if n in stream.stored else found.get(n) for n in stream.inputs)
        return None, None, None, None, *tensors
