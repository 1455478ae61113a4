"""Options of the model and its images, and the model they describe."""

from __future__ import annotations

import argparse
import ast
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems.cli.keras_models import is_keras, on_tensorflow, seed_keras
from gems.cli.keras_models import studied as keras_studied
from gems.cli.options import count, string
from gems.errors import GemsError, PlanError
from gems.hardware import Machine

if TYPE_CHECKING:
    from gems.data.source import Source
    from gems.keras.planning import Study as KerasStudy
    from gems.torch.planning import Study

MODEL = {
    "--model": string(
        "resnet110-v2",
        "a network of gems.models (default resnet110-v2); one of an installed library, such as "
        "timm/resnet50, monai/UNet, transformers/vit, torchvision/resnet50, smp/Unet, or "
        "keras/ResNet50 (any of keras.applications, on the backend that KERAS_BACKEND names: "
        "tensorflow or torch); or your own: "
        "package.module:name or file.py:name, a function that returns an nn.Module",
        "NAME",
    ),
    "--model-option": {
        "action": "append",
        "default": [],
        "metavar": "NAME=VALUE",
        "help": "another option of the network, or an argument of your function, as a Python "
        "literal: norm=group, in_channels=1, dims=3; may be repeated",
    },
    "--image-size": count(32, "side of the square image or cube (default 32)", metavar="PX"),
    "--num-classes": count(None, "classes (default: those of the data, else 10)"),
    "--num-layers": count(None, "depth, of networks that come in several depths"),
    "--num-filters": count(None, "channels of the first layer"),
    "--batch-size": count(1, "samples per replica and step, split into --parts (default 1)"),
}

MOST_CELLS = 2**45  # of a micro-batch: layers make 1,000 times as many, counted in 64 bits
# Options of the same meaning in different networks.
_DEPTH = ("depth", "num_layers", "levels")
_WIDTH = ("width", "num_filters")


def model_from(given: argparse.Namespace) -> Any:
    """The network that was asked for, with ordinary random weights."""
    more = model_options(given)
    if ":" in given.model:
        return _own(given, more)
    from gems import models

    name = _name(given)
    wanted = {"num_classes": classes(given), "image_size": given.image_size}
    if twice := sorted(set(wanted) & set(more)):
        raise PlanError(f"--model-option {twice[0]}: write --{twice[0].replace('_', '-')} instead")
    wanted["in_channels"] = image_shape(given)[0]
    wanted |= dict.fromkeys(_DEPTH, given.num_layers) | dict.fromkeys(_WIDTH, given.num_filters)
    known = known_options(given)
    try:
        options = {k: v for k, v in wanted.items() if v is not None and k in known}
        for flag, words in (("--num-layers", _DEPTH), ("--num-filters", _WIDTH)):
            given_by_flag = any(wanted[word] is not None for word in words)
            if given_by_flag and not set(words) & set(known):
                raise PlanError(f"{flag} means nothing to {given.model}; leave it out")
            if given_by_flag and (twice := sorted(set(words) & set(more))):
                raise PlanError(f"{flag} and --model-option {twice[0]}: give one of them")
        return models.build(name, **(options | more))
    except ValueError as error:
        raise PlanError(str(error)) from error


def classes(given: argparse.Namespace) -> int:
    return 10 if given.num_classes is None else given.num_classes


def fitted(given: argparse.Namespace, source: Source) -> None:
    """Let the network take what the data has: its classes, channels and dims, unless given."""
    if given.num_classes is None:
        given.num_classes = source.classes
    if given.num_classes < max(1, source.classes):
        raise PlanError(
            f"the data has {source.classes} classes ({', '.join(source.names)}), "
            f"--num-classes is {given.num_classes}; leave it out, or label the data (--labels)"
        )
    given.image_size = source.shape[-1]
    if ":" in given.model:
        return
    chosen, known = model_options(given), known_options(given)
    found = {"in_channels": source.shape[0], "dims": len(source.shape) - 1}
    for name, value in found.items():
        if name in known and name not in chosen and (name != "dims" or value != 2):
            given.model_option = [*given.model_option, f"{name}={value}"]
    wanted = image_shape(given)
    if (len(wanted), wanted[0]) != (len(source.shape), source.shape[0]):
        raise PlanError(
            f"samples are {' x '.join(map(str, source.shape))}, and {given.model} takes images of "
            f"{wanted[0]} channels in {len(wanted) - 1} dims; choose another network, or see "
            "--model-option"
        )


