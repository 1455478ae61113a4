"""The end of a training run: its summary, pictures and report."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gems.cli.journal import Journal
from gems.cli.progress import Pace
from gems.draw.report import report_page
from gems.draw.svg import svg
from gems.draw.table import report
from gems.draw.units import heading, size
from gems.files import to_json, write
from gems.plans.describe import titled
from gems.predict.simulate import virtual
from gems.predict.timeline import Timeline


class FinishedJob(Protocol):
    """A training run, as far as its results need it."""

    given: Any
    options: str
    trainer: Any
    journal: Journal
    pace: Pace
    timeline: Timeline | None  # of the last step
    first: bool  # whether this is rank 0
    rest: Any  # held-out samples


def finish(job: FinishedJob, maps: list[Path]) -> None:
    """Rank 0 prints a summary, and writes pictures of the last step and the report."""
    if not job.first:
        return
    facts = _facts(job)
    for name, value in facts.items():
        print(f"{name}: {value}")
    if job.timeline is None:
        print("no step was left to do")
        return
    plan, timeline, out = job.trainer.plan, job.timeline, job.given.out
    alone = virtual(timeline, job.trainer.schedule, plan)
    print(f"as if every rank had a core of its own: {heading(alone)}")
    print(report(timeline))
    title = titled(plan, job.given.model)
    write(out / "schedule.txt", str(job.trainer.schedule))
    write(out / "timeline.json", to_json(timeline))
    for name, drawn in (("schedule", timeline), ("virtual", alone)):
        print(f"wrote {write(out / f'{name}.svg', svg(drawn, title, plan))}")
    shown = [(f"heat map of {path.stem}", _url(path)) for path in maps]
    page = report_page(title, timeline, plan, facts, _charts(job.journal), job.options, shown)
    print(f"wrote {write(out / 'report.html', page)}")


def _url(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


def _facts(job: FinishedJob) -> dict[str, str]:
    losses = [value for _, value in job.journal.of("train", "loss")]
    facts = {}
    if losses:
        facts["loss"] = f"{losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps"
    if job.pace.steps:
        facts["speed"] = f"{job.pace.steady:.1f} images/s"
    if job.timeline is not None:
        peaks = [size(memory.total) for memory in job.timeline.peaks]
        facts["peak memory"] = ", ".join(peaks) + " (rank by rank)"
        pairs = [f"{size(used)} of {size(held)}" for used, held in job.timeline.allocator]
        if pairs:
            facts["allocator's peak"] = ", ".join(pairs) + " reserved (rank by rank)"
    for name in job.journal.names("eval"):
        if name != "epoch":
            shown = _shown(name, job.rest.names)
            facts[f"{shown}, {len(job.rest)} held-out samples"] = _last(job.journal, name)
    return facts


def _shown(metric: str, names: Sequence[str]) -> str:
    """`dice_3` is that of the class with this number."""
    stem, _, number = metric.rpartition("_")
    of_class = stem and number.isdigit() and int(number) < len(names)
    return f"{stem} of {names[int(number)]}" if of_class else metric


def _last(journal: Journal, name: str) -> str:
    found = journal.of("eval", name)
    return f"{found[-1][1]:.4f}" if found else "undefined"


def _charts(journal: Journal) -> list[tuple[str, dict[str, list[tuple[float, float]]]]]:
    """Loss, metrics, speed and learning rate over steps."""
    held_out = {n: journal.of("eval", n) for n in journal.names("eval") if n != "epoch"}
    parts = [("loss", {"training": journal.of("train", "loss")})]
    if held_out:
        parts.append(("held out", held_out))
    for name in ("images_per_second", "learning_rate"):
        parts.append((name.replace("_", " "), {name: journal.of("train", name)}))
    return parts
