"""Actions, messages, and the schedule that orders them per rank.

The text form is what one writes on a whiteboard, and it parses back:

    2F0      forward of stage 2, micro-batch 0            2B0     backward
    2I0      its input gradient                           2W0     its weight gradient
    2R0      recompute its forward, to have the activations that it did not save
    2S0      store its activations, on the host or on disk
    2L0      load them back
    2F0<1    post the receive of 2F0's input from stage 1
    2F0>3    send 2F0's output to stage 3
    2B0<3    post the receive of 2B0's gradient from 3    2B0>1   send the input's gradient to 1
    2A       all-reduce the gradients of stage 2 over its replica group
    2U       unshard its weights: all-gather them (zero=3), or fetch them from host or disk
    2D       reshard them: drop all but the own shard
    2T       all-reduce the gradients of weights that stage 2 shares with later stages
    2O       optimizer step on its weights, with the gradients that were reduced last
    2G       all-gather its weights, of which each rank has updated a shard (zero=1 and 2)
    2F0@1    the same, in replica 1                       2F0.1   the same, of part 1 only

Parts of a micro-batch (say, patches of its images) are units of their own, with the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from gems.errors import ScheduleError, short


class Kind(str, Enum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    RECOMPUTE = "R"
    ALL_REDUCE = "A"
    UNSHARD = "U"
    RESHARD = "D"
    TIED = "T"
    OPTIMIZER_STEP = "O"
    ALL_GATHER = "G"
    STORE = "S"
    LOAD = "L"


# Of a stage, not of a micro-batch.
OF_STAGE = (
    *(Kind.ALL_REDUCE, Kind.UNSHARD, Kind.RESHARD),
    *(Kind.TIED, Kind.OPTIMIZER_STEP, Kind.ALL_GATHER),
)
OFFLOADS = (Kind.STORE, Kind.LOAD)  # of saved activations, while other actions run
# Of a stage's whole replica group; of tied stages, of the replica groups of all of them.
COLLECTIVES = (Kind.ALL_REDUCE, Kind.UNSHARD, Kind.TIED, Kind.ALL_GATHER)


WHOLE = -1  # not a part: all of a micro-batch


class Message(NamedTuple):
    """One way of one micro-batch, or part, between two stages. `what` is `output` or `gradient`."""

    what: str
    source: int
    target: int
    micro_batch: int
    part: int = WHOLE


@dataclass(frozen=True)
class Action:
    """One thing that a rank does. With a `peer` stage it moves a message: `way` is `<` or `>`."""

    kind: Kind
    stage: int
    micro_batch: int = 0
    replica: int = 0
    way: str = ""
    peer: int = 0
    part: int = WHOLE

    def __str__(self) -> str:
        if self.kind in OF_STAGE:
            return f"{self.stage}{self.kind.value}"
        to = f"{self.way}{self.peer}" if self.way else ""
        at = f"@{self.replica}" if self.replica else ""
        part = "" if self.part == WHOLE else f".{self.part}"
        return f"{self.stage}{self.kind.value}{self.micro_batch}{part}{to}{at}"

    @cached_property
    def computes(self) -> bool:
        return not self.way and self.kind not in OF_STAGE and self.kind not in OFFLOADS

    @property
    def unit(self) -> tuple[int, int, int]:
        """What is computed: stage, micro-batch and part."""
        return self.stage, self.micro_batch, self.part

    @property
    def message(self) -> Message:
        """What is moved, named the same on both ends."""
        what = "output" if self.kind is Kind.FORWARD else "gradient"
        ends = (self.stage, self.peer) if self.way == ">" else (self.peer, self.stage)
        return Message(what, *ends, self.micro_batch, self.part)


LONGEST = 60  # characters of an action: numbers of a dozen digits
SPELLED = re.compile(
    r"(\d+)([FBIW]|[RSL](?![\d.]+[<>]))(\d+)(?:\.(\d+))?(?:([<>])(\d+))?(?:@(\d+))?|(\d+)([AUDTOG])"
)


def parse_action(text: str) -> Action:
    match = SPELLED.fullmatch(text)
    if not match:
        raise ScheduleError(
            f"{short(text, 60)!r} is not an action; "
            "write one like 2F0, 1B3@1, 2F0.1, 2R0, 2S0, 2F0>3, 1A or 1U"
        )
    if len(text) > LONGEST:
        raise ScheduleError(f"{short(text, 60)!r} has numbers that no plan has; give smaller ones")
    stage, kind, micro_batch, part, way, peer, replica, of_stage, letter = match.groups()
    if of_stage:
        return Action(Kind(letter), int(of_stage))
    return Action(
        kind=Kind(kind),
        stage=int(stage),
        micro_batch=int(micro_batch),
        replica=int(replica or 0),
        way=way or "",
        peer=int(peer or 0),
        part=WHOLE if part is None else int(part),
    )


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order."""

    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        rows = (" ".join(map(str, row)) for row in self.ranks)
        return "".join(f"{rank}: {row}".rstrip() + "\n" for rank, row in enumerate(rows))

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Every action with its rank, rank by rank."""
        return ((rank, action) for rank, row in enumerate(self.ranks) for action in row)


def parse(text: str) -> Schedule:
    """The schedule that `str()` wrote. Blank lines and `# comments` are passed over."""
    rows: list[tuple[Action, ...]] = []
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        rank, colon, actions = line.partition(":")
        if not colon or rank.strip() != str(len(rows)):
            raise ScheduleError(
                f"expected a line '{len(rows)}: actions of rank {len(rows)}', got {line[:40]!r}"
            )
        rows.append(tuple(map(parse_action, actions.split())))
    return Schedule(tuple(rows))
