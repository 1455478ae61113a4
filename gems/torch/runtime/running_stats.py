"""Running statistics in sample order, although several ranks see the samples.

Normalisation layers in training mode use the statistics of the micro-batch and only keep a running
average for later: r <- (1 - m) r + m s. It is linear, so after n micro-batches

    r_n = (1 - m)^n r_0  +  sum over i of (1 - m)^(n - 1 - i) m s_i

whoever computed each s_i. Every rank of a replica group sums the terms of its own micro-batches,
and the sums are all-reduced with the gradients. With `momentum=None` the average is cumulative: all
s_i weigh the same. A layer that is called u times per forward takes u steps per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gems.torch.tracing.norm_calls import tracked

Tensor = torch.Tensor


class Statistics:
    """The running averages of one stage on one rank, during one step of n micro-batches.

    `share` is this rank's weight in the sum: the ranks of a spatial group compute the same.
    """

    def __init__(self, uses: list[tuple[Any, int]], micro_batches: int, share: float = 1.0) -> None:
        self.n, self.share = micro_batches, share
        self.layers = [(module, calls) for module, calls in uses if tracked(module)]
        self.running = [r for m, _ in self.layers for r in (m.running_mean, m.running_var)]
        self.counts = [m.num_batches_tracked for m, _ in self.layers]
        # Cumulative averages need the number; reading it waits for a GPU, so the others do not.
        self.base_counts: list[Any] = [
            int(c) if _cumulative(m) else c.clone()
            for c, (m, _) in zip(self.counts, self.layers, strict=True)
        ]
        self.sums = [torch.zeros_like(r) for r in self.running]

    def follow(self, earlier: Statistics) -> None:
        """Start from the counts of a step that is not finished yet."""
        counted = ((m, calls * isinstance(m, _counting)) for m, calls in earlier.layers)
        steps = {id(m): calls * earlier.n for m, calls in counted}
        had = {id(m): n for (m, _), n in zip(earlier.layers, earlier.base_counts, strict=True)}
        self.base_counts = [
            had[id(m)] + steps[id(m)] if id(m) in had else count
            for (m, _), count in zip(self.layers, self.base_counts, strict=True)
        ]

    @contextmanager
    def during(self, position: int) -> Iterator[None]:
        """Around the forward of the micro-batch at this position in the order of samples."""
        if not self.layers:
            yield
            return
        # Backward may hold on to the buffers that forward saw, so each forward gets fresh ones.
        fresh = [torch.zeros_like(r) for r in self.running]
        torch._foreach_zero_(self.counts)
        self._install(fresh)
        try:
            yield
        finally:
            self._install(self.running)
        later = self.n - 1 - position
        weights = [
            self.share * self._weight(j, later) for j in range(len(self.layers)) for _ in range(2)
        ]
        torch._foreach_add_(self.sums, torch._foreach_mul(fresh, weights))

    def _install(self, running: list[Tensor]) -> None:
        for j, (module, _) in enumerate(self.layers):
            module._buffers["running_mean"] = running[2 * j]
            module._buffers["running_var"] = running[2 * j + 1]

    def _weight(self, j: int, later: int) -> float:
        """What the steps of one micro-batch still count for after `later` more of them."""
        module, calls = self.layers[j]
        if _cumulative(module):
            return calls / (self.base_counts[j] + calls * self.n)
        return (1 - _momentum(module)) ** (calls * later)

    def finish(self, sums: list[Tensor]) -> None:
        """Update the averages, given the sums over the replica group.

        Nothing else has changed them since; but the step before may have ended just now."""
        for j, (module, calls) in enumerate(self.layers):
            steps = calls * self.n
            old = self.base_counts[j]
            decay = old / (old + steps) if _cumulative(module) else (1 - _momentum(module)) ** steps
            for k in (2 * j, 2 * j + 1):
                torch.add(sums[k], self.running[k], alpha=decay, out=self.running[k])
            self.counts[j].fill_(old + (steps if isinstance(module, _counting) else 0))


_counting = nn.modules.batchnorm._BatchNorm  # instance norm does not count its batches


def _cumulative(module: Any) -> bool:
    return module.momentum is None and isinstance(module, _counting)


def _momentum(module: Any) -> float:
    """Instance norm without momentum never changes its averages."""
    return 0.0 if module.momentum is None else module.momentum


@contextmanager
def unrecorded(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Around a recomputation: these layers took their statistics the first time."""
    held = [(m, {k: b for k, b in m._buffers.items() if b is not None}) for m in modules]
    for module, buffers in held:
        module._buffers.update({key: b.clone() for key, b in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.update(buffers)
