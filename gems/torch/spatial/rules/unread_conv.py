"""A convolution whose result nobody looks at: backward wants to go through it, and needs only its
input and weight.

So it is where a patch of a stream runs again and what the convolution made is known by then: only
backward's half of the arithmetic is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor


class UnreadConvolution(torch.autograd.Function):
    """The gradients of a convolution. Its result has the right shape, and is one number."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
        padding: Sequence[int], dilation: Sequence[int], groups: int,
    ) -> Tensor:  # fmt: skip
        ctx.settings = None if bias is None else [len(bias)], stride, padding, dilation, groups
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        cells = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
        return x.new_zeros(()).expand(x.shape[0], weight.shape[0], *cells)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (g,), (x, weight) = gradients, ctx.saved_tensors
        if g is None:
            return (None,) * 7
        bias, stride, padding, dilation, groups = ctx.settings
        wanted = list(ctx.needs_input_grad[:3])
        wanted[2] = wanted[2] and bias is not None
        found = torch.ops.aten.convolution_backward(
            g, x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups, wanted
        )
        return *found, None, None, None, None
