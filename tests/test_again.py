"""One trainer after another, and two at a time, over real processes started in every way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gems
from gems.errors import GemsError
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run as threads
from tests.test_launch import SCRIPTS, TORCHRUN, free_port, run
from tests.test_loud import Run
from tests.test_loud import run as ranks  # noqa: F401

AGAIN = str(SCRIPTS / "again.py")


def assert_all_alike(lines: list[dict[str, Any]]) -> None:
    assert [line["rank"] for line in lines] == [0, 1]
    for line in lines:
        assert len(line["losses"]) == 6
        assert line["losses"][0][1] < line["losses"][0][0]
        assert all(losses == lines[0]["losses"][0] for losses in line["losses"])
        assert "this trainer was closed" in line["gone"]
        assert "takes 3 ranks" in line["wrong"]


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_under_torchrun(whose: str) -> None:
    assert_all_alike(run([*TORCHRUN, "--master-port", str(free_port()), AGAIN, whose]))


def test_by_hand(ranks: Run, tmp_path: Path) -> None:  # noqa: F811
    """Ranks that know nothing but a port meet in a folder by its number, as mpirun's do."""
    ranks({}, "ours", world=2, script="again.py", well={0, 1})
    assert_all_alike([json.loads((tmp_path / f"{r}.out").read_text()) for r in range(2)])


def test_under_the_launcher_of_gems_train() -> None:
    start = f"""
import sys
from gems.cli.ranks import start
sys.exit(start([sys.executable, {AGAIN!r}, "ours"], 2))
"""
    assert_all_alike(run([sys.executable, "-c", start]))


# --- closed -------------------------------------------------------------------------------------


def small(**options: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        torch.empty(1, 3),
        gems.Plan(micro_batches=2),
        **options,
    )


BATCH = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])


def test_every_public_method_of_a_closed_trainer_raises(tmp_path: Path) -> None:
    """All that there are, found by their names."""
    arguments: dict[str, tuple[Any, ...]] = {
        "step": BATCH,
        "predict": BATCH[:1],
        "load_state_dict": ({},),
        **{name: (tmp_path / "x.pt",) for name in ("save", "load", "export")},
    }
    with small() as trainer:
        trainer.step(*BATCH)
        kind = type(trainer)
        methods = [n for n in dir(kind) if not n.startswith("_") and callable(getattr(kind, n))]
    assert {"step", "flush", "timeline", "forecast", "parameters", *arguments} <= set(methods)
    for name in set(methods) - {"close"}:
        with pytest.raises(GemsError, match=rf"{name}: this trainer was closed"):
            getattr(trainer, name)(*arguments.get(name, ()))
    trainer.close()  # may come again
    assert not list(tmp_path.iterdir())


def test_with_closes_also_when_something_is_raised() -> None:
    with pytest.raises(KeyError), small() as trainer:
        raise KeyError("my own")
    with pytest.raises(GemsError, match="was closed"):
        trainer.step(*BATCH)


def test_a_timeout_beside_a_transport_of_ones_own_is_rejected() -> None:
    def work(transport: Transport) -> None:
        with pytest.raises(GemsError, match="timeout is 5"):
            small(transport=transport, timeout=5)

    threads(1, work)


def test_a_rank_that_closes_ends_the_others_also_if_ranks_are_threads() -> None:
    plan = gems.Plan(stages=2, micro_batches=2)

    def work(transport: Transport) -> str:
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        trainer = Trainer(
            model, nn.functional.cross_entropy, None, torch.empty(1, 3), plan, transport=transport
        )
        if transport.rank == 1:
            trainer.close()
            return "closed"
        with pytest.raises(GemsError) as caught:
            trainer.predict(BATCH[0])
        return str(caught.value)

    said, _ = threads(2, work)
    assert "rank 1 has closed its trainer" in said
