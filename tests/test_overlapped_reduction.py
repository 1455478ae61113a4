"""Gradients that are all-reduced while backward still runs: the numbers of the plain loop, chunks
that really begin early, in one order on all ranks, and a late gradient that raises."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from gems.distributed.cores import have_spare_cores
from gems.errors import GemsError, PeerError
from gems.plans.plan import Plan
from gems.torch import distributed_model
from gems.torch.runtime.step_state import StepState
from gems.torch.state import grad_bucket
from gems.torch.state.grad_bucket import BucketMemory, GradBucket
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import assert_equal, batches, drawing, plainly, planned, sgd, trained
from tests.worlds import spawn

SMALL = 256  # bytes: several chunks of a small network


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Small chunks, and cores to reduce them on, however few this machine has."""
    with mock.patch.object(grad_bucket, "LEAST", SMALL), spare(True):
        yield


def spare(there: bool) -> Any:
    return mock.patch.object(distributed_model, "have_spare_cores", lambda *_: there)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        for layer in self.body:
            x = x + layer(x).relu()
        return self.head(x.mean((2, 3)))


class Shared(Network):
    """A layer in two checkpoint regions: its gradient is accumulated twice in one backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        for layer in (*self.body, self.body[0]):
            x = x + checkpoint(layer, x, use_reentrant=False).relu()
        return self.head(x.mean((2, 3)))


class Unused(Network):
    """One layer is never used: no gradient on any rank, and none in the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        for layer in (self.body[0], self.body[3]):
            x = x + layer(x).relu()
        return self.head(x.mean((2, 3)))


def network(kind: type[nn.Module] = Network) -> nn.Module:
    with drawing(0):
        return kind().double()


def data(steps: int = 3, samples: int = 8) -> list[Any]:
    return batches((samples, 3, 8, 8), 5, steps, torch.float64)


@contextmanager
def counted() -> Iterator[list[tuple[int, int]]]:
    """For each step and rank, the chunks that began inside backward, and all."""
    found: list[tuple[int, int]] = []
    packed = GradBucket.pack

    def pack(bucket: GradBucket) -> Any:
        found.append((bucket.begun, len(bucket.chunks)))
        return packed(bucket)

    with mock.patch.object(GradBucket, "pack", pack):
        yield found


def begun(kind: type[nn.Module], plan: Plan) -> list[tuple[int, int]]:
    model = network(kind)
    with counted() as found:
        run(2, lambda transport: trained(transport, copy.deepcopy(model), data(), plan))
    return found


PLANS = {
    "two copies": Plan(stages=1, data=2),
    "three copies": Plan(stages=1, data=3, micro_batches=2),
    "pipelines": Plan(stages=2, micro_batches=2, schedule="1f1b", data=2),
    "recompute": Plan(stages=1, data=2, micro_batches=2, recompute="always"),
    "zero bubble": Plan(stages=2, micro_batches=2, schedule="zero-bubble", data=2),
    "both directions": Plan(stages=2, schedule="gems", data=2),
    "tiles": Plan(stages=2, spatial=["1x2"], micro_batches=2),
    "at the end": Plan(stages=1, data=2, grad_sync="end"),
}


@pytest.mark.parametrize("kind", [Network, Shared, Unused])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_gradients_are_those_of_the_plain_loop(plan: Plan, kind: type[nn.Module]) -> None:
    if kind is Shared and plan.cut:
        pytest.skip("a checkpoint region over a layer of another stage")
    model = network(kind)
    assert_equal(planned(model, data(), plan), plainly(model, data(), plan.total))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_without_a_spare_core_nothing_begins_inside(plan: Plan) -> None:
    model = network()
    with spare(False), counted() as found:
        assert_equal(planned(model, data(), plan), plainly(model, data(), plan.total))
    assert found and not any(begun for begun, _ in found)


def test_auto_is_chosen_by_the_cores() -> None:
    def chosen(plan: Plan) -> list[str]:
        def built(transport: Transport) -> str:
            return Trainer(
                network(), cross_entropy, sgd, data(1)[0][0], plan, transport=transport
            ).plan.grad_sync

        return run(2, built)

    assert chosen(Plan(stages=1, data=2)) == ["overlap"] * 2
    with spare(False):
        assert chosen(Plan(stages=1, data=2)) == ["stage"] * 2
        assert chosen(Plan(stages=1, data=2, grad_sync="overlap")) == ["overlap"] * 2


