"""What a checkpoint holds, taken from a trainer. Sections of tensors, and who writes them:

model       weights, by the labels of the plain state dict;  one rank of the replica group
            of those that are stored in half, the fp32
            masters
buffers     non-persistent buffers, and parameters of the    the same
            loss
optimizer   its state, weight by weight                      the same
gradients   accumulated so far, when several calls of        every rank its own: they are summed
            `step` make one update                           before the optimizer step
older       with 2BW, the weights before the newest          as the model's
modules     results of `get_extra_state`                     the first rank that runs the module
random      states of generators                             rank 0, and who differs from it
shared      groups, scheduler, the user's `extra`            rank 0
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gems.distributed.agree import on_all_ranks
from gems.errors import CheckpointError
from gems.torch.checkpoint.json_values import encode, same
from gems.torch.checkpoint.rng_state import rng_states
from gems.torch.checkpoint.training_state import TrainingState, saved_optimizers
from gems.torch.checkpoint.weight_keys import buffer_keys, model_keys, weights_of, writers
from gems.torch.offload.optimizer import OffloadedState
from gems.torch.state.master_weights import HALVES, MASTER
from gems.torch.state.optimizer_state import NamedState, named_state, type_name
from gems.torch.state.param_shards import StageShard
from gems.torch.state.rank_optimizer import RankOptimizer
from gems.torch.state.sharded_optimizer import full_state
from gems.torch.state.sparse_gradients import dense
from gems.torch.tensors.released import form_of

Tensor = torch.Tensor


@dataclass
class Snapshot:
    """`tensors` are those that this rank writes; `plain` is all the rest, of all ranks."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # further keys of tied weights
    plain: dict[str, Any] = field(default_factory=dict)
    offloaded: dict[str, str] = field(default_factory=dict)  # keys of offloaded weights

    def present(self, trainer: TrainingState) -> dict[str, Callable[[], Tensor]]:
        """How to get those of the tensors that are offloaded."""
        found = {key: partial(trainer.weights.copy, name) for key, name in self.offloaded.items()}
        if (states := _offloaded_state(trainer)) is not None:
            for key, tensor in self.tensors.items():
                if states.has(tensor):
                    found[key] = partial(states.copy, tensor)
        return found


def take(trainer: TrainingState, extra: Any) -> Snapshot:
    """What this rank writes, and what all of them know. All ranks call it."""
    taken = Snapshot()
    full = _full_state(trainer)
    parts = on_all_ranks(
        trainer.transport, "saving", lambda: _own_part(trainer, taken, extra, full)
    )
    for rank, part in enumerate(parts):
        if not same(part["options"], parts[0]["options"]):
            raise CheckpointError(
                f"the optimizer of rank {rank} has other groups or options than rank 0's; all "
                "ranks must make the same groups, even if some are empty, and change options alike"
            )
    for number, saved in enumerate(saved_optimizers(parts[0]["shared"])):
        groups = zip(*(part["names"][number] for part in parts), strict=True)
        saved["names"] = [sorted(set().union(*each)) for each in groups]
    taken.plain = parts[0]["shared"] | {
        section: {key: x for part in parts for key, x in part[section].items()}
        for section in ("state", "gradients", "older", "modules")
    }
    taken.plain["random"] = _random(trainer, parts, taken)
    return taken


def _offloaded_state(trainer: TrainingState) -> OffloadedState | None:
    """Only a single optimizer is stepped stage by stage, and may have offloaded state."""
    steps = trainer.optimizers[0].by_stage if trainer.optimizers else None
    return steps and steps.offloaded


def _sharded(trainer: TrainingState) -> list[StageShard]:
    return [shard for shard in trainer.weights.shards.values() if shard.level]


def _full_state(trainer: TrainingState) -> dict[str, Any]:
    """The optimizer state of sharded parameters, of those that this rank writes."""
    if not trainer.plan.residency[0].sharded:
        return {}
    mine = {name for name, rank in writers(trainer).items() if rank == trainer.rank}
    states = _offloaded_state(trainer)
    present = states.present if states else lambda x: x
    return {
        name: state
        for own in trainer.optimizers
        for name, state in full_state(
            own.optimizer, _sharded(trainer), trainer.transport, mine, present
        ).items()
    }


def _own_part(
    trainer: TrainingState, taken: Snapshot, extra: Any, full: Mapping[str, Any]
) -> dict[str, Any]:
    tensors, rank = taken.tensors, trainer.rank
    mine = {name for name, writer in writers(trainer).items() if writer == rank}
    _take_weights(trainer, taken, mine)
    shared: dict[str, Tensor] = tensors if rank == 0 else {}  # what all ranks have, rank 0 writes
    part: dict[str, Any] = {
        "state": {},
        "names": [],
        "options": [],
        "gradients": _gradients(trainer, tensors),
        "older": {
            name: encode(x, f"older.{name}", tensors)
            for name, x in _older(trainer).items()
            if name in mine
        },
        "modules": _modules(trainer, tensors),
        "random": rng_states(trainer.device),
        "shared": _shared(trainer, extra if rank == 0 else None, shared),
    }
    sharded = {name for shard in _sharded(trainer) for name in shard.param_shards}
    for number, own in enumerate(trainer.optimizers):
        named = named_state(own.optimizer, trainer.weights.stepped())
        at = f"shared.{number}" if number else "shared"
        saved = _optimizer(own, named, at, shared)
        part["names"].append(named.names)
        part["options"].append(saved["optimizer"]["groups"])
        if number:
            part["shared"].setdefault("others", []).append(saved)
        else:
            part["shared"] |= saved
        here = {n: x for n, x in named.state.items() if n in mine and n not in sharded}
        _take_state(trainer, taken, part["state"], here)
    _take_state(trainer, taken, part["state"], {n: x for n, x in full.items() if n in mine})
    _widen(trainer, taken)
    return part


