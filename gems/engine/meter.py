"""Counts live bytes of one rank, by kind, and remembers the highest."""

from __future__ import annotations

from dataclasses import replace

from gems.timeline import Memory


class Meter:
    """`add` and `drop` while a step runs; `peak` is the moment with most bytes in total."""

    def __init__(self, standing: Memory) -> None:
        self.now = self.peak = standing
        self.stashes = self.most_stashes = 0

    def add(self, kind: str, size: int) -> None:
        self.now = replace(self.now, **{kind: getattr(self.now, kind) + size})
        if self.now.total > self.peak.total:
            self.peak = self.now

    def drop(self, kind: str, size: int) -> None:
        self.now = replace(self.now, **{kind: getattr(self.now, kind) - size})

    def keep(self, size: int) -> None:
        """One more stash."""
        self.stashes += 1
        self.most_stashes = max(self.most_stashes, self.stashes)
        self.add("stash", size)

    def release(self, size: int) -> None:
        self.stashes -= 1
        self.drop("stash", size)

    def settle(self, standing: Memory) -> None:
        """What stands for itself (weights, gradients, optimizer) may have changed."""
        self.now = replace(
            self.now,
            weights=standing.weights,
            gradients=standing.gradients,
            optimizer=standing.optimizer,
        )
        if self.now.total > self.peak.total:
            self.peak = self.now
