"""Put what a checkpoint holds back into a trainer, after all of it was read and validated."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gems.torch.checkpoint.json_values import decode, references
from gems.torch.checkpoint.manifest import TensorEntry
from gems.torch.checkpoint.rng_state import restore_rng
from gems.torch.checkpoint.training_state import TrainingState, saved_optimizers
from gems.torch.checkpoint.weight_keys import loadable, weights_of
from gems.torch.state.full_state_dict import set_extra_state
from gems.torch.state.master_weights import HALVES, MASTER
from gems.torch.state.optimizer_state import NamedState, load_named_state, load_param_state
from gems.torch.state.optimizer_step import StageOptimizer
from gems.torch.state.sharded_optimizer import shard_state

log = logging.getLogger(__name__)
Tensor = torch.Tensor
Plain = Mapping[str, Any]  # state.json
Tensors = Mapping[str, Tensor]


@dataclass
class LoadPlan:
    """What this rank loads of a checkpoint. Offloaded weights and their optimizer state are loaded
    stage by stage, after all the rest."""

    weights: dict[str, str]  # keys of tensors, with the names of their weights
    keys: set[str]  # of all tensors that are loaded at once
    training: bool  # or only weights
    by_stage: dict[int, set[str]]  # keys of offloaded tensors
    offloaded: set[str]  # names of their weights


def load_plan(
    trainer: TrainingState, plain: Plain, tensors: Mapping[str, TensorEntry], *, training: bool
) -> LoadPlan:
    weights = loadable(trainer, tensors)
    keys = {*weights, *references(plain["extra"]), *references(plain["modules"])}
    if training:
        keys |= set(_training_keys(trainer, plain, set(weights.values())))
    stages = _offloaded(trainer)
    by_stage: dict[int, set[str]] = {}
    for stage, names in stages.items():
        by_stage[stage] = {key for key, name in weights.items() if name in names}
        for name in names.intersection(weights.values()) if training else ():
            by_stage[stage] |= set(references(plain["state"].get(name)))
        keys -= by_stage[stage]
    return LoadPlan(weights, keys, training, by_stage, set().union(*stages.values()))


def _offloaded(trainer: TrainingState) -> dict[int, set[str]]:
    """For each stage with a host copy or offloaded optimizer state, the names of its weights."""
    shards, steps = trainer.weights.shards, _by_stage(trainer)
    found = {s: set(shard.parameters) for s, shard in shards.items() if shard.has_host_copy}
    if steps is not None and steps.offloaded is not None:
        stepped = {id(p): name for name, p in trainer.weights.stepped().items()}
        for stage, parameters in steps.parameters.items():
            if stage not in shards:
                found[stage] = {stepped[id(p)] for p in parameters}
    return found


def _by_stage(trainer: TrainingState) -> StageOptimizer | None:
    """A single optimizer may be stepped stage by stage."""
    return trainer.optimizers[0].by_stage if trainer.optimizers else None


def _training_keys(trainer: TrainingState, plain: Plain, names: set[str]) -> Iterable[str]:
    for saved in saved_optimizers(plain):
        yield from references(saved["optimizer"])
        yield from references(saved["scheduler"])
    yield from references(own_random(trainer, plain))
    yield from references(list(_own_gradients(trainer, plain).values()))
    for name in names:
        yield from references(plain["state"].get(name))
        yield from references(_saved_older(trainer, plain).get(name))


def _saved_older(trainer: TrainingState, plain: Plain) -> Mapping[str, Any]:
    """The older weight version, which only a trainer with two versions saves and loads."""
    return plain.get("older", {}) if trainer.async_pipeline is not None else {}


def own_random(trainer: TrainingState, plain: Plain) -> Any:
    """This rank's generators; rank 0's, if the number of ranks has changed."""
    same = plain["world"] == trainer.transport.world
    return plain["random"].get(str(trainer.rank) if same else "0", plain["random"]["0"])


def _own_gradients(trainer: TrainingState, plain: Plain) -> dict[str, list[Any]]:
    """The accumulated gradients that this rank loads: its own, if replica groups are as large as
    they were, so that sums come out in the same order; else the first rank of a group loads all."""
    parts: dict[str, dict[int, Any]] = {}
    for key, gradient in plain["gradients"].items():
        name, _, index = key.rpartition("/")
        parts.setdefault(name, {})[int(index)] = gradient
    same = plain["world"] == trainer.transport.world
    found: dict[str, list[Any]] = {}
    for name, by_index in parts.items():
        group = trainer.owned.replica_groups.get(name, ())
        if trainer.rank not in group:
            continue
        mine = group.index(trainer.rank)
        if same and max(by_index) < len(group):
            found[name] = [by_index[mine]] if mine in by_index else []
        elif mine == 0:
            found[name] = [by_index[index] for index in sorted(by_index)]
    return found


def restore(trainer: TrainingState, plain: Plain, plan: LoadPlan, tensors: Tensors) -> Any:
    """Load all that is not offloaded. Returns the user's `extra`."""
    weights = weights_of(trainer)
    with torch.no_grad():
        for key, name in plan.weights.items():
            if name not in plan.offloaded:
                weights[name].copy_(tensors[key])
    for label, value in plain["modules"].items():
        if label in trainer.part.extra_state_owners:
            set_extra_state(trainer.model, label, decode(value, tensors))
    if plan.training:
        _restore_training(trainer, plain, plan, tensors)
    here = {name: tensors[k] for k, name in plan.weights.items() if name not in plan.offloaded}
    for own in trainer.optimizers:
        own.put_masters(here)
    if trainer.async_pipeline is not None:
        saved = _saved_older(trainer, plain) if plan.training else {}
        parameters, loaded = trainer.weights.named_parameters(), set(plan.weights.values())
        trainer.async_pipeline.resume(
            {parameters[n]: decode(x, tensors) for n, x in saved.items() if n in loaded}
        )
    if plan.training or not trainer.optimizers:
        trainer.steps = plain["steps"]
    return decode(plain["extra"], tensors)


