"""Run every plan that the planner knows for two ranks, and see where its choice comes in.

    python -m benchmarks.planner.run --repeats 5

All plans take turns; medians of a step's seconds by the wall.
"""

from __future__ import annotations

import argparse
from statistics import median

from benchmarks.pipeline.ranks import Ranks
from benchmarks.planner.steps import found, step
from benchmarks.prediction.pairs import NETWORKS
from benchmarks.where import where
from gems.files import from_json
from gems.plans.describe import describe
from gems.plans.plan import Plan

RANKS, WARM = 2, 2


def rows(network: str, repeats: int) -> tuple[list[str], float]:
    """The table of one network, and how the choice compares with the fastest."""
    with Ranks(1) as one:
        candidates = one.run(found, network, RANKS)[0]
    seen: dict[str, list[float]] = {plan: [] for plan, _ in candidates}
    with Ranks(RANKS) as ranks:
        for turn in range(WARM + repeats):
            for plan in seen:
                answers = ranks.run(step, network, plan)
                if turn >= WARM:
                    seen[plan].append(max(answers))
    fastest = min(map(median, seen.values()))
    choice = candidates[0][0]
    lines = []
    for plan, said in sorted(candidates, key=lambda c: median(seen[c[0]])):
        took = median(seen[plan])
        cells = [network, describe(from_json(Plan, plan)), f"{1e3 * said:.0f}", f"{1e3 * took:.0f}"]
        cells += [f"{took / fastest:.2f}", "**chosen**" if plan == choice else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines, median(seen[choice]) / fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="turns each plan takes")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS)[:3], choices=list(NETWORKS))
    given = parser.parse_args()
    print(where())
    print("| network | plan | predicted, ms | measured, ms | over the fastest | |")
    print("|---|---|---|---|---|---|", flush=True)
    over = {}
    for network in given.networks:
        lines, over[network] = rows(network, given.repeats)
        print("\n".join(lines), flush=True)
    print()
    for network, ratio in over.items():
        print(f"{network}: the choice takes {ratio:.3f} of the fastest")


if __name__ == "__main__":
    main()
