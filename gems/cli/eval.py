"""`gems eval`: judge a network by data, on any plan, forward only.

Weights come from a checkpoint of GEMS written under any plan, from a folder of a run (its best
checkpoint), or from a plain state dict (.pt, .safetensors). Slides get heat maps: a picture,
GeoJSON for QuPath, OME-TIFF.

  gems eval --config runs/train/config.yaml --checkpoint runs/train
  gems eval --app medical --datapath slide.svs --image-size 512 --checkpoint model.safetensors \\
            --num-classes 2 --split-size 2 --times 1 --precision bf16
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gems.cli.config import add_config
from gems.cli.data import add_data
from gems.cli.heat import add_heat, heat_maps, wanted
from gems.cli.options import add_model, add_plan, micro_batch, plan_from
from gems.cli.ranks import start
from gems.cli.train import add_running
from gems.errors import GemsError
from gems.files import write
from gems.plans import Plan

PARTS = ("held-out", "train", "all")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="judge a network, map slides",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config(parser)
    add_model(parser)
    add_plan(parser)
    add_data(parser)
    add_running(parser)
    group = parser.add_argument_group("the evaluation")
    put = group.add_argument
    put("--part", choices=PARTS, default="held-out", help="which samples (default held-out)")
    put("--ignore-index", type=int, default=-100, metavar="N", help="class that does not count")
    put("--out", type=Path, default=Path("runs/eval"), metavar="DIR", help="default runs/eval")
    add_heat(parser, default=True)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    from gems.torch.launch import place

    if given.checkpoint is None:
        raise GemsError("gems eval wants --checkpoint: a run's folder, a checkpoint, or weights")
    plan: Plan | str = "auto" if given.auto else plan_from(given)
    world = given.auto if isinstance(plan, str) else plan.world
    micro_batch(given)
    if world > 1 and place() is None:
        return start([sys.executable, "-m", "gems", *sys.argv[1:]], world)
    _eval(given, plan)
    return 0


def _eval(given: argparse.Namespace, plan: Plan | str) -> None:
    from gems.cli.data import divided, source_from
    from gems.cli.job import begin, trainer_from
    from gems.cli.judge import predicted
    from gems.cli.options import fitted

    source = source_from(given) if given.part == "all" else divided(given)[given.part == "held-out"]
    fitted(given, source)
    trainer = trainer_from(given, plan, source)
    begin(trainer, chosen(given.checkpoint))
    size = micro_batch(given) * trainer.plan.total
    found, probabilities = predicted(given, trainer, source, size, trainer.rank == 0)
    if trainer.rank == 0:
        for name, value in found.items():
            print(f"{name}, {len(source)} samples: {value:.4f}")
        print(f"wrote {write(given.out / 'metrics.json', json.dumps(found, indent=1) + chr(10))}")
        if wanted(given, source) and probabilities is not None:
            heat_maps(given, source, probabilities)
    trainer.close()


def chosen(path: Path) -> Path:
    """A checkpoint or a file of weights as it is; of a run's folder, the best, else the newest."""
    from gems.torch import manifest

    if path.is_file() or (path / manifest.NAME).is_file():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    best = sorted(p for p in folder.glob("best-*") if manifest.is_complete(p))
    if found := (best[-1] if best else manifest.latest(folder)):
        return found
    raise GemsError(f"{path} is no checkpoint, no run with checkpoints, and no file of weights")
