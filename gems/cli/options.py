"""Options that several subcommands share: which model, which plan."""

from __future__ import annotations

import argparse
import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems.errors import GemsError, PlanError
from gems.files import from_json, read_text
from gems.geometry.grid import HALOS, LAYOUTS
from gems.hardware import MACHINES, Machine
from gems.plans.offload import offload_of
from gems.plans.plan import OPTIMIZER_STEP, PLACEMENTS, SCHEDULES, ZERO, Plan
from gems.plans.recompute import parse_recompute

if TYPE_CHECKING:
    from gems.data.source import Source
    from gems.torch.planning import Study


def add_machine(parser: argparse._ActionsContainer, purpose: str, default: str | None) -> None:
    known = f"{', '.join(MACHINES)}, local (see gems machine), or a file like theirs"
    parser.add_argument("--machine", metavar="NAME", default=default, help=f"{purpose}: {known}")


def add_plan(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the plan")
    put = group.add_argument
    put(
        "--split-size",
        "--stages",
        dest="stages",
        type=int,
        default=1,
        metavar="N",
        help="stages that the model is cut into (default 1)",
    )
    put(
        "--parts",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches that each batch is cut into (default 1)",
    )
    put(
        "--times",
        type=int,
        default=0,
        metavar="T",
        help="repeats of the bidirectional pair per update: 2 x T x parts micro-batches",
    )
    put(
        "--schedule",
        choices=SCHEDULES,
        help="order of the work (default: gems with --times, else 1f1b)",
    )
    put("--data", type=int, default=1, metavar="N", help="data-parallel copies of it all")
    put(
        "--ranks",
        type=int,
        default=0,
        metavar="N",
        help="ranks per copy, when a rank has several stages",
    )
    put(
        "--placement",
        choices=PLACEMENTS,
        default="straight",
        help="stages straight over the ranks, or folded: there and back again",
    )
    put(
        "--bidirectional",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="a second replica in reverse (schedule auto)",
    )
    put(
        "--max-in-flight",
        type=int,
        default=0,
        metavar="N",
        help="micro-batches that a rank may keep for backward (schedule auto)",
    )
    put(
        "--balance",
        default="time",
        metavar="B",
        help="what to even out over stages, time or memory, or layers per stage: 3,4,4,3",
    )
    put(
        "--spatial",
        default="",
        metavar="G",
        help="cut the pictures of the first stages into tiles, one rank per tile: a grid for each "
        "such stage, rows x columns like 2x2,1x2 or depth x rows x columns like 2x2x2, or by name "
        "and number of ranks: square:4, vertical:4 (strips side by side), horizontal:4",
    )
    put(
        "--num-spatial-parts",
        default="",
        metavar="N",
        help="the same by numbers of tiles, one for each spatial stage like 4,2, or one for all of "
        "--spatial-size; --slice-method says how they lie",
    )
    put(
        "--spatial-size",
        type=int,
        default=0,
        metavar="N",
        help="how many of the first stages are spatial (default: as many as --num-spatial-parts)",
    )
    put(
        "--slice-method",
        choices=tuple(LAYOUTS),
        default="square",
        help="tiles of --num-spatial-parts: square (default), vertical strips, horizontal strips",
    )
    put(
        "--local-dp",
        "--local-DP",
        type=int,
        default=1,
        metavar="N",
        help="cut the micro-batch of every stage that is not spatial into N slices, one rank each",
    )
    put(
        "--halo",
        choices=HALOS,
        default="d1",
        help="how tiles get each other's edges: d1 before every layer (default), d2 wider edges "
        "once for several layers, computed twice where they overlap",
    )
    put("--halo-D2", dest="halo", action="store_const", const="d2", help="the same as --halo d2")
    put(
        "--fused-layers",
        type=int,
        default=0,
        metavar="N",
        help="layers that share one exchange with --halo d2 (default: what the costs say)",
    )
    put(
        "--enable-master-comm-opt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="sum the gradients of each stage over its replicas as soon as they are complete, "
        "beside other work (default); without, after all work",
    )
    put(
        "--recompute",
        default="never",
        metavar="R",
        help="activations that stages drop and recompute for backward: never (default), always, "
        "except_last (all but the last micro-batch's), auto (as the memory budget demands), or "
        "those of modules: layer1,layer2; with a slash between stages: always/layer2,layer3/never",
    )
    put(
        "--stream",
        default="",
        metavar="G",
        help="run the first stage over a grid of blocks, one after the other on its rank, keeping "
        "only its inputs: 4x4, or one grid for each of the first stages like 4x4,2x2",
    )
    put(
        "--zero",
        type=int,
        choices=ZERO,
        default=0,
        help="what the ranks that hold a stage (data-parallel copies, two directions, tiles) share "
        "out among them: 1 the optimizer's state, 2 gradients too, 3 weights too (default 0)",
    )
    put(
        "--offload",
        default="",
        metavar="O",
        help="what is put away while it is not needed: stash, weights (and the optimizer's state), "
        "optimizer; to the host (default) or on disk: activations:disk,optimizer",
    )
    put(
        "--optimizer-step",
        choices=OPTIMIZER_STEP,
        default="end",
        help="when weights are updated: after all work of a step, or each stage as soon as its "
        "gradients are complete (eager; with --schedule l2l that is L2L-p)",
    )
    put(
        "--partition-activations",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="tiles keep what all of them have as a whole to compute from it again in parts",
    )
    put("--plan", type=Path, metavar="FILE", help="a plan from a file instead (see gems plan)")


def told(given: argparse.Namespace, add: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    """Flags of a group of options whose values are not the defaults."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    usual = parser.parse_args([])
    flags = {action.dest: action.option_strings[0] for action in reversed(parser._actions)}
    return [
        flag
        for dest, flag in reversed(flags.items())
        if getattr(given, dest, None) != getattr(usual, dest)
    ]


def plan_from(given: argparse.Namespace) -> Plan:
    if given.plan is not None:
        extra = [flag for flag in told(given, add_plan) if flag not in ("--plan", "--parts")]
        if extra:
            raise PlanError(
                f"--plan {given.plan} says all of the plan; leave out {', '.join(extra)}"
            )
        return _plan_in(given.plan)
    schedule = given.schedule or ("gems" if given.times else "1f1b")
    return Plan(
        stages=given.stages,
        micro_batches=2 * given.times * given.parts if given.times else given.parts,
        replications=given.times * given.parts,
        schedule=schedule,
        data=given.data,
        ranks=given.ranks,
        placement=given.placement,
        bidirectional=True if given.bidirectional else None,
        balance=_balance(given.balance),
        max_in_flight=given.max_in_flight,
        spatial=_spatial(given),
        local_dp=given.local_dp,
        halo=given.halo,
        fused_layers=given.fused_layers,
        grad_sync="overlap" if given.enable_master_comm_opt else "end",
        recompute=parse_recompute(given.recompute),
        stream=tuple(filter(None, given.stream.split(","))),
        zero=given.zero,
        offload=offload_of(given.offload),
        optimizer_step=given.optimizer_step,
        partition_activations=given.partition_activations,
    )


def _plan_in(path: Path) -> Plan:
    try:
        return from_json(Plan, read_text(path))
    except GemsError as error:
        raise PlanError(f"{path}: {error}; write one with gems plan --out") from error


def _spatial(given: argparse.Namespace) -> tuple[str, ...]:
    """The grids of the spatial stages, as --spatial or the published options say them."""
    if given.spatial:
        if given.num_spatial_parts or given.spatial_size or given.slice_method != "square":
            raise PlanError(
                "--spatial says the grids already; leave out --num-spatial-parts, --spatial-size "
                "and --slice-method"
            )
        return tuple(given.spatial.split(","))
    if not given.num_spatial_parts:
        if given.spatial_size:
            raise PlanError(
                f"--spatial-size {given.spatial_size} wants --num-spatial-parts, e.g. 4: into how "
                "many tiles are those stages cut?"
            )
        if given.slice_method != "square":
            raise PlanError(
                f"--slice-method {given.slice_method} wants --num-spatial-parts, e.g. 4: how many "
                "tiles are there to lay out?"
            )
        return ()
    parts = given.num_spatial_parts.split(",")
    stages = given.spatial_size or len(parts)
    if len(parts) not in (1, stages):
        raise PlanError(
            f"--num-spatial-parts {given.num_spatial_parts} has {len(parts)} numbers for "
            f"{stages} spatial stages; give one for all, or one each"
        )
    return tuple(
        f"{given.slice_method}:{n}" for n in (parts * stages if len(parts) == 1 else parts)
    )


def _balance(text: str) -> str | tuple[int, ...]:
    if text in ("time", "memory"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(
            f"--balance {text!r} is neither time, memory nor numbers: 3,4,4,3"
        ) from None


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model")
    put = group.add_argument
    put(
        "--model",
        default="resnet110-v2",
        metavar="NAME",
        help="a network of gems.models (default resnet110-v2); of a library that is installed, as "
        "transformers/vit, monai/UNet, timm/resnet18, torchvision/resnet50, smp/Unet; or your own "
        "as package.module:name, a function that gives an nn.Module",
    )
    put(
        "--model-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option of the network, or an argument of your function, as Python writes it: "
        "norm=group, layers=(3,4,23,3), in_channels=1, dims=3; may be given several times",
    )
    put("--image-size", type=int, default=32, metavar="PX", help="of squares, cubes (default 32)")
    put(
        "--num-classes",
        type=int,
        metavar="N",
        help="classes (default: as many as the data has, else 10)",
    )
    put("--num-layers", type=int, metavar="N", help="depth, of networks that come in several")
    put("--num-filters", type=int, metavar="N", help="width of the first layer")
    put(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="samples per replica and step, cut into --parts (default 1)",
    )


MOST_CELLS = (
    2**45
)  # of a micro-batch: layers make a thousand times as many, and count them in 64 bit

# Words for the same thing in different networks.
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
    try:
        known = models.options_of(name)
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
    """Let the network take what the data has: its classes, channels and dims, unless told."""
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
    from gems import models

    told, known = model_options(given), models.options_of(_name(given))
    found = {"in_channels": source.shape[0], "dims": len(source.shape) - 1}
    for name, value in found.items():
        if name in known and name not in told and (name != "dims" or value != 2):
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


def _name(given: argparse.Namespace) -> str:
    return given.model if "/" in given.model else given.model.replace("-", "_")


def _own(given: argparse.Namespace, options: dict[str, Any]) -> Any:
    import importlib
    import sys

    name = given.model
    for flag, value in (("--num-layers", given.num_layers), ("--num-filters", given.num_filters)):
        if value is not None:
            raise PlanError(f"{flag} is for networks by name; give {name} a --model-option")

    sys.path.insert(0, "")
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] in sys.stdlib_module_names:  # os:system out of somebody's --config
        raise GemsError(f"--model {name}: {module} is Python's own and has no networks")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise GemsError(f"--model {name}: {error}; write package.module:function") from error
    return function(**_arguments(name, function, options, given.num_classes))


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
    try:
        with torch.device("meta"):
            model = model_from(given)
    except (RuntimeError, NotImplementedError):  # some look at values while they are built
        model = model_from(given).to("meta")
    sample = torch.empty(shape, device="meta")
    return model.train(), sample


def studied(given: argparse.Namespace, on: Machine) -> Study:
    """The model on a machine: its graph, and costs; nothing is allocated unless it is `local`."""
    from gems.torch.planning import Study

    return Study(*sampled(given), on)
