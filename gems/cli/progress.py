"""A bar on standard error while something long goes on; on rank 0 only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Pace:
    """Samples per second, of the last few steps and of all but the first; and seconds per step."""

    steps: list[tuple[int, float]] = field(default_factory=list)  # samples, seconds

    def add(self, samples: int, seconds: float) -> None:
        self.steps.append((samples, seconds))

    @staticmethod
    def _rate(steps: list[tuple[int, float]]) -> float:
        seconds = sum(s for _, s in steps)
        return sum(n for n, _ in steps) / seconds if seconds else 0.0

    @property
    def now(self) -> float:
        return self._rate(self.steps[-5:])

    @property
    def steady(self) -> float:
        return self._rate(self.steps[1:] or self.steps)

    def latency(self, share: float) -> float:
        """The seconds that this share of the steps, but the first, stayed below."""
        seconds = sorted(s for _, s in self.steps[1:] or self.steps)
        return seconds[min(int(share * len(seconds)), len(seconds) - 1)]


Show = Callable[[str], None]


@contextlib.contextmanager
def bar(title: str, total: int, shown: bool, done: int = 0) -> Iterator[Show]:
    """Gives `show(text)`, to be called once per step."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(title, total=total, completed=done, text="")

        def show(text: str) -> None:
            progress.update(task, advance=1, text=text)

        yield show
