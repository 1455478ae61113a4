"""Measure Keras models under a plan beside plain Keras, PyTorch and tf.distribute.

    PYTHONPATH=. .venv-keras/bin/python -m benchmarks.keras.run

Prints the tables of README.md. `--only` takes names of parts, `--quick` is a smoke test.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from statistics import median
from typing import Any

from benchmarks.keras.ranks import Size, launched

QUICK = Size(side=16, blocks=2, width=8, samples=8, turns=1)
MB = 2**20


def one_rank(size: Size) -> None:
    found = launched("benchmarks.keras.one_rank", 1, size)
    print("| | wall ms a batch | CPU ms a batch |\n|---|---|---|")
    for name in ("fit", "distribute"):
        print(f"| {name} | {1e3 * found[f'{name} wall']:.1f} | {1e3 * found[f'{name} cpu']:.1f} |")
    print(f"| ratio | {found['ratio wall']:.3f} | {found['ratio cpu']:.3f} |")


def stages(size: Size) -> None:
    large = replace(size, side=2 * size.side)
    found = launched("benchmarks.keras.stages", 4, size)
    rows = {
        "threads": launched("benchmarks.keras.one_process", 1, size),
        f"threads, {large.side} px": launched("benchmarks.keras.one_process", 1, large),
        "processes over gloo": found,
    }
    print("| ranks | plain tf.function, CPU ms | four stages, CPU ms | ratio |\n|---|---|---|---|")
    for name, row in rows.items():
        both = " | ".join(f"{1e3 * row[f'{each} cpu']:.1f}" for each in ("plain", "four stages"))
        print(f"| {name} | {both} | {row['ratio']:.3f} |")
    print("\n| stage | saved bytes predicted | held |\n|---|---|---|")
    for row in found["saved"]:
        print(f"| {row['stage']} | {row['predicted']} | {row['held']} |")


def speedup(size: Size) -> None:
    print("| front end | wall | virtual | one rank, ms wall | one rank, ms CPU |")
    print("|---|---|---|---|---|")
    both: dict[str, list[Any]] = {"gems.keras": [], "gems.torch": []}
    for _ in range(2):  # in turns
        both["gems.keras"].append(launched("benchmarks.keras.speedup", 2, size))
        both["gems.torch"].append(launched("benchmarks.keras.torch_speedup", 2, size))
    of = {n: {k: median(r[k] for r in rs) for k in rs[0]} for n, rs in both.items()}
    for name, x in of.items():
        alone = f"{1e3 * x['one rank wall']:.1f} | {1e3 * x['one rank virtual']:.1f}"
        print(f"| {name} | {x['wall']:.2f} | {x['virtual']:.2f} | {alone} |")
    ratios = [of["gems.keras"][k] / of["gems.torch"][k] for k in ("wall", "virtual")]
    print(f"| ratio | {ratios[0]:.2f} | {ratios[1]:.2f} | | |")


def copies(size: Size) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "gems.keras, data=2": lambda: launched("benchmarks.keras.copies", 2, size),
        "MirroredStrategy, two logical devices": lambda: launched(
            "benchmarks.keras.mirrored", 1, size, STRATEGY="devices", TF_NUM_INTEROP_THREADS="2"
        ),
        "MultiWorkerMirroredStrategy, two processes": lambda: launched(
            "benchmarks.keras.mirrored", 2, size, STRATEGY="workers", PORTS=free_ports(2)
        ),
    }
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for _ in range(2):
        for name, way in ways.items():
            if not (found[name] and "rejected" in found[name][0]):
                found[name].append(_tried(way))
    print("| | wall ms a batch |\n|---|---|")
    for name, rows in found.items():
        if why := rows[0].get("rejected"):
            print(f"| {name} | did not run: {why} |")
        else:
            print(f"| {name} | {1e3 * median(row['wall'] for row in rows):.1f} |")


def _tried(way: Callable[[], Any]) -> Any:
    try:
        return way()
    except RuntimeError as error:
        return {"rejected": str(error)}


def memory(size: Size) -> None:
    print("| built | rank | weights held, MB | resident memory grew by, MB |\n|---|---|---|---|")
    for built in ("lazily", "whole"):
        found = launched("benchmarks.keras.memory", 4, size, BUILT=built)
        for rank, row in enumerate(found["ranks"]):
            print(f"| {built} | {rank} | {row['held'] / MB:.1f} | {row['grew'] / MB:.1f} |")
    print(f"\nThe model's weights: {found['weights'] / MB:.1f} MB.")


def free_ports(count: int) -> str:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return ",".join(str(each.getsockname()[1]) for each in sockets)
    finally:
        for each in sockets:
            each.close()


PARTS = {part.__name__: part for part in (one_rank, stages, speedup, copies, memory)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--turns", type=int, default=Size.turns)
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    asked = parser.parse_args()
    size = QUICK if asked.quick else Size(turns=asked.turns)
    versions = ", ".join(f"{name} {version(name)}" for name in ("tensorflow-cpu", "keras", "torch"))
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {versions}")
    print(f"{size}")
    for name in asked.only:
        print(f"\n## {name}\n", flush=True)
        PARTS[name](size)


if __name__ == "__main__":
    main()
