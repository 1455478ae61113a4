"""The weights and gradients that one rank holds: whole, sharded among replicas, or offloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from gems.distributed.ownership import Ownership
from gems.plans.plan import Plan
from gems.predict.timeline import Memory
from gems.torch.offload.stores import Store
from gems.torch.state.deferred_init import DeferredInit
from gems.torch.state.flat_params import ParamShard
from gems.torch.state.grad_bucket import BucketMemory
from gems.torch.state.param_shards import StageShard
from gems.torch.state.sparse_gradients import square_norm
from gems.torch.tensors.released import form_of
from gems.torch.tensors.storage import storage_of
from gems.transport.protocol import Transport, Work

Tensor = torch.Tensor


class RankWeights:
    """What this rank holds of the model and of a loss with parameters, by name."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        owned: Ownership,
        transport: Transport,
        *,
        loss_weights: Mapping[str, nn.Parameter] | None = None,
        deferred: DeferredInit | None = None,
        host: Store | None = None,
        masters: bool = False,
    ) -> None:
        """`deferred` initialises weights; `host` stores those that are offloaded. `masters`: of
        weights in half optimizers step fp32 copies."""
        self.model, self.plan, self.owned, self.transport = model, plan, owned, transport
        self.host, self.rank, self.masters = host, transport.rank, masters
        self.stages = plan.stages_on[self.rank]
        self.held = owned.on(self.rank)
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        named |= loss_weights or {}
        self.by_name = {name: tensor for name, tensor in named.items() if name in self.held}
        self.parameters_here = [t for t in self.by_name.values() if isinstance(t, nn.Parameter)]
        self.stores = [] if host is None else [host]  # of weights and of the optimizer's state
        self.optimizers: list[torch.optim.Optimizer] = []
        self.needs_norm = False
        self.accumulated: set[int] = set()  # parameters trained since the last optimizer step
        self.accumulation_over = True
        early = not (plan.residency[0].frees_gradients or plan.asynchronous)
        self.bucket_memory = {stage: BucketMemory() for stage in self.stages if early}
        self.shards = self._shard(deferred)
        self.in_shards = {
            id(p) for shard in self.shards.values() for p in shard.parameters.values()
        }
        alone = [p for p in self.parameters_here if id(p) not in self.in_shards]
        self._alone = [(p, p.nbytes) for p in alone]
        self.bytes = size([t for t in self.by_name.values() if id(t) not in self.in_shards])
        self.storages = {storage_of(t) for t in self.by_name.values()}

    def _shard(self, deferred: DeferredInit | None) -> dict[int, StageShard]:
        """The stages of this rank whose state is sharded or offloaded. Stage by stage, so that
        only one stage's new weights are whole in memory at a time."""
        found: dict[int, StageShard] = {}
        for stage in self.stages:
            if deferred is not None:
                deferred.materialize(self.owned.only(stage))
            mine = {n: p for n in self.owned.only(stage) if (p := self._trainable(n)) is not None}
            level = self.plan.residency[stage].zero
            if mine and (level or self.host is not None):
                group = self.plan.replica_groups[stage] if level else (self.rank,)
                found[stage] = StageShard(mine, group, self.rank, level, self.host)
        if deferred is not None:
            deferred.materialize()
        return found

    # --- parameters ---------------------------------------------------------------------------

    def begin(self, *, update: bool) -> None:
        """A training step begins; `update`: an optimizer step follows it."""
        if self.accumulation_over:
            self.accumulated.clear()
        self.accumulation_over = update
        self.accumulated.update(id(p) for p in self.parameters_here if p.requires_grad)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All that this rank has, of the model and of a loss with parameters."""
        return {n: t for n, t in self.by_name.items() if isinstance(t, nn.Parameter)}

    def stepped(self) -> dict[str, nn.Parameter]:
        """What optimizers step on this rank: parameters, or the shards of them that it owns."""
        shards = self.shards.values()
        sharded = {name for shard in shards for name in shard.parameters}
        alone = {n: p for n, p in self.named_parameters().items() if n not in sharded}
        return alone | {n: x.param for n, x in self.param_shards().items()}

    def param_shards(self) -> dict[str, ParamShard]:
        """By name, this rank's part of each parameter that is sharded or offloaded."""
        shards = self.shards.values()
        return {name: piece for shard in shards for name, piece in shard.param_shards.items()}

    def clear_gradients(self) -> None:
        for p in (*self.parameters_here, *self.stepped().values()):
            p.grad = None
        for shard in self.shards.values():
            shard.clear_grads()

    def release_memory(self) -> None:
        """Give up memory that the next step would begin with."""
        for memory in self.bucket_memory.values():
            memory.held.clear()

    def square_norms(self) -> list[Tensor]:
        """Of the gradients that this rank is the first to have, so that each counts once: numbers
        to be summed."""
        shards = self.shards.values()
        counted = {n for shard in shards if shard.level for n in shard.param_shards} | {
            n for n, ranks in self.owned.replica_groups.items() if ranks[0] == self.rank
        }
        stepped = [p.grad for name, p in self.stepped().items() if name in counted]
        here = [gradient for gradient in stepped if gradient is not None]
        freed = [item for shard in shards for item in shard.grad_squares.items()]
        found = [square for name, square in freed if name in counted]
        return [*found, square_norm(here)] if here else found

    def release_leaked_views(self) -> None:
        for shard in self.shards.values():
            shard.release_leaked_views()

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """The trainable parameters that this stage alone uses, in the same order on every rank."""
        mine = map(self._trainable, self.owned.only(stage))
        return [p for p in mine if p is not None]

    def _trainable(self, name: str) -> nn.Parameter | None:
        p = self.by_name[name]
        return p if isinstance(p, nn.Parameter) and self.trains(p) else None

    def trains(self, p: nn.Parameter) -> bool:
        """Whether a parameter may have a gradient: also one that was frozen since the last
        optimizer step, whose accumulated gradient plain training applies all the same."""
        return p.requires_grad or id(p) in self.accumulated

    # --- shards -------------------------------------------------------------------------------

    def unshard(self, stage: int) -> tuple[list[Tensor], list[Work]]:
        """Buffers to all-gather over the shard group, and copies from the host to wait for."""
        if (shard := self.shards.get(stage)) is None:
            return [], []
        handles = shard.unshard()
        if shard.level < 3:
            return [], handles
        for handle in handles:  # other ranks receive our shard from this memory
            handle.wait()
        return shard.flat_weights, []

    def reshard(self, stage: int) -> None:
        if stage in self.shards:
            self.shards[stage].reshard()

    @contextmanager
    def unsharded(self, *, fetched: bool = True) -> Iterator[None]:
        """All sharded weights of this rank, whole and writable. A collective: all ranks must enter,
        unless the present values do not matter and need not be `fetched`. Weights offloaded on
        this rank alone are read and written one by one: `copy` and `put`."""
        apart = [shard for shard in self.shards.values() if shard.level == 3]
        for handle in [handle for shard in apart for handle in shard.unshard()]:
            handle.wait()
        pairs = [(memory, shard.ranks) for shard in apart for memory in shard.flat_weights]
        for handle in [self.transport.all_gather(*pair) for pair in pairs if fetched]:
            handle.wait()
        try:
            yield
            for shard in apart:
                shard.write_back()
        finally:
            for shard in apart:
                shard.reshard()

    @cached_property
    def offloaded(self) -> dict[str, StageShard]:
        """By name, the weights whose only copy is the host copy of this rank."""
        away = [shard for shard in self.shards.values() if shard.has_host_copy]
        return {name: shard for shard in away for name in shard.parameters}

    def copy(self, name: str) -> Tensor:
        """A weight, or a copy of it if it is offloaded."""
        shard = self.offloaded.get(name)
        return self._now(name) if shard is None else shard.copy(name)

    def put(self, name: str, value: Tensor) -> None:
        """Set a weight, wherever it is stored."""
        if (shard := self.offloaded.get(name)) is not None:
            shard.put(name, value)
        else:
            with torch.no_grad():
                self._now(name).copy_(value)

    def _now(self, name: str) -> Tensor:
        """A weight on this device: a parameter of the model or of the loss, or a buffer, which
        forward may have replaced."""
        own = self.by_name[name]
        if isinstance(own, nn.Parameter):
            return own
        tensors, key = entry(self.model, name)
        return tensors[key]

    # --- memory -------------------------------------------------------------------------------

    def resident_memory(self) -> Memory:
        gradients = sum(n for p, n in self._alone if p.grad is not None)
        weights = self.bytes
        for shard in self.shards.values():
            gradients += shard.gradient_bytes
            weights += shard.weight_bytes
        state = self.optimizer_state()
        away = sum(store.used for store in self.stores)
        if self.plan.residency[0].steps_on_host:  # the optimizer's state is made there
            away, state = away + size(state), []
        here = size([x for x in state if x.is_sparse or x.untyped_storage().nbytes()])
        return Memory(weights=weights, gradients=gradients, optimizer=here, offloaded=away)

    def optimizer_state(self) -> list[Tensor]:
        """The tensors of the optimizers' state, wherever they are stored; offloaded ones, which
        are asked after each action, without the class that guards them."""
        # Lists: a concurrent optimizer step may be adding entries.
        state = [entry for own in self.optimizers for entry in list(own.state.values())]
        found = [x for entry in state for x in list(entry.values()) if isinstance(x, Tensor)]
        return [form_of(x) for x in found]


def size(tensors: Sequence[Tensor]) -> int:
    """Bytes."""
    return sum(x.numel() * x.element_size() for x in tensors)


def entry(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dict of a module that holds a weight, and its key there."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    own: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    return own, key
