"""Compute the frozen files, or one of them: python -m tests.oracles.freeze [schedules ...]"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

import gems
from gems.files import to_json
from gems.model.costs import Cost, Costs, Edge
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.schedule.build import lowered
from tests import networks
from tests.generate.plans import draw_plan
from tests.saved import GEMS, momentum, on_ranks, trained

HERE = Path(__file__).parent
DRAWN = 200
# Small searches of every family: model, options, image side, ranks, machine, memory.
SEARCHES: tuple[tuple[str, dict[str, Any], int, int, str, str], ...] = (
    ("resnet_v2", {"depth": 110}, 256, 4, "v100", "16GiB"),
    ("resnet_v2", {"depth": 110}, 1024, 4, "v100", "16GiB"),
    ("resnet_v2", {"depth": 110}, 512, 1, "v100", "2GiB"),
    ("resnet_v1", {"depth": 56}, 256, 2, "v100", "1GiB"),
    ("resnet50", {}, 512, 4, "a100", "8GiB"),
    ("amoebanet_d", {}, 256, 4, "v100", "16GiB"),
    ("unet", {"levels": 3, "width": 16}, 512, 4, "v100", "4GiB"),
    ("unet", {"levels": 3, "width": 16}, 512, 2, "v100", "1GiB"),
    ("densenet121", {}, 256, 2, "v100", "4GiB"),
    ("resnet_v2", {"depth": 29}, 128, 8, "v100", "256MiB"),
)


@cache
def drawn() -> list[Plan]:
    """Plans of all kinds; the same ones always."""
    found = []
    for number in range(DRAWN):
        r = Random(f"oracle {number}")
        tiles = number % 3 == 0
        found.append(Plan(**draw_plan(r, 4, 2, tiles=tiles, ranks=8, patches=False)))
    return found


def schedules() -> str:
    return "\n".join(f"# {number}\n{lowered(plan)}" for number, plan in enumerate(drawn()))


def costs(plan: Plan) -> Costs:
    """Unequal stages, so that a confusion of two shows."""
    items = tuple(
        Cost(
            f=1.0 + 0.25 * s, i=1.5 + 0.125 * s, w=0.75 + 0.0625 * s, activations=1000 + 100 * s,
            weights=4000 + 64 * s, gradients=4000 + 64 * s,
        )
        for s in range(plan.depth)
    )  # fmt: skip
    edges = tuple(Edge(a, b, 256 + 16 * a, 256 + 16 * a) for a, b in plan.chain)
    return Costs(items, edges, latency=0.125, per_byte=0.001, group_sizes=plan.sizes[: plan.depth])


def simulated() -> list[Any]:
    """Of each plan: seconds of a step, every rank's bytes at its peak, bytes over every link."""
    found = []
    for plan in drawn():
        timeline = simulate(lowered(plan), plan, costs(plan))
        peaks = [list(astuple(peak)) for peak in timeline.peaks]
        found.append([timeline.seconds, peaks, [list(link) for link in timeline.links]])
    return found


def searched(search: tuple[str, dict[str, Any], int, int, str, str]) -> Any:
    name, options, side, ranks, on, memory = search
    with torch.device("meta"):
        model = networks.build(name, **options)
    sample = torch.empty(1, 3, side, side, device="meta")
    plan = gems.plan(model, sample, ranks=ranks, machine=on, memory=memory)
    return json.loads(to_json(plan)) | {"why": ""}


def checkpoint() -> None:
    def work(trainer: Any) -> list[float]:
        trained(trainer, 0, 2)
        trainer.save(HERE / "checkpoint" / "step-2", extra={"at": 2})
        return trained(trainer, 2, 4)

    losses = on_ranks(GEMS, work, optimizer=momentum)[0]
    (HERE / "checkpoint" / "losses.json").write_text(json.dumps(losses) + "\n")


WRITE: dict[str, Callable[[], None]] = {
    "schedules": lambda: _write_gz("schedules.txt.gz", schedules()),
    "simulated": lambda: _write("simulated.json", simulated()),
    "plans": lambda: _write("plans.json", [searched(s) for s in SEARCHES]),
    "checkpoint": checkpoint,
}


def _write(name: str, value: Any) -> None:
    (HERE / name).write_text("[\n" + ",\n".join(json.dumps(x) for x in value) + "\n]\n")


def _write_gz(name: str, text: str) -> None:
    (HERE / name).write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    for wanted in sys.argv[1:] or WRITE:
        WRITE[wanted]()
