"""Faults of the published code and of peers, each told above the test that keeps it away."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import Hung, Local, run
from tests import networks
from tests.exact import assert_equal, batches, close, join, plainly, planned, sgd, trained
from tests.worlds import spawn

Tensor = torch.Tensor


def network() -> nn.Module:
    torch.manual_seed(0)
    return networks.build("resnet_v1", depth=8, width=4, num_classes=5).double()


def without_batch_norm() -> nn.Module:
    """Every sample by itself, so that the size of a micro-batch is nobody's business."""
    torch.manual_seed(0)
    return networks.build("resnet50", width=2, layers=(1, 1), norm="group", num_classes=5).double()


def data(steps: int = 2, samples: int = 8, side: int = 12) -> list[Any]:
    return batches((samples, 3, side, side), 5, steps, torch.float64)


def weights_on_each_rank(model: nn.Module, plan: Plan, made: list[Any]) -> list[dict[str, Tensor]]:
    """What every rank itself has after training: `state_dict` would ask the first holder only."""

    def work(transport: Transport) -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        sample = made[0][0][:2]
        trainer = Trainer(mine, F.cross_entropy, sgd, sample, plan, transport=transport)
        for images, labels in made:
            trainer.step(images, labels)
        held = trainer.session.owned.on(transport.rank)
        found = dict(mine.named_parameters()) | dict(mine.named_buffers())
        return {name: found[name].detach() for name in held}

    return run(plan.world, work)


def assert_all_alike(model: nn.Module, plan: Plan, steps: int = 3) -> None:
    """Every holder of every weight and buffer has the plain model's."""
    made = data(steps)
    expected = plainly(model, made, plan.total).state
    for rank, held in enumerate(weights_on_each_rank(model, plan, made)):
        for name, tensor in held.items():
            close(f"rank {rank}, {name}", tensor, expected[name])


# --- the published implementation -------------------------------------------------------------


# Losses of micro-batches were added up, not averaged, so twice the `--parts` meant twice the
# gradient, and a learning rate that was right before was wrong after.
@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b", "zero-bubble", "auto"])
def test_the_result_does_not_depend_on_the_number_of_parts(schedule: str) -> None:
    expected = plainly(without_batch_norm(), data(), 1)
    for parts in (1, 2, 3, 8):
        plan = Plan(stages=2, micro_batches=parts, schedule=schedule)
        assert_equal(planned(without_batch_norm(), data(), plan), expected)


# `--times` repeated the pair without averaging over the repeats either.
@pytest.mark.parametrize("schedule", ["gems", "gems-zb"])
def test_the_result_does_not_depend_on_times(schedule: str) -> None:
    expected = plainly(without_batch_norm(), data(), 1)
    for times in (1, 2, 4):
        plan = Plan(stages=3, replications=times, schedule=schedule)
        assert_equal(planned(without_batch_norm(), data(), plan), expected)


# Nor may it matter where stages are, how many there are, or how many copies.
def test_the_result_does_not_depend_on_placement_or_copies() -> None:
    expected = plainly(without_batch_norm(), data(), 1)
    for plan in (
        Plan(stages=4, ranks=2, micro_batches=2, schedule="interleaved"),
        Plan(stages=3, micro_batches=2, schedule="auto", placement="fold"),
        Plan(stages=3, micro_batches=2, schedule="auto", placement=(1, 0, 1)),
        Plan(stages=3, micro_batches=2, schedule="gpipe", placement=(2, 0, 1), data=2),
        Plan(stages=1, micro_batches=1, data=4),
        Plan(stages=2, replications=2, schedule="gems", data=2),
    ):
        assert_equal(planned(without_batch_norm(), data(), plan), expected)


# The two replicas of a stage each kept running statistics of the samples they happened to see.
def test_running_statistics_of_both_replicas_are_those_of_all_samples() -> None:
    assert_all_alike(network(), Plan(stages=4, replications=2, schedule="gems"))


