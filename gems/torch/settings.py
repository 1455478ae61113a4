"""What a trainer is set to, as far as it must be the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gems.distributed.key import key

Plain = (bool, int, float, str, type(None), tuple)


def comparable(optimizer: Optimizer) -> list[str]:
    """The hyper-parameters that all groups of this rank have from the optimizer itself.

    Those that a group was given by itself may differ between ranks, which have other parameters:
    a learning rate by layer, no weight decay for biases.
    """
    groups = optimizer.param_groups
    return [
        name
        for name, value in optimizer.defaults.items()
        if isinstance(value, (*Plain, Tensor))
        and all(_plain(group.get(name)) == _plain(value) for group in groups)
    ]


def shared(told: Collection[Mapping[str, Any]]) -> list[str]:
    """The hyper-parameters that can be compared on every step, given what all ranks told of their
    optimizers: none if their groups are not the same number."""
    if len({mine["groups"] for mine in told}) != 1:
        return []
    common = set.intersection(*(set(mine["comparable"]) for mine in told))
    return sorted(common)


def now(optimizer: Optimizer, names: Collection[str]) -> dict[str, Any]:
    """Hyper-parameters as they are: one value, or one for each group."""
    found = {}
    for name in names:
        values = [_plain(group.get(name)) for group in optimizer.param_groups]
        found[name] = values[0] if len(set(map(str, values))) == 1 else values
    return found


def by_parameter(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, int]:
    """A hash of the hyper-parameters of each parameter; `names` has those to look at, by id."""
    found = {}
    for group in optimizer.param_groups:
        told = sorted(
            (k, str(_plain(x))) for k, x in group.items() if isinstance(x, (*Plain, Tensor))
        )
        found |= {names[id(p)]: key(told) for p in group["params"] if id(p) in names}
    return found


def _plain(x: Any) -> Any:
    """A learning rate may be a tensor."""
    return x.tolist() if isinstance(x, Tensor) else x
