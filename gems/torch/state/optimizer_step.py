"""Optimizer steps stage by stage, where part of the state is offloaded or steps are eager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import nn
from torch.optim import Optimizer

from gems.errors import PlanError
from gems.torch.offload.optimizer import OffloadedState
from gems.torch.offload.stores import Store
from gems.torch.offload.worker import worker
from gems.torch.state.by_parameter import treats_each_alone
from gems.torch.state.master_weights import add_masters, step_some
from gems.torch.state.param_shards import StageShard
from gems.transport.protocol import Done, Work

TIED = -1  # in place of a stage: parameters that several stages use


class StageOptimizer:
    """Steps one rank's optimizer stage by stage, and knows which stages it has stepped.

    `parameters` are what it steps of each stage. Optimizer state of weights that are offloaded to
    the host is made there, and needs no `store`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        shards: Mapping[int, StageShard],
        store: Store | None,
        device: torch.device,
        *,
        masters: bool = False,
    ) -> None:
        """`masters`: of half parameters the optimizer steps fp32 copies."""
        _reject(optimizer)
        self.optimizer, self.parameters, self.shards = optimizer, parameters, shards
        self.masters = masters
        self.offloaded = OffloadedState(optimizer, store) if store is not None else None
        self.worker = worker("gems-update", device)
        self.stepped: set[int] = set()
        self.reset()

    def unstepped(self) -> list[int]:
        """The stages without an optimizer step so far, in one order everywhere."""
        return [stage for stage in self.parameters if stage not in self.stepped]

    def step_async(self, stage: int, factor: float = 1.0) -> tuple[int, Work]:
        """Step a stage in a thread, if weights, gradients and state are on the host; else at once.
        Returns the bytes that were loaded for it, and its handle."""
        shard = self.shards.get(stage)
        if shard is None or not shard.on_host:
            return self.step(stage, factor), Done()
        self.stepped.add(stage)
        if not shard.with_grad:
            return 0, Done()

        def work() -> None:
            shard.load()
            self._step(stage, factor)

        return 0, _StepWork(self.worker.submit(work), shard)

    def step(self, stage: int, factor: float = 1.0) -> int:
        """Step a stage with its gradients times `factor`. Returns the bytes that were loaded for as
        long as it took."""
        self.stepped.add(stage)
        shard = self.shards.get(stage)
        if shard is None:
            return self._step(stage, factor)
        if shard.store is None:
            loaded = self._step(stage, factor)
            shard.clear_grads()
            return loaded
        if not shard.with_grad:
            return 0
        loaded = shard.load() + self._step(stage, factor)
        shard.offload()
        return loaded

    def _step(self, stage: int, factor: float) -> int:
        """The optimizer's step; returns the bytes of state that were loaded for it."""
        stepped = [p for p in self.parameters[stage] if p.grad is not None]
        if self.offloaded is not None:
            self.offloaded.load(stepped)
        if self.masters:
            add_masters(self.optimizer, stepped)  # of what was frozen so far
        if stepped:
            step_some(self.optimizer, stepped, factor)
        for p in stepped:
            p.grad = None
        return self.offloaded.offload(stepped) if self.offloaded is not None else 0

    def offload(self, stage: int) -> None:
        """Offload the optimizer state of a stage."""
        if self.offloaded is not None:
            self.offloaded.offload(self.parameters[stage])

    def close(self) -> None:
        self.worker.shutdown()

    def reset(self) -> None:
        """The optimizer was given another state: offload that instead."""
        if self.offloaded is not None:
            self.offloaded.clear()
        for stage in self.parameters:
            if self.masters:
                self._add_masters(stage)
            self.offload(stage)

    def _add_masters(self, stage: int) -> None:
        shard = self.shards.get(stage)
        if shard is not None and shard.store is not None:
            shard.load()
            add_masters(self.optimizer, self.parameters[stage])
            shard.offload()
        else:
            add_masters(self.optimizer, self.parameters[stage])


class _StepWork:
    """An optimizer step in a thread. Whoever waits for it offloads its result."""

    def __init__(self, future: Future[None], shard: StageShard) -> None:
        self.future, self.shard = future, shard

    def wait(self) -> None:
        self.future.result()
        self.shard.offload()


def _reject(optimizer: Optimizer) -> None:
    if not treats_each_alone(optimizer):
        kind = type(optimizer)
        raise PlanError(
            f"optimizer steps are taken stage by stage, and {kind.__qualname__} may need all "
            "parameters at once. Use one of torch.optim (not LBFGS), declare that your own treats "
            f"each parameter by itself ({kind.__qualname__}.by_parameter = True), or offload "
            "activations only, with optimizer_step='end'"
        )
