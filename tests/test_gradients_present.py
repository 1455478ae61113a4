"""Which parameters have a gradient: exactly those that have one in the plain model.

A gradient of zeros is one: momentum, weight decay and counts of steps act on it. None is not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gems.plans.plan import Plan
from gems.torch.autograd import absent_gradient
from gems.torch.autograd.absent_gradient import PATTERN, absent, is_absent
from gems.torch.runtime import reshard
from gems.transport.protocol import Transport
from tests import exact
from tests.exact import assert_equal, batches, join, plainly, same_state
from tests.test_zero import planned, stepped
from tests.worlds import spawn

Tensor = torch.Tensor
WIDTH = 4


class Unpassed(torch.autograd.Function):
    """x + y of which x gets no gradient: autograd passes on that there is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        return None, gradients[0]


class Layer(nn.Module):
    """One of a dozen ways to get a gradient, one of zeros, or none."""

    def __init__(self, kind: str, shared: nn.Linear) -> None:
        super().__init__()
        self.kind, self.main = kind, nn.Linear(WIDTH, WIDTH)
        if kind in ("unused", "dropped", "mask", "none"):
            self.other = nn.Linear(WIDTH, WIDTH)
        if kind == "zero":
            nn.init.zeros_(self.main.weight)
        if kind == "zeros, bias and all":
            nn.init.zeros_(self.main.weight)
            nn.init.zeros_(self.main.bias)
        if kind == "frozen":
            self.main.requires_grad_(False)
        if kind == "tied":
            self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.main(x)
        if self.kind == "dropped":
            self.other(x)
        elif self.kind == "mask":
            y = torch.where(self.other(x) > 0, y, 2 * y)
        elif self.kind == "none":
            y = Unpassed.apply(self.other(x), y)
        elif self.kind == "detached":
            y = x + y.detach()
        elif self.kind == "no grad":
            with torch.no_grad():
                y = y.tanh()
            y = x + y
        elif self.kind == "tied":
            y = self.shared(y)
        elif self.kind == "zeros, bias and all":
            return x * 0 + y
        return y.tanh()


KINDS = (
    *("plain", "zero", "zeros, bias and all", "unused", "dropped", "mask", "none", "detached"),
    *("no grad", "frozen", "tied"),
)


class Several(nn.Module):
    """Layers in a row; the first and the middle one also give outputs of their own."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(kind, shared) for kind in kinds)
        self.early, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = {}
        for at, layer in enumerate(self.layers):
            x = layer(x)
            if at == 0:
                found["early"] = self.early(x)
            if at == len(self.layers) // 2:
                found["half"] = self.middle(x.detach())
        return {**found, "end": x}


def uses(*names: str) -> Callable[[Any, Tensor], Tensor]:
    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return sum(((output[name] - target) ** 2).mean() for name in names)  # type: ignore

    return loss


def by_sample(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Which outputs it uses differs from micro-batch to micro-batch."""
    name = "early" if float(target.sum()) > 0 else "half"
    return ((output[name] - target) ** 2).mean()


