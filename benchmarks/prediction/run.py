"""Predict steps from measured blocks, take them, and compare.

    python -m benchmarks.prediction.run --repeats 7

Seconds are those of a whole step, first action to last, by the wall; medians. Bytes are the peaks
that the engine counts on each rank; *worst kind* is the largest difference of any kind of bytes on
any rank, in per cent of that rank's peak.
"""

from __future__ import annotations

import argparse
from statistics import median

from benchmarks.pipeline.ranks import Ranks
from benchmarks.prediction.pairs import NETWORKS, PLANS, plan
from benchmarks.prediction.steps import measured, predicted
from benchmarks.where import where
from gems.predict.timeline import KINDS, Timeline

WARM = 2


def row(network: str, planned: str, repeats: int) -> tuple[str, float, float]:
    """A line of the table, and how far seconds and bytes are off."""
    with Ranks(plan(planned).world) as ranks:
        said: Timeline = ranks.run(predicted, network, planned)[0]
        for _ in range(WARM):
            ranks.run(measured, network, planned)
        seen = [ranks.run(measured, network, planned)[0] for _ in range(repeats)]
    seconds = median(t.seconds for t in seen)
    off = said.seconds / seconds - 1
    worst = max(
        abs(getattr(a, kind) - getattr(b, kind)) / b.total
        for a, b in zip(said.peaks, seen[-1].peaks, strict=True)
        for kind in KINDS
    )
    cells = [network, planned, f"{1e3 * said.seconds:.0f}", f"{1e3 * seconds:.0f}", f"{off:+.0%}"]
    cells += [f"{max(p.total for p in t.peaks) / 1e6:.1f}" for t in (said, seen[-1])]
    return f"| {' | '.join(cells)} | {worst:.1%} |", off, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="steps that are taken")
    given = parser.parse_args()
    print(where())
    print(
        "| network | plan | predicted, ms | measured, ms | off | predicted, MB | counted, MB "
        "| worst kind |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    found = []
    for network in NETWORKS:
        for planned in PLANS:
            line, off, worst = row(network, planned, given.repeats)
            found.append((abs(off), worst))
            print(line, flush=True)
    seconds, kinds = zip(*found, strict=True)
    print(
        f"\n{len(found)} pairs. Seconds are off by {median(seconds):.1%} in the median, "
        f"{max(seconds):.1%} at worst; bytes of a kind by {max(kinds):.1%} at worst."
    )


if __name__ == "__main__":
    main()
