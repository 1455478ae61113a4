"""When each action ran, predicted or measured, and how many bytes were live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from gems.schedule.action import Action, Kind, Schedule, parse_action

COLLECTIVES = ("A", "U", "T", "G")  # how they end
OFFLOADS = frozenset("SL")  # letters of stores and loads, and of no other action
KINDS = ("weights", "gradients", "optimizer", "activations", "boundary", "communication")


@dataclass(frozen=True)
class Event:
    """One action on one rank. Seconds from the beginning of the step; `cpu` is the thread's own."""

    rank: int
    action: str
    start: float
    stop: float
    cpu: float = 0.0

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    def parsed(self) -> Action:
        return parse_action(self.action)


@dataclass(frozen=True)
class Memory:
    """Live bytes of one rank, by kind, right after an action (or at the peak of a step).

    What is `offloaded`, to the host or to disk, is no part of the total.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    boundary: int = 0
    communication: int = 0
    offloaded: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)


class Meter:
    """Counts live bytes of one rank: `add` and `drop` while a step runs; `peak` is the moment with
    most bytes in total."""

    def __init__(self, resident: Memory) -> None:
        self._live = {kind: getattr(resident, kind) for kind in (*KINDS, "offloaded")}
        self._total = self._most = resident.total
        self.peak = resident
        self.in_flight = self.max_in_flight = 0
        self.stored = 0  # bytes of activations that are offloaded; resident state may be as well

    @property
    def now(self) -> Memory:
        return Memory(**self._live)

    def continued(self) -> Meter:
        """A meter that begins with what is live now."""
        new = Meter(self.now)
        new.in_flight = new.max_in_flight = self.in_flight
        new.stored = self.stored
        return new

    def add(self, kind: str, size: int) -> None:
        self._change(kind, size)
        self._look()

    def drop(self, kind: str, size: int) -> None:
        self._change(kind, -size)

    def _change(self, kind: str, more: int) -> None:
        self._live[kind] += more
        if kind != "offloaded":
            self._total += more

    def _look(self) -> None:
        if self._total > self._most:
            self._most, self.peak = self._total, self.now

    def save(self, size: int, activations: bool = True) -> None:
        """A forward saves activations, or only the inputs that it is recomputed from."""
        self.in_flight += activations
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        self.add("activations", size)

    def recompute(self, inputs: int, activations: int) -> None:
        """Activations in place of saved inputs."""
        self.drop("activations", inputs)
        self.save(activations)

    def free(self, size: int, activations: bool = True) -> None:
        """Backward has used them."""
        self.in_flight -= activations
        self.drop("activations", size)

    def begin_store(self, size: int) -> None:
        """What a forward saved is copied to host or disk; it is still here, too."""
        self.stored += size
        self.add("offloaded", size)

    end_store = free

    begin_load = save

    def end_load(self, size: int) -> None:
        """It is here, and no longer on host or disk."""
        self.stored -= size
        self.drop("offloaded", size)

    def store(self, size: int) -> None:
        """More, or less, is in a store that was never on the device as a whole."""
        self.stored += size
        self._change("offloaded", size)

    def spike(self, kind: str, size: int) -> None:
        """For a moment there was more."""
        self.add(kind, size)
        self.drop(kind, size)

    def set_resident(self, resident: Memory) -> None:
        """Weights, gradients and optimizer state may have changed, on the device and offloaded."""
        for kind in ("weights", "gradients", "optimizer"):
            self._change(kind, getattr(resident, kind) - self._live[kind])
        self._live["offloaded"] = resident.offloaded + self.stored
        self._look()


@dataclass(frozen=True)
class Timeline:
    """The events of one step over all ranks, with live bytes at the end of each, if counted.

    `clock` is what the seconds are: `wall`, `virtual` or `simulated`. `memory` has one row per rank
    of (seconds, Memory); `peaks` the highest of each rank; `max_in_flight` the most micro-batches
    whose activations it held; `links` the bytes that stages sent, as (source, target, bytes).
    `allocator` has the most bytes in tensors and the most reserved for them on the GPU of each
    rank, as torch counted them over all steps so far.
    """

    events: tuple[Event, ...]
    clock: str = "wall"
    memory: tuple[tuple[tuple[float, Memory], ...], ...] = ()
    peaks: tuple[Memory, ...] = ()
    max_in_flight: tuple[int, ...] = ()
    links: tuple[tuple[int, int, int], ...] = ()
    allocator: tuple[tuple[int, int], ...] = ()

    @property
    def ranks(self) -> int:
        return 1 + max((e.rank for e in self.events), default=-1)

    @property
    def seconds(self) -> float:
        """Length of the step, first start to last stop."""
        if not self.events:
            return 0.0
        return max(e.stop for e in self.events) - min(e.start for e in self.events)

    @cached_property
    def _at_work(self) -> list[Event]:
        """What ranks compute: in a simulated step, collectives, stores and loads run beside it."""
        if self.clock != "simulated":
            return list(self.events)
        own = (e for e in self.events if not e.action.endswith(COLLECTIVES))
        return [e for e in own if OFFLOADS.isdisjoint(e.action)]

    def busy(self, rank: int) -> float:
        return sum(e.seconds for e in self._at_work if e.rank == rank)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they did nothing."""
        whole = self.seconds * self.ranks
        return 1 - sum(e.seconds for e in self._at_work) / whole if whole else 0.0

    def share(self, wanted: Callable[[Action], bool]) -> float:
        """The share of the busy time that went into some kind of action."""
        busy = sum(e.seconds for e in self._at_work)
        return sum(e.seconds for e in self._at_work if wanted(e.parsed())) / busy if busy else 0.0


