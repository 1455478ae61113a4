"""All that training goes on from, by plain names: taken from a trainer, and put back into one.

Sections of tensors, and who writes them:

    model       weights, by the labels of the plain state dict   one holder of each
    buffers     those that a state dict leaves out, and          one holder of each
                trainable parameters of the loss
    optimizer   its state, weight by weight                      the same holder
    gradients   of an update under way, when several calls of    every holder its own part: they
                `step` make one                                  are summed at the end of the window
    older       with 2BW, the weights before the newest          as the model's
    modules     what `get_extra_state` gave                      the first rank that runs the module
    random      states of generators                             rank 0, and who differs from it
    shared      groups, scheduler, the user's `extra`            rank 0
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.errors import CheckpointError, problems
from gems.torch.agree import together
from gems.torch.checkpoint.json_values import decode, encode, references, same
from gems.torch.checkpoint.manifest import Place
from gems.torch.checkpoint.rng_state import noted, put_back
from gems.torch.state.optimizer_state import Named, by_name, give_back, give_state, kind
from gems.torch.state.ownership import named_weights, set_extra_state
from gems.torch.state.released import form_of
from gems.torch.state.sharded_optimizer import cut
from gems.torch.state.sharded_optimizer import joined as joined_states
from gems.torch.state.sparse_gradients import dense
from gems.transport.encoding import sendable

if TYPE_CHECKING:
    from gems.torch.trainer import Trainer

log = logging.getLogger(__name__)
Tensor = torch.Tensor
AFRESH = "or load with strict=False, which takes what fits and leaves the rest as it is"


@dataclass
class Snapshot:
    """`tensors` are those that this rank writes; `plain` is all the rest, of all ranks."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    away: dict[str, str] = field(default_factory=dict)  # keys of weights that are put away

    def present(self, trainer: Trainer) -> dict[str, Callable[[], Tensor]]:
        """How to get those of the tensors that are put away."""
        weights, states = trainer.weights, trainer.updates and trainer.updates.states
        found = {key: partial(weights.copy, name) for key, name in self.away.items()}
        for key, tensor in self.tensors.items():
            if states is not None and states.has(tensor):
                found[key] = partial(states.copy, tensor)
        return found


# --- taking ---------------------------------------------------------------------------------------


def take(trainer: Trainer, extra: Any) -> Snapshot:
    """What this rank writes, and what all of them know. All ranks call it."""
    taken = Snapshot()
    shared = _shared_state(trainer)
    parts = together(trainer.transport, "saving", lambda: _own_part(trainer, taken, extra, shared))
    for rank, part in enumerate(parts):
        if not same(part["options"], parts[0]["options"]):
            raise CheckpointError(
                f"the optimizer of rank {rank} has other groups or options than rank 0's; all "
                "ranks must make the same groups, even if some are empty, and change options alike"
            )
    names = zip(*(part["names"] for part in parts), strict=True)
    taken.plain = {
        **parts[0]["shared"],
        "names": [sorted(set().union(*each)) for each in names],
    } | {
        section: {key: x for part in parts for key, x in part[section].items()}
        for section in ("state", "gradients", "older", "modules")
    }
    taken.plain["random"] = _random(trainer, parts, taken)
    return taken


def _shared_state(trainer: Trainer) -> dict[str, Any]:
    """The optimizer's state of parameters that are shared out, of those that this rank writes."""
    if trainer.optimizer is None or not trainer.plan.zero:
        return {}
    mine = {name for name, rank in writers(trainer).items() if rank == trainer.rank}
    shards = [shard for shard in trainer.weights.shards.values() if shard.level]
    states = trainer.updates and trainer.updates.states
    get = states.present if states else lambda x: x
    return joined_states(trainer.optimizer, shards, trainer.transport, mine, get)


