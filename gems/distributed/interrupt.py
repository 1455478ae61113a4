"""Signals that stop training: all ranks learn of them after the same step.

A scheduler may signal one rank or all of them, at different moments. A trainer that is given an
`Interrupt` adds it to the all-reduce that every step makes anyway, so that `step.interrupted` is
the same on every rank:

    with Interrupt() as interrupt:
        trainer = gems.Trainer(..., interrupt=interrupt)
        for images, labels in loader:
            if trainer.step(images, labels).interrupted:
                trainer.save("run/step-123")
                sys.exit(interrupt.code)

The exit code is 128 + the signal, as in a shell: 143 for SIGTERM, also on ranks that learnt of it
from others. Not 0: torchrun and Slurm would take the job for finished (`afterok` jobs
would start, and nobody would start it again).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from gems.errors import GemsError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupt:
    """Notes signals instead of dying of them. A second Ctrl-C stops at once, as it always does."""

    def __init__(self, signals: tuple[signal.Signals, ...] = SIGNALS) -> None:
        self.signals = signals
        self.heard: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def wanted(self) -> bool:
        return self.heard is not None

    @property
    def code(self) -> int:
        """What to exit with."""
        return 128 + (self.heard or signal.SIGTERM)

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is not threading.main_thread():
            raise GemsError("signals come to the main thread; make the Interrupt there")
        for number in self.signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.heard = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
