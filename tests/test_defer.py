"""Putting weight gradients off: I and then W give what the whole backward gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from gems.torch.autograd.split_backward import WeightGradStore, flush, receive

Tensor = torch.Tensor

CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv 1-D": (nn.Conv1d(3, 4, 3, padding=1), (2, 3, 9)),
    "conv 2-D": (nn.Conv2d(3, 4, 3), (2, 3, 7, 6)),
    "conv 3-D": (nn.Conv3d(2, 3, 3, padding=1), (2, 2, 4, 5, 4)),
    "stride and dilation": (nn.Conv2d(3, 4, 3, stride=2, padding=2, dilation=2), (2, 3, 9, 8)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 5, 5)),
    "depthwise": (nn.Conv2d(4, 4, 5, groups=4, padding=2, bias=False), (2, 4, 6, 6)),
    "reflect": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 5, 5)),
    "circular": (nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="circular"), (2, 3, 5, 6)),
    "replicate": (nn.Conv1d(3, 4, 5, padding=2, padding_mode="replicate"), (2, 3, 8)),
    "transposed 1-D": (nn.ConvTranspose1d(3, 4, 3, stride=2), (2, 3, 5)),
    "transposed 2-D": (
        nn.ConvTranspose2d(4, 6, 3, 2, padding=1, output_padding=1, groups=2),
        (2, 4, 4, 5),
    ),
    "transposed 3-D": (nn.ConvTranspose3d(2, 3, 2, stride=2, dilation=2), (1, 2, 3, 3, 3)),
    "linear": (nn.Linear(5, 4), (3, 5)),
    "linear, no bias": (nn.Linear(5, 4, bias=False), (3, 5)),
    "linear over tokens": (nn.Linear(5, 4), (2, 3, 5)),
}


def gradients(
    module: nn.Module, x: Tensor, seed: Tensor, store: WeightGradStore | None, inputs: bool = True
) -> tuple[list[Tensor | None], bool]:
    """Of the input and the weights; and whether those of the weights came only with W."""
    module.zero_grad()
    x = x.clone().requires_grad_(inputs)
    run: Any = module
    entries: list[Any] = []
    if store is not None:
        run = store.deferral(module) or module
        store.entries = entries
    y = run(x)
    torch.autograd.backward(y, seed)
    late = all(p.grad is None for p in module.parameters())
    flush(entries)
    return [x.grad, *(p.grad for p in module.parameters())], late


def assert_same(module: nn.Module, shape: tuple[int, ...], inputs: bool = True) -> bool:
    torch.manual_seed(0)
    module = copy.deepcopy(module).double()
    x = torch.randn(shape, dtype=torch.float64)
    seed = torch.randn_like(module(x))
    expected, _ = gradients(module, x, seed, None, inputs)
    found, late = gradients(module, x, seed, WeightGradStore(), inputs)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert mine.shape == theirs.shape
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    return late


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("inputs", [True, False], ids=["inner", "first layer"])
def test_input_and_weight_gradients_are_those_of_the_whole_backward(
    name: str, inputs: bool
) -> None:
    assert assert_same(*CASES[name], inputs), "weight gradients come with W, not before"


@pytest.mark.parametrize("name", ["conv 2-D", "linear"])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_weight_or_bias_gets_none(name: str, frozen: str) -> None:
    module, shape = copy.deepcopy(CASES[name][0]), CASES[name][1]
    getattr(module, frozen).requires_grad_(False)
    assert assert_same(module, shape)


def test_a_wholly_frozen_module_runs_as_it_is() -> None:
    module = nn.Linear(3, 3).requires_grad_(False)
    assert assert_same(module, (2, 3))


NOT_DEFERRED = {
    "same padding": nn.Conv2d(3, 4, 3, padding="same"),
    "batch norm": nn.BatchNorm2d(3),
    "group norm": nn.GroupNorm(1, 3),
    "layer norm": nn.LayerNorm(5),
    "weight norm": parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
}


@pytest.mark.parametrize("name", NOT_DEFERRED)
def test_what_is_not_deferred_gets_its_gradients_with_the_input(name: str) -> None:
    assert not assert_same(NOT_DEFERRED[name], (2, 3, 5, 5))


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda *_: None),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward": lambda m: m.register_full_backward_hook(lambda *_: None),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    "tensor": lambda m: m.weight.register_hook(lambda g: 2 * g),
    "accumulated": lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_module_with_hooks_is_not_deferred_even_if_they_came_later(kind: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(3, 4).double(), torch.randn(2, 3, dtype=torch.float64)
    store = WeightGradStore()
    run = store.deferral(module)
    assert run is not None
    HOOKS[kind](module)
    store.entries = []
    run(x.requires_grad_()).sum().backward()
    assert not store.entries and module.weight.grad is not None


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_that_forward_puts_on_the_result_changes_the_deferred_gradient_too(
    first: bool,
) -> None:
    """Story: ours was there first, and saw the gradient before the user's had changed it."""
    torch.manual_seed(0)
    module, x = nn.Linear(3, 4).double(), torch.randn(2, 3, dtype=torch.float64)
    twin, store = copy.deepcopy(module), WeightGradStore()
    run = store.deferral(module)
    assert run is not None
    store.entries = []
    for work in (run, twin):
        y = work(x.clone().requires_grad_(not first))
        y.register_hook(lambda g: 0.5 * g)
        y.square_().sum().backward()
    flush(store.entries)
    assert module.weight.grad is not None and twin.weight.grad is not None
    assert torch.equal(module.weight.grad, twin.weight.grad)