def _own_part(
    trainer: Trainer, taken: Snapshot, extra: Any, shared: Mapping[str, Any]
) -> dict[str, Any]:
    put, rank = taken.tensors, trainer.rank
    weights = weights_of(trainer)
    writer = writers(trainer)
    labels = labelled(trainer)
    first: dict[str, str] = {}
    for label, name in labels.items():
        if name in first:
            taken.aliases[f"model.{label}"] = f"model.{first[name]}"
            continue
        first[name] = label
        if writer[name] == rank:
            put[f"model.{label}"] = weights[name]
            if name in trainer.weights.offloaded:
                taken.away[f"model.{label}"] = name
    for name in unlisted(trainer):
        if writer[name] == rank:
            put[f"buffers.{name}"] = weights[name]
    part: dict[str, Any] = {"state": {}, "names": [], "options": None}
    part["gradients"] = _window(trainer, put)
    part["older"] = {
        name: encode(x, f"older.{name}", put)
        for name, x in _older(trainer).items()
        if writer[name] == rank
    }
    part["modules"] = _modules(trainer, put)
    part["random"] = noted(trainer.device)
    mine: dict[str, Tensor] = put if rank == 0 else {}  # what all have, rank 0 writes
    part["shared"] = _shared(trainer, extra if rank == 0 else None, mine)
    if trainer.optimizer is not None:
        named = by_name(trainer.optimizer, trainer._stepped())
        shards = [shard for shard in trainer.weights.shards.values() if shard.level]
        pieces = {n for shard in shards for n in shard.pieces}
        states = {n: x for n, x in named.state.items() if n not in pieces} | dict(shared)
        part["names"] = named.names
        part["options"] = encode(named.groups, "shared.groups", mine)
        part["shared"]["optimizer"] = {
            "kind": kind(trainer.optimizer),
            "groups": part["options"],
            "rest": encode(named.rest, "shared.optimizer", mine),
        }
        part["state"] = {
            name: encode(_forms(x), f"optimizer.{name}", put)
            for name, x in states.items()
            if writer[name] == rank
        }
    return part


def _forms(state: Any) -> Any:
    """A state of which some tensors may be released: `present` gives their numbers."""
    return pytree.tree_map(lambda x: form_of(x) if isinstance(x, Tensor) else x, state)


def _shared(trainer: Trainer, extra: Any, put: dict[str, Tensor]) -> dict[str, Any]:
    scheduler, scale = trainer.scheduler, trainer.scale
    return {
        "steps": trainer.steps,
        "window": trainer.window,
        "first": trainer.first,
        "trained": [],
        "seed": trainer.seed,
        "world": trainer.transport.world,
        "scale": scale and {"value": scale.value, "good": scale.good},
        "optimizer": None,
        "scheduler": scheduler
        and {
            "kind": kind(scheduler),
            "state": encode(scheduler.state_dict(), "shared.scheduler", put),
        },
        "extra": encode(extra, "shared.extra", put),
    }


def _window(trainer: Trainer, put: dict[str, Tensor]) -> dict[str, Any]:
    """This rank's part of the gradients so far, by weight and place among its holders."""
    found: dict[str, Any] = {}
    if not trainer.window:
        return found
    for name, p in trainer._named_parameters():
        if p.grad is not None:
            place = trainer.owned.replica_groups[name].index(trainer.rank)
            key = f"{name}/{place}"
            found[key] = encode(dense(p.grad), f"gradients.{key}", put)
    return found


def _older(trainer: Trainer) -> dict[str, Tensor]:
    """The version before the newest, of the weights that this rank has."""
    if trainer.endless is None:
        return {}
    older = trainer.endless.batches.versions.older()
    return {name: older[p] for name, p in trainer._named_parameters() if p in older}


def _modules(trainer: Trainer, put: dict[str, Tensor]) -> dict[str, Any]:
    mine = [label for label, rank in trainer.stats_owners.items() if rank == trainer.rank]
    state = trainer.model.state_dict(keep_vars=True) if mine else {}
    return {label: encode(state[label], f"modules.{label}", put) for label in mine}


def _random(trainer: Trainer, parts: list[dict[str, Any]], taken: Snapshot) -> dict[str, Any]:
    """Generators by rank, of rank 0 and of those that are elsewhere in theirs."""
    found: dict[str, Any] = {}
    seen = [_digest(part["random"]) for part in parts]
    for rank, part in enumerate(parts):
        if rank == 0 or seen[rank] != seen[0]:
            put = taken.tensors if rank == trainer.rank else {}
            found[str(rank)] = encode(part["random"], f"random.{rank}", put)
    return found


def _digest(states: Any) -> str:
    tensors: dict[str, Tensor] = {}
    whole = hashlib.sha256(repr(encode(states, "", tensors)).encode())
    for _, tensor in sorted(tensors.items()):
        whole.update(tensor.cpu().numpy().tobytes())
    return whole.hexdigest()


