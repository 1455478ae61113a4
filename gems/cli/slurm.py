"""`gems slurm`: write a batch file for Slurm that goes on after preemption and time limits."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gems.cli import config, like
from gems.cli.options import add_options, count, path, string, switch
from gems.cli.plan_options import plan_from
from gems.errors import GemsError
from gems.files import from_json, read_text, write
from gems.plans.plan import Plan

EPILOG = """examples:
  gems slurm --ranks-per-node 4 --gpus --time 12:00:00 --sbatch=--partition=gpu --out job.sh \\
             -- gems train --model resnet110-v2 --split-size 4 --data 2 --out runs/one
  gems slurm --plan plan.json -- python train.py
  sbatch job.sh

Before the time is up ranks hear SIGUSR1, when others need the nodes SIGTERM: they save and end, the
job is queued again, and goes on from what was saved. `gems train` does all that; a script of your
own needs gems.Interrupt and gems.latest, as in examples/resume.py.
"""
SIGNAL, UP = "USR1", 128 + 10  # the exit code of ranks that heard it
OPTIONS = {
    "--ranks": count(None, "ranks (default: as many as the plan has)"),
    "--plan": path("plan to take the number of ranks from (JSON, as gems plan --out writes)"),
    "--ranks-per-node": count(None, "ranks on a node (default: all on one)"),
    "--gpus": switch(False, "a GPU for each rank"),
    "--cpus-per-task": count(None, "cores of a rank"),
    "--time": string(None, "limit of a turn in the queue, as sbatch takes it", "TIME"),
    "--warn": count(120, "seconds before the limit at which ranks save and end (default 120)"),
    "--job-name": string("gems", "default gems", "NAME"),
    "--mpi": string(None, "srun --mpi=TYPE, for --backend mpi: pmi2 or pmix", "TYPE"),
    "--setup": {
        "action": "append", "default": [], "metavar": "COMMAND",
        "help": "run before the ranks, e.g. 'module load gems'; may be repeated",
    },
    "--sbatch": {
        "action": "append", "default": [], "metavar": "OPTION",
        "help": "another option of sbatch, e.g. --sbatch=--account=x; may be repeated",
    },
    "--out": path("the file to write (default gems.sbatch)", default=Path("gems.sbatch")),
}  # fmt: skip


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "slurm",
        help="write a batch file for Slurm",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, OPTIONS, "job")
    parser.add_argument("job", nargs="+", metavar="COMMAND", help="what each rank runs, after --")
    parser.set_defaults(run=partial(run, commands))


def run(commands: Any, given: argparse.Namespace) -> int:
    command = list(given.job)
    world = given.ranks
    if given.plan:
        world = _same(world, from_json(Plan, read_text(given.plan)).world, f"--plan {given.plan}")
    if command[:2] == ["gems", "train"]:
        world = _same(world, _ranks_of(commands, command[2:]), "the plan of gems train")
        command += ["--resume"] if "--resume" not in command else []
    if not world:
        raise GemsError("nothing tells how many ranks to start: give --ranks or --plan")
    text = written(given, world, command)
    print(f"wrote {write(given.out, text)}: {world} ranks; submit it by sbatch {given.out}")
    return 0


def _same(asked: int | None, found: int, where: str) -> int:
    if asked is not None and asked != found:
        raise GemsError(f"{asked} ranks were asked for, and {where} has {found}; leave one out")
    return found


def _ranks_of(commands: Any, arguments: Sequence[str]) -> int:
    """Of the plan that `gems train` is given."""
    own, both = commands.choices["train"], [commands.choices[n] for n in ("train", "eval")]
    given = own.parse_args(like.expanded(config.expanded(list(arguments), own, both), own))
    if given.overwrite:
        raise GemsError("--overwrite would start over after each preemption; leave it out")
    return given.auto or plan_from(given).world


def written(given: argparse.Namespace, world: int, command: Sequence[str]) -> str:
    """The batch file."""
    each = min(given.ranks_per_node or world, world)
    if world % each:
        raise GemsError(
            f"{world} ranks do not fill nodes of {each}; choose --ranks-per-node among the "
            f"divisors of {world}"
        )
    wanted = {
        "job-name": given.job_name, "nodes": world // each, "ntasks": world,
        "ntasks-per-node": each, "cpus-per-task": given.cpus_per_task,
        "gpus-per-node": each if given.gpus else None, "time": given.time,
        "signal": f"{SIGNAL}@{given.warn}", "output": f"{given.job_name}-%j.out",
    }  # fmt: skip
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{k}={_word(v)}" for k, v in wanted.items() if v is not None]
    lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
    lines += [f"#SBATCH {_word(option)}" for option in given.sbatch]
    srun = ["srun", "--kill-on-bad-exit=0"]  # ranks end each other, and tell why
    srun += [f"--cpus-per-task={given.cpus_per_task}"] if given.cpus_per_task else []
    srun += [f"--mpi={given.mpi}"] if given.mpi else []
    return "\n".join([*lines, "", *given.setup, f"{shlex.join(srun)} {shlex.join(command)}", END])


END = f"""code=$?
if [ "$code" = {UP} ]; then  # the time was up, and all is saved
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _word(value: Any) -> str:
    """Of a line of #SBATCH."""
    text = str(value)
    if not re.fullmatch(r"[\w=@%:.,+/\[\]&|*()-]+", text):
        raise GemsError(f"{text!r} cannot stand in a line of #SBATCH; leave out blanks and quotes")
    return text
