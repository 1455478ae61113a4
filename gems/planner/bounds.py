"""The least bytes that a plan takes, whatever its order comes to."""

from __future__ import annotations

from collections.abc import Iterable

from gems.costs import Costs
from gems.planner.underway import held, kept
from gems.planner.wish import Wish
from gems.plans import BIDIRECTIONAL, ENDLESS, Plan
from gems.zero import needed, share


def least_bytes(plan: Plan, staged: Costs, wish: Wish) -> tuple[float, float]:
    """What the fullest rank needs for what its order keeps: of one stage, where it has several; and
    what the one with the largest stash needs for that alone."""
    keeps, inputs = kept(plan), held(plan)
    most = largest = 0.0
    stored, in_turn = bool(plan.put_away("stash")), plan.schedule in BIDIRECTIONAL
    for on in plan.stages_on[: plan.ranks]:
        stash = max(
            (1.0 if stored or in_turn else keeps[s] / len(on)) * staged[s].stash
            + staged[s].surge
            + max(inputs[s] - 1, 0) * (not stored) * staged.received(s)
            for s in on
        )
        most = max(most, _state(plan, on, staged, wish) + stash)
        largest = max(largest, stash)
    return most, largest


def standing(plan: Plan, staged: Costs, wish: Wish) -> float:
    """Bytes of weights, gradients and optimizer on the rank that has most, and its workspace."""
    return max(
        _state(plan, on, staged, wish) + max(staged[s].workspace for s in on)
        for on in plan.stages_on[: plan.ranks]
    )


def _state(plan: Plan, on: Iterable[int], staged: Costs, wish: Wish) -> float:
    """Weights, gradients and what the optimizer keeps, of the stages of a rank."""
    on = tuple(on)
    shares = [share(staged[s], plan.zero, plan.sharers(s), away=plan.away) for s in on]
    twice = sum(staged[s].gradients for s in on) if plan.schedule == ENDLESS else 0.0
    return needed(shares, wish.state) + twice
