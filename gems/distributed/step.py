"""The result of one training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """What one call of `Trainer.step` gives: the same on every rank, but for its seconds.

    `norm` is the gradient's, before clipping; `interrupted`: a rank received a signal to stop.

    With schedule "2bw" a call ends while its batch is in flight: `loss` is that of the batch before
    (nan if there was none since the beginning, or the last flush), and so are `updated` and
    `interrupted`. `Trainer.flush` gives those of the last one.
    """

    loss: float
    samples: int
    seconds: float
    updated: bool
    norm: float | None = None
    interrupted: bool = False