def restore_stage(
    trainer: TrainingState, plain: Plain, plan: LoadPlan, stage: int, tensors: Tensors
) -> None:
    """Load what is offloaded of one stage, after all the rest."""
    parameters, stepped = trainer.weights.named_parameters(), trainer.weights.stepped()
    shard = trainer.weights.shards.get(stage)
    for key, name in plan.weights.items():
        if key not in tensors:
            continue
        trainer.weights.put(name, tensors[key])
        if name not in stepped or not trainer.optimizers:
            continue
        (own,) = trainer.optimizers
        mastered = MASTER in own.optimizer.state.get(stepped[name], ())
        if not plan.training:
            own.put_masters({name: tensors[key]})
            continue
        state = decode(plain["state"].get(name, {}), tensors)
        if mastered:
            state[MASTER] = tensors[key].float()
        if state:
            exact = mastered or tensors[key].dtype == parameters[name].dtype
            if shard is not None:
                state = shard_state(state, parameters[name], shard.param_shards[name])
            load_param_state(own.optimizer, stepped[name], state, exact=exact)
    if plan.training and (steps := _by_stage(trainer)) is not None:
        steps.offload(stage)


def _restore_training(
    trainer: TrainingState, plain: Plain, plan: LoadPlan, tensors: Tensors
) -> None:
    _restore_optimizers(trainer, plain, plan, tensors)
    for own, saved in zip(trainer.optimizers, saved_optimizers(plain), strict=True):
        if own.scheduler is not None:
            own.scheduler.load_state_dict(decode(saved["scheduler"]["state"], tensors))
    parameters, loaded = trainer.weights.named_parameters(), set(plan.weights.values())
    for name, gradients in _own_gradients(trainer, plain).items():
        if name in loaded and gradients:
            found = [decode(x, tensors) for x in gradients]
            whole = torch.stack(found).sum(0) if len(found) > 1 else found[0]
            p = parameters[name]
            p.grad = whole.to(p.device, p.dtype)
    trainer.window, trainer.first = plain["window"], plain["first"]
    if trainer.scale is not None and plain["scale"] is not None:
        trainer.scale.value, trainer.scale.good = plain["scale"]["value"], plain["scale"]["good"]
    if trainer.seed != plain["seed"]:
        log.info("random numbers go on with the checkpoint's seed %s", plain["seed"])
        trainer.seed = trainer.runner.draws.seed = plain["seed"]
    restore_rng(decode(own_random(trainer, plain), tensors), trainer.device)


def _in_half(trainer: TrainingState, parameter: Tensor) -> bool:
    """Whether its optimizer state is its master's: fp32, whatever its own type."""
    return trainer.weights.masters and parameter.dtype in HALVES


def _restore_optimizers(
    trainer: TrainingState, plain: Plain, plan: LoadPlan, tensors: Tensors
) -> None:
    parameters, stepped = trainer.weights.named_parameters(), trainer.weights.stepped()
    here = set(plan.weights.values()) - plan.offloaded
    state = {n: decode(x, tensors) for n, x in plain["state"].items() if n in here}
    exact = {
        name
        for key, name in plan.weights.items()
        if name in stepped
        and name in here
        and (tensors[key].dtype == parameters[name].dtype or _in_half(trainer, parameters[name]))
    }
    for shard in trainer.weights.shards.values():
        for name in set(state).intersection(shard.parameters):
            whole, piece = state.pop(name), shard.param_shards.get(name)
            if piece is not None:
                state[name] = shard_state(whole, parameters[name], piece)
    for own, saved in zip(trainer.optimizers, saved_optimizers(plain), strict=True):
        options, mine = saved["optimizer"], {id(p) for p in own.parameters}
        groups, rest = decode(options["groups"], tensors), decode(options["rest"], tensors)
        named = NamedState(groups, saved["names"], state, rest)
        held = {name for name in exact if id(stepped[name]) in mine}
        load_named_state(own.optimizer, stepped, named, held)
        own.add_masters()
        if own.by_stage is not None:
            own.by_stage.reset()
        own.optimizer.zero_grad(set_to_none=True)
