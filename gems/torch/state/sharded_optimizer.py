"""An optimizer that steps pieces of parameters, and its state put together again, by name.

The user's function is given whole parameters, so that groups may hang on their shapes; then each
group gets, in place of a parameter that is shared out, the piece that this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gems.errors import PlanError
from gems.torch.state.param_shards import Piece, Shard
from gems.transport.encoding import sendable
from gems.transport.protocol import Transport, own_part

Tensor = torch.Tensor
State = dict[str, Any]

# They treat each cell by itself, whatever the shape it is part of.
BY_CELL = {
    *(torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop, torch.optim.RMSprop),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
}


def shard_optimizer(optimizer: Optimizer, shards: Iterable[Shard]) -> None:
    """Let an optimizer of whole parameters step this rank's pieces of them instead."""
    kind, shards = type(optimizer), list(shards)
    zero = max((shard.level for shard in shards), default=0)
    if zero and kind not in BY_CELL and not getattr(optimizer, "by_cell", False):
        known = ", ".join(sorted(k.__name__ for k in BY_CELL))
        raise PlanError(
            f"zero={zero} gives each rank a part of every parameter, cut anywhere, and "
            f"{kind.__qualname__} may look at a parameter as a whole (its norm, rows or columns). "
            f"Use one that treats each cell by itself ({known}), say so of your own "
            f"({kind.__qualname__}.by_cell = True), or use zero=0"
        )
    pieces: dict[int, Piece | None] = {}
    for shard in shards:
        pieces |= {id(p): shard.pieces.get(name) for name, p in shard.parameters.items()}
    for group in optimizer.param_groups:
        mine: list[nn.Parameter] = []
        for p in group["params"]:
            if id(p) not in pieces:
                mine.append(p)
                continue
            state = optimizer.state.pop(p, None)  # some have state before the first step
            if (piece := pieces[id(p)]) is not None:
                mine.append(piece.part)
                if state:
                    optimizer.state[piece.part] = cut(state, p, piece)
        group["params"] = mine


def cut(state: Mapping[str, Any], whole: Tensor, piece: Piece) -> State:
    """The state of a piece out of that of the whole parameter."""

    def part(key: str, x: Any) -> Any:
        shaped = isinstance(x, Tensor) and x.shape == whole.shape and key != "step"
        return piece.of(x).to(piece.part.device, copy=True) if shaped else x

    return {key: part(key, x) for key, x in state.items()}


@dataclass(frozen=True)
class Cells:
    """In place of a piece's part of a tensor that is shaped like the whole parameter."""

    dtype: torch.dtype


sendable(Cells)


def joined(
    optimizer: Optimizer,
    shards: Iterable[Shard],
    transport: Transport,
    wanted: Iterable[str],
    present: Callable[[Tensor], Tensor],
) -> dict[str, State]:
    """The state of whole parameters, of those that are `wanted` here. All ranks call it. `present`
    gives a state tensor that may be put away."""
    shards, wanted = list(shards), set(wanted)
    forms: dict[str, State] = {}
    for said in transport.all_gather_object(_forms(optimizer, shards)):
        forms |= said
    found: dict[str, State] = {n: dict(form) for n, form in forms.items() if n in wanted}
    for shard in shards:
        for flat in shard.flats:
            mine = {name: forms[name] for name in flat.at if name in forms}
            kinds = {(k, x.dtype) for f in mine.values() for k, x in f.items() if _cells(x)}
            for key, dtype in sorted(kinds, key=str):
                memory = torch.zeros(len(flat.weights), dtype=dtype, device=flat.weights.device)
                part = own_part(memory, shard.rank, shard.holders)
                for piece, at in zip(flat.pieces, flat.starts, strict=True):
                    if mine.get(piece.name, {}).get(key) == Cells(dtype):
                        state = present(optimizer.state[piece.part][key])
                        part[at : at + piece.part.numel()] = state.reshape(-1)
                transport.all_gather(memory, shard.holders).wait()
                for name, view in flat.views(memory).items():
                    if name in found and mine[name].get(key) == Cells(dtype):
                        found[name][key] = view.clone()
    return found


def _forms(optimizer: Optimizer, shards: Iterable[Shard]) -> dict[str, State]:
    """This rank's state without what takes memory."""

    def form(key: str, x: Any, part: Tensor) -> Any:
        if isinstance(x, Tensor) and x.shape == part.shape and key != "step":
            return Cells(x.dtype)
        return x.clone() if isinstance(x, Tensor) else x

    pieces = [piece for shard in shards for piece in shard.pieces.values()]
    states = [(piece, optimizer.state.get(piece.part)) for piece in pieces]
    return {
        piece.name: {k: form(k, x, piece.part) for k, x in state.items()}
        for piece, state in states
        if state
    }


def _cells(x: Any) -> bool:
    return isinstance(x, Cells)
