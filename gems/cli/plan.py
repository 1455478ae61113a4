"""`gems plan`: choose a plan for a model and a machine, or write out the one that is given."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gems.cli.options import add_machine, add_model, add_plan, plan_from, traced
from gems.draw.table import table
from gems.draw.units import seconds, size
from gems.estimate import estimate
from gems.files import to_json, write
from gems.machine import bytes_of, machine
from gems.planner.assign import assign, stages
from gems.planner.search import explain, search
from gems.price import price


def add(commands: Any) -> None:
    parser = commands.add_parser("plan", help="choose or write out a plan", description=__doc__)
    add_model(parser)
    add_plan(parser)
    add_machine(parser, "what it will run on (default: cpu)", "cpu")
    put = parser.add_argument
    put("--auto", type=int, metavar="RANKS", help="choose the fastest plan for so many ranks")
    put("--memory", metavar="SIZE", help="bytes per rank, e.g. 16GiB (default: the machine's)")
    put("--out", type=Path, metavar="FILE", help="write the plan as JSON")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    graph = traced(given).graph
    on = machine(given.machine)
    costs = estimate(graph, on)
    if given.auto:
        limit = bytes_of(given.memory) if given.memory else None
        found = search(graph, costs, on, given.auto, limit)
        print(explain(found))
        plan = found[0].plan
    else:
        plan = assign(plan_from(given), graph, costs)
    staged = price(costs, graph, stages(plan, graph, costs), plan, on)
    rows = []
    for stage, cost in enumerate(staged.items):
        assert not isinstance(plan.stages, int)
        names = plan.stages[stage]
        ranks = ",".join(map(str, plan.holders[stage]))
        run_of = " .. ".join(dict.fromkeys((*names[:1], *names[-1:])))
        rows.append(
            (stage, ranks, run_of, seconds(cost.seconds), size(cost.stash), size(cost.weights))
        )
    print(table(rows, ("stage", "ranks", "blocks", "estimated", "keeps", "weights")))
    if given.out:
        print(f"wrote {write(given.out, to_json(plan))}")
    return 0
