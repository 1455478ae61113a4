"""resume.py with a pause before each step, so that there is time to preempt it."""

from __future__ import annotations

import time
from typing import Any

import resume

import gems

plain = gems.Trainer.step


def slowly(trainer: Any, *args: Any, **options: Any) -> Any:
    time.sleep(0.25)
    return plain(trainer, *args, **options)


gems.Trainer.step = slowly
resume.main()
