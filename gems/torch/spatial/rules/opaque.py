"""Calls whose backward may not be linear, which see whole gradients on every rank.

[Note: no gradient on tiles] An autograd function may return None for an input, and what leads only
to that input then has no gradient: its parameters have None, not zeros. Such a function is opaque,
so every rank of the group runs all of it and finds the same None. From there on None goes back
through the same operations on every rank: none of them communicates, and none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.op import Run
from gems.torch.spatial.tile import Tile
from gems.torch.tracing.calls import Ref, is_placeholder

Tensor = torch.Tensor


def opaque(tile: Tile) -> Run:
    """The recorded call as one operation, through which whole gradients go back on every rank."""
    module, original, group = tile.op.module, tile.original, tile.group
    held = [] if module is None else list(module.parameters())

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        leaves, form = pytree.tree_flatten((args, kwargs))
        at = [k for k, x in enumerate(leaves) if isinstance(x, Tensor)]
        tiled = [k in arguments for k in at]

        def work(tensors: Sequence[Tensor]) -> Any:
            filled = list(leaves)
            for k, x in zip(at, tensors, strict=True):
                filled[k] = x
            positional, named = pytree.tree_unflatten(filled, form)
            return original(*positional, **named)

        inner = _Inner(work, held, group, tiled)
        found = _Opaque.apply(inner, *(leaves[k] for k in at), *held)
        return inner.unflatten(found)

    recorded = pytree.tree_leaves((tile.call.args, tile.call.kwargs), is_leaf=is_placeholder)
    arguments = {k for k, x in enumerate(recorded) if isinstance(x, Ref) and x.name in tile.windows}
    return run


class _Inner:
    """One forward of an opaque call: its own graph, between whole inputs and whole results."""

    def __init__(
        self,
        work: Callable[[Sequence[Tensor]], Any],
        held: Sequence[Tensor],
        group: SpatialGroup,
        tiled: Sequence[bool],
    ) -> None:
        self.work, self.held, self.group, self.tiled = work, held, group, tiled
        self.given: list[Tensor] = []
        self.made: list[Tensor] = []
        self.rest: list[Any] = []
        self.form: Any = None

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.given = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad():
            found = self.work(self.given)
        self.rest, self.form = pytree.tree_flatten(found)
        self.made = [x for x in self.rest if isinstance(x, Tensor)]
        return self.made

    def unflatten(self, made: Sequence[Tensor]) -> Any:
        """The result, with these tensors in place of those of the inner graph."""
        rest = iter(made)
        leaves = [next(rest) if isinstance(x, Tensor) else x for x in self.rest]
        self.rest = []
        return pytree.tree_unflatten(leaves, self.form)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Backward of the sums of all ranks' gradients, through the inner graph. Of a tiled input
        every rank takes its own cells; of a whole one only the first rank gives a gradient."""
        pairs = [
            self._whole(y, g) for y, g in zip(self.made, gradients, strict=True) if y.requires_grad
        ]
        sources = [*self.given, *self.held]
        wanted = [x for x in sources if x.requires_grad]
        ys, gs = [y for y, _ in pairs], [g for _, g in pairs]
        found = iter(torch.autograd.grad(ys, wanted, gs, allow_unused=True) if pairs else ())
        self.made = []
        result: list[Tensor | None] = []
        for k, x in enumerate(sources):
            g = next(found, None) if x.requires_grad else None
            mine = (k < len(self.tiled) and self.tiled[k]) or self.group.me == 0
            result.append(g if mine or g is None else torch.zeros_like(g))
        self.given = []
        return result

    def _whole(self, y: Tensor, mine: Tensor | None) -> tuple[Tensor, Tensor]:
        """A result, and the sum of all ranks' gradients of it. If no rank has one, backward goes
        into the inner graph without one, as in the plain model."""
        part = torch.zeros_like(y) if mine is None else mine
        flat = torch.cat((part.reshape(-1), part.new_tensor([mine is not None])))
        total = self.group.all_reduce(flat)
        whole = total[:-1].view(y.shape)
        with torch.enable_grad():
            return (y if total[-1].item() else _Unpassed.apply(y)), whole


class _Unpassed(torch.autograd.Function):
    """Itself, of which the gradient is not passed on: there is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        return None


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: _Inner, *tensors: Tensor) -> Any:
        ctx.inner = inner
        ctx.set_materialize_grads(False)
        count = len(tensors) - len(inner.held)
        made = inner.forward(tensors[:count])
        found = tuple(x.detach() for x in made)
        pairs = zip(found, made, strict=True)
        ctx.mark_non_differentiable(*(x for x, y in pairs if not y.requires_grad))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # type: ignore[override]
        return None, *ctx.inner.backward(gradients)
