"""What changes no numbers leaves what was frozen as it was: see tests/oracles."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.oracles import freeze
from tests.saved import GEMS, ONE, TWO, momentum, on_ranks, trained

plan_numbers = pytest.mark.parametrize("number", range(len(freeze.SEARCHES)))


def test_lowered_schedules_are_those_that_were_frozen() -> None:
    frozen = gzip.decompress((freeze.HERE / "schedules.txt.gz").read_bytes()).decode().split("# ")
    found = freeze.schedules().split("# ")
    differ = [a for a, b in zip(found, frozen, strict=True) if a != b]
    assert not differ, f"{len(differ)} of {len(found)}; the first now:\n# {differ[0]}"


def test_simulated_seconds_and_bytes_are_those_that_were_frozen() -> None:
    frozen = json.loads((freeze.HERE / "simulated.json").read_text())
    for number, (now, was) in enumerate(zip(freeze.simulated(), frozen, strict=True)):
        assert now[0] == pytest.approx(was[0], rel=1e-12), f"plan {number}: seconds"
        assert now[1:] == was[1:], f"plan {number}: bytes at the peaks, or over the links"


@plan_numbers
def test_the_planner_answers_as_it_did(number: int) -> None:
    frozen = json.loads((freeze.HERE / "plans.json").read_text())[number]
    assert freeze.searched(freeze.SEARCHES[number]) == frozen


@pytest.mark.parametrize("plan", [GEMS, TWO, ONE], ids=["gems", "two stages", "one rank"])
def test_a_checkpoint_of_2026_11_is_read_and_trained_on(plan: Any) -> None:
    """The format may grow; what was written by earlier versions stays readable."""

    def work(trainer: Any) -> list[float]:
        assert trainer.load(freeze.HERE / "checkpoint" / "step-2") == {"at": 2}
        return trained(trainer, 2, 4)

    expected = json.loads((freeze.HERE / "checkpoint" / "losses.json").read_text())
    for losses in on_ranks(plan, work, weights=1, optimizer=momentum):
        assert losses == pytest.approx(expected, rel=1e-10)
