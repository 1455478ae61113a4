"""Ranks as real processes, forked from an interpreter that has loaded torch. Not a test itself.

Importing torch takes longer than most scripts that tests start. The server is scripts/ranks.py; one
per worker of pytest serves all tests (`rank_server` in conftest.py).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
PRELOADED = ("gems.torch.checkpoint.save_load",)


class RankServer:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "ranks.py"), *PRELOADED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        command: Sequence[object],
        places: Sequence[dict[str, str]],
        logs: Path,
        limit: float,
        signals: Iterable[Any] = (),
    ) -> list[tuple[int | None, float]]:
        """Run a script on one rank per place: exit code (None: killed at the limit) and seconds of
        each. What rank r prints is in `logs/r.out` and `logs/r.err`."""
        request = {
            "command": [*map(str, command)],
            "places": places,
            "logs": str(logs),
            "limit": limit,
            "signals": list(signals),
        }
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return [(code, seconds) for code, seconds in json.loads(self.process.stdout.readline())]

    def close(self) -> None:
        self.process.communicate()  # closes its input, which ends it


def places(world: int) -> list[dict[str, str]]:
    """The environment of each rank, as torchrun would set it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    one = {"WORLD_SIZE": str(world), **shared}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **one} for rank in range(world)]
