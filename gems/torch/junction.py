"""What crosses between two stages that may be cut differently: boxes from ranks to ranks.

Tiles to whole, four tiles to two, tiles to slices of the batch, and back: all are the moves between
what the ranks of one stage have and what those of the next want. Gradients travel the same way back
and add up where they came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from gems.geometry import Box, Move, moves
from gems.graph import Value

Tensor = torch.Tensor
Boxes = Mapping[int, Box]  # rank -> its part


def whole(value: Value, team: Sequence[int]) -> dict[int, Box]:
    """The boxes of a team of which every rank has all of a value."""
    full = Box((0,) * len(value.shape), value.shape)
    return dict.fromkeys(team, full)


@dataclass(frozen=True)
class Passage:
    """One value between two teams: what each rank sends from, and what each wants."""

    value: Value
    have: Boxes  # what a rank of the source may send
    held: Boxes  # its tensor, which may be larger
    want: Boxes

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        ranks = sorted({*self.have, *self.want})
        nothing = Box((0,) * len(self.value.shape), (0,) * len(self.value.shape))
        if not self.value.shape:  # a number has no boxes; the nearest rank gives it
            nothing = Box((0,), (0,))
            one = Box((0,), (1,))
            have = [one if r in self.have else nothing for r in ranks]
            want = [one if r in self.want else nothing for r in ranks]
            found = moves(have, want)
            return tuple(Move(ranks[m.source], ranks[m.target], Box((), ())) for m in found)
        found = moves(
            [self.have.get(r, nothing) for r in ranks], [self.want.get(r, nothing) for r in ranks]
        )
        return tuple(Move(ranks[m.source], ranks[m.target], m.box) for m in found)

    def between(self, source: int, target: int) -> list[Box]:
        return [m.box for m in self.moves if (m.source, m.target) == (source, target)]

    @cached_property
    def plain(self) -> bool:
        """One rank gives all of it to one rank: nothing is cut."""
        full = whole(self.value, (0,))[0]
        return len(self.moves) == 1 and self.moves[0].box == full and self._whole_tensors(full)

    def _whole_tensors(self, full: Box) -> bool:
        return all(box == full for box in (*self.held.values(), *self.want.values()))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def dense(value: Value) -> bool:
    """Whether the strides visit one block of memory, each element once, in any order of dims."""
    step = 1
    for stride, length in sorted(zip(value.strides, value.shape, strict=True)):
        if length != 1:
            if stride != step:
                return False
            step *= length
    return True


def flat(tensor: Tensor, value: Value) -> Tensor:
    """The tensor's memory as bytes, in the order that the value's strides say."""
    strides = value.strides if dense(value) else row_major(value.shape)
    if tensor.stride() != strides:
        copy = torch.empty_strided(value.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = copy.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def shaped(buffer: Tensor, value: Value) -> Tensor:
    """The tensor that `flat` made bytes of."""
    strides = value.strides if dense(value) else row_major(value.shape)
    return buffer.view(getattr(torch, value.dtype)).as_strided(value.shape, strides)


def piece(tensor: Tensor, held: Box, box: Box) -> Tensor:
    """A box of a tensor that holds another one, as bytes."""
    part = tensor[box.relative_to(held).slices()] if box.start else tensor
    return part.contiguous().view(-1).view(torch.uint8)
