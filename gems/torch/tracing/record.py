"""Record a model: run its own forward once on fake tensors and note the calls it makes.

Two kinds of calls are noted: leaf modules (everything under `torch.nn` that is not a container,
and modules that cannot be recorded inside) and the torch functions between them. Shapes are
concrete, so Python that looks at shapes just runs; nothing is computed and no memory is taken.
Recording again for another input signature costs about a millisecond per call.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gems.errors import TraceError
from gems.torch.tracing.assigned import keeps_tensors, replace_by_lost
from gems.torch.tracing.caches import clear_frames, reject_kept
from gems.torch.tracing.calls import Record
from gems.torch.tracing.python_random import reject_python_random
from gems.torch.tracing.reads import Access
from gems.torch.tracing.recorder import Recorder
from gems.torch.tracing.unrecordable import REMEDY, Unrecordable

log = logging.getLogger(__name__)
_lock = threading.RLock()  # recording patches globals of torch; one at a time


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    device: torch.device | str = "cpu",
    leaves: tuple[str, ...] = (),
) -> Record:
    """Record one forward of `model` on inputs like these; only their shapes and types matter.

    A module whose inside cannot be recorded becomes a leaf, and recording starts again.
    """
    whole, made = set(leaves), []
    expects, first = False, None
    for _ in range(len(list(model.modules())) + 2):
        try:
            found = _recorded(model, args, kwargs or {}, torch.device(device), whole, expects, made)
            reject_kept(made)
            return found
        except Unrecordable as error:
            clear_frames(error)
            first = first or error
            if error.expectable and not expects and _most_of(model, error.path):
                expects = True
            elif error.path in whole:
                raise TraceError(
                    f"{type(model).__name__}.forward cannot be recorded: {first.reason}. {REMEDY}"
                ) from first.__cause__
            else:
                if not error.path:
                    _warn_whole(model, error.reason)
                whole.add(error.path)
    raise AssertionError("every retry adds a leaf, so this is never reached")


def _warn_whole(model: nn.Module, reason: str) -> None:
    log.warning(
        "%s.forward cannot be recorded (%s), so the whole model is one block, which runs on one "
        "stage. %s", type(model).__name__, reason, REMEDY,
    )  # fmt: skip


def _most_of(model: nn.Module, path: str) -> bool:
    """Whether a module has more than half of the model's parameters: as one block, it would leave
    nothing to partition."""
    inside = sum(p.numel() for p in model.get_submodule(path).parameters())
    return 2 * inside > sum(p.numel() for p in model.parameters()) or not path


def _recorded(
    model: nn.Module, args: Any, kwargs: Any, device: torch.device, whole: set[str], expects: bool,
    made: list[weakref.ref[torch.Tensor]],
) -> Record:  # fmt: skip
    """One recording; the Python state of the model is as before, whatever forward did to it.

    What is still in memory of the tensors that it made goes to `made`.
    """
    with _lock, _unlogged():
        first = Recorder(model, device, whole, expects)
        try:
            with reject_python_random(
                lambda: Recorder(model, device, whole, expects), args, kwargs
            ):
                found = first.run(args, kwargs)
            changed = [x for x in first.reads.accesses if not x.wrote and x.change() is not None]
            if changed:
                _judge_changes(first, changed, args, kwargs)
            found.impure = first.impure
        finally:
            accesses = [x for x in first.reads.accesses if x.wrote]
            written = [(x, x.name.mapping.get(x.name.key)) for x in accesses]
            first.reads.undo()
            made += first.forget()
        for access, value in written:
            if not access.outer or access.path is None:
                continue
            if keeps_tensors(value):
                replace_by_lost(access)
            else:
                found.assigned.append((access.path, access.name.key, value))
        return found


@contextmanager
def _unlogged() -> Iterator[None]:
    """torch logs whatever fails on fake tensors, with a traceback; here it is an error of ours, or
    a module that is taken whole."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _judge_changes(first: Recorder, changed: list[Access], args: Any, kwargs: Any) -> None:
    """Forward changed Python state that it reads. A cache may be filled once: what is in it must be
    the same for all samples, and a second run must leave it alone. All else is rejected."""
    for access in changed:
        if access.name.path is not None and access.outer:
            raise Unrecordable(access.name.path, f"a hook changes state: {access.change()}")
    again = Recorder(first.model, first.device, first.whole, first.expects, first)
    try:
        again.run(args, kwargs)
        later = {x.name.place: x.change() for x in again.reads.accesses}
    finally:
        again.reads.undo()
        again.forget()
    for access in changed:
        before, after, name = access.change(), later.get(access.name.place), access.name
        assert before is not None
        if not access.outer:
            if after is not None and access.by in first.whole:
                first.impure.append((access.by or "", name.label))
        elif after is not None:
            raise TraceError(
                f"forward changes {before.label} in every run ({before}), and what Python "
                "remembers is not recorded; hold it in a buffer (register_buffer) and change that "
                "with torch operations, change it between steps, or leave it out"
            )
        else:
            first.tape.reject_dependent(name.label, name.mapping.get(name.key))
