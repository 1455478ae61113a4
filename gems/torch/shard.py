"""A stage's trainable weights in one piece of memory per type, of which each holder owns a part.

    weights    | conv.weight      | conv.bias | norm.weight   | ...            | padding |
    holders    |  0            |  1            |  2            |  3                      |
    rank 1                     | piece | piece |

A parameter lies in this memory as a view, so that gathering the parts copies nothing. What a rank
owns of a parameter is a `Piece`: a flat parameter of its own, which the optimizer steps. For an
optimizer that works cell by cell that is the same arithmetic as on the whole.

    zero=1   gradients are summed so that each rank has those of its own part; pieces lie in the
             whole memory, and after the optimizer's step the parts are gathered
    zero=2   the same; after the sum the memory of the whole gradient is given back
    zero=3   the own part has memory of its own. The whole memory is there from gather to release

[Note: memory that comes and goes] `release` gives the bytes back and leaves the tensors as they
are: parameters, and what autograd has saved of them, are whole again after the next gather. They
were made through `.data`, so filling the memory does not count as a change of them.

torch's FSDP2 shards each parameter along its first dim and hangs gather and release on the hooks of
modules. Our stages are runs of recorded calls, not modules; their schedule says when weights are
needed, and `check` proves the order of the collectives. The flat cut also has no padding but at the
end of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from gems.transport.core import own_part

Tensor = torch.Tensor


@dataclass(frozen=True)
class Piece:
    """Cells `start` to `stop` of a parameter, counted flat, as a parameter of its own."""

    name: str
    start: int
    stop: int
    part: nn.Parameter

    def of(self, whole: Tensor) -> Tensor:
        """These cells of something shaped like the whole parameter."""
        return whole.reshape(-1)[self.start : self.stop]


class Shard:
    """What one rank has of a stage whose weights are shared out over its holders."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        holders: tuple[int, ...],
        rank: int,
        level: int,
    ) -> None:
        self.parameters, self.holders, self.rank, self.level = parameters, holders, rank, level
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, p in parameters.items():
            kinds.setdefault((p.dtype, p.device), []).append(name)
        self.flats = [_Flat({n: parameters[n] for n in names}, self) for names in kinds.values()]
        self.pieces = {piece.name: piece for flat in self.flats for piece in flat.pieces}
        self.whole = True
        if level == 3:
            self.release()

    def own(self, memory: Tensor) -> Tensor:
        return own_part(memory, self.rank, self.holders)

    # --- weights ------------------------------------------------------------------------------

    def gather(self) -> list[Tensor]:
        """Memory to gather the parts in; the parameters are whole when that is done."""
        for flat in self.flats:
            if self.level == 3:
                flat.room(len(flat.weights))
                self.own(flat.weights).copy_(flat.part)
        self.whole = True
        return [flat.weights for flat in self.flats]

    def keep(self) -> None:
        """Weights were loaded: the own part becomes what the whole says."""
        if self.level == 3:
            for flat in self.flats:
                flat.part.copy_(self.own(flat.weights))

    def release(self) -> None:
        """Give the memory of the whole back. [Note: memory that comes and goes]"""
        assert self.level == 3
        for flat in self.flats:
            flat.room(0)
        self.whole = False

    @property
    def weight_bytes(self) -> int:
        parts = [flat.part for flat in self.flats if self.level == 3]
        whole = [flat.weights for flat in self.flats if self.whole]
        return sum(t.nbytes for t in (*parts, *whole))

    # --- gradients ----------------------------------------------------------------------------

    def places(self) -> dict[int, Tensor]:
        """Zeros for the gradient of every parameter, by the parameter's id, for one step."""
        found: dict[int, Tensor] = {}
        for flat in self.flats:
            flat.gradients = flat.zeros()
            for name, view in flat.views(flat.gradients).items():
                found[id(self.parameters[name])] = view
        return found

    @property
    def gradients(self) -> list[Tensor]:
        """The memory of whole gradients, to be summed."""
        return [flat.gradients for flat in self.flats if flat.gradients is not None]

    def settle(self) -> None:
        """Gradients are summed: hand out those of pieces, None where the parameter has none."""
        for flat in self.flats:
            assert flat.gradients is not None
            flat.sums = self.own(flat.gradients)
            if self.level > 1:
                flat.sums, flat.gradients = flat.sums.clone(), None
            for piece, at in zip(flat.pieces, flat.starts, strict=True):
                came = self.parameters[piece.name].grad is not None
                size = piece.stop - piece.start
                piece.part.grad = flat.sums[at : at + size] if came else None
        for p in self.parameters.values():
            p.grad = None

    def forget(self) -> None:
        """The update is made, or will not be."""
        for flat in self.flats:
            flat.gradients = flat.sums = None
        for piece in self.pieces.values():
            piece.part.grad = None

    @property
    def gradient_bytes(self) -> int:
        """Of what is there now: as a whole, or in part, or parameter by parameter."""
        total = 0
        for flat in self.flats:
            memory = flat.gradients if flat.gradients is not None else flat.sums
            if memory is not None:
                total += memory.nbytes
            if flat.gradients is None:
                grads = (self.parameters[name].grad for name in flat.at)
                total += sum(g.nbytes for g in grads if g is not None)
        return total


class _Flat:
    """All parameters of one type, one after the other, padded to the same for each holder."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], shard: Shard) -> None:
        self.at: dict[str, tuple[int, torch.Size]] = {}
        total = 0
        for name, p in parameters.items():
            self.at[name] = (total, p.shape)
            total += p.numel()
        width = -(-total // len(shard.holders))
        first = next(iter(parameters.values()))
        self.weights = torch.zeros(
            width * len(shard.holders), dtype=first.dtype, device=first.device
        )
        for name, view in self.views(self.weights).items():
            view.copy_(parameters[name].detach())
            parameters[name].data = view.data
        mine = shard.own(self.weights)
        self.part = mine.clone() if shard.level == 3 else mine
        self.gradients: Tensor | None = None
        self.sums: Tensor | None = None
        self.pieces: list[Piece] = []
        self.starts: list[int] = []  # of each piece in the own part
        begin = shard.holders.index(shard.rank) * width
        for name, (at, shape) in self.at.items():
            start, stop = (min(max(x - at, 0), shape.numel()) for x in (begin, begin + width))
            if start < stop:
                here = at + start - begin
                part = nn.Parameter(self.part[here : here + stop - start].data)
                self.pieces.append(Piece(name, start, stop, part))
                self.starts.append(here)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        # `.data`: versions of their own, although all share one memory.
        return {
            name: memory[at : at + shape.numel()].data.view(shape).data
            for name, (at, shape) in self.at.items()
        }

    def zeros(self) -> Tensor:
        return torch.zeros(len(self.weights), dtype=self.weights.dtype, device=self.weights.device)

    def room(self, cells: int) -> None:
        self.weights.untyped_storage().resize_(cells * self.weights.element_size())
