"""Plain single-device networks by name. They know nothing of GEMS, and torch loads on first use.

The networks of the papers are here: resnet_v1 and resnet_v2 of any depth, resnet110_v2 and
resnet1001_v2 for small images; amoebanet_d for large ones; unet and relaynet for segmentation;
cosmoflow and cosmoflow_mlperf for volumes; convolution to measure halos. All others come from
installed libraries, by a name with a slash: `monai/SegResNet`, `transformers/vit`, `timm/resnet18`,
`torchvision/resnet50`, `smp/Unet`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# Name to file, function and fixed options.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "resnet_v1": ("resnet", "resnet_v1", {}),
    "resnet_v2": ("resnet", "resnet_v2", {}),
    "resnet110_v2": ("resnet", "resnet_v2", {"depth": 110}),
    "resnet1001_v2": ("resnet", "resnet_v2", {"depth": 1001}),
    "amoebanet_d": ("amoebanet", "amoebanet_d", {}),
    "unet": ("unet", "u_net", {}),
    "relaynet": ("relaynet", "relay_net", {}),
    "convolution": ("convolution", "convolution", {}),
    "cosmoflow": ("cosmoflow", "cosmo_flow", {}),
    "cosmoflow_mlperf": ("cosmoflow", "cosmo_flow_mlperf", {}),
}
# Networks that people ask for by these names, and that a library has.
IN_LIBRARIES = {
    "resnet50": "timm/resnet50",
    "resnet101": "timm/resnet101",
    "resnet152": "timm/resnet152",
    "densenet121": "timm/densenet121",
    "efficientnet_b0": "timm/efficientnet_b0",
    "convnext_tiny": "timm/convnext_tiny",
    "vit_base": "timm/vit_base_patch16_224",
}


def build(name: str, **options: Any) -> nn.Module:
    """The network `name`, with random weights: `build("resnet_v2", depth=29, num_classes=2)`."""
    if "/" in name:
        return _libraries().build(name, options)
    accepted = options_of(name)
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ValueError(
            f"model {name!r} has no option {', '.join(unknown)}; it takes {', '.join(accepted)}"
        )
    return _function(name)(**MODELS[name][2] | options)


def options_of(name: str) -> tuple[str, ...]:
    """The options that `build(name, ...)` takes, in the order of the function's signature."""
    if "/" in name:
        return _libraries().options_of(name)
    if name not in MODELS:
        raise ValueError(_unknown(name))
    return tuple(inspect.signature(_function(name)).parameters)


def _unknown(name: str) -> str:
    libraries = {each.replace("_", ""): found for each, found in IN_LIBRARIES.items()}
    if found := libraries.get(name.replace("_", "")):
        return (
            f"model {name!r} comes from a library: write {found} (pip install gems-hires[models])"
        )
    near = difflib.get_close_matches(name, MODELS, 3)
    advice = f"did you mean {', '.join(near)}? " if near else ""
    return (
        f"there is no model {name!r}; {advice}choose one of {', '.join(sorted(MODELS))}, "
        "or one of a library, such as monai/UNet"
    )


def dims_of(name: str, **options: Any) -> int:
    """How many sides an image of `build(name, ...)` has: 2, or 3 if it is a volume."""
    return 3 if name.startswith("cosmoflow") else options.get("dims", 2)


def channels_of(name: str) -> int:
    """The default number of input channels: 3 for most."""
    if name not in MODELS:
        return 3
    return inspect.signature(_function(name)).parameters["in_channels"].default


def _function(name: str) -> Callable[..., nn.Module]:
    file, function, _ = MODELS[name]
    return getattr(importlib.import_module(f".{file}", __name__), function)


def _libraries() -> Any:
    return importlib.import_module(".libraries", __name__)
