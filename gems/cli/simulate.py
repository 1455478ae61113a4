"""`gems simulate`: how long a step takes, in unit costs or on a machine, without running it."""

from __future__ import annotations

import argparse
from typing import Any

from gems.cli.model_options import MODEL, studied
from gems.cli.options import add_options, machine_of, machine_option, path
from gems.cli.plan_options import PLAN, plan_from
from gems.draw.table import report
from gems.draw.text import text
from gems.files import to_json, write
from gems.model.costs import unit
from gems.planner.compile import CompiledPlan
from gems.planner.request import Request
from gems.predict.simulate import simulate
from gems.predict.timeline import Timeline
from gems.schedule.build import lowered

OPTIONS = {
    "--machine": machine_option("machine whose costs are estimated (default: unit costs)", None),
    "--out": path("write the timeline as JSON, for gems draw"),
}


def add(commands: Any) -> None:
    parser = commands.add_parser("simulate", help="time a step on paper", description=__doc__)
    add_options(parser, PLAN, "parallel plan")
    add_options(parser, MODEL, "model")
    add_options(parser, OPTIONS)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    timeline = predicted(given)
    print(text(timeline))
    print(report(timeline))
    if given.out:
        print(f"wrote {write(given.out, to_json(timeline))}")
    return 0


def predicted(given: argparse.Namespace) -> Timeline:
    """The simulated step of the plan: each stage one unit, or the model's on a machine."""
    if given.machine is not None:
        return compiled(given).timeline
    plan = plan_from(given)
    return simulate(lowered(plan), plan, unit(plan.depth))


def compiled(given: argparse.Namespace) -> CompiledPlan:
    """The plan for the model on the machine that was asked for."""
    plan = plan_from(given)
    return studied(given, machine_of(given.machine)).compiled(plan, Request.of(plan))
