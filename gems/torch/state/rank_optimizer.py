"""An optimizer of the caller's on one rank: it steps what this rank owns of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gems.errors import GemsError, PlanError
from gems.torch.offload.stores import Store
from gems.torch.state.master_weights import MASTER, add_masters, step_some
from gems.torch.state.optimizer_step import TIED, StageOptimizer
from gems.torch.state.rank_weights import RankWeights
from gems.torch.state.sharded_optimizer import shard_optimizer
from gems.torch.state.sparse_gradients import embeddings, reject_rows

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


class RankOptimizer:
    """A torch optimizer, its learning-rate scheduler if it has one, and, where something is
    offloaded or steps are eager, its steps stage by stage."""

    def __init__(
        self,
        make: MakeOptimizer | Optimizer,
        scheduler: MakeScheduler | None,
        weights: RankWeights,
        device: torch.device,
        store: Callable[[str], Store | None],
    ) -> None:
        """`make` gets all parameters of this rank; an optimizer that exists already keeps those of
        its parameters that this rank has."""
        if isinstance(make, Optimizer):
            self.optimizer = make
            _keep_held(make, weights)
        else:
            mine = list(weights.parameters_here) or [nn.Parameter(torch.zeros(0, device=device))]
            self.optimizer = make(mine)
        _reject_sparse(self.optimizer, weights)
        shard_optimizer(self.optimizer, weights.shards.values())
        self.weights = weights
        self.by_stage = _by_stage(self.optimizer, weights, store, device)
        self.add_masters()
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        self.compared: list[str] = []  # hyper-parameters that must be the same on all ranks
        self.may_step = False
        self.optimizer.register_step_pre_hook(self._reject_own_step)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What it steps on this rank: parameters, or the shards of them that the rank owns."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self, factor: float) -> None:
        """Step all parameters at once, with gradients times `factor`."""
        if self.weights.masters:
            stepped = [p for p in self.parameters if p.grad is not None]
            add_masters(self.optimizer, stepped)  # of what was frozen so far
            step_some(self.optimizer, stepped, factor)
            return
        for p in self.parameters if factor != 1.0 else ():
            if p.grad is not None:
                p.grad.mul_(factor)
        self.optimizer.step()

    # --- master weights -------------------------------------------------------------------------

    def add_masters(self) -> None:
        """Give parameters in half that have no master one; stage by stage, those of a plan that
        offloads get theirs from `StageOptimizer.reset`."""
        if self.weights.masters and self.by_stage is None:
            add_masters(self.optimizer, self.parameters)

    def put_masters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the masters of weights, by name, to whole values in full precision."""
        stepped, shards = self.weights.stepped(), self.weights.param_shards()
        offloaded = self.by_stage and self.by_stage.offloaded
        for name, value in values.items() if self.weights.masters else ():
            p = stepped.get(name)
            if p is None or MASTER not in self.optimizer.state.get(p, ()):
                continue
            if offloaded:
                offloaded.load([p])
            piece = shards.get(name)
            self.optimizer.state[p][MASTER].copy_(value if piece is None else piece.of(value))
            if offloaded:
                offloaded.offload([p])

    def begin(self) -> None:
        """A batch begins: no stage was stepped with its gradients."""
        if self.by_stage is not None:
            self.by_stage.stepped.clear()

    def close(self) -> None:
        if self.by_stage is not None:
            self.by_stage.close()

    def step_scheduler(self, loss: float) -> None:
        """After an optimizer step; a scheduler that looks at a metric is given the loss."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Its session may step it inside; the caller's own `optimizer.step()` raises."""
        self.may_step = True
        try:
            yield
        finally:
            self.may_step = False

    def _reject_own_step(self, *_: Any) -> None:
        if not self.may_step:
            raise GemsError(
                "optimizer.step() would leave out what other ranks hold; call optimizer_step() of "
                "the session, or step() of the trainer, that this optimizer belongs to, on all "
                "ranks"
            )


def _keep_held(optimizer: Optimizer, weights: RankWeights) -> None:
    here, known = {id(p) for p in weights.parameters_here}, set(map(id, weights.model.parameters()))
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in known and id(p) not in here:
                raise PlanError(
                    f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the "
                    "session's; make it of session.model.parameters(), after the session"
                )
        group["params"] = [p for p in group["params"] if id(p) in here]
        group.pop("param_names", None)  # of parameters that may not be here, or only in part
    for p in [p for p in optimizer.state if id(p) not in here]:
        del optimizer.state[p]


def _reject_sparse(optimizer: Optimizer, weights: RankWeights) -> None:
    shards = {n for shard in weights.shards.values() for n in shard.parameters}
    groups = weights.owned.replica_groups.items()
    alone = {name for name, ranks in groups if ranks == (weights.rank,)}
    summed = [n for n in embeddings(weights.model) if n in shards or n not in alone]
    reject_rows(optimizer, summed)


def _by_stage(
    optimizer: Optimizer,
    weights: RankWeights,
    store: Callable[[str], Store | None],
    device: torch.device,
) -> StageOptimizer | None:
    """Stage by stage, where something is offloaded or steps are eager."""
    plan, residency = weights.plan, weights.plan.residency[0]
    if not residency.steps_by_stage:
        return None
    place = weights.host
    if place is None:
        place = store(residency.optimizer_offload)
        weights.stores += [] if place is None else [place]
    elif residency.steps_on_host:
        place = None  # the state comes to be there by itself
    stepped, stages = weights.stepped(), plan.stages_on[weights.rank]
    parts = {s: [stepped[n] for n in weights.owned.only(s) if n in stepped] for s in stages}
    alone = {id(p) for mine in parts.values() for p in mine}
    parts[TIED] = [p for p in stepped.values() if id(p) not in alone]
    masters = weights.masters
    return StageOptimizer(optimizer, parts, weights.shards, place, device, masters=masters)


def reject_shared(optimizers: Sequence[RankOptimizer], weights: RankWeights) -> None:
    """Several optimizers must step different parameters, all at once."""
    if len(optimizers) < 2:
        return
    if optimizers[0].by_stage is not None:
        raise PlanError(
            "this plan takes optimizer steps stage by stage (offload, or optimizer_step='eager'), "
            "which one optimizer must do; give the session one with several parameter groups"
        )
    names = {id(p): name for name, p in weights.stepped().items()}
    seen: set[int] = set()
    for p in (p for own in optimizers for p in own.parameters if id(p) in names):
        if id(p) in seen:
            raise PlanError(f"{names[id(p)]} is in two optimizers; give each parameter to one")
        seen.add(id(p))
