"""What crosses the boundary of two stages that may be tiled differently: boxes between ranks.

Tiles to whole, four tiles to two, tiles to slices of the batch, and back: all are the moves between
what the ranks of one stage have and what those of the next want. Gradients return the same way, and
are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gems.geometry.box import Box, Move, moves
from gems.model.graph import ITEMSIZE, Value

Boxes = Mapping[int, Box]  # rank -> its part


def whole(value: Value, ranks: Sequence[int]) -> dict[int, Box]:
    """The boxes of ranks that have all of a value each."""
    return dict.fromkeys(ranks, Box.whole(value.shape))


@dataclass(frozen=True)
class Transfer:
    """One value between two spatial groups: what each rank sends from, and what each wants.

    With `back` it is a gradient that returns: what was wanted is sent, and what arrives is summed.
    """

    value: Value
    have: Boxes  # what a rank of the source may send
    held: Boxes  # its tensor, which may be larger
    want: Boxes
    back: bool = False

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        ranks = sorted({*self.have, *self.want})
        dims = len(self.value.shape) or 1  # a number is a box of one cell
        nothing = Box.whole((0,) * dims)

        def boxes(of: Boxes) -> list[Box]:
            return [_at_least_one_dim(of[r]) if r in of else nothing for r in ranks]

        found = moves(boxes(self.have), boxes(self.want))
        return tuple(Move(ranks[m.source], ranks[m.target], m.box) for m in found)

    def between(self, sender: int, receiver: int) -> list[Box]:
        """What one rank sends to another."""
        ends = (receiver, sender) if self.back else (sender, receiver)
        return [m.box for m in self.moves if (m.source, m.target) == ends]

    def sent_from(self, rank: int) -> Box:
        """The box of the tensor that a rank sends from."""
        return _at_least_one_dim((self.want if self.back else self.held)[rank])

    def received_in(self, rank: int) -> Box:
        return _at_least_one_dim((self.held if self.back else self.want)[rank])

    @cached_property
    def plain(self) -> bool:
        """One rank sends all of it to one rank."""
        full = whole(self.value, (0,))[0]
        return len(self.held) == len(self.want) == 1 and all(
            box == full for box in (*self.held.values(), *self.want.values())
        )


def _at_least_one_dim(box: Box) -> Box:
    return box if box.start else Box.whole((1,))


def box_bytes(transfers: Sequence[Transfer], rank: int, source: int) -> list[int]:
    """Bytes of each box that `source` sends to `rank`."""
    return [
        box.size * ITEMSIZE[transfer.value.dtype]
        for transfer in transfers
        for box in transfer.between(source, rank)
    ]
