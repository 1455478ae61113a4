"""What backward reads of forward: the tensors that are saved, known before anything runs.

Backward is a graph, too. A tensor of forward that it reads is saved; unless it depends on constants
and weights only (the cast of a kernel), for then backward computes it again, and so it does in
blocks that are recomputed. Tensors that are views of one memory are saved once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gems.keras.tracing.subgraph import Tensor, is_shape, size

VIEWS = {
    *("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"),
    *("Snapshot", "IdentityN"),
}


def storage(t: Tensor) -> Tensor:
    """The tensor whose memory this one has."""
    while t.op.type in VIEWS:
        t = t.op.inputs[t.value_index if t.op.type == "IdentityN" else 0]
    return t


@dataclass
class Reads:
    """By name what is saved, and the ops of backward that read it."""

    saved: dict[str, Tensor] = field(default_factory=dict)
    readers: dict[str, list[Any]] = field(default_factory=dict)


class Backward:
    """Which tensors of forward some gradients read. `free` are at hand in backward anyway: weights,
    and gradients of outputs."""

    def __init__(
        self, forward: Collection[str], free: Collection[str], recomputed: Collection[str] = ()
    ) -> None:
        self.forward, self.free, self.recomputed = forward, free, recomputed
        self.constant: dict[str, bool] = {}

    def reads(self, gradients: Iterable[Tensor]) -> Reads:
        found = Reads()
        seen: set[str] = set()
        stack: list[tuple[Tensor, Any]] = [(t, None) for t in gradients]
        while stack:
            t, reader = stack.pop()
            if t.name in self.free or is_shape(t.op):
                continue
            if self._is_saved(t):
                found.saved[t.name] = t
                found.readers.setdefault(t.name, []).append(reader)
            elif t.name not in seen:
                seen.add(t.name)
                stack.extend((x, t.op) for x in t.op.inputs)
        found.saved = dict(sorted(found.saved.items()))
        return found

    def _is_saved(self, t: Tensor) -> bool:
        if t.op.name not in self.forward or t.op.name in self.recomputed:
            return False
        return not self._is_constant(t)

    def _is_constant(self, t: Tensor) -> bool:
        """Whether it depends on constants and weights only. Deep graphs: no recursion."""
        stack = [t]
        while stack:
            x = stack[-1]
            if x.name in self.constant:
                stack.pop()
            elif x.name in self.free or is_shape(x.op):
                self.constant[x.name] = True
            elif x.op.type == "Placeholder":
                self.constant[x.name] = False
            elif unknown := [i for i in x.op.inputs if i.name not in self.constant]:
                stack.extend(unknown)
            else:
                self.constant[x.name] = all(self.constant[i.name] for i in x.op.inputs)
        return self.constant[t.name]


def bytes_of(saved: Iterable[Tensor]) -> Mapping[str, int]:
    """Bytes by storage, each once."""
    return {storage(t).name: size(t) for t in saved}
