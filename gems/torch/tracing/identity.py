"""Whether many containers still hold the very objects that they held, found in one pass.

Every step asks this of all modules of a model, so no Python runs per entry: lengths, keys and
values of all containers are chained and compared in C. Values are compared by `is`: `==` of tensors
is no bool, and a user's class may define it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from operator import is_, methodcaller
from typing import Any

SEQUENCES = (list, deque)
BUILT_IN = (dict, OrderedDict, list, deque)  # which are true if they are not empty
_keys, _values = methodcaller("keys"), methodcaller("values")


class Identities:
    """The entries of dicts and sequences, in order. Sets and other objects do not belong here."""

    def __init__(self, containers: Iterable[Collection[Any]]) -> None:
        containers = list(containers)
        self.empty = [c for c in containers if type(c) in BUILT_IN and not c]
        full = [c for c in containers if c or type(c) not in BUILT_IN]
        self.dicts = [c for c in full if type(c) is dict]
        # The order of an OrderedDict is its own: `dict.values` does not see it.
        # What TorchScript has in place of dicts is none, and has no order but that of its keys.
        self.mappings = [c for c in full if type(c) is not dict and not isinstance(c, SEQUENCES)]
        self.sequences = [c for c in full if isinstance(c, SEQUENCES)]
        self.full = [*self.dicts, *self.mappings, *self.sequences]
        self.lengths = list(map(len, self.full))
        self.keys = list(self._keys())
        self.values = list(self._values())

    def _keys(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(self.dicts), chain.from_iterable(map(_keys, self.mappings))
        )

    def _values(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(map(dict.values, self.dicts)),
            chain.from_iterable(map(_values, self.mappings)),
            chain.from_iterable(self.sequences),
        )

    def hold(self) -> bool:
        """Whether all containers have the same entries as at first, in the same order."""
        return (
            not any(self.empty)
            and list(map(len, self.full)) == self.lengths
            and list(self._keys()) == self.keys
            and all(map(is_, self._values(), self.values))
        )
