"""The least bytes that a plan takes, whatever its order comes to."""

from __future__ import annotations

from collections.abc import Iterable

from gems.model.costs import Costs
from gems.planner.in_flight import held, in_flight
from gems.planner.request import Request
from gems.plans.plan import Plan
from gems.plans.residency import resident_bytes


def least_bytes(plan: Plan, costs: Costs, request: Request) -> tuple[float, float]:
    """What the fullest rank needs for what its order keeps, of one stage where it has several; and
    what the one that needs most beside its state needs for that alone.

    However little waits, a stage's forward leaves what it keeps and what it gives. Gradients come
    with backward, a stage's after those of later ones, if they are not always there. The workspace
    of a rank's stages comes on top of its fullest moment.
    """
    counts, inputs = in_flight(plan), held(plan)
    most = largest = 0.0
    stored, in_turn = bool(plan.activations[0].offload), plan.alternates
    for on in plan.stages_in_copy:
        held_bytes = {s: plan.residency[s].bytes(costs[s].weights, costs[s].gradients) for s in on}
        always = sum(x.weights + x.older + request.state * x.optimizer for x in held_bytes.values())
        lasting = {s for s in on if _lasts(plan, s)}
        always += sum(held_bytes[s].gradients for s in lasting)
        workspace = max(costs[s].workspace for s in on)
        later = 0.0  # gradients of stages behind
        for s in sorted(on, reverse=True):
            waiting = (1.0 if stored or in_turn else counts[s] / len(on)) * costs[s].activations
            waiting += costs[s].temporary
            waiting += max(inputs[s] - 1, 0) * (not stored) * costs.received(s)
            here = costs.received(s) if plan.recomputes(s, 0) else costs[s].activations
            beside = max(waiting, here + costs.given(s))
            mine = held_bytes[s]
            if s not in lasting:
                later += mine.gradients
                most = max(most, always + mine.unsharded + later + workspace)
                later += mine.reduced - mine.gradients
            most = max(most, always + mine.unsharded + beside + workspace)
            largest = max(largest, beside + workspace)
    return most, largest


def _lasts(plan: Plan, stage: int) -> bool:
    """Whether a stage's gradients have their place from the start."""
    several = len(plan.replica_groups[stage]) > 1
    return several and not plan.residency[stage].frees_gradients and not plan.asynchronous


def resident(plan: Plan, costs: Costs, request: Request) -> float:
    """Bytes of weights, gradients and optimizer on the rank that has most, and its workspace."""
    return max(
        _state(plan, on, costs, request) + max(costs[s].workspace for s in on)
        for on in plan.stages_in_copy
    )


def _state(plan: Plan, on: Iterable[int], costs: Costs, request: Request) -> float:
    """Weights, gradients and what the optimizer keeps, of the stages of a rank."""
    pairs = ((plan.residency[s], costs[s]) for s in on)
    return resident_bytes((r.bytes(c.weights, c.gradients) for r, c in pairs), request.state)
