"""Train a network whose weights alone exceed a cap of resident memory, and watch from outside.

    python -m benchmarks.l2l.run --layers 88 --width 2048 --cap 512MiB

Each way is a process of its own. Its resident memory, Python and torch included, is what the kernel
says of it (VmRSS and VmHWM in /proc/PID/status), asked by this process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.where import where
from gems.draw.units import size
from gems.hardware import bytes_of

WAYS = {
    "plain": "PyTorch, all in memory",
    "l2l": "GEMS, L2L on disk",
    "l2l-p": "GEMS, L2L-p (eager updates) on disk",
}


@dataclass(frozen=True)
class Watched:
    """One process: its losses, the seconds of each step but the first, the most resident bytes."""

    losses: list[float]
    seconds: list[float]
    resident: int


def resident(pid: int) -> int:
    """The most bytes of a process that were in memory so far, as the kernel counts them."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith(("VmHWM", "VmRSS"))]
    return max((1024 * int(size) for size in found), default=0)


def watched(way: str, layers: int, width: int, steps: int, folder: str = "") -> Watched:
    command = [sys.executable, "-m", "benchmarks.l2l.train", "--way", way, "--folder", folder]
    command += ["--layers", str(layers), "--width", str(width), "--steps", str(steps)]
    most = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            most = max(most, resident(process.pid))
            time.sleep(0.02)
        assert process.stdout is not None
        said = [json.loads(line) for line in process.stdout]
    if process.returncode:
        raise SystemExit(f"{way} ended with exit code {process.returncode}")
    seconds = [line["seconds"] for line in said[1:]]
    return Watched([line["loss"] for line in said], seconds, most)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--layers", type=int, default=88)
    ask.add_argument("--width", type=int, default=2048)
    ask.add_argument("--steps", type=int, default=4)
    ask.add_argument("--cap", default="512MiB")
    ask.add_argument("--folder", default="", help="on a real disk")
    given = ask.parse_args()
    weights = 4 * given.layers * given.width * (given.width + 1)
    cap = bytes_of(given.cap)
    print(where())
    print(
        f"{given.layers} layers of {given.width}: weights {size(weights)} "
        f"({weights / cap:.1f} times the cap), with gradients and Adam {size(4 * weights)} "
        f"({4 * weights / cap:.1f} times)\n"
    )
    print(
        "| way | resident at most | of the cap | seconds per step | losses |\n|---|---|---|---|---|"
    )
    found: dict[str, Watched] = {}
    for way, name in WAYS.items():
        found[way] = one = watched(way, given.layers, given.width, given.steps, given.folder)
        took = sum(one.seconds) / max(len(one.seconds), 1)
        losses = ", ".join(f"{loss:.7f}" for loss in one.losses)
        share = f"{one.resident / cap:.2f}"
        cells = (name, size(one.resident), share, f"{took:.1f}", losses)
        print(f"| {' | '.join(cells)} |", flush=True)
    same = all(one.losses == found["plain"].losses for one in found.values())
    print(f"\nlosses are {'the same bits' if same else 'NOT the same'} in all ways")


if __name__ == "__main__":
    main()
