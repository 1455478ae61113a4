"""Sums over many patches in half precision, and buffers that forward changes under the patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems.errors import PlanError, ShapeError
from gems.plans.plan import Plan
from tests.exact import assert_equal, plainly, planned
from tests.test_stream import noise

Tensor = torch.Tensor
WHOLE = Plan(stages=1, schedule="sequential")
PATCHES = Plan(stages=1, schedule="sequential", stream="32x32")  # of 2 x 2 cells
ON_TILES = Plan(stages=1, schedule="sequential", spatial="1x2", stream="32x16")

# --- sums in half ---------------------------------------------------------------------------------


class Sums(nn.Module):
    """One weight per layer and images of ones, so that bf16 has all sums exactly."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.reduce = reduce
        nn.init.ones_(self.conv.weight)
        nn.init.ones_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(self.reduce(x))


class Scaled(Sums):
    """Squeeze-and-excitation: every patch reads one whole value."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        scale = self.head(x.mean((2, 3)))[..., None, None]
        return (x * scale).mean((2, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: Sums(lambda x: x.mean((2, 3))),
    "pooled": lambda: Sums(lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1)),
    "norm": lambda: Sums(lambda x: x.norm(dim=(2, 3))),
    "scaled": lambda: Scaled(torch.Tensor.clone),
}


@pytest.mark.parametrize("plan", [PATCHES, ON_TILES], ids=["one rank", "tiles"])
@pytest.mark.parametrize("master", [False, True], ids=["autocast", "master weights"])
@pytest.mark.parametrize("name", NETWORKS)
def test_sums_over_a_thousand_patches_grow_in_half(name: str, master: bool, plan: Plan) -> None:
    """Story: a sum in bf16 stopped at 256 parts of one, so that a mean over 1,024 was 0.25."""
    data = [(torch.ones(1, 1, 64, 64), torch.zeros(1, 1))]
    found, expected = (
        planned(
            NETWORKS[name](), data, each, lambda out, _: out.sum(), precision="bf16",
            master_weights=master, make=lambda p: torch.optim.SGD(p, 0.1),
        )
        for each in (plan, WHOLE)
    )  # fmt: skip
    assert found.losses == expected.losses
    for weight, gradient in expected.gradients[0].items():
        assert found.gradients[0][weight] == gradient, weight


# --- losses ---------------------------------------------------------------------------------------


def test_a_loss_of_several_numbers_is_rejected_as_without_streaming() -> None:
    model, data = nn.Conv2d(3, 2, 3).double(), noise((2, 3, 9, 8), 3, (2, 2, 7, 6))
    for plan in (WHOLE, replace(WHOLE, stream="2x2")):
        with pytest.raises(ShapeError, match=r"loss must give one number.*got \(2, 2\)"):
            planned(model, data, plan, lambda out, t: (out - t).square().mean((2, 3)))


# --- buffers that change --------------------------------------------------------------------------


class Counts(nn.Module):
    """Adds a buffer to an image, and changes the buffer before or after, in place or not."""

    def __init__(self, first: bool, in_place: bool) -> None:
        super().__init__()
        self.first, self.in_place = first, in_place
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)
        self.register_buffer("n", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.change()
        x = torch.tanh(self.conv(x) + self.n)
        if not self.first:
            self.change()
        return self.head(x.mean((2, 3)))

    def change(self) -> None:
        if self.in_place:
            self.n += 0.5
        else:
            self.n = self.n + 0.5


@pytest.mark.parametrize(
    ("first", "in_place"), [(False, False), (False, True), (True, True)],
    ids=["assigned after", "in place after", "in place before"],
)  # fmt: skip
def test_a_buffer_that_changes_and_that_patches_read_is_rejected(
    first: bool, in_place: bool
) -> None:
    """Story: patches read in backward what a later forward had left there."""
    data = noise((2, 3, 9, 8), 3, (2,))
    with pytest.raises(PlanError, match=r"reads n, which \w+ changes .*let stage 0 end at conv"):
        planned(Counts(first, in_place), data, replace(WHOLE, stream="2x2"))


def test_patches_may_read_what_a_buffer_is_set_to() -> None:
    """That is a value of this micro-batch, which stays."""
    data, model = noise((4, 3, 9, 8), 3, (4,)), Counts(first=True, in_place=False)
    plan = Plan(stages=1, schedule="gpipe", micro_batches=2, stream="2x2")
    assert_equal(planned(model, data, plan), plainly(model, data, 2))
