"""PyTorch Image Models: any name that `timm.create_model` knows."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

timm: Any = importlib.import_module("timm")

SHARED = {"num_classes": "num_classes", "in_channels": "in_chans", "image_size": "img_size"}
OPEN = True  # what else is given goes to the model's own constructor


def names() -> list[str]:
    return timm.list_models()


def options(name: str) -> tuple[str, ...]:
    sized = timm.get_pretrained_cfg(name)
    fixed = bool(sized and sized.fixed_input_size)
    return tuple(word for word in SHARED if word != "image_size" or fixed)


def build(name: str, options: dict[str, Any]) -> nn.Module:
    theirs = {SHARED.get(key, key): value for key, value in options.items()}
    return timm.create_model(name, pretrained=False, **theirs)
