"""When something is wrong, every rank says so within seconds and ends: over real processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rank_server import SCRIPTS, RankServer, places

LIMIT = 30.0  # seconds from the start to the last rank's end

ONE_WAY = {"stages": 2, "micro_batches": 4, "schedule": "1f1b"}
BOTH_WAYS = {"stages": 2, "replications": 2, "schedule": "gems"}
FOUR_ONE_WAY = ONE_WAY | {"stages": 4}
FOUR_BOTH_WAYS = BOTH_WAYS | {"stages": 4}
LOST = ("PeerError", "start again from a checkpoint")


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code, after how many seconds, and what it said."""

    code: int
    seconds: float
    said: str


Run = Callable[..., list[End]]


@pytest.fixture
def run(rank_server: RankServer, tmp_path: Path) -> Run:
    """Run broken.py with a plan and a fault; no rank may outlive the limit, or end well."""

    def run(
        plan: dict[str, Any],
        fault: str,
        at: int | str = "all",
        world: int = 0,
        script: str = "",
        well: set[int] | None = None,
        **more: str,
    ) -> list[End]:
        well = well or set()
        command = [SCRIPTS / (script or "broken.py"), json.dumps(plan), fault, at]
        ranks = [place | more for place in places(world or plan["stages"])]
        found = rank_server.run(command, ranks, tmp_path, LIMIT)
        said = [(tmp_path / f"{rank}.err").read_text() for rank in range(len(found))]
        late = [rank for rank, (code, _) in enumerate(found) if code is None]
        assert not late, f"ranks {late} still ran after {LIMIT} seconds, having said {said}"
        bad = [rank for rank, (code, _) in enumerate(found) if not code]
        assert set(bad) == well, f"exit codes {found}, having said {said}"
        return [End(*end, text) for end, text in zip(found, said, strict=True)]

    return run


def assert_said(ends: list[End], *parts: str) -> None:
    for rank, end in enumerate(ends):
        for part in parts:
            assert part in end.said, f"rank {rank} did not say {part!r} but:\n{end.said}"


# --- the same mistake on all ranks ------------------------------------------------------------


def test_a_plan_for_four_ranks_started_on_three(run: Run) -> None:
    ends = run(FOUR_ONE_WAY, "none", world=3)
    assert_said(ends, "PlanError", "takes 4 ranks", "3 were started", "start 4, or change the plan")


def test_a_stage_name_that_does_not_exist(run: Run) -> None:
    ends = run({"stages": [["stem"], ["bodi"]]}, "none", world=2)
    assert_said(ends, "PlanError", "no block of the model is called 'bodi'", "did you mean body")


def test_a_balance_that_does_not_sum(run: Run) -> None:
    ends = run({"stages": 2, "balance": [1, 2]}, "none")
    assert_said(ends, "PlanError", "balance 1,2 sums to 3, but the model has 7 layers")


def test_a_model_that_cannot_be_traced(run: Run) -> None:
    ends = run(ONE_WAY, "cannot be traced")
    assert_said(ends, "PlanError", "Untraceable runs as one block", "nn.Sequential")


def test_a_schedule_that_would_deadlock(run: Run) -> None:
    ends = run({"stages": 2}, "a bad schedule")
    assert_said(ends, "ScheduleError", "rank 1, step 0: 1B0 waits forever for 1F0")


def test_inputs_of_a_shape_that_the_model_does_not_take(run: Run) -> None:
    ends = run(ONE_WAY, "another shape")
    assert_said(ends, "ShapeError", "the model does not take inputs float64[2, 6, 8, 8]", "stem")


def test_a_loss_that_is_not_a_number(run: Run) -> None:
    ends = run(BOTH_WAYS, "nan")
    assert_said(ends, "LossError", "the loss is nan in step 1; no update was made", "learning rate")


# --- a mistake on one rank ----------------------------------------------------------------------


def test_ranks_that_were_given_different_batches(run: Run) -> None:
    ends = run(ONE_WAY, "another batch", 1)
    assert_said(ends, "ShapeError", "different batches", "Give every rank the same global batch")
    assert "of 8 samples" in ends[0].said
    assert "of 6 samples" in ends[1].said


def test_a_rank_that_has_another_model(run: Run) -> None:
    ends = run(ONE_WAY, "another model", 1)
    assert_said(ends, "PeerError", "All ranks must be given the same model, sample and plan")


def test_a_rank_whose_model_does_not_fit_the_plan(run: Run) -> None:
    """Story: the others went on to make groups, and waited half an hour for the one that failed.

    In a bidirectional plan of four stages two ranks share each, so that groups have to be made.
    """
    stages = [["stem"], ["body.0"], ["body.1"], ["body.2", "head"]]
    ends = run({"stages": stages, "schedule": "gems"}, "another model inside", 2, world=4)
    assert_said(ends, "no block of the model is called 'stem'; did you mean 0.stem")
    del ends[2]
    assert_said(ends, "PeerError: rank 2 failed: these stages do not fit the model")


def test_a_rank_whose_optimizer_cannot_be_made(run: Run) -> None:
    ends = run(ONE_WAY, "an optimizer that raises", 0)
    assert_said(ends[:1], "RuntimeError: no optimizer today")
    assert_said(ends[1:], "PeerError: rank 0 failed: no optimizer today")


