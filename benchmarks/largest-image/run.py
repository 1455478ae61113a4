"""The largest image on which ranks train one step under a cap of live bytes each.

    PYTHONPATH=. python -m benchmarks.largest-image.run --caps 256MiB 1GiB
    PYTHONPATH=. python -m benchmarks.largest-image.run --only "ResNet-110-v2, GEMS"
    PYTHONPATH=. python -m benchmarks.largest-image.run --store 6GiB --ranks 1 --caps 256MiB
    PYTHONPATH=. python -m benchmarks.largest-image.run --table

Every side in the table was really trained on. Each step is a line of the results file as soon as it
is taken, and is not taken again; delete lines, or the file, to have them again.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import torch

from benchmarks.pipeline.ranks import RankError, Ranks
from benchmarks.where import where
from gems.draw.units import size
from gems.errors import PlanError
from gems.hardware import bytes_of

from .networks import NETWORKS
from .results import Case, Results, Row, table
from .search import Trial, largest
from .ways import ABOVE, WAYS, Cannot, from_above

log = logging.getLogger("largest")
HERE = Path(__file__).parent
IMAGES = {1: 1, 2: 2, 4: 2}  # of one step, by ranks: a pair is the least that runs both ways


SILENT = "no answer from rank"  # what `Ranks` says when time is up


class Bench:
    """Takes trials on processes that stay, and are started anew when they fail."""

    def __init__(self, results: Results, longest: float, start: int | None = None) -> None:
        self.results, self.longest, self.start = results, longest, start
        self.ranks: Ranks | None = None

    def row(self, network: str, ranks: int, way: str, cap: int) -> Row:
        """The largest side of one way under one cap."""
        case = Case(network, ranks, way, cap)
        shared = case if WAYS[way].by_cap else Case(network, ranks, way)
        known = self.results.trials(shared)

        def tried(side: int) -> Trial:
            trial = self.trial(shared, side, cap)
            self.results.add_trial(shared, trial)
            return trial

        multiple = NETWORKS[network].multiple
        square = not WAYS[way].by_cap
        start = self.start or (128 if square else self.so_far(network, ranks, cap))
        found = largest(
            tried, cap, multiple, start=start, longest=self.longest, square=square,
            known=known.values(),
        )  # fmt: skip
        tries = self.results.trials(shared)
        note = found.trial.note if found.trial else tries[max(tries)].note
        if found.first and found.trial and found.first.note != found.trial.note:
            why = found.first.note or f"takes {size(found.first.peak or 0)}"
            note += f"; {found.first.side}: {why}"
        peak, seconds = (found.trial.peak, found.trial.seconds) if found.trial else (None, 0.0)
        more = found.stopped or (found.first is not None and SILENT in found.first.note)
        today = time.strftime("%Y-%m-%d")
        row = Row(case, found.side, peak, seconds, more, note.strip("; "), today)
        self.results.add_row(row)
        return row

    def above(self, network: str, ranks: int, cap: int, store: int) -> Row:
        """The planner's largest image with stores of so many bytes, really trained."""
        self.open(ranks)
        start, way = time.monotonic(), ABOVE
        assert self.ranks is not None
        try:
            side, peak, note = from_above(
                self.ranks, network, IMAGES[ranks], cap, store, self.start
            )
        except (Cannot, RankError, PlanError) as error:
            side, peak, note = 0, None, str(error).strip().splitlines()[-1][:300]
        note = f"{size(store)} of disk for each rank; {note}"
        seconds, today = round(time.monotonic() - start, 2), time.strftime("%Y-%m-%d")
        more = side == self.start
        row = Row(Case(network, ranks, way, cap), side, peak, seconds, more, note, today)
        self.results.add_row(row)
        return row

    def so_far(self, network: str, ranks: int, cap: int) -> int:
        """The largest side of any way on no more ranks: where to begin."""
        cases = [(r.side, r.case) for r in self.results.rows()]
        mine = [s for s, c in cases if (c.network, c.cap) == (network, cap) and c.ranks <= ranks]
        return max(mine, default=0) or 128

    def trial(self, case: Case, side: int, cap: int) -> Trial:
        """One step, or what went wrong."""
        self.open(case.ranks)
        assert self.ranks is not None
        start = time.monotonic()
        try:
            images = WAYS[case.way].images or IMAGES[case.ranks]
            peak, note = WAYS[case.way].run(self.ranks, case.network, images, side, cap)
        except Cannot as words:
            peak, note = None, str(words)
        except RankError as error:
            lines = str(error).strip().splitlines()
            peak, note = None, lines[-1].strip()[:300]
        took = time.monotonic() - start
        log.info("%s: %s %s, %.0f s; %s", case, side, size(peak or 0), took, note)
        return Trial(side, peak, round(took, 2), note)

    def open(self, ranks: int) -> None:
        if self.ranks is None or self.ranks.size != ranks or not self.ranks._pipes:
            self.close()
            self.ranks = Ranks(ranks, timeout=1.5 * self.longest)

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        self.ranks = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--caps", nargs="+", default=["256MiB", "1GiB"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], choices=list(IMAGES))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS)[:3], choices=list(NETWORKS))
    parser.add_argument("--only", default="", help="ways whose name has this in it")
    parser.add_argument("--longest", type=float, default=240, help="seconds of one trial, about")
    parser.add_argument("--store", help="only GEMS, from above: what each rank may have on disk")
    parser.add_argument(
        "--start", type=int, help="the side to begin with, if none was tried yet; with --store the "
        "one to train if the planner knows a plan for it, and no larger one"
    )  # fmt: skip
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--table", action="store_true", help="only print what was found so far")
    given = parser.parse_args()
    results = Results(given.results)
    order = (list(NETWORKS), list(WAYS))
    if given.table:
        print(table(results.rows(), order), end="")
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    torch.set_num_threads(1)
    print(where())
    bench = Bench(results, given.longest, given.start)
    rows = []
    try:
        for network in given.networks:
            for ranks in given.ranks:
                for way in WAYS:
                    if way == ABOVE and given.store:
                        for cap in map(bytes_of, given.caps):
                            rows.append(bench.above(network, ranks, cap, bytes_of(given.store)))
                    if (
                        given.store
                        or way == ABOVE
                        or given.only not in way
                        or ranks not in WAYS[way].ranks
                    ):
                        continue
                    for cap in map(bytes_of, given.caps):
                        rows.append(bench.row(network, ranks, way, round(cap)))
    finally:
        bench.close()
    print(table(rows, order), end="")


if __name__ == "__main__":
    main()
