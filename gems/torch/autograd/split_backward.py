"""Split backward: input gradients first (I), weight gradients later (W).

A deferred module runs on detached weights, so autograd computes only what goes on towards the
input, with the same kernels. A hook in the graph stores input and output gradient for the
micro-batch; W computes the weight gradients from them and accumulates them.

Convolutions and linear layers are deferred. Normalisation is not: its weight gradients are sums
that its input gradient needs anyway, or next to nothing beside a convolution's, and deferring them
would hold two more activations per layer until W. (Deferring GroupNorm in the network of
benchmarks/pipeline took 44.5 MB per rank instead of 35, and no less time.) Nor is what has hooks or
parametrisations: such modules run as they are, and their weight gradients come with I.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gems.torch.autograd.saved_tensors import Saved, SavedTensors, unpacked

Tensor = torch.Tensor
WeightGrad = Callable[[Tensor, Tensor], None]
Entry = tuple[WeightGrad, Saved, Tensor]  # to be called with this input and this output gradient


class WeightGradStore:
    """Deferred weight gradients. `entries` has those of the micro-batch that forward runs now;
    `saved` is how their inputs are saved."""

    def __init__(self) -> None:
        self.entries: list[Entry] | None = None
        self.saved = SavedTensors()

    def deferral(self, module: nn.Module) -> Callable[..., Any] | None:
        """A function that does what `module` does and defers its weight gradient, if it can."""
        make = DEFERRED.get(type(module))
        if make is None:
            return None
        deferred = make(module)
        return None if deferred is None else lambda *a, **k: self._run(module, deferred, a, k)

    def _run(self, module: nn.Module, deferred: Deferred, args: Any, kwargs: Any) -> Tensor:
        entries = self.entries
        wants = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        simple = len(args) == 1 and not kwargs and not hooked(module)
        if entries is None or not wants or not simple or not deferred.takes(args[0]):
            return module(*args, **kwargs)
        x = args[0]
        y, weight_grad = deferred.forward(x)
        version = x._version if module.weight.requires_grad else None
        saved = self.saved.pack(x.detach(), version)
        if not y.requires_grad:  # the first layer: nothing before it wants a gradient
            y = receive(y, lambda gradient: entries.append((weight_grad, saved, gradient)))
        else:
            # Not a hook on `y`: one that forward puts there later would run after ours.
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(partial(_enter, entries, weight_grad, saved))
        return y


def _enter(
    entries: list[Entry],
    weight_grad: WeightGrad,
    saved: Saved,
    gradients: tuple[Tensor | None, ...],
) -> None:
    """None: what reads it is recomputed, and no gradient came back through that."""
    if gradients[0] is not None:
        entries.append((weight_grad, saved, gradients[0]))


def flush(entries: list[Entry]) -> None:
    """Compute the weight gradients, in the order backward would have."""
    with torch.no_grad():
        for weight_grad, saved, gradient in entries:
            weight_grad(unpacked(saved), gradient)
    entries.clear()


class Receive(torch.autograd.Function):
    """A tensor from elsewhere as a non-leaf, so that an in-place op may come first."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Tensor], arrived: Any) -> Tensor:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        return box.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # type: ignore[override]
        if gradients[0] is not None:  # some operations pass on that there is none
            ctx.arrived(gradients[0])
        return None, None, None


def receive(x: Tensor, arrived: Callable[[Tensor], None]) -> Tensor:
    """`x` with a gradient that is handed to `arrived` in backward."""
    return Receive.apply(torch.empty(0, requires_grad=True), [x.detach()], arrived)  # type: ignore


def accumulate(parameter: nn.Parameter | None, gradient: Tensor | None) -> None:
    if parameter is None or gradient is None or not parameter.requires_grad:
        return
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class Deferred(ABC):
    """One module's arithmetic, taken apart."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def takes(self, x: Any) -> bool:
        """Whether it can be done for this input; otherwise the module runs as it is."""
        return isinstance(x, Tensor)

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, WeightGrad]:
        """The module's output, and what to do with input and output gradient later."""

    def weights(self) -> tuple[Tensor, Tensor | None]:
        m = self.module
        return m.weight.detach(), None if m.bias is None else m.bias.detach()


class _Convolution(Deferred):
    """1-D to 3-D, transposed or not; padding other than zeros is applied to the input first."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.dims = len(module.kernel_size)
        self.transposed = module.transposed
        padded = not self.transposed and module.padding_mode != "zeros"
        self.border = module._reversed_padding_repeated_twice if padded else None
        self.padding = (0,) * self.dims if padded else module.padding
        kind = "conv_transpose" if self.transposed else "conv"
        self.run = getattr(F, f"{kind}{self.dims}d")

    def takes(self, x: Any) -> bool:
        return super().takes(x) and x.dim() == self.dims + 2

    def forward(self, x: Tensor) -> tuple[Tensor, WeightGrad]:
        m = self.module
        extra = (m.output_padding, m.groups, m.dilation) if self.transposed else None
        w, b = self.weights()
        padded = self._pad(x)
        if extra is None:
            y = self.run(padded, w, b, m.stride, self.padding, m.dilation, m.groups)
        else:
            y = self.run(padded, w, b, m.stride, self.padding, *extra)
        return y, self.weight_grad

    def _pad(self, x: Tensor) -> Tensor:
        if self.border is None:
            return x
        return F.pad(x, self.border, mode=self.module.padding_mode)

    def weight_grad(self, x: Tensor, gradient: Tensor) -> None:
        m = self.module
        bias = m.bias is not None and m.bias.requires_grad
        _, dw, db = torch.ops.aten.convolution_backward(
            gradient,
            self._pad(x).to(gradient.dtype),
            m.weight.detach().to(gradient.dtype),
            [m.out_channels] if bias else None,
            m.stride,
            self.padding,
            m.dilation,
            self.transposed,
            m.output_padding,
            m.groups,
            [False, m.weight.requires_grad, bias],
        )
        accumulate(m.weight, dw)
        accumulate(m.bias, db)


class _Linear(Deferred):
    def forward(self, x: Tensor) -> tuple[Tensor, WeightGrad]:
        return F.linear(x, *self.weights()), self.weight_grad

    def weight_grad(self, x: Tensor, gradient: Tensor) -> None:
        m = self.module
        g = gradient.reshape(-1, m.out_features)
        if m.weight.requires_grad:
            accumulate(m.weight, g.t() @ x.reshape(-1, m.in_features).to(g.dtype))
        if m.bias is not None and m.bias.requires_grad:
            accumulate(m.bias, g.sum(0))


def _convolution(module: Any) -> Deferred | None:
    return None if isinstance(module.padding, str) else _Convolution(module)


DEFERRED: dict[type[nn.Module], Callable[[Any], Deferred | None]] = {
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.ConvTranspose1d: _convolution,
    nn.ConvTranspose2d: _convolution,
    nn.ConvTranspose3d: _convolution,
    nn.Linear: _Linear,
}


def hooked(module: nn.Module) -> bool:
    """Hooks of a module or its parameters expect the ordinary course of things."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind, None) for kind in kinds):
        return True
    return any(map(watched, module.parameters()))


def watched(parameter: Tensor) -> bool:
    """Whether somebody waits for the gradient of a parameter in backward."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, kind, None) for kind in kinds)
