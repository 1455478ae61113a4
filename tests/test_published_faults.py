"""What the published implementation gets wrong (mission.md), fault by fault: ours does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from gems.plans.plan import Plan
from tests.exact import Outcome, assert_equal, batches, plainly, planned
from tests.spatial import Plain

Tensor = torch.Tensor
CLASSES = 5


def network(*, norm: bool = True, width: int = 6) -> nn.Module:
    """Nine layers: seven of pixels, then pooled, and a label."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, stride=2),
        nn.BatchNorm2d(width) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, CLASSES),
    ).double()


SIZES: dict[str, Any] = {"balance": (4, 6)}
ODD: dict[str, Any] = {"balance": (3, 4, 3)}


def data(samples: int = 8, steps: int = 2) -> list[Any]:
    return batches((samples, 3, 13, 11), CLASSES, steps, torch.float64)


def both(plan: Plan, model: nn.Module | None = None, steps: int = 2) -> tuple[Outcome, Outcome]:
    model = model or network()
    return planned(model, data(steps=steps), plan), plainly(model, data(steps=steps), plan.total)


def ratios(found: Outcome, expected: Outcome) -> dict[str, float]:
    """Of the first step's gradients: how much larger ours is than the plain one."""
    mine, theirs = found.gradients[0], expected.gradients[0]
    return {name: float(mine[name].norm() / theirs[name].norm()) for name in theirs}


def test_fault_1_halo_gradients_reach_their_owner() -> None:
    """Published: input gradients are wrong within 3 pixels of every cut, first weights by 29%."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)]
    plain = Plain(nn.Sequential(*layers), torch.randn(2, 3, 12, 10))
    ranks = plain.cut((2, 1))  # at row 6; compares every gradient
    theirs = plain.seen.gradients["input"]
    ours = torch.zeros_like(theirs)
    for rank in ranks:
        box, gradient = rank.gradients["input"]
        ours[box.slices()] += gradient
    assert torch.allclose(ours[:, :, 3:9], theirs[:, :, 3:9], rtol=1e-10, atol=1e-12)
    ours = sum(rank.gradients["0.weight"][1] for rank in ranks)
    assert torch.allclose(ours, plain.seen.gradients["0.weight"], rtol=1e-10, atol=1e-12)


def test_fault_2_gradients_are_not_divided_by_the_number_of_tiles() -> None:
    """Published: those of spatial stages are 0.249 of the true ones, those of layer stages 1.0."""
    found, expected = both(Plan(stages=2, micro_batches=2, spatial=[(2, 2)], **SIZES))
    found_ratios = ratios(found, expected)
    assert found_ratios["0.weight"] == pytest.approx(1, rel=1e-10), "of the spatial stage"
    assert found_ratios["6.weight"] == pytest.approx(1, rel=1e-10), "of the layer stage"
    assert_equal(found, expected)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_fault_3_gradients_and_loss_do_not_scale_with_parts(parts: int) -> None:
    """Published: both are multiplied by the number of micro-batches."""
    model = network(norm=False)  # whose batches are the same however they are split
    plan = Plan(stages=2, micro_batches=parts, spatial=[(1, 2)], **SIZES)
    assert_equal(planned(model, data(), plan), plainly(model, data(), 1))


@pytest.mark.parametrize("times", [1, 2, 4])
def test_fault_3_gradients_and_loss_do_not_scale_with_times(times: int) -> None:
    """Published: both are multiplied by the repeats of the bidirectional pair."""
    model = network(norm=False)
    plan = Plan(stages=2, replications=times, schedule="gems", spatial=[(1, 2)], **SIZES)
    assert_equal(planned(model, data(), plan), plainly(model, data(), 1))


def test_fault_4_batch_norm_sees_all_tiles() -> None:
    """Published: statistics are per tile; the gradient's cosine with the true one is 0.43."""
    found, expected = both(Plan(stages=2, micro_batches=2, spatial=[(2, 2)], **SIZES))
    mine, theirs = (
        torch.cat([g.flatten() for g in outcome.gradients[0].values()])
        for outcome in (found, expected)
    )
    assert cosine_similarity(mine, theirs, 0) == pytest.approx(1, abs=1e-10)
    assert_equal(found, expected)


def test_fault_4_running_statistics_of_the_replicas_do_not_drift_apart() -> None:
    """Published: each direction keeps its own. `planned` finds the same bits on all ranks."""
    found, expected = both(
        Plan(stages=2, replications=2, schedule="gems", spatial=[(1, 2)], **SIZES), steps=3
    )
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.allclose(found.state[name], expected.state[name], rtol=1e-10), name


