"""Activation checkpointing: which activations a stage drops and recomputes for backward.

    never          saves every tensor that backward reads
    always         saves only what the stage receives; its forward runs again before backward (R)
    except_last    the same, but the last micro-batch of a step saves all: its backward is next
    auto           as few blocks as the memory budget allows; the planner writes out their names
    ("a", "b")     the blocks of these modules are recomputed inside backward. Adjacent ones form a
                   run, which saves only what it reads; runs are recomputed one at a time

A name covers a module and all inside it; "" is the model, so all blocks. A module that is called
several times has blocks `relu`, `relu:2`, ...; `relu` covers all of its calls, `relu:1` the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

StageRecompute = str | tuple[str, ...]  # of one stage
Recompute = str | tuple[StageRecompute, ...]  # one for all stages, or one per stage

POLICIES = ("never", "always", "except_last", "auto")
WHOLE_STAGE = ("always", "except_last")  # whose forward runs again as an action of its own


def normalize(given: str | Sequence[str | Sequence[str]]) -> Recompute:
    """As a plan stores it: tuples inside, and `never` for an empty list of names."""
    if isinstance(given, str):
        return given
    entries = (entry if isinstance(entry, str) else tuple(entry) or "never" for entry in given)
    return tuple(entries) or "never"


def is_per_stage(recompute: Recompute) -> bool:
    """Whether it has one entry per stage, rather than names for all stages."""
    return not isinstance(recompute, str) and any(
        entry in POLICIES or isinstance(entry, tuple) for entry in recompute
    )


def by_stage(recompute: Recompute, stages: int) -> tuple[StageRecompute, ...]:
    if isinstance(recompute, tuple) and is_per_stage(recompute):
        return recompute
    return (recompute,) * stages  # type: ignore[return-value]


def recompute_problems(recompute: Recompute, stages: int) -> Iterable[str]:
    known = ", ".join(POLICIES)
    if isinstance(recompute, str):
        if recompute not in POLICIES:
            yield (
                f"recompute {recompute!r} is unknown; choose one of {known}, or a list of module "
                "names"
            )
        return
    if not is_per_stage(recompute):
        return
    if len(recompute) != stages:
        yield (
            f"recompute has {len(recompute)} entries for {stages} stages; give one each, or one "
            "for all"
        )
    for stage, entry in enumerate(recompute):
        if isinstance(entry, str) and entry not in POLICIES:
            yield (
                f"recompute of stage {stage} is {entry!r}; choose one of {known}, or put module "
                "names in a list of their own"
            )


def parse_recompute(text: str) -> Recompute:
    """As the command line writes it: `always`, `layer1,layer2`, and with a slash between stages:
    `always/layer2,layer3/never`. No name at all is the whole model, "": `/never`."""
    stages = [tuple(filter(None, part.split(","))) or ("",) for part in text.split("/")]
    entries = [e[0] if len(e) == 1 and e[0] in POLICIES else e for e in stages]
    if len(entries) > 1 or isinstance(entries[0], str):
        return normalize(entries if len(entries) > 1 else entries[0])
    return normalize(entries[0])  # names for all stages, or a policy for each
