"""Strides across boundaries: what hangs on them comes out as on one rank. Random numbers are drawn
in the order of memory, `reshape` copies or gives a view, and torch's batch norm trusts them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gems.model.graph import Value
from gems.plans.plan import Plan
from gems.torch.autograd.norm_gradients import sound
from gems.torch.fingerprint import of_batch
from gems.torch.runtime.reshard import flat, shaped
from gems.torch.runtime.running_stats import Statistics
from gems.torch.tensors.strides import as_bytes, tile_strides
from gems.transport.encoding import pack, unpack
from tests.exact import alone, assert_equal, plainly, planned

Tensor = torch.Tensor


class Does(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def reshaped_and_changed(x: Tensor) -> Tensor:
    """`reshape` of what is contiguous is a view, and its change would be one of `x`."""
    y = x.reshape(x.shape[0], -1)
    y.mul_(3.0)
    return x + y.reshape(x.shape)


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x * 1,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "permuted": lambda x: x.permute(0, 2, 3, 1),
    "sliced": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "windows": lambda x: x.unfold(3, 3, 1).mean(1),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "AlphaDropout": lambda: nn.AlphaDropout(0.3),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.3),
    "randn_like": lambda: Does(lambda x: x + torch.randn_like(x)),
    "rand_like": lambda: Does(lambda x: x * torch.rand_like(x)),
    "bernoulli": lambda: Does(lambda x: x * torch.bernoulli(x.sigmoid())),
    "noise of what is made of it": lambda: Does(lambda x: x + torch.randn_like(x * 2)),
    "in place behind a copy": lambda: Does(reshaped_and_changed),
}
# The boundary lies between layers 1 and 2: behind the order, before what looks at it.
CUTS: tuple[tuple[str, ...], ...] = (("0", "1"), ("2", "3", "4", "5"))
PLANS = {
    "two stages": Plan(stages=CUTS, micro_batches=2),
    "three stages": Plan(stages=(("0", "1"), ("2",), ("3", "4", "5")), micro_batches=2),
    "two directions": Plan(stages=CUTS, schedule="gems"),
    "two copies": Plan(stages=CUTS, micro_batches=1, data=2),
    "recomputed": Plan(stages=CUTS, micro_batches=2, recompute="always"),
    "tiles": Plan(stages=CUTS, spatial=[(2, 1)], micro_batches=2),
    "2x2 tiles": Plan(stages=CUTS, spatial=[(2, 2)], micro_batches=2),
    "all on tiles": Plan(stages=1, spatial=(2, 2), micro_batches=2, schedule="sequential"),
    "streamed": Plan(stages=CUTS, stream=[(2, 2)], micro_batches=2),
}


def model_of(order: str, layer: str) -> nn.Module:
    torch.manual_seed(0)
    stem, head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(1, 5)
    ends = (Does(lambda x: x.flatten(1).mean(1, keepdim=True)), head, nn.Tanh())
    return nn.Sequential(stem, Does(ORDERS[order]), LAYERS[layer](), *ends).double()


def data() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    sizes = (4, 3)
    return [
        (torch.randn(n, 3, 6, 4, generator=generator).double(), torch.arange(n) % 5) for n in sizes
    ]


EVERYWHERE = ("AlphaDropout", "in place behind a copy")  # the others where strides differ most
FEW = ("two stages", "tiles", "all on tiles")
GENERATED = [
    (order, layer, plan)
    for order, layer, plan in itertools.product(ORDERS, LAYERS, PLANS)
    if (plan, order) != ("streamed", "windows")  # which reads across blocks
    if (layer in EVERYWHERE and order != "as it is")
    or (plan in FEW and order in ("channels last", "expanded"))
]


@pytest.mark.parametrize("plan", PLANS)
def test_what_hangs_on_strides_is_the_same_under_every_plan(plan: str) -> None:
    batches = data()
    for order, layer, name in GENERATED:
        if name != plan or (layer, order) == ("in place behind a copy", "expanded"):
            continue
        model = model_of(order, layer)
        found = planned(model, batches, PLANS[plan])
        try:
            assert_equal(found, oracle(order, layer, PLANS[plan].total))
        except AssertionError as error:
            raise AssertionError(f"{order}, {layer}, {plan}: {error}") from error


def oracle(order: str, layer: str, micro_batches: int) -> Any:
    key = (order, layer, micro_batches)
    if key not in known:
        model = model_of(order, layer)
        known[key] = alone(model, data(), micro_batches)
        if layer == "in place behind a copy":  # nothing random: the plain model says the same
            assert_equal(known[key], plainly(model, data(), micro_batches))
    return known[key]


known: dict[Any, Any] = {}

MEMORY: dict[str, Callable[[], Tensor]] = {
    "row by row": lambda: torch.randn(2, 3, 4, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(2, 3, 4, 5).transpose(1, 3),
    "with gaps": lambda: torch.randn(2, 3, 8, 5)[:, :, ::2],
    "expanded": lambda: torch.randn(2, 1, 4, 1).expand(2, 3, 4, 5),
    "expanded with gaps": lambda: torch.randn(2, 4, 1)[:, ::2].expand(2, 2, 6),
    "overlapping": lambda: torch.randn(2, 9).unfold(1, 3, 1),
    "a number": lambda: torch.randn(()),
    "nothing": lambda: torch.randn(2, 0, 3),
}


@pytest.mark.parametrize("kind", MEMORY)
def test_a_message_gives_back_numbers_and_strides(kind: str) -> None:
    x = MEMORY[kind]()
    value = Value("x", tuple(x.shape), tuple(x.stride()), "float32", True)
    found = shaped(flat(x, value).clone(), value)
    assert torch.equal(found, x)
    if kind != "overlapping":  # gets the order of dims, in memory of its own
        assert found.stride() == x.stride()
    like, theirs = torch.empty_like(found), torch.empty_like(x)
    assert kind == "overlapping" or like.stride() == theirs.stride()


def test_a_tile_keeps_the_order_of_dims() -> None:
    x = torch.randn(2, 3, 8, 6).to(memory_format=torch.channels_last)
    value = Value("x", tuple(x.shape), tuple(x.stride()), "float32", True)
    tile = torch.empty(2, 3, 4, 3).to(memory_format=torch.channels_last)
    assert tile_strides(value, tile.shape) == tile.stride()


def orders_of(x: Tensor) -> list[Tensor]:
    """The same numbers in every order of dims, and with odd strides where a dim has one cell."""
    found = []
    for order in itertools.permutations(range(x.dim())):
        back = [order.index(d) for d in range(x.dim())]
        y = x.permute(order).contiguous().permute(back)
        odd = [1 if n == 1 else s for n, s in zip(y.shape, y.stride(), strict=True)]
        found += [y, y.as_strided(y.shape, odd)]
    return found


@pytest.mark.parametrize("shape", [(1, 3, 4, 5), (1, 3, 1, 5), (1, 3, 5)], ids=str)
@pytest.mark.parametrize("layer", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_batch_norm_of_one_sample_is_right_whatever_the_strides(
    layer: Any, shape: tuple[int, ...]
) -> None:
    """torch's own gives wrong sums for some of these (found with torch 2.13)."""
    if len(shape) == 3:
        layer = {nn.BatchNorm2d: nn.BatchNorm1d, nn.InstanceNorm2d: nn.InstanceNorm1d}[layer]
    torch.manual_seed(0)
    norm = layer(3, affine=True).double()
    x, g = torch.randn(shape).double(), torch.randn(shape).double()

    def backward(run: Any, x: Tensor, g: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        return list(torch.autograd.grad(run(x), (x, norm.weight, norm.bias), g))

    expected = backward(norm, x.contiguous(), g.contiguous())
    wrong = 0
    for a, b in itertools.product(orders_of(x), orders_of(g)):
        for mine, theirs in zip(backward(sound(norm), a, b), expected, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-12)
        plain = backward(norm, a, b)
        wrong += not all(torch.allclose(p, t) for p, t in zip(plain, expected, strict=True))
    if len(shape) == 4 and layer is nn.BatchNorm2d:
        assert wrong, "torch is right now: gems/torch/autograd/norm_gradients.py may go"


def test_statistics_that_follow_an_unfinished_step_count_no_batches_of_instance_norm() -> None:
    """As under 2BW with copies: instance norm never counts its batches, batch norm does."""
    norms = [nn.InstanceNorm2d(3, track_running_stats=True), nn.BatchNorm2d(3)]
    uses: list[Any] = [(norm, 1) for norm in norms]
    first, second = Statistics(uses, 4), Statistics(uses, 4)
    second.follow(first)
    for statistics in (first, second):
        statistics.finish(statistics.sums)
    assert [int(norm.num_batches_tracked) for norm in norms] == [0, 8]  # type: ignore


def test_a_single_number_may_have_any_strides() -> None:
    """Story: an expanded number counts as contiguous, and its memory could not be had as bytes, so
    that a target of one number, or the gradient of a sum, raised."""
    one = torch.ones(()).expand(1, 1)
    assert one.is_contiguous() and one.stride() == (0, 0)
    assert as_bytes(one).tolist() == [0, 0, 128, 63]
    assert torch.equal(unpack(pack(one)), one)
    assert of_batch((one, one), thorough=True) == of_batch(
        (one.clone(), one.clone()), thorough=True
    )
