"""MONAI's networks for medical images: any class of `monai.networks.nets`."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch import nn

from .signature import accepted, missing, option_names, spoken, translated

nets: Any = importlib.import_module("monai.networks.nets")

WORDS = {
    "num_classes": ("num_classes", "out_channels"),
    "in_channels": ("in_channels", "n_input_channels"),
    "image_size": ("img_size", "image_size"),
    "dims": ("spatial_dims",),
}
# What MONAI asks for and its own tutorials give.
CUSTOMARY: dict[str, dict[str, Any]] = {
    "UNet": {"channels": (16, 32, 64, 128, 256), "strides": (2, 2, 2, 2)},
    "AttentionUnet": {"channels": (16, 32, 64, 128, 256), "strides": (2, 2, 2, 2)},
    "ViT": {"patch_size": 16, "classification": True},
    "EfficientNetBN": {"model_name": "efficientnet-b0"},
    "FlexibleUNet": {"backbone": "efficientnet-b0"},
}


def names() -> list[str]:
    """Classes only, and each under its class's own name: MONAI has several for some."""
    found = {name: value for name, value in vars(nets).items() if inspect.isclass(value)}
    return sorted(n for n, c in found.items() if issubclass(c, nn.Module) and c.__name__ == n)


def options(name: str) -> tuple[str, ...]:
    made = getattr(nets, name)
    return option_names(made, spoken(made, WORDS))


def build(name: str, options: dict[str, Any]) -> nn.Module:
    """Two dims unless `dims` is given."""
    made = getattr(nets, name)
    words = spoken(made, WORDS)
    given = {"dims": 2, **options} if "dims" in words else options
    given = CUSTOMARY.get(name, {}) | translated(given, words)
    if "pretrained" in accepted(made):
        given = {"pretrained": False, **given}
    if absent := missing(made, given):
        raise ValueError(f"it also needs {', '.join(absent)}")
    return made(**given)
