"""Ways to train one step on large images. Each takes a step for real, on processes of its own.

A way is one function and one entry: `way(ranks, network, images, side, cap)` gives the bytes that
were live at most on the fullest rank, counted alike for all, and says how; or raises `Cannot`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.pipeline.ranks import RankError, Ranks
from gems.draw.units import size
from gems.errors import PlanError
from gems.plans.describe import describe
from gems.plans.plan import Plan
from gems.torch.planning import STEP

from . import ours, peer, plain, streaming

log = logging.getLogger(__name__)
Done = tuple[int, str]  # bytes, and how
Run = Callable[[Ranks, str, int, int, float], Done]


class Cannot(Exception):
    """This way knows that it cannot take this step."""


@dataclass(frozen=True)
class Way:
    """`ranks` are the numbers of them that it is tried on; `by_cap`, whether the cap changes what
    it does; `images` of a step, if not as many as the others take."""

    run: Run
    ranks: tuple[int, ...]
    by_cap: bool = False
    images: int = 0


def _plain(ranks: Ranks, name: str, images: int, side: int, cap: float) -> Done:
    return max(ranks.run(plain.trained, name, images, side, False)), ""


def _checkpointed(ranks: Ranks, name: str, images: int, side: int, cap: float) -> Done:
    return max(ranks.run(plain.trained, name, images, side, True)), "every block checkpointed"


def _pipelining(ranks: Ranks, name: str, images: int, side: int, cap: float) -> Done:
    order = peer.schedule(ranks.size, images).__name__.removeprefix("Schedule")
    return max(ranks.run(peer.trained, name, images, side)), f"{order}, every block checkpointed"


def _lightstream(ranks: Ranks, name: str, images: int, side: int, cap: float) -> Done:
    peaks = ranks.run(streaming.trained_or_words, name, images, side, cap)
    if isinstance(peaks[0], str):
        raise Cannot(peaks[0])
    return peaks[0]


def _published(
    make: Callable[[str, int, int], Plan], ranks: Ranks, name: str, images: int, side: int
) -> Done:
    try:
        plan = make(name, ranks.size, images)
    except PlanError as error:
        raise Cannot(str(error)) from error
    return max(ranks.run(ours.trained, name, images, side, plan)), describe(plan)


def _gems(ranks: Ranks, name: str, images: int, side: int, cap: float) -> Done:
    """The first of the planner's plans for this side that really fits; or the leanest."""
    best: Done | None = None
    for plan in ours.plans(name, ranks.size, images, side, cap):
        peak = max(ranks.run(ours.trained, name, images, side, plan))
        log.info("  %s: %s takes %s", side, describe(plan), size(peak))
        if best is None or peak < best[0]:
            best = peak, describe(plan)
        if peak <= cap:
            break
    if best is None:
        raise Cannot("the planner knows no plan that fits")
    return best


def from_above(
    ranks: Ranks, name: str, images: int, cap: float, store: float, most: int | None = None
) -> tuple[int, int, str]:
    """The side, bytes and how of the planner's largest image, or of the `most` to be tried, really
    trained. If the step takes more than the cap, the planner is given as much less."""
    part = 1.0
    for _ in range(3):
        side, plan, beyond = ours.largest(name, ranks.size, images, part * cap, store, most)
        log.info("  %s on %s ranks: %s, %s", name, ranks.size, side, describe(plan))
        peak = max(ranks.run(ours.trained, name, images, side, plan, True))
        log.info("  %s: it takes %s", side, size(peak))
        how = f"{describe(plan)}; {side + STEP}: {beyond}"
        if peak <= cap:
            return side, peak, how
        part *= cap / peak
    raise Cannot(f"{side}: the step takes {size(peak)}, more than the planner predicts")


ABOVE = "GEMS, values on disk"  # searched from the planner's prediction down
WAYS = {
    "PyTorch": Way(_plain, (1,)),
    "PyTorch, checkpointed": Way(_checkpointed, (1,)),
    "lightstream": Way(_lightstream, (1,), by_cap=True),
    "torch.distributed.pipelining, checkpointed": Way(_pipelining, (2, 4)),
    "torch.distributed.pipelining, checkpointed, one image": Way(_pipelining, (2, 4), images=1),
    "published GEMS, by our engine": Way(
        lambda ranks, name, images, side, cap: _published(
            ours.published, ranks, name, images, side
        ),
        (2, 4),
    ),
    "published GEMS + spatial, by our engine": Way(
        lambda ranks, name, images, side, cap: _published(
            ours.published_spatial, ranks, name, images, side
        ),
        (2, 4),
    ),
    "GEMS": Way(_gems, (1, 2, 4), by_cap=True),
    ABOVE: Way(_gems, (1, 2, 4), by_cap=True),
}

__all__ = ["ABOVE", "WAYS", "Cannot", "RankError", "Way", "from_above"]
