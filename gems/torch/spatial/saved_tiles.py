"""Saved tensors of a stage on tiles: the tile and its halos, never the padded copy of both.

A layer that reads beyond its tile runs on a padded tile, a copy of the tile with the halos of its
neighbours around it. Autograd would save that copy. These saved-tensor hooks save the tile, which
the layer before has anyway, and the halos, and assemble them again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from gems.torch.offload.activations import PackedTensor, SavedTensors, unpacked
from gems.torch.spatial.halo_exchange import HaloExchange
from gems.torch.tensors.storage import storage_of

Tensor = torch.Tensor


@dataclass
class BorderedTile:
    """A padded tile with a border of a constant: the tile alone."""

    tile: Tensor | PackedTensor
    version: int
    pads: list[int]
    fill: float

    @property
    def tensors(self) -> Sequence[Tensor]:
        return (unpacked(self.tile),)

    def offloaded(self, bundle: SavedTensors) -> BorderedTile:
        """The same, with its tensors in a bundle."""
        return replace(self, tile=bundle.pack(unpacked(self.tile), self.version))

    def assemble(self) -> Tensor:
        return F.pad(_unchanged(self.tile, self.version), self.pads, value=self.fill)


@dataclass
class ExchangedTile:
    """A padded tile with halos: the tile, and the halos."""

    tile: Tensor | PackedTensor
    version: int
    exchange: HaloExchange
    halos: Sequence[Tensor | PackedTensor]

    @property
    def tensors(self) -> Sequence[Tensor]:
        return (unpacked(self.tile), *map(unpacked, self.halos))

    def offloaded(self, bundle: SavedTensors) -> ExchangedTile:
        tile, halos = bundle.pack(unpacked(self.tile), self.version), map(unpacked, self.halos)
        return replace(self, tile=tile, halos=[bundle.pack(halo) for halo in halos])

    def assemble(self) -> Tensor:
        tile = _unchanged(self.tile, self.version)
        return self.exchange.assemble(tile, list(map(unpacked, self.halos)))


def _unchanged(tile: Tensor | PackedTensor, version: int) -> Tensor:
    if isinstance(tile, PackedTensor):
        return tile.unpack()  # which checks its version itself
    if tile._version != version:
        raise RuntimeError(
            f"a tensor needed for a gradient, of shape {tuple(tile.shape)}, has been modified by "
            "an inplace operation; use one that is not in place"
        )
    return tile


class SavedTiles:
    """The saved tensors of one forward. Padded tiles are known while the layer that reads them
    runs."""

    def __init__(self, weights: Set[int] = frozenset(), bundle: SavedTensors | None = None) -> None:
        self.weights = weights  # storages that are not counted
        self.bundle = bundle  # if what is saved will be offloaded
        self.padded: dict[int, tuple[tuple[int, ...], ExchangedTile | BorderedTile]] = {}
        self.storages: dict[int, int] = {}  # storage -> bytes, of all that is saved

    def add_exchanged(
        self, padded: Tensor, x: Tensor, exchange: HaloExchange, halos: Sequence[Tensor]
    ) -> None:
        self._add(padded, ExchangedTile(x.detach(), x._version, exchange, halos))

    def add_bordered(self, padded: Tensor, x: Tensor, pads: list[int], fill: float) -> None:
        self._add(padded, BorderedTile(x.detach(), x._version, pads, fill))

    def _add(self, padded: Tensor, made_of: ExchangedTile | BorderedTile) -> None:
        self.padded[padded.data_ptr()] = (tuple(padded.shape), made_of)

    def clear(self) -> None:
        """The layer has run: the memory of its padded tile may be used again."""
        self.padded.clear()

    def pack(self, x: Tensor) -> Any:
        shape, made_of = self.padded.get(x.data_ptr(), ((), None))
        if made_of is not None and tuple(x.shape) == shape and x.is_contiguous():
            for part in made_of.tensors:
                self._count(part)
            return made_of if self.bundle is None else made_of.offloaded(self.bundle)
        self._count(x)
        return x if self.bundle is None else self.bundle.pack(x, x._version)

    def _count(self, x: Tensor) -> None:
        if storage_of(x) not in self.weights:
            self.storages[storage_of(x)] = x.untyped_storage().nbytes()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack):
            yield

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())


def _unpack(saved: Any) -> Tensor:
    return saved.assemble() if isinstance(saved, ExchangedTile | BorderedTile) else unpacked(saved)