def test_without_a_page_a_deferral_is_the_module_itself() -> None:
    module = nn.Linear(3, 4)
    run = WeightGradStore().deferral(module)
    run(torch.randn(2, 3)).sum().backward()
    assert module.weight.grad is not None


def test_gradients_add_up_over_two_uses_and_two_micro_batches() -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(3, 3, 3, padding=1).double()
    plain, store = copy.deepcopy(module), WeightGradStore()
    run = store.deferral(module)
    batches: list[list[Any]] = []
    for _ in range(2):
        x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
        batches.append([])
        store.entries = batches[-1]
        run(run(x).relu()).square().sum().backward()
        plain(plain(x).relu()).square().sum().backward()
    for entries in reversed(batches):
        assert len(entries) == 2
        flush(entries)
        assert not entries, "what is computed is freed"
    torch.testing.assert_close(module.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.bias.grad, plain.bias.grad, rtol=1e-12, atol=1e-12)


def test_an_in_place_op_may_follow() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(3, 4).double(), torch.randn(2, 3, dtype=torch.float64)
    plain, store = copy.deepcopy(module), WeightGradStore()
    for inputs in (False, True):
        module.zero_grad(), plain.zero_grad()
        store.entries = []
        store.deferral(module)(x.clone().requires_grad_(inputs)).relu_().sum().backward()
        flush(store.entries)
        plain(x).relu_().sum().backward()
        torch.testing.assert_close(module.weight.grad, plain.weight.grad)


def test_an_input_that_is_changed_before_its_weight_gradient_is_an_error_as_in_plain() -> None:
    """PyTorch raises; a weight gradient that was put off would have used the new numbers."""
    module, store = nn.Linear(3, 4), WeightGradStore()
    x = torch.randn(2, 3)
    for run in (module, store.deferral(module)):
        store.entries = []
        here = x.clone()
        y = run(here)
        here.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
            flush(store.entries)


@pytest.mark.parametrize("name", ["conv 2-D", "linear"])
def test_under_autocast_it_rounds_as_plain_autocast_does(name: str) -> None:
    torch.manual_seed(0)
    module, shape = copy.deepcopy(CASES[name][0]), CASES[name][1]
    x = torch.randn(shape)
    plain, store = copy.deepcopy(module), WeightGradStore()
    with torch.autocast("cpu", torch.bfloat16):
        store.entries = []
        mine, theirs = store.deferral(module)(x), plain(x)
    assert torch.equal(mine, theirs)
    mine.float().square().sum().backward()
    theirs.float().square().sum().backward()
    flush(store.entries)
    for (label, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-2, msg=label)


def test_a_received_tensor_is_no_leaf_and_hands_its_gradient_over() -> None:
    arrived: list[Tensor] = []
    x = torch.randn(3)
    y = receive(x, arrived.append)
    assert y.requires_grad and not y.is_leaf
    y.mul_(2)
    (y * torch.arange(3.0)).sum().backward()
    assert torch.equal(arrived[0], 2 * torch.arange(3.0))
