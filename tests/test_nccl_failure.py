"""A rank ends while the host of another waits for a GPU: it comes back and raises, or is ended.

Ranks are processes. One has a TorchDist over a double of NCCL (fake_nccl.py) and waits in a sum; of
the other only the heartbeat is real."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gems.errors import PeerError
from gems.transport import heartbeat, torch_distributed
from gems.transport.board import CLOSED, ENDED, FAILED, FolderBoard, own_sign
from gems.transport.heartbeat import Heartbeat
from gems.transport.sockets import hang_up, hung_up, open_sockets
from gems.transport.torch_distributed import TorchDist
from tests.fake_nccl import Fabric, patched
from tests.worlds import fork

LIMIT = 60.0
RAISED, WAITING = 7, "waiting"
# How the other rank ends, what the host waits in; then its exit code and what it says.
CASES = {
    ("fails", "wait"): (RAISED, "rank 1 failed: ValueError: no such label"),
    ("ends", "wait"): (RAISED, "rank 1 has ended: KeyError: 'x'"),
    ("killed", "wait"): (RAISED, "rank 1 .* was killed or has crashed"),
    ("stopped", "wait"): (RAISED, "rank 1 .* has given no sign of life for 2 seconds"),
    ("killed", "synchronise"): (RAISED, "rank 1 .* was killed or has crashed"),
    ("killed", "for ever"): (1, "waits for a GPU and is ended: .*rank 1 .* was killed"),
}


def waits(folder: Path, how: str) -> None:
    """Rank 0: in a sum that rank 1 never joins."""
    sys.stderr = (folder / "stderr").open("w")
    fabric = Fabric(2, alone=True, deaf=how == "for ever")
    fabric.here.rank = 0
    beating = Heartbeat(FolderBoard(folder, 0, 2), 0, 2, 2.0, "the folder")
    beating.attend(LIMIT)
    with patched(fabric), mock.patch.object(torch_distributed, "COMING_BACK", 1.0):
        transport = TorchDist(2.0, heartbeat=beating)
        known = transport.communicators
        known.groups[0, 1] = known._make((0, 1))
        work: Any = transport.all_reduce(torch.zeros(4), (0, 1))
        (folder / WAITING).touch()
        try:
            if how == "synchronise":  # as on a stream: comes back, and knows of no error
                op = work.works[0].op
                fabric.wait(0, lambda: op.done, "a kernel")
                transport.all_reduce(torch.zeros(4), (0, 1))
            else:
                work.wait()
        except PeerError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(RAISED)


def ends(folder: Path, how: str) -> None:
    """Rank 1."""
    beating = Heartbeat(FolderBoard(folder, 1, 2), 1, 2, LIMIT, "the folder")
    while not (folder / WAITING).exists():
        time.sleep(0.02)
    if how == "fails":
        beating.tell(FAILED, "ValueError: no such label")
    elif how == "ends":
        beating.end(ENDED, "KeyError: 'x'")
    else:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    time.sleep(LIMIT)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Any]]:
    """All cases at once: exit code and output of rank 0."""
    started = {}
    for end, how in CASES:
        folder = tmp_path_factory.mktemp("board")
        pair = [
            fork.Process(target=waits, args=(folder, how)),
            fork.Process(target=ends, args=(folder, end)),
        ]
        for process in pair:
            process.start()
        started[end, how] = folder, pair
    found = {}
    for case, (folder, pair) in started.items():
        pair[0].join(LIMIT)
        found[case] = pair[0].exitcode, (folder / "stderr").read_text()
    yield found
    for _, pair in started.values():
        for process in pair:
            process.kill()
            process.join()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_host_that_waits_for_a_gpu_learns_that_a_rank_has_ended(
    outcomes: dict[Any, Any], case: tuple[str, str]
) -> None:
    code, said = outcomes[case]
    expected, cause = CASES[case]
    assert code == expected, said or "still waits"
    assert re.search(cause, said), said


# --- on another node ------------------------------------------------------------------------------


def test_a_connection_that_closes_is_seen() -> None:
    before = open_sockets().items()
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname())
        opened = dict(open_sockets().items() - before)
        del opened[server.fileno()]
        other, _ = server.accept()
        assert not hung_up(opened)
        other.close()
        assert hung_up(opened)
        own.close()  # as gloo does, once it has noticed
        assert hung_up(opened)


def test_a_silent_rank_is_lost_sooner_once_a_connection_has_closed(tmp_path: Path) -> None:
    """A rank that was killed on another node: nobody here can look for its process."""
    lost = queue.Queue[PeerError]()
    with mock.patch.object(heartbeat, "HUNG_UP", 1.5):
        mine = Heartbeat(FolderBoard(tmp_path, 0, 2), 0, 2, 600.0, "the folder")
        mine.interval = 0.2
        theirs = replace(own_sign(), where="another node")
        FolderBoard(tmp_path, 1, 2).write(theirs.text())
        mine.attend(LIMIT)
        mine.on_loss(lost.put, lambda: True)
        said = str(lost.get(timeout=LIMIT))
        mine.end(CLOSED)
    assert "rank 1" in said and "no sign of life for 1.5 seconds" in said


def test_a_descriptor_that_is_a_file_by_now_is_no_connection(tmp_path: Path) -> None:
    """A connection was closed, and its number given to a file: the watching thread died of it."""
    one, other = socket.socketpair()
    with one, other:
        named = {one.fileno(): open_sockets()[one.fileno()]}
        assert not hung_up(named)
        other.close()
        assert hung_up(named)
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    try:
        before = len(os.listdir("/proc/self/fd"))
        for name in (*named.values(), "socket:[0]"):
            assert hung_up({file: name})
            hang_up({file: name})
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(file)


def test_a_rank_that_falls_silent_is_lost_within_half_a_minute() -> None:
    """By the constants: seconds without a sign, then until the watch looks, and until it ends."""
    timeout = torch_distributed.TIMEOUT
    beat = min(heartbeat.SLOWEST, timeout / heartbeat.BEATS)
    assert timeout + beat <= 30
    assert heartbeat.HUNG_UP + beat + torch_distributed.COMING_BACK <= 30
