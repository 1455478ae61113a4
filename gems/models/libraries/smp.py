"""segmentation-models-pytorch: `smp/Unet` and its sisters, over any of its encoders."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch import nn

from .signature import option_names, spoken, translated

smp: Any = importlib.import_module("segmentation_models_pytorch")

WORDS = {"num_classes": ("classes",), "in_channels": ("in_channels",)}


def names() -> list[str]:
    kinds = {name: value for name, value in vars(smp).items() if inspect.isclass(value)}
    return sorted(name for name, kind in kinds.items() if issubclass(kind, nn.Module))


def options(name: str) -> tuple[str, ...]:
    made = getattr(smp, name)
    return option_names(made, spoken(made, WORDS))


def build(name: str, options: dict[str, Any]) -> nn.Module:
    made = getattr(smp, name)
    return made(**{"encoder_weights": None, **translated(options, spoken(made, WORDS))})
