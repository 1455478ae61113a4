"""ZeRO (SC'20): bytes of weights, gradients and Adam's state per rank; 7.5 B parameters, 64 ranks.

Published for mixed precision, 2 + 2 + 12 bytes per parameter. The published figures are what stands
once gradients are summed. While stages run, one more of them is whole (two, of the weights): the
peak is simulated for a model in 100 equal stages, all on each rank, as FSDP's units are.
"""

from __future__ import annotations

from benchmarks.papers.tables import table
from gems.model.costs import Cost, Costs
from gems.plans.plan import Plan
from gems.plans.residency import SHARDABLE, StateResidency
from gems.predict.simulate import simulate
from gems.schedule.build import build
from gems.schedule.lower.passes import lower

PARAMETERS, RANKS, STAGES, STATE = 7.5e9, 64, 100, 6.0
PUBLISHED = {"data parallel": 120.0, "stage 1": 31.4, "stage 2": 16.6, "stage 3": 1.88}  # GB


def held(zero: int = 0, parameters: float = PARAMETERS, ranks: int = RANKS) -> float:
    """Bytes that each rank holds once gradients are summed, beside activations."""
    mine = StateResidency(ranks, SHARDABLE[:zero]).bytes(2 * parameters, 2 * parameters)
    return mine.weights + mine.reduced + STATE * mine.optimizer


def peak(zero: int = 0, stages: int = STAGES) -> float:
    """The most that a rank has in a step, if the model is cut into so many stages of equal size."""
    plan = Plan(stages=stages, ranks=1, schedule="sequential", zero=zero)
    size = 2 * PARAMETERS / stages
    costs = Costs((Cost(activations=0.0, weights=size, gradients=size),) * stages)
    order = lower(build(plan), plan, RANKS)
    timeline = simulate(order, plan, costs, state=STATE, copies=RANKS)
    return float(max(peak.total for peak in timeline.peaks))


def report() -> str:
    rows = [
        (name, published, f"{held(zero) / 1e9:.2f}", f"{peak(zero) / 1e9:.2f}")
        for zero, (name, published) in enumerate(PUBLISHED.items())
    ]
    return table(("", "published GB", "ours GB", f"simulated peak, {STAGES} stages"), rows)