def labelled(trainer: Trainer) -> dict[str, str]:
    """The labels of the plain state dict that are weights, with the first name of each."""
    labels = trainer.model.state_dict(keep_vars=True)
    return {
        label: trainer.first_name[label] for label in labels if label not in trainer.stats_owners
    }


def unlisted(trainer: Trainer) -> list[str]:
    """Buffers that the state dict leaves out, and what the loss has."""
    listed = set(labelled(trainer).values())
    return [name for name in trainer.owned.replica_groups if name not in listed]


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Every parameter and buffer by every name it has, of the loss as well."""
    return named_weights(trainer.model) | trainer.loss_weights


def writers(trainer: Trainer) -> dict[str, int]:
    """For each weight, the holder that writes it: each as little as can be."""
    weights, load = weights_of(trainer), dict.fromkeys(range(trainer.transport.world), 0)
    found: dict[str, int] = {}
    for name in sorted(trainer.owned.replica_groups, key=lambda n: (-weights[n].nbytes, n)):
        found[name] = min(trainer.owned.replica_groups[name], key=lambda rank: (load[rank], rank))
        load[found[name]] += weights[name].nbytes
    return found


# --- comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unfit:
    """Why a checkpoint is not of this trainer's model, and why its training cannot go on here."""

    weights: tuple[str, ...] = ()
    training: tuple[str, ...] = ()


sendable(Unfit)


def unfit(trainer: Trainer, plain: Mapping[str, Any], tensors: Mapping[str, Place]) -> Unfit:
    """As this rank sees it: it knows the groups of its own weights only."""
    training = _unfit_training(trainer, plain, tensors)
    return Unfit(tuple(_unfit_weights(trainer, tensors)), tuple(training))


def joined(seen: Sequence[Unfit]) -> Unfit:
    """As all ranks see it."""
    return Unfit(
        tuple(dict.fromkeys(why for each in seen for why in each.weights)),
        tuple(dict.fromkeys(why for each in seen for why in each.training)),
    )


def reject(found: Unfit) -> None:
    if whys := (*found.weights, *found.training):
        raise CheckpointError(
            problems(
                "this checkpoint does not fit the trainer; give the trainer the model, optimizer "
                f"and scheduler that it was saved with, {AFRESH}:",
                whys,
            )
        )


def _unfit_weights(trainer: Trainer, tensors: Mapping[str, Place]) -> list[str]:
    weights, found = weights_of(trainer), []
    expected = {f"model.{label}": weights[name] for label, name in labelled(trainer).items()}
    for key, tensor in expected.items():
        label = key.removeprefix("model.")
        if (place := tensors.get(key)) is None:
            found.append(f"missing: {label}, {form(tensor)}")
        elif form(place) != form(tensor):
            found.append(f"{label} is {form(place)} in the checkpoint, {form(tensor)} in the model")
    found += [
        f"unexpected: {key.removeprefix('model.')}, {form(place)}"
        for key, place in tensors.items()
        if key.startswith("model.") and key not in expected
    ]
    for name in unlisted(trainer):
        place = tensors.get(f"buffers.{name}")
        if place is None and name in trainer.loss_weights:
            found.append(f"missing: {name}, {form(weights[name])}")
        if place is not None and form(place) != form(weights[name]):
            found.append(f"{name} is {form(place)} in the checkpoint, {form(weights[name])} here")
    return found


def form(tensor: Tensor | Place) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{'×'.join(map(str, tensor.shape)) or 'one number'} of {dtype}"


def _unfit_training(
    trainer: Trainer, plain: Mapping[str, Any], tensors: Mapping[str, Place]
) -> list[str]:
    """A trainer without an optimizer only predicts: it takes the weights of any checkpoint."""
    if trainer.optimizer is None:
        return []
    found = []
    for what, mine in (("optimizer", trainer.optimizer), ("scheduler", trainer.scheduler)):
        here, there = mine and kind(mine), plain[what] and plain[what]["kind"]
        if here != there:
            found.append(
                f"the {what} is {there or 'absent'} in the checkpoint, {here or 'absent'} "
                "in the trainer"
            )
    if not found:
        found += _unfit_groups(trainer, plain["names"], tensors)
    return found


