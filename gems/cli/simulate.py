"""`gems simulate`: how long a step takes, in unit costs or on a machine, without running it."""

from __future__ import annotations

import argparse
from typing import Any

from gems.cli.model_options import MODEL, studied
from gems.cli.options import add_options, machine_option, path
from gems.cli.plan_options import PLAN, plan_from
from gems.draw.table import report
from gems.draw.text import text
from gems.files import to_json, write
from gems.hardware import machine
from gems.model.costs import unit
from gems.planner.assign import assign, stages
from gems.predict.simulate import simulate
from gems.predict.stage_costs import price
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
    plan = plan_from(given)
    if given.machine is None:
        return simulate(lowered(plan), plan, unit(plan.depth))
    on = machine(given.machine)
    graph, blocks = studied(given, on).graph
    stage_of = stages(plan, graph, blocks)
    plan = assign(plan, graph, blocks, room=on.device.memory)
    costs = price(blocks, graph, stage_of, plan, on)
    return simulate(lowered(plan, costs), plan, costs, on)
