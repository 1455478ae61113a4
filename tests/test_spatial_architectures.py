"""Real architectures with their images cut, at sizes that are no powers of two."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from gems.plans.plan import Plan
from tests import networks
from tests.exact import alone, assert_equal, batches, plainly, planned
from tests.spatial import Plain

Tensor = torch.Tensor
CLASSES = 5


class Volumes(nn.Module):
    """A small CosmoFlow: convolutions and pooling in three dims, and a few numbers at the end."""

    def __init__(self) -> None:
        super().__init__()
        widths = (2, 4, 6, 8)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), nn.LeakyReLU(0.1, True),
                    nn.MaxPool3d(2, ceil_mode=True),
                )
                for a, b in pairwise(widths)
            )
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 2 * 2 * 1, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


# Thin, and on small images, but with every block of the real thing.
NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "ResNet-50": (lambda: networks.build("resnet50", width=2, num_classes=CLASSES), (3, 70, 99)),
    "ResNet-110-v2": (
        lambda: networks.build("resnet110_v2", width=2, num_classes=CLASSES),
        (3, 27, 21),
    ),
    "U-Net": (
        lambda: networks.build("unet", width=2, levels=4, num_classes=CLASSES),
        (3, 43, 38),
    ),
    "AmoebaNet-D": (
        lambda: networks.build("amoebanet_d", num_layers=3, num_filters=8, num_classes=CLASSES),
        (3, 70, 99),
    ),
    "ConvNeXt": (
        lambda: networks.build(
            "convnext_tiny", depths=(1, 1, 3, 1), dims=(4, 4, 6, 8), num_classes=CLASSES, scale=0.1
        ),
        (3, 70, 99),
    ),
    "volumes": (Volumes, (2, 13, 11, 7)),
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name][0]().double()


def data_for(name: str, samples: int = 4) -> list[Any]:
    shape = NETWORKS[name][1]
    data = batches((samples, *shape), CLASSES, 1, torch.float64)
    if name == "U-Net":  # a class for each pixel
        draw = torch.Generator().manual_seed(2)
        data = [(x, torch.randint(CLASSES, (samples, *shape[1:]), generator=draw)) for x, _ in data]
    return data


CASES: dict[str, tuple[str, Plan]] = {
    "ResNet-50, 4 tiles to 2 to whole": (
        "ResNet-50",
        Plan(stages=3, micro_batches=2, spatial=[(2, 2), (1, 2)]),
    ),
    "ResNet-50, both ways, d2": (
        "ResNet-50",
        Plan(stages=2, replications=1, schedule="gems", spatial=[(1, 3)], halo="d2"),
    ),
    "ResNet-110-v2, 2 tiles to 4": (
        "ResNet-110-v2",
        Plan(stages=3, micro_batches=2, schedule="gpipe", spatial=[(1, 2), (2, 2)]),
    ),
    "U-Net, 2x2 all the way": (
        "U-Net",
        Plan(micro_batches=2, schedule="sequential", spatial=[(2, 2)]),
    ),
    "U-Net, tiles to whole, d2": (
        "U-Net",
        Plan(
            stages=3, micro_batches=2, schedule="zero-bubble", spatial=[(2, 2), (1, 2)], halo="d2",
            fused_layers=4,
        ),
    ),
    "AmoebaNet-D, 4 tiles to whole": (
        "AmoebaNet-D",
        Plan(stages=2, micro_batches=2, spatial=[(2, 2)]),
    ),
    "AmoebaNet-D, 2 tiles, both ways, d2": (
        "AmoebaNet-D",
        Plan(stages=2, replications=1, schedule="gems", spatial=[(1, 2)], halo="d2"),
    ),
    "ConvNeXt, tiles to slices": (
        "ConvNeXt",
        Plan(stages=2, micro_batches=1, spatial=[(2, 2)], local_dp=2),
    ),
    "ConvNeXt, d2, data 2": (
        "ConvNeXt",
        Plan(stages=2, micro_batches=1, data=2, spatial=[(2, 1)], halo="d2"),
    ),
    "volumes, 2x2x2": (
        "volumes",
        Plan(
            stages=[["layers.0", "layers.1", "layers.2"], ["head"]], micro_batches=2,
            spatial=[(2, 2, 2)],
        ),
    ),
    "volumes, both ways, depth": (
        "volumes",
        Plan(
            stages=[["layers.0", "layers.1"], ["layers.2", "head"]], replications=1,
            schedule="gems", spatial=[(3, 1, 1)], halo="d2", fused_layers=3,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_real_architecture_trains_like_the_plain_one(case: str) -> None:
    name, plan = CASES[case]
    model, data = network(name), data_for(name)
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


DIRECT = {
    "ResNet-50": (1, 3),
    "AmoebaNet-D": (2, 1),
    "U-Net": (3, 2),
    "ConvNeXt": (2, 2),
    "volumes": (2, 2, 2),
}


@pytest.mark.parametrize(("training", "fused"), [(True, 1), (True, 4), (False, 4)])
@pytest.mark.parametrize("name", DIRECT)
def test_the_gradient_of_the_image_is_exact_too(name: str, training: bool, fused: int) -> None:
    image = torch.randn(2, *NETWORKS[name][1], generator=torch.Generator().manual_seed(1))
    model = network(name).train(training)
    Plain(model.layers if name == "volumes" else model, image).cut(DIRECT[name], fused=fused)


def test_stochastic_depth_and_dropout_of_an_efficientnet_are_those_of_one_rank() -> None:
    torch.manual_seed(0)
    groups = ((1, 4, 1, 1, 3), (6, 4, 2, 2, 3), (6, 6, 2, 1, 5))
    model = networks.build(
        "efficientnet_b0", stem=4, head=8, num_classes=CLASSES, dropout=0.2, drop_path=0.3,
        groups=groups,
    ).double()  # fmt: skip
    data = batches((4, 3, 27, 21), CLASSES, 1, torch.float64)
    plan = Plan(stages=2, micro_batches=2, spatial=[(2, 2)])
    assert_equal(planned(model, data, plan), alone(model, data, 2))