def constant(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Nothing has a gradient but what leads to one output, and that one is zeros."""
    return (output["end"] * 0).sum() + (target**2).mean()


LOSSES = {
    "end": uses("end"), "early": uses("early"), "half": uses("half"),
    "early and end": uses("early", "end"), "half and end": uses("half", "end"),
    "by sample": by_sample, "constant": constant,
}  # fmt: skip
PLANS = {
    "1f1b": Plan(stages=3, micro_batches=3, schedule="1f1b"),
    "1f1b, eager": Plan(stages=3, micro_batches=3, schedule="1f1b", optimizer_step="eager"),
    "copies": Plan(stages=2, micro_batches=2, data=2),
    "copies, eager": Plan(stages=2, micro_batches=2, data=2, optimizer_step="eager"),
    "gems": Plan(stages=2, replications=2, schedule="gems"),
    "zero-bubble": Plan(stages=2, micro_batches=3, schedule="zero-bubble"),
    "interleaved": Plan(stages=4, ranks=2, micro_batches=2, schedule="interleaved"),
    "recomputed": Plan(stages=2, micro_batches=2, recompute="always"),
    "zero=1": Plan(stages=2, micro_batches=2, data=2, zero=1),
    "zero=2": Plan(stages=2, micro_batches=2, data=2, zero=2),
    "zero=3": Plan(stages=2, micro_batches=2, data=2, zero=3),
    "zero=3, eager": Plan(
        stages=2, ranks=1, micro_batches=2, data=2, zero=3, schedule="l2l", optimizer_step="eager"
    ),
    "offload": Plan(
        stages=2, ranks=1, micro_batches=2, schedule="l2l",
        offload="weights", optimizer_step="eager",
    ),
    "offload, late": Plan(stages=2, micro_batches=2, offload="weights,optimizer"),
    "disk, zero=3": Plan(
        stages=2, ranks=1, micro_batches=2, data=2, zero=3, schedule="l2l",
        offload="weights:disk", optimizer_step="eager",
    ),
    "2bw": Plan(stages=2, micro_batches=2, schedule="2bw"),
}  # fmt: skip


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.05, weight_decay=0.1)


def data(seed: int, last: int) -> list[Any]:
    """Four steps of 6 samples; then one of so few that some micro-batches or copies have none."""
    draw = torch.Generator().manual_seed(seed)
    sizes = (6, 6, 6, last)
    make = lambda n: torch.randn(n, WIDTH, generator=draw, dtype=torch.float64)  # noqa: E731
    return [(make(n), make(n)) for n in sizes]


def network(seed: int, kinds: list[str]) -> nn.Module:
    torch.manual_seed(seed)
    return Several(kinds).double()


def kinds_of(seed: int) -> list[str]:
    draw = random.Random(seed)
    return [draw.choice(KINDS) for _ in range(draw.randint(4, 5))]


def oracle(name: str, seed: int, kinds: list[str], loss: str, make: Any, last: int) -> Any:
    if PLANS[name].schedule == "2bw":  # its numbers are those of weights one update old
        return planned(
            network(seed, kinds), data(seed, last),
            Plan(stages=1, micro_batches=2, schedule="2bw"), LOSSES[loss], make,
        )  # fmt: skip
    return plainly(network(seed, kinds), data(seed, last), PLANS[name].total, LOSSES[loss], make)


@pytest.mark.parametrize("name", PLANS)
def test_the_same_parameters_have_gradients_as_in_the_plain_model(name: str) -> None:
    draw = random.Random(name)
    for _ in range(4):
        seed, last = draw.randrange(1000), draw.randint(1, 3)
        kinds, loss, make = kinds_of(seed), draw.choice(list(LOSSES)), draw.choice((sgd, adamw))
        if PLANS[name].schedule == "2bw":
            kinds = ["plain" if kind == "tied" else kind for kind in kinds]
        expected = oracle(name, seed, kinds, loss, make, last)
        found = planned(network(seed, kinds), data(seed, last), PLANS[name], LOSSES[loss], make)
        try:
            assert found.losses == pytest.approx(expected.losses, rel=1e-10, nan_ok=True)
            same_state(found.state, expected.state)
        except AssertionError as error:
            error.add_note(f"{name}, seed {seed}, {kinds}, loss {loss}, {make.__name__}, {last}")
            raise


# --- a story: what an eager update skipped --------------------------------------------------------


def test_an_eager_update_decays_what_has_a_gradient_of_zeros() -> None:
    """The weights before a zero-initialised layer have a gradient of exactly zero."""
    kinds = ["plain", "zero", "zeros, bias and all", "plain"]
    plan = PLANS["1f1b, eager"]
    found = planned(network(0, kinds), data(0, 6), plan, LOSSES["end"], sgd)
    expected = plainly(network(0, kinds), data(0, 6), plan.total, LOSSES["end"], sgd)
    before = network(0, kinds).state_dict()
    assert not torch.equal(expected.state["layers.0.main.weight"], before["layers.0.main.weight"])
    same_state(found.state, expected.state)


# --- processes ------------------------------------------------------------------------------------


def rank(transport: Transport, name: str, kinds: list[str], loss: str) -> Any:
    return stepped(transport, network(1, kinds), data(1, 1), PLANS[name], LOSSES[loss], sgd)


@pytest.mark.parametrize("name", ["1f1b, eager", "zero=3, eager"])
def test_over_gloo_too_and_a_short_last_batch_does_not_hang(name: str) -> None:
    kinds = ["zero", "dropped", "none", "plain"]
    found = join(spawn(PLANS[name].world, rank, name, kinds, "by sample"))
    expected = plainly(network(1, kinds), data(1, 1), PLANS[name].total, by_sample, sgd)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    same_state(found.state, expected.state)


# --- by notes, as on a GPU ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "copies, eager", "gems", "interleaved", "2bw"])
def test_notes_beside_the_messages_tell_the_same(name: str) -> None:
    """Gradients on a GPU are not looked at: a note in host memory tells which are absent."""
    with (
        mock.patch.object(absent_gradient, "by_note", lambda device: True),
        mock.patch.object(reshard, "by_note", lambda device: True),
    ):
        test_the_same_parameters_have_gradients_as_in_the_plain_model(name)


@pytest.mark.parametrize("loss", ["early", "half"])
def test_notes_tell_the_same_on_tiles(loss: str) -> None:
    with (
        mock.patch.object(absent_gradient, "by_note", lambda device: True),
        mock.patch.object(reshard, "by_note", lambda device: True),
    ):
        test_on_tiles_too("tiles", loss)


# --- what stands for no gradient ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*PATTERN, torch.complex64, torch.complex128], ids=str)
def test_no_arithmetic_makes_what_stands_for_no_gradient(dtype: torch.dtype) -> None:
    none = absent((3, 2), dtype, torch.device("cpu"))
    assert is_absent(none) and is_absent(none.clone()) and is_absent(none.t())
    nan = torch.full((3, 2), float("nan"), dtype=dtype)
    others = [nan, -nan, nan * 0, torch.zeros_like(nan), nan - nan, none[:0]]
    others += [torch.tensor(float("inf"), dtype=dtype) - float("inf")]
    partly = none.clone()
    partly[2, 1] = 0
    assert not any(map(is_absent, (*others, partly)))


# --- tiles ----------------------------------------------------------------------------------------


class Image(nn.Module):
    """Convolutions on tiles, an output that may not be used, and a zero-initialised one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.side, self.zero = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 3, 3, padding=1)
        self.c, self.end = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 2, 1)
        nn.init.zeros_(self.zero.weight)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.b(self.a(x).tanh())
        side = self.side(x)
        x = self.zero(x).tanh()
        return {"early": side, "half": self.c(x.detach()), "end": self.end(x)}


