"""Layers on tiles under autocast, recomputed or not: the numbers of one rank, but for rounding.

A second run of a layer must cast what the first one cast. It may be the model's own checkpoint
region in a stage on tiles, in a streamed stage, or in a loss of tiles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gems.plans.plan import Plan
from tests.exact import alone, planned
from tests.generate.cases import Case
from tests.generate.layers import ON_TILES
from tests.generate.models import Model, Piece
from tests.generate.run import judge

Tensor = torch.Tensor
PLANS: tuple[dict[str, Any], ...] = (
    {"spatial": (2, 2)},
    {"spatial": (3, 2), "halo": "d2"},  # a tile may be empty
    {"local_dp": 2},
)


@pytest.mark.parametrize(("number", "kind"), [*enumerate(sorted(ON_TILES))])
def test_a_layer_of_every_kind_in_a_checkpoint_region(number: int, kind: str) -> None:
    """Every plan, both precisions and both kinds of regions, in turn."""
    options = {"stages": 1, "micro_batches": 1, "schedule": "gpipe"} | PLANS[number % 3]
    piece = Piece(kind, number, ("checkpoint_region", "checkpoint_reentrant")[number // 2 % 2])
    model, precision = Model(number, (3, 5, 4), (piece,)), ("bf16", "fp16")[number % 2]
    verdict = judge(Case(kind, model, options, batches=(2,), precision=precision))
    assert not verdict.failed, f"{verdict.kind}: {verdict.text}"


class Checked(nn.Module):
    """A layer inside a checkpoint region between others; its input is in low precision."""

    def __init__(self, region: bool) -> None:
        super().__init__()
        self.stem, self.body, self.head = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.region = region

    def work(self, x: Tensor) -> Tensor:
        return self.body(x).softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = checkpoint(self.work, x, use_reentrant=False) if self.region else self.work(x)  # type: ignore
        return self.head(x)


def checked_loss(x: Tensor, y: Tensor) -> Tensor:
    def work(x: Tensor) -> Tensor:
        return F.conv2d(x, torch.full((3, 3, 1, 1), 0.5)).log_softmax(1)

    found = checkpoint(work, x, use_reentrant=False)
    return F.nll_loss(found, y)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [F.cross_entropy, checked_loss])
@pytest.mark.parametrize(
    "options",
    [{"spatial": (2, 1)}, {"local_dp": 2}, {"stream": ((2, 2),)}, {"keep": "inputs"}],
    ids=lambda x: next(iter(x)),
)
def test_a_region_is_recomputed_in_the_precision_of_its_first_run(options: Any, loss: Any) -> None:
    torch.manual_seed(0)
    model, plain = Checked(True), Checked(False)
    plain.load_state_dict(model.state_dict())
    data = [(torch.randn(2, 3, 8, 8), torch.randint(3, (2, 8, 8)))]
    plan = Plan(stages=1, schedule="sequential", **options)
    found = planned(model, data, plan, loss, precision="bf16")
    theirs = alone(plain, data, 1, loss, precision="bf16")
    assert found.losses == pytest.approx(theirs.losses, rel=1e-3)
    for name, gradient in theirs.gradients[0].items():
        mine = found.gradients[0][name]
        assert mine is not None and gradient is not None, name
        torch.testing.assert_close(
            mine, gradient, rtol=0.05, atol=0.02 * float(gradient.abs().max())
        )
