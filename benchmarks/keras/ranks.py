"""Ranks of a measurement as processes with one thread each; rank 0 writes what it found."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gems.cli.ranks import start

ONE_THREAD = {
    "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1",
    "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Of a measurement: network, batch, turns."""

    side: int = 64
    blocks: int = 8
    width: int = 32
    samples: int = 16
    turns: int = 7


def launched(module: str, world: int, size: Size, **environment: str) -> Any:
    """What `module` found on `world` ranks; raises if one failed."""
    os.environ.update(ONE_THREAD | environment)
    with tempfile.TemporaryDirectory(prefix="keras-benchmark-") as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", module, str(file), json.dumps(asdict(size))]
        if code := start(command, world):
            raise RuntimeError(f"{module} on {world} ranks ended with exit code {code}")
        return json.loads(file.read_text())


def answer(measure: Callable[[Size], Any]) -> None:
    """In a rank: measure, and write what was found; ranks but the first give None."""
    file, text = sys.argv[1:]
    found = measure(Size(**json.loads(text)))
    if found is not None:
        Path(file).write_text(json.dumps(found))


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of the process, in whichever threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def medians(turns: list[dict[str, float]]) -> dict[str, float]:
    """Of each series."""
    return {name: median(turn[name] for turn in turns) for name in turns[0]}


def barrier(transport: Any) -> None:
    transport.all_gather_object(None)
