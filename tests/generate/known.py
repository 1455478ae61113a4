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
    """Running statistics inside a checkpoint region."""
    regions = ("checkpoint_region", "checkpoint_reentrant")
    return any(piece.wrap in regions and piece.kind in NORMED for piece in case.model.pieces)


NORMED = ("block", "norm", "layer_norms")
KNOWN: tuple[Known, ...] = (
    Known(
        "checkpoint regions",
        "docs/trust.md: plain torch updates running statistics again when it recomputes",
        _counts_twice,
    ),
)


def known(case: Case) -> list[Known]:
    return [entry for entry in KNOWN if entry.concerns(case)]
