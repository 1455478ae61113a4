"""The spatial group: the ranks that hold the tiles of one stage, and their collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from gems.distributed.members import Members
from gems.keras.arrays import bytes_of, empty, tensor_of
from gems.transport.protocol import EXCHANGES


class SpatialGroup(Members):
    """The members of a stage on tiles, and their collectives."""

    def exchange(
        self, sends: Mapping[int, Any], receives: Mapping[int, int], dtype: Any
    ) -> dict[int, Any]:
        """Send each member a flat tensor, and receive so many numbers from each member."""
        size = tf.as_dtype(dtype).size
        given = [(bytes_of(t), self.ranks[m]) for m, t in sorted(sends.items())]
        buffers = {m: empty(n * size) for m, n in sorted(receives.items())}
        self.traffic.messages += len(given)
        self.traffic.bytes += sum(len(data) for data, _ in given)
        expected = [(buffer, self.ranks[m]) for m, buffer in buffers.items()]
        self.transport.exchange(given, expected, self.sorted).wait()
        return {m: tensor_of(buffer, (receives[m],), dtype) for m, buffer in buffers.items()}

    def all_gather(self, mine: Any) -> list[Any]:
        """The tensors of all members, which have one shape: the same bits on every rank."""
        data = bytes_of(mine)
        rows = empty(self.size * len(data)).reshape(self.size, len(data))
        at = {rank: row for row, rank in enumerate(self.sorted)}
        np.copyto(rows[at[self.ranks[self.me]]], data)
        self.traffic.messages += self.size - 1
        self.traffic.bytes += (self.size - 1) * len(data)
        self.transport.all_gather(rows.reshape(-1), self.sorted, EXCHANGES).wait()
        return [tensor_of(rows[at[rank]].copy(), mine.shape, mine.dtype) for rank in self.ranks]

    def all_reduce(self, mine: Any) -> Any:
        """The sum over the group, added in the same order on every rank."""
        return tf.add_n(self.all_gather(mine))
