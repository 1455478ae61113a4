"""All ranks agree on what they are about to do, or each of them learns which rank differs.

Every call that takes all ranks (a step, a prediction, a checkpoint) begins with one exchange of a
small table: each rank fills in its own row of hashes, and reads those of all others.

           call   progress   model   settings   batch
    rank 0  ..       ..        ..       ..        ..     a column whose numbers differ is explained
    rank 1  ..       ..        ..       ..        ..     by what the ranks then gather

A rank that failed before it could take part contributes its failure in place of a call, so that no
rank waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gems.distributed.key import key
from gems.errors import GemsError, PeerError, ShapeError
from gems.transport.protocol import SAME, Transport

Facts = Mapping[str, Any]  # what is compared, by what people call it; printable


@dataclass(frozen=True)
class Claim:
    """What one rank is about to do, with what. `batch` is a hash, described by `given`."""

    call: str
    progress: Facts = field(default_factory=dict)
    model: int = 0
    settings: Facts = field(default_factory=dict)
    batch: int = 0
    given: str = ""
    failure: str = ""

    def row(self) -> list[int]:
        """Hashes of 40 bits: sums over ranks with zeros elsewhere are exact in any arithmetic."""
        parts = (self.failure or self.call, self.progress, self.model, self.settings, self.batch)
        return [key(repr(part)) >> 23 for part in parts]

    def contents(self) -> dict[str, Any]:
        return {
            "call": self.call,
            "progress": {name: str(x) for name, x in self.progress.items()},
            "model": self.model,
            "settings": {name: str(x) for name, x in self.settings.items()},
            "batch": self.batch,
            "given": self.given,
            "failure": self.failure,
        }


def agree(transport: Transport, claim: Claim) -> None:
    """Raise, on every rank, if any rank's claim differs."""
    if transport.world == 1:
        return
    table = transport.all_gather_numbers(claim.row())
    if all(row == table[0] for row in table):
        return
    raise difference(transport.all_gather_object(claim.contents()), transport.rank)


def difference(claims: Sequence[Any], rank: int) -> GemsError:
    """What to raise on a rank, given the claims of all: the first thing that is not the same."""
    for other, claim in enumerate(claims):
        if claim["failure"]:
            return PeerError(f"rank {other} failed: {claim['failure']}")
    calls = [claim["call"] for claim in claims]
    if len(set(calls)) > 1:
        return PeerError(
            f"ranks are in different calls: {listed(calls)}. Every rank must make the same calls "
            "in the same order: look for one that runs out of batches early, or for a call that "
            "only some ranks make (`if rank == 0: trainer.save(...)`)"
        )
    if len({claim["given"] for claim in claims}) > 1:  # other shapes: models may differ by that
        return _other_batches(claims, rank)
    if len({claim["model"] for claim in claims}) > 1:
        return PeerError(
            f"ranks have different models: {_odd([claim['model'] for claim in claims])} in layers, "
            "their settings, which of them train, constant tensors, or in what Python changed "
            f"since (attributes, hooks). {SAME}"
        )
    for what in ("progress", "settings"):
        if (message := _different(what, [claim[what] for claim in claims])) is not None:
            return PeerError(message)
    return _other_batches(claims, rank)


def _other_batches(claims: Sequence[Any], rank: int) -> ShapeError:
    return ShapeError(
        f"ranks were given different batches ({_odd([claim['batch'] for claim in claims])}); rank "
        f"{rank} has {claims[rank]['given']}. Give every rank the same global batch: seed what "
        "draws or shuffles it, the same on every rank"
    )


def _different(what: str, facts: Sequence[Mapping[str, str]]) -> str | None:
    names = dict.fromkeys(name for mine in facts for name in mine)
    found = []
    for name in names:
        values = [mine.get(name, "none") for mine in facts]
        if len(set(values)) > 1:
            found.append(f"{name} ({listed(values)})")
    if not found:
        return None
    tell = "have different settings" if what == "settings" else "are not at the same place"
    return (
        f"ranks {tell}: {'; '.join(found)}. Every rank must be given the same arguments, and "
        "change them in the same way between steps"
    )


def listed(values: Sequence[str]) -> str:
    """`ranks 0, 1, 3: step; rank 2: save`, the most common first."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    groups = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
    return "; ".join(f"{_ranks(ranks)}: {value}" for value, ranks in groups)


def _odd(values: Sequence[Any]) -> str:
    """Which ranks do not have what most have."""
    most = Counter(values).most_common(1)[0][0]
    odd = [rank for rank, value in enumerate(values) if value != most]
    return f"{_ranks(odd)} {'differs' if len(odd) == 1 else 'differ'} from the others"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def attempt(transport: Transport, work: Callable[[], Any]) -> list[Any]:
    """What `work` returned on every rank. A rank on which it failed gathers, too: it
    raises its own error, the others one that names it."""
    failure: Exception | None = None
    try:
        outcome = work()
    except PeerError:  # the others know, and will not come
        raise
    except Exception as error:
        failure, outcome = error, f"failed: {error}"
    outcomes = transport.all_gather_object(outcome)
    if failure is not None:
        raise failure
    reject_failed(outcomes)
    return outcomes


def reject_failed(outcomes: Sequence[Any]) -> None:
    """Raise the error of the first rank that failed."""
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, str) and outcome.startswith("failed"):
            raise PeerError(f"rank {rank} {outcome}")


def agree_on_failure(transport: Transport, call: str, error: BaseException) -> None:
    """Tell the other ranks, which call `agree` for the same call. The caller raises `error`."""
    text = str(error).strip() or type(error).__name__
    with suppress(GemsError):
        agree(transport, Claim(call, failure=f"{type(error).__name__}: {text}"))
