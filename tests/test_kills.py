"""Runs that are killed, told to stop, or out of disk, over real processes: they go on exactly."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gems.distributed.interrupt import Interrupt
from gems.errors import GemsError
from gems.torch.checkpoint.atomic_folder import AtomicFolder
from gems.torch.checkpoint.manifest import latest, read, verify
from gems.torch.trainer import Trainer
from tests.rank_server import SCRIPTS, RankServer, places
from tests.saved import TWO, data, fingerprint, on_ranks

PLAN = {"stages": 2, "replications": 2, "schedule": "gems"}
STEPS = 8
LIMIT = 60.0
Run = Callable[..., tuple[list[int], list[list[Any]]]]


@pytest.fixture(scope="module")
def run(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Start two ranks of resume.py: their exit codes, and the lines that each printed."""

    def run(folder: Path, *more: str, signals: Any = ()) -> Any:
        logs = tmp_path_factory.mktemp("logs")
        command = [SCRIPTS / "resume.py", json.dumps(PLAN), folder, STEPS, *more]
        ends = rank_server.run(command, places(2), logs, LIMIT, signals)
        said = [(logs / f"{rank}.err").read_text() for rank in range(2)]
        assert all(code is not None for code, _ in ends), f"a rank hung, having said {said}"
        printed = [(logs / f"{rank}.out").read_text().splitlines() for rank in range(2)]
        return [code for code, _ in ends], [[json.loads(x) for x in rows] for rows in printed]

    return run


@pytest.fixture(scope="module")
def expected(run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The run that nobody interrupts."""
    codes, lines = run(tmp_path_factory.mktemp("whole"))
    assert codes == [0, 0]
    assert len(lines[0][-1]["losses"]) == STEPS
    return [rows[-1] for rows in lines]


def reached(folder: Path) -> int:
    path = latest(folder)
    return 0 if path is None else read(path).step


def assert_whole(folder: Path) -> None:
    """Whatever has a final name is complete, to the last bit."""
    for path in folder.iterdir():
        if ".tmp-" not in path.name:
            verify(path, read(path))


def test_a_run_killed_at_any_moment_goes_on(run: Run, expected: list[Any], tmp_path: Path) -> None:
    """At first in the first steps, then further on; rank 0, rank 1 or both."""
    draw = random.Random(20)
    killed = 0
    while (now := reached(tmp_path)) < STEPS - 2:
        delay, who = draw.uniform(0, 0.15), draw.choice([[0], [1], [0, 1]])
        after = str(tmp_path / f"step-{now + 1}")
        wishes = [[after, delay, rank, int(signal.SIGKILL)] for rank in who]
        codes, _ = run(tmp_path, signals=wishes)
        assert_whole(tmp_path)
        assert reached(tmp_path) > now
        if reached(tmp_path) < STEPS:
            killed += 1
            assert all(codes), "none ends well without the other"
            assert {codes[rank] for rank in who} == {-signal.SIGKILL}
    assert killed
    codes, lines = run(tmp_path)
    assert codes == [0, 0]
    assert [rows[-1] for rows in lines] == expected
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [f"step-{n}" for n in range(STEPS - 2, STEPS + 1)], "and nothing is left over"


def test_a_rank_that_is_told_to_stop_stops_all_after_the_same_step(
    run: Run, expected: list[Any], tmp_path: Path
) -> None:
    codes, _ = run(tmp_path, signals=[[str(tmp_path / "step-1"), 0.0, 1, int(signal.SIGTERM)]])
    assert codes == [143, 143]
    assert 1 <= reached(tmp_path) < STEPS
    codes, lines = run(tmp_path)
    assert codes == [0, 0]
    assert [rows[-1] for rows in lines] == expected


def test_a_full_disk_is_said_on_all_ranks_and_training_goes_on(
    run: Run, expected: list[Any], tmp_path: Path
) -> None:
    codes, lines = run(tmp_path, "full")
    assert codes == [0, 0]
    assert [rows.pop() for rows in lines] == expected
    assert [row["said"] for row in lines[0]] == [row["said"] for row in lines[1]]
    assert len(lines[0]) == 8
    for row in lines[0]:
        assert row["left"] == ["step-1"], row
        start = f"CheckpointError: writing the checkpoint {tmp_path / 'step-2'} failed on rank "
        assert row["said"].startswith(f"{start}{row['full']}: "), row
    assert "File too large" in lines[0][0]["said"]


# --- leftovers, and the signal alone --------------------------------------------------------------


def test_leftovers_of_dead_saves_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    (tmp_path / "step-1.tmp-0123abcd").mkdir()
    (tmp_path / "step-1.tmp-0123abcd" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "notes.tmp-mine").mkdir()
    living = AtomicFolder(tmp_path / "step-7")
    (living.path / "__0_0.distcp").write_bytes(b"half")
    on_ranks(TWO, lambda trainer: trainer.save(tmp_path / "step-2"))
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"step-2", "notes.tmp-mine", living.path.name}
    living.discard()
    assert {p.name for p in tmp_path.iterdir()} == {"step-2", "notes.tmp-mine"}


def test_a_folder_gets_its_name_in_one_move(tmp_path: Path) -> None:
    """It is the folder that was written, not a new one that is filled: also where one was."""
    for text in ("old", "new"):
        draft = AtomicFolder(tmp_path / "last")
        (draft.path / "state.json").write_text(text)
        written = draft.path.stat().st_ino
        draft.publish()
        assert (tmp_path / "last").stat().st_ino == written
        assert [p.name for p in tmp_path.iterdir()] == ["last"]
        assert (tmp_path / "last" / "state.json").read_text() == text


def test_a_save_that_fails_leaves_the_one_it_would_replace(tmp_path: Path) -> None:
    def save(trainer: Trainer) -> None:
        trainer.save(tmp_path / "last", extra="good")
        before = fingerprint(tmp_path)
        with pytest.raises(GemsError):
            trainer.save(tmp_path / "last", extra=object())
        assert fingerprint(tmp_path) == before

    on_ranks(TWO, save)


def test_one_rank_hears_it_and_all_know() -> None:
    with Interrupt() as interrupt:
        assert signal.getsignal(signal.SIGTERM) == interrupt._note

        def told(trainer: Trainer) -> bool:
            trainer.interrupt = interrupt if trainer.rank == 1 else None
            return trainer.step(*data(1)[0]).interrupted

        assert on_ranks(TWO, told) == [False, False]
        signal.raise_signal(signal.SIGUSR1)
        assert interrupt.wanted
        assert interrupt.code == 128 + signal.SIGUSR1
        assert on_ranks(TWO, told) == [True, True]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert Interrupt().code == 143


def test_the_second_ctrl_c_stops_at_once() -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_signals_are_for_the_main_thread() -> None:
    with pytest.raises(GemsError, match="make the Interrupt there"):
        on_ranks(TWO, lambda trainer: Interrupt().__enter__())
