"""`gems train`: train a network over several ranks, on one machine or on a cluster.

Started alone, it launches one local process per rank of the plan. Under torchrun, mpirun or srun it
is one of their ranks. Rank 0 shows progress and writes into --out: the plan, all options, metrics
as JSON lines and CSV, checkpoints, pictures of the last step as measured, and a report.

  gems train --app medical --datapath slides --labels labels.csv --image-size 1024 --split-size 4
  gems train --app medical --image-size 64            a sample of real tissue: no file is needed
  gems train --app cifar --datapath cifar-10-python.tar.gz --model resnet-v2 --num-layers 29
  gems train --model keras/MobileNetV2 --split-size 2 --app synthetic ...
                                                      a Keras model, on TensorFlow
  gems train --config run.yaml --resume               continue from the newest checkpoint
  gems train --auto 4 --memory 2GiB ...               let the planner choose a plan for four ranks
"""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from gems.cli.config import add_config, effective
from gems.cli.data import DATA
from gems.cli.heat_maps import heat_map_options
from gems.cli.keras_models import on_tensorflow, reject_options
from gems.cli.like import LIKE
from gems.cli.lock import locked, require_free
from gems.cli.model_options import MODEL, micro_batch
from gems.cli.options import (
    DEVICE,
    add_options,
    choice,
    count,
    machine_option,
    path,
    real,
    string,
    switch,
)
from gems.cli.plan_options import PLAN, plan_from
from gems.cli.ranks import end_with_launcher, reject_mpi, start
from gems.cli.reject import reject
from gems.errors import GemsError
from gems.plans.plan import Plan
from gems.plans.validate import require_world

log = logging.getLogger(__name__)

# Spellings of the published scripts.
PRECISIONS = {"int_8": "int8", 
    "fp_32": "fp32", "fp_16": "fp16", "bp_16": "bf16", "bfp_16": "bf16", "bf_16": "bf16"
}  # fmt: skip
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam", "radam")


def precision_option(*more: str, help: str = "") -> dict[str, Any]:
    return choice(
        ("fp32", "bf16", "fp16", *more),
        "fp32",
        f"autocast precision (default fp32); also fp_16 and bp_16{help}",
        type=lambda text: PRECISIONS.get(text, text),
    )


RUNNING = {
    "--auto": count(
        0, "let the planner choose the plan for RANKS ranks, instead of the plan options",
        metavar="RANKS",
    ),
    "--memory": string(None, "memory budget per rank for plans and schedules, e.g. 2GiB", "SIZE"),
    "--machine": machine_option(
        "machine whose costs are estimated (default auto: the GPUs of all ranks, else cpu)", "auto"
    ),
    "--costs": choice(
        ("auto", "estimate", "measure"),
        "auto",
        "costs of layers, by which stages are balanced (default auto: measure on GPUs)",
    ),
    "--limit-memory": switch(
        False, "on GPUs, let the allocator raise beyond --memory (default: plan for it only)"
    ),
    "--device": DEVICE,
    "--memory-format": choice(
        ("channels_last", "channels_last_3d"),
        None,
        "of images and weights (default: as the model and the data have them)",
    ),
    "--compile": switch(False, "compile what stages run by torch.compile"),
    "--backend": choice(
        ("gloo", "nccl", "mpi"), None,
        "of torch.distributed (default: nccl on GPUs, gloo on CPUs), or mpi, for ranks of mpirun; "
        "gloo or mpi with --device cuda move tensors through host memory, and let ranks share a "
        "GPU",
    ),
    "--timeout": real(
        None, "without a heartbeat, after which a rank is lost and the run ends (default 25)",
        "SECONDS",
    ),
    "--seed": count(0, "of weights, data and dropout (default 0)"),
    "--checkpoint": path(
        "start from a checkpoint of GEMS written under any plan, or from weights (.pt, "
        ".safetensors)",
        "PATH",
    ),
    "--offload-folder": path(
        "folder for state offloaded to disk (default: the temporary folder)", "DIR"
    ),
    "--verbose -v": switch(
        False, "instead of a progress bar, a line per step: loss, images/s, memory; log more"
    ),
}  # fmt: skip
TRAINING = {
    "--num-epochs": count(1, "passes over the training samples (default 1)"),
    "--steps": count(0, "stop after N optimizer steps"),
    "--optimizer": choice(OPTIMIZERS, "sgd", "default sgd"),
    "--learning-rate": real(0.05, "default 0.05", "LR"),
    "--momentum": real(None, "of sgd (default 0.9) and rmsprop (0)"),
    "--weight-decay": real(0.0, "default 0"),
    "--learning-rate-decay": real(
        1.0, "multiply the learning rate by X every --decay-epochs (default 1: never)"
    ),
    "--decay-epochs": count(1, "see --learning-rate-decay (default 1)"),
    "--learning-rate-schedule": choice(
        ("step", "cosine"),
        "step",
        "step: see --learning-rate-decay (default); cosine: down to 0 at the end",
    ),
    "--warm-up": count(0, "optimizer steps of linear warm-up (default 0)"),
    "--precision": precision_option(),
    "--master-weights": switch(
        False,
        "store weights and gradients in --precision, and step fp32 masters of them (default: fp32 "
        "weights, cast by autocast)",
    ),
    "--clip": real(None, "largest norm of the gradient", "NORM"),
    "--accumulate": count(1, "gradient accumulation: batches per optimizer step (default 1)"),
    "--loss": choice(
        ("cross-entropy", "dice", "mse", "mae", "huber"),
        None,
        "of classes: cross-entropy (default) or dice; of numbers: mse (default), mae or huber",
    ),
    "--class-weights": string(
        None, "weights of the classes in the loss: 1,2.5 or balanced, by inverse frequency", "W"
    ),
    "--ignore-index": count(-100, "class that loss and metrics ignore (default -100)"),
    "--augment": switch(False, "random flips, quarter turns and colour changes of the samples"),
    "--enable-evaluation": switch(
        True,
        "evaluate on the held-out samples after each epoch and at the end, and keep the best "
        "checkpoint (default)",
    ),
}
FOLDER = {
    "--out": path("default runs/train", "DIR", Path("runs/train")),
    "--resume": {
        "action": "store_true", "help": "continue from the newest checkpoint in --out, if any"
    },
    "--overwrite": {
        "action": "store_true", "help": "start over in a folder that has checkpoints"
    },
    "--save-every": count(
        0, "write a checkpoint every N optimizer steps (default: after each epoch)"
    ),
    "--keep-checkpoints": count(
        2, "how many of the newest checkpoints are kept, besides the best (default 2; 0: all)"
    ),
    "--save": switch(True, "write checkpoints (default)"),
    "--export": path("write the final weights: .pt or .safetensors"),
    "--tensorboard": switch(False, "also write logs for TensorBoard"),
}  # fmt: skip


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # so that --conf is not taken for --config after that was looked for
    )
    add_config(parser)
    add_options(parser, LIKE)
    add_running(parser)
    add_options(parser, TRAINING, "training")
    add_options(parser, FOLDER, "output folder")
    add_options(parser, heat_map_options(default=False), "heat maps")
    parser.set_defaults(run=lambda given: run(given, parser))


