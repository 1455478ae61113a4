"""Halos: what patches that run one after the other hand on, and the group that they form.

    forward     patch 0 ──halo──► patch 1 ──halo──► patch 2      kept for backward
    backward    patch 0 ◄─gradient─ patch 1 ◄─gradient─ patch 2    each recomputed from its halos

A halo exchange between ranks is two messages at a time; between patches of one rank a message waits
until its patch runs. So layer rules for tiles serve for patches as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from gems.geometry.layout import coordinate
from gems.torch.offload.stored_value import PendingWrite, ValueStore
from gems.torch.spatial.group import SpatialGroup
from gems.torch.tensors.storage import storage_of
from gems.transport.protocol import Done, Work

Tensor = torch.Tensor
Tag = tuple[str, str, int]  # a call, a value, and which of its exchanges
Key = tuple[Tag, int]  # and the patch that left it


class _Parcel:
    """What one patch left for another, in a store."""

    def __init__(self, store: ValueStore, halos: Mapping[Key, Tensor]) -> None:
        self.places: dict[Key, tuple[int, int, torch.dtype]] = {}
        at = 0
        for key, x in halos.items():
            at += -at % x.element_size()
            self.places[key] = at, x.nbytes, x.dtype
            at += x.nbytes
        device = next(iter(halos.values())).device
        buffer = torch.empty(at, dtype=torch.uint8, device=device)
        for key, (start, size, _) in self.places.items():
            buffer[start : start + size] = halos[key].view(torch.uint8)
        self.slot, self.size, self.device = store.slot(at), at, device
        self.pending = [PendingWrite(self.slot.write(buffer), buffer)]
        self.reading: tuple[Work, Tensor] | None = None
        weakref.finalize(self, store.give_up, self.slot, self.pending).atexit = False

    def settle(self) -> None:
        """Wait until it is written."""
        while self.pending:
            self.pending.pop().work.wait()

    def begin(self) -> None:
        buffer = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        self.reading = self.slot.read(buffer), buffer

    def finish(self) -> dict[Key, Tensor]:
        assert self.reading is not None
        (work, buffer), self.reading = self.reading, None
        work.wait()
        return {
            key: buffer[start : start + size].view(dtype)
            for key, (start, size, dtype) in self.places.items()
        }


class Mailbox:
    """What patches leave for others: on the device, or in a store until shortly before its patch
    runs. `bytes` are those on the device, `peak` the most of them."""

    def __init__(self, store: ValueStore | None) -> None:
        self.store = store
        self.here: dict[int, dict[Key, Tensor]] = {}  # by the patch that will take it
        self.parcels: dict[int, list[_Parcel]] = {}
        self.unsettled: list[_Parcel] = []
        self.bytes = self.peak = 0

    def put(self, target: int, key: Key, x: Tensor) -> None:
        row = self.here.setdefault(target, {})
        assert key not in row, f"{key} is there already"
        row[key] = x
        self._count(x.nbytes)

    def take(self, target: int, key: Key) -> Tensor:
        return self.here[target][key]

    def pop(self, target: int, key: Key) -> Tensor:
        found = self.here[target].pop(key)
        self._count(-found.nbytes)
        return found

    def send_away(self, source: int, following: int, *, keep: bool) -> None:
        """Write what a patch left to the store, but for what the next patch takes; that too, if it
        is to be kept there."""
        if self.store is None:
            return
        while self.unsettled:
            self.unsettled.pop().settle()
        for target, row in self.here.items():
            mine = {key: x for key, x in row.items() if key[1] == source}
            if mine and (keep or target != following):
                parcel = _Parcel(self.store, mine)
                self.parcels.setdefault(target, []).append(parcel)
                self.unsettled.append(parcel)
                for key in mine if target != following else ():
                    self.pop(target, key)

    def begin(self, target: int) -> None:
        """Begin to read what is in the store for a patch."""
        row = self.here.setdefault(target, {})
        for parcel in self.parcels.get(target, ()):
            if parcel.places.keys().isdisjoint(row):
                parcel.begin()
                self._count(sum(size for _, size, _ in parcel.places.values()))

    def arrive(self, target: int) -> None:
        """Wait for it."""
        for parcel in self.parcels.get(target, ()):
            if parcel.reading is not None:
                self.here[target].update(parcel.finish())

    def drop(self, target: int, *, stored: bool) -> dict[Key, Tensor]:
        """Forget what a patch took; also what is `stored`. What was left on the device."""
        left = self.here.pop(target, {})
        self._count(-sum(x.nbytes for x in left.values()))
        if stored:
            self.parcels.pop(target, None)
        return left

    def _count(self, more: int) -> None:
        self.bytes += more
        self.peak = max(self.peak, self.bytes)


class Halos:
    """Those of one sweep of one micro-batch, and their gradients. What a patch took is `kept` if
    backward follows."""

    def __init__(self, kept: bool, store: ValueStore | None = None) -> None:
        self.kept, self.stored, self.recomputing = kept, store is not None, False
        self.halos, self.gradients = Mailbox(store), Mailbox(store)

    @property
    def bytes(self) -> int:
        """On the device."""
        return self.halos.bytes

    def put(self, source: int, target: int, tag: Tag, parts: Sequence[Tensor]) -> None:
        """Leave cells for a later patch, or their gradient for an earlier one."""
        if target < source:
            self.gradients.put(target, (tag, source), _copied(parts))
        elif not self.recomputing:  # or it has them, and has run
            self.halos.put(target, (tag, source), _copied(parts))

    def take(self, target: int, source: int, tag: Tag) -> Tensor:
        """What another patch left. Halos stay: a call may be recomputed more than once."""
        if source < target:
            return self.halos.take(target, (tag, source))
        return self.gradients.pop(target, (tag, source))

    def storages(self, patch: int) -> set[int]:
        """The memory of what a patch takes, which is counted here."""
        return {storage_of(x) for x in self.halos.here.get(patch, {}).values()}

    def most(self) -> int:
        """The most bytes of gradients that waited since this was asked for the last time."""
        found, self.gradients.peak = self.gradients.peak, self.gradients.bytes
        return found

    # --- the life of a patch ----------------------------------------------------------------------

    def begin(self, patch: int) -> None:
        """It runs after the next one."""
        for box in (self.halos, self.gradients):
            box.begin(patch)

    def arrive(self, patch: int) -> None:
        """It runs now."""
        for box in (self.halos, self.gradients):
            box.arrive(patch)

    def ran(self, patch: int) -> None:
        """It has run forward."""
        self.halos.send_away(patch, patch + 1, keep=self.kept)
        if self.stored or not self.kept:
            self.halos.drop(patch, stored=not self.kept)

    def done(self, patch: int) -> None:
        """It has run backward."""
        self.gradients.send_away(patch, patch - 1, keep=False)
        self.halos.drop(patch, stored=True)
        assert not self.gradients.drop(patch, stored=True), "gradients of halos are left over"

    def finished(self) -> None:
        """All patches have run for the last time."""
        for box in (self.halos, self.gradients):
            assert not any(box.here.values()) and not box.parcels, "halos are left over"


def _copied(parts: Sequence[Tensor]) -> Tensor:
    """The cells in memory of their own: what they are part of may be changed, or dropped."""
    if len(parts) == 1:
        return parts[0].detach().clone(memory_format=torch.contiguous_format).view(-1)
    return torch.cat([part.detach().reshape(-1) for part in parts])


@dataclass
class Carrier:
    """Which patch of a grid runs, and the halos of its pass."""

    grid: tuple[int, ...] = ()
    patch: int = 0
    halos: Halos = field(default_factory=lambda: Halos(False))

    @contextmanager
    def carrying(self, halos: Halos, *, recomputing: bool) -> Iterator[None]:
        """While the patches of a pass run."""
        before, self.halos, halos.recomputing = self.halos, halos, recomputing
        try:
            yield
        finally:
            self.halos = before


@dataclass(frozen=True)
class CarryGroup(SpatialGroup):
    """A patch and those around it as members of a group, as seen by that patch, or by any whose
    boxes are alike: what one of these has bound, the others use."""

    carrier: Carrier = field(default_factory=Carrier)
    tag: Tag = ("", "", 0)

    def channel(self, call: str, value: str, number: int) -> CarryGroup:
        return replace(self, tag=(call, value, number))

    def number(self, member: int) -> int:
        """The patch that is where a member is, as seen from the one that runs."""
        found, mine, theirs = 0, self.coordinate, coordinate(self.grid, member)
        for count, a, b in zip(self.carrier.grid, mine, theirs, strict=True):
            found = found * count + b - a
        return self.carrier.patch + found

    def exchange(
        self, parts: Mapping[int, Sequence[Tensor]], counts: Mapping[int, int], like: Tensor
    ) -> tuple[dict[int, Tensor], Work]:
        carrier = self.carrier
        for member, tensors in parts.items():
            carrier.halos.put(carrier.patch, self.number(member), self.tag, tensors)
        found = {}
        for member, count in counts.items():
            source = self.number(member)
            found[member] = x = carrier.halos.take(carrier.patch, source, self.tag)
            assert x.numel() == count and x.dtype == like.dtype, f"{self.tag}: not what was sent"
        return found, Done()

    def all_reduce(self, mine: Tensor) -> Tensor:
        """A summand: the caller sums over patches."""
        return mine

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        raise AssertionError("a patch cannot gather the others")
