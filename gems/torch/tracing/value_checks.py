"""Branches that look for numbers that went wrong, `if x.isnan().any()`: recorded as not taken.

A recording cannot take a branch on values. Where the module that does would leave nothing to
partition, it is recorded as if all numbers were finite, and every forward checks that they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gems.errors import LossError
from gems.torch.tracing.calls import Call

WRONG = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True}
PASSED_ON = {"any", "all", "max", "min", "detach", "clone", "to"}
NEGATED = {"logical_not", "bitwise_not", "invert"}
EITHER = {"logical_or", "bitwise_or", "or", "ior", "ror"}
BOTH = {"logical_and", "bitwise_and", "and", "iand", "rand"}


class Branches:
    """The checks of one recording."""

    def __init__(self) -> None:
        self._checks: set[int] = set()
        self._kept: list[Any] = []

    def outcome(
        self, func: Any, args: Any, known: Mapping[int, Any], calls: Sequence[Call]
    ) -> bool | None:
        """What `bool(x)` is while all numbers are finite, if that is all it depends on."""
        if getattr(func, "__name__", "") not in ("__bool__", "item") or not args:
            return None
        if id(args[0]) not in known or args[0].dtype is not torch.bool:
            return None
        return _outcome(known[id(args[0])][0], calls)

    def check(self, outcome: bool, stack: Sequence[str]) -> Callable[[torch.Tensor], None]:
        where = (stack[-1] if stack else "") or "the model's forward"

        def check(x: torch.Tensor) -> None:
            if bool(x) is not outcome:
                raise LossError(
                    f"{where} looks for numbers that are not finite, and found some. GEMS recorded "
                    "the branch for finite numbers; look at the data of this step, lower the "
                    "learning rate, or put the branch into a module of its own"
                )

        check.__name__ = "check_finite"
        self._checks.add(id(check))
        self._kept.append(check)
        return check

    def checks(self, func: Any) -> bool:
        return id(func) in self._checks


def _outcome(name: str, calls: Sequence[Call]) -> bool | None:
    call = next((c for c in calls if name in c.writes), None)
    if call is None or call.function is None:
        return None
    kind = getattr(call.function, "__name__", "").strip("_")
    if kind in WRONG:
        return WRONG[kind]
    inner = [_outcome(read, calls) for read in call.reads]
    if not inner or None in inner:
        return None
    if kind in PASSED_ON:
        return inner[0]
    if kind in NEGATED:
        return not inner[0]
    if kind in EITHER:
        return any(inner)
    return all(inner) if kind in BOTH else None
