"""NCCL's communicators: how many, in which order they are first used, how often something is
launched. All of it over a double of torch.distributed (fake_nccl.py), under the real TorchDist: no
GPU was here."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gems.distributed.links import neighbours
from gems.errors import GemsError, PeerError
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.communicators import Communicators, bound
from gems.transport.protocol import EXCHANGES, Transport
from gems.transport.threads import run
from gems.transport.torch_distributed import TorchDist
from tests.exact import Recordings, batches, plainly, sgd
from tests.fake_nccl import Fabric, run_nccl

Found = tuple[list[float], dict[str, torch.Tensor], list[int]]  # losses, weights, launches


def net() -> nn.Module:
    """Four times convolution, norm and ReLU: the example of issue 15."""
    torch.manual_seed(0)
    body = [
        layer
        for _ in range(4)
        for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
    ]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))


def data(samples: int, side: int) -> list[Any]:
    return batches((samples, 3, side, side), 10, 2, torch.float32)


def trained(transport: Transport, model: nn.Module, plan: Plan, sample: int = 16) -> Found:
    """Two steps, and what each launched on this rank. The trainer is made with `sample` rows."""
    fabric = transport.communicators.host.fabric if isinstance(transport, TorchDist) else Fabric(1)
    given = torch.empty(1, 3, sample, sample)
    loss = nn.functional.cross_entropy
    trainer = Trainer(
        copy.deepcopy(model), loss, sgd, given, plan, transport=transport, device="cpu"
    )
    losses, counts = [], []
    for inputs, targets in data(plan.total, 16):
        before = fabric.launches[transport.rank]
        losses.append(trainer.step(inputs, targets).loss)
        counts.append(fabric.launches[transport.rank] - before)
    return losses, trainer.state_dict(), counts


def over_nccl(plan: Plan, **options: Any) -> tuple[list[Found], Fabric]:
    model = net()
    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        return run_nccl(plan.world, lambda transport: trained(transport, model, plan, **options))


def over_threads(plan: Plan, **options: Any) -> list[Found]:
    model = net()
    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        return run(plan.world, lambda transport: trained(transport, model, plan, **options))


# --- how many -------------------------------------------------------------------------------------

# Of each rank: communicators, and launches per step. Before one communicator per spatial group and
# one operation per exchange, a rank of 4x4 tiles had 31, and launched 398 times.
FAMILIES: dict[str, tuple[Plan, list[int], list[int]]] = {
    "data": (Plan(stages=1, data=2), [1] * 2, [2] * 2),
    "1f1b": (
        Plan(stages=4, micro_batches=8, schedule="1f1b"),
        [2, 4, 4, 2],  # one per direction and neighbour
        [16, 32, 32, 16],
    ),
    "gems": (Plan(stages=2, schedule="gems", replications=1), [3] * 2, [6] * 2),
    "zero=3": (
        Plan(stages=2, ranks=1, schedule="sequential", data=2, zero=3),
        [1] * 2,
        [7] * 2,
    ),
    "2x2": (Plan(stages=1, spatial=["2x2"]), [2] * 4, [18] * 4),
    "4x4": (Plan(stages=1, spatial=["4x4"]), [2] * 16, [18] * 16),
    "4x4 d2": (Plan(stages=1, spatial=["4x4"], halo="d2"), [2] * 16, [12] * 16),
    "2x2 gems": (
        Plan(stages=2, schedule="gems", replications=1, spatial=["2x2"]),
        [11, 7, 7, 7, 11],
        [26, 33, 33, 33, 26],
    ),
    "2x2 to 2x2": (
        Plan(stages=2, micro_batches=2, schedule="1f1b", spatial=["2x2", "2x2"]),
        [4] * 8,  # a tile goes to the rank of the same tile, not to all four
        [22] * 8,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_communicators_and_launches_are_few_and_the_numbers_exact(name: str) -> None:
    plan, communicators, launches = FAMILIES[name]
    plan = replace(plan, grad_sync="overlap")  # which is auto's choice on GPUs
    found, fabric = over_nccl(plan)
    assert [fabric.communicators(rank) for rank in range(plan.world)] == communicators
    assert [counts[-1] for _, _, counts in found] == launches
    plain = plainly(net(), data(plan.total, 16), plan.total).losses
    assert all(losses == pytest.approx(plain, rel=1e-5) for losses, _, _ in found)
    if plan.world < 16:  # bit by bit what threads give, which other tests compare in float64
        for (losses, weights, _), (theirs, held, _) in zip(found, over_threads(plan), strict=True):
            assert losses == theirs
            assert all(torch.equal(weight, held[key]) for key, weight in weights.items())


def test_images_of_another_size_need_other_links() -> None:
    """Of 4 rows, the second of three tiles is in the second half; of 16 it is in both."""
    plan = Plan(stages=2, balance=(4, 11), schedule="gpipe", spatial=["3x1", "2x1"])
    expected, (found, _) = over_threads(plan, sample=4), over_nccl(plan, sample=4)
    assert [losses for losses, _, _ in found] == [losses for losses, _, _ in expected]


def test_neighbours_meet_in_a_side_or_a_corner() -> None:
    pairs = neighbours((4, 4), tuple(range(10, 26)))
    assert len(pairs) == len(set(pairs)) == 84
    assert sorted(b for a, b in pairs if a == 10) == [11, 14, 15]
    assert sorted(b for a, b in pairs if a == 15) == [10, 11, 12, 14, 16, 18, 19, 20]


# --- the first use --------------------------------------------------------------------------------

COLD = {
    "sequential": Plan(stages=3, micro_batches=2, schedule="sequential"),
    "gems": Plan(stages=3, schedule="gems", replications=2),
    "tiles": Plan(stages=2, micro_batches=2, schedule="gpipe", spatial=["2x1"]),
}


@pytest.mark.parametrize("name", COLD)
def test_a_step_hangs_if_its_first_messages_are_the_first_use_of_communicators(name: str) -> None:
    """The hang of issue 15, so that the double is known to find it; and none once all are warm."""
    with (
        mock.patch.object(Communicators, "_warm_up", lambda *args: None),
        pytest.raises(PeerError, match="waits for the first use of"),
    ):
        over_nccl(COLD[name])
    expected, (found, _) = over_threads(COLD[name]), over_nccl(COLD[name])
    assert [losses for losses, _, _ in found] == [losses for losses, _, _ in expected]


def test_a_process_group_of_gpus_is_bound_to_the_device_of_this_rank() -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "current_device", lambda: 3),
    ):
        assert bound("nccl") == {"device_id": torch.device("cuda", 3)}
        assert bound("gloo") == {}


def test_all_that_was_prepared_is_used_by_all_before_prepare_returns() -> None:
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]

    def work(transport: TorchDist) -> None:
        transport.prepare([(0, 2), (1,)], pairs, {(0, 1, 2): pairs})
        transport.prepare([(0, 2)], [(0, 1)], {(0, 1, 2): pairs})  # nothing new
        launches = transport.communicators.host.fabric.launches[transport.rank]
        assert launches == 4 + (transport.rank != 1) + 2

    _, fabric = run_nccl(3, work)
    assert [fabric.communicators(rank) for rank in range(3)] == [6, 5, 6]
    assert all(len(ranks) > 1 for ranks in fabric.used.values())


def test_what_was_not_prepared_is_rejected_and_not_made_on_the_way() -> None:
    def work(transport: TorchDist) -> None:
        buffer, other = torch.zeros(4), 1 - transport.rank
        for begin in (
            lambda: transport.isend(buffer, other),
            lambda: transport.all_reduce(buffer, (0, 1)),
            lambda: transport.exchange([(buffer, other)], [], (0, 1)),
            lambda: transport.all_gather(buffer, (0, 1), EXCHANGES),
        ):
            with pytest.raises(GemsError, match=r"no communicator of ranks .*prepare\(\)"):
                begin()

    run_nccl(2, work)


# --- host memory ----------------------------------------------------------------------------------


def test_some_ranks_sum_host_memory_and_the_others_need_not_come() -> None:
    """It went to the group of all ranks, and waited for the others."""

    def work(transport: TorchDist) -> list[list[float]]:
        if transport.rank == 1:
            return []
        found = []
        for begin in (transport.all_reduce, transport.reduce_scatter):
            mine = torch.tensor([1.0, 0.5], dtype=torch.float64) * 3**transport.rank
            begin(mine, (0, 2)).wait()
            found.append(mine.tolist())
        mine = torch.full((4,), float(transport.rank), dtype=torch.float64)
        transport.all_gather(mine, (0, 2)).wait()
        return [*found, mine.tolist()]

    found, fabric = run_nccl(3, work)
    assert found == [[[10.0, 5.0], [10.0, 5.0], [0.0, 0.0, 2.0, 2.0]], [], found[0]]
    assert not fabric.launches
