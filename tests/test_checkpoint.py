"""Checkpoints: what is saved, going on bit for bit, going on under another plan."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import lr_scheduler

from gems.errors import CheckpointError, GemsError
from gems.plans.plan import Plan
from gems.torch.checkpoint.manifest import latest, read
from gems.torch.checkpoint.weight_files import read_weights
from gems.torch.trainer import Trainer
from tests.exact import same_state
from tests.saved import (
    COPIES,
    FOUR,
    GEMS,
    HALVES,
    ONE,
    TILES,
    TWO,
    Net,
    adamw,
    fingerprint,
    network,
    on_ranks,
    saved,
    trained,
)

Tensor = torch.Tensor


def cosine(optimizer: Any) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    down = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    return lr_scheduler.SequentialLR(optimizer, [warm, down], milestones=[2])


def milestones(optimizer: Any) -> Any:
    return lr_scheduler.MultiStepLR(optimizer, [1, 4], 0.1)


def cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)  # also moves the momentum


def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=1.0)


# --- the same plan: bit for bit -------------------------------------------------------------------

RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum, both directions": (GEMS, {}),
    "momentum, one-cycle, copies": (COPIES, {"scheduler": cycle}),
    "adamw, warm-up and cosine": (FOUR, {"optimizer": adamw, "scheduler": cosine}),
    "adamw, milestones, clipped": (
        TWO,
        {"optimizer": adamw, "scheduler": milestones, "clip": 0.1},
    ),
    "plateau, alone": (ONE, {"scheduler": plateau}),
    "inside a window, copies": (COPIES, {"accumulate": 2}),
    "inside a window, tiles": (HALVES, {"accumulate": 4, "optimizer": adamw}),
    "inside a window, both directions": (GEMS, {"accumulate": 2, "scheduler": milestones}),
    "fp16": (TWO, {"precision": "fp16", "dtype": torch.float32}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_interrupted_is_the_run_that_was_not(name: str, tmp_path: Path) -> None:
    """Another process would have other weights, another seed and other generators: so has ours."""
    plan, options = RUNS[name]

    def whole(trainer: Trainer) -> Any:
        before = trained(trainer, 0, 3)
        trainer.save(tmp_path / "step-3")
        return before + trained(trainer, 3, 5), trainer.state_dict(), rates(trainer)

    def resumed(trainer: Trainer) -> Any:
        if trainer.session.scale is not None:
            trainer.session.scale.value = 4.0
        trainer.load(tmp_path / "step-3")
        assert trainer.steps == 3
        return trained(trainer, 3, 5), trainer.state_dict(), rates(trainer)

    def rates(trainer: Trainer) -> Any:
        assert trainer.optimizer is not None
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer(trainer)]
        return groups, trainer.session.scale and trainer.session.scale.value

    expected = on_ranks(plan, whole, **options)
    found = on_ranks(plan, resumed, weights=7, seed=5, **options)
    for (losses, state, end), (mine, my_state, my_end) in zip(expected, found, strict=True):
        assert mine == losses[3:]
        assert my_end == end
        same_state(my_state, state, 0.0)
    assert len({tuple(losses) for losses, *_ in expected}) == 1


def optimizer(trainer: Trainer) -> Any:
    assert trainer.optimizer is not None
    return trainer.optimizer.param_groups


@pytest.mark.parametrize("accumulate", [1, 2])
def test_saving_changes_nothing(accumulate: int, tmp_path: Path) -> None:
    def quiet(trainer: Trainer) -> Any:
        return trained(trainer, 0, 5), trainer.state_dict()

    def saving(trainer: Trainer) -> Any:
        losses = []
        for i in range(5):
            losses += trained(trainer, i, i + 1)
            trainer.save(tmp_path / f"step-{i}", keep=2)
        return losses, trainer.state_dict()

    losses, state = on_ranks(GEMS, quiet, accumulate=accumulate)[0]
    for mine, my_state in on_ranks(GEMS, saving, accumulate=accumulate):
        assert mine == losses
        same_state(my_state, state, 0.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-3", "step-4"]


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> Any:
        return torch.rand(3).tolist(), random.gauss(0, 1), numpy.random.normal(size=3).tolist()

    def save(trainer: Trainer) -> Any:
        draw()  # an odd number of Gaussians: the second of a pair is kept by the generator
        trainer.save(tmp_path / "a")
        return draw()

    (expected,) = on_ranks(ONE, save)
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    (found,) = on_ranks(ONE, lambda trainer: (trainer.load(tmp_path / "a"), draw())[1])
    assert found == expected


# --- another plan ---------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_four_stages_become_tiles_become_one_device(accumulate: int, tmp_path: Path) -> None:
    """And both directions, and copies. With accumulate=2, every save is inside a window."""
    options: dict[str, Any] = {"optimizer": adamw, "scheduler": cosine, "accumulate": accumulate}
    losses, state = on_ranks(ONE, lambda t: (trained(t, 0, 5), t.state_dict()), **options)[0]
    seen: list[float] = []
    for i, plan in enumerate((FOUR, TILES, ONE, GEMS, COPIES)):

        def work(trainer: Trainer, i: int = i) -> Any:
            if i:
                assert trainer.load(tmp_path / f"step-{i}") == {"next": i}
            loss = trained(trainer, i, i + 1)
            trainer.save(tmp_path / f"step-{i + 1}", extra={"next": i + 1})
            return loss, trainer.state_dict()

        loss, found = on_ranks(plan, work, weights=i, **options)[0]
        seen += loss
    assert seen == pytest.approx(losses, rel=1e-10, abs=1e-10)
    same_state(found, state)


def test_a_trainer_that_only_predicts_takes_the_weights(tmp_path: Path) -> None:
    saved(tmp_path / "a", GEMS, optimizer=adamw)
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64)

    def predict(trainer: Trainer) -> Tensor:
        assert trainer.load(tmp_path / "a") == {"at": 2}
        return trainer.predict(x)

    plain = network(9)
    plain.load_state_dict(read_weights(tmp_path / "a"))
    plain.scale.copy_(network().scale)
    expected = plain.eval()(x)
    for found in on_ranks(TILES, predict, weights=9, optimizer=None):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-10)


# --- what is written ------------------------------------------------------------------------------


def test_every_tensor_is_written_once_and_holders_share_the_work(tmp_path: Path) -> None:
    """Two copies of two stages: four ranks write, each about a quarter."""
    saved(tmp_path / "a", COPIES)
    manifest = read(tmp_path / "a")
    places = list(manifest.tensors.values())
    assert len({(p.file, p.offset) for p in places}) == len(places)
    by_file: dict[str, int] = {}
    for place in places:
        by_file[place.file] = by_file.get(place.file, 0) + place.bytes
    assert by_file == {n: f.bytes for n, f in manifest.files.items() if n.endswith(".distcp")}
    assert set(by_file) == {f"__{rank}_0.distcp" for rank in range(4)}
    weights = set(network().state_dict())
    assert set(manifest.section("model")) == weights
    assert set(manifest.section("buffers")) == {"scale"}
    trainable = {name for name, _ in network().named_parameters()}
    assert set(manifest.section("optimizer")) == {f"{n}/momentum_buffer" for n in trainable}
    assert manifest.step == 2
    assert manifest.plan["data"] == 2


class Tied(nn.Module):
    """One weight under two names, used by the first and the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.two.weight = self.one.weight
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x).relu()).relu().mean((2, 3)))


