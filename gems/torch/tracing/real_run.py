"""Run a module that cannot be recorded once on real numbers: what it gives, uses and changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from gems.torch.tracing.fake_weights import FakeWeights
from gems.torch.tracing.frozen import MISSING, difference, freeze, tensors_within
from gems.torch.tracing.variables import INTERNAL


@dataclass(frozen=True)
class RealRun:
    """`used` are the weights that the module leads to, `changed` the buffers that it changed, and
    `impure` the Python state that it changes in its second run, too."""

    result: Any
    differentiable: bool  # in some branch
    used: list[str]
    changed: list[str]
    impure: list[str]


def real_run(
    path: str,
    module: nn.Module,
    args: Any,
    kwargs: Any,
    weights: FakeWeights,
    given: Mapping[int, torch.Tensor],
) -> RealRun:
    """A copy of the module runs, twice. `given` are the user's own numbers by id of their fakes."""
    weights.swap(module, fake=False)
    try:
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # every rank records the same branch
            twin, used = _twin(module, weights)
            before = _buffers(twin)
            try:
                args, kwargs = pytree.tree_map(lambda x: _real(x, given), (args, kwargs))
                result = twin(*args, **kwargs)
            except Exception:  # a sample may have shapes only, and any numbers in them
                args, kwargs = pytree.tree_map(_noise, (args, kwargs))
                twin, used = _twin(module, weights)
                before = _buffers(twin)
                result = twin(*args, **kwargs)
            state = {p: freeze(_python_state(m)) for p, m in twin.named_modules()}
            changed = _changed(before, _buffers(twin))
            twin(*args, **kwargs)
    finally:
        weights.swap(module, fake=True)
    sources = (*tensors_within((args, kwargs)), *module.parameters())
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in sources)
    return RealRun(result, wants, used, changed, list(_differences(path, twin, state)))


def _twin(module: nn.Module, weights: FakeWeights) -> tuple[nn.Module, list[str]]:
    """A copy on real numbers, ordinary ones where the weights have no memory now; and the weights
    that it is a copy of."""
    copies: dict[int, Any] = weights.stand_ins()
    made = set(copies)
    twin = copy.deepcopy(module, copies)
    own = {id(t) for t in (*module.parameters(), *module.buffers())}
    return twin, weights.names_of(set(copies) - made) + weights.names_of(own)


def _real(x: Any, given: Mapping[int, torch.Tensor]) -> Any:
    """The user's own numbers, where a module is given the model's input."""
    if id(x) in given and not given[id(x)].is_meta:
        return given[id(x)].detach().to("cpu", copy=True).requires_grad_(x.requires_grad)
    return _noise(x)


def _noise(x: Any) -> Any:
    """Ordinary numbers of the same shape: noise, or zeros where integers are wanted."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.dtype is torch.bool:  # a mask that leaves something
        return torch.ones(x.shape, dtype=x.dtype)
    if not (x.is_floating_point() or x.is_complex()):
        return torch.zeros(x.shape, dtype=x.dtype)
    return torch.randn(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad)


Buffer = tuple[torch.Tensor, int, torch.Tensor]  # itself, its version, its values


def _buffers(module: nn.Module) -> dict[str, Buffer]:
    return {name: (b, b._version, b.detach().clone()) for name, b in module.named_buffers()}


def _changed(before: dict[str, Buffer], after: dict[str, Buffer]) -> list[str]:
    """The buffers that are others, or have other values: batch norm changes running statistics
    without a new version."""

    def same(name: str) -> bool:
        (a, was, values), (b, now, found) = before[name], after[name]
        return a is b and was == now and torch.equal(values, found)

    return [name for name in after if name not in before or not same(name)]


def _python_state(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if k not in INTERNAL}


def _differences(path: str, twin: nn.Module, before: dict[str, Any]) -> Iterator[str]:
    for inner, module in twin.named_modules():
        label = f"{path}.{inner}".strip(".")
        what = difference(before.get(inner, MISSING), _python_state(module), label)
        if what is not None:
            yield str(what)
