"""Cells picked by number along a dim that is not cut: one-hot."""

from __future__ import annotations

from gems.torch.spatial.rule import Ask, NoCut, Rule, rule
from gems.torch.spatial.shapes import fetched


@rule(("one_hot",))
def one_hot(ask: Ask) -> Rule:
    """A new last dim; it must be said how long it is, for no rank sees the largest class."""
    x, *rest = (*ask.call.args, *ask.call.kwargs.values())
    if not rest or not isinstance(rest[0], int) or rest[0] < 1:
        raise NoCut("does not say how many classes there are")
    return fetched(ask, x, ask.primary(x).dims)
