"""`gems check`: prove a schedule free of deadlock and of mixed-up messages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gems.cli.options import add_plan, plan_from
from gems.schedule.build import lowered
from gems.schedule.check import check
from gems.schedule.core import parse


def add(commands: Any) -> None:
    parser = commands.add_parser("check", help="prove a schedule", description=__doc__)
    add_plan(parser)
    parser.add_argument(
        "file", nargs="?", type=Path, help="a schedule as text; default: the plan's own"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    plan = plan_from(given)
    schedule = parse(given.file.read_text()) if given.file else lowered(plan)
    found = check(schedule, plan)
    for fault in found:
        print(fault, file=sys.stderr)
    actions = sum(len(row) for row in schedule.ranks)
    if not found:
        print(f"{actions} actions on {plan.world} ranks: no deadlock, every message in order")
    return 1 if found else 0
