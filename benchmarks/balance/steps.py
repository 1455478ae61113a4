"""One rank of a pipeline whose blocks were given out in one way or another."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist

from benchmarks.prediction.pairs import NETWORKS as EVEN
from benchmarks.prediction.pairs import UNEVEN
from gems.plans.plan import Plan
from gems.predict.simulate import virtual
from gems.predict.timeline import Memory
from gems.torch.trainer import Trainer

M = 8
NETWORKS = UNEVEN | {"ResNet-20 v1, 192 px": EVEN["ResNet-20 v1, 192 px"]}
SPLITS = ("equal layers", "time, estimated", "time, measured", "memory")


def _plan(split: str, stages: int) -> Plan:
    balance = {"memory": "memory", "equal layers": "layers"}.get(split, "time")
    return Plan(stages=stages, micro_batches=M, schedule="1f1b", balance=balance)


@cache
def _trainer(network: str, split: str) -> Trainer:
    plan = _plan(split, dist.get_world_size())
    costs = "measure" if split == "time, measured" else "estimate"
    return NETWORKS[network].trainer(plan, costs=costs)


def step(network: str, split: str) -> tuple[float, float, Memory]:
    """Seconds of a step by the wall and in virtual time, and this rank's peak."""
    trainer = _trainer(network, split)
    images, labels = NETWORKS[network].batch()
    dist.barrier()
    trainer.step(images, labels)
    timeline = trainer.timeline()
    paper = virtual(timeline, trainer.schedule, trainer.plan)
    return timeline.seconds, paper.seconds, timeline.peaks[dist.get_rank()]
