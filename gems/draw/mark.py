"""An event as it is drawn: its kind in caption, its colours, and its tooltip."""

from __future__ import annotations

from dataclasses import dataclass

from gems.draw.shapes import ACTIONS, INK
from gems.draw.units import seconds
from gems.predict.timeline import Event, Timeline
from gems.schedule.action import Action

PALER = (ACTIONS["F"][2], "paler: replica 1")


@dataclass(frozen=True)
class Mark:
    """One box. `pale`: it belongs to a replica that is not the first on its rank."""

    event: Event
    action: Action
    pale: bool

    @property
    def key(self) -> str:
        """What `ACTIONS` calls it."""
        return ">" if self.action.way else self.action.kind.value

    @property
    def name(self) -> str:
        return ACTIONS[self.key][0]

    @property
    def fill(self) -> str:
        return ACTIONS[self.key][2 if self.pale or self.action.way == "<" else 1]

    @property
    def ink(self) -> str:
        return INK if self.pale else "#ffffff"

    def tip(self, whole: bool) -> str:
        since = self.event.start
        begun = f"from {seconds(since, whole)}" if since else "from the start"
        lasts = seconds(self.event.seconds, whole)
        return f"{self.action} on rank {self.event.rank}: {lasts}, {begun}"


def marks(timeline: Timeline) -> list[Mark]:
    """A mark for every event, in order."""
    pairs = [(event, event.parsed()) for event in timeline.events]
    pale = _pale(pairs)
    return [Mark(e, a, (e.rank, a.replica) in pale) for e, a in pairs]


def entries(found: list[Mark]) -> list[tuple[str, str]]:
    """The legend of what is there to see, and no more: (colour, name)."""
    seen = {mark.key for mark in found}
    named = [(first, name) for key, (name, first, _) in ACTIONS.items() if key in seen]
    return named + ([PALER] if any(mark.pale for mark in found) else [])


def _pale(pairs: list[tuple[Event, Action]]) -> set[tuple[int, int]]:
    """The replicas that are not the first on their rank, as (rank, replica)."""
    found = {(event.rank, action.replica) for event, action in pairs if action.computes}
    first = dict(sorted(found, reverse=True))  # the last to be put in is the lowest
    return {(rank, replica) for rank, replica in found if replica != first[rank]}
