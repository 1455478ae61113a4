"""Start ranks out of one warm interpreter: each is forked, and lives and ends like any process.

Importing torch takes longer than most tests; here it is done once. One request per line of stdin,
`{"command": [script, ...], "places": [environment, ...], "logs": folder, "limit": seconds}`; one
answer per line of stdout, `[[exit code, seconds], ...]`, with null for a rank that had to be killed
at the limit. What rank r prints is in `logs/r.out` and `logs/r.err`.

Ranks that are stopped (SIGSTOP) are killed once all others have ended.

A request may have `"signals": [[path, seconds, rank, signal], ...]`: so long after this path exists
(null: after the start), this rank gets the signal.

    ranks.py gems.torch.checkpoint.save_load    also imports this beforehand
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import train

import gems


def main() -> None:
    train.trainer(gems.Plan())  # loads all that is loaded late
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # a rank that ends need not look through all of it
    for line in sys.stdin:
        request = json.loads(line)
        ranks: list[int] = []
        for rank, place in enumerate(request["places"]):
            pid = os.fork()
            if not pid:
                become(request["command"], place, Path(request["logs"]) / str(rank))
                return  # and end as an interpreter does
            ranks.append(pid)
        found = ends(ranks, request["limit"], request.get("signals", []))
        print(json.dumps(found), flush=True)


def become(command: list[str], place: dict[str, str], log: Path) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(log.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(place)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def ends(ranks: list[int], limit: float, signals: list[list[Any]]) -> list[list[Any]]:
    start = time.monotonic()
    found: dict[int, list[Any]] = {}
    while len(found) < len(ranks):
        late = time.monotonic() - start
        signals = [x for x in signals if not sent(x, ranks, found, late)]
        for pid in ranks:
            if pid not in found and (end := os.waitpid(pid, os.WNOHANG))[0]:
                found[pid] = [os.waitstatus_to_exitcode(end[1]), late]
            elif pid not in found and late > limit:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                found[pid] = [None, late]
        left = [pid for pid in ranks if pid not in found]
        if left and all(map(stopped, left)):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001 if signals else 0.02)
    return [found[pid] for pid in ranks]


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def sent(wish: list[Any], ranks: list[int], found: dict[int, list[Any]], late: float) -> bool:
    """Whether a signal's time has come, and it was sent. The time of a path is when it was seen."""
    path, seconds, rank, number = wish
    if path is not None and os.path.exists(path):
        wish[:2] = path, seconds = None, late + seconds
    if path is not None or late < seconds:
        return False
    if ranks[rank] not in found:
        os.kill(ranks[rank], number)
    return True


if __name__ == "__main__":
    main()