TILED = {
    "tiles": Plan(stages=2, micro_batches=2, spatial=[(2, 1), (1, 2)]),
    "tiles, then whole": Plan(stages=3, micro_batches=2, spatial=(2, 1), optimizer_step="eager"),
    "streamed": Plan(stages=2, ranks=1, micro_batches=2, stream=(2, 1), schedule="sequential"),
}


ON_TILES = [(name, loss) for name in TILED for loss in ("early", "half", "end", "by sample")]
ON_TILES.remove(("tiles", "by sample"))  # a loss that looks at values is not cut


@pytest.mark.parametrize(("name", "loss"), ON_TILES)
def test_on_tiles_too(name: str, loss: str) -> None:
    draw = torch.Generator().manual_seed(3)
    make = lambda: torch.randn(3, 2, 6, 6, generator=draw, dtype=torch.float64)  # noqa: E731
    steps = [(make(), make()) for _ in range(3)]
    torch.manual_seed(0)
    model = Image().double()
    found = planned(model, steps, TILED[name], LOSSES[loss], sgd)
    expected = plainly(model, steps, TILED[name].total, LOSSES[loss], sgd)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    same_state(found.state, expected.state)


class Clips(nn.Module):
    """A module of a user's, which runs whole, with or without a backward of its own."""

    def __init__(self, clips: bool) -> None:
        super().__init__()
        self.inner, self.clips = nn.Conv2d(2, 2, 1), clips

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) if float(x.detach().sum()) > -1e9 else x
        return Passed.apply(y) if self.clips else y


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        return gradients[0].clamp(-1, 1)


