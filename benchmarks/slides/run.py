"""Tiles per second from a slide, with 0 to 4 workers, and the memory that takes.

    python -m benchmarks.slides.run --side 20000 --small 5000 --seconds 5

The slides are made first, in --folder, and kept. Every number is the median of --repeats processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.slides.make import slide
from benchmarks.slides.reads import BATCH
from benchmarks.where import where

WORKERS = (0, 1, 2, 4)


def read(path: Path, given: argparse.Namespace, **options: Any) -> dict[str, float]:
    """Medians of several processes."""
    command = [sys.executable, "-m", "benchmarks.slides.reads", str(path)]
    for name, value in {"seconds": given.seconds, **options}.items():
        command += [f"--{name}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    seen = [
        json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)
        for _ in range(given.repeats)
    ]
    return {key: median(one[key] for one in seen) for key in seen[0]}


def line(*cells: object) -> None:
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


def speeds(path: Path, given: argparse.Namespace) -> None:
    print("Tiles per second, nothing else done:\n")
    line("reader", "tile", "box", *(f"{w} workers" for w in WORKERS))
    line(*["---"] * (3 + len(WORKERS)))
    for reader in ("tifffile", "openslide"):
        for tile, box in ((1024, "whole"), (1024, "half"), (256, "whole")):
            found = [
                read(path, given, reader=reader, tile=tile, box=box, workers=w)["tiles"]
                for w in WORKERS
            ]
            line(reader, f"{tile}²", box, *(f"{x:.0f}" for x in found))


def keeping_up(path: Path, given: argparse.Namespace) -> None:
    print(f"\nShare of the time that a step of {given.work} s, {BATCH} tiles of 1024², waits:\n")
    line("reader", *(f"{w} workers" for w in WORKERS))
    line(*["---"] * (1 + len(WORKERS)))
    for reader in ("tifffile", "openslide"):
        found = [
            read(path, given, reader=reader, work=given.work, workers=w)["waited"] for w in WORKERS
        ]
        line(reader, *(f"{x:.0%}" for x in found))


def memory(paths: dict[int, Path], given: argparse.Namespace) -> None:
    print("\nPeak memory of the process, MiB, 2 workers, tiles of 1024²:\n")
    line("reader", *(f"{side}²" for side in paths), "growth")
    line(*["---"] * (2 + len(paths)))
    for reader in ("tifffile", "openslide"):
        found = [read(p, given, reader=reader, workers=2)["peak"] for p in paths.values()]
        line(reader, *(f"{x:.0f}" for x in found), f"{found[-1] - found[0]:+.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    put = parser.add_argument
    put("--side", type=int, default=20_000, help="of the slide that is timed")
    put("--small", type=int, default=5_000, help="of the slide whose memory is compared")
    put("--seconds", type=float, default=5.0, help="per measurement")
    put("--repeats", type=int, default=3)
    put("--work", type=float, default=0.5, help="seconds that a step of training takes")
    put("--folder", type=Path, default=Path("runs/slides"))
    given = parser.parse_args()
    paths = {s: slide(given.folder / f"{s}.tif", s) for s in (given.small, given.side)}
    print(where())
    speeds(paths[given.side], given)
    keeping_up(paths[given.side], given)
    memory(paths, given)


if __name__ == "__main__":
    main()
