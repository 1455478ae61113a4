"""Differences from plain PyTorch that are documented, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.generate.cases import Case


@dataclass(frozen=True)
class Known:
    name: str
    reason: str
    concerns: Callable[[Case], bool]


def _counts_twice(case: Case) -> bool:
    """Buffers that forward changes inside a checkpoint region, running statistics among them."""
    regions = ("checkpoint_region", "checkpoint_reentrant")
    return any(piece.wrap in regions and piece.kind in CHANGING for piece in case.model.pieces)


CHANGING = ("block", "norm", "layer_norms", "buffer_in_place", "buffer_assigned", "parametrized")
KNOWN: tuple[Known, ...] = (
    Known(
        "checkpoint regions",
        "docs/trust.md: plain torch changes buffers again when it recomputes",
        _counts_twice,
    ),
)


def known(case: Case) -> list[Known]:
    return [entry for entry in KNOWN if entry.concerns(case)]
