"""Measure plain PyTorch, the schedules of torch and those of GEMS, taking turns in one run.

    python -m benchmarks.pipeline.run --repeats 9

Two ranks in wall and virtual time, four in virtual time only, over 2, 4 and 8 micro-batches.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.pipeline import balance, ours, peer, plain
from benchmarks.pipeline.ranks import Ranks

MICRO_BATCHES = (2, 4, 8)
SERIES = ("wall", "virtual", "busy", "cpu", "exchange")  # what grows with every turn


def contestants(worlds: dict[int, Ranks], seconds: tuple[float, ...]) -> list[dict[str, Any]]:
    """One row each: what it is, and what needs no clock: exactness and peak bytes, or torch's
    words when it refuses."""
    rows: list[dict[str, Any]] = [
        {"schedule": "plain", "ranks": 1, "micro_batches": m, "peak": plain.peak(worlds[1], m)}
        for m in (1, *MICRO_BATCHES)
    ]
    for size, ranks in worlds.items():
        for m in MICRO_BATCHES:
            for name, schedule in peer.PEERS.items() if size > 1 else ():
                cut = balance.cut(seconds, schedule.owners(size), m)
                row = {"schedule": name, "ranks": size, "micro_batches": m, "balance": cut}
                refused = peer.refusal(name, ranks, m, cut)
                if refused:
                    row["refused"] = refused
                else:
                    row["error"] = peer.error(name, ranks, m, cut)
                    row["peak"] = peer.peak(name, ranks, m, cut)
                rows.append(row)
            for name in ours.OURS:
                if (size == 1) != (name == "gems one rank"):
                    continue
                cut = ours.balanced(name, seconds, size, m)
                row = {"schedule": name, "ranks": size, "micro_batches": m, "balance": cut}
                row["error"] = ours.error(name, ranks, m, cut)
                row["peak"] = ours.peak(name, ranks, m, cut)
                rows.append(row)
    return rows


def take_turn(row: dict[str, Any], ranks: Ranks) -> None:
    """Add one measured step to a row."""
    m = row["micro_batches"]
    if row["schedule"] == "plain":
        seen = plain.measure(ranks, m, 1)
    elif row["schedule"] in ours.OURS:
        seen = ours.measure(row["schedule"], ranks, m, 1, row["balance"])
    else:
        seen = peer.measure(row["schedule"], ranks, m, 1, row["balance"])
    if ranks.size > (os.cpu_count() or 1):
        del seen["wall"]  # more ranks than cores: the wall would show the machine
    for series in SERIES:
        if series in seen:
            row.setdefault(series, []).extend(seen[series])


def table(rows: list[dict[str, Any]]) -> str:
    """Medians; `x` is how much faster than plain over the same micro-batches in the same turn."""
    base = {r["micro_batches"]: r for r in rows if r["schedule"] == "plain"}
    lines = [
        "| schedule | ranks | m | wall s | x | virtual s | x | busy | peak MB | sums | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, size, m = row["schedule"], row["ranks"], row["micro_batches"]
        if "refused" in row:
            lines.append(f"| {name} | {size} | {m} | refused: {row['refused']} | | | | | | | |")
            continue
        cells = [name, str(size), str(m)]
        for series in ("wall", "virtual"):
            if series in row:
                pairs = zip(base[m][series], row[series], strict=True)
                cells += [f"{median(row[series]):.3f}", f"{median(a / b for a, b in pairs):.2f}"]
            else:
                cells += ["", ""]
        cells.append(f"{median(row['busy']):.2f}" if "busy" in row else "")
        cells.append(", ".join(f"{peak / 1e6:.0f}" for peak in row["peak"]))
        cells.append(f"{median(row['exchange']):.1%}" if any(row.get("exchange", ())) else "")
        cells.append(f"{max(row['error'].values()):.0e}" if "error" in row else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="turns each contestant takes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    with ExitStack() as stack:
        worlds = {n: stack.enter_context(Ranks(n)) for n in sorted({1, *args.ranks})}
        seconds = balance.child_seconds(worlds[1])
        rows = contestants(worlds, seconds)
        for turn in range(args.repeats):
            print(f"turn {turn + 1} of {args.repeats}", flush=True)
            for row in rows:
                if "refused" not in row:
                    take_turn(row, worlds[row["ranks"]])
    print(table(rows), flush=True)
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.platform()}",
        "torch": torch.__version__,
        "child_seconds": seconds,
        "rows": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
