"""The variables of one rank, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from gems.distributed.ownership import Ownership
from gems.keras.state.grad_bucket import Form, GradBucket
from gems.plans.plan import Plan
from gems.predict.timeline import Memory


class RankWeights:
    """By path, the variables that this rank's stages use. Gradients are in one bucket per stage,
    and in one for each weight that several stages use."""

    def __init__(
        self, variables: Mapping[str, Any], plan: Plan, owned: Ownership, rank: int
    ) -> None:
        self.plan, self.owned, self.rank = plan, owned, rank
        self.stages = plan.stages_on[rank]
        here = owned.on(rank)
        self.variables = {path: v for path, v in variables.items() if path in here}
        self.weight_bytes = sum(map(_size, self.variables.values()))
        self.optimizer_bytes = 0
        self.buckets: dict[int, GradBucket] = {}
        self.several: dict[str, GradBucket] = {}  # of weights that several stages use

    def begin(self, trained: Iterable[str], sums: Mapping[int, Mapping[str, Form]]) -> None:
        """A step begins: nothing is summed yet. `sums` of running statistics by stage."""
        forms = {p: self.form(p) for p in trained if p in self.variables}
        self.buckets = {
            stage: GradBucket(
                {p: forms[p] for p in self.owned.only(stage) if p in forms}
                | {sum_of(p): form for p, form in sums.get(stage, {}).items()}
            )
            for stage in self.stages
        }
        alone = {p for bucket in self.buckets.values() for p in bucket.forms}
        self.several = {p: GradBucket({p: form}) for p, form in forms.items() if p not in alone}

    def form(self, path: str) -> Form:
        v = self.variables[path]
        return tuple(v.shape), tf.as_dtype(v.dtype).name

    def add(self, stage: int, path: str, gradient: Any) -> None:
        bucket = self.several[path] if path in self.several else self.buckets[stage]
        bucket.add(path, gradient)

    def gradient(self, path: str) -> Any:
        """The sum so far, as a tensor."""
        return self._bucket(path).tensor(path)

    def _bucket(self, path: str) -> GradBucket:
        if path in self.several:
            return self.several[path]
        return self.buckets[self.owned.stages[path][0]]

    def optimized_by(self, optimizer: Any) -> None:
        """Count the state of an optimizer, which is there from now on."""
        self.optimizer_bytes = sum(map(_size, optimizer.variables))

    def clear(self) -> None:
        """Free gradients."""
        self.buckets, self.several = {}, {}

    def tied(self, stage: int) -> list[tuple[Any, tuple[int, ...]]]:
        """Gradients of weights that a stage shares with later ones, to sum over all of their
        ranks."""
        sets = [stages for stages in self.plan.tied if stages[0] == stage]
        return [
            (buffer, self.owned.replica_groups[path])
            for path in self.owned.tied()
            if path in self.several and any(self.owned.stages[path][0] in s for s in sets)
            for buffer in self.several[path].buffers
        ]

    def resident_memory(self) -> Memory:
        buckets = [*self.buckets.values(), *self.several.values()]
        return Memory(
            weights=self.weight_bytes,
            gradients=sum(bucket.nbytes for bucket in buckets),
            optimizer=self.optimizer_bytes,
        )


def sum_of(path: str) -> str:
    """The name of the sum of running statistics beside gradients."""
    return f"sum of {path}"


def _size(v: Any) -> int:
    found = tf.as_dtype(v.dtype).size
    for n in v.shape:
        found *= n
    return found
