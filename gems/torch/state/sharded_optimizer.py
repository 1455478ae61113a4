"""An optimizer that steps shards of parameters, and its full state, gathered from all ranks.

The user's function gets whole parameters, so that it may group them by shape; then each group gets,
in place of a sharded parameter, the shard that this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gems.errors import PlanError
from gems.torch.state.flat_params import ParamShard
from gems.torch.state.param_shards import StageShard
from gems.torch.tensors.strides import flattened
from gems.transport.encoding import sendable
from gems.transport.protocol import Transport

Tensor = torch.Tensor
State = dict[str, Any]

# They treat each element by itself, whatever the shape: their state is numbers, and tensors shaped
# like the parameter.
ELEMENTWISE = {
    *(torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop, torch.optim.RMSprop),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
}


def shard_optimizer(optimizer: Optimizer, shards: Iterable[StageShard]) -> None:
    """Let an optimizer of whole parameters step this rank's shards of them instead."""
    kind, shards = type(optimizer), list(shards)
    zero = max((shard.level for shard in shards), default=0)
    if zero and kind not in ELEMENTWISE and not getattr(optimizer, "elementwise", False):
        known = ", ".join(sorted(k.__name__ for k in ELEMENTWISE))
        raise PlanError(
            f"zero={zero} gives each rank a flat shard of every parameter, and "
            f"{kind.__qualname__} may need a parameter as a whole (its norm, rows or columns). Use "
            f"one that treats each element by itself ({known}), declare that your own does "
            f"({kind.__qualname__}.elementwise = True), or use zero=0"
        )
    own: dict[int, ParamShard | None] = {}
    for shard in shards:
        own |= {id(p): shard.param_shards.get(name) for name, p in shard.parameters.items()}
    for group in optimizer.param_groups:
        mine: list[nn.Parameter] = []
        for p in group["params"]:
            if id(p) not in own:
                mine.append(p)
                continue
            state = optimizer.state.pop(p, None)  # some have state before the first step
            if (piece := own[id(p)]) is not None:
                mine.append(piece.param)
                if state:
                    optimizer.state[piece.param] = shard_state(state, p, piece)
        group["params"] = mine


def shard_state(state: Mapping[str, Any], whole: Tensor, piece: ParamShard) -> State:
    """The state of a shard, out of that of the whole parameter."""
    return {
        key: piece.of(x).to(piece.param.device, copy=True) if _shaped(key, x, whole) else x
        for key, x in state.items()
    }


def _shaped(key: str, x: Any, like: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == like.shape and key != "step"


@dataclass(frozen=True)
class ShardSpec:
    """In place of a shard of a state tensor that is shaped like the parameter."""

    dtype: torch.dtype


sendable(ShardSpec)


def full_state(
    optimizer: Optimizer,
    shards: Iterable[StageShard],
    transport: Transport,
    wanted: Iterable[str],
    present: Callable[[Tensor], Tensor],
) -> dict[str, State]:
    """The state of whole parameters, of those that are `wanted` here. All ranks call it. `present`
    returns a state tensor that may be offloaded."""
    shards, wanted = list(shards), set(wanted)
    specs: dict[str, State] = {}
    for found in transport.all_gather_object(_specs(optimizer, shards)):
        specs |= found
    full: dict[str, State] = {n: dict(spec) for n, spec in specs.items() if n in wanted}
    for flat in (flat for shard in shards for flat in shard.flats):
        mine = {name: specs[name] for name in flat.at if name in specs}
        tensors = {
            (key, x) for spec in mine.values() for key, x in spec.items() if type(x) is ShardSpec
        }
        for key, spec in sorted(tensors, key=str):
            memory = flat.zeros(spec.dtype)
            for piece in flat.param_shards:
                if mine.get(piece.name, {}).get(key) == spec:
                    state = present(optimizer.state[piece.param][key])
                    piece.inside(flat.own(memory)).copy_(flattened(state, piece.param.stride()))
            transport.all_gather(memory, flat.ranks).wait()
            for name, view in flat.views(memory).items():
                if name in full and mine[name].get(key) == spec:
                    full[name][key] = view.clone()
    return full


def _specs(optimizer: Optimizer, shards: Iterable[StageShard]) -> dict[str, State]:
    """This rank's state, without the tensors that are sharded."""

    def spec(key: str, x: Any, param: Tensor) -> Any:
        if _shaped(key, x, param):
            return ShardSpec(x.dtype)
        return x.clone() if isinstance(x, Tensor) else x

    return {
        piece.name: {key: spec(key, x, piece.param) for key, x in state.items()}
        for shard in shards
        for piece in shard.param_shards.values()
        if (state := optimizer.state.get(piece.param))
    }
