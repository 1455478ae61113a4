"""`gems verify`: what it compares, and that each row of its table fails for its kind of mistake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import gems
from gems.cli.main import main
from gems.engine.messages import Messages
from gems.errors import PlanError
from gems.files import to_json
from gems.plans.plan import Plan
from gems.torch import doctor, parity
from gems.torch.runtime.adapter import TorchAdapter
from gems.torch.tensors.rng import Draws
from gems.torch.trainer import Trainer
from gems.torch.verification import Verification
from gems.transport.protocol import Done
from gems.transport.threads import Local
from tests.exact import drawing
from tests.rank_server import RankServer, places

SMALL = ["--model", "resnet-v2", "--num-layers", "11", "--num-filters", "4", "--image-size", "16"]
SAMPLE = torch.empty(2, 3, 8, 16)
PIPELINE = Plan(stages=2, micro_batches=2, schedule="1f1b")
ROWS = [
    "loss",
    "gradients",
    "parameters",
    "buffers",
    "replicas",
    "dropout",
    "peak memory",
    "messages",
]


def network() -> nn.Module:
    """With dropout by the cell and by the channel."""
    with drawing(0):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Dropout(0.5), nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1), nn.Dropout2d(0.5), nn.Conv2d(6, 4, 3),
        )  # fmt: skip


def verified(plan: Plan, model: nn.Module | None = None, **options: Any) -> Verification:
    return gems.verify(model or network(), SAMPLE, plan, costs="estimate", **options)


def failed(found: Verification) -> set[str]:
    assert [row.what for row in found.rows] == ROWS
    return {row.what for row in found.rows if not row.passed}


# --- what is equal --------------------------------------------------------------------------------

EQUAL = {
    "stages": PIPELINE,
    "gems": Plan(stages=2, schedule="gems", replications=1),
    "zero": Plan(data=2, zero=3),
    "tiles": Plan(spatial=[(1, 2)], micro_batches=2),
    "recomputed": replace(PIPELINE, recompute="always"),
    "offloaded": Plan(stages=2, ranks=1, schedule="l2l", offload=("weights",)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_ranks_equal_one_rank_where_numbers_are_drawn(name: str) -> None:
    found = verified(EQUAL[name])
    assert found.passed, str(found)
    assert found.oracle == parity.ONE_RANK and "0 of" in str(found)


def test_without_random_layers_the_oracle_is_the_plain_loop() -> None:
    found = verified(PIPELINE, doctor.network(1))
    assert found.passed and found.oracle == parity.PLAIN
    assert "nothing is drawn" in str(found)


def test_a_loss_and_targets_of_ones_own_and_inputs_of_any_form() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.unused = nn.Embedding(5, 4), nn.Linear(2, 2)
            self.mix = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return self.mix(x + self.words(index))

    found = gems.verify(
        Two(),
        (torch.empty(2, 4), torch.tensor([1, 4])),
        PIPELINE,
        loss=nn.functional.cross_entropy,
        targets=torch.tensor([0, 2]),
        steps=3,
    )
    assert found.passed and found.steps == 3, str(found)


def test_two_plans_are_compared_with_each_other() -> None:
    found = verified(PIPELINE, against=Plan(data=2))
    assert found.passed and found.oracle == "the other plan on 2 ranks", str(found)
    with pytest.raises(PlanError, match="2 micro-batches per step and the other 1"):
        verified(PIPELINE, against=Plan())


def test_a_plan_that_does_not_train_as_one_device_does_is_rejected() -> None:
    for plans in (
        (replace(PIPELINE, schedule="2bw"), None),
        (PIPELINE, Plan(stages=2, micro_batches=2, schedule="2bw")),
    ):
        with pytest.raises(PlanError, match="2bw"):
            verified(plans[0], against=plans[1])


# --- mistakes, one of each kind -------------------------------------------------------------------


def on_rank(rank: int) -> bool:
    """Whether this thread is that rank of two."""
    return threading.current_thread().name == f"rank {rank} of 2"


@contextmanager
def changed(kind: type, method: str, wrap: Callable[..., Any]) -> Iterator[None]:
    """`wrap` gets the method, then its arguments."""
    plain = getattr(kind, method)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return wrap(plain, self, *args, **options)

    with mock.patch.object(kind, method, call):
        yield


def wrong_tensor(name: str) -> Callable[..., Any]:
    def step(plain: Any, trainer: Trainer, *batch: Any) -> Any:
        found, weights = plain(trainer, *batch), trainer.session.weights
        if on_rank(1):
            weights.put(name, weights.copy(name) + 1e-6)
        return found

    return step


def wrong_loss(plain: Any, trainer: Trainer, *batch: Any) -> Any:
    found = plain(trainer, *batch)
    return replace(found, loss=found.loss + 1e-6 * (trainer.plan.world == 2))


def lost_sum(plain: Any, transport: Local, buffer: torch.Tensor, ranks: Any) -> Any:
    """Of gradients; what ranks compare before a step is shorter."""
    return Done() if buffer.numel() > 100 else plain(transport, buffer, ranks)


def shifted_key(plain: Any, draws: Draws, step: int, micro_batch: int) -> None:
    plain(draws, step, micro_batch + (7 if on_rank(1) else 0))


def one_byte_more(plain: Any, adapter: TorchAdapter, *unit: int) -> int:
    return plain(adapter, *unit) + 1


def unseen_message(plain: Any, messages: Messages, action: Any) -> None:
    plain(messages, action)
    messages.sent = {rank: size - 1 for rank, size in messages.sent.items()}


DATA = Plan(data=2)
MISTAKES: dict[str, tuple[Plan, type, str, Any, set[str]]] = {
    "a wrong weight on one rank": (
        DATA, Trainer, "step", wrong_tensor("4.weight"), {"replicas", "parameters", "gradients"}
    ),
    "a wrong weight of the last stage": (
        PIPELINE, Trainer, "step", wrong_tensor("6.bias"), {"parameters", "gradients"}
    ),
    "a wrong statistic on one rank": (
        DATA, Trainer, "step", wrong_tensor("1.running_mean"), {"replicas"}
    ),
    "a wrong statistic of the last stage": (
        replace(PIPELINE, balance=(1, 6)), Trainer, "step", wrong_tensor("1.running_mean"),
        {"buffers"},
    ),
    "a wrong loss": (DATA, Trainer, "step", wrong_loss, {"loss"}),
    "a lost all-reduce": (
        DATA, Local, "all_reduce", lost_sum, {"gradients", "parameters", "replicas"}
    ),
    "a shifted dropout key": (DATA, Draws, "at", shifted_key, {"dropout", "gradients"}),
    "a miscounted byte": (
        PIPELINE, TorchAdapter, "activation_bytes", one_byte_more, {"peak memory"}
    ),
    "a miscounted message": (PIPELINE, Messages, "send", unseen_message, {"messages"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fails_its_rows(name: str) -> None:
    plan, kind, method, wrap, rows = MISTAKES[name]
    with changed(kind, method, wrap):
        found = verified(plan)
    assert rows <= failed(found), str(found)
    assert not found.passed and "DIFFERENT" in str(found) and found.worst


@pytest.mark.parametrize("what", ["rate", "momentum"])
def test_a_wrong_update_is_found(what: str) -> None:
    """As large as those that the published code made: gradients of tiles by 0.249."""
    wrong = {"rate": (0.0025, 0.9), "momentum": (0.01, 0.0)}[what]
    right = parity._Trial._plain

    def plain(*args: Any) -> Any:
        with mock.patch.object(
            parity, "_sgd", lambda p: torch.optim.SGD(p, wrong[0], momentum=wrong[1])
        ):
            return right(*args)

    with mock.patch.object(parity._Trial, "_plain", plain):
        assert verified(DATA, doctor.network(1)).error > 0.1


# --- the command ----------------------------------------------------------------------------------

NETWORKS = """
from gems.transport.protocol import Done
from gems.transport.torch_distributed import TorchDist
from torch import nn

