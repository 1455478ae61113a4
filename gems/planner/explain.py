"""Why a plan was chosen: the best of each family, what limits it, what would be needed for more."""

from __future__ import annotations

from collections.abc import Callable

from gems.draw.table import table
from gems.draw.units import seconds, size
from gems.errors import PlanError
from gems.planner.request import Request
from gems.planner.search import Candidate, SearchResult, largest_kind
from gems.plans.describe import describe, offloaded, recomputes, streamed
from gems.plans.plan import Plan
from gems.predict.timeline import KINDS

COLUMNS = ("", "family", "best of it", "samples/s", "needs", "idle", "limited by")


def explain(found: SearchResult, samples: int = 1) -> str:
    """The best of each family, and what keeps it from being better."""
    request = found.request
    rows: dict[str, tuple[str, ...]] = {}
    best = [found.best] if found.fitting else []
    for c in (*best, *found.fitting, *found.rest):
        fits = c.fits(request)
        rate = f"{c.rate * samples:.3g}" if fits else "-"
        mark = "*" if fits and c is found.best else " "
        rest = (size(c.bytes), f"{c.prediction.idle:.0%}", limit(c, request))
        rows.setdefault(c.family, (mark, c.family, describe(c.plan), rate, *rest))
    for p in found.pruned:
        rate = f"< {p.plan.total * samples / p.seconds:.3g}"
        why = (
            f"memory: at least {size(p.bytes - request.memory)} too much"
            if p.bytes > request.memory
            else f"store: at least {size(p.offloaded - request.store)} too much"
            if p.offloaded > request.store
            else "slower than the best even without waiting"
        )
        row = (" ", p.family, describe(p.plan), rate, f"> {size(p.bytes)}", "", why)
        rows.setdefault(p.family, row)
    head = (
        f"{request.ranks} ranks with {size(request.memory)} each, {request.micro_batches} "
        f"micro-batches a step: {len(found.fitting) + len(found.rest)} plans simulated, "
        f"{len(found.pruned)} ruled out by what they need at least"
    )
    lines = [head, table(rows.values(), COLUMNS).rstrip()]
    if best and recomputes(best[0].plan):
        lines.append(recomputing_gains(found))
    if best and best[0].plan.stream:
        lines.append(streaming_gains(found))
    if best and best[0].plan.zero:
        lines.append(sharding_gains(found))
    if best and best[0].plan.offload:
        lines.append(offloading_gains(found))
    lines += [
        f"not possible: {family}: {_first_line(why)}"
        for family, why in found.rejected
        if family not in rows
    ]
    return "\n".join(lines) + "\n"


def recomputing_gains(found: SearchResult) -> str:
    """What the best plan gains by recomputation."""
    best = found.best
    same = [c for c in (*found.fitting, *found.rest) if _twins(c.plan, best.plan)]
    least = [p for p in found.pruned if _twins(p.plan, best.plan)]
    text = f"recomputing: {size(best.bytes)} are enough"
    if same:
        text += f" where saving all takes {size(same[0].bytes)}"
        more = best.seconds / same[0].seconds - 1
        return f"{text}, for {more:.0%} more time" if more > 0.005 else f"{text}, in the same time"
    if least:
        more = best.seconds / least[0].seconds - 1
        text += f" where saving all takes {size(least[0].bytes)} or more"
        return f"{text}, for at most {max(more, 0):.0%} more time"
    return text


def streaming_gains(found: SearchResult) -> str:
    """What the best plan gains by running one patch of the image after the other."""
    best = found.best
    others = _sizes(found, lambda plan: not plan.stream)
    text = f"streaming {streamed(best.plan)}: {size(best.bytes)} are enough"
    return f"{text} where the leanest without takes {size(min(others))}" if others else text


def _sizes(found: SearchResult, wanted: Callable[[Plan], bool]) -> list[float]:
    """Bytes of plans of some kind, at least, whether they fit or not."""
    return [c.bytes for c in (*found.fitting, *found.rest, *found.pruned) if wanted(c.plan)]


def offloading_gains(found: SearchResult) -> str:
    """What the best plan gains by offload."""
    best = found.best
    others = _sizes(found, lambda plan: not plan.offload)
    where, away = best.plan.offload[0].partition(":")[2], size(best.prediction.offloaded)
    text = f"{' and '.join(offloaded(best.plan))} to {where}, {away} of each rank at most: "
    text += f"{size(best.bytes)} are enough"
    if others and min(others) > best.bytes:
        return f"{text} where the leanest without takes {size(min(others))}"
    return f"{text}, and what fits without takes longer"


