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
    put(
        "--heat-map",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="medical: write a heat map of every slide (default)",
    )
    put("--shown-class", metavar="NAME", help="class that heat maps show (default: the last)")
    put("--out", type=Path, default=Path("runs/eval"), metavar="DIR", help="default runs/eval")
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
        if given.app == "medical" and given.heat_map and probabilities is not None:
            _map(given, source, probabilities)
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


def _map(given: argparse.Namespace, source: Any, probabilities: Any) -> None:
    """One heat map per slide."""
    from gems.data.heatmap import heat_map
    from gems.data.source import Subset

    names = list(source.names) or [f"class {i}" for i in range(given.num_classes)]
    shown = _shown(given.shown_class, names)
    whole: Any = source.source if isinstance(source, Subset) else source
    indices = source.indices if isinstance(source, Subset) else range(len(source))
    places = [whole.place(int(i)) for i in indices]
    covered = {tiles.path: tiles.covered for tiles in whole.tiles}
    for slide in dict.fromkeys(path for path, _, _ in places):
        rows = [row for row, (path, _, _) in enumerate(places) if path == slide]
        coords = [places[row][1:] for row in rows]
        maps = heat_map(
            given.out, slide, coords, covered[slide], probabilities[rows].numpy(), names, shown
        )
        for path in (maps.png, maps.geojson, maps.ome):
            print(f"wrote {path}")


def _shown(name: str | None, names: list[str]) -> int | None:
    if name is None:
        return None
    if name not in names:
        raise GemsError(f"--shown-class {name} is none of {', '.join(names)}")
    return names.index(name)
