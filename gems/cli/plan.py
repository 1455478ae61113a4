"""`gems plan`: choose a plan for a model and a machine, or write out the one that is given."""

from __future__ import annotations

import argparse
from typing import Any

from gems.cli.keras_models import on_tensorflow
from gems.cli.model_options import MODEL, studied
from gems.cli.options import (
    add_options,
    choice,
    count,
    machine_of,
    machine_option,
    path,
    string,
    switch,
)
from gems.cli.plan_options import PLAN, plan_from
from gems.draw.table import table
from gems.draw.units import seconds, size
from gems.errors import PlanError
from gems.files import to_json, write
from gems.hardware import bytes_of
from gems.planner.compile import CompiledPlan
from gems.planner.request import Request
from gems.plans.plan import Plan

OPTIONS = {
    "--machine": machine_option(
        "machine to plan for (default auto: the GPU here, else cpu)", "auto"
    ),
    "--precision": choice(
        ("fp32", "bf16", "fp16"), "fp32", "autocast precision to plan for (default fp32)"
    ),
    "--master-weights": switch(
        False, "plan for weights and gradients in --precision, and fp32 masters"
    ),
    "--auto": count(None, "choose the best plan for RANKS ranks", metavar="RANKS"),
    "--memory": string(None, "memory budget per rank, e.g. 16GiB (default: the machine's)", "SIZE"),
    "--objective": choice(
        ("time", "memory", "image"),
        "time",
        "with --auto: the fastest plan that fits (default), the one with the least peak memory, or "
        "the one for the largest image that fits",
    ),
    "--micro-batches": count(
        0, "with --auto: micro-batches per step over all ranks (default: two per rank)"
    ),
    "--store": string(
        None,
        "with --auto: what each rank may offload, to the host or to disk (default: any size)",
        "SIZE",
    ),
    "--out": path("write the plan as JSON"),
}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="choose or write out a plan",
        description=f"{__doc__} With --auto RANKS the planner searches and explains its choice, "
        "among plans of --schedule if given (2bw only then); without it, the plan options are "
        "taken as they are and its stages are written out.",
    )
    add_options(parser, MODEL, "model")
    add_options(parser, PLAN, "parallel plan")
    add_options(parser, OPTIONS, "planner")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    plan, compiled = planned(given)
    if given.auto:
        print(plan.explain())
    print(_stages(compiled))
    if given.out:
        print(f"wrote {write(given.out, to_json(plan))}")
    return 0


def planned(given: argparse.Namespace) -> tuple[Plan, CompiledPlan]:
    """The plan to write out, chosen or given, and what it is for the model."""
    keras_here = on_tensorflow(given) and given.machine == "auto"
    on = machine_of("cpu" if keras_here else given.machine)
    study = studied(given, on)
    memory = bytes_of(given.memory) if given.memory else None
    if given.auto:
        wanted: dict[str, Any] = {"objective": given.objective, "schedule": given.schedule or ""}
        wanted["state"] = study.state()
        if given.store:
            wanted["store"] = bytes_of(given.store)
        request = Request.on(on, given.auto, memory, given.micro_batches, **wanted)
        plan, study = study.choose(request)
        return plan, study.compiled(plan, request)
    if given.objective != "time" or given.micro_batches or given.store:
        raise PlanError(
            "--objective, --micro-batches and --store are for the planner: give --auto too"
        )
    plan = plan_from(given)
    compiled = study.compiled(plan, Request.of(plan, memory, study.state()))
    return compiled.plan, compiled


def _stages(compiled: CompiledPlan) -> str:
    """What each stage is, and what each of its ranks pays for it."""
    plan, rows = compiled.plan, []
    for stage, cost in enumerate(compiled.costs.items):
        assert not isinstance(plan.stages, int)
        names = plan.stages[stage]
        rows.append(
            (
                stage,
                ",".join(map(str, plan.replica_groups[stage])),
                " .. ".join(dict.fromkeys((*names[:1], *names[-1:]))),
                seconds(cost.seconds),
                size(cost.activations),
                size(cost.weights),
            )
        )
    return table(rows, ("stage", "ranks", "blocks", "estimated", "keeps", "weights"))
