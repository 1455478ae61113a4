"""Tables in Markdown, and how far a simulated number is from a published one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def off(simulated: float, published: float) -> float:
    """Relative: +0.1 is 10% too high."""
    return simulated / published - 1


def percent(share: float) -> str:
    return f"{share:+.1%}"
