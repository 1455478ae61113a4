"""Labels from a table: of whole slides, or of single tiles."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gems.errors import GemsError, problems, short

LONGEST = 500  # characters of a name
FARTHEST = 2**40  # pixels
SAMPLE = ("slide", "slide_id", "file", "image", "volume")  # names of the first column


@dataclass(frozen=True)
class Table:
    """The rows of a CSV file. Slides are named by their file, with or without its ending."""

    path: Path
    slides: dict[str, str] = field(default_factory=dict)
    tiles: dict[str, dict[tuple[int, int], str]] = field(default_factory=dict)

    @property
    def values(self) -> set[str]:
        return {
            *self.slides.values(),
            *(v for found in self.tiles.values() for v in found.values()),
        }

    def names(self) -> set[str]:
        return {*self.slides, *self.tiles}

    def of(self, path: Path) -> str | dict[tuple[int, int], str] | None:
        """The label of a file, or of each of its tiles by x and y; None without a label."""
        for name in (path.name, path.stem):
            if name in self.slides:
                return self.slides[name]
            if name in self.tiles:
                return self.tiles[name]
        return None


def read_table(path: str | Path) -> Table:
    """A CSV file with columns `slide,label`, or `slide,x,y,label` for tiles of slides."""
    path, found = Path(path), []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            columns = [c.strip() for c in rows.fieldnames or ()]
            rows.fieldnames = columns
            name = next((c for c in SAMPLE if c in columns), None)
            if name is None or "label" not in columns or ("x" in columns) != ("y" in columns):
                raise GemsError(
                    f"{path} has the columns {short(', '.join(columns), 300) or 'none'}; it takes "
                    "slide and "
                    "label, and for tiles also x and y"
                )
            table = Table(path)
            for line, row in enumerate(rows, 2):
                if problem := _enter(table, row, name, "x" in columns):
                    found.append(f"line {line}: {problem}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise GemsError(
            f"{path} cannot be read as a table of labels: {error}; save it as CSV in UTF-8"
        ) from error
    if found:
        raise GemsError(problems(f"{path} has wrong lines", found[:20]))
    return table


def _enter(table: Table, row: dict[str, str], column: str, tiles: bool) -> str:
    """Take in one line: what is wrong with it, or nothing."""
    name, label = ((row.get(c) or "").strip() for c in (column, "label"))
    if not name or not label:
        return f"{column} {short(name, 60)!r} and label {short(label, 60)!r} must both be given"
    if max(len(name), len(label)) > LONGEST:
        return f"{column} {short(name, 60)!r} or label {short(label, 60)!r} is too long for a name"
    if not tiles:
        known = table.slides.setdefault(name, label)
        return f"{name} is both {known} and {label}" if known != label else ""
    try:
        place = int(row["x"]), int(row["y"])
    except (TypeError, ValueError):
        return f"x {short(row['x'], 60)!r} and y {short(row['y'], 60)!r} are not whole numbers"
    if not 0 <= min(place) <= max(place) < FARTHEST:
        return f"x {short(row['x'], 60)} and y {short(row['y'], 60)} are not on any slide"
    known = table.tiles.setdefault(name, {}).setdefault(place, label)
    return f"{name} at {place} is both {known} and {label}" if known != label else ""


def numbered(values: Iterable[str], names: tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of the classes in order: as given, or sorted (numbers by size)."""
    values = set(values)
    if names is None:
        number = all(re.fullmatch(r"-?[0-9]{1,18}", v) for v in values)
        return tuple(sorted(values, key=int if number else None))
    if len(set(names)) < len(names):
        raise GemsError(f"the classes {', '.join(names)} are not all different")
    if unknown := sorted(values - set(names)):
        raise GemsError(
            f"the labels {short(', '.join(unknown), 300)} "
            f"are not among the classes {', '.join(names)}"
        )
    return tuple(names)
