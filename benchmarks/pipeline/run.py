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
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.pipeline import balance, copies, ours, peer, plain
from benchmarks.pipeline.ranks import Ranks

Wanted = Callable[[str], bool]
ALONE = "gems one rank"
SERIES = ("wall", "virtual", "busy", "cpu", "exchange")  # what grows with every turn


def contestants(
    ranks: Ranks, m: int, seconds: tuple[float, ...], wanted: Wanted
) -> list[dict[str, Any]]:
    """One row each: what it is, and what needs no clock: exactness and peak bytes, or torch's
    words when it rejects it."""
    size = ranks.size
    rows = []
    for name in filter(wanted, copies.COPIES if m >= size else ()):
        row = {"schedule": name, "ranks": size, "micro_batches": m}
        if name == "ddp":  # the other sums nothing, so it has no batch to be compared on
            row["error"] = copies.error(ranks, m)
        rows.append(row | {"peak": copies.peak(name, ranks, m)})
    for name in filter(wanted, peer.PEERS):
        cut = balance.cut(seconds, peer.PEERS[name].owners(size), m)
        row = {"schedule": name, "ranks": size, "micro_batches": m, "balance": cut}
        if rejected := peer.refusal(name, ranks, m, cut):
            row["rejected"] = rejected
        else:
            row["error"] = peer.error(name, ranks, m, cut)
            row["peak"] = peer.peak(name, ranks, m, cut)
        rows.append(row)
    for name in filter(wanted, ours.OURS):
        if name != ALONE and (name != "gems copies" or m >= size):
            rows.append(_ours(name, ranks, m, ours.balanced(name, seconds, size, m)))
    return rows


def _ours(name: str, ranks: Ranks, m: int, cut: tuple[int, ...]) -> dict[str, Any]:
    return {
        "schedule": name,
        "ranks": ranks.size,
        "micro_batches": m,
        "balance": cut,
        "error": ours.error(name, ranks, m, cut),
        "peak": ours.peak(name, ranks, m, cut),
    }


def take_turn(row: dict[str, Any], ranks: Ranks) -> None:
    """Add one measured step to a row."""
    m = row["micro_batches"]
    if row["schedule"] == "plain":
        seen = plain.measure(ranks, m, 1)
    elif row["schedule"] in copies.COPIES:
        seen = copies.measure(row["schedule"], ranks, m, 1)
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
    base: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        if row["schedule"] == "plain":
            base[row["block"], row["micro_batches"]] = row
    lines = [
        "| schedule | ranks | m | wall s | x | virtual s | x | busy | peak MB | sums | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, size, m = row["schedule"], row["ranks"], row["micro_batches"]
        if "rejected" in row:
            lines.append(f"| {name} | {size} | {m} | rejected: {row['rejected']} | | | | | | | |")
            continue
        cells = [name, str(size), str(m)]
        for series in ("wall", "virtual"):
            if series in row:
                pairs = zip(base[row["block"], m][series], row[series], strict=True)
                cells += [f"{median(row[series]):.3f}", f"{median(a / b for a, b in pairs):.2f}"]
            else:
                cells += ["", ""]
        cells.append(f"{median(row['busy']):.2f}" if "busy" in row else "")
        cells.append(", ".join(f"{peak / 1e6:.0f}" for peak in row["peak"]))
        cells.append(f"{median(row['exchange']):.1%}" if any(row.get("exchange", ())) else "")
        cells.append(f"{max(row['error'].values()):.0e}" if "error" in row else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def block(
    size: int, m: int, seconds: tuple[float, ...], repeats: int, wanted: Wanted
) -> list[dict[str, Any]]:
    """All contestants over so many ranks and micro-batches, in processes of their own, in turn."""
    with Ranks(1) as one, Ranks(size) as ranks:
        whole = (len(seconds),)
        rows = [
            {"schedule": "plain", "ranks": 1, "micro_batches": m, "peak": plain.peak(one, m)},
            _ours(ALONE, one, m, whole),
            *contestants(ranks, m, seconds, wanted),
        ]
        for row in rows:
            row["block"] = size
        for _ in range(repeats):
            for row in rows:
                if "rejected" not in row:
                    take_turn(row, one if row["ranks"] == 1 else ranks)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="turns each contestant takes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8], help="of a step")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--only", nargs="+", help="these, beside plain and one rank: ddp, ...")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with Ranks(1) as one:
        seconds = balance.child_seconds(one)
    for size in args.ranks:
        for m in args.micro_batches:
            rows += block(size, m, seconds, args.repeats, lambda x: not args.only or x in args.only)
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
