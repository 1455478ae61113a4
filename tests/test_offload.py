"""What waits for backward is put away, on the host or on disk: the same numbers, less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gems.draw.chrome import chrome
from gems.draw.svg import svg
from gems.errors import PlanError
from gems.hardware import Link, machine
from gems.model.costs import Cost, Costs, unit
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.schedule import greedy
from gems.schedule.action import Kind, Schedule, parse
from gems.schedule.build import lowered
from gems.schedule.lower.passes import lower
from gems.schedule.validate import check
from gems.torch.autograd.saved_tensors import PackedTensor, SavedTensors
from gems.torch.offload.activations import OffloadedTensor, OffloadedTensors
from gems.torch.offload.stores import HostStore, Slot, Work
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import (
    Outcome,
    alone,
    assert_equal,
    batches,
    drawing,
    join,
    plainly,
    planned,
    same_state,
    sgd,
    trained,
)
from tests.test_generated import LAYERS, RANDOM, Generated, loss, networks, plans, sizes, some_data
from tests.test_recompute import Rough, known
from tests.test_spatial_plans import all_but, classifier, labelled
from tests.test_zero import assert_same
from tests.test_zero import planned as shared
from tests.worlds import spawn

Tensor = torch.Tensor
GPIPE = Plan(stages=2, schedule="gpipe", micro_batches=6, offload="activations")

# --- the order ------------------------------------------------------------------------------------


def test_stores_follow_messages_and_loads_come_one_action_early() -> None:
    """Sample 4 of 6 stays: when it has left, it must return."""
    first = str(lowered(GPIPE)).splitlines()[0]
    assert first == (
        "0: 0F0 0F0>1 0S0 0F1 0F1>1 0S1 0F2 0F2>1 0S2 0F3 0F3>1 0S3 0F4 0F4>1 0B5<1 0F5 0F5>1 "
        "0B4<1 0B5 0B3<1 0L3 0B4 0B2<1 0L2 0B3 0B1<1 0L1 0B2 0B0<1 0L0 0B1 0B0 0A 0O"
    )
    assert parse(str(lowered(GPIPE))) == lowered(GPIPE)


def test_what_is_recomputed_is_loaded_for_that() -> None:
    plan = Plan(stages=3, micro_batches=6, recompute="always", offload="activations")
    rows = str(lowered(plan)).splitlines()
    assert "S" not in rows[0], "stage 0 reads the batch, and keeps nothing"
    assert "1L2 1F3" in rows[1] and "1F3 1F3>2 1S3 1B2<2 1R2" in rows[1]
    assert "S" not in rows[2], "backward follows at once"


def test_one_action_under_way_leaves_nothing_to_put_away() -> None:
    for plan in (Plan(stages=2), Plan(stages=4, schedule="gems", replications=2)):
        assert lowered(replace(plan, offload="activations")) == lowered(plan)


def changed(old: str, new: str) -> list[str]:
    text = str(lowered(GPIPE))
    assert old in text
    found = check(parse(text.replace(old, new, 1)), GPIPE)
    return [fault.partition(": ")[2] for fault in found]


def test_check_finds_stores_and_loads_that_are_missing_doubled_or_for_nothing() -> None:
    assert not check(lowered(GPIPE), GPIPE)
    assert changed("0L3 ", "") == ["0B3 reads what is stored; it needs 0L3 before it"]
    assert changed("0S3 ", "") == ["0L3, but it is not stored"]
    assert changed("0S3 ", "0S3 0S3 ") == ["0S3, but it is stored already"]
    assert changed("0L3 ", "0L3 0L3 ") == ["0L3, but it is loaded already"]
    assert changed("0B0 0A", "0B0 0S0 0A") == ["0S0, but it is used already"]
    stays = check(lowered(GPIPE), replace(GPIPE, offload=()))
    assert stays[0] == ("rank 0, step 2: 0S0 has nothing to do: the plan offloads no activations")
    early = parse(str(lowered(GPIPE)).replace("0F0 0F0>1 0S0", "0S0 0F0 0F0>1"))
    assert check(early, GPIPE)[0].startswith("rank 0, step 0: 0S0 waits forever for 0F0")


@pytest.mark.parametrize("stages", (1, 3, 5))
@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("both", (False, True))
def test_greedy_orders_under_a_cap_may_have_all_samples_under_way(
    stages: int, ranks: int, both: bool
) -> None:
    """Of whole backwards, three stages' stashes are here at most, whatever the priority."""
    seconds = (1.0, 3.0, 2.0, 1.0, 2.0)
    costs = Costs(tuple(Cost(f=f, activations=100.0, weights=1.0) for f in seconds[:stages]))
    options: dict[str, Any] = {"ranks": min(stages, ranks), "bidirectional": both}
    plan = Plan(stages=stages, schedule="auto", micro_batches=9, offload="activations", **options)
    for priority in greedy.PRIORITIES.values():
        order = greedy.order(plan, costs, memory=300.0, split=False, priority=priority)
        found = simulate(lower(order, plan), plan, costs)
        assert max(peak.activations for peak in found.peaks) <= 300
    with pytest.raises(PlanError, match="3 stages of a micro-batch need 300"):
        greedy.order(plan, costs, memory=299.0, split=False)