def test_a_rank_whose_data_cannot_be_read(run: Run) -> None:
    ends = run(FOUR_ONE_WAY, "data raise", 1)
    assert_said([ends.pop(1)], "OSError: slide 7 cannot be read")
    assert_said(ends, *LOST, "rank 1 has ended: OSError: slide 7 cannot be read")


def test_a_rank_that_leaves(run: Run) -> None:
    ends = run(ONE_WAY, "leaves", 0)
    assert_said(ends[:1], "this rank has had enough")
    assert_said(ends[1:], *LOST, "rank 0 has ended")


def test_a_rank_that_runs_out_of_batches(run: Run) -> None:
    """Story: the others waited for it for half an hour."""
    ends = run(FOUR_ONE_WAY, "runs out", 2, well={2})
    assert_said([end for rank, end in enumerate(ends) if rank != 2], *LOST, "rank 2 has ended")


def test_a_rank_that_closes_its_trainer(run: Run) -> None:
    """Its process goes on for long; the others do not wait for that."""
    ends = run(FOUR_BOTH_WAYS, "closes", 1)
    late = ends.pop(1).seconds
    assert_said(ends, *LOST, "rank 1 has closed its trainer, and the others still need it")
    assert all(end.seconds < late - 5 for end in ends)


@pytest.mark.parametrize("plan", [ONE_WAY, FOUR_BOTH_WAYS], ids=["1f1b on 2", "gems on 4"])
def test_a_rank_whose_loss_raises(run: Run, plan: dict[str, Any]) -> None:
    ends = run(plan, "loss raises", plan["stages"] - 1)
    last = plan["stages"] - 1
    assert_said([ends.pop()], "KeyError: 'no such label'", f"rank {last}, step 1, at {last}F0")
    assert_said(ends, *LOST, f"rank {last} failed: KeyError: 'no such label'")


def test_a_rank_that_ends_with_a_sum_under_way(run: Run) -> None:
    """Story: a process that ends waits for its sums, which wait for the other rank, which waits
    for a message of the process that ends. Both hung until the timeout."""
    ends = run({}, "none", world=2, script="ending.py")
    assert_said(ends[:1], "KeyError: 'no such label'")
    assert_said(ends[1:], *LOST, "rank 0 failed: KeyError: 'no such label'")


def test_a_rank_that_catches_its_error_and_goes_on(run: Run) -> None:
    """The others do not wait for it to end, and it cannot take another step."""
    ends = run(ONE_WAY, "loss raises, and the script goes on", 1)
    assert_said(ends[:1], *LOST)
    assert_said(ends[1:], "GemsError", "has failed in the middle of a step", "no such label")
    assert ends[0].seconds < ends[1].seconds


@pytest.mark.parametrize(
    ("plan", "rank"),
    [(ONE_WAY, 1), (BOTH_WAYS, 0), (FOUR_ONE_WAY, 0), (FOUR_BOTH_WAYS, 3)],
    ids=["1f1b on 2", "gems on 2", "1f1b on 4", "gems on 4"],
)
def test_a_rank_killed_in_mid_step(run: Run, plan: dict[str, Any], rank: int) -> None:
    """Also where most ranks have no link to the dead one: its neighbours hang up on theirs."""
    ends = run(plan, "killed", rank)
    assert ends.pop(rank).code == -9
    assert_said(ends, *LOST, f"rank {rank} (process ", "was killed or has crashed")


# --- silence ------------------------------------------------------------------------------------


STORE = {"LOCAL_WORLD_SIZE": "1"}  # as if on several nodes: not in a folder, but at rank 0's store


@pytest.mark.parametrize(
    ("plan", "rank", "more"),
    [(ONE_WAY, 1, {}), (FOUR_BOTH_WAYS, 2, {}), (ONE_WAY, 1, STORE), (ONE_WAY, 0, STORE)],
    ids=["1f1b on 2", "gems on 4", "another node", "the node of the store"],
)
def test_a_rank_stopped_in_mid_step(
    run: Run, plan: dict[str, Any], rank: int, more: dict[str, str]
) -> None:
    """It hangs up on nobody, and all others wait for it; timeout is 3 seconds."""
    ends = run(plan, "stopped", rank, **more)
    assert ends.pop(rank).code == -9  # by the test, when all others had ended
    if more and rank == 0:
        assert_said(ends, "PeerError", "the store at 127.0.0.1", "does not answer")
    else:
        assert_said(ends, *LOST, f"rank {rank} (process ", "no sign of life for 3 seconds")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_stopped_before_the_others_meet_it(run: Run, rank: int) -> None:
    ends = run(FOUR_ONE_WAY, "stopped before", rank)
    assert ends.pop(rank).code == -9
    assert_said(ends, "PeerError", f"rank {rank}", "has not come within 3 seconds")


@pytest.mark.parametrize("more", [{}, STORE], ids=["folder", "store"])
def test_a_rank_that_is_slow_is_not_taken_for_dead(run: Run, more: dict[str, str]) -> None:
    """Both sleep for longer than the timeout, in Python: one between steps, one in its loss."""
    run(ONE_WAY, "slow", well={0, 1}, **more)
