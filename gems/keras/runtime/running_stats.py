"""State that forward changes, in the order of samples although several ranks see the samples.

Seeds and counters depend on no sample: what they are for each micro-batch is known before the step,
so that dropout draws what plain Keras draws. Running averages are linear, r <- a r + b(x), so after
n micro-batches

    r_n = a^n r_0  +  sum over i of a^(n - 1 - i) b(x_i)

whoever computed each b. Every rank sums the terms of its own micro-batches, and the sums are
all-reduced with the gradients. `a` is read off the recorded graph as d new / d old.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from gems.errors import TraceError
from gems.keras.runtime.partitioned_model import PartitionedModel
from gems.keras.tracing.subgraph import Function, ancestors, cut, lock


class Sampleless:
    """Seeds and counters of one rank, for each micro-batch of a step."""

    def __init__(self, partitioned: PartitionedModel, held: Mapping[str, Any]) -> None:
        r = partitioned.recording
        self.updates = {p: t for p, t in partitioned.sampleless.items() if p in held}
        feeds = {f"w:{p}": t for p, t in r.weights.items()} | {
            f"s:{p}": t for p, t in r.state.items()
        }
        behind = ancestors(self.updates.values())
        for name, t in feeds.items():
            if t.name in behind and name[2:] not in held:
                raise TraceError(
                    f"{', '.join(self.updates)} depend on {name[2:]}, which is on another rank; "
                    "put their layers into one stage"
                )
        with lock:
            fetches = {f"s:{p}": t for p, t in self.updates.items()}
            self.advance: Function = cut(r.tf_graph, feeds, fetches)

    def states(self, now: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """By path before each of `count` micro-batches, and after the last."""
        at = {name: now[name[2:]] for name in self.advance.feeds}
        at |= {f"s:{path}": now[path] for path in self.updates}
        found = []
        for _ in range(count + 1):
            found.append({path: at[f"s:{path}"] for path in self.updates})
            at |= self.advance(at)
        return found


def term(slope: Any, update: Any, later: int) -> Any:
    """What b(x) of a micro-batch still counts for after `later` more of them, in float64."""
    return tf.cast(update, tf.float64) * tf.cast(slope, tf.float64) ** later


def final(slope: Any, before: Any, total: Any, count: int) -> Any:
    """The running average after `count` micro-batches."""
    kept = tf.cast(before, tf.float64) * tf.cast(slope, tf.float64) ** count
    return tf.cast(kept + total, before.dtype)
