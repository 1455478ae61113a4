"""Defaults of the published scripts (MPI4DL, Infer-HiRes), so that their command lines carry over.

`--like` takes the place of `python`: `gems train --like benchmarks/.../benchmark_resnet_sp.py` and
the options that were there. What is typed, or in a file of --config, wins over these defaults.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from gems.cli.config import written
from gems.cli.options import string
from gems.cli.plan_options import PLAN
from gems.errors import GemsError

Defaults = Mapping[str, Any]

SYSTEM = "mpi4dl"
COMMON: Defaults = {
    "batch-size": 32, "split-size": 2, "app": "synthetic", "optimizer": "adam",
    "learning-rate": 0.001, "weight-decay": 0.0001, "learning-rate-decay": 0.85,
    "enable-master-comm-opt": False, "enable-evaluation": False,
}  # fmt: skip
RESNET: Defaults = {"model": "resnet110-v2"}
AMOEBANET: Defaults = {"model": "amoebanet-d", "num-layers": 18, "num-filters": 416}
TILES: Defaults = {"num-spatial-parts": 4, "spatial-size": 1}
MASTER: Defaults = {"times": 1}
HALO: Defaults = {
    "model": "convolution", "split-size": 1, "batch-size": 1, "image-size": 8, "steps": 110,
    "batches": 150, **TILES,
}  # fmt: skip
# By the names of their files.
SCRIPTS: dict[str, Defaults] = {
    SYSTEM: COMMON,
    "benchmark_resnet_lp": {**COMMON, **RESNET},
    "benchmark_amoebanet_lp": {**COMMON, **AMOEBANET},
    "benchmark_resnet_sp": {**COMMON, **RESNET, **TILES},
    "benchmark_amoebanet_sp": {**COMMON, **AMOEBANET, **TILES},
    "benchmark_resnet_gems_master": {**COMMON, **RESNET, **MASTER},
    "benchmark_amoebanet_gems_master": {**COMMON, **AMOEBANET, **MASTER},
    "benchmark_resnet_gems_master_with_sp": {**COMMON, **RESNET, **MASTER, **TILES},
    "benchmark_amoebanet_gems_master_with_sp": {**COMMON, **AMOEBANET, **MASTER, **TILES},
    "benchmark_resnet_inference": {**COMMON, **RESNET, "split-size": 1},
    "benchmark_sp_halo_exchange": {**COMMON, **HALO},
    "benchmark_sp_halo_exchange_conv": {**COMMON, **HALO},
    "benchmark_sp_halo_exchange_with_compute": {**COMMON, **HALO},
    "benchmark_sp_halo_exchange_with_compute_val": {**COMMON, **HALO},
}
LIKE = {
    "--like": string(
        None,
        "defaults of a published script by its file's name, or mpi4dl for those that all scripts "
        "share; options that are given win (see docs/from-mpi4dl.md)",
        "SCRIPT",
    )
}
BATCHES = 10  # of noise, of which our runs keep a quarter to evaluate; no option of its own
_OF_PLAN = tuple(word[2:] for flags in PLAN for word in flags.split())
UNFIT: dict[str, tuple[str, ...]] = {
    "--plan": _OF_PLAN,
    "--auto": _OF_PLAN,
    "--spatial": tuple(TILES),
    "--schedule": tuple(MASTER),
    "--learning-rate-schedule": ("learning-rate-decay",),
    "--model": ("num-layers", "num-filters"),
}


def expanded(arguments: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments of a command with the defaults of its --like in front, so that later ones win.

    Without those that contradict what was given: with --plan or --auto there is no place for a
    plan's options, and another network has another depth.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--like", "--app", "--batch-size"):
        first.add_argument(flag)
    given = first.parse_known_args(list(arguments))[0]
    if given.like is None:
        return list(arguments)
    values, known = dict(_defaults(given.like)), parser._option_string_actions
    size = str(given.batch_size or values["batch-size"])
    if (given.app or values["app"]) in ("3", "synthetic") and size.isdigit():
        values["samples"] = values.get("batches", BATCHES) * int(size)
    flags = [word.partition("=")[0] for word in arguments]
    typed = {known[flag].dest for flag in flags if flag in known}
    unfit = {name for flag, names in UNFIT.items() if flag in flags for name in names}
    kept = {
        name: value
        for name, value in values.items()
        if (action := known.get(f"--{name}")) and action.dest not in typed and name not in unfit
    }
    return [*written(kept, parser, f"--like {given.like}"), *arguments]


def _defaults(like: str) -> Defaults:
    name = PurePosixPath(like).name.removesuffix(".py")
    if name in SCRIPTS:
        return SCRIPTS[name]
    near = difflib.get_close_matches(name, SCRIPTS, 3)
    advice = f"did you mean {', '.join(near)}? " if near else ""
    raise GemsError(
        f"--like {like}: there is no such script; {advice}choose one of {', '.join(SCRIPTS)}"
    )
