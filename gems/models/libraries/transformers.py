"""Hugging Face's vision models by their type, `transformers/vit`, from its default configuration.

They give logits as plain networks do, by a forward hook: names of weights stay theirs. What
segments is brought to the size of the image, as their own loss does it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

hf: Any = importlib.import_module("transformers")
_auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")

TASKS = {
    "classification": (
        hf.AutoModelForImageClassification,
        _auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    ),
    "segmentation": (
        hf.AutoModelForSemanticSegmentation,
        _auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    ),
}
SEGMENTERS = {"segformer"}  # these classify too, but were made for the other
WORDS = {"num_classes": "num_labels", "in_channels": "num_channels", "image_size": "image_size"}


def names() -> list[str]:
    return sorted({name for _, known in TASKS.values() for name in known} - {"timm_wrapper"})


def options(name: str) -> tuple[str, ...]:
    """Our words, `task`, and what this type's configuration has beside that of every type."""
    config = hf.AutoConfig.for_model(name)
    about_files = {*hf.PretrainedConfig().to_dict(), "model_type"}  # and what outputs look like
    shared = [ours for ours, theirs in WORDS.items() if hasattr(config, theirs)]
    own = [key for key in config.to_dict() if key not in {*WORDS.values(), *about_files}]
    return (*shared, "task", *own)


def build(name: str, options: dict[str, Any]) -> nn.Module:
    options = dict(options)
    task = options.pop("task", None) or _task(name)
    if task not in TASKS or name not in TASKS[task][1]:
        can = [t for t, (_, known) in TASKS.items() if name in known]
        raise ValueError(f"task is {task!r}; it does {' and '.join(can)}")
    theirs = {WORDS.get(key, key): value for key, value in options.items()}
    model = TASKS[task][0].from_config(hf.AutoConfig.for_model(name, **theirs))
    hook = _as_large_as_the_image if task == "segmentation" else _logits
    model.register_forward_hook(hook, with_kwargs=True)
    return model.train()


def _task(name: str) -> str:
    classifies = name in TASKS["classification"][1] and name not in SEGMENTERS
    return "classification" if classifies else "segmentation"


def _logits(model: nn.Module, args: Any, kwargs: Any, output: Any) -> torch.Tensor:
    return output.logits


def _as_large_as_the_image(model: nn.Module, args: Any, kwargs: Any, output: Any) -> torch.Tensor:
    image = args[0] if args else kwargs["pixel_values"]
    size = image.shape[-2:]
    if output.logits.shape[-2:] == size:
        return output.logits
    return F.interpolate(output.logits, size=size, mode="bilinear", align_corners=False)
