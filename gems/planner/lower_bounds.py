"""The least bytes that a plan takes, whatever its order comes to."""

from __future__ import annotations

from collections.abc import Iterable

from gems.model.costs import Costs
from gems.planner.in_flight import held, in_flight
from gems.planner.request import Wish
from gems.plans.plan import ASYNCHRONOUS, BIDIRECTIONAL, Plan
from gems.predict.state_bytes import needed, share


def least_bytes(plan: Plan, staged: Costs, wish: Wish) -> tuple[float, float]:
    """What the fullest rank needs for what its order keeps, of one stage where it has several; and
    what the one that needs most beside its state needs for that alone.

    However little waits, a stage's forward leaves what it keeps and what it gives. Gradients come
    with backward, a stage's after those of later ones, if they are not always there. The workspace
    of a rank's stages comes on top of its fullest moment.
    """
    counts, inputs = in_flight(plan), held(plan)
    most = largest = 0.0
    stored, in_turn = bool(plan.offloaded_to("activations")), plan.schedule in BIDIRECTIONAL
    for on in plan.stages_on[: plan.ranks]:
        shares = {
            s: share(staged[s], plan.zero, plan.shard_count(s), away=plan.offloaded_state)
            for s in on
        }
        always = sum(x.weights + wish.state * x.optimizer for x in shares.values())
        if plan.schedule == ASYNCHRONOUS:
            always += sum(staged[s].gradients for s in on)
        lasting = {s for s in on if _lasts(plan, s)}
        always += sum(shares[s].gradients for s in lasting)
        workspace = max(staged[s].workspace for s in on)
        later = 0.0  # gradients of stages behind
        for s in sorted(on, reverse=True):
            waiting = (1.0 if stored or in_turn else counts[s] / len(on)) * staged[s].activations
            waiting += staged[s].temporary
            waiting += max(inputs[s] - 1, 0) * (not stored) * staged.received(s)
            here = staged.received(s) if plan.recomputes(s, 0) else staged[s].activations
            beside = max(waiting, here + staged.given(s))
            mine = shares[s]
            if s not in lasting:
                later += mine.gradients
                most = max(most, always + mine.gathered + later + workspace)
                later += mine.summed - mine.gradients
            most = max(most, always + mine.gathered + beside + workspace)
            largest = max(largest, beside + workspace)
    return most, largest


def _lasts(plan: Plan, stage: int) -> bool:
    """Whether a stage's gradients have their place from the start."""
    several = len(plan.replica_groups[stage]) > 1
    return several and not plan.frees_gradients and plan.schedule != ASYNCHRONOUS


def resident(plan: Plan, staged: Costs, wish: Wish) -> float:
    """Bytes of weights, gradients and optimizer on the rank that has most, and its workspace."""
    return max(
        _state(plan, on, staged, wish) + max(staged[s].workspace for s in on)
        for on in plan.stages_on[: plan.ranks]
    )


def _state(plan: Plan, on: Iterable[int], staged: Costs, wish: Wish) -> float:
    """Weights, gradients and what the optimizer keeps, of the stages of a rank."""
    on = tuple(on)
    shares = [
        share(staged[s], plan.zero, plan.shard_count(s), away=plan.offloaded_state) for s in on
    ]
    twice = sum(staged[s].gradients for s in on) if plan.schedule == ASYNCHRONOUS else 0.0
    return needed(shares, wish.state) + twice
