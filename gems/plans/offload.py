"""Which state is offloaded while it is not needed, and where to.

activations what micro-batches save for backward, from forward on until backward reads it
values      what streamed stages hand each other, and its gradients: written, read and summed box by
            box, so that they are never whole on the device
weights     of stages that do not run now; where they are, the optimizer works, so its state is
            there as well
optimizer   the optimizer's state; weights stay

host        the memory of the host: for GPUs, pinned, over a stream of its own
disk        a file without a name: for hosts themselves
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

WHAT = ("activations", "values", "weights", "optimizer")
WHERE = ("host", "disk")

Offload = tuple[str, ...]  # "activations:host", in the order of WHAT


def offload_of(given: str | Iterable[str] | Mapping[str, str]) -> Offload:
    """The plan's form of `"activations"`, `"activations:disk,optimizer"`, `{"weights": "disk"}` or
    `["activations", "weights:disk"]`. The host is the default."""
    if isinstance(given, Mapping):
        given = [f"{what}:{where}" for what, where in given.items()]
    parts = given.split(",") if isinstance(given, str) else given
    parts = [part.strip() for part in parts if part.strip()]
    places = dict((part.partition(":")[0], part.partition(":")[2] or "host") for part in parts)
    if "weights" in places:
        places.setdefault("optimizer", places["weights"])
    known = [what for what in WHAT if what in places]
    unknown = [what for what in places if what not in WHAT]
    return tuple(f"{what}:{places[what]}" for what in (*known, *unknown))


@cache
def place_of(offload: Offload, what: str) -> str:
    """Where it is offloaded to: `host` or `disk`, or "" if it is not."""
    return next((part.partition(":")[2] for part in offload if part.startswith(f"{what}:")), "")


def offload_problems(offload: Offload) -> Iterable[str]:
    for part in offload:
        what, _, where = part.partition(":")
        if what not in WHAT:
            yield f"offload has {what!r}; choose from {', '.join(WHAT)}"
        if where not in WHERE:
            yield f"offload moves {what} to {where!r}; choose one of {', '.join(WHERE)}"
    weights, optimizer = place_of(offload, "weights"), place_of(offload, "optimizer")
    if weights and optimizer != weights:
        yield (
            f"offload moves weights to {weights} and the optimizer to {optimizer}; the optimizer "
            "runs where the weights are, so give both one place"
        )


def values_problems(offload: Offload, streamed: int) -> Iterable[str]:
    """Of values between streamed stages, of which the plan has so many."""
    if (place := place_of(offload, "values")) and not streamed:
        yield (
            f"offload='values:{place}' stores what streamed stages hand each other, and their "
            "sweeps (before and after a norm), but no stage of this plan streams; give stream a "
            "grid of patches, or remove values"
        )