def build(lose=False):
    plain = TorchDist.all_reduce
    if lose:  # sums of gradients; what ranks compare before a step is shorter
        TorchDist.all_reduce = lambda self, x, ranks: (
            Done() if x.numel() > 100 else plain(self, x, ranks)
        )
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Dropout(0.5))
"""
RUN = "import sys; from gems.cli.main import main; sys.exit(main(sys.argv[1:]))"


def by_torchrun(server: RankServer, folder: Path, *arguments: object) -> tuple[int | None, str]:
    """Exit code and table of rank 0, over two processes that a launcher has started."""
    (folder / "run.py").write_text(RUN)
    ends = server.run([folder / "run.py", "verify", *arguments], places(2), folder, limit=100)
    told = [(folder / f"{rank}.out").read_text() for rank in range(2)]
    assert told[1] == "" and ends[1][0] == 0, (folder / "1.err").read_text()
    return ends[0][0], told[0]


@pytest.mark.parametrize("lose", [True, False])
def test_a_file_of_ones_own_over_processes(
    lose: bool, tmp_path: Path, rank_server: RankServer
) -> None:
    file = tmp_path / "networks.py"
    file.write_text(NETWORKS)
    own = ["--model", f"{file}:build", "--model-option", f"lose={lose}", "--image-size", "8"]
    code, table = by_torchrun(rank_server, tmp_path, *own, "--data", 2)
    assert code == lose, table
    assert ("DIFFERENT" in table) == lose and "steps on 2 ranks and by one rank" in table
    assert ("NO" in table.splitlines()[3]) == lose, table


def test_two_plans_over_the_ranks_of_a_launcher(tmp_path: Path, rank_server: RankServer) -> None:
    plans = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, plan in zip(plans, (PIPELINE, Plan(micro_batches=2)), strict=True):
        path.write_text(to_json(plan))
    two = ["--plan", plans[0], "--against", plans[1]]
    code, table = by_torchrun(rank_server, tmp_path, *SMALL, *two)
    assert code == 0, table
    assert "equal: 2 steps on 2 ranks and by the other plan on 1 rank" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tolerance", "-1"], None),
        (["--steps", "0"], "steps is 0; at least one must be compared"),
        (["--against", "nowhere.json"], "nowhere.json"),
    ],
)
def test_verify_ends_with_1_where_it_does_not_hold(
    arguments: list[str], message: str | None, capsys: Any
) -> None:
    assert main(["verify", *SMALL, *arguments]) == 1
    seen = capsys.readouterr()
    assert (message in seen.err) if message else "DIFFERENT" in seen.out


def test_a_file_that_is_not_there_is_one_line(capsys: Any) -> None:
    assert main(["verify", "--model", "nowhere.py:build"]) == 1
    assert "there is no file nowhere.py; write package.module:function" in capsys.readouterr().err