# With an odd number of stages the middle one is its own mirror image: it was left out of the
# exchange, and its two replicas went their own ways.
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("schedule", ["gems", "gems-zb", "auto"])
def test_the_middle_of_an_odd_number_of_stages_is_trained_by_both_directions(
    stages: int, schedule: str
) -> None:
    plan = Plan(stages=stages, micro_batches=4, schedule=schedule, bidirectional=True)
    assert_all_alike(network(), plan, 2)


# Weights were broadcast from the replica that had just been zeroed, and with the communication
# "optimised" momentum buffers were mixed up and gradients of the step before added.
def test_momentum_and_weights_stay_alike_on_all_holders_over_many_steps() -> None:
    assert_all_alike(network(), Plan(stages=2, replications=2, schedule="gems", data=2), 5)


# Data-parallel copies of a pipeline diverged as soon as there was more than one part.
def test_copies_of_a_pipeline_stay_alike_with_several_parts() -> None:
    assert_all_alike(network(), Plan(stages=2, micro_batches=4, schedule="1f1b", data=2))


# The loss was cross entropy of a softmax, so of the wrong numbers; the printed one was that of
# the last part, and images/s counted a part as the batch.
def test_the_loss_is_the_given_one_of_all_samples_and_so_is_their_number() -> None:
    model, (images, labels) = without_batch_norm(), data(1, 7)[0]
    expected = float(F.cross_entropy(model(images), labels).detach())

    def work(transport: Transport) -> Any:
        trainer = Trainer(
            copy.deepcopy(model),
            F.cross_entropy,
            sgd,
            images[:2],
            Plan(stages=2, micro_batches=4),
            transport=transport,
        )
        return trainer.step(images, labels)

    for step in run(2, work):
        assert step.loss == pytest.approx(expected, rel=1e-12)
        assert step.samples == 7
        assert 0 < step.seconds < 60


# --- torch.distributed.pipelining -------------------------------------------------------------


# Shapes were found by running each stage on memory nobody had written: BatchNorm's running
# statistics took it in and were NaN from the start.
def test_setting_up_does_not_touch_running_statistics() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    trainer = Trainer(model, F.cross_entropy, sgd, data()[0][0][:2], Plan(micro_batches=2))
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# DDP around the stages of a schedule with split or two-way backward reduced nothing, silently.
@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=2, micro_batches=4, schedule="zero-bubble", data=2),
        Plan(stages=2, micro_batches=4, schedule="auto", bidirectional=True, data=2),
        Plan(stages=4, micro_batches=2, schedule="auto", placement="fold", data=2),
    ],
    ids=["zero-bubble", "two ways", "fold"],
)
def test_copies_of_split_and_two_way_schedules_are_reduced(plan: Plan) -> None:
    assert_all_alike(network(), plan, 2)


# "Backward of skip connections not supported yet"
def test_a_unet_trains_over_three_stages() -> None:
    torch.manual_seed(0)
    model = networks.build("unet", width=2, levels=3, num_classes=5).double()
    made = [(x, torch.randint(5, (4, 12, 12))) for x, _ in data(2, 4, 12)]
    plan = Plan(stages=3, micro_batches=2, schedule="1f1b")
    assert_equal(planned(model, made, plan), plainly(model, made, 2))


# Receive buffers had the shape of the first batch: a short last one was filled up with what was
# left of the one before, and a larger image later on aborted gloo.
def changing() -> list[Any]:
    return [data(1, 8, 8)[0], data(1, 5, 8)[0], data(1, 8, 14)[0], data(1, 1, 9)[0]]


@pytest.mark.parametrize("schedule", ["1f1b", "gems"])
def test_an_uneven_last_batch_and_a_larger_image_later_are_ordinary_steps(schedule: str) -> None:
    plan = Plan(stages=3, micro_batches=4, schedule=schedule)
    assert_equal(planned(network(), changing(), plan), plainly(network(), changing(), 4))


def rank_with_changing_shapes(transport: Transport) -> Any:
    return trained(transport, network(), changing(), Plan(stages=2, micro_batches=4))


