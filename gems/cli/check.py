"""`gems check`: find everything that is wrong with a plan, or prove a schedule."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gems.cli.model_options import MODEL, studied
from gems.cli.options import add_options
from gems.cli.plan_options import PLAN, plan_from
from gems.errors import GemsError
from gems.files import read_text
from gems.plans.plan import Plan
from gems.schedule import nccl
from gems.schedule.action import parse
from gems.schedule.build import lowered
from gems.schedule.validate import check, is_lowered


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="check a plan or a schedule",
        description=f"{__doc__} A plan's fields must fit each other, its order must be free of "
        "deadlock, mixed-up messages and hangs under NCCL, and with --model its stages must fit "
        "the model.",
    )
    add_options(parser, PLAN, "parallel plan")
    add_options(parser, MODEL, "model")
    parser.add_argument(
        "file", nargs="?", type=Path, help="a schedule as text; default: the plan's own"
    )
    parser.set_defaults(run=run, model=None)


def run(given: argparse.Namespace) -> int:
    plan = plan_from(given)
    found = list(_model_problems(given, plan)) if given.model else []
    schedule = parse(read_text(given.file)) if given.file else lowered(plan)
    found += check(schedule, plan)
    for problem in found:
        print(problem, file=sys.stderr)
    actions = sum(len(row) for row in schedule.ranks)
    if not found:
        fits = f"; its stages fit {given.model}" if given.model else ""
        print(f"{actions} actions on {plan.world} ranks: no deadlock, every message in order{fits}")
        if is_lowered(schedule) and plan.world > 1:
            print(nccl.summary(schedule, plan))
    return 1 if found else 0


def _model_problems(given: argparse.Namespace, plan: Plan) -> Iterator[str]:
    """What of a plan does not fit the model: names, edges, and cuts that are not exact."""
    from gems.hardware import machine
    from gems.planner.assign import stages, unknown_names, written

    graph, costs = studied(given, machine("cpu")).graph
    try:
        stage_of = stages(plan, graph, costs)
    except GemsError as error:
        yield str(error)
        return
    if unknown := list(unknown_names(plan, graph)):
        yield from (f"recompute: {problem}" for problem in unknown)
        return
    edges = written(plan, graph, stage_of).edges
    if plan.edges is not None and plan.edges != edges:
        yield (
            f"edges are {plan.edges}, but with these stages the model sends {edges}; leave edges "
            "out, and they are filled in"
        )
    for block, stage in zip(graph.blocks, stage_of, strict=True):
        if plan.activations[stage].patches and not block.streams:
            yield (
                f"stage {stage} streams, but {block.name} needs the whole image; end it before that"
            )
            break
