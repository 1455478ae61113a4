"""Networks of other libraries in plain PyTorch, small enough for tests, next to those of GEMS."""

from __future__ import annotations

from typing import Any

from torch import nn

from gems import models
from tests.networks.convnext import convnext_tiny
from tests.networks.densenet import densenet121
from tests.networks.efficientnet import efficientnet_b0
from tests.networks.resnet import resnet50, resnet101, resnet152
from tests.networks.vit import vit_base

NETWORKS = {
    made.__name__: made
    for made in (
        *(resnet50, resnet101, resnet152, densenet121),
        *(efficientnet_b0, convnext_tiny, vit_base),
    )
}


def build(name: str, **options: Any) -> nn.Module:
    """As `gems.models.build`, with the networks of this folder too."""
    return NETWORKS[name](**options) if name in NETWORKS else models.build(name, **options)
