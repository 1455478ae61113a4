"""One measurement, in a process of its own: tiles per second by the wall, and peak memory.

    python -m benchmarks.slides.reads SLIDE --tile 1024 --box half --workers 2 --seconds 5

prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

from gems.data.loader import Batch, Loader
from gems.data.slides import Slides

BATCH = 4


def measure(loader: Loader, columns: slice, seconds: float, work: float) -> dict[str, float]:
    """Read this box of tile after tile; `work` is what a step computes meanwhile, in seconds."""
    batches: Iterator[Batch] = chain.from_iterable(map(loader.epoch, count()))
    for _ in range(3):
        next(batches)[0][:, :, :, columns]
    tiles, waited, begun = 0, 0.0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        images, _ = next(batches)
        asked = time.perf_counter()
        images[:, :, :, columns]
        waited += time.perf_counter() - asked
        tiles += len(images)
        time.sleep(work)
    took = time.perf_counter() - begun
    return {"tiles": tiles / took, "waited": waited / took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    put = parser.add_argument
    put("slide", type=Path)
    put("--tile", type=int, default=1024)
    put("--box", choices=("whole", "half"), default="whole")
    put("--workers", type=int, default=0)
    put("--reader", choices=("tifffile", "openslide"), default="tifffile")
    put("--seconds", type=float, default=5.0)
    put("--work", type=float, default=0.0, help="seconds that a step of training takes")
    given = parser.parse_args()
    source = Slides(given.slide, given.tile, tissue=0.3, reader=given.reader)
    columns = slice(0, given.tile // 2 if given.box == "half" else given.tile)
    with Loader(source, BATCH, workers=given.workers) as loader:
        found = measure(loader, columns, given.seconds, given.work)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**found, "peak": peak, "count": len(source)}))


if __name__ == "__main__":
    main()