MOST_RANKS = 2**14  # that a picture has lanes for
LONGEST = 1e9  # seconds


def timeline_problems(timeline: Timeline) -> Iterator[str]:
    """Why a timeline out of a file cannot be one of a step: `gems draw` asks before it draws."""
    for event in timeline.events:
        if not 0 <= event.rank < MOST_RANKS:
            yield f"{event.action} is on rank {event.rank}; ranks are 0 to {MOST_RANKS - 1}"
        if not -LONGEST <= event.start <= event.stop <= LONGEST:
            yield f"{event.action} runs from {event.start} to {event.stop} s"
    for name in ("memory", "peaks", "allocator"):
        if (rows := len(getattr(timeline, name))) not in (0, timeline.ranks):
            yield f"{name} has {rows} rows for {timeline.ranks} ranks"
    for rank, row in enumerate(timeline.memory):
        if any(not -LONGEST <= at <= LONGEST or _negative(held) for at, held in row):
            yield f"the memory of rank {rank} has times or bytes that cannot be"
    if any(map(_negative, timeline.peaks)):
        yield "peaks have bytes that cannot be"


def _negative(memory: Memory) -> bool:
    return any(not 0 <= getattr(memory, kind) < 2**60 for kind in (*KINDS, "offloaded"))


def merged(parts: list[Timeline]) -> Timeline:
    """One timeline out of what each rank saw, from the first start on."""
    events = [e for part in parts for e in part.events]
    zero = min((e.start for e in events), default=0.0)
    return Timeline(
        events=tuple(replace(e, start=e.start - zero, stop=e.stop - zero) for e in events),
        clock=parts[0].clock,
        memory=tuple(tuple((t - zero, m) for t, m in row) for p in parts for row in p.memory),
        peaks=tuple(peak for part in parts for peak in part.peaks),
        max_in_flight=tuple(n for part in parts for n in part.max_in_flight),
        links=tuple(link for part in parts for link in part.links),
        allocator=tuple(pair for part in parts for pair in part.allocator),
    )


# By how much an action changes the number in flight; a forward that is recomputed does not.
IN_FLIGHT = {Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.INPUT: 0, Kind.BACKWARD: -1, Kind.WEIGHT: -1}


def counted(schedule: Schedule) -> tuple[int, ...]:
    """The most samples each rank keeps at once, stage by stage, if the order is followed."""
    most = []
    for row in schedule.ranks:
        live = peak = 0
        again = {a.unit for a in row if a.kind is Kind.RECOMPUTE}
        for action in row:
            if action.computes and (action.kind is not Kind.FORWARD or action.unit not in again):
                live += IN_FLIGHT[action.kind]
                peak = max(peak, live)
        most.append(peak)
    return tuple(most)
