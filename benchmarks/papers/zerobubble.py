"""Zero Bubble Pipeline Parallelism (arXiv 2401.10241): bubble rates, from its measured seconds.

Its table 6 gives T_F, T_B, T_W and T_comm in ms, its table 5 the rates: the part of the longest
stage's time that is not `m (T_F + T_B + T_W)`. Every transformer layer is a chunk of 1F1B-I.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.tables import table
from gems.model.costs import Cost, Costs
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.schedule.build import lowered


@dataclass(frozen=True)
class Setting:
    model: str
    p: int
    m: int
    f: float
    b: float  # input gradient
    w: float
    comm: float
    chunks: int
    one_f_one_b: float  # published rates from here on
    interleaved: float
    h1: float  # and ZB-1p, the paper's search with memory for p micro-batches: it found the same
    searched_2p: float


SETTINGS = (
    Setting("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 3, 0.2431, 0.1055, 0.1585, 0.0433),
    Setting("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 3, 0.1985, 0.0818, 0.1242, 0.0039),
    Setting("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 3, 0.1240, 0.0443, 0.0674, 0.0026),
    Setting("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 4, 0.2347, 0.0808, 0.1323, 0.0029),
    Setting("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 4, 0.1898, 0.0628, 0.1045, 0.0022),
    Setting("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 4, 0.1091, 0.0320, 0.0554, 0.0010),
    Setting("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 3, 0.2552, 0.1104, 0.1397, 0.0066),
    Setting("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 3, 0.2082, 0.0852, 0.1088, 0.0054),
    Setting("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 3, 0.1251, 0.0445, 0.0576, 0.0028),
    Setting("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 2, 0.2646, 0.1493, 0.1421, 0.0038),
    Setting("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, 2, 0.2168, 0.1164, 0.1106, 0.0029),
    Setting("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, 2, 0.1352, 0.0624, 0.0594, 0.0018),
)  # fmt: skip


def rate(setting: Setting, schedule: str, chunks: int = 1, max_in_flight: int = 0) -> float:
    """The simulated bubble rate."""
    s = setting
    plan = Plan(
        stages=s.p * chunks,
        ranks=s.p,
        micro_batches=s.m,
        schedule=schedule,
        max_in_flight=max_in_flight,
    )
    cost = Cost(f=s.f / chunks, i=s.b / chunks, w=s.w / chunks)
    costs = Costs((cost,) * plan.depth, latency=s.comm)
    events = simulate(lowered(plan, costs), plan, costs).events
    spans: dict[int, tuple[float, float]] = {}
    for e in events:
        start, stop = spans.get(e.rank, (e.start, e.stop))
        spans[e.rank] = min(start, e.start), max(stop, e.stop)
    longest = max(stop - start for start, stop in spans.values())
    return 1 - s.m * (s.f + s.b + s.w) / longest


def report() -> str:
    rows = [
        [
            *(s.model, s.p, s.m, f"{s.one_f_one_b:.4f}", f"{rate(s, '1f1b'):.4f}"),
            *(f"{s.h1:.4f}", f"{rate(s, 'zero-bubble'):.4f}"),
            *(f"{s.interleaved:.4f}", f"{rate(s, 'interleaved', s.chunks):.4f}"),
        ]
        for s in SETTINGS
    ]
    head = ("model", "p", "m", "1F1B", "simulated", "ZB-H1", "simulated", "1F1B-I", "simulated")
    searched = [
        [
            *(s.model, s.p, s.m, f"{s.h1:.4f}", f"{rate(s, 'auto', max_in_flight=s.p):.4f}"),
            *(f"{s.searched_2p:.4f}", f"{rate(s, 'auto', max_in_flight=2 * s.p):.4f}"),
        ]
        for s in SETTINGS
        if s.p == 8 and s.m < 64
    ]
    also = ("model", "p", "m", "ZB-1p", "our `auto`, p stashes", "ZB-2p", "our `auto`, 2p stashes")
    return table(head, rows) + "\n\n" + table(also, searched)