def model_options(given: argparse.Namespace) -> dict[str, Any]:
    """`--model-option name=value`: numbers, tuples and the like; anything else is text."""
    found: dict[str, Any] = {}
    for text in given.model_option:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise PlanError(f"--model-option {text!r} is not name=value, such as width=32")
        if name in found:
            raise PlanError(f"--model-option {name} is given twice: {found[name]!r} and {value}")
        found[name] = _literal(value)
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def known_options(given: argparse.Namespace) -> tuple[str, ...]:
    """The options of the network that was asked for by name."""
    from gems import models

    try:
        return models.options_of(_name(given))
    except ValueError as error:
        raise PlanError(str(error)) from error


def _name(given: argparse.Namespace) -> str:
    return given.model if "/" in given.model else given.model.replace("-", "_")


def _own(given: argparse.Namespace, options: dict[str, Any]) -> Any:
    import sys

    name = given.model
    for flag, value in (("--num-layers", given.num_layers), ("--num-filters", given.num_filters)):
        if value is not None:
            raise PlanError(f"{flag} is for networks by name; give {name} a --model-option")

    sys.path.insert(0, "")
    module, _, attribute = name.partition(":")
    own_file = module.endswith(".py")
    first = module.partition(".")[0]
    if first in sys.stdlib_module_names and not own_file:  # os:system out of somebody's --config
        raise GemsError(f"--model {name}: {module} is Python's own and has no networks")
    try:
        function = getattr(_imported(module), attribute)
    except (ImportError, AttributeError) as error:
        wanted = "package.module:function or file.py:function"
        raise GemsError(f"--model {name}: {error}; write {wanted}") from error
    return function(**_arguments(name, function, options, given.num_classes))


def _imported(module: str) -> Any:
    """A module by its name, or by its file, which may import others of its folder."""
    import importlib.util
    import sys

    if not module.endswith(".py"):
        return importlib.import_module(module)
    file = Path(module)
    spec = importlib.util.spec_from_file_location(f"file_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ImportError(f"there is no file {file}")
    sys.path.insert(0, str(file.parent))
    sys.modules[spec.name] = found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def _arguments(
    name: str, function: Any, options: dict[str, Any], classes: int | None
) -> dict[str, Any]:
    """Those of the user's function, with `num_classes` if it takes one and they are known.

    Wrong ones are found before the call, so that an error inside of it stays what it is.
    """
    import inspect

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, or no function: the call itself will tell
        return options
    if classes is not None and "num_classes" in signature.parameters:
        options = {"num_classes": classes} | options
    try:
        signature.bind(**options)
    except TypeError as error:
        raise GemsError(
            f"--model {name}{signature}: {error}; its arguments are given by --model-option"
        ) from error
    return options


def image_shape(given: argparse.Namespace) -> tuple[int, ...]:
    """Channels and sides of one image: 3 and a square, unless the network asks for others."""
    more = model_options(given)
    channels, dims = 3, more.get("dims", 2)
    if ":" not in given.model:
        from gems import models

        dims = models.dims_of(_name(given), **more)
        channels = models.channels_of(_name(given)) if dims == 3 else 3
    return more.get("in_channels", channels), *[given.image_size] * dims


def micro_batch(given: argparse.Namespace) -> int:
    """Samples of one micro-batch."""
    parts = getattr(given, "parts", 1)
    if given.batch_size % parts:
        raise PlanError(f"--batch-size {given.batch_size} is not a multiple of --parts {parts}")
    return given.batch_size // parts


def sampled(given: argparse.Namespace) -> tuple[Any, Any]:
    """The model without its weights, in training, and inputs of the size that was asked for."""
    import torch

    shape = (micro_batch(given), *image_shape(given))
    if math.prod(shape) > MOST_CELLS:
        raise PlanError(
            f"a micro-batch of {' x '.join(map(str, shape))} has {math.prod(shape):.3g} numbers; "
            "take a smaller --image-size or --batch-size, or more --parts"
        )
    if is_keras(given):  # which is on the device of Keras's own scope
        seed_keras(given)
        return model_from(given).train(), torch.empty(shape)
    try:
        with torch.device("meta"):
            model = model_from(given)
    except (RuntimeError, NotImplementedError):  # some look at values while they are built
        model = model_from(given).to("meta")
    sample = torch.empty(shape, device="meta")
    return model.train(), sample


def studied(given: argparse.Namespace, on: Machine) -> Study | KerasStudy:
    """The model on a machine: its graph, and costs; nothing is allocated unless it is `local`."""
    if on_tensorflow(given):
        channels, *sides = image_shape(given)
        shape = (micro_batch(given), *sides, channels)
        return keras_studied(given, on, lambda: model_from(given), shape)
    from gems.torch.planning import Study

    precision, masters = (getattr(given, x, None) for x in ("precision", "master_weights"))
    return Study(*sampled(given), on, precision=precision or "fp32", master_weights=bool(masters))
