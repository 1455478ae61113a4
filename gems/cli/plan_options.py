"""Options of the parallel plan, and the plan they describe."""

from __future__ import annotations

import argparse
from pathlib import Path

from gems.cli.options import changed, choice, count, path, string, switch
from gems.errors import GemsError, PlanError
from gems.files import from_json, read_text
from gems.geometry.grid import HALOS, LAYOUTS
from gems.plans.fields import (
    BALANCES,
    BIDIRECTIONAL,
    OPTIMIZER_STEP,
    PLACEMENTS,
    SCHEDULES,
    ZERO,
)
from gems.plans.offload import offload_of
from gems.plans.plan import Plan
from gems.plans.recompute import parse_recompute
from gems.plans.streaming import STREAM_HALOS

PLAN = {
    "--split-size --stages": count(1, "pipeline stages of the model (default 1)", dest="stages"),
    "--parts": count(1, "micro-batches per batch (default 1)"),
    "--times": count(
        0,
        "GEMS, bidirectional: 2 x T batches per optimizer step, one in each direction T times; the "
        "--parts of a batch are pipelined, and no rank holds activations of more",
        metavar="T",
    ),
    "--schedule": choice(
        SCHEDULES, None, "pipeline schedule (default: gems with --times, else 1f1b)"
    ),
    "--data": count(1, "data-parallel replicas of the whole pipeline (default 1)"),
    "--ranks": count(0, "ranks per replica, if a rank runs several stages (default: --stages)"),
    "--placement": choice(
        PLACEMENTS,
        "straight",
        "stages on ranks, if there are more stages than ranks: straight (default): 0 1 2 0 1 2; "
        "fold: 0 1 2 2 1 0; levels: a fold with encoder and decoder level on one rank, where long "
        "skips stay",
    ),
    "--bidirectional": switch(False, "with --schedule auto: a second replica in reverse order"),
    "--max-in-flight": count(
        0, "micro-batches whose activations a rank may hold at a time, with --schedule auto, gems "
        "or gems-zb (default: --parts of a batch with --times, else 1)"
    ),
    "--balance": string(
        "time",
        "how layers are divided among stages: by equal time (default), memory or number of layers, "
        "or the layers of each stage: 3,4,4,3",
        "B",
    ),
    "--spatial": string(
        "",
        "spatial parallelism: images of the first stages are divided into tiles, one rank per "
        "tile. One grid per spatial stage: rows x columns as in 2x2,1x2, depth x rows x columns "
        "as in 2x2x2, or a layout and number of tiles: square:4, vertical:4 (side by side), "
        "horizontal:4 (one above the other)",
        "G",
    ),
    "--num-spatial-parts": string(
        "",
        "the same by numbers of tiles: one per spatial stage as in 4,2, or one for all stages of "
        "--spatial-size; --slice-method is their layout",
        "N",
    ),
    "--spatial-size": count(
        0, "how many of the first stages are spatial (default: as many as --num-spatial-parts has)"
    ),
    "--slice-method": choice(
        LAYOUTS,
        "square",
        "layout of --num-spatial-parts: square (default), vertical (side by side), horizontal (one "
        "above the other)",
    ),
    "--local-dp --local-DP": count(
        1, "ranks of each stage that is not spatial; the samples of a micro-batch are split "
        "among them (default 1)"
    ),
    "--halo": choice(
        HALOS,
        "d1",
        "halo exchange between tiles: d1 before every layer (default), d2 a wider halo once for "
        "several layers, whose overlap is computed twice",
    ),
    "--halo-D2": {
        "dest": "halo", "action": "store_const", "const": "d2", "help": "the same as --halo d2"
    },
    "--fused-layers": count(
        0, "with --halo d2: layers per halo exchange (default: as many as the cost model favours); "
        "those that read beyond a pixel count: convolutions that are larger than 1x1 or have "
        "strides, and pooling. Published scripts count residual blocks instead"
    ),
    "--enable-master-comm-opt": switch(
        True,
        "all-reduce the gradients of each stage as soon as they are complete, overlapped with "
        "other work (default); otherwise after all backward passes",
    ),
    "--recompute": string(
        "never",
        "activations that stages drop and recompute for backward: never (default), always, "
        "except_last (all but the last micro-batch's), auto (as the memory budget demands), or "
        "those of modules: layer1,layer2; with a slash between stages: always/layer2,layer3/never",
        "R",
    ),
    "--stream": string(
        "",
        "run the first stage patch by patch, saving only its inputs: a grid of patches as in 4x4, "
        "or one grid for each of the first stages as in 4x4,2x2",
        "G",
    ),
    "--stream-halo": choice(
        STREAM_HALOS,
        "recompute",
        "with --stream: what patches read around their own cells is computed again by each "
        "(recompute, default), or once, and halos are handed on from patch to patch (carry)",
    ),
    "--zero": choice(
        ZERO,
        0,
        "ZeRO stage: the ranks that hold the same weights (replicas, both directions, tiles) shard "
        "1 the optimizer state, 2 gradients too, 3 weights too (default 0)",
        type=int,
    ),
    "--offload": string(
        "",
        "what is moved out of device memory while it is not used: activations, weights (with the "
        "optimizer state), optimizer, values (between streamed stages); to host memory (default) "
        "or to disk: activations:disk,optimizer",
        "O",
    ),
    "--optimizer-step": choice(
        OPTIMIZER_STEP,
        "end",
        "update weights after all work of a step (end), or each stage as soon as its gradients are "
        "complete (eager; with --schedule l2l that is L2L-p)",
    ),
    "--partition-activations": switch(
        False,
        "ZeRO-R: tiles shard the saved inputs that all of them hold, and gather them to recompute",
    ),
    "--plan": path("the plan from a file, instead of these options (see gems plan)"),
}  # fmt: skip


