"""torchvision's classifiers: what `torchvision.models` itself lists."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

models: Any = importlib.import_module("torchvision.models")
OPEN = True  # what else is given goes to the model's own constructor


def names() -> list[str]:
    return models.list_models(module=models)


def options(name: str) -> tuple[str, ...]:
    return ("num_classes", "image_size") if name.startswith("vit_") else ("num_classes",)


def build(name: str, options: dict[str, Any]) -> nn.Module:
    return models.get_model(name, weights=None, **options)