# --- seconds --------------------------------------------------------------------------------------


def test_stores_and_loads_travel_beside_the_work_and_are_waited_for() -> None:
    """Forward and backward take 1 and 2 s, a stash 0.75 s or 3 s either way."""
    plan = Plan(stages=1, schedule="gpipe", micro_batches=5, offload="activations")
    costs = Costs((Cost(activations=300.0, weights=1.0),))
    order, on = lowered(plan, costs), machine("v100")

    def took(bandwidth: float, plan: Plan = plan) -> float:
        way = Link(bandwidth, 0.0)
        return simulate(order, plan, costs, replace(on, host_link=way, disk=way)).seconds

    assert took(400.0) == 15.0, "nothing waits"
    # 0S0 ends at 4, before 0F2; 0S1 at 8, before 0F3; 0S2 at 12, before 0F4, which ends at 13.
    # 0B4 to 15. 0L2 was asked for at 13 and is there at 16; 0L1 begins at 16, and so on.
    assert took(100.0) == 24.0
    assert took(100.0, replace(plan, offload="activations:disk")) == 24.0, (
        "to and fro never overlap"
    )
    assert simulate(order, plan, costs).seconds == 15.0, "without a machine they take no time"


def test_a_core_that_offloads_makes_the_calls_and_copies_itself() -> None:
    """A fast disk, but 3 tensors at 0.5 s for call and turn, 300 bytes at 200 bytes a second, in 3
    stores and 3 loads; the host of a GPU goes on meanwhile."""
    plan = Plan(stages=1, schedule="gpipe", micro_batches=5, offload="activations:disk")
    costs = Costs((Cost(activations=300.0, weights=1.0, tensors=3.0),))
    host, gpu = (machine(name) for name in ("cpu", "v100"))
    fast, copy = Link(1e12, 0.25), Link(200.0, 0.0)
    core = replace(host, device=replace(host.device, call=0.25), host_link=copy, disk=fast)
    order = lowered(plan, costs)
    assert sum(str(a)[1] in "SL" for _, a in order) == 6
    assert simulate(order, plan, costs, core).seconds == pytest.approx(15 + 6 * (1.5 + 1.5))
    there = replace(gpu, host_link=copy, disk=Link(1e12, 0.0))
    assert simulate(order, plan, costs, there).seconds == pytest.approx(15.0)
    adam = Plan(stages=1, schedule="gpipe", micro_batches=5, offload="optimizer:disk")
    costs = Costs((Cost(weights=1.0, gradients=1.0, trained=7.0),))
    assert simulate(lowered(adam, costs), adam, costs, core).seconds == pytest.approx(
        15 + 0.25 + 2 * 2 * 7 * 0.5  # two tensors per weight, read and written, after one latency
    )
    drawn = [(e.rank, e.action) for e in simulate(order, plan, costs, core).events]
    assert len(drawn) == len(set(drawn)), "each action once"


