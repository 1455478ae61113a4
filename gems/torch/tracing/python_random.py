"""Random numbers of Python and numpy: a recording would draw them once, for all samples."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gems.errors import TraceError

# The generator of the module's functions. Others are not a model's but, say, that of tempfile's
# names.
SHARED = getattr(random.random, "__self__", None)


@contextmanager
def reject_python_random(make: Callable[[], Any], args: Any, kwargs: Any) -> Iterator[None]:
    """Raise if what runs here draws random numbers of Python or numpy.

    Other threads may draw meanwhile, so a second recording, which `make` gives, looks closer.
    """
    before = _states()
    yield
    if (after := _states()) == before:
        return
    drawn: list[str] = []
    if after[1:] != before[1:] and all(_changes_numpy(make(), args, kwargs) for _ in range(3)):
        drawn.append("numpy.random")
    elif after[0] != before[0]:
        _look_closer(make(), args, kwargs, drawn)
    if drawn:
        raise TraceError(
            f"forward draws random numbers of Python or numpy ({drawn[0]}), and a recording would "
            "have the same for all samples; draw with torch instead: GEMS keys its numbers by "
            "step, micro-batch and call"
        )


def _changes_numpy(recorder: Any, args: Any, kwargs: Any) -> bool:
    before = _states()[1:]
    try:
        recorder.run(args, kwargs)
    finally:
        recorder.reads.undo()
    return _states()[1:] != before


def _look_closer(recorder: Any, args: Any, kwargs: Any, drawn: list[str]) -> None:
    sys.setprofile(_watch(drawn))
    try:
        recorder.run(args, kwargs)
    finally:
        sys.setprofile(None)
        recorder.reads.undo()


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.getstate(),)
    _, keys, *rest = numpy.get_state()
    return random.getstate(), keys.tobytes(), *rest


def _watch(drawn: list[str]) -> Callable[[Any, str, Any], None]:
    def profile(frame: Any, event: str, arg: Any) -> None:
        if event != "c_call":
            return
        name = getattr(arg, "__name__", "")
        if getattr(arg, "__self__", None) is SHARED and "state" not in name:
            drawn.append(f"random.{name}, at {frame.f_code.co_filename}:{frame.f_lineno}")

    return profile
