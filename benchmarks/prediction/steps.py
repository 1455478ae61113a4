"""One pair on one rank: what a step should take, and steps that were taken."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist

from benchmarks.prediction.pairs import NETWORKS, plan
from gems.predict.simulate import simulate
from gems.predict.timeline import Timeline
from gems.torch.trainer import Trainer


@cache
def _trainer(network: str, planned: str) -> Trainer:
    return NETWORKS[network].trainer(plan(planned), costs="measure")


def predicted(network: str, planned: str) -> Timeline:
    trainer = _trainer(network, planned)
    return simulate(trainer.schedule, trainer.plan, trainer.costs, trainer.machine, state=1.0)


def measured(network: str, planned: str) -> Timeline:
    """One step; all ranks have the whole timeline."""
    trainer = _trainer(network, planned)
    images, labels = NETWORKS[network].batch()
    if dist.get_world_size() > 1:
        dist.barrier()
    trainer.step(images, labels)
    return trainer.timeline()
