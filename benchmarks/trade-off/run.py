"""Time for memory: every technique as a point of bytes and seconds, measured and simulated.

    PYTHONPATH=. python -m benchmarks.trade-off.run --turns 5

Points of a chart take turns in the same processes; seconds are medians. Writes a picture per chart
beside the README, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.pipeline.ranks import RankError, Ranks
from benchmarks.scatter import Point, front, scatter
from benchmarks.where import where
from gems.files import write

from .points import CHARTS, Chart
from .steps import live, measured, predicted

log = logging.getLogger("trade-off")
HERE = Path(__file__).parent
MIB = 2**20


@dataclass(frozen=True)
class Found:
    """One point: seconds and bytes of the fullest rank, as said and as seen; `live` is the
    dispatcher's count."""

    chart: str
    name: str
    said: tuple[float, int]
    wall: float
    virtual: float
    counted: int
    live: int

    def seconds(self, crowded: bool) -> float:
        return self.virtual if crowded else self.wall


def points(key: str, side: int, turns: int, only: str) -> tuple[list[Found], dict[str, str]]:
    """All points of a chart, and what became of those that failed."""
    chart, said, failed = CHARTS[key], {}, {}
    ranks = Ranks(chart.ranks)
    room: dict[str, float | None] = {}
    try:
        first, *others = chart.plans
        for name in [first, *(n for n in others if only in n)]:
            whole = next(iter(said.values()))[1] if said else 0
            room[name] = chart.memory[name] * whole if name in chart.memory else None
            try:
                said[name] = ranks.run(predicted, key, name, side, room[name])[0]
                ranks.run(measured, key, name, side, room[name])  # the first of each is slow
            except RankError as error:
                said.pop(name, None)
                failed[name] = str(error).strip().splitlines()[-1]
                log.info("%s: %s", name, failed[name])
                ranks = Ranks(chart.ranks)
                continue
            log.info("%s: said %.2f s, %.0f MiB", name, said[name][0], said[name][1] / MIB)
        alive = {n: max(ranks.run(live, key, n, side, room[n])) for n in said}
        seen = {n: [] for n in said}
        for _ in range(turns):
            for name in said:
                seen[name].append(ranks.run(measured, key, name, side, room[name])[0])
    finally:
        ranks.close()
    found = [
        Found(
            key, name, said[name], median(s[0] for s in steps), median(s[1] for s in steps),
            max(s[2] for s in steps), alive[name],
        )
        for name, steps in seen.items()
    ]  # fmt: skip
    return found, failed


def drawn(chart: Chart, side: int, found: list[Found], crowded: bool) -> tuple[str, list[Point]]:
    spots = [
        Point(
            f.name, chart.family(f.name), f.counted / MIB, f.seconds(crowded),
            predicted=(f.said[1] / MIB, f.said[0]),
        )
        for f in found
    ]  # fmt: skip
    clock = "virtual seconds a step" if crowded else "seconds a step"
    title = f"{chart.title} of {side} px"
    return scatter(title, spots, "MiB on the fullest rank, counted", clock), front(spots)


def table(found: list[Found], best: list[Point], failed: dict[str, str], crowded: bool) -> str:
    lines = ["| point | MiB said | counted | live | s said | took | front |", "|---" * 7 + "|"]
    on = {point.name for point in best}
    for f in found:
        sizes = [f"{n / MIB:.1f}" for n in (f.said[1], f.counted, f.live)]
        took = [f"{f.said[0]:.2f}", f"{f.seconds(crowded):.2f}", "yes" if f.name in on else ""]
        lines.append(f"| {' | '.join([f.name, *sizes, *took])} |")
    lines += [f"| {name} | failed: {words} | | | | | |" for name, words in failed.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--charts", nargs="+", default=list(CHARTS), choices=list(CHARTS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--side", type=int, default=0, help="instead of the charts' own")
    parser.add_argument("--only", default="", help="the first, and those whose name has this in it")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    print(where())
    for key in given.charts:
        chart = CHARTS[key]
        side, crowded = given.side or chart.side, chart.ranks > (os.cpu_count() or 1)
        kept = given.out / f"{key}.json"
        if given.draw:
            lines = json.loads(kept.read_text())
            found, failed = [Found(**x | {"said": tuple(x["said"])}) for x in lines], {}
        else:
            found, failed = points(key, side, given.turns, given.only)
        picture, best = drawn(chart, side, found, crowded)
        write(given.out / f"{key}.svg", picture)
        write(kept, json.dumps([asdict(f) for f in found], indent=1) + "\n")
        print(f"{chart.title} of {side} px\n")
        print(table(found, best, failed, crowded), flush=True)


if __name__ == "__main__":
    main()
