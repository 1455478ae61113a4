"""Survey all networks, one after the other, each under a time limit; resumable.

PYTHONPATH=. python -m benchmarks.coverage.run                 # all that are not in the results
PYTHONPATH=. python -m benchmarks.coverage.run --again rejected # those once more
PYTHONPATH=. python -m benchmarks.coverage.run --only timm/convit_tiny --show
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.coverage.results import RESULTS, read, state, status, table, write

SECONDS = 240.0
MEMORY = 10 << 30  # bytes of address space that the process of a network may take


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="*", default=[], help="networks, or beginnings of names")
    options.add_argument("--again", default="", help="those with this outcome, once more")
    options.add_argument("--seconds", type=float, default=SECONDS, help="limit for each network")
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--share", default="", help="1/2 and 2/2: for two runs at a time")
    options.add_argument("--show", action="store_true", help="print what came out, keep nothing")
    options.add_argument("--table", action="store_true", help="only print the table")
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        work()
    elif given.table:
        print(table(read(given.results)))
    else:
        survey(given)


def survey(given: argparse.Namespace) -> None:
    done = {} if given.show else read(given.results)
    names = wanted(given, done)
    code = state()
    print(f"{len(names)} networks", flush=True)
    worker: Worker | None = None
    for name in names:
        worker = worker or Worker()
        found = worker.ask(name, given.seconds)
        if "died" in found:
            worker.end()
            worker = None
        if given.show:
            print(json.dumps(found, indent=1))
            continue
        done[name] = found | {"code": code}
        write(given.results, done)
        print(f"{name:60} {status(found)}", flush=True)
    if worker is not None:
        worker.end()
    if not given.show:
        print(table(done))


def wanted(given: argparse.Namespace, done: dict[str, Any]) -> list[str]:
    from benchmarks.coverage.vision_ops import declare

    declare()
    from benchmarks.coverage.networks import cases

    names = [case.title for case in cases()]
    if given.share:
        which, of = map(int, given.share.split("/"))
        names = names[which - 1 :: of]
    if given.only:
        return [n for n in names if any(n.startswith(only) for only in given.only)]
    if given.again:
        return [n for n in names if n in done and given.again in status(done[n])]
    return [n for n in names if n not in done]


class Worker:
    """A process that checks one network after the other, and is ended if one takes too long."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.coverage.run", "--worker"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def ask(self, name: str, seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        start = time.monotonic()
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            why = f"no answer in {seconds:.0f} s" if not ready else "the process died"
            return {"network": name, "library": name.partition("/")[0], "died": why}
        return json.loads(line) | {"seconds": round(time.monotonic() - start, 1)}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def work() -> None:
    """Names in, findings out, one line each."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    logging.disable(logging.WARNING)
    import torch

    from benchmarks.coverage.vision_ops import declare

    torch.set_num_threads(1)
    declare()
    from benchmarks.coverage.check import check
    from benchmarks.coverage.networks import cases

    known = {case.title: case for case in cases()}
    for name in _lines(sys.stdin):
        print(
            json.dumps(check(known[name], bool(os.environ.get("QUICK")))), file=answers, flush=True
        )


def _lines(source: Iterable[str]) -> Iterable[str]:
    for line in source:
        yield line.strip()


if __name__ == "__main__":
    main()
