"""`gems train`: train a network on this computer's ranks, or as one rank of a cluster's.

Alone it starts as many local processes as the plan takes; under torchrun, mpirun or srun it is one
of theirs. Rank 0 shows progress. The run's folder gets the plan, the options in force, metrics as
JSON lines and CSV, checkpoints, pictures of the last step as it was measured, and a report.

  gems train --app medical --datapath slides --labels labels.csv --image-size 1024 --split-size 4
  gems train --app medical --image-size 64            a sample of real tissue: no file is needed
  gems train --app cifar --datapath cifar-10-python.tar.gz --model resnet-v2 --num-layers 29
  gems train --config run.yaml --resume               go on where the last checkpoint was written
  gems train --auto 4 --memory 2GiB ...               let the planner choose for four ranks
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from gems.cli.config import add_config, effective
from gems.cli.data import add_data
from gems.cli.heat import add_heat
from gems.cli.lock import locked, require_free
from gems.cli.options import add_machine, add_model, add_plan, micro_batch, plan_from
from gems.cli.ranks import end_with_launcher, start
from gems.cli.reject import reject
from gems.errors import GemsError
from gems.plans.plan import Plan

OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam", "radam")
BACKENDS = ("gloo", "nccl", "mpi")
PRECISIONS = {"fp_32": "fp32", "fp_16": "fp16", "bp_16": "bf16"}  # as the published scripts say


def precision(text: str) -> str:
    return PRECISIONS.get(text, text)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # so that --conf is not taken for --config after that was looked for
    )
    add_config(parser)
    add_model(parser)
    add_plan(parser)
    add_data(parser)
    add_running(parser)
    _add_training(parser)
    _add_folder(parser)
    add_heat(parser, default=False)
    parser.set_defaults(run=lambda given: run(given, parser))


def add_running(parser: argparse.ArgumentParser) -> None:
    """What training and evaluation both want to know of how to run."""
    group = parser.add_argument_group("how it runs")
    put = group.add_argument
    put(
        "--auto",
        type=int,
        default=0,
        metavar="RANKS",
        help="let the planner choose the plan for so many ranks, instead of the plan options",
    )
    put("--memory", metavar="SIZE", help="bytes per rank that plans and schedules keep to: 2GiB")
    add_machine(group, "what costs are estimated for (default: cpu)", "cpu")
    put(
        "--costs",
        choices=("auto", "estimate", "measure"),
        default="auto",
        help="how to learn what blocks cost, to even out stages (default auto: measure on GPUs)",
    )
    put(
        "--precision",
        type=precision,
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of the arithmetic, by autocast (default fp32); also fp_16 and bp_16",
    )
    put("--backend", choices=BACKENDS, help="default: nccl with GPUs, else gloo")
    put(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="without a sign of life, after which a rank is lost and all end (default 60)",
    )
    put("--seed", type=int, default=0, metavar="N", help="of weights, data and dropout")
    put(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="begin with this: a checkpoint of GEMS under any plan, or weights (.pt, .safetensors)",
    )
    put(
        "--offload-folder",
        type=Path,
        metavar="DIR",
        help="for files of what is put away on disk (default: the temporary folder)",
    )
    put("--verbose", action=argparse.BooleanOptionalAction, default=False, help="tell more")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the training")
    put = group.add_argument
    put("--num-epochs", type=int, default=1, metavar="N", help="times through the data (default 1)")
    put("--steps", type=int, default=0, metavar="N", help="stop after so many updates")
    put("--optimizer", choices=OPTIMIZERS, default="sgd", help="default sgd")
    put("--learning-rate", type=float, default=0.05, metavar="LR", help="default 0.05")
    put("--momentum", type=float, metavar="X", help="of sgd (default 0.9) and rmsprop (0)")
    put("--weight-decay", type=float, default=0.0, metavar="X", help="default 0")
    put(
        "--learning-rate-decay",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply the learning rate by X every --decay-epochs (default 1: never)",
    )
    put("--decay-epochs", type=int, default=1, metavar="N", help="see --learning-rate-decay")
    put(
        "--learning-rate-schedule",
        choices=("step", "cosine"),
        default="step",
        help="step: see --learning-rate-decay (default); cosine: down to 0 at the end",
    )
    put("--warm-up", type=int, default=0, metavar="N", help="updates of linear warm-up (default 0)")
    put("--clip", type=float, metavar="NORM", help="largest norm of the gradient")
    put("--accumulate", type=int, default=1, metavar="N", help="steps per update (default 1)")
    put("--loss", choices=("cross-entropy", "dice"), default="cross-entropy", help="default first")
    put(
        "--class-weights",
        metavar="W",
        help="weights of the classes in the loss: 1,2.5 or balanced, by how rare each is",
    )
    put("--ignore-index", type=int, default=-100, metavar="N", help="class that does not count")
    put(
        "--augment",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="flip and turn samples, and vary their colours",
    )
    put(
        "--enable-evaluation",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="judge by the samples held out after each epoch and at the end (default), and keep "
        "the best checkpoint",
    )


def _add_folder(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the folder of the run")
    put = group.add_argument
    put("--out", type=Path, default=Path("runs/train"), metavar="DIR", help="default runs/train")
    put("--resume", action="store_true", help="go on from the newest checkpoint in --out, if any")
    put("--overwrite", action="store_true", help="start over in a folder that has checkpoints")
    put(
        "--save-every",
        type=int,
        default=0,
        metavar="N",
        help="write a checkpoint every N updates (default: after each epoch)",
    )
    put(
        "--keep-checkpoints",
        type=int,
        default=2,
        metavar="N",
        help="how many of the newest checkpoints stay, besides the best one (default 2; 0: all)",
    )
    put(
        "--save",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write checkpoints at all (default)",
    )
    put("--export", type=Path, metavar="FILE", help="write the final weights: .pt or .safetensors")
    put(
        "--tensorboard",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="log for TensorBoard, too",
    )


def run(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    plan, elsewhere = planned(given)
    if elsewhere is not None:
        return elsewhere
    with held(given):
        from gems.cli.job import Job

        return Job(given, plan, effective(given, parser)).run()


def held(given: argparse.Namespace) -> AbstractContextManager[None]:
    """The folder of the run, for as long as it lasts: rank 0 locks it for all."""
    from gems.torch.launch import place

    here = place()
    return locked(given.out) if here is None or here.rank == 0 else nullcontext()


def planned(given: argparse.Namespace) -> tuple[Plan | str, int | None]:
    """The plan, and the exit code if its ranks were started and have ended; None in a rank."""
    end_with_launcher()
    from gems.torch.launch import place

    reject(given)
    plan: Plan | str = "auto" if given.auto else plan_from(given)
    world = given.auto if isinstance(plan, str) else plan.world
    micro_batch(given)
    here = place()
    if world > 1 and here is None:
        require_free(given.out)
        return plan, start([sys.executable, "-m", "gems", *given.typed], world)
    if isinstance(plan, str) and world != (1 if here is None else here.world):
        raise GemsError(f"--auto {world}, but {here.world if here else 1} ranks were started")
    return plan, None
