"""Take an optimizer's step stage by stage, where part of what it works on is put away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from gems.errors import PlanError
from gems.torch.offload.optimizer import States
from gems.torch.offload.stores import Store
from gems.torch.state.param_shards import Shard
from gems.transport.protocol import Done, Work

REST = -1  # in place of a stage: what several stages use


class Updates:
    """The updates of one rank: what each stage's parameters are, and which are made in this step.

    `parts` are what the optimizer steps of each stage. Where weights are put away on the host the
    optimizer's state comes to be there by itself, and there is no `store` for it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parts: Mapping[int, Sequence[nn.Parameter]],
        shards: Mapping[int, Shard],
        store: Store | None,
    ) -> None:
        _reject(optimizer)
        self.optimizer, self.parts = optimizer, parts
        self.shards = shards
        self.states = States(optimizer, store) if store is not None else None
        self.worker = ThreadPoolExecutor(1, "gems-update")  # which takes no thread until it works
        self.made: set[int] = set()
        self.renew()

    def left(self) -> list[int]:
        """The stages that were not updated in this step, in one order everywhere."""
        return [stage for stage in self.parts if stage not in self.made]

    def begin(self, stage: int, factor: float = 1.0) -> tuple[int, Work]:
        """Update a stage beside the work, where weights, gradients and state are on the host; else
        at once. Gives the bytes that were brought back for it, and when it is made."""
        shard = self.shards.get(stage)
        if shard is None or not shard.on_host:
            return self.step(stage, factor), Done()
        self.made.add(stage)
        if not shard.came:
            return 0, Done()

        def work() -> None:
            shard.open()
            self._step(stage, factor)

        return 0, _Made(self.worker.submit(work), shard)

    def step(self, stage: int, factor: float = 1.0) -> int:
        """Update a stage with its gradients times `factor`. Gives the bytes that were brought back
        from where they were put away, for as long as it took."""
        self.made.add(stage)
        shard = self.shards.get(stage)
        away = shard if shard is not None and shard.store is not None else None
        if away is not None and not away.came:
            return 0
        brought = (0 if away is None else away.open()) + self._step(stage, factor)
        if away is not None:
            away.close()
        elif shard is not None:
            shard.forget()
        return brought

    def _step(self, stage: int, factor: float) -> int:
        """The optimizer's step; gives the bytes of state that came back for it."""
        stepped = [p for p in self.parts[stage] if p.grad is not None]
        if self.states is not None:
            self.states.fetch(stepped)
        for p in stepped if factor != 1.0 else ():
            assert p.grad is not None
            p.grad.mul_(factor)
        if stepped:
            with only(self.optimizer, stepped):
                self.optimizer.step()
        for p in stepped:
            p.grad = None
        return self.states.put(stepped) if self.states is not None else 0

    def put(self, stage: int) -> None:
        """Put away what state the optimizer has of a stage."""
        if self.states is not None:
            self.states.put(self.parts[stage])

    def close(self) -> None:
        self.worker.shutdown()

    def renew(self) -> None:
        """The optimizer has another state than was put away: put that away."""
        if self.states is not None:
            self.states.clear()
        for stage in self.parts:
            self.put(stage)


class _Made:
    """An update beside the work. Whoever waits for it lets its gradients go."""

    def __init__(self, future: Future[None], shard: Shard) -> None:
        self.future, self.shard = future, shard

    def wait(self) -> None:
        self.future.result()
        self.shard.close()


@contextmanager
def only(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let an optimizer have no other parameters for a while."""
    wanted = {id(p) for p in parameters}
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params


def _reject(optimizer: Optimizer) -> None:
    """Torch's own treat each parameter by itself, but for one."""
    kind = type(optimizer)
    own = getattr(torch.optim, kind.__name__, None) is kind and kind is not torch.optim.LBFGS
    said = getattr(optimizer, "by_parameter", False) or getattr(optimizer, "by_cell", False)
    if not own and not said:
        raise PlanError(
            f"updates are made stage by stage, and {kind.__qualname__} may look at all parameters "
            "together. Use one of torch.optim (not LBFGS), say of your own that it treats each "
            f"parameter by itself ({kind.__qualname__}.by_parameter = True), or put away no more "
            "than the stash, with optimizer_step='end'"
        )