def test_changing_shapes_are_ordinary_over_gloo_too() -> None:
    found = join(spawn(2, rank_with_changing_shapes))
    assert_equal(found, plainly(network(), changing(), 4))


# `.eval()` on a traced stage was accepted and ignored: dropout went on dropping.
def test_evaluation_mode_reaches_every_stage() -> None:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.5), nn.BatchNorm1d(16)]
    model = nn.Sequential(*layers, nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 5)).double()
    images, labels = data(1, side=8)[0]
    plan = Plan(stages=3, micro_batches=2)

    def work(transport: Transport) -> Any:
        mine = copy.deepcopy(model)
        trainer = Trainer(mine, F.cross_entropy, sgd, images[:4], plan, transport=transport)
        first = trainer.predict(images)
        trainer.step(images, labels)
        return first, trainer.predict(images), trainer.state_dict()

    before = model.eval()(images).detach()
    for first, second, state in run(3, work):
        close("before training", first, before)
        after = copy.deepcopy(model)
        after.load_state_dict(state)
        close("after training", second, after.eval()(images).detach())


# The first op of a stage met a leaf: "a leaf Variable that requires grad is being used in an
# in-place operation".
def test_an_in_place_op_may_come_first_in_a_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    ).double()  # fmt: skip
    stages = [["0"], ["1", "2"], ["3", "4", "5", "6"]]
    for plan in (
        Plan(stages=stages, micro_batches=2),
        Plan(stages=stages, micro_batches=2, schedule="zero-bubble"),
        Plan(stages=stages, micro_batches=2, schedule="gpipe", placement=(0, 0, 0)),
    ):
        assert_equal(planned(model, data(), plan), plainly(model, data(), 2))


# Even the model's input, which is the user's own, must not change under an in-place first layer,
# nor under one that comes after a view.
@pytest.mark.parametrize("first", [nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True)])
def test_the_users_batch_is_not_changed(first: nn.Module) -> None:
    model = nn.Sequential(
        first, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(192, 6), nn.Linear(6, 5)
    ).double()
    made = data(2, side=8)
    kept = copy.deepcopy(made)
    found = planned(model, made, Plan(stages=2, micro_batches=2))
    for (x, _), (y, _) in zip(made, kept, strict=True):
        assert torch.equal(x, y)
    assert_equal(found, plainly(model, kept, 2))


# Two stages on one rank have a value in common, not copies. The one that changes it in place,
# through a view, must not change what the other has yet to read.
@pytest.mark.parametrize("alias", ["contiguous", "view"])
def test_an_in_place_op_does_not_reach_into_another_stage_of_the_rank(alias: str) -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.left = nn.Linear(6, 6), nn.Linear(6, 6)
            self.right, self.last = nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            left = self.left(x + 1)
            y = x.contiguous() if alias == "contiguous" else x.view(x.shape)
            y.add_(3)
            return self.last(left + self.right(y))

    made = batches((4, 6), 5, 2, torch.float64)
    stages = [["first"], ["add", "left"], [alias, "add:2", "right"], ["add:3", "last"]]
    for placement in ((0, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 1)):
        for schedule in ("gpipe", "auto", "sequential"):
            plan = Plan(stages=stages, micro_batches=2, schedule=schedule, placement=placement)
            assert_equal(planned(Fork().double(), made, plan), plainly(Fork().double(), made, 2))


# Tensors that are not row-major could not be sent over gloo at all.
def channels_last(transport: Transport) -> Any:
    seen: list[bool] = []
    model = without_batch_norm().to(memory_format=torch.channels_last)
    last = torch.channels_last
    hook = lambda _, args: seen.append(args[0].is_contiguous(memory_format=last))  # noqa: E731
    model.layer2[0].conv1.register_forward_pre_hook(hook)
    made = [(x.to(memory_format=last), y) for x, y in data()]
    stages = [["conv1", "layer1"], ["layer2", "avgpool", "flatten", "fc"]]
    outcome = trained(transport, model, made, Plan(stages=stages, micro_batches=2))
    outcome.timeline = seen
    return outcome


