"""One thread per process, how hard hypothesis looks, and what all tests of a worker share."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from unittest import mock

# Before anything imports torch, which reads them once. Processes that tests start inherit them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
# Some virtual machines name AMX among their instructions and do not let programs use it: there
# plain torch dies in bf16 convolutions (SIGILL).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.rank_server import RankServer

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


def pytest_collection(session: pytest.Session) -> None:
    """Libraries are nobody's garbage, and have most of the objects: a recording that searches for
    what holds its tensors need not look through them. Not those of gems or tests, which may."""
    if session.config.getoption("numprocesses", None):
        return  # the tests run in other processes
    for name in ("torch._dynamo", "torch.distributed.checkpoint"):
        importlib.import_module(name)
    assert "gems" not in sys.modules
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture(autouse=True, scope="session")
def compiled_once() -> Iterator[None]:
    """Ranks that are threads share a compiled plan: it comes from plain data alone, and each of
    them would build and validate the same schedule. Ranks that are processes each do."""
    from gems.torch import setup

    compiled, lock = lru_cache(maxsize=64)(setup.compile_plan), threading.Lock()

    def compile_plan(*given: Any, **options: Any) -> Any:
        with lock:
            found = compiled(*given, **options)
            assert found.schedule  # which is made when it is first asked for
            return found

    with mock.patch.object(setup, "compile_plan", compile_plan):
        yield
