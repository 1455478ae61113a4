"""A library's constructor, called with our words for classes, channels, image size and dims."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

Words = Mapping[str, str]  # our word -> theirs


def spoken(function: Callable[..., Any], words: Mapping[str, tuple[str, ...]]) -> Words:
    """Our words that a constructor understands, each with the first of its words for it."""
    known = accepted(function)
    found = {
        ours: next((theirs for theirs in spellings if theirs in known), None)
        for ours, spellings in words.items()
    }
    return {ours: theirs for ours, theirs in found.items() if theirs}


def accepted(function: Callable[..., Any]) -> tuple[str, ...]:
    """Arguments by name, those of the classes above included where `**kwargs` go on to them."""
    names: dict[str, None] = {}
    for each in _chain(function):
        parameters = inspect.signature(each).parameters.values()
        names |= dict.fromkeys(p.name for p in parameters if p.kind not in _VARIABLE)
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return tuple(name for name in names if name != "self")


_VARIABLE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def _chain(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    if not inspect.isclass(function):
        return [function]
    return [vars(c)["__init__"] for c in function.__mro__[:-1] if "__init__" in vars(c)]


def option_names(function: Callable[..., Any], words: Words) -> tuple[str, ...]:
    """What people may give: our words first, then the library's own for everything else."""
    theirs = set(words.values())
    return (*words, *(name for name in accepted(function) if name not in theirs))


def missing(function: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """Arguments without which the constructor cannot be called."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIABLE]
    return [name for name in needed if name not in given]


def translated(options: Mapping[str, Any], words: Words) -> dict[str, Any]:
    return {words.get(name, name): value for name, value in options.items()}