def test_channels_last_stays_channels_last_over_gloo() -> None:
    outcomes = spawn(2, channels_last)
    assert all(outcomes[1].timeline) and outcomes[1].timeline
    assert_equal(join(outcomes), plainly(without_batch_norm(), data(), 2))


# Targets had to be one tensor.
def test_targets_may_be_a_dict_with_something_for_all_micro_batches() -> None:
    model = without_batch_norm()
    weights = torch.rand(5, dtype=torch.float64)
    made = data()

    def loss(output: Tensor, target: Any) -> Tensor:
        each = F.cross_entropy(output, target["label"], reduction="none")
        return (each * target["worth"] * target["weights"].sum()).mean()

    worth = torch.rand(8, dtype=torch.float64)
    dicts = [(x, {"label": y, "worth": worth, "weights": weights}) for x, y in made]
    plain = [(x, {"label": y, "worth": worth, "weights": weights.expand(8, 5)}) for x, y in made]
    expected = plainly(model, plain, 2, lambda out, t: loss(out, t | {"weights": t["weights"][0]}))
    dims = {"label": 0, "worth": 0, "weights": "whole"}
    found = planned(model, dicts, Plan(stages=2, micro_batches=2), loss, batch_dim=dims)
    assert_equal(found, expected)


# Receive buffers of all micro-batches were held for ever.
def test_receive_buffers_live_from_shortly_before_their_use_until_it() -> None:
    plan = Plan(stages=2, micro_batches=8, schedule="1f1b")
    timeline = planned(without_batch_norm(), data(1), plan).timeline
    for row in timeline.memory:
        sizes = [memory.boundary for _, memory in row]
        largest = max(b - a for a, b in zip(sizes, sizes[1:], strict=False))  # noqa: RUF007
        assert max(sizes) <= 4 * largest
        assert sizes[-1] == 0


# A gradient that was asked for, but to which no path from the loss leads, made others wait; then
# zeros were sent, and weights that plain training leaves alone decayed.
def test_weights_behind_an_argmax_are_left_alone() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.picks = nn.Linear(6, 6), nn.Linear(6, 6)
            self.last = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            picked = self.picks(x)
            return self.last(x * (picked.argmax(1, keepdim=True) + 1))

    made = batches((4, 6), 5, 3, torch.float64)
    for stages in ([["first", "picks"], ["argmax", "last"]], [["first"], ["picks"], ["last"]]):
        plan = Plan(stages=stages, micro_batches=2)
        found = planned(Chooses().double(), made, plan)
        assert found.gradients[0]["picks.weight"] is None
        assert_equal(found, plainly(Chooses().double(), made, 2))


# The thread transport held the parts of every collective for ever: a rank's memory grew by its
# gradients in each step.
def test_threads_hold_no_finished_collectives() -> None:
    def held(rounds: int) -> int:
        worlds: set[Any] = set()

        def work(transport: Any) -> None:
            worlds.add(transport.shared)
            for _ in range(rounds):
                one, other = (transport.all_reduce(torch.ones(2), (0, 1)) for _ in range(2))
                for handle in (other, one, one):  # in any order, and twice
                    handle.wait()
                transport.reduce_scatter(torch.ones(2), (0, 1)).wait()
                transport.all_gather(torch.ones(2), (0, 1)).wait()
                transport.broadcast(torch.ones(2), 0)
                transport.all_gather_object(rounds)

        run(2, work)
        (world,) = worlds
        return sum(len(x) for x in vars(world).values() if isinstance(x, dict))

    assert held(30) == held(1) == 0


def test_ranks_that_wait_for_ever_are_ended_with_their_stacks() -> None:
    def work(transport: Local) -> None:
        if transport.rank == 0:
            transport.irecv(torch.ones(4), 1).wait()

    with pytest.raises(Hung, match="wait_for"):
        run(2, work, seconds=0.2)
