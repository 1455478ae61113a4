"""A plan in words: for pictures, tables, logs and errors."""

from __future__ import annotations

from itertools import groupby

from gems.geometry.grid import Grid
from gems.plans.plan import Plan


def headline(plan: Plan) -> str:
    """`gems · 4 stages · 8 micro-batches`."""
    parts = [plan.schedule, _many(plan.depth, "stage"), _many(plan.micro_batches, "micro-batch")]
    return " · ".join(parts + ([f"{plan.data} copies"] if plan.data > 1 else []))


def titled(plan: Plan, model: str = "") -> str:
    """`unet, gems`."""
    return ", ".join(filter(None, (model, plan.schedule)))


def _many(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{plural if count != 1 else ''}"


def describe(plan: Plan) -> str:
    """A plan in a few words."""
    both = " both ways" if plan.bidirectional and not plan.alternates else ""
    copies = f"{plan.data} copies of " if plan.data > 1 else ""
    grids = f" ({_runs([str(grid) for grid in plan.grids])})" if plan.cut else ""
    rest = f", recomputes {recomputed(plan)}" if recomputes(plan) else ""
    if plan.stream:
        rest += f", streams {streamed(plan)}"
    if plan.zero:
        rest += f", zero={plan.zero}"
    if plan.offload:
        rest += f", {' and '.join(offloaded(plan))} offloaded"
    on = f"{copies}{_many(plan.depth, 'stage')}{grids} on {_many(plan.ranks, 'rank')}"
    return f"{plan.schedule}{both}, {on}, m={plan.micro_batches}{rest}"


def offloaded(plan: Plan) -> list[str]:
    """What is offloaded; the optimizer always is where the weights are, so it is not listed."""
    found = [part.partition(":")[0] for part in plan.offload]
    return [what for what in found if what != "optimizer" or "weights" not in found]


def streamed(plan: Plan) -> str:
    """The patches that its first stages run one after the other."""
    words = [str(Grid(tiles=policy.patches)) for policy in plan.activations if policy.patches]
    carries = " with halos carried" if plan.stream_halo == "carry" else ""
    if len(words) > 1 and len(set(words)) == 1:
        return f"{words[0]} in {len(words)} stages{carries}"
    return ", ".join(words) + carries


def recomputes(plan: Plan) -> bool:
    """Whether some stage recomputes."""
    return any(not policy.saves_all for policy in plan.activations)


def recomputed(plan: Plan) -> str:
    """What stages recompute, in a few words."""
    entries = (policy.recompute for policy in plan.activations)
    words = ["some blocks" if isinstance(entry, tuple) else entry for entry in entries]
    found = dict.fromkeys(words)
    if len(found) == 1:
        return words[0]
    return ", ".join(f"{word} on {words.count(word)}" for word in found)


def _runs(words: list[str]) -> str:
    """`2x2, whole, whole, whole` in fewer words: `2x2, 3 whole`."""
    counted = [(word, len(list(run))) for word, run in groupby(words)]
    return ", ".join(word if n == 1 else f"{n} {word}" for word, n in counted)
