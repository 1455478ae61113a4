"""Measure steps on cut images: one process, GEMS over tiles, a peer, and cores that share nothing.

    python -m benchmarks.spatial.run --repeats 7

The peer is PhysicsNeMo's ShardTensor, where it is installed: `shardtensor.py` says how. *Messages*
are those inside a step but for the sums of parameters' gradients. *Error* is the largest relative
difference from the plain model in float64, on small images.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.pipeline.ranks import Ranks
from benchmarks.spatial import exact, shardtensor
from benchmarks.spatial.networks import WORK
from benchmarks.spatial.steps import PLANS, errors, ours, plain, traffic

PEER = "ShardTensor, rows"
WARM = 3  # the heap of a process with several contestants grows for as many turns


def rows_of(work: str, repeats: int) -> list[dict[str, Any]]:
    with Ranks(1) as one, Ranks(2) as two:
        rows: list[dict[str, Any]] = [
            {"name": "plain", "run": lambda: one.run(plain, work)},
            {"name": "gems one rank", "run": lambda: one.run(ours, work, "gems one rank")},
            {"name": "apart", "run": lambda: two.run(plain, work, 2)},
        ]
        rows += [
            {"name": name, "run": lambda name=name: two.run(ours, work, name)}
            for name in PLANS
            if name != "gems one rank"
        ]
        if not shardtensor.absence():
            # It and ours take turns in the same processes.
            peer = {"name": PEER, "run": lambda: two.run(shardtensor.shardtensor, work)}
            rows.append(peer | shardtensor.verdict(work))
        rejected = [row for row in rows if "refused" in row]
        rows = [row for row in rows if "refused" not in row]
        for _ in range(WARM):
            for row in rows:
                row["run"]()
        for row in rows:
            name = row["name"]
            ranks = one if name in ("plain", "gems one rank") else two
            if name in ("plain", "apart"):
                found = ranks.run(plain, work, 2 if name == "apart" else 1, True)
            elif name == PEER:
                found = ranks.run(shardtensor.shardtensor, work, True)
                row["traffic"], row["sums"] = ranks.run(shardtensor.traffic, work)[0]
            else:
                found = ranks.run(ours, work, name, True)
                row["traffic"] = ranks.run(traffic, work, name)[0]
                row["error"] = exact.worst(ranks.run(errors, work, name))
            row["peak"] = max(bytes for bytes, _ in found)
            row["wall"], row["cpu"] = [], []
        for _ in range(repeats):
            for row in rows:
                answers = row["run"]()
                row["wall"].append(max(wall for wall, _ in answers))
                row["cpu"].append(max(cpu for _, cpu in answers))
    rows += rejected
    for row in rows:
        del row["run"]
    return rows


def table(work: str, rows: list[dict[str, Any]]) -> str:
    base = rows[0]
    lines = [
        f"**{work}**",
        "",
        "| | wall s | x | CPU s, busiest rank | x | peak MB | messages | MB sent | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "refused" in row:
            lines.append(f"| {row['name']} | refused: {row['rejected']} |{' |' * 7}")
            continue
        cells = [row["name"]]
        for series in ("wall", "cpu"):
            ratio = median(a / b for a, b in zip(base[series], row[series], strict=True))
            cells += [f"{median(row[series]):.3f}", f"{ratio:.2f}"]
        cells.append(f"{row['peak'] / 1e6:.0f}")
        messages, sent = row.get("traffic", (0, 0))
        cells += [str(messages or ""), f"{sent / 1e6:.2f}" if sent else ""]
        cells.append(f"{row['error']:.0e}" if "error" in row else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="turns each contestant takes")
    parser.add_argument("--work", nargs="+", default=list(WORK), help="which networks")
    parser.add_argument("--out", type=Path, default=Path("/tmp/spatial.json"))
    args = parser.parse_args()
    if absent := shardtensor.absence():
        print(absent, end="\n\n", flush=True)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    for work in args.work:
        report[work] = rows = rows_of(work, args.repeats)
        print(table(work, rows), end="\n\n", flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