def _take_state(
    trainer: TrainingState, taken: Snapshot, states: dict[str, Any], given: Mapping[str, Any]
) -> None:
    """Optimizer state of weights; masters in place of the weights."""
    key_of = {name: key for key, name in reversed(model_keys(trainer).items())}
    for name, state in given.items():
        state = _forms(state)
        if (master := state.pop(MASTER, None)) is not None:
            key = key_of[name]
            taken.tensors[key] = master
            taken.offloaded.pop(key, None)
        if state:
            states[name] = encode(state, f"optimizer.{name}", taken.tensors)


def _optimizer(
    own: RankOptimizer, named: NamedState, at: str, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """What all ranks have of an optimizer and its scheduler; tensors get keys that begin so."""
    scheduler = own.scheduler
    return {
        "optimizer": {
            "kind": type_name(own.optimizer),
            "groups": encode(named.groups, f"{at}.groups", tensors),
            "rest": encode(named.rest, f"{at}.optimizer", tensors),
        },
        "scheduler": scheduler
        and {
            "kind": type_name(scheduler),
            "state": encode(scheduler.state_dict(), f"{at}.scheduler", tensors),
        },
    }


def _widen(trainer: TrainingState, taken: Snapshot) -> None:
    """What is stored in half and has no master, being frozen, becomes fp32: a checkpoint loads
    whatever weights are stored in."""
    for key in model_keys(trainer) if trainer.in_half else ():
        own = taken.tensors.get(key)
        if own is not None and own.dtype in HALVES and key not in taken.offloaded:
            taken.tensors[key] = own.detach().float()


def _take_weights(trainer: TrainingState, taken: Snapshot, mine: set[str]) -> None:
    weights, first = weights_of(trainer), dict[str, str]()
    for key, name in (model_keys(trainer) | buffer_keys(trainer)).items():
        if name in first:
            taken.aliases[key] = first[name]
            continue
        first[name] = key
        if name in mine:
            taken.tensors[key] = weights[name]
            if name in trainer.weights.offloaded:
                taken.offloaded[key] = name


def _forms(state: Any) -> Any:
    """A state of which some tensors may be released: `present` returns their numbers."""
    return pytree.tree_map(lambda x: form_of(x) if isinstance(x, Tensor) else x, state)


def _shared(trainer: TrainingState, extra: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    scale = trainer.scale
    return {
        "steps": trainer.steps,
        "window": trainer.window,
        "first": trainer.first,
        "trained": [],
        "seed": trainer.seed,
        "world": trainer.transport.world,
        "scale": scale and {"value": scale.value, "good": scale.good},
        "optimizer": None,
        "scheduler": None,
        "names": [],
        "extra": encode(extra, "shared.extra", tensors),
    }


def _gradients(trainer: TrainingState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """This rank's accumulated gradients, by weight and index in its replica group."""
    found: dict[str, Any] = {}
    if not trainer.window:
        return found
    for name, p in trainer.weights.named_parameters().items():
        if p.grad is not None:
            key = f"{name}/{trainer.owned.replica_groups[name].index(trainer.rank)}"
            found[key] = encode(dense(p.grad), f"gradients.{key}", tensors)
    return found


def _older(trainer: TrainingState) -> dict[str, Tensor]:
    """The version before the newest, of the weights that this rank has."""
    if trainer.async_pipeline is None:
        return {}
    older = trainer.async_pipeline.batches.versions.older()
    return {name: older[p] for name, p in trainer.weights.named_parameters().items() if p in older}


def _modules(trainer: TrainingState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    mine = [
        label for label, rank in trainer.part.extra_state_owners.items() if rank == trainer.rank
    ]
    state = trainer.model.state_dict(keep_vars=True) if mine else {}
    return {label: encode(state[label], f"modules.{label}", tensors) for label in mine}


def _random(trainer: TrainingState, parts: list[dict[str, Any]], taken: Snapshot) -> dict[str, Any]:
    """States of generators by rank: rank 0's, and those that differ from them."""
    found: dict[str, Any] = {}
    digests = [_digest(part["random"]) for part in parts]
    for rank, part in enumerate(parts):
        if rank == 0 or digests[rank] != digests[0]:
            tensors = taken.tensors if rank == trainer.rank else {}
            found[str(rank)] = encode(part["random"], f"random.{rank}", tensors)
    return found


def _digest(states: Any) -> str:
    tensors: dict[str, Tensor] = {}
    whole = hashlib.sha256(repr(encode(states, "", tensors)).encode())
    for _, tensor in sorted(tensors.items()):
        whole.update(tensor.cpu().numpy().tobytes())
    return whole.hexdigest()
