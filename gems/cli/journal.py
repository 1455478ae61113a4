"""What a run says about itself: a line of JSON per step or evaluation, a CSV table, TensorBoard."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from gems.errors import GemsError
from gems.files import write

Row = dict[str, Any]


class Journal:
    """The numbers of a run, in `metrics.jsonl` and `metrics.csv` of its folder; rank 0 writes.

    A run that is resumed goes on from the step of its checkpoint: what was noted after it is
    forgotten, so that the file is that of a run that was never interrupted.
    """

    def __init__(self, folder: Path, *, writes: bool, tensorboard: bool, after: int = 0) -> None:
        self.path, self.table = folder / "metrics.jsonl", folder / "metrics.csv"
        self.writes = writes
        self.rows: list[Row] = []
        self._board: Any = None
        if not writes:
            return
        if after and self.path.exists():
            rows = (json.loads(line) for line in self.path.read_text().splitlines())
            self.rows = [row for row in rows if row["step"] <= after]
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
        return [(r["step"], r[name]) for r in self.rows if r["kind"] == kind and name in r]

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
    return json.dumps(row) + "\n"


def _board(folder: Path, after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise GemsError(
            "--tensorboard needs the package tensorboard: pip install tensorboard"
        ) from error
    return SummaryWriter(str(folder), purge_step=after + 1 if after else None)
