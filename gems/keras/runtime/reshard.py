"""What crosses the boundary of two stages, as bytes in flat buffers: boxes of values, one after the
other. Gradients travel back, and are summed where several ranks read one cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gems.distributed.transfer import Transfer, box_bytes
from gems.geometry.box import Box
from gems.keras.arrays import Array, bytes_of, empty, tensor_of


def pack(
    transfers: Sequence[Transfer], tensors: Mapping[str, Any], rank: int, target: int
) -> list[Array]:
    """What `rank` sends to `target`, in one buffer, if anything: one value lends its own memory."""
    parts = []
    for t in transfers:
        tensor = tensors[t.value.name]
        for box in t.between(rank, target):
            parts.append(bytes_of(_piece(tensor, t.sent_from(rank), box)))
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return parts
    found = empty(sum(map(len, parts)))
    np.concatenate(parts, out=found)
    return [found]


def _piece(tensor: Any, held: Box, box: Box) -> Any:
    """A box of a tensor that holds another one."""
    if box == held or not tensor.shape.rank:
        return tensor
    return tf.slice(tensor, box.relative_to(held).start, box.shape)


def buffers(transfers: Sequence[Transfer], rank: int, source: int) -> list[Array]:
    """An empty buffer for what `source` sends to `rank`, if anything."""
    size = sum(box_bytes(transfers, rank, source))
    return [empty(size)] if size else []


def unpack(
    transfers: Sequence[Transfer],
    rank: int,
    own: Mapping[str, Any] | None,
    arrived: Mapping[int, Sequence[Array]],
) -> dict[str, Any]:
    """The values on `rank`: of what it has itself, and of what the others sent."""
    if own is not None and all(t.plain for t in transfers):
        return dict(own)
    parts = {source: _boxes(transfers, rank, source, sent) for source, sent in arrived.items()}
    return {t.value.name: _assembled(t, rank, own, parts) for t in transfers}


def _boxes(
    transfers: Sequence[Transfer], rank: int, source: int, sent: Sequence[Array]
) -> Iterator[Array]:
    """The bytes of each box of a message."""
    start = 0
    for size in box_bytes(transfers, rank, source):
        yield sent[0][start : start + size] if sent else empty(0)
        start += size


def _assembled(
    transfer: Transfer,
    rank: int,
    own: Mapping[str, Any] | None,
    parts: Mapping[int, Iterator[Array]],
) -> Any:
    value, frame = transfer.value, transfer.received_in(rank)
    shape = frame.shape if value.shape else ()
    pieces = []
    for source in sorted({*parts, rank}):
        for box in transfer.between(source, rank):
            form = box.shape if value.shape else ()
            if source != rank:
                pieces.append((box, tensor_of(next(parts[source]), form, value.dtype)))
            else:
                assert own is not None
                pieces.append((box, _piece(own[value.name], transfer.sent_from(rank), box)))
    if len(pieces) == 1 and pieces[0][0] == frame:
        return pieces[0][1]
    found = tf.zeros(shape, value.dtype)
    for box, piece in pieces:
        at = box.relative_to(frame)
        ends = zip(at.start, at.stop, frame.shape, strict=True)
        around = [(a, n - b) for a, b, n in ends] if value.shape else []
        more = tf.pad(piece, around) if around else piece
        found = found | more if found.dtype == tf.bool else found + more
    return found