@pytest.mark.parametrize("fused", [2, 3])
def test_fault_5_d2_is_the_same_network_at_the_borders(fused: int) -> None:
    """Published: the image is padded once for all fused layers, and borders are off by 8%."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
    )  # fmt: skip
    plain = Plain(model, torch.randn(2, 3, 11, 9))
    for grid in ((2, 2), (1, 3)):
        plain.cut(grid, fused=fused)  # compares every pixel, those at the borders included


def test_fault_6_max_pooling_pads_with_minus_infinity() -> None:
    """Published: with zeros, which are larger than any negative number."""
    image = -1 - torch.rand(1, 2, 9, 7)
    Plain(nn.MaxPool2d(3, 2, 1), image).cut((2, 2))


def test_fault_6_average_pooling_does_not_count_the_border() -> None:
    """Published: count_include_pad=False is ignored."""
    image = torch.ones(1, 2, 9, 7)
    pool = nn.AvgPool2d(3, 2, 1, count_include_pad=False)
    for rank in Plain(pool, image).cut((2, 2)):
        (_, mean), = rank.outputs.values()  # fmt: skip
        assert torch.allclose(mean, torch.ones_like(mean)), "a mean of ones is one"


def test_fault_7_bidirectional_and_spatial_keep_their_weights() -> None:
    """Published: zeros are broadcast over the weights before the first step."""
    plan = Plan(stages=2, replications=1, schedule="gems", spatial=[(2, 2)], **SIZES)
    found, expected = both(plan, steps=1)
    assert all(p.any() for name, p in found.state.items() if name.endswith("weight"))
    assert_equal(found, expected)


def test_fault_7_momentum_and_gradients_of_the_two_directions_do_not_mix() -> None:
    """Published: comm-opt mixes momentum buffers and adds stale gradients."""

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True)

    plan = Plan(stages=2, replications=2, schedule="gems", spatial=[(1, 2)], **SIZES)
    model, steps = network(), data(steps=4)
    found = planned(model, steps, plan, cross_entropy, momentum)
    assert_equal(found, plainly(model, steps, plan.total, cross_entropy, momentum))


@pytest.mark.parametrize("schedule", ["gems", "gems-zb"])
def test_fault_8_an_odd_number_of_stages_is_synchronised(schedule: str) -> None:
    """Published: the replicas of the middle stage drift apart; all others are summed up."""
    plan = Plan(stages=3, replications=2, schedule=schedule, spatial=[(1, 2), (1, 2)], **ODD)
    assert len(plan.replica_groups[1]) > 2, (
        "several ranks have the middle stage, in both directions"
    )
    found, expected = both(plan, steps=3)  # the same bits on all of them, says `planned`
    assert_equal(found, expected)


def test_fault_9_local_dp_sends_every_slice_back_where_it_came_from() -> None:
    """Published: backward takes the wrong slice of the batch."""
    plan = Plan(stages=2, micro_batches=2, spatial=[(2, 2)], local_dp=2, **SIZES)
    assert_equal(*both(plan))


def test_fault_9_data_parallel_replicas_stay_equal_with_several_parts() -> None:
    """Published: with parts > 1 the copies of a pipeline diverge."""
    plan = Plan(stages=2, micro_batches=2, data=2, spatial=[(1, 2)], **SIZES)
    found, expected = both(plan, steps=3)  # the same bits on all copies, says `planned`
    assert_equal(found, expected)


@pytest.mark.parametrize("options", [{"dilation": 3, "padding": 3}, {"groups": 2, "padding": 1}])
def test_fault_10_dilation_and_groups_are_respected(options: dict[str, Any]) -> None:
    """Published: spatial convolutions ignore both."""
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 4, 3, **options)
    assert layer.dilation != (1, 1) or layer.groups != 1
    Plain(nn.Sequential(nn.Conv2d(3, 4, 1), layer), torch.randn(2, 3, 11, 9)).cut((2, 2))


@pytest.mark.parametrize("size", [(13, 11), (7, 30), (5, 3), (1, 17)])
def test_fault_10_sizes_need_not_be_powers_of_two(size: tuple[int, int]) -> None:
    """Published: any other size crashes, or loses the last pixels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.Conv2d(4, 4, 3, padding=1))
    plain = Plain(model, torch.randn(2, 3, *size))
    for grid in ((2, 2), (3, 1), (1, 3)):
        plain.cut(grid)


def test_fault_12_several_spatial_stages_work() -> None:
    """Published: only the first may be spatial."""
    plan = Plan(stages=3, micro_batches=2, spatial=[(2, 2), (1, 2)], **ODD)
    assert_equal(*both(plan))


def test_fault_12_balance_classes_optimizer_and_learning_rate_do_what_they_say() -> None:
    """Published: `--balance`, `--num-classes`, `--optimizer`, `--learning-rate` are ignored."""

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.03)

    model = network()
    model[-1] = nn.Linear(6, 7).double()
    steps = batches((8, 3, 13, 11), 7, 2, torch.float64)
    for balance in ((1, 9), (6, 4)):
        plan = Plan(stages=2, micro_batches=2, spatial=[(1, 2)], balance=balance)
        found = planned(model, steps, plan, cross_entropy, adam)
        assert_equal(found, plainly(model, steps, plan.total, cross_entropy, adam), 1e-8)


def test_fault_12_what_was_trained_can_be_saved(tmp_path: Any) -> None:
    """Published: nothing can. The file is a plain model's, and a plain model takes it."""
    plan = Plan(stages=2, replications=1, schedule="gems", spatial=[(2, 2)], **SIZES)
    found, expected = both(plan)
    torch.save(found.state, tmp_path / "state.pt")
    model = network()
    model.load_state_dict(torch.load(tmp_path / "state.pt"))
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, expected.state[name], rtol=1e-9, atol=1e-10), name