BEFORE: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(2, 2, 3, padding=1),
    "wide": lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 5, padding=2)),
    "norm": lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)),
    "group norm": lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.GroupNorm(1, 2)),
    "pool": lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1)),
    "strided": lambda: nn.Sequential(nn.Conv2d(2, 2, 2, 2), nn.Upsample(scale_factor=2)),
    "bilinear": lambda: nn.Sequential(
        nn.Conv2d(2, 2, 2, 2), nn.Upsample(scale_factor=2, mode="bilinear")
    ),
    "whole": lambda: nn.Sequential(nn.Conv2d(2, 2, 1), Clips(False)),
    "own backward": lambda: nn.Sequential(nn.Conv2d(2, 2, 1), Clips(True)),
    "pooled": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(2, 2, 1)),
    "reflected": lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
}


class Unpassing(nn.Module):
    """A branch of some layers that gets no gradient, beside one that does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.other = nn.Conv2d(2, 2, 3, padding=1), BEFORE[kind]()
        self.main, self.end = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        return {"end": self.end(Unpassed.apply(self.other(x), self.main(x)))}


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [*((kind, "never") for kind in BEFORE), ("norm", "always"), ("whole", "always")],
)
def test_on_tiles_a_function_that_gives_no_gradient_gives_none(kind: str, recompute: str) -> None:
    """None once became zeros on its way through what tiles exchange, so that weight decay and
    momentum moved weights that the plain model leaves alone."""
    plan = Plan(stages=1, micro_batches=2, spatial=(2, 1), recompute=recompute)
    draw = torch.Generator().manual_seed(3)
    make = lambda: torch.randn(3, 2, 6, 6, generator=draw, dtype=torch.float64)  # noqa: E731
    steps = [(make(), make()) for _ in range(2)]
    torch.manual_seed(0)
    model = Unpassing(kind).double()
    expected = plainly(model, steps, plan.total, LOSSES["end"], sgd)
    before = model.state_dict()
    moved = [n for n, _ in model.other.named_parameters(prefix="other")
             if not torch.equal(expected.state[n], before[n])]  # fmt: skip
    assert bool(moved) == (kind == "own backward")  # which makes zeros of none
    found = planned(model, steps, plan, LOSSES["end"], sgd)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    same_state(found.state, expected.state)


# --- statistics inside torch.utils.checkpoint -----------------------------------------------------


def test_statistics_inside_a_checkpoint_region_are_said_to_be_updated_once(caplog: Any) -> None:
    """Plain PyTorch updates them in the recomputation, too: a difference that is announced."""

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.end = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"end": self.end(checkpoint(self.norm, x, use_reentrant=False))}

    caplog.set_level("INFO", logger="gems.torch.runtime")
    found = planned(Region().double(), data(0, 6), Plan(micro_batches=1), LOSSES["end"], sgd)
    assert "norm: running statistics inside torch.utils.checkpoint" in caplog.text
    assert found.state["norm.num_batches_tracked"] == 4


def test_a_checkpoint_region_that_ends_in_noise_has_the_gradient_of_its_noise() -> None:
    """Story: torch stops recomputing as soon as a tensor is saved, and RReLU saves its noise before
    it has drawn it. Plain torch's gradient is made of whatever was in that memory."""

    class Noisy(nn.Module):
        def __init__(self, region: bool) -> None:
            super().__init__()
            self.first, self.noise, self.last = nn.Linear(6, 40), nn.RReLU(), nn.Linear(40, 5)
            self.region = region

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = checkpoint(self.noise, x, use_reentrant=False) if self.region else self.noise(x)
            return self.last(x)

    torch.manual_seed(0)
    with_region, without = Noisy(True).double(), Noisy(False).double()
    without.load_state_dict(with_region.state_dict())
    data = batches((4, 6), 5, 2, torch.float64)
    plan = Plan(stages=2, micro_batches=2)
    assert_equal(exact.planned(with_region, data, plan), exact.planned(without, data, plan))
