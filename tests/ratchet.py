"""What is left to mend: numbers that may only fall, by file or name, in `tests/left.json`.

A limit of the code is a test that finds what exceeds it and gives that to `check`. What exceeded it
when the test was written is listed with its number; anything new, or more, fails. What is mended
must leave the list, so that it stays mended.

    python -m tests.ratchet    # writes the lower numbers; the sum of a list never rises
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

LEFT = Path(__file__).with_name("left.json")
REPAIR = "if no sum rises, `python -m tests.ratchet` writes the list anew"

Finder = Callable[[], Mapping[str, int]]
FINDERS: dict[str, Finder] = {}


def limit(name: str) -> Callable[[Finder], Finder]:
    """Register a finder of what exceeds a limit, under the name of its list."""

    def register(finder: Finder) -> Finder:
        FINDERS[name] = finder
        return finder

    return register


def left(name: str) -> dict[str, int]:
    """What a list still allows."""
    return json.loads(LEFT.read_text(encoding="utf-8")).get(name, {})


def check(name: str, explain: Callable[[str], str] = str) -> None:
    """No number may be above the one listed; what is mended may not be listed."""
    found, allowed = FINDERS[name](), left(name)
    worse = [
        f"{explain(key)}: {number}, at most {allowed.get(key, 0)} allowed"
        for key, number in sorted(found.items())
        if number > allowed.get(key, 0)
    ]
    mended = [
        f"{key} is mended: remove it from {name!r} in tests/left.json"
        for key in allowed
        if key not in found
    ]
    assert not worse + mended, "\n".join([*worse, *mended, REPAIR])


def lower() -> None:
    """Write what is found now, unless a list got worse."""
    listed, lists = json.loads(LEFT.read_text(encoding="utf-8")), {}
    for name, finder in FINDERS.items():
        found = dict(sorted(finder().items()))
        before, now = sum(left(name).values()), sum(found.values())
        if name in listed and now > before:
            raise SystemExit(f"{name}: {now} now, {before} before; mend what is new first")
        print(f"{name}: {before} -> {now}")
        lists[name] = found
    LEFT.write_text(json.dumps(lists, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from tests import ratchet

    for module in ("tests.test_words", "tests.test_limits"):
        importlib.import_module(module)
    ratchet.lower()
