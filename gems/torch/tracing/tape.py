"""The calls of one recording in order, and which of them must stay on one stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gems.errors import TraceError
from gems.torch.tensors.storage import storage_of
from gems.torch.tracing.calls import Call, name_of
from gems.torch.tracing.fake_weights import FakeWeights
from gems.torch.tracing.frozen import tensors_within
from gems.torch.tracing.norm_calls import adopt_norms, norm_paths
from gems.torch.tracing.values import Values

# They look at no value of what they are given.
SHAPED = {
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
}
Made = list[tuple[tuple[Any, ...], torch.Tensor]]  # tensors in a result, with the keys to each


class Tape:
    def __init__(self, values: Values, weights: FakeWeights) -> None:
        self.values, self.weights = values, weights
        self.calls: list[Call] = []
        self.atomic: list[tuple[int, int]] = []  # first and last call of runs on one stage
        self.region: int | None = None  # of torch.utils.checkpoint, if inside one
        self.regions = 0
        self.shared_memory: dict[int, int] = {}  # a change in place -> first call on that memory

    def add(self, call: Call, changed: list[torch.Tensor], made: Made) -> None:
        self.calls.append(call)
        known = [t for t in changed if id(t) in self.values.known]
        self._note_changes(call, known, {id(t) for _, t in made})
        for at, tensor in made:
            if id(tensor) not in self.weights.named:
                name = self.values.unique(call.name, "#")
                call.outs.append((at, self.values.add(tensor, name)))

    @contextmanager
    def checkpoint_region(self) -> Iterator[None]:
        """All calls of one `torch.utils.checkpoint` region run, and are recomputed, as one."""
        outer, self.region = self.region, self.regions if self.region is None else self.region
        self.regions += outer is None
        first = len(self.calls)
        try:
            yield
        finally:
            self.region = outer
            if outer is None and len(self.calls) > first:
                self.atomic.append((first, len(self.calls) - 1))

    def _note_changes(self, call: Call, changed: list[torch.Tensor], results: set[int]) -> None:
        """A change in place gives new versions of all values that see the same memory.

        If there are several such values, what happened since their memory was first seen must
        stay on one rank up to this call: each would otherwise get a copy of its own. Later
        readers are sent the new versions and need not.
        """
        values, ours, here = self.values, {id(t) for t in changed}, len(self.calls) - 1
        for storage in {storage_of(t) for t in changed}:
            sharing = [values.known[i] for i in values.seen_in[storage]]
            call.overwrites += tuple(values.names_in[storage])
            for name, tensor in sharing:
                returned = id(tensor) in results
                new = None if returned else values.add(tensor, values.unique(name, "~"))
                call.mutates.append((name, new))
            if any(id(t) not in ours for _, t in sharing) or storage in self.weights.in_storage:
                names = {name for name, _ in sharing}
                writers = (i for i, c in enumerate(self.calls) if names & set(c.writes))
                first = self.shared_memory[here] = next(writers, here)
                if storage in self.weights.in_storage:  # not a copy of a weight's view
                    self.atomic.append((first, here))

    def finish(self, model: nn.Module, outputs: tuple[str, ...]) -> None:
        """Once all calls are there: drop what nobody reads, and note what else is atomic."""
        self._prune(outputs)
        # BatchNorm with a forward of its own has running statistics like any other.
        counting, runs = adopt_norms(self.calls, model, norm_paths(model))
        self.atomic += runs
        for at in counting:
            self.calls[at].touches = ()
        self._join_uses_of_changed_weights()

    def _prune(self, outputs: tuple[str, ...]) -> None:
        """Forget versions that nobody reads; only those that somebody reads join calls."""
        read = set(outputs)
        for here, call in reversed(list(enumerate(self.calls))):
            call.mutates = [(old, new) for old, new in call.mutates if new is None or new in read]
            read.update(old for old, new in call.mutates if new)
            read.update(call.reads)
            if here in self.shared_memory and any(new for _, new in call.mutates):
                self.atomic.append((self.shared_memory[here], here))

    def _join_uses_of_changed_weights(self) -> None:
        """What changes a weight and what reads it stay on one rank, but for running statistics."""
        changed = [n for c in self.calls for n in c.touches if n.rpartition(".")[0] not in c.norms]
        for name in dict.fromkeys(changed):
            uses = [i for i, call in enumerate(self.calls) if name in call.attrs]
            if len(uses) > 1:
                self.atomic.append((uses[0], uses[-1]))

    def reject_dependent(self, label: str, value: Any) -> None:
        """Raise if a cache that forward fills once depends on the sample, weights or chance."""
        if source := self._source(value):
            raise TraceError(
                f"forward keeps a tensor in {label} when it first runs, and computes it from "
                f"{source}, so all later samples would depend on the first; compute it in every "
                "forward, or register it as a buffer and fill it before training"
            )

    def _source(self, value: Any) -> str | None:
        """What the tensors in a value were computed from that changes: input, weights or chance."""
        makers = {name: call for call in self.calls for name in call.writes}
        changed = {name for call in self.calls for name in call.touches}
        left = list(self.values.names(tensors_within(value)))
        seen: set[str] = set()
        while left:
            if (name := left.pop()) in seen:
                continue
            seen.add(name)
            if (call := makers.get(name)) is None:
                return f"the input {name}"
            if call.random:
                return f"random numbers ({call.name})"
            for weight in call.attrs:
                if weight in self.weights.parameters or weight in changed:
                    return f"the weight {weight}"
            if name_of(call.function) not in SHAPED:
                left += call.reads
        return None
