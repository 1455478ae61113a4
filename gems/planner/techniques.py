"""Ways to larger images, each on top of those before it, to tell what each of them gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gems.draw.table import table
from gems.plans.describe import recomputes
from gems.plans.plan import Plan


def _streams(plan: Plan) -> bool:
    return any(policy.patches for policy in plan.activations)


def _saves_less(plan: Plan) -> bool:
    state = any(s.sharded or s.weights_offload or s.optimizer_offload for s in plan.residency)
    return state or recomputes(plan) or any(policy.offload for policy in plan.activations)


# What a plan does, by a name; in the order in which they are added.
TECHNIQUES: dict[str, Callable[[Plan], bool]] = {
    "recomputation, offload and ZeRO": _saves_less,
    "patches": _streams,
    "patches of tiles": lambda plan: _streams(plan) and plan.cut,
    "values in a store": lambda plan: any(policy.values for policy in plan.activations),
}


def levels() -> list[tuple[str, tuple[str, ...]]]:
    """The first with none of them, each with one more: what it adds, and what it is without."""
    names = tuple(TECHNIQUES)
    added = ["tiles, pipelines and copies", *names]
    return [(name, names[i:]) for i, name in enumerate(added)]


def allowed(plan: Plan, without: Sequence[str]) -> bool:
    """Whether a plan does without some techniques."""
    return not any(TECHNIQUES[name](plan) for name in without)


def gains(sides: Sequence[tuple[str, int]]) -> str:
    """The largest image with each technique on top of those before it."""
    rows = [("and " * (i > 0) + name, f"{side} x {side}" if side else "none")
            for i, (name, side) in enumerate(sides)]  # fmt: skip
    return table(rows, ("the largest image that fits, with", "")).rstrip() + "\n"