def test_stores_are_drawn_beside_the_work() -> None:
    found = simulate(lowered(GPIPE), GPIPE, unit(2))
    assert found.bubble == pytest.approx(1 / 7), "as without: the links' time is not the ranks'"
    drawn = svg(found, "", GPIPE)
    assert ">store<" in drawn and ">load<" in drawn and "0S0 on rank 0" in drawn
    trace = chrome(found, "", GPIPE)
    assert '"offload"' in trace
    stays = replace(GPIPE, offload=())
    assert '"offload"' not in chrome(simulate(lowered(stays), stays, unit(2)), "", stays)


# --- the same numbers -----------------------------------------------------------------------------


def tried(model: nn.Module, data: list[Any], plan: Plan, loss: Any, oracle: Any = plainly) -> None:
    """Under real costs, an order may have nothing to put away; it is refused then."""
    try:
        found = (shared if plan.zero else planned)(model, data, plan, loss)
    except PlanError as error:
        if "none wait so long" in str(error):
            reject()
        raise
    expected = oracle(model, data, plan.total, loss)
    (assert_same if plan.zero else assert_equal)(found, expected)


@st.composite
def putting_away(draw: Any) -> Plan:
    entries = ("never", "never", "always", "except_last", ("layers.0", "layers.2", "head"))
    recompute, offload = draw(st.sampled_from(entries)), "activations"
    some = draw(
        plans().filter(lambda p: puts_away(replace(p, recompute=recompute, offload=offload)))
    )
    levels = (0, 0, 2) if some.bidirectional else (0, 0, 2, 3)
    return replace(
        some,
        recompute=recompute,
        offload=draw(st.sampled_from(("activations", "activations:disk"))),
        zero=draw(st.sampled_from(levels)) if some.data > 1 else 0,
    )


def puts_away(plan: Plan) -> bool:
    return any(action.kind is Kind.STORE for _, action in lowered(plan))


