"""A number for anything that can be printed, the same on every rank."""

from __future__ import annotations

import hashlib


def key(*parts: object) -> int:
    """A 63-bit number that is different for different parts, everywhere the same."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
