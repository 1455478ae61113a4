"""How long the checks of a step take: guards on the recording, and agreement of all ranks.

python -m benchmarks.checks.run --repeats 15
"""

from __future__ import annotations

import argparse

from benchmarks.checks.steps import CHECKS, NETWORKS, agreement, step
from benchmarks.pipeline.ranks import Ranks
from benchmarks.where import where

LABELS = [label for _, _, label in CHECKS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="steps of each network")
    repeats = parser.parse_args().repeats
    print(where())
    print(f"| network | ranks | {' | '.join(LABELS)} | all checks | step | share |")
    print(f"|---|---|{'---|' * len(LABELS)}---|---|---|", flush=True)
    for ranks in (1, 2):
        with Ranks(ranks) as started:
            for network in NETWORKS:
                found = started.run(step, network, ranks, repeats)[0]
                checks = sum(found.get(label, 0.0) for label in LABELS)
                cells = [f"{1e3 * found.get(label, 0.0):.2f}" for label in LABELS]
                cells += [f"{1e3 * checks:.2f}", f"{1e3 * found['step']:.0f}"]
                cells += [f"{checks / found['step']:.2%}"]
                print(f"| {network} | {ranks} | {' | '.join(cells)} |", flush=True)
            latency = started.run(agreement, 200)[0]
    print(f"\nOne agreement of 2 ranks, both there already: {1e3 * latency:.2f} ms by the wall")


if __name__ == "__main__":
    main()
