"""How long planning takes: a built model, an image size and a number of ranks, to a plan.

    PYTHONPATH=. python -m benchmarks.planner.quick --model resnet1001_v2 --side 2048 --ranks 64

Each repeat is a process of its own, so that nothing is known from the one before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch

import gems
from benchmarks.where import where
from gems.models import build
from gems.plans.describe import describe


def planned(name: str, side: int, ranks: int, preset: str) -> dict[str, object]:
    """Seconds from the built model to its plan, and the plan."""
    with torch.device("meta"):
        model = build(name).train()
    start = time.monotonic()
    plan = gems.plan(
        model, torch.empty(1, 3, side, side, device="meta"), ranks=ranks, machine=preset
    )
    return {"seconds": time.monotonic() - start, "plan": describe(plan)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet1001_v2")
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--machine", default="v100")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="one repeat, as JSON")
    given = parser.parse_args()
    if given.once:
        torch.set_num_threads(1)
        print(json.dumps(planned(given.model, given.side, given.ranks, given.machine)))
        return
    print(where())
    print("| model | side | ranks | seconds | plan |")
    print("|---" * 5 + "|")
    for _ in range(given.repeats):
        command = [sys.executable, "-m", "benchmarks.planner.quick", *sys.argv[1:], "--once"]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        row = json.loads(out)
        cells = (given.model, given.side, given.ranks, f"{row['seconds']:.1f}", row["plan"])
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
