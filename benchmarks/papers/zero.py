"""ZeRO (SC'20): bytes of weights, gradients and Adam's state per rank; 7.5 B parameters, 64 ranks.

Published for mixed precision, 2 + 2 + 12 bytes per parameter; ours is float32, 4 + 4 + 8: as many.
"""

from __future__ import annotations

from benchmarks.papers.tables import table
from gems.costs import Cost, Costs
from gems.plans import Plan
from gems.schedule.build import lowered
from gems.simulation import simulate

PARAMETERS, RANKS = 7.5e9, 64
PUBLISHED = {"data parallel": 120.0, "stage 1": 31.4, "stage 2": 16.6, "stage 3": 1.88}  # GB


def held(parameters: float = PARAMETERS, ranks: int = RANKS) -> float:
    """Bytes that each rank of data parallelism holds at the peak, beside activations."""
    plan = Plan(stages=1, data=ranks)
    size = 4 * parameters
    costs = Costs((Cost(stash=0.0, weights=size, gradients=size),))
    timeline = simulate(lowered(plan), plan, costs, state=2.0)
    (peak,) = {peak.total for peak in timeline.peaks}
    return float(peak)


def report() -> str:
    ours = {"data parallel": f"{held() / 1e9:.1f}"}
    rows = [(k, v, ours.get(k, "we do not have it yet")) for k, v in PUBLISHED.items()]
    return table(("", "published GB", "simulated GB"), rows)
