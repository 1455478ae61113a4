"""Strips: what patches that run one after the other hand on, and the group that they form.

    forward     patch 0 ──strip──► patch 1 ──strip──► patch 2      kept for backward
    backward    patch 0 ◄─gradient─ patch 1 ◄─gradient─ patch 2    each recomputed from its strips

A halo exchange between ranks is two messages at a time; between patches of one rank a message waits
until its patch runs. So layer rules for tiles serve for patches as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from gems.torch.spatial.group import SpatialGroup
from gems.torch.tensors.storage import storage_of
from gems.transport.protocol import Work

Tensor = torch.Tensor
Tag = tuple[str, int]  # a call, and which of its exchanges
Waiting = dict[int, dict[tuple[Tag, int], Tensor]]  # patch -> tag and sender -> what it will take


class Strips:
    """Those of one sweep of one micro-batch. What a patch took is `kept` if backward follows."""

    def __init__(self, kept: bool) -> None:
        self.kept = kept
        self.strips: Waiting = {}
        self.gradients: Waiting = {}
        self.recomputing = False
        self.bytes = 0  # of strips that wait
        self.summands = self.peak = 0  # bytes of gradients that wait, now and at most

    def put(self, source: int, target: int, tag: Tag, parts: Sequence[Tensor]) -> None:
        """Leave cells for a later patch, or their gradient for an earlier one."""
        later = target > source
        if later and self.recomputing:
            return  # it has them, and has run
        flat = _copied(parts)
        box = self.strips if later else self.gradients
        row = box.setdefault(target, {})
        assert (tag, source) not in row, f"{tag} of patch {source} is there already"
        row[tag, source] = flat
        if later:
            self.bytes += flat.nbytes
        else:
            self.summands += flat.nbytes
            self.peak = max(self.peak, self.summands)

    def take(self, target: int, source: int, tag: Tag) -> Tensor:
        """What another patch left. Strips stay: a call may be recomputed more than once."""
        if source < target:
            return self.strips[target][tag, source]
        found = self.gradients[target].pop((tag, source))
        self.summands -= found.nbytes
        return found

    def storages(self, patch: int) -> set[int]:
        return {storage_of(x) for x in self.strips.get(patch, {}).values()}

    def most(self) -> int:
        """The most bytes of gradients that waited since this was asked for the last time."""
        found, self.peak = self.peak, self.summands
        return found

    def ran(self, patch: int) -> None:
        """A patch has run forward."""
        if not self.kept:
            self.done(patch)

    def done(self, patch: int) -> None:
        """A patch has run for the last time."""
        assert not self.gradients.pop(patch, {}), f"patch {patch} left gradients of its strips"
        self.bytes -= sum(x.nbytes for x in self.strips.pop(patch, {}).values())

    def finished(self) -> None:
        """All patches have run for the last time."""
        assert not self.strips, "strips are left over"
        assert not any(self.gradients.values()), "gradients of strips are left over"


def _copied(parts: Sequence[Tensor]) -> Tensor:
    """The cells in memory of their own: what they are part of may be changed, or dropped."""
    if len(parts) == 1:
        return parts[0].detach().clone(memory_format=torch.contiguous_format).view(-1)
    return torch.cat([part.detach().reshape(-1) for part in parts])


@dataclass
class Carrier:
    """Which patch runs, and the strips of its pass."""

    patch: int = 0
    strips: Strips = field(default_factory=lambda: Strips(False))

    @contextmanager
    def carrying(self, strips: Strips, *, recomputing: bool) -> Iterator[None]:
        """While the patches of a pass run."""
        before, self.strips, strips.recomputing = self.strips, strips, recomputing
        try:
            yield
        finally:
            self.strips = before


class _Arrived:
    """Nothing to wait for."""

    def wait(self) -> None:
        """It is there."""


@dataclass(frozen=True)
class CarryGroup(SpatialGroup):
    """The patches of a tile as members of a group, as seen by patch number `me`, or by any whose
    boxes are alike: what one of these has bound, the others use."""

    carrier: Carrier = field(default_factory=Carrier)
    tag: Tag = ("", 0)

    def channel(self, call: str, number: int) -> CarryGroup:
        return replace(self, tag=(call, number))

    def exchange(
        self, parts: Mapping[int, Sequence[Tensor]], counts: Mapping[int, int], like: Tensor
    ) -> tuple[dict[int, Tensor], Work]:
        carrier = self.carrier
        moved = carrier.patch - self.me
        for member, tensors in parts.items():
            carrier.strips.put(carrier.patch, member + moved, self.tag, tensors)
        found = {}
        for member, count in counts.items():
            found[member] = x = carrier.strips.take(carrier.patch, member + moved, self.tag)
            assert x.numel() == count and x.dtype == like.dtype, f"{self.tag}: not what was sent"
        return found, _Arrived()

    def all_reduce(self, mine: Tensor) -> Tensor:
        """A summand: the caller sums over patches."""
        return mine

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        raise AssertionError("a patch cannot gather the others")
