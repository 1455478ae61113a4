"""Metrics of a run: a line of JSON per step or evaluation, a CSV table, TensorBoard."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

from gems.errors import GemsError, short
from gems.files import parse_json, read_text, write

Row = dict[str, Any]


class Journal:
    """The metrics of a run, in `metrics.jsonl` and `metrics.csv` of its folder; rank 0 writes.

    A run that is resumed `keep`s the rows that were there when its checkpoint was written, after
    step `after`, and drops the rest: the file is that of a run that was never interrupted.
    """

    def __init__(
        self, folder: Path, *, writes: bool, tensorboard: bool, keep: int = 0, after: int = 0
    ) -> None:
        self.path, self.table = folder / "metrics.jsonl", folder / "metrics.csv"
        self.writes = writes
        self.rows: list[Row] = []
        self._board: Any = None
        if not writes:
            return
        if keep and self.path.exists():
            self.rows = _rows(self.path, keep)
        write(self.path, "".join(map(_line, self.rows)))
        if tensorboard:
            self._board = _board(folder / "tensorboard", after)

    def note(self, kind: str, step: int, **numbers: float) -> None:
        """One row; `kind` is train or eval, `step` counts from 1."""
        row: Row = {"kind": kind, "step": step, **numbers}
        self.rows.append(row)
        if not self.writes:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def of(self, kind: str, name: str) -> list[tuple[float, float]]:
        """A curve: steps and values."""
        rows = [row for row in self.rows if row["kind"] == kind]
        return [(r["step"], r[name]) for r in rows if not math.isnan(r.get(name, math.nan))]

    def names(self, kind: str) -> list[str]:
        """What was noted of a kind, besides the step."""
        found = (name for row in self.rows if row["kind"] == kind for name in row)
        return [name for name in dict.fromkeys(found) if name not in ("kind", "step")]

    def close(self) -> None:
        """Write the table, and all that TensorBoard has not written yet."""
        if not self.writes:
            return
        fields = dict.fromkeys(name for row in self.rows for name in row)
        text = io.StringIO()
        table = csv.DictWriter(text, list(fields), lineterminator="\n")
        table.writeheader()
        table.writerows(self.rows)
        write(self.table, text.getvalue())
        if self._board is not None:
            self._board.close()


def _line(row: Row) -> str:
    return json.dumps(plain(row)) + "\n"


def plain(numbers: Row) -> Row:
    """As JSON has it, which knows no nan: null, where a metric is undefined."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in numbers.items()}


def _rows(path: Path, keep: int) -> list[Row]:
    """The first rows of a journal that was written before."""
    found = []
    for number, line in enumerate(read_text(path).splitlines()[:keep], 1):
        try:
            found.append(_row(line))
        except ValueError as error:
            raise GemsError(
                f"line {number} of {path} is damaged ({short(error, 200)}); remove the file to go "
                "on without the metrics so far"
            ) from error
    return found


def _row(line: str) -> Row:
    row = parse_json(line)
    if not isinstance(row, dict) or row.get("kind") not in ("train", "eval"):
        raise ValueError("it is not the row of a step or an evaluation")
    numbers = {k: math.nan if v is None else v for k, v in row.items() if k != "kind"}
    wrong = [k for k, v in numbers.items() if type(v) not in (int, float) or abs(v) > 1e300]
    if wrong or "step" not in row:
        raise ValueError(f"{short((wrong or ['step'])[0], 60)} is not a number")
    return {"kind": row["kind"], **numbers}


def require_board() -> Any:
    """What writes for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise GemsError(
            "--tensorboard needs the package tensorboard: pip install tensorboard"
        ) from error
    return SummaryWriter


def _board(folder: Path, after: int) -> Any:
    return require_board()(str(folder), purge_step=after + 1 if after else None)
