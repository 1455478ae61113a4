"""Saved tensors of a stage on tiles: the tile and its halos, never the padded copy of both.

A layer that reads beyond its tile runs on a padded tile, a copy of the tile with the halos of its
neighbours around it. Autograd would save that copy. This step of the chain of saved tensors saves
the tile, which the layer before has anyway, and the halos, and assembles them again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
import torch.nn.functional as F

from gems.torch.autograd.saved_tensors import Pack, PackedParts, Saved
from gems.torch.spatial.halo_exchange import HaloExchange
from gems.torch.tensors.storage import storage_of

Tensor = torch.Tensor
Part = tuple[Tensor, int | None]  # with its version, if it must not change
Assemble = Callable[..., Tensor]
Form = tuple[torch.Size, tuple[int, ...]]  # shape and strides


def _form(x: Tensor) -> Form:
    return x.shape, x.stride()


class SavedTiles:
    """The step of one forward. Padded tiles are known while the layer that reads them runs. Counts
    the bytes of all that is saved, but for storages of `weights`."""

    def __init__(self, weights: Set[int] = frozenset()) -> None:
        self.weights = weights
        self.padded: dict[int, tuple[Form, list[Part], Assemble]] = {}
        self.storages: dict[int, int] = {}  # storage -> bytes

    def add_exchanged(
        self, padded: Tensor, x: Tensor, exchange: HaloExchange, halos: Sequence[Tensor]
    ) -> None:
        parts = [(x.detach(), x._version), *((halo, None) for halo in halos)]
        self._add(padded, parts, lambda tile, *halos: exchange.assemble(tile, halos))

    def add_bordered(self, padded: Tensor, x: Tensor, pads: list[int], fill: float) -> None:
        self._add(padded, [(x.detach(), x._version)], lambda tile: F.pad(tile, pads, value=fill))

    def _add(self, padded: Tensor, parts: list[Part], assemble: Assemble) -> None:
        if padded.numel():  # all tensors without cells have one address
            self.padded[padded.data_ptr()] = (_form(padded), parts, assemble)

    def clear(self) -> None:
        """The layer has run: the memory of its padded tile may be used again."""
        self.padded.clear()

    def pack(self, x: Tensor, version: int | None, rest: Pack) -> Saved:
        form, parts, assemble = self.padded.get(x.data_ptr(), (None, [], None))
        if assemble is None or _form(x) != form:
            self._count(x)
            return rest(x, version)
        for part, _ in parts:
            self._count(part)
        return PackedParts([rest(*part) for part in parts], assemble)

    def _count(self, x: Tensor) -> None:
        if storage_of(x) not in self.weights:
            self.storages[storage_of(x)] = x.untyped_storage().nbytes()

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())
