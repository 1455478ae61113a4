"""Many cases, in processes of their own that may die or hang; results by line, and their table."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

PER_WORKER = 300  # cases until a worker is replaced, so that a leak cannot grow
fork = multiprocessing.get_context("forkserver")


def read(out: Path) -> list[dict[str, Any]]:
    if not out.exists():
        return []
    return [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]


def worker(pipe: Any, seed: int, seconds: float) -> None:
    """Judges the cases whose numbers come through the pipe, until there are no more."""
    import torch

    from tests.generate.cases import draw
    from tests.generate.known import known
    from tests.generate.run import judge

    torch.set_num_threads(1)
    while (number := pipe.recv()) is not None:
        start = time.process_time()
        case = draw(number, seed)
        verdict = judge(case, seconds)
        expected = [entry.name for entry in known(case)] if verdict.failed else []
        pipe.send(
            {
                "case": number,
                "kind": "known" if expected else verdict.kind,
                "known": expected,
                "text": verdict.text[:600],
                "sort": verdict.sort if verdict.kind != "exact" else "",
                "trace": verdict.trace[-3000:] if verdict.failed and not expected else "",
                "features": case.features(),
                "seconds": round(time.process_time() - start, 2),
            }
        )


class Worker:
    """A process that judges cases, and the one that it is at."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.pipe, end = fork.Pipe()
        self.process = fork.Process(target=worker, args=(end, seed, seconds), daemon=True)
        self.process.start()
        end.close()
        self.done, self.case, self.since = 0, -1, 0.0

    def give(self, number: int) -> None:
        self.case, self.since = number, time.monotonic()
        self.pipe.send(number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def many(
    left: list[int], results: dict[int, Any], out: Path, seed: int, seconds: float, jobs: int
) -> None:
    """Judge cases, adding to `results` and to the file."""
    fork.set_forkserver_preload(["tests.generate.run"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    todo = iter(left)
    workers = [Worker(seed, seconds) for _ in range(jobs)]
    busy: list[Worker] = []
    with out.open("a") as file:
        for w in workers:
            if (number := next(todo, None)) is not None:
                w.give(number)
                busy.append(w)
        while busy:
            for w in list(busy):
                found = _answer(w, seed, seconds)
                if found is None:
                    continue
                busy.remove(w)
                results[found["case"]] = found
                file.write(json.dumps(found) + "\n")
                file.flush()
                _progress(found, results, seed)
                if found["kind"] == "died" or w.done >= PER_WORKER:
                    w.end()
                    w = Worker(seed, seconds)
                if (number := next(todo, None)) is not None:
                    w.give(number)
                    busy.append(w)
                else:
                    w.end()


def _answer(w: Worker, seed: int, seconds: float) -> dict[str, Any] | None:
    """What a worker has found; that it died or is stuck; None if it is still at it."""
    text = ""
    try:
        if w.pipe.poll(0.1):
            w.done += 1
            return w.pipe.recv()
        if time.monotonic() - w.since > 4 * seconds:
            text = "did not answer"
    except (EOFError, OSError):
        w.process.join(5)
        text = f"the process died: exit code {w.process.exitcode}"
    if not text:
        return None
    from tests.generate.cases import draw

    features = draw(w.case, seed).features()
    return {
        "case": w.case, "kind": "died", "known": [], "text": text, "sort": text, "trace": "",
        "features": features, "seconds": 0.0,
    }  # fmt: skip


def _progress(found: dict[str, Any], results: dict[int, Any], seed: int) -> None:
    if found["kind"] in FAILED:
        print(f"\n{again(found, seed)}\n    {found['kind']}: {found['text'][:300]}")
    if len(results) % 50 == 0:
        print(f"{len(results)} done: {dict(Counter(r['kind'] for r in results.values()))}")
    sys.stdout.flush()


# --- the table ------------------------------------------------------------------------------------

FAILED = ("mismatch", "crashed", "hung", "no remedy", "died")
KINDS = ("exact", "rejected", "sensitive", "invalid", "known", *FAILED)


def again(found: dict[str, Any], seed: int) -> str:
    """The command that runs one case again."""
    return f"python -m tests.generate --seed {seed} --case {found['case']}"


def table(results: dict[int, Any], seed: int) -> int:
    """By feature: how many were what."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for found in results.values():
        for feature in ["all", *found["features"]]:
            rows[feature][found["kind"]] += 1
    kinds = [kind for kind in KINDS if rows["all"][kind]]
    print(f"\n{'':36}" + "".join(f"{kind:>11}" for kind in kinds))
    for feature in sorted(rows, key=lambda f: (f != "all", f)):
        print(f"{feature[:36]:36}" + "".join(f"{rows[feature][kind] or '.':>11}" for kind in kinds))
    sorts: dict[str, list[Any]] = defaultdict(list)
    for found in results.values():
        if found["kind"] not in ("exact",):
            sorts[f"{found['kind']}: {found['sort']}"].append(found["case"])
    print("\nwhat was not exact, by kind:")
    for sort, numbers in sorted(sorts.items(), key=lambda item: -len(item[1])):
        print(f"{len(numbers):6} {sort[:170]}   e.g. --case {' '.join(map(str, numbers[:4]))}")
    failures = [found for found in results.values() if found["kind"] in FAILED]
    for found in failures:
        print(again(found, seed))
    return 1 if failures else 0
