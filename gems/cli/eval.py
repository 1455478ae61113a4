"""`gems eval`: metrics of a trained network, forward only, under any plan.

Weights come from a checkpoint of GEMS written under any plan, from a folder of a run (its best
checkpoint), or from a plain state dict (.pt, .safetensors). Slides get heat maps:
PNG, GeoJSON for QuPath and OME-TIFF. metrics.json has the metrics, images per second, and the
latency of a batch (median and 95th percentile, in seconds).

  gems eval --config runs/train/config.yaml --checkpoint runs/train
  gems eval --app medical --datapath slide.svs --image-size 512 --checkpoint model.safetensors \\
            --num-classes 2 --split-size 2 --times 1 --precision bf16
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems.cli.config import add_config
from gems.cli.heat_maps import heat_map_options, heat_maps, wanted
from gems.cli.like import LIKE
from gems.cli.model_options import micro_batch
from gems.cli.options import add_options, choice, count, path, switch
from gems.cli.progress import Pace
from gems.cli.train import add_running, held, planned, precision_option, rank_module
from gems.errors import GemsError
from gems.files import write
from gems.plans.plan import Plan

if TYPE_CHECKING:
    from gems.data.source import Source
    from gems.torch.trainer import Trainer

log = logging.getLogger(__name__)
EVALUATION = {
    "--part": choice(
        ("held-out", "train", "all"),
        None,
        "which samples (default: held-out, or all if there are no labels)",
    ),
    "--enable-evaluation": {
        "action": "store_true",
        "help": "without --checkpoint, evaluate with random weights, to measure speed; otherwise "
        "what this command does anyway",
    },
    "--precision": precision_option(
        "int8",
        help=". Weights are stored in it, too, but for those of norms; int8: weights of linear and "
        "convolutional layers in int8, arithmetic in fp32",
    ),
    "--compare-fp32": switch(
        None,
        "evaluate in fp32, too, and report how far both differ (default: with --precision int8)",
    ),
    "--ignore-index": count(-100, "class that metrics ignore (default -100)"),
    "--out": path("default runs/eval", "DIR", Path("runs/eval")),
}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="evaluate a network, write heat maps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_config(parser)
    add_options(parser, LIKE)
    add_running(parser)
    add_options(parser, EVALUATION, "evaluation")
    add_options(parser, heat_map_options(default=True), "heat maps")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    if given.checkpoint is None and not given.enable_evaluation:
        raise GemsError(
            "gems eval needs --checkpoint: a run's folder, a checkpoint, or weights; or "
            "--enable-evaluation, to measure the speed of random weights"
        )
    if given.compare_fp32 and given.precision == "fp32":
        raise GemsError("--compare-fp32 compares --precision with fp32; give bf16, fp16 or int8")
    plan, elsewhere = planned(given)
    if elsewhere is not None:
        return elsewhere
    with held(given):
        _eval(given, plan)
    return 0


def _eval(given: argparse.Namespace, plan: Plan | str) -> None:
    from gems.cli.evaluate import compared, predicted
    from gems.cli.journal import plain
    from gems.cli.model_options import fitted

    source = part_of(given)
    fitted(given, source)
    trainer, pace = _trainer(given, plan, source), Pace()
    if given.precision == "int8" and trainer.rank == 0:
        print(trainer.session.int8)
    size, first = micro_batch(given) * trainer.plan.total, trainer.rank == 0
    found, probabilities = predicted(given, trainer, source, size, first, pace)
    compares = given.compare_fp32 or (given.compare_fp32 is None and given.precision == "int8")
    if compares:
        full = _trainer(_in_fp32(given), plan, source)
        exact = predicted(given, full, source, size, first)
        full.close()
        found |= compared(source.task, (found, probabilities), exact)
    if first:
        for name, value in found.items():
            print(f"{name}, {len(source)} samples: {value:.4f}")
        if not (found or wanted(given)):
            raise GemsError(f"{given.datapath} has no labels to evaluate by; give --labels")
        latency = {"median": pace.latency(0.5), "p95": pace.latency(0.95)}
        both = ", ".join(f"{1000 * x:.1f} ms {name}" for name, x in latency.items())
        print(f"speed: {pace.steady:.1f} images/s; a batch of {size}: {both}")
        speed = {"images_per_second": pace.steady, "batch_latency": latency}
        text = json.dumps(plain(found | speed), indent=1) + "\n"
        print(f"wrote {write(given.out / 'metrics.json', text)}")
        if wanted(given):
            heat_maps(given, source, probabilities)
    trainer.close()


def _trainer(given: argparse.Namespace, plan: Plan | str, source: Source) -> Trainer:
    framework = rank_module(given)
    trainer = framework.trainer_from(given, plan, source)
    if given.checkpoint is not None:
        framework.begin(trainer, chosen(given.checkpoint, framework.files))
    elif trainer.rank == 0:
        log.warning("no --checkpoint: weights are random, so only the speed means something")
    return trainer


def _in_fp32(given: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**vars(given) | {"precision": "fp32"})


def part_of(given: argparse.Namespace) -> Source:
    """The samples of --part."""
    from gems.cli.data import divided, halves, source_from

    if given.app == "cifar":
        if given.part == "all":
            raise GemsError("--part all: CIFAR-10 is --part train or held-out, its test files")
        return divided(given)[given.part != "train"]
    whole = source_from(given)
    if given.part == "all" or (given.part is None and not whole.classes):
        return whole
    return halves(given, whole)[given.part != "train"]


def chosen(path: Path, files: Any) -> Path:
    """A checkpoint or a file of weights as it is; of a run's folder, the best, else the newest."""
    if path.is_file() or (path / files.NAME).is_file():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    best = sorted(p for p in folder.glob("best-*") if files.is_complete(p))
    if found := (best[-1] if best else files.latest(folder)):
        return found
    raise GemsError(f"{path} is no checkpoint, no run with checkpoints, and no file of weights")
