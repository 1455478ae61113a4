"""In which sweep over the patches of an image each step of a model runs.

A step that needs all of the image ends a sweep: what it gives is known in the next. What one sweep
makes and a later one reads is stored whole. Steps run as early as they can, unless more is stored
then.

    conv ── norm ── relu ── conv ── norm ── + ──     the shortcut runs in the sweep of the sum,
       └───────── shortcut ─────────────────┘        from its input, which the norm stores anyway
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A call, or a block: the values it reads and writes, and those it changes in place. `tiled`
    steps work on the image; for `joins` see `Block`."""

    reads: Sequence[str]
    writes: Sequence[str]
    changes: Sequence[str] = ()
    tiled: bool = True
    joins: int = 0


def assign(steps: Sequence[Step], sizes: Mapping[str, float], wanted: Collection[str]) -> list[int]:
    """The sweep of each step; a norm begins there, and ends in the next. `sizes` has the bytes of
    each value, `wanted` are stored whenever they are made."""
    found = _earliest(steps)
    _later(steps, found, sizes, set(wanted))
    return found


def _earliest(steps: Sequence[Step]) -> list[int]:
    found: list[int] = []
    ready: dict[str, int] = {}
    last_read: dict[str, int] = {}
    for step in steps:
        at = max((ready.get(name, 0) for name in step.reads), default=0)
        # A change in place may not come before those that read what was there.
        at = max((at, *(last_read.get(name, 0) for name in step.changes)))
        found.append(at)
        for name in step.reads:
            last_read[name] = max(last_read.get(name, 0), at + (step.joins == 2))
        ready.update(dict.fromkeys(step.writes, at + (step.joins > 0)))
    return found


def _later(
    steps: Sequence[Step], found: list[int], sizes: Mapping[str, float], wanted: set[str]
) -> None:
    """Move steps on to the first sweep that reads their results, if less is stored then."""
    changed = {name for step in steps for name in step.changes}
    made = {n: k for k, step in enumerate(steps) for n in step.writes}
    readers: dict[str, list[int]] = {}
    for k, step in enumerate(steps):
        for name in step.reads:
            readers.setdefault(name, []).append(k)

    def stored(name: str, apart: int) -> bool:
        """Whether a value is stored anyway, for readers other than this step."""
        if name not in made:
            return True  # it enters the stage
        maker = made[name]
        born = found[maker] + (steps[maker].joins == 2)
        last = [found[k] + (steps[k].joins == 2) for k in readers.get(name, ()) if k != apart]
        return name in wanted or max(last, default=born) > born

    for k in reversed(range(len(steps))):
        step = steps[k]
        images = [n for n in step.reads if n not in made or _image(steps[made[n]])]
        fixed = not step.tiled or step.joins or changed.intersection((*step.reads, *step.writes))
        if fixed or wanted.intersection(step.writes):
            continue
        first = min((found[r] for n in step.writes for r in readers.get(n, ())), default=0)
        if first <= found[k]:
            continue
        saved = sum(sizes[n] for n in step.writes)
        if saved > sum(sizes[n] for n in dict.fromkeys(images) if not stored(n, k)):
            found[k] = first


def _image(step: Step) -> bool:
    return step.tiled and step.joins != 1
