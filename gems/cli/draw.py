"""`gems draw`: print a schedule or a measured step, and write it as an SVG."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gems.cli.options import add_plan, plan_from
from gems.costs import unit
from gems.draw.svg import svg
from gems.draw.text import text
from gems.files import from_json, write
from gems.schedule.build import lowered
from gems.schedule.check import require
from gems.schedule.core import parse
from gems.simulate import simulate
from gems.timeline import Timeline


def add(commands: Any) -> None:
    parser = commands.add_parser("draw", help="draw a schedule", description=__doc__)
    add_plan(parser)
    put = parser.add_argument
    put(
        "file",
        nargs="?",
        type=Path,
        help="a timeline (.json, from gems train or simulate) or a schedule as text; "
        "default: the plan's own schedule in unit costs",
    )
    put("--svg", type=Path, metavar="FILE", help="write a picture")
    put("--actions", action="store_true", help="print the schedule as text, which parses back")
    put("--width", type=int, default=120, metavar="N", help="columns of the chart")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    plan, title = None, ""
    if given.file is not None and given.file.suffix == ".json":
        timeline = from_json(Timeline, given.file.read_text())
        title = given.file.stem
    else:
        plan = plan_from(given)
        schedule = lowered(plan)
        if given.file is not None:
            schedule = require(parse(given.file.read_text()), plan)
        if given.actions:
            print(schedule, end="")
        timeline = simulate(schedule, plan, unit(plan.depth))
        title = plan.schedule
    print(text(timeline, given.width))
    if given.svg:
        print(f"wrote {write(given.svg, svg(timeline, title, plan))}")
    return 0
