"""Numbers of a device on the host: many in one copy, for which the host waits once, or later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


class Reading:
    """Single numbers on their way to the host, as float64, which holds those of any real type.

    The copy begins now, after what was launched so far; `values` waits for it, and for nothing that
    was launched since.
    """

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        self.count = len(numbers)
        self.event: torch.cuda.Event | None = None
        stacked = torch.stack([x.detach().reshape(()) for x in numbers]) if numbers else None
        self.found = torch.empty(0) if stacked is None else stacked.to(torch.float64)
        if self.found.is_cuda:
            device, self.found = self.found.device, _pinned(self.found)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))

    def values(self) -> list[float]:
        if self.event is not None and not self.event.query():
            self.event.synchronize()
        return self.found.tolist()


def _pinned(source: Tensor) -> Tensor:
    into = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return into.copy_(source, non_blocking=True)
