"""Running statistics do not depend on who saw which micro-batch, nor in which order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gems.errors import PlanError
from gems.plans.plan import Plan
from gems.torch.runtime.running_stats import Statistics, tracked, unrecorded
from tests.exact import assert_equal, batches, plainly, planned

NORMS = {
    "batch": lambda: nn.BatchNorm2d(3),
    "batch, fast": lambda: nn.BatchNorm2d(3, momentum=0.7),
    "batch, cumulative": lambda: nn.BatchNorm2d(3, momentum=None),
    "batch, never": lambda: nn.BatchNorm2d(3, momentum=0.0),
    "instance": lambda: nn.InstanceNorm2d(3, track_running_stats=True),
    "instance, no momentum": lambda: nn.InstanceNorm2d(3, track_running_stats=True, momentum=None),
}


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: b.clone() for name, b in module.named_buffers()}


@pytest.mark.parametrize("name", NORMS)
@given(
    uses=st.integers(1, 3),
    order=st.permutations(range(5)),
    holders=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    earlier=st.integers(0, 3),
)
def test_the_sums_of_all_holders_are_the_plain_running_average(
    name: str, uses: int, order: list[int], holders: list[int], earlier: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 3, 2, 2, generator=draw).double() + i for i in range(5)]
    plain = NORMS[name]().double()
    for i in range(earlier):
        plain(batches[i])
    ranks = [copy.deepcopy(plain) for _ in range(3)]
    for x in batches:
        for use in range(uses):
            plain(x + use)

    statistics = [Statistics([(module, uses)], len(batches)) for module in ranks]
    for position in order:  # each micro-batch by whoever, whenever
        rank = holders[position]
        with statistics[rank].during(position):
            for use in range(uses):
                ranks[rank](batches[position] + use)
    sums = [sum(parts) for parts in zip(*(s.sums for s in statistics), strict=True)]
    for module, own in zip(ranks, statistics, strict=True):
        own.finish([total.clone() for total in sums])  # type: ignore[union-attr]
        for key, buffer in plain.named_buffers():
            torch.testing.assert_close(
                module.get_buffer(key), buffer, rtol=1e-12, atol=1e-12, msg=key
            )


def test_only_layers_that_train_and_keep_averages_are_tracked() -> None:
    assert tracked(nn.BatchNorm2d(3))
    assert not tracked(nn.BatchNorm2d(3).eval())
    assert not tracked(nn.BatchNorm2d(3, track_running_stats=False))
    assert not tracked(nn.InstanceNorm2d(3))
    assert not tracked(nn.GroupNorm(1, 3))


def test_a_forward_that_fails_leaves_the_averages_in_place() -> None:
    module = nn.BatchNorm2d(3)
    held = dict(module.named_buffers())
    statistics = Statistics([(module, 1)], 2)
    with pytest.raises(ValueError), statistics.during(0):
        module(torch.zeros(1, 3, 1, 1))
    assert all(module.get_buffer(name) is buffer for name, buffer in held.items())


def test_backward_may_still_use_what_forward_saw() -> None:
    """Averages that were overwritten between forward and backward would be an error in PyTorch."""
    module = nn.BatchNorm2d(3)
    statistics = Statistics([(module, 1)], 2)
    results = []
    for position in range(2):
        with statistics.during(position):
            results.append(module(torch.randn(2, 3, 2, 2)).square().sum())
    statistics.finish(statistics.sums)
    for result in results:
        result.backward()


def test_a_recomputation_leaves_statistics_alone() -> None:
    module: Any = nn.BatchNorm2d(3)
    before = state_of(module)
    held = dict(module.named_buffers())
    with unrecorded([module]):
        module(torch.randn(2, 3, 2, 2))
    assert all(torch.equal(b, before[name]) for name, b in module.named_buffers())
    assert all(module.get_buffer(name) is buffer for name, buffer in held.items())


# --- layers derived from BatchNorm, with a forward of their own -----------------------------------


class NormAct(nn.BatchNorm2d):
    """As timm writes it: counts, normalises by function, then an activation in place.

    `other` makes it average with another momentum than its own, `more` count another time.
    """

    def __init__(self, channels: int, other: float = 0.0, more: int = 0) -> None:
        super().__init__(channels, momentum=0.3)
        self.other, self.more = other, more
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.num_batches_tracked is not None and self.momentum is not None
        for _ in range(1 + self.more):
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, True,
            self.momentum + self.other, self.eps,
        )  # fmt: skip
        return self.act(self.drop(x))


def normed(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    layers = (nn.Conv2d(3, 4, 3), NormAct(4, **options), nn.Conv2d(4, 4, 3), NormAct(4, **options))
    return nn.Sequential(*layers, last).double()


OWN_FORWARD = {
    "both directions": Plan(stages=2, replications=2, schedule="gems"),
    "copies": Plan(stages=2, micro_batches=2, schedule="1f1b", data=2),
    "recomputed": Plan(stages=2, micro_batches=4, schedule="1f1b", recompute="always"),
    "tiles": Plan(stages=2, micro_batches=2, schedule="gems", spatial=[(1, 2)]),
}


@pytest.mark.parametrize("name", OWN_FORWARD)
def test_a_batch_norm_with_a_forward_of_its_own_keeps_the_averages_of_one_rank(name: str) -> None:
    model, plan = normed(), OWN_FORWARD[name]
    data = batches((8, 3, 12, 12), 5, 2, torch.float64)
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


@pytest.mark.parametrize("options", [{"other": 0.1}, {"more": 1}], ids=["momentum", "count"])
def test_averages_by_a_rule_of_their_own_are_rejected_where_several_ranks_take_them(
    options: dict[str, Any],
) -> None:
    data = batches((8, 3, 12, 12), 5, 2, torch.float64)
    with pytest.raises(PlanError, match=r"running_mean is changed by 1\.batch_norm on ranks"):
        planned(normed(**options), data, OWN_FORWARD["both directions"])
    plan = Plan(stages=2, micro_batches=2, schedule="1f1b")  # one rank sees all samples, in order
    assert_equal(planned(normed(**options), data, plan), plainly(normed(**options), data, 2))