def sharding_gains(found: SearchResult) -> str:
    """What the best plan gains by sharding its state."""
    best = found.best
    what = ("the optimizer's state", "and gradients", "and weights")[: best.plan.zero]
    among = max(map(len, best.plan.replica_groups))
    text = f"zero={best.plan.zero}: sharding {' '.join(what)} over {among} ranks, "
    text += f"{size(best.bytes)} are enough"
    tried = [(c.bytes, c.plan, "") for c in (*found.fitting, *found.rest)]
    tried += [(p.bytes, p.plan, " or more") for p in found.pruned]
    entries = [policy.recompute for policy in best.plan.activations]
    for needs, plan, more in tried:
        if (
            plan.zero == 0
            and [p.recompute for p in plan.activations] == entries
            and plan.runs_like(best.plan)
        ):
            return f"{text} where each having it all takes {size(needs)}{more}"
    return text


def _twins(plan: Plan, other: Plan) -> bool:
    """Whether a plan is the other but for saving all activations, and for its partition."""
    return plan.runs_like(other) and plan.zero == other.zero and not recomputes(plan)


def limit(candidate: Candidate, request: Request) -> str:
    """What keeps a candidate from fitting, or from being faster."""
    expected = candidate.prediction
    if candidate.bytes > request.memory:
        kind = largest_kind(expected.fullest)
        share = getattr(expected.fullest, kind) / candidate.bytes
        more = size(candidate.bytes - request.memory)
        return f"memory: {more} too much ({share:.0%} is {kind})"
    if expected.offloaded > request.store:
        return f"store: {size(expected.offloaded - request.store)} too much"
    if expected.sums > 0.15 * expected.seconds:
        return f"all-reduce of gradients: {seconds(expected.sums)} after the last backward"
    if expected.idle > 0.15:
        return f"waiting: {expected.idle:.0%} of all ranks' time; more micro-batches would help"
    return "arithmetic: more ranks would help"


def chosen(found: SearchResult, largest: str = "") -> Candidate:
    """The best that fits, or an error with what would."""
    if found.fitting:
        return found.best
    request = found.request
    if stored := [
        *((c.prediction.offloaded, c.plan) for c in found.rest if c.bytes <= request.memory),
        *((p.offloaded, p.plan) for p in found.pruned if p.bytes <= request.memory),
    ]:
        needed, plan = min(stored, key=lambda pair: pair[0])
        raise PlanError(
            f"nothing fits {request.ranks} ranks with {size(request.memory)} each and stores of "
            f"{size(request.store)}. {describe(plan)} offloads {size(needed)} of each rank. Give "
            "larger stores, more memory or more ranks" + (f"; {largest}" if largest else "")
        )
    least = "weights, gradients, optimizer, activations of one micro-batch"
    leanest = sorted(
        [(c.bytes, c.plan, _parts(c)) for c in found.rest]
        + [(p.bytes, p.plan, least + _reserved(p.reserved)) for p in found.pruned],
        key=lambda entry: entry[0],
    )
    if not leanest:
        why = "; ".join(f"{family}: {_first_line(text)}" for family, text in found.rejected)
        raise PlanError(f"no plan for {request.ranks} ranks is possible: {why}")
    needed, plan, parts = leanest[0]
    raise PlanError(
        f"nothing fits {request.ranks} ranks with {size(request.memory)} each. The leanest is "
        f"{describe(plan)}, which needs {size(needed)} ({parts}). Give that much memory, more "
        "ranks, or a smaller micro-batch" + (f"; {largest}" if largest else "")
    )


def _reserved(size_of: int) -> str:
    return f", context and communicators {size(size_of)}" if size_of else ""


def _parts(candidate: Candidate) -> str:
    kinds = [(kind, getattr(candidate.prediction.fullest, kind)) for kind in KINDS]
    kinds.append(("workspace", candidate.prediction.workspace))
    kinds.append(("context and communicators", candidate.prediction.reserved))
    shown = sorted(((n, kind) for kind, n in kinds if n), reverse=True)[:3]
    return ", ".join(f"{kind} {size(n)}" for n, kind in shown)


def _first_line(text: str) -> str:
    return text.splitlines()[0]
