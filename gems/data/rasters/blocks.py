"""Decoded blocks of a file, the last used ones of them kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from gems.data.rasters.core import Pixels, Span, blank, paste

KEPT = 32 << 20  # bytes per file, as OpenSlide keeps


class Blocks:
    """A cache of arrays, up to so many bytes; the one not used for longest goes first."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept, self._bytes = kept, 0
        self._blocks: OrderedDict[Hashable, Pixels] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Pixels]) -> Pixels:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key]
        made = make()  # outside the lock: two threads may decode the same block, and neither waits
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = made
                self._bytes += made.nbytes
            while self._bytes > self._kept and len(self._blocks) > 1:
                self._bytes -= self._blocks.popitem(last=False)[1].nbytes
        return made


def assemble(
    block: Callable[[int, int], Pixels],
    size: tuple[int, int],
    extent: tuple[int, int],
    rows: Span,
    columns: Span,
    channels: int,
    dtype: object,
    fill: int,
) -> Pixels:
    """A region out of blocks of `size` that lie side by side over `extent`, from (0, 0) on."""
    out = blank(rows, columns, channels, dtype, fill)
    (tall, wide), (height, width) = size, extent
    for row in range(max(rows[0], 0) // tall, -(-min(rows[1], height) // tall)):
        for column in range(max(columns[0], 0) // wide, -(-min(columns[1], width) // wide)):
            part = block(row, column)[: height - row * tall, : width - column * wide]
            paste(out, (row * tall - rows[0], column * wide - columns[0]), part)
    return out
