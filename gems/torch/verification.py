"""What was computed in two ways, judged row by row: a table, and whether all of it is equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gems.draw.table import table
from gems.geometry.box import Box
from gems.plans.plan import Plan
from gems.torch.tensors.rng import Drawn

Tensor = torch.Tensor
Pairs = Sequence[tuple[str, int, int]]  # of what, bytes predicted, bytes counted
# A difference is compared with the change of its tensor, with this much of the largest change of
# any, or with this much of the tensor itself, whose last digit is rounded: whichever is most.
FLOOR, ROUNDED = 1e-3, 1e-5
# How much more than predicted may be counted. Bytes are predicted one by one, but where tiles or
# patches have halos or some parameters no gradient; shards are padded as if their numbers had four
# bytes; and the overlap of fused halos (d2) is not predicted.
EXACT, PADDED, ESTIMATED, FUSED = 0.0, 0.001, 0.1, 1.0
HEADERS = ("what", "equal", "largest difference", "limit", "where")


@dataclass(frozen=True)
class Row:
    """One line of the table. `found` is a relative difference, or what differs, in words."""

    what: str
    passed: bool
    found: str
    limit: str
    where: str = ""


@dataclass(frozen=True)
class Verification:
    """Steps under a plan beside the same steps of an oracle: the plain loop, one rank under GEMS
    where the model draws random numbers (which only GEMS keys by sample and pixel), or another
    plan. `error` is the largest relative difference of the numbers."""

    ranks: int
    steps: int
    oracle: str
    rows: tuple[Row, ...]
    error: float

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    @property
    def worst(self) -> str:
        """What differs, and where."""
        return "; ".join(
            f"{row.what}: {row.found} {row.where}" for row in self.rows if not row.passed
        )

    def __str__(self) -> str:
        shown = [
            (row.what, "yes" if row.passed else "NO", row.found, row.limit, row.where)
            for row in self.rows
        ]
        word = "equal" if self.passed else "DIFFERENT"
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{table(shown, HEADERS)}{word}: {self.steps} steps on {ranks} and by {self.oracle}"


@dataclass
class Outcome:
    """What some steps gave. A gradient is NaN where there was none."""

    losses: list[float]
    gradients: dict[str, Tensor]  # summed over the steps as momentum sums them
    state: dict[str, Any]
    differing: list[str] = field(default_factory=list)  # tensors of which replicas have others
    draws: list[Drawn] = field(default_factory=list)
    memory: Pairs = ()
    messages: Pairs = ()


def judge(
    found: Outcome,
    wanted: Outcome,
    before: Mapping[str, Any],
    plan: Plan,
    oracle: str,
    tolerance: float,
) -> Verification:
    """`before` is the state that both began with."""
    losses = [
        (abs(a - b) / max(1.0, abs(b)), f"step {i + 1}")
        for i, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True))
    ]
    trained = set(wanted.gradients)
    zero = {name: torch.zeros_like(x) for name, x in wanted.gradients.items()}
    parameters = {name: x for name, x in before.items() if name in trained}
    buffers = {name: x for name, x in before.items() if name not in trained and torch.is_tensor(x)}
    errors = {
        "loss": max(losses),
        "gradients": _largest(zero, found.gradients, wanted.gradients),
        "parameters": _largest(parameters, found.state, wanted.state),
        "buffers": _largest(buffers, found.state, wanted.state),
    }
    rows = [
        Row(what, error <= tolerance, f"{error:.1e}", f"{tolerance:g}", where if error else "")
        for what, (error, where) in errors.items()
    ]
    rows += [_replicas(found), _dropout(found, wanted)]
    limit = _limit(plan, wanted)
    rows += [_bytes("peak memory", found.memory, limit), _bytes("messages", found.messages, limit)]
    error = max(error for error, _ in errors.values())
    return Verification(plan.world, len(losses), oracle, tuple(rows), error)


def _largest(
    before: Mapping[str, Tensor], found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[float, str]:
    """By how much of the wanted change a tensor's differs, at most, and which tensor that is."""
    names = [name for name, value in before.items() if value.numel()]
    changes = {n: _change(wanted[n], before[n]) for n in names if before[n].is_floating_point()}
    least = max(FLOOR * max(changes.values(), default=0.0), 1e-12)
    sizes = {name: ROUNDED * float(before[name].double().abs().max()) for name in names}
    errors = [
        (_difference(found[n], wanted[n], max(changes.get(n, 1.0), least, sizes[n])), n)
        for n in names
    ]
    return max(errors, default=(0.0, "none"))


