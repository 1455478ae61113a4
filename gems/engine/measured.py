"""A step as one rank measured it: bytes at once, seconds when somebody asks.

Stamps of a GPU are events. Reading one waits until the GPU has come there, so that a step that is
never drawn reads none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gems.predict.timeline import Event, Memory, Timeline
from gems.schedule.action import Action

Stamped = tuple[Action, Any, Any, Memory]  # begin, end, and what is live then


@dataclass(frozen=True)
class Measured:
    """`seconds` gives wall and CPU seconds of a stamp."""

    rank: int
    stamps: Sequence[Stamped]
    peak: Memory
    max_in_flight: int
    seconds: Callable[[Any], tuple[float, float]]
    sent: Mapping[int, int]  # bytes by rank

    @cached_property
    def timeline(self) -> Timeline:
        events, memory = [], []
        for action, begin, end, live in self.stamps:
            (start, cpu_start), (stop, cpu_stop) = map(self.seconds, (begin, end))
            events.append(Event(self.rank, str(action), start, stop, cpu_stop - cpu_start))
            memory.append((stop, live))
        return Timeline(
            tuple(events),
            memory=(tuple(memory),),
            peaks=(self.peak,),
            max_in_flight=(self.max_in_flight,),
            links=tuple((self.rank, to, size) for to, size in sorted(self.sent.items())),
        )
