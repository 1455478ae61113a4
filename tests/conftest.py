"""One thread per process, and how hard hypothesis looks."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

# Before anything imports torch, which reads them once. Processes that tests start inherit them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
# Some virtual machines name AMX among their instructions and do not let programs use it: there
# plain torch dies in bf16 convolutions (SIGILL).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from hypothesis import HealthCheck, settings

# "ci" gives the same examples every time; "thorough" looks for new ones.
# Building a model per example is slow by nature, so neither judges the clock.
patient = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=40, suppress_health_check=patient
)
settings.register_profile(
    "thorough", deadline=None, max_examples=1000, print_blob=True, suppress_health_check=patient
)
settings.load_profile(os.environ.get("GEMS_HYPOTHESIS", "ci"))

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_seed = torch.manual_seed


def _seed_of_one_thread(seed: int) -> Any:
    """Ranks that are threads share torch's generator: a test that seeds it on several of them and
    then draws weights is right or wrong by chance. Draw before the ranks start, or with
    `tests.exact.drawing`."""
    thread, caller = threading.current_thread().name, sys._getframe(1).f_code.co_filename
    alone = not thread.startswith("rank ") or thread.endswith(" of 1")
    assert alone or not caller.startswith(_HERE), f"{caller} seeds torch on {thread}"
    return _seed(seed)


torch.manual_seed = _seed_of_one_thread
