"""What streamed stages hand each other in a store: the same numbers as in memory, box by box.

A case of the first test is a value and boxes of it; one of the second a network, its stages, the
patches of each, a store and ranks. Its number decides all of that. More of them, or one again:

    GEMS_VALUES=2000 .venv/bin/python -m pytest tests/test_values.py -q -k generated
"""

from __future__ import annotations

import copy
import gc
import os
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gems
from gems.cli.main import main
from gems.errors import GemsError, PlanError
from gems.files import from_json
from gems.geometry.box import Box, tiles
from gems.model.graph import Value
from gems.plans.plan import Plan
from gems.plans.streaming import STREAM_HALOS
from gems.predict.memory_trace import live
from gems.torch.offload.stored_value import StoredValue, ValueStore
from gems.torch.offload.stores import make_store
from gems.torch.runtime import stored_messages
from gems.torch.tensors.strides import row_major
from gems.torch.trainer import Trainer
from gems.transport.protocol import STORED, Transport
from gems.transport.threads import Local, run
from tests.exact import assert_equal, join, plainly, planned, same_state, trained
from tests.networks import build
from tests.test_spatial_generated import stack
from tests.test_stream import Picture, noise, residual
from tests.worlds import spawn

Tensor = torch.Tensor
CASES = int(os.environ.get("GEMS_VALUES", "24"))
CPU = torch.device("cpu")

# --- one value ------------------------------------------------------------------------------------


def a_value(r: Random, place: str) -> tuple[StoredValue, tuple[int, ...]]:
    dims = r.choice((1, 2, 2, 3))
    shape = (r.randint(1, 2), r.randint(1, 3), *(r.randint(1, 12) for _ in range(dims)))
    grid = tuple(r.randint(1, 4) for _ in range(dims))
    strides = row_major(shape)
    if dims == 2 and r.random() < 0.3:
        strides = torch.empty(shape).to(memory_format=torch.channels_last).stride()
    dtype = r.choice(("float32", "float64", "int64", "bool", "complex64", "bfloat16"))
    value = Value("x", shape, strides, dtype, True)
    store = ValueStore(make_store(place, CPU), CPU)
    return store.make(value, tuple(range(2, 2 + dims)), grid), grid


def some_box(r: Random, shape: tuple[int, ...]) -> Box:
    """All samples and channels of a part of the image."""
    pairs = [sorted((r.randint(0, n), r.randint(0, n))) for n in shape[2:]]
    return Box((0, 0, *(a for a, _ in pairs)), (*shape[:2], *(b for _, b in pairs)))


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("number", range(CASES), ids=lambda n: f"case_{n}_")
def test_generated_boxes_come_back_as_they_were_written_and_summed(number: int, place: str) -> None:
    r = Random(f"value {number}")
    stored, grid = a_value(r, place)
    expected = torch.zeros(stored.shape, dtype=stored.dtype)
    draw = torch.Generator().manual_seed(number)
    for box in tiles(stored.shape, (1, 1, *grid)) if r.random() < 0.5 else ():
        part = (torch.randn(box.shape, generator=draw) * 9).to(stored.dtype)
        stored.write(box, part)
        expected[box.slices()] = part
    for _ in range(8):
        box = some_box(r, stored.shape)
        part = (torch.randn(box.shape, generator=draw) * 9).to(stored.dtype)
        if r.random() < 0.4 and stored.dtype != torch.bool:
            stored.add(stored.begin(box), part)
            expected[box.slices()] += part
        elif r.random() < 0.7:
            stored.write(box, part)
            expected[box.slices()] = part
        seen = some_box(r, stored.shape)
        assert torch.equal(stored.begin(seen).finish(), expected[seen.slices()])
    found = stored.begin(None).finish()
    assert torch.equal(found, expected)
    assert stored.values.used == expected.nbytes
    values = stored.values
    stored.settle()
    del stored
    assert values.used == 0, "a value that nobody has gives its space back"


class Interrupted:
    """A store in which a garbage collection comes while a slot is made. What is written fails."""

    used = 0

    def slot(self, size: int) -> Interrupted:
        gc.collect()
        self.used += 1
        return self

    def write(self, tensor: Tensor, start: int) -> Interrupted:
        return self

    def wait(self) -> None:
        raise GemsError("the disk is full")

    def free(self) -> None:
        self.used -= 1


