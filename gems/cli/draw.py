"""`gems draw`: pictures of a step, and of a model partitioned into stages.

A step is predicted from a plan, or read from a file that gems train or gems simulate wrote. It is
printed as text, one row per rank: F forward, B backward (or I and W, its input and weight
gradient), the number of the micro-batch, dots while idle, and small letters for the second replica
of a bidirectional plan. Below come the live bytes, if they were counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gems.cli.model_options import MODEL, studied
from gems.cli.options import add_options, count, machine_of, machine_option, path, string
from gems.cli.plan_options import PLAN, plan_from
from gems.cli.simulate import predicted
from gems.draw.chrome import chrome
from gems.draw.html import html
from gems.draw.levels import levels
from gems.draw.partition.cells import partitioned
from gems.draw.partition.svg import svg as partition_svg
from gems.draw.partition.text import text as partition_text
from gems.draw.svg import svg
from gems.draw.text import text
from gems.errors import GemsError, problems
from gems.files import from_json, read_text, write
from gems.model.costs import unit
from gems.planner.request import Request
from gems.plans.describe import titled
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.predict.timeline import Timeline, timeline_problems
from gems.schedule.action import Schedule, parse
from gems.schedule.build import lowered
from gems.schedule.validate import require

EXAMPLES = """examples:
  gems draw --stages 4 --parts 8                      a schedule in unit costs: 1f1b
  gems draw --stages 4 --times 2 --html step.html     GEMS, as a page to zoom and point at
  gems draw --stages 4 --model unet --image-size 512 --machine v100 --svg step.svg
                                                      the step predicted for a model on a machine
  gems draw runs/train/timeline.json --svg step.svg   a step as it was measured
  gems draw predicted.json --over runs/train/timeline.json --svg over.svg
                                                      one over the other, and how far they differ
  gems draw runs/train/timeline.json --trace step.trace.json
                                                      for ui.perfetto.dev or chrome://tracing
  gems draw --partition --model unet --image-size 256 --stages 5 --svg unet.svg
                                                      which blocks each stage has, and what it sends
"""
PICTURES = {
    "--over": path(
        "a second timeline of the same plan, drawn below the first lane by lane on one time axis; "
        "if only one of them is in unit costs, its units are scaled to fit the other",
        "OTHER.json",
    ),
    "--partition": {
        "action": "store_true",
        "help": "the partition of the model instead of the step: its blocks by stage, and the "
        "bytes between stages; a page (--html) shows both",
    },
    "--svg": path("write a picture for a document"),
    "--html": path("write a page, one file that needs no other: zoom, drag, point at anything"),
    "--trace": path("write the step for Perfetto or Chrome (JSON)"),
    "--title": string(None, "title of the pictures (default: model and schedule, or file)", "TEXT"),
    "--actions": {"action": "store_true", "help": "print the schedule as text, which parses back"},
    "--width": count(120, "columns of the text (default 120)"),
    "--machine": machine_option(
        "machine whose costs are estimated (default: unit costs; with --partition, cpu)", None
    ),
}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "draw",
        help="draw a step, or the partition of a model",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        help="a timeline (.json, from gems train or simulate) or a schedule as text; "
        "default: the plan's own schedule",
    )
    add_options(parser, PICTURES, "pictures")
    add_options(parser, PLAN, "parallel plan")
    add_options(parser, MODEL, "model")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    if found := list(_problems(given)):
        raise GemsError(problems("these options do not go together:", found))
    _show_partition(given) if given.partition else _show_step(given)
    return 0


def _problems(given: argparse.Namespace) -> Iterator[str]:
    read = given.file is not None
    measured = read and given.file.suffix == ".json"
    if measured and given.actions:
        yield f"{given.file} is a timeline, which has no schedule to print; leave out --actions"
    if read and given.machine and not given.partition:
        yield f"{given.file} has its times, or takes unit costs; leave out --machine"
    if given.partition and given.actions:
        yield "--actions prints the schedule of a step; leave out --partition"
    if given.partition and not (given.html or given.trace) and (given.over or read):
        yield "--partition draws no step; leave out the timeline, or add --html to show both"


class Step(NamedTuple):
    """A step to draw, as every picture takes it."""

    timeline: Timeline
    title: str
    plan: Plan | None
    below: Timeline | None


def _show_step(given: argparse.Namespace) -> None:
    step = _step(given)
    if given.actions:
        print(_schedule(given, plan_from(given)), end="")
    print(text(step.timeline, given.width, step.below))
    if bytes_live := levels(step.below or step.timeline, given.width):
        print(bytes_live)
    _write(given.svg, lambda: svg(*step))
    _write(given.html, lambda: html(*step))
    _write(given.trace, lambda: chrome(*step))


def _show_partition(given: argparse.Namespace) -> None:
    given.machine = given.machine or "cpu"
    plan = plan_from(given)
    study = studied(given, machine_of(given.machine))
    graph, costs = study.graph
    stage_of = study.compiled(plan, Request.of(plan)).stage_of
    shown = partitioned(graph, stage_of, costs, plan.sizes)
    print(partition_text(shown, plan))
    picture = partition_svg(shown, given.title or f"{given.model}, {plan.depth} stages", plan)
    _write(given.svg, lambda: picture)
    if given.html or given.trace:
        step = _step(given)
        _write(given.html, lambda: html(*step, partition=picture))
        _write(given.trace, lambda: chrome(*step))


def _write(path: Path | None, picture: Callable[[], str]) -> None:
    if path is not None:
        print(f"wrote {write(path, picture())}")


def _step(given: argparse.Namespace) -> Step:
    below = _timeline(given.over) if given.over else None
    if given.file is not None and given.file.suffix == ".json":
        timeline = _timeline(given.file)
        plan = plan_from(given) if given.plan or given.stages > 1 else None
        if plan and plan.world != timeline.ranks:
            raise GemsError(f"{given.file} is of {timeline.ranks} ranks, the plan of {plan.world}")
        return Step(timeline, given.title or given.file.stem, plan, below)
    plan = plan_from(given)
    if given.file is not None:
        timeline = simulate(_schedule(given, plan), plan, unit(plan.depth))
    else:
        timeline = predicted(given)
    model = given.model if given.machine else ""
    return Step(timeline, given.title or titled(plan, model), plan, below)


def _timeline(path: Path) -> Timeline:
    try:
        timeline = from_json(Timeline, read_text(path))
    except GemsError as error:
        raise GemsError(
            f"{path}: {error}; give the timeline.json of a run, or one of gems simulate --out"
        ) from error
    if found := list(timeline_problems(timeline)):
        raise GemsError(problems(f"{path} is not the timeline of a step:", found))
    return timeline


def _schedule(given: argparse.Namespace, plan: Plan) -> Schedule:
    """The order in the file, proven, or else the plan's own."""
    if given.file is None:
        return lowered(plan)
    return require(parse(read_text(given.file)), plan)
