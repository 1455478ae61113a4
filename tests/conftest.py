"""One thread per process, and how hard hypothesis looks."""

from __future__ import annotations

import os

# Before anything imports torch, which reads them once. Processes that tests start inherit them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

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
