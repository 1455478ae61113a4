"""Measure what `equal_memory` simulates: images per second and bytes of all ways, on this computer.

    python -m benchmarks.papers.measure --ranks 2 4 --batches 2 8 32 --repeats 5

Small images, one per micro-batch, real gloo processes. Ranks up to the number of cores go by the
wall, which wants a quiet machine; more of them, or all with --virtual, in virtual time, as if each
had a core of its own (from CPU times). All ways take turns; medians.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Container
from itertools import product
from statistics import median

from benchmarks.papers.equal_memory import AUTO, LAYER, ways
from benchmarks.papers.measured_steps import NETWORKS, auto, step
from benchmarks.papers.tables import table
from benchmarks.pipeline.ranks import Ranks
from benchmarks.where import where
from gems.plans.describe import describe
from gems.plans.plan import Plan

WARM = 1


def rows(
    network: str, size: int, k: int, side: int, repeats: int, late: bool, only: Container[str]
) -> list[list[str]]:
    """Of the ways in `only`, beside layer parallelism."""
    chosen, limit = auto(network, size, k, side)
    plans: dict[str, tuple[Plan, int, float | None]] = {
        name: (*way, None) for name, way in ways(size, k).items()
    }
    plans[AUTO] = chosen, 1, limit
    names = [name for name in plans if name in only or name == LAYER]
    seen: dict[str, list[list[tuple[float, float, int]]]] = {name: [] for name in names}
    with Ranks(size) as ranks:
        for turn in range(WARM + repeats):
            for name in names:
                answers = ranks.run(step, network, *plans[name], side)
                if turn >= WARM:
                    seen[name].append(answers)
    taken = {n: median(max(a[late] for a in answers) for answers in seen[n]) for n in names}
    return [
        [
            *(network, f"{size} ({'virtual' if late else 'wall'})", str(k), name),
            *(f"{k / taken[name]:.2f}", f"{taken[LAYER] / taken[name]:.2f}"),
            f"{max(peak for _, _, peak in seen[name][-1]) / 2**20:.1f}",
            describe(plans[name][0]) if name == AUTO else "",
        ]
        for name in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--side", type=int, default=64, help="of the images")
    parser.add_argument("--repeats", type=int, default=5, help="turns that each way takes")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    known = [*ways(2, 2), AUTO]
    parser.add_argument("--only", nargs="+", default=known, choices=known, help="these ways")
    parser.add_argument("--virtual", action="store_true", help="two ranks by CPU times, too")
    given = parser.parse_args()
    print(where())
    head = ("network", "ranks", "k", "way", "images/s", "x", "MiB of the fullest rank", "which is")
    for network, size, k in product(given.networks, given.ranks, given.batches):
        late = given.virtual or size > (os.cpu_count() or 1)
        found = rows(network, size, k, given.side, given.repeats, late, given.only)
        print(table(head, found), flush=True)


if __name__ == "__main__":
    main()
