"""What may surround a layer of a generated model: hooks, checkpoints, sharing, freezing, branches.

A wrap is given the layer and gives the module that takes its place. Hooks that autograd keeps on
parameters do not survive `copy.deepcopy`, so they are attached to every copy: see `attach`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {}


def wrap(make: Wrap) -> Wrap:
    WRAPS[make.__name__] = make
    return make


# --- hooks ----------------------------------------------------------------------------------------


def scaled(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):  # a recurrent layer's, say
        return (output[0] * 1.5, *output[1:])
    return output * 1.5


def shifted(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] + 0.25, *args[1:])


def halved(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in into)


@wrap
def forward_hook(layer: nn.Module) -> nn.Module:
    leaf(layer).register_forward_hook(scaled)
    return layer


@wrap
def forward_pre_hook(layer: nn.Module) -> nn.Module:
    leaf(layer).register_forward_pre_hook(shifted)
    return layer


@wrap
def backward_hook(layer: nn.Module) -> nn.Module:
    leaf(layer).register_full_backward_hook(halved)
    return layer


@wrap
def container_forward_hook(layer: nn.Module) -> nn.Module:
    around = nn.Sequential(layer, nn.Identity())
    around.register_forward_hook(scaled)
    return around


@wrap
def container_forward_pre_hook(layer: nn.Module) -> nn.Module:
    around = nn.Sequential(nn.Identity(), layer)
    around.register_forward_pre_hook(shifted)
    return around


@wrap
def container_backward_hook(layer: nn.Module) -> nn.Module:
    around = nn.Sequential(layer, nn.Tanh())
    around.register_full_backward_hook(halved)
    return around


class TensorHook(nn.Module):
    """A hook that forward puts on a tensor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda g: g * 0.5)
        return y


@wrap
def tensor_hook(layer: nn.Module) -> nn.Module:
    return TensorHook(layer)


@wrap
def parameter_hook(layer: nn.Module) -> nn.Module:
    layer.hooked = True  # type: ignore[assignment]
    return layer


def attach(model: nn.Module) -> nn.Module:
    """Hooks on parameters, which copies lose."""
    for module in model.modules():
        if "hooked" in vars(module):
            for p in module.parameters():
                if p.requires_grad and p.dim():
                    p.register_hook(lambda g: g * 0.5)
    return model


def leaf(layer: nn.Module) -> nn.Module:
    """The first module inside that has no others."""
    return next(m for m in layer.modules() if not any(True for _ in m.children()))


# --- regions --------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)  # type: ignore[return-value]


@wrap
def checkpoint_region(layer: nn.Module) -> nn.Module:
    return Checkpointed(layer, False)


@wrap
def checkpoint_reentrant(layer: nn.Module) -> nn.Module:
    return Checkpointed(layer, True)


class Around(nn.Module):
    """A layer with something done before or after it."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                return self.layer(x)
        if self.how == "detach":
            return self.layer(x).detach()
        if self.how == "fork":
            y = self.layer(x)
            return y if y.shape == x.shape and bool(y.isnan().any()) else y * 0.5
        if self.how == "changed":
            y = self.layer(x).clone()
            y.mul_(0.7).add_(0.1)
            y[:, 0] += y[:, -1]
            return y
        if self.how == "enable_grad":
            with torch.enable_grad():
                return self.layer(x)
        if self.how == "training":
            return self.layer(x) if self.training else self.layer(x) * 0.5
        y = self.layer(x)  # "double": its own output through it again, where it fits
        return self.layer(y) if y.shape == x.shape else y


def _around(how: str) -> Wrap:
    def make(layer: nn.Module) -> nn.Module:
        return Around(layer, how)

    make.__name__ = how
    return wrap(make)


for _how in ("no_grad", "detach", "fork", "changed", "double", "enable_grad", "training"):
    _around(_how)


class RandomBranch(nn.Module):
    """Stochastic depth that Python decides, for the whole micro-batch."""

    draws = True

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.training and y.shape == x.shape and torch.rand(()).item() < 0.5:
            return x
        return y


@wrap
def random_branch(layer: nn.Module) -> nn.Module:
    return RandomBranch(layer)


# --- weights --------------------------------------------------------------------------------------


@wrap
def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


@wrap
def partly_frozen(layer: nn.Module) -> nn.Module:
    for p in list(layer.parameters())[1::2]:
        p.requires_grad_(False)
    return layer


@wrap
def zeroed(layer: nn.Module) -> nn.Module:
    """All weights nought, and added to what came: gradients are exactly nought at first."""
    for p in layer.parameters():
        nn.init.zeros_(p)
    return Gate(layer)


class Gate(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.gain = layer, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return x + y * self.gain if y.shape == x.shape else y


@wrap
def evaluating(layer: nn.Module) -> nn.Module:
    """In evaluation mode, while all else trains."""
    return layer.eval()


@wrap
def freezes_later(layer: nn.Module) -> nn.Module:
    layer.later = "freeze"  # type: ignore[assignment]
    return layer


@wrap
def evaluates_later(layer: nn.Module) -> nn.Module:
    layer.later = "eval"  # type: ignore[assignment]
    return layer


@wrap
def container(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Sequential(layer), nn.ModuleDict({"more": nn.Identity()})["more"])


class Packed(nn.Module):
    """Takes and gives tuples and dicts between its own modules."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = Inner(layer)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner({"x": x, "other": (x * 0.1, 2)}, scale=0.5)
        return found["y"] if found["z"] is None else found["y"] + found["z"][0]


class Inner(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: Any, *, scale: float) -> Any:
        y = self.layer(given["x"])
        other, times = given["other"]
        same = other.shape == y.shape
        return {"y": y, "z": (other * times * scale,) if same else None}


@wrap
def packed(layer: nn.Module) -> nn.Module:
    return Packed(layer)


def later(model: nn.Module, step: int) -> None:
    """What a user changes between steps: attributes, modes, freezing."""
    for module in model.modules():
        if getattr(module, "moves", False):
            module.alpha = 0.5 + 0.25 * step  # type: ignore[assignment]
        if step and (what := vars(module).get("later")):
            if what == "freeze":
                module.requires_grad_(False)
            else:
                module.eval()
