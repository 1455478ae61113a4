"""The largest image on which one rank trains one step under a cap of live bytes.

    PYTHONPATH=. python -m benchmarks.largest-image.run --caps 256MiB 1GiB

Every side that counts was really trained on. From the largest side that fits so far the search goes
up by a quarter, and between the last that fits and the first that does not, to one part in twenty.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable

import torch

from benchmarks.where import where
from gems.draw.units import size
from gems.machine import bytes_of

from .networks import NETWORKS
from .ways import WAYS

CLOSE = 1.05


def largest(fits: Callable[[int], bool], multiple: int, seconds: float) -> tuple[int, bool]:
    """The largest side that fits, as far as was tried in so many seconds; and whether time ended
    the search."""
    start, low, high = time.monotonic(), 0, 0
    side = 2 * multiple
    while not high or high > max(CLOSE * low, low + multiple):
        if time.monotonic() - start > seconds:
            return low, True
        if fits(side):
            low = side
        else:
            high = side
        if high:
            side = _rounded((low + high) / 2, multiple)
            if side in (low, high):
                break
        else:
            side = _rounded(1.25 * low + multiple, multiple)
        if high and not low and side < multiple:
            break
    return low, False


def _rounded(side: float, multiple: int) -> int:
    return round(side / multiple) * multiple


def row(network: str, cap: float, way: str, seconds: float) -> str:
    """One way's largest side, and what it took there."""
    seen: dict[int, tuple[int, float]] = {}

    def fits(side: int) -> bool:
        start = time.monotonic()
        peak = WAYS[way](NETWORKS[network], side, cap)
        if peak is None or peak > cap:
            return False
        seen[side] = (peak, time.monotonic() - start)
        return True

    side, stopped = largest(fits, NETWORKS[network].multiple, seconds)
    peak, took = seen.get(side, (0, 0.0))
    shown = f"{side}{' or more' * stopped}"
    return f"| {network} | {size(cap)} | {way} | {shown} | {size(peak)} | {took:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--caps", nargs="+", default=["256MiB", "1GiB"])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seconds", type=float, default=1800, help="of one search, about")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    torch.set_num_threads(1)
    print(where())
    print("| network | cap | way | largest side | live at most | seconds, planning and step |")
    print("|---|---|---|---|---|---|", flush=True)
    for network in given.networks:
        for cap in map(bytes_of, given.caps):
            for way in given.ways:
                print(row(network, cap, way, given.seconds), flush=True)


if __name__ == "__main__":
    main()