def test_a_value_that_the_garbage_collector_frees_anywhere_gives_its_space_back() -> None:
    """Story: its finaliser took the lock under which a slot is made, on the same thread."""
    values = ValueStore(Interrupted(), CPU)  # type: ignore[arg-type]
    value = Value("x", (1, 2, 4, 4), (32, 16, 4, 1), "float32", True)

    def dropped() -> None:
        x = values.make(value, (2, 3), (1, 1))
        x.write(Box.whole(x.shape), torch.zeros(x.shape))
        cycle: list[object] = [x]
        cycle.append(cycle)

    dropped()
    assert values.used == 1
    kept = values.make(value, (2, 3), (1, 1))
    assert values.used == 1, kept


# --- networks, trained ----------------------------------------------------------------------------


def a_network(r: Random) -> tuple[nn.Sequential, Tensor]:
    """Layers that may be streamed: norms are of each pixel, or frozen."""
    dims = r.choice((1, 2, 2, 2, 2, 3))
    sides = {1: (6, 20), 2: (5, 13), 3: (4, 7)}[dims]
    shape = (2, r.randint(2, 4), *(r.randint(*sides) for _ in range(dims)))
    first = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](shape[1], shape[1], 3, padding=1)
    model, _ = stack(
        r,
        shape,
        r.randint(3, 6),
    )
    assert isinstance(model, nn.Sequential)
    return nn.Sequential(first, *model).double(), torch.randn(shape, dtype=torch.float64)


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output * target.view(-1, *(1,) * (output.dim() - 1))).square().mean()


def a_plan(r: Random, model: nn.Module, dims: int) -> Plan:
    names = [name for name, _ in model.named_children()]
    count = r.randint(2, min(4, len(names)))
    cuts = (0, *sorted(r.sample(range(1, len(names)), count - 1)), len(names))
    stages = [names[a:b] for a, b in pairwise(cuts)]
    grids = [tuple(r.randint(1, 3) for _ in range(dims)) for _ in stages]
    ways: list[dict[str, Any]] = [{"ranks": 1, "schedule": "sequential"}, {"micro_batches": 2}]
    ways += [{"schedule": "gems", "replications": 1}, {"schedule": "zero-bubble"}]
    offload, way = f"values:{r.choice(('host', 'disk'))}", r.choice(ways)
    halo = r.choice(STREAM_HALOS)
    return Plan(stages=stages, stream=grids, stream_halo=halo, offload=offload, **way)


def compared(number: int) -> bool:
    """Whether the case is one: a network whose stages can be streamed, and hand on an image."""
    r = Random(f"values {number}")
    torch.manual_seed(number)
    model, x = a_network(r)
    data = [(x * k, torch.rand(len(x), dtype=torch.float64)) for k in (1, 0.5)]
    try:
        plan = a_plan(r, model, x.dim() - 2)
        found = planned(model, data, plan, square, costs="estimate")
    except PlanError as error:
        if "streams" in str(error) or "values" in str(error):
            return False
        raise
    assert_equal(found, planned(model, data, replace(plan, offload=()), square, costs="estimate"))
    if not any(isinstance(m, nn.modules.dropout._DropoutNd) for m in model.modules()):
        assert_equal(found, plainly(model, data, plan.total, square))
    return True


