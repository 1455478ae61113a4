"""How long a step would take if every rank had a core of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """One action as it was executed; `seconds` is the CPU time of the rank's thread.

    Kinds: F forward, B backward, I and W its two halves (gradients of inputs, of weights).
    """

    stage: int
    kind: str
    micro_batch: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def spread(row: list[Done], total: float) -> list[Done]:
    """The row with all of the rank's CPU time in it: what no action claims (messages, losses,
    the schedule's own loop) is spread over them in proportion."""
    claimed = sum(done.seconds for done in row)
    return [
        Done(done.stage, done.kind, done.micro_batch, done.seconds * total / claimed)
        for done in row
    ]


def needs(done: Done) -> list[tuple[int, str, int]]:
    """What must have ended before. A stage's backward is known as "B", whole or only its I."""
    stage, micro_batch = done.stage, done.micro_batch
    if done.kind == "F":
        return [(stage - 1, "F", micro_batch)]
    if done.kind == "W":
        return [(stage, "B", micro_batch)]
    return [(stage, "F", micro_batch), (stage + 1, "B", micro_batch)]


def virtual_seconds(rows: list[list[Done]]) -> float:
    """The length of the step when an action starts as soon as its rank's previous one and all it
    needs have ended. Messages take no time here: what they cost the rank is in the actions.

        rank 0  0F0 0F1 ... ... 0B0 0B1
        rank 1      1F0 1B0 1F1 1B1
    """
    present = {
        (d.stage, "B" if d.kind == "I" else d.kind, d.micro_batch) for row in rows for d in row
    }
    ended: dict[tuple[int, str, int], float] = {}
    clocks, heads = [0.0] * len(rows), [0] * len(rows)
    while any(head < len(row) for head, row in zip(heads, rows, strict=True)):
        moved = False
        for rank, row in enumerate(rows):
            while heads[rank] < len(row):
                done = row[heads[rank]]
                before = [need for need in needs(done) if need in present]
                if not all(need in ended for need in before):
                    break
                start = max([clocks[rank], *(ended[need] for need in before)])
                clocks[rank] = start + done.seconds
                kind = "B" if done.kind == "I" else done.kind
                ended[done.stage, kind, done.micro_batch] = clocks[rank]
                heads[rank] += 1
                moved = True
        if not moved:
            stuck = ", ".join(
                f"rank {r} at {row[h]}"
                for r, (h, row) in enumerate(zip(heads, rows, strict=True))
                if h < len(row)
            )
            raise ValueError(f"this order can never have run: {stuck}")
    return max(clocks)


def busy(rows: list[list[Done]]) -> float:
    """The share of all ranks' virtual time in which they compute."""
    return sum(done.seconds for row in rows for done in row) / len(rows) / virtual_seconds(rows)