def _unfit_groups(
    trainer: Trainer, saved: list[list[str]], tensors: Mapping[str, Place]
) -> list[str]:
    assert trainer.optimizer is not None
    groups = trainer.optimizer.param_groups
    if len(groups) != len(saved):
        return [f"the optimizer has {len(saved)} groups in the checkpoint, {len(groups)} here"]
    name_of = {id(p): name for name, p in trainer._stepped().items()}
    group_of = {name: i for i, names in enumerate(saved) for name in names}
    return [
        f"{name} is in group {i} of the optimizer here, in group {group_of.get(name, 'none')} in "
        "the checkpoint"
        for i, group in enumerate(groups)
        for p in group["params"]
        if (name := name_of.get(id(p))) is not None
        and f"model.{name}" in tensors
        and group_of.get(name) != i
    ]


# --- putting back ---------------------------------------------------------------------------------


@dataclass
class Part:
    """What this rank takes of a checkpoint: weights by key, and whether training goes on."""

    weights: dict[str, str]  # key of the checkpoint -> first name
    keys: set[str]
    training: bool
    apart: dict[int, set[str]]  # keys of what is put away at once, stage by stage
    names: set[str]  # of these weights


def part_of(
    trainer: Trainer, plain: Mapping[str, Any], tensors: Mapping[str, Place], found: Unfit
) -> Part:
    """What this rank reads, of what fits."""
    held, weights = trainer.weights.held, weights_of(trainer)
    wanted = {f"model.{label}": name for label, name in labelled(trainer).items()}
    wanted |= {f"buffers.{name}": name for name in unlisted(trainer)}
    mine = {
        key: name
        for key, name in wanted.items()
        if name in held and key in tensors and tensors[key].shape == tuple(weights[name].shape)
    }
    mine = {key: name for name, key in {n: k for k, n in mine.items()}.items()}  # each once
    training = trainer.optimizer is not None and not found.training
    keys = {*mine, *references(plain["extra"]), *references(plain["modules"])}
    if training:
        keys |= set(_training_keys(trainer, plain, set(mine.values())))
    stages = _apart(trainer)
    apart: dict[int, set[str]] = {}
    for stage, names in stages.items():
        apart[stage] = {key for key, name in mine.items() if name in names}
        for name in names.intersection(mine.values()) if training else ():
            apart[stage] |= set(references(plain["state"].get(name)))
        keys -= apart[stage]
    return Part(mine, keys, training, apart, set().union(*stages.values()))


def _apart(trainer: Trainer) -> dict[int, set[str]]:
    """For each stage of which something is put away just here, the names of its weights."""
    shards = trainer.weights.shards
    found = {s: set(shard.parameters) for s, shard in shards.items() if shard.at_home}
    if trainer.updates is not None and trainer.updates.states is not None:
        stepped = {id(p): name for name, p in trainer._stepped().items()}
        for stage, parts in trainer.updates.parts.items():
            if stage not in shards:
                found[stage] = {stepped[id(p)] for p in parts}
    return found


def _training_keys(trainer: Trainer, plain: Mapping[str, Any], held: set[str]) -> Iterable[str]:
    yield from references(plain["optimizer"])
    yield from references(plain["scheduler"])
    yield from references(own_random(trainer, plain))
    for name in held:
        yield from references(plain["state"].get(name))
        yield from references(_saved_older(trainer, plain).get(name))
    for gradient in _own_gradients(trainer, plain).values():
        yield from references(gradient)