@pytest.mark.parametrize("number", range(CASES // 2), ids=lambda n: f"case_{n}_")
def test_a_generated_network_trains_the_same_with_values_in_a_store(number: int) -> None:
    for tried in range(number, number + 50 * CASES, CASES // 2):
        try:
            if compared(tried):
                return
        except BaseException as error:
            error.add_note(f"case {number}, try {tried}")
            raise
    raise AssertionError(f"of 50 networks none could be streamed in stages; case {number}")


SIDE = 29
PLANS = {
    "one rank": Plan(stages=4, ranks=1, stream=["3x2", "2x2", "3x3"], schedule="sequential"),
    "pipeline": Plan(stages=4, stream=["3x2", "2x2", "3x3"], micro_batches=2),
    "both ways": Plan(stages=3, stream=["3x2", "2x2"], schedule="gems", replications=1),
    "weights apart": Plan(stages=3, stream=["2x2", "2x3"], schedule="zero-bubble", micro_batches=3),
    "copies": Plan(stages=3, ranks=1, stream=["2x2"] * 2, data=2, schedule="sequential"),
    "with activations": Plan(
        stages=4, ranks=1, stream=["2x2", "3x2"], schedule="gpipe", micro_batches=4,
        offload="values:disk,activations:disk",
    ),
}  # fmt: skip


def stored(plan: Plan, place: str = "disk") -> Plan:
    return plan if plan.offload else replace(plan, offload=f"values:{place}")


@pytest.mark.parametrize("name", PLANS)
def test_a_residual_network_trains_like_the_plain_one(name: str) -> None:
    plan, model = stored(PLANS[name]), residual()
    data = noise((4, 3, SIDE, SIDE - 4), 3, (4,))
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


STATE = {
    "sharded": Plan(
        stages=3, ranks=1, stream=["2x2"] * 2, data=2, schedule="sequential", zero=3
    ),
    "stage by stage": Plan(
        stages=3, ranks=1, stream=["2x2", "3x2"], schedule="l2l", micro_batches=2,
        offload="values:disk,weights:host",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATE)
def test_weights_that_are_elsewhere_come_to_the_same(name: str) -> None:
    plan, model, data = stored(STATE[name]), residual(), noise((4, 3, SIDE, SIDE), 3, (4,))
    found, expected = planned(model, data, plan), plainly(model, data, plan.total)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    same_state(found.state, expected.state)


def u_net(width: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return build("unet", norm="none", width=width, levels=3).double()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_skips_that_several_stages_read_go_by_way_of_the_store(ranks: int) -> None:
    """Their gradients are sums of several, added up when a box of them is read."""
    order = {1: (0,) * 5, 2: (0, 1, 0, 1, 0), 5: tuple(range(5))}[ranks]
    plan = Plan(
        stages=5, placement=order, stream=["3x2"] * 5, schedule="gpipe", micro_batches=2,
        offload="values:host",
    )  # fmt: skip
    data = noise((2, 3, 27, 22), 2, (2, 27, 22))
    assert_equal(
        planned(u_net(), data, plan, F.cross_entropy), plainly(u_net(), data, 2, F.cross_entropy)
    )


def one_rank(transport: Transport, plan: Plan, folder: str) -> Any:
    data = noise((2, 3, 27, 22), 2, (2, 27, 22), 1)
    return trained(transport, u_net(), data, plan, F.cross_entropy, offload_folder=folder)


def test_over_processes(tmp_path: Path) -> None:
    plan = stored(Plan(stages=4, stream=["3x2"] * 4, micro_batches=2, schedule="1f1b"))
    found = join(spawn(plan.world, one_rank, plan, str(tmp_path)))
    data = noise((2, 3, 27, 22), 2, (2, 27, 22), 1)
    assert_equal(found, plainly(u_net(), data, 2, F.cross_entropy))
    assert not list(tmp_path.iterdir())


class Detached(nn.Module):
    """The loss does not depend on what the first layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return self.last(y.detach()).mean((2, 3))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_gradient_that_does_not_exist_does_not_come_as_zeros(ranks: int) -> None:
    torch.manual_seed(0)
    model = Detached().double()
    plan = Plan(
        stages=[["first"], ["second"], ["last"]], ranks=ranks, stream=["2x2"] * 3,
        schedule="gpipe", offload="values:disk",
    )  # fmt: skip
    data = noise((1, 3, 9, 8), 3, (1,))
    found = planned(model, data, plan)
    assert found.gradients[0]["first.weight"] is None
    assert_equal(found, plainly(model, data, 1))


def test_prediction_hands_values_on_in_the_store() -> None:
    model, image = u_net().eval(), torch.randn(2, 3, 21, 30, dtype=torch.float64)
    with torch.no_grad():
        expected = model(image)
    plan = stored(Plan(stages=3, stream=["2x3"] * 3))

    def work(transport: Transport) -> tuple[Any, int]:
        trainer = Trainer(copy.deepcopy(model), sample=image, plan=plan, transport=transport)
        found = trainer.predict(image)
        values = trainer.session.runner.programs.values
        assert values is not None
        return found, values.used

    results = run(plan.world, work)
    assert torch.allclose(results[-1][0], expected, rtol=1e-12)
    assert [used for _, used in results] == [0, 0, 0]


# --- memory ---------------------------------------------------------------------------------------


def measured(model: nn.Module, plan: Plan, image: Any, target: Tensor) -> list[Any]:
    """Of each rank: bytes of its fullest moment, measured and predicted; live bytes after each
    action, measured and predicted."""

    def work(transport: Transport) -> Any:
        trainer = Trainer(
            copy.deepcopy(model), F.cross_entropy, lambda p: torch.optim.SGD(p, 0.1),
            torch.empty(image.shape[0] // plan.micro_batches, *image.shape[1:]), plan,
            transport=transport, costs="estimate",
        )  # fmt: skip
        trainer.step(image, target)
        seen = trainer.timeline()
        at, forecast = transport.rank, trainer.forecast()
        events = [e.action for e in seen.events if e.rank == at]
        rows = dict(zip(events, (m for _, m in seen.memory[at]), strict=True))
        session = trainer.session
        row, _ = live(session.schedule, session.plan, session.costs)[at]
        actions = map(str, session.schedule.ranks[at])
        return trainer.peak, forecast.peaks[at].total, rows, dict(zip(actions, row, strict=True))

    return run(plan.world, work)


def dense(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            layer
            for k in range(6)
            for layer in (nn.Conv2d(width if k else 3, width, 3, padding=1), nn.ReLU())
        ),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2),
    )  # fmt: skip


def test_twice_the_side_takes_no_more_memory_and_as_much_as_was_predicted() -> None:
    target, found, bytes_stored = torch.zeros(1, dtype=torch.int64), [], []
    for parts in (3, 6):
        plan = stored(Plan(stages=4, ranks=1, stream=[(parts,) * 2] * 3, schedule="sequential"))
        image = Picture(1, 3, 32 * parts, 32 * parts)
        [(peak, predicted, rows, _)] = measured(dense(8), plan, image, target)
        assert predicted == pytest.approx(peak, rel=0.05)
        found.append(peak)
        bytes_stored.append(max(m.offloaded for m in rows.values()))
    assert found[1] <= 1.1 * found[0]
    assert bytes_stored[1] == 4 * bytes_stored[0]


def normed(width: int) -> nn.Module:
    """BatchNorm in training mode, so that a stage has several sweeps."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for k in range(4):
        layers += [
            nn.Conv2d(width if k else 3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        ]  # fmt: skip
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))


@pytest.mark.parametrize("stages", [2, 3])
def test_sweeps_of_a_stage_read_each_other_s_values_in_the_store(stages: int) -> None:
    """As BatchNorm ends them: statistics, running ones too, are those of the whole image."""
    model, data = normed(3).double(), noise((2, 3, 17, 19), 2, (2,))
    plan = Plan(stages=stages, ranks=1, stream=["3x2"] * (stages - 1), schedule="sequential")
    whole = planned(model, data, plan)
    found = planned(model, data, stored(plan))
    assert_equal(found, plainly(model, data, 1))
    assert_equal(found, whole, 1e-12)


@pytest.mark.parametrize("tiles", ["1x2", "2x2"])
def test_tiles_with_values_in_a_store_exchange_halos_of_them(tiles: str) -> None:
    """Each rank has its tile in its own store; of halos, and their gradients, only boxes move."""
    model, data = normed(3).double(), noise((1, 3, 17, 19), 2, (1,))
    group = tuple(range(4 if tiles == "2x2" else 2))
    plan = stored(
        Plan(stages=2, placement=(group, 0), spatial=[tiles], stream=["2x2"], schedule="sequential")
    )
    assert_equal(planned(model, data, plan), plainly(model, data, 1))


def test_norms_in_training_mode_take_no_more_memory_at_twice_the_side() -> None:
    target, found = torch.zeros(1, dtype=torch.int64), []
    for parts in (3, 6):
        plan = stored(Plan(stages=2, ranks=1, stream=(parts,) * 2, schedule="sequential"))
        image = Picture(1, 3, 32 * parts, 32 * parts)
        [(peak, predicted, rows, forecast)] = measured(normed(8), plan, image, target)
        assert predicted == pytest.approx(peak, rel=0.05)
        found.append(peak)
        assert rows["0F0"].offloaded == forecast["0F0"].offloaded
        # At least the inputs of four norms, which is what plain autograd would save of them.
        assert rows["0F0"].offloaded >= 4 * 8 * (32 * parts) ** 2 * 4
    assert found[1] <= 1.1 * found[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_in_the_store_is_counted_as_such_action_by_action(ranks: int) -> None:
    model = u_net().float()
    plan = Plan(
        stages=3, ranks=ranks, stream=["3x2"] * 3, schedule="gpipe", micro_batches=2,
        offload="values:disk",
    )  # fmt: skip
    image, target = torch.randn(2, 3, 40, 32), torch.zeros(2, 40, 32, dtype=torch.int64)
    for _, _, rows, forecast in measured(model, plan, image, target):
        work = {a: m for a, m in rows.items() if a[1] in "FB" and a[-1] not in "<>"}
        assert any(m.offloaded for m in work.values())
        if ranks == 1:  # else others send and receive meanwhile
            for action, memory in work.items():
                counted = [(m.offloaded, m.boundary) for m in (memory, forecast[action])]
                assert counted[0] == counted[1], action


class Spy(Local):
    """A rank that notes the largest message from store to store."""

    largest = 0
    count = 0

    def isend(self, buffer: Any, target: int, channel: int = 0) -> Any:
        if channel == STORED:
            self.largest, self.count = max(self.largest, buffer.nbytes), self.count + 1
        else:
            assert buffer.nbytes < 2000, "a whole image is sent"
        return super().isend(buffer, target, channel)


def test_a_message_travels_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_messages, "ROWS", 4096)
    model, image = dense(4), torch.randn(1, 3, 64, 48)
    plan = stored(Plan(stages=3, stream=["4x4"] * 2))

    def work(transport: Local) -> tuple[int, int, int]:
        spy = Spy(transport.shared, transport.rank)
        trainer = Trainer(
            copy.deepcopy(model), F.cross_entropy, lambda p: torch.optim.SGD(p, 0.1),
            image, plan, transport=spy,
        )  # fmt: skip
        trainer.step(image, torch.zeros(1, dtype=torch.int64))
        return spy.largest, spy.count, trainer.peak

    whole = prod((4, 64, 48)) * 4
    results = run(plan.world, work)  # type: ignore[arg-type]
    for largest, count, _ in results[:2]:
        assert 0 < largest <= 4096 and count > whole / 4096
    assert results[0][2] < whole


@pytest.mark.parametrize("tiles", ["1x2", "2x1", "2x2"])
def test_tiles_hand_each_other_values_in_a_store(tiles: str) -> None:
    """Each rank stores its tile, and the halos that later stages read of it; skips and all. What a
    rank has is as predicted: the store to the byte."""
    ranks = tuple(range(4 if tiles == "2x2" else 2))
    plan = Plan(
        stages=5, placement=(ranks,) * 5, spatial=[tiles] * 5, stream=["3x2"] * 5,
        schedule="sequential", micro_batches=2, offload="values:disk",
    )  # fmt: skip
    data = noise((2, 3, 40, 36), 2, (2, 40, 36))
    assert_equal(planned(u_net(), data, plan), plainly(u_net(), data, plan.total))
    image, target = torch.randn(2, 3, 128, 128), torch.zeros(2, 128, 128, dtype=torch.int64)
    plan = replace(plan, stream=((2, 2),) * 5)
    for peak, predicted, rows, forecast in measured(u_net(4).float(), plan, image, target):
        assert predicted == pytest.approx(peak, rel=0.05)
        most = [max(memory.offloaded for memory in x.values()) for x in (rows, forecast)]
        assert most[0] == most[1] > 0


# --- files ----------------------------------------------------------------------------------------


def test_a_step_that_fails_leaves_no_file_and_no_bytes(tmp_path: Path) -> None:
    """The file has no name from the moment it exists."""
    seen: list[int] = []

    class Picky(Picture):
        def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
            seen.append(len(list(tmp_path.iterdir())))
            if len(seen) > 12:
                raise OSError("the slide cannot be read")
            return super().__getitem__(box)

    plan = stored(Plan(stages=3, ranks=1, stream=["4x4"] * 2, schedule="sequential"))
    image = Picky(1, 3, 32, 32)

    def work(transport: Transport) -> int:
        trainer = Trainer(
            dense(4), F.cross_entropy, lambda p: torch.optim.SGD(p, 0.1), torch.empty(image.shape),
            plan, transport=transport, offload_folder=tmp_path,
        )  # fmt: skip
        with pytest.raises(OSError, match="slide"):
            trainer.step(image, torch.zeros(1, dtype=torch.int64))
        trainer.close()
        return 0

    run(1, work)
    assert len(seen) == 13 and not any(seen)
    assert not list(tmp_path.iterdir())


# --- what makes no sense --------------------------------------------------------------------------


def test_a_plan_without_values_between_streamed_stages_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"values:disk.* no stage of this plan streams"):
        Plan(stages=2, offload="values:disk")
    with pytest.raises(PlanError, match=r"values:host.* and in this model there are none"):
        plan = Plan(stages=2, ranks=1, stream="2x2", offload="values", schedule="sequential")
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))  # one sweep, then the end
        run(1, lambda t: Trainer(model, sample=torch.empty(1, 3, 8, 8), plan=plan, transport=t))
    with pytest.raises(PlanError, match=r"2bw cannot offload \(values:disk\)"):
        Plan(stages=2, stream=["2x2"] * 2, micro_batches=2, schedule="2bw", offload="values:disk")


def test_a_model_in_which_no_image_goes_between_streamed_stages_is_rejected() -> None:
    """Of a dense output that the loss needs as well, the store would save nothing."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.first(x)
            return y, self.last(y)

    plan = stored(
        Plan(stages=[["first"], ["last"]], ranks=1, stream=["2x2"] * 2, schedule="sequential")
    )
    sample = torch.empty(1, 3, 8, 8)
    with pytest.raises(PlanError, match=r"values:disk.*read by a stage that does not stream"):
        run(1, lambda t: Trainer(Both(), sample=sample, plan=plan, transport=t))


def test_the_command_line_stores_values(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    network = ["--model", "tests.networks:convnext_tiny", "--image-size", "64"]
    streamed = ["--stages", "3", "--stream", "2x2,2x2", "--offload", "values:disk"]
    assert main(["plan", *network, *streamed, "--out", str(file)]) == 0
    assert from_json(Plan, file.read_text()).offload == ("values:disk",)


# --- the planner ----------------------------------------------------------------------------------


def test_the_largest_image_grows_with_ranks_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the root of the ranks: what sweeps read of each other is in the store, tile by tile."""

    def patches(graph: Any, **finest: bool) -> Any:
        side = min(graph.value[graph.inputs[0]].shape[2:])
        return (((n, n), 1) for n in (4, 8, 16) if 16 * n <= side)

    monkeypatch.setattr("gems.planner.candidates._patches", patches)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    sample, sides = torch.empty(1, 3, 64, 64, device="meta"), {}
    for memory, ranks in ((1, 1), (1, 2), (1, 4), (2, 1)):
        plan = gems.plan(
            model, sample, ranks=ranks, memory=memory << 20, micro_batches=1, objective="image",
            state=0.0,
        )  # fmt: skip
        assert plan.offload == ("values:disk",) and plan.ranks == ranks
        assert "values to disk" in plan.why
        sides[memory, ranks] = int(plan.why.split()[2])
    one = sides[1, 1]
    assert one < sides[1, 2] < sides[1, 4] and one < sides[2, 1]
    for ranks in (2, 4):
        assert sides[1, ranks] == pytest.approx(one * ranks**0.5, rel=0.15)
