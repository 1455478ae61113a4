"""Valid files made hostile: bytes and numbers changed at random. Not a test itself."""

from __future__ import annotations

import copy
import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gems.errors import GemsError

# What people and attackers put where a number or a text was.
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 10**6, 10**9, 10**12, 10**15, 10**18, 2**31, 2**63, 2**64, -(2**63)),
    *(10**400, 1e30, 1e308, -1e308, 0.5, -0.0, float("nan"), float("inf"), -float("inf")),
    *("", "x", "-1", "1e30", "nan", "../../x", "/etc/passwd", "<script>alert(1)</script>", "\x00"),
    *("\ud800", "9" * 5000, "1000000000", "x" * 10_000, "1000000x1000000", "vertical:10000000"),
    *(None, True, False, [], {}, [[]], [1], [10**15], [-1], ["x"], {"x": 1}, {"$tensor": "x"}),
    *([0] * 1000, [[[[[[[[1]]]]]]]]),
)
WORDS = (
    *(b"\xff\xfe", b"\x00", b"\x1b[2J", b"NaN", b"Infinity", b"1e400", b"9" * 30, b"9" * 5000),
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"'", b"&a", b"*a", b"!!python/object:os.system "),
    *(b"[" * 100, b"[" * 100_000, b'{"a":' * 50_000, b"\n", b"\r\n", b"- ", b"\xc3\x28", b"-"),
)


def changed(data: bytes, dice: random.Random) -> bytes:
    """The bytes after one to three of: cut off, flipped, inserted, removed, repeated, moved."""
    found = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 3))):
        place, kind = dice.randrange(len(found) + 1), dice.randrange(8)
        other = dice.randrange(len(found) + 1)
        if kind == 0:
            del found[place:]
        elif kind == 1 and found:
            found[place % len(found)] ^= 1 << dice.randrange(8)
        elif kind == 2:
            found[place:place] = dice.choice(WORDS)
        elif kind == 3:
            del found[place : place + dice.choice((1, 2, 4, 8, 64))]
        elif kind == 4:
            found[place:place] = found[place : place + dice.choice((1, 8, 64))]
        elif kind == 5:
            found[place : place + 4] = dice.choice(
                (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x00", b"\x00\x00\x00\x80")
            )
        elif kind == 6:
            found[place : place + 8] = dice.choice(
                (b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\x00" * 8)
            )
        else:
            found[place : place + 8] = found[other : other + 8]
    return bytes(found)


def replaced(value: Any, dice: random.Random) -> Any:
    """The JSON value after one to three changes to a number, text, list, name or level of it."""
    value = copy.deepcopy(value)
    for _ in range(dice.choice((1, 1, 2, 3))):
        spots = list(_spots(value))
        if not spots:
            return dice.choice(VALUES)
        inside, key = dice.choice(spots)
        kind = dice.randrange(6)
        if kind <= 2:
            inside[key] = dice.choice(VALUES)
        elif kind == 3:
            del inside[key]
        elif kind == 4 and isinstance(inside, dict):
            inside[dice.choice(("x", "$tensor", "../x", f"{key}x"))] = copy.deepcopy(inside[key])
        elif kind == 4:
            inside.extend(copy.deepcopy(inside[key]) for _ in range(dice.choice((1, 3, 50))))
        else:
            for _ in range(dice.choice((1, 3, 110))):
                inside[key] = [inside[key]]
    return value


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _spots(value[key])


def spelled(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


class Unbounded(BaseException):
    """It took longer than any file may take."""


@contextmanager
def bounded(seconds: float = 20.0, memory: int = 3 << 30) -> Iterator[None]:
    """Raise where the work takes longer, or allocates more than so many bytes."""

    def late(*_: object) -> None:
        raise Unbounded(f"more than {seconds} s")

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def outcome(read: Callable[[], Any]) -> str:
    """ "read", "rejected" by an error of ours with a short message, or what else happened."""
    try:
        with bounded():
            read()
    except GemsError as error:
        said = str(error)
        if len(said) > 5000:
            return f"a message of {len(said)} characters: {said[:200]}"
        return "rejected" if said.strip() else "an empty message"
    except (Exception, Unbounded) as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "read"