def _saved_older(trainer: Trainer, plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """What only a trainer with two versions takes, and only such a one has saved."""
    return plain.get("older", {}) if trainer.endless is not None else {}


def own_random(trainer: Trainer, plain: Mapping[str, Any]) -> Any:
    """This rank's generators, or rank 0's where the ranks are others now."""
    alike = plain["world"] == trainer.transport.world
    return plain["random"].get(str(trainer.rank) if alike else "0", plain["random"]["0"])


def _own_gradients(trainer: Trainer, plain: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The parts of the window's gradients that this rank takes: its own where the holders are as
    many as they were, so that sums come out in the same order; else the first holder takes all."""
    parts: dict[str, dict[int, Any]] = {}
    for key, gradient in plain["gradients"].items():
        name, _, place = key.rpartition("/")
        parts.setdefault(name, {})[int(place)] = gradient
    alike = plain["world"] == trainer.transport.world
    found: dict[str, list[Any]] = {}
    for name, by_place in parts.items():
        holders = trainer.owned.replica_groups.get(name, ())
        if trainer.rank not in holders:
            continue
        mine = holders.index(trainer.rank)
        if alike and max(by_place) < len(holders):
            found[name] = [by_place[mine]] if mine in by_place else []
        elif mine == 0:
            found[name] = [by_place[place] for place in sorted(by_place)]
    return found


def put(
    trainer: Trainer, plain: Mapping[str, Any], part: Part, tensors: Mapping[str, Tensor]
) -> Any:
    """Take it over, from tensors that were all read. Gives the user's `extra`."""
    weights = weights_of(trainer)
    with torch.no_grad():
        for key, name in part.weights.items():
            if name not in part.names:
                weights[name].copy_(tensors[key])
    for label, value in plain["modules"].items():
        if label in trainer.stats_owners:
            set_extra_state(trainer.model, label, decode(value, tensors))
    if part.training:
        _put_training(trainer, plain, part, tensors)
    if trainer.endless is not None:
        saved = _saved_older(trainer, plain) if part.training else {}
        parameters, taken = dict(trainer._named_parameters()), set(part.weights.values())
        trainer.endless.resume(
            {parameters[n]: decode(x, tensors) for n, x in saved.items() if n in taken}
        )
    if part.training or trainer.optimizer is None:
        trainer.steps = plain["steps"]
    return decode(plain["extra"], tensors)


def put_stage(
    trainer: Trainer,
    plain: Mapping[str, Any],
    part: Part,
    stage: int,
    tensors: Mapping[str, Tensor],
) -> None:
    """Take over what is put away of one stage, after all the rest."""
    parameters, stepped = dict(trainer._named_parameters()), trainer._stepped()
    shard = trainer.weights.shards.get(stage)
    for key, name in part.weights.items():
        if key not in tensors:
            continue
        trainer.weights.put(name, tensors[key])
        saved = plain["state"].get(name) if part.training and name in stepped else None
        if saved is not None:
            assert trainer.optimizer is not None
            state, exact = decode(saved, tensors), tensors[key].dtype == parameters[name].dtype
            if shard is not None:
                state = cut(state, parameters[name], shard.pieces[name])
            give_state(trainer.optimizer, stepped[name], state, exact=exact)
    if trainer.updates is not None and part.training:
        trainer.updates.put(stage)


def _put_training(
    trainer: Trainer, plain: Mapping[str, Any], part: Part, tensors: Mapping[str, Tensor]
) -> None:
    assert trainer.optimizer is not None
    parameters: dict[str, nn.Parameter] = dict(trainer._named_parameters())
    stepped = trainer._stepped()
    saved, taken = plain["optimizer"], set(part.weights.values())
    here = taken - part.names
    state = {n: decode(x, tensors) for n, x in plain["state"].items() if n in here}
    groups, rest = decode(saved["groups"], tensors), decode(saved["rest"], tensors)
    fine = {
        n
        for k, n in part.weights.items()
        if n in stepped and n in here and tensors[k].dtype == parameters[n].dtype
    }
    for shard in trainer.weights.shards.values():
        for name in set(state).intersection(shard.parameters):
            whole, piece = state.pop(name), shard.pieces.get(name)
            if piece is not None:
                state[name] = cut(whole, parameters[name], piece)
    give_back(trainer.optimizer, stepped, Named(groups, plain["names"], state, rest), fine)
    if trainer.updates is not None:
        trainer.updates.renew()
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(decode(plain["scheduler"]["state"], tensors))
    trainer.optimizer.zero_grad(set_to_none=True)
    for name, gradients in _own_gradients(trainer, plain).items():
        if name in taken and gradients:
            found = [decode(x, tensors) for x in gradients]
            whole = torch.stack(found).sum(0) if len(found) > 1 else found[0]
            parameters[name].grad = whole.to(parameters[name].device)
    trainer.window, trainer.first = plain["window"], plain["first"]
    if trainer.scale is not None and plain["scale"] is not None:
        trainer.scale.value, trainer.scale.good = plain["scale"]["value"], plain["scale"]["good"]
    if trainer.seed != plain["seed"]:
        log.info("random numbers go on with the checkpoint's seed %s", plain["seed"])
        trainer.seed = trainer.runner.draws.seed = plain["seed"]
    put_back(decode(own_random(trainer, plain), tensors), trainer.device)