def _change(after: Tensor, before: Tensor) -> float:
    change = (after.detach().cpu().double() - before.detach().cpu().double()).abs()
    return float(change.nan_to_num(0.0).max())


def _difference(mine: Tensor, theirs: Tensor, unit: float) -> float:
    """Infinite if whole numbers differ, or one is no number and the other is."""
    mine, theirs = mine.detach().cpu(), theirs.detach().cpu()
    if mine.shape != theirs.shape or not torch.equal(mine.isnan(), theirs.isnan()):
        return float("inf")
    if not theirs.is_floating_point():
        return 0.0 if torch.equal(mine, theirs) else float("inf")
    return float((mine.double() - theirs.double()).abs().nan_to_num(0.0).max()) / unit


def _replicas(found: Outcome) -> Row:
    """Ranks that hold the same weights and buffers must hold the same bits."""
    count, where = len(found.differing), ", ".join(found.differing[:2])
    return Row("replicas", not count, f"{count} tensors differ", "0", where)


# --- random numbers -------------------------------------------------------------------------------


def _dropout(found: Outcome, wanted: Outcome) -> Row:
    """Cell by cell for dropout, and by the key of the generator for other random calls."""
    mine, theirs = _by_call(found.draws), _by_call(wanted.draws)
    bad = sorted(
        {at for at in mine.keys() | theirs.keys() if not _same(mine.get(at), theirs.get(at))}
    )
    seen = f"{len(bad)} of {len(theirs)} draws differ" if theirs or mine else "nothing is drawn"
    where = "step {}, micro-batch {}, {}".format(*bad[0]) if bad else ""
    return Row("dropout", not bad, seen, "0", where)


def _by_call(draws: Sequence[Drawn]) -> dict[tuple[int, int, str], list[Drawn]]:
    found: dict[tuple[int, int, str], list[Drawn]] = {}
    for drawn in draws:
        found.setdefault((drawn.step + 1, drawn.micro_batch, drawn.name), []).append(drawn)
    return found


def _same(mine: list[Drawn] | None, theirs: list[Drawn] | None) -> bool:
    if mine is None or theirs is None:
        return False
    a, b = _whole(mine), _whole(theirs)
    return a is not None and b is not None and torch.equal(a, b)


def _whole(draws: list[Drawn]) -> Tensor | None:
    """The mask of the whole tensor out of those of its boxes, -1 where nobody drew; for other
    calls the keys of generators. None if two that overlap differ."""
    if draws[0].kept is None:
        return torch.tensor(sorted({drawn.key for drawn in draws}))
    whole = torch.full(draws[0].shape, -1, dtype=torch.int8)
    for drawn in draws:
        if drawn.kept is None or drawn.box is None or drawn.shape != draws[0].shape:
            return None
        there = whole[_slices(drawn.box)]
        kept = drawn.kept.to(torch.int8)
        if not torch.equal(torch.where(there < 0, kept, there), kept):
            return None
        there.copy_(kept)
    return whole


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


# --- bytes ----------------------------------------------------------------------------------------


def _limit(plan: Plan, wanted: Outcome) -> float:
    if plan.cut:
        return FUSED if plan.halo == "d2" else ESTIMATED
    whole = not any(bool(gradient.isnan().any()) for gradient in wanted.gradients.values())
    streams = any(saved.patches for saved in plan.activations)
    if not whole or streams:
        return ESTIMATED
    return PADDED if any(state.sharded for state in plan.residency) else EXACT


def _bytes(what: str, pairs: Pairs, limit: float) -> Row:
    """Where bytes are predicted exactly any difference fails; else what exceeds the limit."""
    over = [
        (abs(counted - predicted) if limit == EXACT else counted - predicted, i)
        for i, (_, predicted, counted) in enumerate(pairs)
    ]
    bad = [i for more, i in over if more > limit * pairs[i][1]]
    shown = pairs[bad[0] if bad else max(over)[1]] if pairs else ("no messages", 0, 0)
    named, predicted, counted = shown
    text = f"counted {counted:,} B, predicted {predicted:,} B"
    return Row(what, not bad, text, f"+{100 * limit:g}%" if limit else "0", named)


def pairs_of(predicted: Mapping[str, int], counted: Mapping[str, int]) -> Pairs:
    """By name, in order."""
    names = dict.fromkeys([*predicted, *counted])
    return [(name, predicted.get(name, 0), counted.get(name, 0)) for name in names]
