"""What the survey found: kept as one line of JSON per network, and shown as a table."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import gems

RESULTS = Path(__file__).with_name("results.jsonl")
TECHNIQUES = ("record", "pipeline", "gems", "tiles 1x2", "tiles 2x2")
OUTCOMES = ("exact", "rejected", "mismatch", "crash")
Found = dict[str, Any]


def state() -> str:
    """A short name of the library's code as it is now: rows of one state have the same."""
    files = sorted(Path(gems.__file__).parent.rglob("*.py"))
    return hashlib.sha1(b"".join(file.read_bytes() for file in files)).hexdigest()[:10]


def read(path: Path) -> dict[str, Found]:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {found["network"]: found for found in lines}


def write(path: Path, found: dict[str, Found]) -> None:
    path.write_text("".join(json.dumps(found[name]) + "\n" for name in found))


def status(found: Found) -> str:
    """In one word each: what came out under the techniques that were tried."""
    if "unusable" in found:
        return f"unusable: {found['unusable']}"
    if "died" in found:
        return f"crash: {found['died']}"
    if "large" in found:
        return f"too large: {found['large']} parameters"
    outcomes = {t: found[t]["outcome"] for t in TECHNIQUES if t in found}
    if set(outcomes.values()) == {"exact"}:
        return f"exact, tiles {found['reach']}" if "reach" in found else "exact"
    return "; ".join(f"{t} {o}" for t, o in outcomes.items() if o != "exact")


def table(done: dict[str, Found]) -> str:
    """Counts by library and technique. What could not be recorded counts as rejected in all."""
    rows = [
        "| library | technique | networks | exact | rejected | mismatch | crash | rejected, % |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|")
    usable = [f for f in done.values() if "unusable" not in f and "large" not in f]
    libraries = dict.fromkeys(f["library"] for f in usable)
    for library in (*libraries, "all"):
        mine = [f for f in usable if library in (f["library"], "all")]
        for technique in TECHNIQUES:
            counts = Counter(o for f in mine if (o := _outcome(f, technique)) is not None)
            tried = sum(counts.values())
            if not tried:
                continue
            cells = [str(counts[outcome]) for outcome in OUTCOMES]
            share = 100 * counts["rejected"] / tried
            rows.append(
                f"| {library} | {technique} | {tried} | {' | '.join(cells)} | {share:.1f} |"
            )
    return "\n".join(rows)


def _outcome(found: Found, technique: str) -> str | None:
    if "died" in found:
        return "crash"
    if technique in found:
        return found[technique]["outcome"]
    if found["record"]["outcome"] != "exact":  # what cannot be recorded runs under no plan
        return found["record"]["outcome"]
    return None
