"""Plain single-device networks by name. They know nothing of GEMS, and torch loads on first use.

resnet_v1, resnet_v2 (any depth), resnet110_v2, resnet1001_v2 for small images; resnet50, resnet101,
resnet152, densenet121, efficientnet_b0, convnext_tiny, vit_base and amoebanet_d for large ones;
unet and relaynet, which segment; cosmoflow and cosmoflow_mlperf for volumes. A name with a slash is
a network of a library that is installed: `monai/SegResNet`, `transformers/vit`, `timm/resnet18`,
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

Builder = Callable[..., "nn.Module"]

# Function to file. No function is named like a file: importing `gems.models.unet` would put that
# module in the place of the function, here in this package.
_FAMILIES = {
    "resnet_v1": "resnet",
    "resnet_v2": "resnet",
    "resnet50": "resnet",
    "resnet101": "resnet",
    "resnet152": "resnet",
    "densenet121": "densenet",
    "amoebanet_d": "amoebanet",
    "u_net": "unet",
    "relay_net": "relaynet",
    "cosmo_flow": "cosmoflow",
    "cosmo_flow_mlperf": "cosmoflow",
    "efficientnet_b0": "efficientnet",
    "convnext_tiny": "convnext",
    "vit_base": "vit",
}


def _named(function: str, **fixed: Any) -> Builder:
    """A builder that imports its family only when it is called."""

    def builder(**options: Any) -> nn.Module:
        return _family_function(function)(**{**fixed, **options})

    builder.__name__ = function
    return builder


def _family_function(name: str) -> Builder:
    return getattr(importlib.import_module(f".{_FAMILIES[name]}", __name__), name)


MODELS: dict[str, Builder] = {
    "resnet_v1": _named("resnet_v1"),
    "resnet_v2": _named("resnet_v2"),
    "resnet110_v2": _named("resnet_v2", depth=110),
    "resnet1001_v2": _named("resnet_v2", depth=1001),
    "resnet50": _named("resnet50"),
    "resnet101": _named("resnet101"),
    "resnet152": _named("resnet152"),
    "densenet121": _named("densenet121"),
    "amoebanet_d": _named("amoebanet_d"),
    "unet": _named("u_net"),
    "relaynet": _named("relay_net"),
    "cosmoflow": _named("cosmo_flow"),
    "cosmoflow_mlperf": _named("cosmo_flow_mlperf"),
    "efficientnet_b0": _named("efficientnet_b0"),
    "convnext_tiny": _named("convnext_tiny"),
    "vit_base": _named("vit_base"),
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
    return MODELS[name](**options)


def options_of(name: str) -> tuple[str, ...]:
    """The options that `build(name, ...)` takes, in the order of the family's own signature."""
    if "/" in name:
        return _libraries().options_of(name)
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, 3)
        advice = f"did you mean {', '.join(near)}? " if near else ""
        known = ", ".join(sorted(MODELS))
        raise ValueError(
            f"there is no model {name!r}; {advice}choose one of {known}, "
            "or of a library, such as monai/UNet"
        )
    return tuple(inspect.signature(_family_function(MODELS[name].__name__)).parameters)


def dims_of(name: str, **options: Any) -> int:
    """How many sides an image of `build(name, ...)` has: 2, or 3 if it is a volume."""
    return 3 if name.startswith("cosmoflow") else options.get("dims", 2)


def channels_of(name: str) -> int:
    """The channels that a network is made for, if it is not told otherwise: 3 of most."""
    if name not in MODELS:
        return 3
    parameters = inspect.signature(_family_function(MODELS[name].__name__)).parameters
    return parameters["in_channels"].default


def _libraries() -> Any:
    return importlib.import_module(".libraries", __name__)


def __getattr__(name: str) -> Any:
    if name in _FAMILIES:
        return _family_function(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FAMILIES])