def plan_from(given: argparse.Namespace) -> Plan:
    if given.plan is not None:
        extra = [flag for flag in changed(given, PLAN) if flag not in ("--plan", "--parts")]
        if extra:
            raise PlanError(
                f"--plan {given.plan} already has the whole plan; leave out {', '.join(extra)}"
            )
        return plan_in(given.plan)
    schedule = given.schedule or ("gems" if given.times else "1f1b")
    return Plan(
        stages=given.stages,
        micro_batches=2 * given.times * given.parts if given.times else given.parts,
        replications=given.times * given.parts,
        schedule=schedule,
        data=given.data,
        ranks=given.ranks,
        placement=given.placement,
        bidirectional=True if given.bidirectional else None,
        balance=_balance(given.balance),
        max_in_flight=given.max_in_flight or _pipelined(given, schedule),
        spatial=_spatial(given),
        local_dp=given.local_dp,
        halo=given.halo,
        fused_layers=given.fused_layers,
        grad_sync="auto" if given.enable_master_comm_opt else "end",
        recompute=parse_recompute(given.recompute),
        stream=tuple(filter(None, given.stream.split(","))),
        stream_halo=given.stream_halo,
        zero=given.zero,
        offload=offload_of(given.offload),
        optimizer_step=given.optimizer_step,
        partition_activations=given.partition_activations,
    )


def _pipelined(given: argparse.Namespace, schedule: str) -> int:
    """The micro-batches of a batch, which a GEMS schedule pipelines: no rank holds more."""
    return given.parts if given.times and schedule in BIDIRECTIONAL and given.parts > 1 else 0


def plan_in(path: Path) -> Plan:
    """The plan of a file."""
    try:
        return from_json(Plan, read_text(path))
    except GemsError as error:
        raise PlanError(f"{path}: {error}; write one with gems plan --out") from error


def _spatial(given: argparse.Namespace) -> tuple[str, ...]:
    """The grids of the spatial stages, from --spatial or from the published options."""
    if given.spatial:
        if given.num_spatial_parts or given.spatial_size or given.slice_method != "square":
            raise PlanError(
                "--spatial already has the grids; leave out --num-spatial-parts, --spatial-size "
                "and --slice-method"
            )
        return tuple(given.spatial.split(","))
    if not given.num_spatial_parts:
        if given.spatial_size:
            raise PlanError(
                f"--spatial-size {given.spatial_size} needs --num-spatial-parts, e.g. 4: the "
                "number of tiles of those stages"
            )
        if given.slice_method != "square":
            raise PlanError(
                f"--slice-method {given.slice_method} needs --num-spatial-parts, e.g. 4: the "
                "number of tiles to lay out"
            )
        return ()
    parts = given.num_spatial_parts.split(",")
    stages = given.spatial_size or len(parts)
    if len(parts) not in (1, stages):
        raise PlanError(
            f"--num-spatial-parts {given.num_spatial_parts} has {len(parts)} numbers for "
            f"{stages} spatial stages; give one for all, or one each"
        )
    return tuple(
        f"{given.slice_method}:{n}" for n in (parts * stages if len(parts) == 1 else parts)
    )


def _balance(text: str) -> str | tuple[int, ...]:
    if text in BALANCES:
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(
            f"--balance {text!r} is neither {', '.join(BALANCES)} nor numbers: 3,4,4,3"
        ) from None
