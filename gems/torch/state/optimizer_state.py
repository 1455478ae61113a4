"""An optimizer's state by the names of the weights, so that it fits any plan.

Each rank has an optimizer of its own weights, made by the same function: the same groups with the
same options, and in each group the weights that this rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gems.errors import CheckpointError

Tensor = torch.Tensor


@dataclass
class NamedState:
    """`groups` are options without weights; `names` are the weights of each; `rest` is whatever
    else the optimizer's own state dict has."""

    groups: list[dict[str, Any]]
    names: list[list[str]]
    state: dict[str, Any]
    rest: dict[str, Any]


def type_name(thing: Any) -> str:
    return type(thing).__qualname__


def named_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> NamedState:
    """The state of an optimizer of these parameters. Tensors are the optimizer's own."""
    name_of = {id(p): name for name, p in parameters.items()}
    whole = optimizer.state_dict()
    groups, names, states = [], [], {}
    for group, packed in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        mine = []
        for p, number in zip(group["params"], packed["params"], strict=True):
            if (name := name_of.get(id(p))) is not None:
                mine.append(name)
                if number in whole["state"]:
                    states[name] = whole["state"][number]
            elif p.numel():
                raise CheckpointError(
                    f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the "
                    "model's; only what belongs to the model can be saved: make it a parameter of "
                    "the model"
                )
        names.append(mine)
        groups.append({k: v for k, v in packed.items() if k not in ("params", "param_names")})
    rest = {k: v for k, v in whole.items() if k not in ("state", "param_groups")}
    return NamedState(groups, names, states, rest)


def load_named_state(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    saved: NamedState,
    exact: Iterable[str],
) -> None:
    """Load the options of all groups, and the state of those weights that are here.

    The state of `exact` ones keeps its types; that of others is cast to their parameter's.
    """
    name_of = {id(p): name for name, p in parameters.items()}
    number, groups, states = 0, [], {}
    for group, options in zip(optimizer.param_groups, saved.groups, strict=True):
        numbers = []
        for p in group["params"]:
            if (state := saved.state.get(name_of.get(id(p), ""))) is not None:
                states[number] = {key: _laid_out(x, p) for key, x in state.items()}
            numbers.append(number)
            number += 1
        groups.append({**options, "params": numbers})
    optimizer.load_state_dict({"state": states, "param_groups": groups, **saved.rest})
    for name in exact:
        p = parameters[name]
        _restore_types(optimizer.state.get(p, {}), saved.state.get(name, {}), p)


def load_param_state(
    optimizer: Optimizer, parameter: nn.Parameter, state: Mapping[str, Any], *, exact: bool
) -> None:
    """Load the state of one weight, as `load_named_state` does for all."""

    def cast(key: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or key == "step":
            return x
        floats = parameter.is_floating_point() and not exact
        x = x.to(parameter.device, parameter.dtype if floats else x.dtype)
        return _laid_out(x, parameter)

    optimizer.state[parameter] = {key: cast(key, x) for key, x in state.items()}


def _restore_types(here: dict[str, Any], saved: Mapping[str, Any], p: nn.Parameter) -> None:
    """Undo torch's cast to the parameter's type."""
    for key, value in saved.items():
        if isinstance(value, Tensor) and here[key].dtype != value.dtype:
            here[key] = _laid_out(value.to(here[key].device), p)


def _laid_out(x: Any, parameter: nn.Parameter) -> Any:
    """State in the memory format of its parameter: fused optimizers walk through both memories."""
    if not isinstance(x, Tensor) or x.shape != parameter.shape or x.stride() == parameter.stride():
        return x
    return torch.empty_like(parameter, dtype=x.dtype, device=x.device).copy_(x)
