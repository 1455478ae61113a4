"""Trials as lines of a file, so that a run can be taken up again; and the table of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from gems.draw.units import size

from .search import Trial

FIRST = "2026-11-16"  # when rows were run that do not say


@dataclass(frozen=True)
class Case:
    """What is searched for. Without a cap: bytes do not depend on it, and trials serve all caps."""

    network: str
    ranks: int
    way: str
    cap: int | None = None

    def __str__(self) -> str:
        cap = "any cap" if self.cap is None else size(self.cap)
        return f"{self.network}, {self.way}, {self.ranks} ranks, {cap}"


@dataclass(frozen=True)
class Row:
    """What a search came to; `more`: time ended it. `date` is the day on which it was run."""

    case: Case
    side: int
    peak: int | None
    seconds: float
    more: bool
    note: str
    date: str = FIRST


class Results:
    """The lines of a file: trials, as they are made, and rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._lines = [json.loads(line) for line in lines if line.strip()]

    def trials(self, case: Case) -> dict[int, Trial]:
        """By side."""
        mine = [x for x in self._lines if x["kind"] == "trial" and _case(x) == case]
        return {x["side"]: Trial(x["side"], x["peak"], x["seconds"], x["note"]) for x in mine}

    def add_trial(self, case: Case, trial: Trial) -> None:
        self._add({"kind": "trial", **asdict(case), **asdict(trial)})

    def rows(self) -> list[Row]:
        """The newest of each case."""
        fields = ("side", "peak", "seconds", "more", "note")
        found = [x for x in self._lines if x["kind"] == "row"]
        rows = [Row(_case(x), *(x[f] for f in fields), date=x.get("date", FIRST)) for x in found]
        return list({row.case: row for row in rows}.values())

    def add_row(self, row: Row) -> None:
        self._add({"kind": "row", **asdict(row.case), **asdict(row) | {"case": str(row.case)}})

    def _add(self, line: dict) -> None:
        self._lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _case(line: dict) -> Case:
    return Case(line["network"], line["ranks"], line["way"], line["cap"])


def table(rows: Iterable[Row], order: tuple[list[str], list[str]]) -> str:
    """Sides; `live` is the fullest rank's, `x` the side against that of PyTorch on one rank."""
    rows = list(rows)
    networks, ways = order
    base = {(r.case.network, r.case.cap): r.side for r in rows if r.case.way == ways[0]}
    lines = ["| network | cap | ranks | way | side | x | live | s | day | how |", "|---" * 10 + "|"]

    def place(row: Row) -> tuple[int, int, int, int]:
        case = row.case
        return networks.index(case.network), case.cap or 0, case.ranks, ways.index(case.way)

    for row in sorted(rows, key=place):
        case, plain = row.case, base.get((row.case.network, row.case.cap))
        cells = [case.network, size(case.cap or 0), str(case.ranks), case.way]
        if row.side:
            cells.append(f"{row.side}{' or more' * row.more}")
            cells.append(f"{row.side / plain:.2f}" if plain else "")
            cells += [size(row.peak or 0), f"{row.seconds:.0f}", row.date, row.note]
        else:
            cells += ["none", "", "", "", row.date, row.note]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
