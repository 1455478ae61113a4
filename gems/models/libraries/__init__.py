"""Networks of other people's libraries by name, `monai/SegResNet`, where they are installed.

Each library is a file with the same three functions: `names()`, `options(name)` and
`build(name, options)`. Four options mean the same for all of them, whatever the library calls them:
`num_classes`, `in_channels`, `image_size` and `dims`. Weights are random: nothing is downloaded.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# Library to the pip package it comes with, in the order that help lists them.
LIBRARIES = {
    "transformers": "transformers",
    "monai": "monai",
    "timm": "timm",
    "torchvision": "torchvision",
    "smp": "segmentation-models-pytorch",
    "keras": "keras",
}


def split(name: str) -> tuple[str, str]:
    """`monai/UNet` is library and model; the library must be one of ours."""
    library, _, model = name.partition("/")
    if library not in LIBRARIES:
        known = ", ".join(f"{each}/..." for each in LIBRARIES)
        raise ValueError(f"{name!r}: there is no library {library!r}; choose one of {known}")
    return library, model


def names(library: str) -> list[str]:
    """All networks of a library, as one writes them: `monai/UNet`."""
    return [f"{library}/{name}" for name in _adapter(library).names()]


def options_of(name: str) -> tuple[str, ...]:
    """The options that `build(name, {...})` takes, those that all libraries share first."""
    library, model = split(name)
    adapter = _adapter(library)
    _reject_unknown(library, model, adapter.names())
    return adapter.options(model)


def build(name: str, options: dict[str, Any]) -> nn.Module:
    """The network, with random weights. `options` are some of `options_of(name)`, or, where the
    library cannot list them (timm, torchvision), whatever the model's own constructor takes."""
    known = options_of(name)
    library, model = split(name)
    adapter = _adapter(library)
    unknown = [] if getattr(adapter, "OPEN", False) else sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"model {name!r} has no option {', '.join(unknown)}; it takes {', '.join(known)}"
        )
    try:
        return adapter.build(model, options)
    except ImportError as error:
        raise ValueError(f"{name} needs more than {library}: {_first_line(error)}") from error
    except (TypeError, ValueError, AssertionError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ValueError(f"{name} with {given} cannot be built: {_first_line(error)}") from error


def _adapter(library: str) -> Any:
    """The file that knows this library. Importing it imports the library."""
    package = LIBRARIES[library]
    try:
        return importlib.import_module(f".{library}", __name__)
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        needed = package if missing == package.replace("-", "_") else f"{package} {missing}"
        raise ValueError(
            f"models of {library} need {missing}, which is not installed: pip install {needed}"
        ) from error
    except Exception as error:  # torchvision beside another build of torch: RuntimeError
        raise ValueError(
            f"{library} is installed but cannot be imported beside this torch: {error}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _reject_unknown(library: str, name: str, known: list[str]) -> None:
    if name in known:
        return
    spelled = {each.lower(): each for each in known}
    near = [spelled[each] for each in difflib.get_close_matches(name.lower(), spelled, 5, 0.5)]
    advice = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(known)}"
    raise ValueError(f"{library} has no model {name!r}; {advice}")