HOSTS = {
    "all cores compute": ([("a", [0, 1], 1), ("a", [0, 1], 1)], False),
    "one is left": ([("a", [0, 1, 2], 1), ("a", [0, 1, 2], 1)], True),
    "two threads each": ([("a", [0, 1, 2], 2), ("a", [0, 1, 2], 2)], False),
    "bound apart": ([("a", [0, 1], 1), ("a", [2, 3], 1)], True),
    "one is bound to one": ([("a", [0, 1], 1), ("a", [2], 1)], False),
    "two hosts": ([("a", [0, 1], 1), ("b", [0, 1], 1)], True),
}


@pytest.mark.parametrize(("ranks", "spare"), HOSTS.values(), ids=HOSTS)
def test_a_core_is_spare_if_no_rank_computes_on_it(ranks: list[Any], spare: bool) -> None:
    transport = mock.Mock(all_gather_object=lambda _: ranks)
    assert have_spare_cores(transport, 1) is spare


def test_memory_is_used_again_unless_somebody_has_a_gradient_there() -> None:
    memory = BucketMemory()
    kind = torch.float64, torch.device("cpu")
    first = memory.zeros(0, kind, 8)
    held, at = first[2:4].data.fill_(1), first.data_ptr()
    del first
    second = memory.zeros(0, kind, 8)
    assert second.data_ptr() != at and held.tolist() == [1, 1] and not second.any()
    at = second.fill_(1).data_ptr()
    del second
    assert memory.zeros(0, kind, 8).data_ptr() == at and not memory.zeros(0, kind, 8).any()


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_copies_without_samples_keep_the_order(samples: int) -> None:
    """A copy that runs nothing begins all chunks after backward, its peer begins them inside."""
    model, plan = network(), Plan(stages=1, data=2, micro_batches=2)
    given = [*data(2), *data(1, samples), *data(2)]
    assert_equal(planned(model, given, plan), plainly(model, given, plan.total))


def test_chunks_begin_inside_backward_from_the_second_step_on() -> None:
    found = begun(Network, Plan(stages=1, data=2))
    chunks = found[0][1]
    assert chunks > 3
    assert found == [(0, chunks)] * 2 + [(chunks, chunks)] * 4


@pytest.mark.parametrize(("micro_batches", "late"), [(1, True), (2, False)])
def test_only_one_backward_takes_gradients_over_as_they_come(
    micro_batches: int, late: bool
) -> None:
    """Adding the only gradient of a step to zeros costs two more passes over memory."""
    seen: list[list[bool]] = []
    place = StepState.place_gradients

    def placed(state: StepState, stage: int, weights: Any) -> None:
        if stage not in state.buckets:
            place(state, stage, weights)
            seen.append([chunk.memory is None for chunk in state.buckets[stage].chunks])

    with mock.patch.object(StepState, "place_gradients", placed):
        begun(Network, Plan(stages=1, data=2, micro_batches=micro_batches))
    assert len(seen) == 6
    assert all(found and set(found) == {late} for found in seen)


def test_none_begin_inside_where_two_stages_have_the_same_ranks() -> None:
    found = begun(Network, Plan(stages=2, schedule="gems"))
    assert set(found) == {(0, 0)}


def test_chunks_stop_at_a_weight_without_a_gradient() -> None:
    found = begun(Unused, Plan(stages=1, data=2))
    assert all(0 < early < chunks for early, chunks in found[2:])


def test_a_gradient_that_comes_late_raises() -> None:
    """A hook that writes a gradient after its chunk began would write into what is being summed."""
    model = network()

    def work(transport: Transport) -> None:
        own = copy.deepcopy(model)
        trainer = Trainer(own, cross_entropy, sgd, data()[0][0][:4], Plan(stages=1, data=2),
                          transport=transport)  # fmt: skip
        own.stem.weight.register_hook(lambda g: own.head.weight.grad.mul_(2).sum() * 0 + g)
        for inputs, targets in data():
            trainer.step(inputs, targets)

    with pytest.raises((GemsError, PeerError), match=r"after its all-reduce had begun.*grad_sync"):
        run(2, work)


def on_process(transport: Transport, plan: Plan) -> Any:
    with mock.patch.object(grad_bucket, "LEAST", SMALL):
        return trained(transport, network(), data(), plan)


@pytest.mark.parametrize("plan", [PLANS["two copies"], PLANS["pipelines"]], ids=["data", "1f1b"])
def test_over_processes(plan: Plan) -> None:
    found = spawn(plan.world, partial(on_process, plan=plan))
    expected = plainly(network(), data(), plan.total)
    assert found[0].losses == pytest.approx(expected.losses, rel=1e-10)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found[0].state[name], tensor, rtol=1e-10, atol=1e-12)
