"""What a checkpoint must hold before anything of a trainer changes: it may be forged.

`validate_state` looks at state.json by itself, `validate_training` at what of it this trainer would
take, and `validate_random` at states of generators, which only generators can judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from gems.errors import CheckpointError, problems, short
from gems.torch.checkpoint.json_values import DECODE, references
from gems.torch.checkpoint.manifest import DTYPES, REMEDY, TensorEntry
from gems.torch.checkpoint.rng_state import validate_rng
from gems.torch.checkpoint.training_state import TrainingState, saved_optimizers
from gems.torch.checkpoint.weight_keys import loadable, weights_of
from gems.torch.state.sharded_optimizer import ELEMENTWISE

Tensor = torch.Tensor
Tensors = Mapping[str, TensorEntry]
MOST = 2**53  # of counts: what a float holds exactly


def _reject(found: Iterable[str]) -> None:
    if found := list(found):
        raise CheckpointError(
            problems(f"this checkpoint is damaged, or not one that GEMS wrote; {REMEDY}:", found)
        )


# --- by itself ------------------------------------------------------------------------------------


def validate_state(plain: Any, tensors: Tensors) -> None:
    """Raise unless `plain` has all fields of state.json, and refers to tensors that there are."""
    if not isinstance(plain, dict):
        _reject([f"state.json holds a {type(plain).__name__}, not an object"])
    missing = [f"state.json has no {name}" for name in FIELDS if name not in plain]
    wrong = [
        f"{name} of state.json is {short(repr(plain[name]), 60)}"
        for name, fits in {**FIELDS, **OPTIONAL}.items()
        if name in plain and not fits(plain[name])
    ]
    _reject(missing + wrong)
    for saved in saved_optimizers(plain) or [plain]:
        groups = saved["optimizer"]["groups"] if saved["optimizer"] else []
        if len(saved["names"]) != len(groups):
            wrong.append(
                f"{len(saved['names'])} lists of names for {len(groups)} groups of the optimizer"
            )
    if plain["window"] and not 0 < plain["first"] <= plain["window"]:
        wrong.append(f"first is {plain['first']} of a window of {plain['window']} samples")
    lost = [x for x in references(plain) if not isinstance(x, str) or x not in tensors]
    wrong += [f"state.json refers to a tensor {short(x, 60)}, which there is not" for x in lost]
    _reject([*wrong, *_undecodable(plain, "state.json")])


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < MOST


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


def _is_finite(x: Any) -> bool:
    return -1e300 < x < 1e300


def _is_object(x: Any) -> bool:
    return isinstance(x, dict)


def _are_names(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(name, str) for name in x)


def _is_optimizer(x: Any) -> bool:
    if x is None:
        return True
    if not isinstance(x, dict) or set(x) != {"kind", "groups", "rest"}:
        return False
    groups, rest = x["groups"], x["rest"]
    named = isinstance(x["kind"], str) and isinstance(rest, dict)
    plain = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    return named and plain and not {"state", "param_groups"} & set(rest)


def _is_scheduler(x: Any) -> bool:
    if x is None:
        return True
    fields = isinstance(x, dict) and set(x) == {"kind", "state"}
    return fields and isinstance(x["kind"], str) and isinstance(x["state"], dict)


def _are_others(x: Any) -> bool:
    """Optimizers besides the first, each with its scheduler and the names of its weights."""
    fields = ("optimizer", "scheduler", "names")
    return isinstance(x, list) and all(
        isinstance(one, dict)
        and set(one) == set(fields)
        and one["optimizer"] is not None
        and all(FIELDS[name](one[name]) for name in fields)
        for one in x
    )


def _is_scale(x: Any) -> bool:
    if x is None:
        return True
    fields = isinstance(x, dict) and set(x) == {"value", "good"}
    return fields and _is_number(x["value"]) and 0 < x["value"] < 2.0**127 and _is_count(x["good"])


def _is_random(x: Any) -> bool:
    return isinstance(x, dict) and "0" in x and all(isinstance(y, dict) for y in x.values())


def _are_gradients(x: Any) -> bool:
    """By weight and place among the ranks that hold it: `stem.weight/0`."""
    if not isinstance(x, dict):
        return False
    places = [key.rpartition("/")[2] for key in x]
    return all(place.isdecimal() and len(place) < 8 for place in places)


FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("steps", "window", "first", "world"), _is_count),
    "seed": lambda x: type(x) is int and -(2**63) <= x < 2**63,
    "trained": _are_names,
    "scale": _is_scale,
    "optimizer": _is_optimizer,
    "scheduler": _is_scheduler,
    "names": lambda x: isinstance(x, list) and all(map(_are_names, x)),
    "state": lambda x: _is_object(x) and all(map(_is_object, x.values())),
    "gradients": _are_gradients,
    "modules": _is_object,
    "random": _is_random,
    "extra": lambda x: True,
}
OPTIONAL: dict[str, Callable[[Any], bool]] = {"older": _is_object, "others": _are_others}


def _undecodable(spelled: Any, at: str) -> Iterator[str]:
    """Values that `decode` would fail at. (JSON has a bounded depth by now.)"""
    if isinstance(spelled, list):
        for i, x in enumerate(spelled):
            yield from _undecodable(x, f"{at}[{i}]")
    elif isinstance(spelled, dict) and len(spelled) == 1 and next(iter(spelled)) in DECODE:
        tag, inside = next(iter(spelled.items()))
        if tag in ("$tensor", "$array"):
            return
        if not isinstance(inside, list):
            yield f"{at} is a {tag} of {short(repr(inside), 60)}"
        elif tag in ("$pairs", "$counter") and not all(map(_is_pair, inside)):
            yield f"{at} is a {tag} with what is no pair"
        elif tag == "$set" and not all(map(_is_key, inside)):
            yield f"{at} is a {tag} of what cannot be in one"
        else:
            yield from _undecodable(inside, at)
    elif isinstance(spelled, dict):
        for name, x in spelled.items():
            yield from _undecodable(x, f"{at}.{short(name, 60)}")


def _is_pair(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and _is_key(x[0])


def _is_key(x: Any) -> bool:
    """What can be a key of a dict: plain, or a tuple of such."""
    if isinstance(x, dict):
        inside = x.get("$tuple")
        return len(x) == 1 and isinstance(inside, list) and all(map(_is_key, inside))
    return not isinstance(x, list)


# --- as this trainer takes it ---------------------------------------------------------------------


def validate_training(trainer: TrainingState, plain: Mapping[str, Any], tensors: Tensors) -> None:
    """Raise unless options, states and gradients are like those that this trainer has."""
    wrong = list(_wrong_states(trainer, plain, tensors))
    for own, saved in zip(trainer.optimizers, saved_optimizers(plain), strict=True):
        wrong += _wrong_groups(own.optimizer, saved["optimizer"]["groups"], tensors)
        if own.scheduler is not None:
            wrong += _wrong_scheduler(own.scheduler, saved["scheduler"]["state"], tensors)
    _reject(wrong)


def _wrong_groups(optimizer: Optimizer, saved: list[Any], tensors: Tensors) -> Iterator[str]:
    for i, (here, there) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        for name, value in here.items():
            if name in ("params", "param_names"):
                continue
            value = optimizer.defaults.get(name, value)  # as it was before any load
            if name not in there:
                if name in optimizer.defaults and type(value) in (int, float):
                    yield f"group {i} of the optimizer has no {name}"
            elif not _alike(value, there[name], tensors, finite=True):
                yield f"{name} of group {i} of the optimizer is {short(repr(there[name]), 60)}"
        if {"params", "param_names"} & set(there):
            yield f"group {i} of the optimizer lists parameters"


def _wrong_scheduler(scheduler: Any, saved: Mapping[str, Any], tensors: Tensors) -> Iterator[str]:
    here = scheduler.state_dict()
    for name, value in saved.items():
        if name in here:
            if not _alike(here[name], value, tensors, finite=False):
                yield f"{name} of the scheduler is {short(repr(value), 60)}"
        elif hasattr(scheduler, name):  # it would take the place of a method, or of the optimizer
            yield f"the scheduler has a state {short(name, 60)}"


def _alike(here: Any, saved: Any, tensors: Tensors, *, finite: bool) -> bool:
    """Whether an encoded value is of the kind of one that is held: a number for a number."""
    tag = next(iter(saved)) if isinstance(saved, dict) and len(saved) == 1 else ""
    if isinstance(here, bool):
        return saved is None or isinstance(saved, bool)
    if here is None:
        return saved is None or isinstance(saved, (bool, dict))
    if isinstance(here, (int, float, Tensor)):
        if tag == "$tensor":
            shapes = (tuple(here.shape),) if isinstance(here, Tensor) else ((), (1,))
            return _shape(saved, tensors) in shapes
        return _is_number(saved) and (not finite or _is_finite(saved))
    if isinstance(here, (list, tuple)):
        items = saved if isinstance(saved, list) else saved.get("$tuple") if tag else None
        if not isinstance(items, list) or len(items) != len(here):
            return False
        return all(_alike(x, y, tensors, finite=finite) for x, y in zip(here, items, strict=True))
    if isinstance(here, Mapping) and "last_epoch" in here:  # of an inner scheduler
        return isinstance(saved, dict) and all(
            name in here and _alike(here[name], x, tensors, finite=finite)
            for name, x in saved.items()
        )
    if isinstance(here, Mapping):
        return isinstance(saved, dict)
    return isinstance(here, str) == isinstance(saved, str)


def _wrong_states(
    trainer: TrainingState, plain: Mapping[str, Any], tensors: Tensors
) -> Iterator[str]:
    """Optimizer state, gradients and older weights that are not like the weights they belong to."""
    every = weights_of(trainer)
    weights = {name: every[name] for name in loadable(trainer, tensors).values()}
    elementwise = {kind.__name__ for kind in ELEMENTWISE}  # the state of others may differ
    others = [x for x in saved_optimizers(plain) if x["optimizer"]["kind"] not in elementwise]
    free = {name for saved in others for names in saved["names"] for name in names}
    for name, state in plain["state"].items():
        for key, x in state.items() if name in weights and name not in free else ():
            number = _is_number(x) or x is None or isinstance(x, bool)
            alone = _shape(x, tensors) in ((), (1,))
            if not number and not alone and not _fits(x, weights[name], tensors):
                yield f"the optimizer's {short(key, 60)} of {name} does not fit it"
    parts = {key: (key.rpartition("/")[0], x) for key, x in plain["gradients"].items()}
    parts |= {f"older {name}": (name, x) for name, x in plain.get("older", {}).items()}
    for key, (name, x) in parts.items():
        if name in weights and not _fits(x, weights[name], tensors):
            yield f"{short(key, 80)} is not of the shape and type of the weight"


def _fits(spelled: Any, weight: Tensor, tensors: Tensors) -> bool:
    """Whether an encoded value is a tensor like a weight: of real or complex numbers, as it is."""
    if _shape(spelled, tensors) != tuple(weight.shape):
        return False
    dtype = DTYPES.get(tensors[spelled["$tensor"]].dtype, torch.bool)
    kind, own = ((x.is_floating_point, x.is_complex) for x in (dtype, weight.dtype))
    return kind == own


def _shape(spelled: Any, tensors: Tensors) -> tuple[int, ...] | None:
    """Of the tensor that an encoded value is; None if it is none."""
    if isinstance(spelled, dict) and list(spelled) == ["$tensor"]:
        return tensors[spelled["$tensor"]].shape
    return None


def validate_options(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise unless all hyper-parameters that are held in tensors are finite, once these are
    read."""
    for saved in saved_optimizers(plain):
        for i, group in enumerate(saved["optimizer"]["groups"]):
            for name, value in group.items():
                found = [tensors[key] for key in references(value)]
                if not all(bool(torch.isfinite(x).all()) for x in found):
                    _reject([f"{name} of group {i} of the optimizer is not a finite number"])


def validate_random(states: Any, device: torch.device) -> None:
    try:
        validate_rng(states, device)
    except Exception as error:
        why = f"{type(error).__name__}: {short(error, 200)}"
        _reject([f"the states of random generators are not valid ({why})"])