@settings(
    max_examples=settings().max_examples // 8,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
@given(networks([*LAYERS, *RANDOM]), putting_away(), sizes, st.booleans())
def test_a_generated_model_whose_stash_is_put_away_trains_like_the_plain_one(
    model: Generated, plan: Plan, samples: list[int], extra: bool
) -> None:
    tried(model, some_data(samples, extra), known(plan, model), loss, alone)


TWO = {"stages": 2, "balance": (6, 7), "micro_batches": 5}
TEAMS = {
    "tiles": Plan(**TWO, spatial="2x2", schedule="gpipe", offload="activations:disk"),
    "tiles, inputs": Plan(
        stages=3, balance=(3, 4, 6), micro_batches=5, spatial=("2x1", "1x2"), schedule="gpipe",
        recompute=("never", "always", "always"), offload="activations",
    ),
    "tiles, runs, split": Plan(
        **TWO, spatial="1x2", local_dp=2, schedule="zero-bubble", recompute=(all_but("3"), "never"),
        offload="activations",
    ),
    "tiles, both ways": Plan(
        stages=5, balance=(2, 2, 3, 3, 3), placement=((0, 1), 0, 1, 0, 1), spatial="2x1",
        schedule="sequential", bidirectional=True, micro_batches=2, offload="activations:disk",
    ),
    "tiles, zero 3": Plan(
        **TWO, spatial="2x1", local_dp=2, schedule="gpipe", zero=3, halo="d2",
        offload="activations",
    ),
    "split": Plan(
        **(TWO | {"micro_batches": 8}), schedule="zero-bubble", offload="activations:disk"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEAMS)
def test_teams_put_away_as_well(name: str) -> None:
    plan = TEAMS[name]
    assert puts_away(plan)
    data = labelled(plan.total, 1)
    tried(classifier(), data, plan, F.cross_entropy)


def streamed() -> nn.Module:
    with drawing(0):
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(),
            nn.Conv2d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
        ).double()  # fmt: skip


def test_a_streamed_stage_puts_away_what_it_received() -> None:
    plan = Plan(
        stages=3, balance=(2, 4, 2), stream=("1x2", "2x2"), schedule="gpipe", micro_batches=5,
        offload="activations",
    )  # fmt: skip
    data, found = labelled(5, 1), {}
    for place in ("activations:disk", ()):
        found[place] = planned(streamed(), data, replace(plan, offload=place))
        assert_equal(found[place], plainly(streamed(), data, 5))
    away, stays = (
        max(m.activations for _, m in found[k].timeline.memory[1]) for k in ("activations:disk", ())
    )
    assert away <= 3 / 5 * stays


def test_what_is_easily_done_twice_is_done_once() -> None:
    """Norms that average, a checkpoint inside the model, a spectral norm, a count, a tied layer."""
    torch.manual_seed(0)
    model, data = Rough().double(), batches((6, 3, 6, 6), 5, 2, torch.float64)
    for recompute in ("never", "always"):
        plan = Plan(stages=4, ranks=1, schedule="sequential", micro_batches=2, recompute=recompute)
        found = planned(model, data, replace(plan, offload="activations"))
        assert_equal(found, planned(model, data, plan), 0.0)
        assert_equal(found, plainly(model, data, 2))


class Strides(nn.Module):
    """What autograd saves here are views: turned, broadcast, of a part, two of one memory, of
    numbers taken for others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x.flatten(1)[:, :36].view(-1, 6, 6)).tanh()
        x = x.transpose(1, 2) @ x[:, 2:].transpose(1, 2) @ x[:, :4, ::2] @ x[:, :3]
        picture = x[:, None].expand(-1, 2, -1, -1).contiguous(memory_format=torch.channels_last)
        x = (self.conv(picture).exp().sigmoid() * picture).sum(1)
        x = torch.view_as_real(torch.complex(x, x.sin()) ** 2).prod(-1)
        return self.b(x * x.mean((1, 2), keepdim=True).expand_as(x)).sum(1)


def test_views_come_back_as_they_were() -> None:
    torch.manual_seed(0)
    model = Strides().double()
    data = [(torch.randn(5, 3, 4, 4).double(), torch.arange(5)) for _ in range(2)]
    plan = Plan(schedule="gpipe", micro_batches=5, offload="activations")
    for place in ("activations", "activations:disk"):
        found = planned(model, data, replace(plan, offload=place))
        assert_equal(found, planned(model, data, replace(plan, offload=())), 0.0)
        assert_equal(found, plainly(model, data, 5))


def over_gloo(transport: Transport, plans: list[Plan]) -> list[Outcome]:
    return [trained(transport, classifier(), labelled(5, 1), plan) for plan in plans]


def test_gloo_processes_come_to_the_plain_model() -> None:
    split = replace(TEAMS["split"], stages=3, balance=(3, 5, 5), micro_batches=5, ranks=3)
    tiles = replace(TEAMS["tiles"], spatial="1x2", ranks=3, recompute=(all_but("4"), "never"))
    plans = [tiles, split]
    expected = plainly(classifier(), labelled(5, 1), 5)
    for outcomes in zip(*spawn(3, over_gloo, plans), strict=True):
        assert_equal(join(list(outcomes)), expected)


# --- less memory ----------------------------------------------------------------------------------


def test_a_rank_has_two_stashes_of_eight_and_the_rest_on_disk() -> None:
    plan = Plan(**(TWO | {"micro_batches": 8}), schedule="gpipe")
    data = labelled(8, 1)
    stays = planned(classifier(), data, plan).timeline
    away = planned(classifier(), data, replace(plan, offload="activations:disk")).timeline
    assert stays.max_in_flight == (8, 8) and away.max_in_flight == (2, 2)
    for rank in range(2):
        rows = [[m for _, m in timeline.memory[rank]] for timeline in (stays, away)]
        one = max(m.activations for m in rows[0]) // 8
        assert [max(m.activations for m in row) for row in rows] == [8 * one, 2 * one]
        assert [max(m.offloaded for m in row) for row in rows] == [0, 6 * one]
        assert rows[1][-1].offloaded == rows[1][-1].activations == 0


class Watched:
    """The host's memory, which notes whose bytes it took, and how many of them are still there
    when the first are asked for again."""

    def __init__(self) -> None:
        self.host = HostStore(torch.device("cpu"))
        self.written: list[tuple[StorageWeakRef, int]] = []
        self.left: int | None = None

    @property
    def used(self) -> int:
        return self.host.used

    def slot(self, size: int) -> Slot:
        return _Watched(self, self.host.slot(size))

    def close(self) -> None:
        self.host.close()


class _Watched:
    def __init__(self, home: Watched, slot: Slot) -> None:
        self.home, self.slot, self.size = home, slot, slot.size

    def write(self, tensor: Tensor) -> Work:
        memory = tensor.untyped_storage()
        self.home.written.append((StorageWeakRef(memory), memory.nbytes()))
        return self.slot.write(tensor)

    def read(self, into: Tensor) -> Work:
        if self.home.left is None:
            self.home.left = sum(size for ref, size in self.home.written if not ref.expired())
        return self.slot.read(into)

    def free(self) -> None:
        self.slot.free()


class Late:
    """A store that does nothing before it is waited for."""

    def __init__(self) -> None:
        self.host = HostStore(torch.device("cpu"))

    @property
    def used(self) -> int:
        return self.host.used

    def slot(self, size: int) -> Slot:
        return _Late(self.host.slot(size))

    def close(self) -> None:
        self.host.close()


class _Late:
    def __init__(self, slot: Slot) -> None:
        self.slot, self.size = slot, slot.size

    def write(self, tensor: Tensor) -> Work:
        return _Waited(lambda: self.slot.write(tensor))

    def read(self, into: Tensor) -> Work:
        return _Waited(lambda: self.slot.read(into.zero_()))

    def free(self) -> None:
        self.slot.free()


class _Waited:
    def __init__(self, work: Callable[[], Work]) -> None:
        self.work = work

    def wait(self) -> None:
        self.work().wait()


@pytest.mark.parametrize("recompute", ("never", "always"))
def test_nothing_goes_or_is_read_before_it_was_waited_for(recompute: str) -> None:
    plan = Plan(**TWO, schedule="gpipe", offload="activations", recompute=recompute)
    data, model = labelled(5, 1), classifier()

    def work(transport: Transport) -> dict[str, Tensor]:
        sample, mine = torch.empty(1, 3, 21, 19, dtype=torch.float64), copy.deepcopy(model)
        trainer = Trainer(mine, F.cross_entropy, sgd, sample, plan, transport=transport)
        trainer.session.runner.activation_store = Late()
        trainer.step(*data[0])
        return trainer.state_dict()

    same_state(run(2, work)[0], plainly(model, data, 5).state)


LETS_GO: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    "all": (classifier, Plan(**TWO, schedule="gpipe")),
    "inputs": (classifier, Plan(**TWO, schedule="gpipe", recompute="always")),
    "runs": (classifier, Plan(**TWO, schedule="gpipe", recompute=("never", all_but("8")))),
    "split": (
        classifier,
        Plan(stages=3, balance=(5, 6, 2), micro_batches=8, schedule="zero-bubble"),
    ),
    "tiles": (
        classifier,
        Plan(stages=2, balance=(3, 10), micro_batches=5, schedule="gpipe", spatial=("1x1", "2x1")),
    ),
    "streamed": (
        streamed,
        Plan(stages=3, balance=(2, 4, 2), stream=("1x2", "2x2"), schedule="gpipe", micro_batches=5),
    ),
}


@pytest.mark.parametrize("name", LETS_GO)
def test_what_is_stored_is_really_gone_and_as_much_as_was_counted(name: str) -> None:
    """On rank 1, whose stage reads no batch, which its user holds."""
    make, plan = LETS_GO[name]
    plan = replace(plan, offload="activations")
    data = labelled(plan.total, 1)[0]

    def work(transport: Transport) -> tuple[Watched, list[int], Any]:
        sample = torch.empty(1, 3, 21, 19, dtype=torch.float64)
        trainer = Trainer(make(), F.cross_entropy, sgd, sample, plan, transport=transport)
        trainer.session.runner.activation_store = store = Watched()
        away, adapter, stored = [], trainer.session.adapter, trainer.session.adapter.store

        def noted(stage: int, micro_batch: int) -> list[Any]:
            handles = stored(stage, micro_batch)
            away.append(adapter.activation_bytes(stage, micro_batch))
            return handles

        adapter.store = noted  # type: ignore[method-assign]
        trainer.step(*data)
        assert store.used == 0, "all slots are free in the end"
        return store, away, trainer.plan

    store, away, _ = run(plan.world, work)[1]
    assert away and store.written and store.left in (0, len(away) * data[1].nbytes), "labels"
    written = sum(size for _, size in store.written)
    assert written == pytest.approx(sum(away), rel=0.02)


def test_what_stays_is_looked_at_and_nothing_more() -> None:
    weight = torch.ones(3, requires_grad=True)
    offloaded = OffloadedTensors({weight.untyped_storage()._cdata}, torch.device("cpu"))
    saved = SavedTensors(offloaded)
    stays = saved.pack(weight, weight._version)
    assert isinstance(stays, PackedTensor) and not offloaded.packed
    assert stays.unpack() is not None
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stays.unpack()
    assert saved.pack(x := torch.empty(0), None) is x
    assert saved.pack(y := torch.complex(torch.ones(2), torch.ones(2)).conj(), None) is y
    assert saved.pack(z := torch.eye(2).to_sparse(), None) is z


# --- what goes wrong ------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).exp()
        z = y * 2
        y.add_(1)  # exp wants it as it was
        return z + y


@pytest.mark.parametrize("offload", ((), "activations"))
def test_what_changed_in_place_is_found_out(offload: Any) -> None:
    data = [(torch.randn(5, 4), torch.arange(5) % 4)]
    plan = Plan(schedule="gpipe", micro_batches=5, offload=offload)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        planned(InPlace(), data, plan)


class InPlaceOnImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).exp()
        z = y * 2
        y.add_(1)
        return (z + y).mean((2, 3))


def test_what_changed_in_place_on_tiles_is_found_out() -> None:
    """Autograd does not check tensors that hooks pack, and those of tiles did not either: gradients
    were wrong."""
    data = [(torch.randn(4, 3, 8, 8), torch.arange(4) % 3)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        planned(InPlaceOnImages(), data, Plan(spatial="2x1"))


def test_what_changed_before_it_was_stored_is_found_out_when_it_is_back() -> None:
    cpu = torch.device("cpu")
    offloaded, store = OffloadedTensors(frozenset(), cpu), HostStore(cpu)
    saved = SavedTensors(offloaded)
    x, y = torch.zeros(3), torch.zeros(2)
    changed, same = saved.pack(x, x._version), saved.pack(y, y._version)
    x.add_(1)
    for handle in offloaded.offload(store):
        handle.wait()
    offloaded.free()
    for handle in offloaded.prefetch():
        handle.wait()
    offloaded.finish_prefetch()
    assert isinstance(same, OffloadedTensor) and torch.equal(same.unpack(), y) and store.used == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        assert isinstance(changed, OffloadedTensor)
        changed.unpack()


def test_plans_that_put_nothing_away_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"'activations:disk' .* in this schedule none wait so long"
    ):
        planned(classifier(), labelled(2, 1), Plan(micro_batches=2, offload="activations:disk"))


def test_schedules_of_ones_own_get_their_stores() -> None:
    order = Schedule(tuple(row[::1] for row in lowered(replace(GPIPE, offload=())).ranks))
    compute = Schedule(tuple(tuple(a for a in row if a.computes) for row in order.ranks))
    plan = replace(GPIPE, balance=(6, 7))
    data = labelled(6, 1)
    found = planned(copy.deepcopy(classifier()), data, plan, schedule=compute)
    assert_equal(found, plainly(classifier(), data, 6))
    assert "0S0" in {event.action for event in found.timeline.events}
