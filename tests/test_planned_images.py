"""Plans for the largest image, at a small scale: really trained, in the memory that was given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems.hardware import machine
from gems.models.resnet import resnet_v2
from gems.planner.request import Request
from gems.torch.planning import Study
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests.networks import build


def residual() -> nn.Module:
    return resnet_v2(depth=11, width=4, num_classes=2)


def u_net() -> nn.Module:
    return build("unet", norm="none", width=8, levels=4)


# Model, whether it labels pixels, ranks, KiB of memory and of store for each, and what the plan
# must do; as the plans for the full networks under 256 MiB do.
CASES: dict[str, tuple[Any, bool, int, int, int, tuple[str, ...], bool]] = {
    "ResNet": (residual, False, 1, 700, 3000, ("values:disk",), False),
    "ResNet, 2 ranks": (residual, False, 2, 700, 3000, ("values:disk",), True),
    "U-Net": (u_net, True, 1, 896, 6000, ("values:disk", "weights:disk"), False),
    "U-Net, 2 ranks": (u_net, True, 2, 1200, 6000, ("values:disk", "weights:disk"), True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_for_the_largest_image_takes_what_it_was_given(name: str) -> None:
    make, pixels, ranks, memory, store, offload, tiled = CASES[name]
    torch.manual_seed(0)
    model = make()
    study = Study(model, torch.empty(1, 3, 64, 64, device="meta"), machine("cpu"), "estimate")
    request = Request(ranks, memory << 10, ranks, "image", state=0.0, store=store << 10)
    plan, at = study.choose(request)
    side = at.images[0].shape[-1]
    assert set(offload) <= set(plan.offload), plan.offload
    assert plan.cut == tiled
    shape = (ranks, side, side) if pixels else (ranks,)
    image, target = torch.randn(ranks, 3, side, side), torch.zeros(shape, dtype=torch.int64)

    def work(transport: Any) -> tuple[int, int, int]:
        trainer = Trainer(
            copy.deepcopy(model), F.cross_entropy, lambda p: torch.optim.SGD(p, 0.1),
            torch.empty(ranks // plan.total, 3, side, side), plan, transport=transport,
            costs="estimate",
        )  # fmt: skip
        trainer.step(image, target)
        forecast = trainer.forecast().peaks[transport.rank].total
        stored = max(m.offloaded for _, m in trainer.timeline().memory[transport.rank])
        return trainer.peak, forecast, stored

    for peak, predicted, stored in run(plan.world, work):
        assert peak <= memory << 10 and stored <= store << 10
        assert predicted == pytest.approx(peak, rel=0.05)
