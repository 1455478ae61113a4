"""Blocks given out by number, by estimated time, by measured time, by memory: what each is worth.

    python -m benchmarks.balance.run --repeats 5

A 1F1B pipeline of 8 micro-batches on two ranks by the wall, and on four in virtual time, as if each
had a core of its own. All ways of cutting take turns; medians.
"""

from __future__ import annotations

import argparse
import os
from statistics import median

from benchmarks.balance.steps import NETWORKS, SPLITS, step
from benchmarks.pipeline.ranks import Ranks
from benchmarks.where import where

WARM = 2


def rows(network: str, size: int, repeats: int) -> list[str]:
    seen = {split: [] for split in SPLITS}
    with Ranks(size) as ranks:
        for turn in range(WARM + repeats):
            for split in SPLITS:
                answers = ranks.run(step, network, split)
                if turn >= WARM:
                    seen[split].append(answers)
    virtual = size > (os.cpu_count() or 1)
    taken = {s: [max(a[virtual] for a in answers) for answers in seen[s]] for s in SPLITS}
    found = []
    for split, seconds in taken.items():
        gain = median(b / s for b, s in zip(taken[SPLITS[0]], seconds, strict=True))
        rate = NETWORKS[network].samples / median(seconds)
        peaks = [peak.total / 1e6 for _, _, peak in seen[split][-1]]
        clock = "virtual" if virtual else "wall"
        cells = [network, f"{size} ({clock})", split, f"{rate:.1f}", f"{gain:.2f}"]
        cells += [f"{max(peaks):.1f}", f"{sum(peaks) / len(peaks):.1f}"]
        found.append(f"| {' | '.join(cells)} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="turns each way takes")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    given = parser.parse_args()
    print(where())
    print("| network | ranks | balanced by | images/s | x | fullest rank, MB | mean, MB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for network in given.networks:
        for size in (2, 4):
            print("\n".join(rows(network, size, given.repeats)), flush=True)


if __name__ == "__main__":
    main()
