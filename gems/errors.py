"""The errors people meet. Each has what is wrong, with the values, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable


class GemsError(Exception):
    """Anything GEMS rejects, or could not finish."""


class PlanError(GemsError, ValueError):
    """A plan that cannot be carried out: bad numbers, unknown names, a world that does not fit."""


class TraceError(GemsError, TypeError):
    """A model whose forward cannot be recorded."""


class ShapeError(GemsError, ValueError):
    """Inputs, targets or state that do not fit the model."""


class ScheduleError(GemsError, ValueError):
    """An order of actions that would deadlock, mix messages or lose work."""


class PeerError(GemsError, RuntimeError):
    """Another rank died, stopped or disagrees."""

    cause = ""  # what happened there, without what it means here


class CheckpointError(GemsError, RuntimeError):
    """A checkpoint that could not be written, or that is damaged, foreign or of another model."""


class LossError(GemsError, ArithmeticError):
    """A loss that is not a finite number."""


MOST_PROBLEMS = 40  # that one message lists
LONGEST = 1000  # characters of one problem


def problems(heading: str, found: Iterable[str]) -> str:
    """One message out of many problems, so that people can mend all of them at once."""
    found = list(found)
    listed = [short(problem) for problem in found[:MOST_PROBLEMS]]
    if len(found) > MOST_PROBLEMS:
        listed.append(f"and {len(found) - MOST_PROBLEMS} more")
    return "\n  - ".join((heading, *listed))


def short(text: object, most: int = LONGEST) -> str:
    """A text for a message, without its middle if it is long: a file may hold a novel."""
    text = str(text)
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def note(error: BaseException, text: str) -> None:
    """Say where it happened, and let it rise. (Python 3.10 has no notes: it joins the message.)"""
    if (add := getattr(error, "add_note", None)) is not None:
        add(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])
