"""The points: a name, and the plan that it stands for. One more technique is one more line.

All points of a chart train one network on the same images in one step, by Adam. BatchNorm goes by
its running statistics, so that streaming can take part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gems.plans.plan import Plan

ALONE = {"ranks": 1, "schedule": "sequential"}
APART = {**ALONE, "balance": "memory"}
M = 8  # images of a step on four ranks, one to a micro-batch
COPIES = {"stages": 16, "ranks": 1, "schedule": "sequential", "data": 4, "micro_batches": M // 4}
LAST = ("inputs", "inputs", "inputs", "all")  # in 1F1B the last stage has nothing to gain


@dataclass(frozen=True)
class Chart:
    """Points by their family. `memory` is the budget of those with `recompute="auto"`,
    in parts of what the first point takes by the simulator."""

    title: str
    ranks: int
    images: int
    side: int
    families: Mapping[str, Mapping[str, Plan]]
    memory: Mapping[str, float] = field(default_factory=dict)

    @property
    def plans(self) -> dict[str, Plan]:
        return {name: plan for family in self.families.values() for name, plan in family.items()}

    def family(self, name: str) -> str:
        return next(family for family, plans in self.families.items() if name in plans)


CHARTS = {
    "one-rank": Chart(
        "ResNet-110-v2 on one rank, one image",
        ranks=1,
        images=1,
        side=192,
        families={
            "keeps all": {"keep all": Plan(**ALONE)},
            "recomputes": {
                "auto, 3/4": Plan(**ALONE, recompute="auto"),
                "auto, 1/2": Plan(**ALONE, recompute="auto"),
                "auto, 3/8": Plan(**ALONE, recompute="auto"),
                "inputs of 3 stages": Plan(**ALONE, stages=3, recompute="always"),
                "inputs of 6 stages": Plan(**ALONE, stages=6, recompute="always"),
                "inputs of 12 stages": Plan(**ALONE, stages=12, recompute="always"),
            },
            "streams": {
                "stream 2x2, 3 stages": Plan(**ALONE, stages=4, stream=((2, 2),) * 3),
                "stream 4x4, 3 stages": Plan(**ALONE, stages=4, stream=((4, 4),) * 3),
                "stream 4x4, 6 stages": Plan(**ALONE, stages=7, stream=((4, 4),) * 6),
                "stream 8x8, 6 stages": Plan(**ALONE, stages=7, stream=((8, 8),) * 6),
                "stream 4x4, all": Plan(**ALONE, stream="4x4"),
                "stream 4x4, all, carry": Plan(**ALONE, stream="4x4", stream_halo="carry"),
                "stream 12x1, all": Plan(**ALONE, stream="12x1"),
                "stream 12x1, all, carry": Plan(**ALONE, stream="12x1", stream_halo="carry"),
            },
            "streams, values on disk": {
                "stream 4x4, 6 stages, values": Plan(
                    **ALONE, stages=6, stream=((4, 4),) * 6, offload="values:disk"
                ),
                "stream 8x8, 6 stages, values": Plan(
                    **ALONE, stages=6, stream=((8, 8),) * 6, offload="values:disk"
                ),
                "stream 12x1, carry, halos": Plan(
                    **ALONE, stream="12x1", stream_halo="carry", offload="values:disk"
                ),
            },
            "puts away, on disk": {
                "stash of 16 stages": Plan(**APART, stages=16, offload="activations:disk"),
                "stash of 64 stages": Plan(**APART, stages=64, offload="activations:disk"),
                "inputs of 64 stages": Plan(
                    **APART, stages=64, recompute="always", offload="activations:disk"
                ),
                "stash and weights of 64": Plan(
                    **APART, stages=64, offload="activations:disk,weights:disk"
                ),
                "l2l, 16 stages": Plan(
                    ranks=1, schedule="l2l", stages=16, balance="memory", offload="weights:disk"
                ),
            },
        },
        memory={"auto, 3/4": 3 / 4, "auto, 1/2": 1 / 2, "auto, 3/8": 3 / 8},
    ),
    "four-ranks": Chart(
        f"ResNet-110-v2 on four ranks, {M} images",
        ranks=4,
        images=M,
        side=64,
        families={
            "pipeline": {
                "gpipe": Plan(stages=4, schedule="gpipe", micro_batches=M),
                "1f1b": Plan(stages=4, schedule="1f1b", micro_batches=M),
                "1f1b, memory balanced": Plan(stages=4, balance="memory", micro_batches=M),
                "interleaved": Plan(stages=8, ranks=4, schedule="interleaved", micro_batches=M),
                "zero-bubble": Plan(stages=4, schedule="zero-bubble", micro_batches=M),
            },
            "pipeline, recomputes": {
                "gpipe, inputs": Plan(
                    stages=4, schedule="gpipe", micro_batches=M, recompute="always"
                ),
                "gpipe, except-last": Plan(
                    stages=4, schedule="gpipe", micro_batches=M, recompute="except_last"
                ),
                "1f1b, inputs": Plan(stages=4, micro_batches=M, recompute=LAST),
                "1f1b, auto, 2/5": Plan(stages=4, micro_batches=M, recompute="auto"),
                "1f1b, auto, 1/5": Plan(stages=4, micro_batches=M, recompute="auto"),
            },
            "both ways": {
                "gems": Plan(stages=4, schedule="gems", micro_batches=M),
                "gems, inputs": Plan(
                    stages=4, schedule="gems", micro_batches=M, recompute="always"
                ),
                "gems-zb": Plan(stages=4, schedule="gems-zb", micro_batches=M),
                "gems, zero 2": Plan(stages=4, schedule="gems", micro_batches=M, zero=2),
                "auto, both ways": Plan(
                    stages=4, schedule="auto", bidirectional=True, max_in_flight=4, micro_batches=M
                ),
            },
            "copies": {
                "copies": Plan(**COPIES),
                "copies, zero 1": Plan(**COPIES, zero=1),
                "copies, zero 2": Plan(**COPIES, zero=2),
                "copies, zero 3": Plan(**COPIES, zero=3),
                "copies, zero 3, inputs": Plan(**COPIES, zero=3, recompute="always"),
            },
            "two versions": {
                "2bw": Plan(stages=4, schedule="2bw", micro_batches=M),
                "2bw, inputs": Plan(stages=4, schedule="2bw", micro_batches=M, recompute=LAST),
            },
            "puts away, on disk": {
                "gpipe, stash": Plan(
                    stages=4, schedule="gpipe", micro_batches=M, offload="activations:disk"
                ),
                "gems, idle weights": Plan(
                    stages=4, schedule="gems", micro_batches=M, offload="weights:disk"
                ),
                "copies, zero 3, weights": Plan(**COPIES, zero=3, offload="weights:disk"),
            },
            "tiles": {
                "tiles 2x2": Plan(schedule="sequential", spatial=((2, 2),), micro_batches=M),
                "tiles 2x2, auto, 1/8": Plan(
                    schedule="sequential", spatial=((2, 2),), micro_batches=M, recompute="auto"
                ),
                "tiles 2x2, stream 2x2": Plan(
                    schedule="sequential", spatial="2x2", stream="2x2", micro_batches=M
                ),
                "tiles 2x2, stream, values": Plan(
                    stages=3,
                    ranks=4,
                    placement=((0, 1, 2, 3),) * 3,
                    schedule="sequential",
                    spatial=((2, 2),) * 3,
                    stream=((2, 2),) * 3,
                    offload="values:disk",
                    micro_batches=M,
                ),
            },
        },
        memory={
            "1f1b, auto, 2/5": 2 / 5,
            "1f1b, auto, 1/5": 1 / 5,
            "tiles 2x2, auto, 1/8": 1 / 8,
        },
    ),
}