def add_running(parser: argparse.ArgumentParser) -> None:
    """Options of both training and evaluation."""
    add_options(parser, MODEL, "model")
    add_options(parser, PLAN, "parallel plan")
    add_options(parser, DATA, "data")
    add_options(parser, RUNNING, "execution")


def run(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    plan, elsewhere = planned(given)
    if elsewhere is not None:
        return elsewhere
    if given.like and given.enable_evaluation and _is_first():
        log.warning(
            "--enable-evaluation: held-out samples are evaluated after each epoch. In %s it stands "
            "for inference without training, which is gems eval",
            given.like,
        )
    with held(given):
        return rank_module(given).Job(given, plan, effective(given, parser)).run()


def rank_module(given: argparse.Namespace) -> ModuleType:
    """What one rank of a run is, by its framework: `Job`, `trainer_from`, `begin` and `files`."""
    if on_tensorflow(given):
        from gems.cli import keras_job

        return keras_job
    from gems.cli import job

    return job


def held(given: argparse.Namespace) -> AbstractContextManager[None]:
    """The folder of the run, for as long as it lasts: rank 0 locks it for all."""
    return locked(given.out) if _is_first() else nullcontext()


def _is_first() -> bool:
    """Whether this process is rank 0, or alone."""
    from gems.distributed.launchers import place

    here = place()
    return here is None or here.rank == 0


def planned(given: argparse.Namespace) -> tuple[Plan | str, int | None]:
    """The plan, and the exit code if its ranks were started and have ended; None in a rank."""
    end_with_launcher()
    from gems.distributed.launchers import place

    reject(given)
    plan: Plan | str = "auto" if given.auto else plan_from(given)
    reject_options(given, plan)
    world = given.auto if isinstance(plan, str) else plan.world
    micro_batch(given)
    here = place()
    if here is not None and here.rank:  # one rank tells for all
        logging.getLogger("gems").setLevel(logging.WARNING)
    if world > 1 and here is None:
        reject_mpi(given.backend, world)
        require_free(given.out)
        return plan, start([sys.executable, "-m", "gems", *given.typed], world)
    if isinstance(plan, str) and world != (1 if here is None else here.world):
        raise GemsError(f"--auto {world}, but {here.world if here else 1} ranks were started")
    if isinstance(plan, Plan) and here is not None:
        require_world(plan, here.world)
    return plan, None