def test_a_tied_weight_is_written_once_and_has_all_its_names(tmp_path: Path) -> None:
    saved(tmp_path / "a", TWO, model=Tied)
    model = read(tmp_path / "a").section("model")
    assert model["one.weight"] == model["two.weight"]
    state = read_weights(tmp_path / "a")
    network(5, Tied).load_state_dict(state)

    def go_on(trainer: Trainer) -> Any:
        trainer.load(tmp_path / "a")
        assert trainer.model.get_parameter("one.weight") is trainer.model.get_parameter(
            "two.weight"
        )
        return trained(trainer, 2, 4)

    expected = on_ranks(TWO, lambda t: trained(t, 0, 4)[2:], model=Tied)[0]
    assert on_ranks(TWO, go_on, model=Tied, weights=3)[0] == expected
    assert on_ranks(FOUR, go_on, model=Tied, weights=3)[0] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", [Net, Tied])
def test_the_tools_of_dcp_open_it(kind: type[nn.Module], tmp_path: Path) -> None:
    saved(tmp_path / "a", GEMS, model=kind)
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    whole = torch.load(tmp_path / "a.pt", weights_only=True)
    expected = read_weights(tmp_path / "a")
    assert whole["model"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(whole["model"][name], tensor)
    network(3, kind).load_state_dict(whole["model"])
    assert torch.equal(read_weights(tmp_path / "a.pt")["head.weight"], expected["head.weight"])
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(some := {"model": network(4, kind).state_dict()}, checkpoint_id=tmp_path / "a")
    assert torch.equal(some["model"]["head.weight"], expected["head.weight"])


class Counter(nn.Module):
    """State that is no tensor, and a tensor that is no buffer; it has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Any = ("new", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state


class Scaled(nn.Linear):
    """The same beside weights."""

    def get_extra_state(self) -> Any:
        return getattr(self, "told", {})

    def set_extra_state(self, state: Any) -> None:
        self.told = state


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.counter, self.head = nn.Conv2d(3, 4, 3), Counter(), Scaled(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.counter(self.conv(x)).mean((2, 3)))


def test_the_extra_state_of_modules_is_that_of_the_rank_that_runs_them(tmp_path: Path) -> None:
    plan = Plan(stages=[["conv"], ["counter", "head"]], micro_batches=4)

    def save(trainer: Trainer) -> Any:
        trainer.model.counter.told = (f"on rank {trainer.rank}", torch.full((2,), trainer.rank))
        trainer.model.head.told = {"rank": trainer.rank}
        trainer.save(tmp_path / "a")
        trainer.export(tmp_path / "a.pt")
        return trainer.state_dict()

    def load(trainer: Trainer) -> Any:
        trainer.load(tmp_path / "a")
        first = trainer.model.state_dict()
        trainer.model.counter.told = trainer.model.head.told = None
        trainer.load_state_dict(read_weights(tmp_path / "a.pt"))
        assert trainer.model.head.told == {"rank": 1}
        return first

    states = [*on_ranks(plan, save, model=Counting), *on_ranks(FOUR, load, model=Counting)]
    for state in (*states, read_weights(tmp_path / "a")):
        assert state["counter._extra_state"][0] == "on rank 1"
        assert state["counter._extra_state"][1].tolist() == [1, 1]
        assert state["head._extra_state"] == {"rank": 1}


class Fine(torch.optim.Optimizer):
    """Sums up in double what it steps by: its state is finer than its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                whole = self.state[p].setdefault("whole", p.double())
                p.copy_(whole.sub_(p.grad.double(), alpha=1e-6))


def test_state_that_is_finer_than_its_parameter_stays_so(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": Fine, "dtype": torch.float32}

    def states(trainer: Trainer) -> list[Tensor]:
        assert trainer.optimizer is not None
        return [trainer.optimizer.state[p]["whole"].clone() for p in trainer.parameters()]

    def save(trainer: Trainer) -> Any:
        trained(trainer, 0, 2)
        trainer.save(tmp_path / "a")
        return states(trainer)

    def load(trainer: Trainer) -> Any:
        trainer.load(tmp_path / "a")
        return states(trainer)

    expected = [x for mine in on_ranks(TWO, save, **options) for x in mine]
    found = [x for mine in on_ranks(TWO, load, **options) for x in mine]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float64
        assert torch.equal(mine, theirs)


EXTRA = {
    "epoch": 3, "at": (1, 2.5, None), "name": "ü", "seen": {1, 2}, "by number": {3: "x", 4: [True]},
    "$tensor": "mine", "nan": float("inf"), "order": torch.arange(5), "array": numpy.eye(2),
    "one": numpy.float32(0.5), "bits": 2**200, "half": torch.ones(2, dtype=torch.bfloat16),
}  # fmt: skip


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    def save(trainer: Trainer) -> None:
        trainer.save(tmp_path / "a", extra=EXTRA if trainer.rank == 0 else {"other": 1})

    on_ranks(TWO, save)
    for found in on_ranks(ONE, lambda t: t.load(tmp_path / "a")):
        assert found.keys() == EXTRA.keys()
        assert torch.equal(found.pop("order"), torch.arange(5))
        assert torch.equal(found.pop("half"), EXTRA["half"])
        assert numpy.array_equal(found.pop("array"), numpy.eye(2))
        assert found == {k: EXTRA[k] for k in found}
        assert type(found["at"]) is tuple


def test_what_would_need_code_to_be_read_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def save(trainer: Trainer) -> str:
        with pytest.raises(CheckpointError) as rejected:
            trainer.save(tmp_path / "a", extra={"loader": [Net]})
        trained(trainer, 0, 1)  # and training goes on
        return str(rejected.value)

    for said in on_ranks(TWO, save):
        assert "shared.extra/loader/0 is a builtins.type, which a checkpoint cannot hold" in said
    assert not list(tmp_path.iterdir())


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    thick = [p for p in parameters if p.ndim > 1]
    thin = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": thick, "weight_decay": 0.1}, {"params": thin, "lr": 0.001}]
    return torch.optim.AdamW(groups, 0.01)


def test_groups_of_parameters_keep_their_options(tmp_path: Path) -> None:
    def whole(trainer: Trainer) -> Any:
        trained(trainer, 0, 1)
        optimizer(trainer)[1]["lr"] = 0.5  # by hand, on all ranks
        trainer.save(tmp_path / "a")
        return trained(trainer, 1, 3)

    def resumed(trainer: Trainer) -> Any:
        trainer.load(tmp_path / "a")
        assert [g["lr"] for g in optimizer(trainer)] == [0.01, 0.5]
        return trained(trainer, 1, 3)

    expected = on_ranks(TWO, whole, optimizer=two_groups)[0]
    assert on_ranks(TWO, resumed, optimizer=two_groups, weights=1)[0] == expected
    assert on_ranks(HALVES, resumed, optimizer=two_groups, weights=1)[0] == pytest.approx(
        expected, rel=1e-10
    )

    def differing(trainer: Trainer) -> None:
        optimizer(trainer)[0]["lr"] = 0.1 * trainer.rank
        trainer.save(tmp_path / "b")

    with pytest.raises(CheckpointError, match="rank 1 has other groups or options than rank 0's"):
        on_ranks(TWO, differing, optimizer=two_groups)


# --- names, numbers and leftovers -----------------------------------------------------------------


def test_latest_is_the_furthest_complete_one(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None

    def save(trainer: Trainer) -> None:
        for step, name in enumerate(("best", "step-9", "step-10", "step-11"), 1):
            trained(trainer, step, step + 1)
            trainer.save(tmp_path / name)

    on_ranks(ONE, save)
    assert latest(tmp_path) == tmp_path / "step-11"
    (tmp_path / "step-11" / "state.json").unlink()
    assert latest(tmp_path) == tmp_path / "step-10"
    (tmp_path / "step-10" / "manifest.json").write_text("{}")
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-13.tmp-01234567").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert latest(tmp_path) == tmp_path / "step-9"


def test_keep_deletes_the_oldest_numbered_ones(tmp_path: Path) -> None:
    def save(trainer: Trainer) -> None:
        trainer.save(tmp_path / "best")
        trainer.save(tmp_path / "other-1")
        for number in (8, 9, 10, 11):
            trainer.save(tmp_path / f"step-{number}", keep=2)
        with pytest.raises(CheckpointError, match="'last' has no number"):
            trainer.save(tmp_path / "last", keep=2)
        with pytest.raises(CheckpointError, match="keep is -1"):
            trainer.save(tmp_path / "step-12", keep=-1)

    on_ranks(TWO, save)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "other-1", "step-10", "step-11"]


def test_a_name_can_be_used_again_but_not_that_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")

    def save(trainer: Trainer) -> None:
        for step in range(2):
            trained(trainer, step, step + 1)
            trainer.save(tmp_path / "last", extra=step)
        with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
            trainer.save(tmp_path / "mine")

    on_ranks(TWO, save)
    assert on_ranks(ONE, lambda t: (t.load(tmp_path / "last"), t.steps)) == [(1, 2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "mine"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"


def test_ranks_must_save_to_the_same_place(tmp_path: Path) -> None:
    def save(trainer: Trainer) -> str:
        with pytest.raises(CheckpointError, match="ranks were given different checkpoints") as said:
            trainer.save(tmp_path / f"step-{trainer.rank}")
        return str(said.value)

    assert len(set(on_ranks(TWO, save))) == 1
    assert not list(tmp_path.iterdir())


def test_a_closed_trainer_says_so(tmp_path: Path) -> None:
    trainer = Trainer(network(), sample=torch.empty(2, 3, 8, 8, dtype=torch.float64), plan=ONE)
    trainer.save(tmp_path / "a")
    trainer.close()
    trainer.close()
    for call in (trainer.save, trainer.load, trainer.export):
        with pytest.raises(GemsError, match="was closed"):
            call(tmp_path / "a")


# --- what does not fit ----------------------------------------------------------------------------


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body[0] = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.head, self.tail = nn.Linear(6, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(super().forward(x))


UNFIT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another model": (
        {"model": Wider},
        [
            "head.weight is 5×6 of float64 in the checkpoint, 7×6 of float64 in the model",
            "missing: tail.weight, 5×7 of float64",
            "unexpected: body.0.bias, 6 of float64",
        ],
    ),
    "another type": (
        {"dtype": torch.float32},
        ["stem.0.bias is 4 of float64 in the checkpoint, 4 of float32 in the model"],
    ),
    "another optimizer": (
        {"optimizer": adamw},
        ["the optimizer is SGD in the checkpoint, AdamW in the trainer"],
    ),
    "more groups": (
        {"optimizer": lambda p: torch.optim.SGD([{"params": p}, {"params": []}], 0.1)},
        ["the optimizer has 1 groups in the checkpoint, 2 here"],
    ),
    "a weight that was not trained": (
        {"from": {"optimizer": lambda p: torch.optim.SGD(p[1:], 0.1)}},
        ["stem.0.weight is in group 0 of the optimizer here, in group none in the checkpoint"],
    ),
    "a scheduler": (
        {"scheduler": cosine},
        ["the scheduler is absent in the checkpoint, SequentialLR in the trainer"],
    ),
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved(path := tmp_path_factory.mktemp("two") / "step-2")
    return path


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_listed_on_all_ranks_and_changes_nothing(
    name: str, two_steps: Path, tmp_path: Path
) -> None:
    options, expected = UNFIT[name]
    path, options = two_steps, dict(options)
    if "from" in options:
        saved(path := tmp_path / "a", **options.pop("from"))

    def load(trainer: Trainer) -> str:
        before = trainer.state_dict()
        with pytest.raises(CheckpointError, match="does not fit the trainer") as rejected:
            trainer.load(path)
        same_state(trainer.state_dict(), before, 0.0)
        return str(rejected.value)

    said = on_ranks(TWO, load, **options)
    assert said[0] == said[1]
    for line in expected:
        assert line in said[0]
    assert "strict=False" in said[0]

    def loosely(trainer: Trainer) -> Any:
        assert trainer.load(path, strict=False) == {"at": 2}
        trained(trainer, 0, 2)
        return trainer.steps

    goes_on = name in ("another model", "another type")
    assert on_ranks(TWO, loosely, **options) == [4 if goes_on else 2] * 2


def test_a_loose_load_takes_what_fits(two_steps: Path) -> None:
    there = read_weights(two_steps)

    def load(trainer: Trainer) -> Any:
        trainer.load(two_steps, strict=False)
        return trainer.state_dict()

    for state in on_ranks(TWO, load, weights=4, model=Wider):
        assert torch.equal(state["stem.0.weight"], there["stem.0.weight"])
        assert torch.equal(state["head.weight"], network(4, Wider).state_dict()["head.weight"])
    for state in on_ranks(TWO, load, weights=4, dtype=torch.float32):
        assert torch.equal(state["head.weight"], there["head.weight"].float())


# --- plain weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind", [Net, Tied])
def test_weights_are_exported_and_read_as_the_plain_models(
    ending: str, kind: type[nn.Module], tmp_path: Path
) -> None:
    path = tmp_path / f"weights{ending}"

    def export(trainer: Trainer) -> Any:
        trained(trainer, 0, 1)
        assert trainer.export(path) == path
        return trainer.state_dict()

    expected = on_ranks(GEMS, export, model=kind)[0]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    plain = network(1, kind)
    plain.load_state_dict(read_weights(path))
    same_state(plain.state_dict(), expected, 0.0)

    def take(trainer: Trainer) -> Any:
        trainer.load_state_dict(read_weights(path))
        return trainer.state_dict()

    for found in on_ranks(TWO, take, model=kind, weights=2):
        same_state(found, expected, 0.0)


def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    torch.save(network(), tmp_path / "b.pt")
    (tmp_path / "c.safetensors").write_bytes(b"not this")
    torch.save({"state_dict": network().state_dict(), "epoch": 3}, tmp_path / "d.pth")
    for name, why in (
        ("a.pt", "holds a dict, not names with tensors"),
        ("b.pt", "cannot be read as weights"),
        ("c.safetensors", "cannot be read as weights"),
        ("e.pt", "there is no file"),
        ("f.onnx", "has the ending '.onnx'"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(why)):
            read_weights(tmp_path / name)
    network(1).load_state_dict(read_weights(tmp_path / "d.pth"))
    with pytest.raises(CheckpointError, match=r"has the ending '\.zip'"):
        on_ranks(TWO, lambda t: t.export(tmp_path / "a.zip"))


def test_a_manifest_is_readable(two_steps: Path) -> None:
    plain = json.loads((two_steps / "manifest.json").read_text())
    assert plain["what"] == "GEMS checkpoint"
    assert plain["tensors"]["model.head.weight"]["shape"] == [5, 6]
    assert set(plain["files"]) == set(fingerprint(two_steps)) - {"manifest.json"}
