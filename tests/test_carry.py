"""Patches that carry: each cell is computed once, and halos are handed from patch to patch.

The generated networks of tests/test_stream.py and tests/test_values.py carry as well; here is what
belongs to carrying alone: where values are cut, how much is computed, and what is rejected.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gems
from gems.cli.main import main
from gems.errors import PlanError
from gems.files import from_json, to_json
from gems.geometry.carry import (
    Points,
    behind,
    carried,
    causal,
    latest,
    moved_on,
    patches_of,
    points_of,
    ready,
)
from gems.geometry.window import Grow, Same, Shrink, Slide, Spread, Taps, Window, line
from gems.planner.candidates import streaming
from gems.plans.plan import Plan
from gems.plans.streaming import STREAM_HALOS
from gems.torch.runtime.carried_halos import Halos
from gems.torch.spatial.halo_costs import with_halos
from gems.torch.spatial.partition import CallNotTileable
from gems.torch.spatial.rules.elementwise import Broadcast
from gems.torch.spatial.rules.padding import Bent
from gems.torch.tracing.trace import trace
from tests.exact import assert_equal, join, plainly, planned
from tests.networks import build
from tests.spatial import Plain
from tests.test_stream import (
    LOSSES,
    PLANS,
    REFUSED,
    SIDE,
    ChangesInPlace,
    Checkpointed,
    counting,
    make,
    noise,
    one_rank,
    peaks,
    residual,
)
from tests.test_values import measured, normed
from tests.worlds import spawn

Tensor = torch.Tensor


# --- where values are cut -------------------------------------------------------------------------


def a_window(r: Random) -> tuple[Window, int, int]:
    """Of any kind, with the length of its input and the number of its outputs."""
    n = r.randint(2, 14)
    kernel, stride, dilation = r.randint(1, 4), r.randint(1, 3), r.randint(1, 2)
    reach, padding = dilation * (kernel - 1), r.randint(0, 3)
    kind = r.choice(("same", "slide", "crop", "spread", "resize", "pool", "grow", "shrink", "bent"))
    if kind in ("slide", "crop"):
        padding = -r.randint(0, n // 2) if kind == "crop" else min(padding, reach)
        outputs = max((n + 2 * padding - reach - 1) // stride + 1, 0)
        if kind == "crop":
            outputs = max((n + padding - reach - 1) // stride + 1, 0)
        return Slide(kernel, stride, padding, dilation), n, outputs
    if kind == "spread":
        outputs = max((n - 1) * stride - 2 * padding + reach + 1 + r.randint(0, stride - 1), 1)
        return Spread(kernel, stride, padding, dilation), n, outputs
    if kind in ("resize", "pool"):
        m = r.randint(1, 20)
        first = [o * n // m for o in range(m)]
        last = [-(-(o + 1) * n // m) - 1 for o in range(m)]
        if kind == "resize":
            last = [min(a + 1, n - 1) for a in first]
        return Taps(first, last, n), n, m
    if kind == "grow":
        return Grow(stride), n, n * stride
    if kind == "shrink":
        return Shrink(stride), n * stride, n
    if kind == "bent":
        before, after = r.randint(0, n - 1), r.randint(0, n - 1)
        outputs = n + before + after - reach
        slide = Slide(kernel, 1, before, dilation)
        return Bent(slide, n, r.choice(("reflect", "replicate"))), n, max(outputs, 0)
    return Same(), n, n


@pytest.mark.parametrize("number", range(40))
def test_an_output_is_ready_when_all_that_it_reads_is_there(number: int) -> None:
    """Beside one output after the other: the first ones that read nothing behind the cut."""
    r = Random(f"ready {number}")
    for _ in range(25):
        window, n, outputs = a_window(r)
        for c in range(n + 1):
            expected = 0
            for o in range(outputs):
                if min(window.reads(o, o + 1)[1], n) > c:
                    break
                expected += 1
            assert ready(window, c, n, outputs) == expected, (window, c, n, outputs)


@pytest.mark.parametrize("number", range(20))
def test_a_line_reads_what_its_window_reads_or_a_little_more(number: int) -> None:
    """Four numbers of a graph, for the planner; resizing has no exact line."""
    r = Random(f"line {number}")
    for _ in range(25):
        window, n, outputs = a_window(r)
        if isinstance(window, Bent) or not outputs:
            continue
        found, exact = line(window, n, outputs), not isinstance(window, Taps)
        for a in range(outputs):
            for b in range(a + 1, outputs + 1):
                (low, high), (x, y) = found.reads(a, b), window.reads(a, b)
                assert low <= x and y <= high
                assert not exact or (low, high) == (x, y), (window, found)
                assert x - low <= 2 + n / outputs and high - y <= 2 + n / outputs


def test_who_reads_the_only_cell_waits_for_it() -> None:
    assert [ready(Broadcast(), c, 1, 9) for c in (0, 1)] == [0, 9]


@pytest.mark.parametrize("number", range(30))
def test_no_patch_reads_a_later_one_through_any_layers(number: int) -> None:
    """Cell by cell, through layers and joins: each is made by the first patch that may."""
    r = Random(f"layers {number}")
    n, parts = r.randint(6, 30), r.randint(1, 5)
    even = (tuple(sorted(r.randint(0, n) for _ in range(parts - 1))),)
    values: list[Points] = [(even,)]
    lengths = [n]
    for _ in range(r.randint(1, 8)):
        window, before, outputs = a_window(r)
        at = r.randrange(len(values))
        if before != lengths[at] or outputs < 1:
            window, outputs = Slide(3, 1, 1), lengths[at]
        reads = [(values[at], window, lengths[at])]
        if outputs == n:
            reads.append((values[0], Same(), n))  # a shortcut
        made = latest(carried(x, (w,), (m,), (outputs,)) for x, w, m in reads)
        rows = [patches_of(x, (((0, m),),))[0] for x, _, m in reads]
        (out,) = patches_of(made, (((0, outputs),),))
        assert out[0][0] == 0 and out[-1][1] == outputs
        assert all(a[1] == b[0] for a, b in itertools.pairwise(out))
        assert points_of((out,), (parts,)) == made
        for k, (a, b) in enumerate(out):
            for o in range(a, b):
                ends = [min(max(w.reads(o, o + 1)[1], 0), m) for _, w, m in reads]
                pairs = list(zip(ends, rows, strict=True))
                assert all(end <= row[k][1] for end, row in pairs), "it reads a later patch"
        for (_, window, m), row in zip(reads, rows, strict=True):
            wants = [window.reads(a, b) if b > a else (0, 0) for a, b in out]
            assert causal((row,), (tuple((a, min(b, m)) for a, b in wants),))
        values.append(made)
        lengths.append(outputs)


def test_cuts_of_tiles_stay_inside_of_them() -> None:
    """Of two tiles in two patches each: what one has beyond its own cells is its last patch's."""
    points = (((3,), (9,)),)
    assert patches_of(points, (((0, 6), (6, 12)),)) == (((0, 3), (3, 6), (6, 9), (9, 12)),)
    assert patches_of(points, (((0, 8), (4, 12)),)) == (((0, 3), (3, 8), (4, 9), (9, 12)),)
    assert patches_of((((-2,), (5,)),), (((0, 6), (6, 12)),))[0] == (
        (0, 0),
        (0, 6),
        (6, 6),
        (6, 12),
    )


def test_the_first_cut_is_moved_on_by_half_of_what_the_last_lies_behind() -> None:
    assert behind([([6, 12], [6, 12], 24), ([3, 6], [1, 3], 12)]) == 0.25
    assert moved_on([6, 12], 0.25, 24, 24) == (9, 15)
    assert moved_on([6, 12], 0.25, 24, 12) == (8, 14), "in steps of the smallest value"
    assert moved_on([3, 11], 1.0, 12, 12) == (9, 12)


def test_no_patch_is_much_larger_than_the_others() -> None:
    """At both ends of a network: of 64 rows in four patches, sixteen are eaten on the way."""
    layers = [nn.Conv2d(2, 2, 5, padding=2) for _ in range(9)]
    stream = Plain(nn.Sequential(*layers), torch.randn(1, 2, 64, 4)).stream((4, 1), carry=True)
    values = [x.own[0] for n, x in stream.swept[0].laid.layouts.items() if n != "input"]
    rows = [[b - a for a, b in spans] for spans in values]
    first, last = rows[0], rows[-1]
    assert (max(first), max(last)) == (24, 24) and min(first) == min(last) == 8


# --- networks, trained ----------------------------------------------------------------------------


def carry(plan: Plan) -> Plan:
    return replace(plan, stream_halo="carry")


@pytest.mark.parametrize("name", PLANS)
def test_a_residual_network_trains_like_the_plain_one(name: str) -> None:
    """With norms in training mode, in every way that stages may be combined."""
    plan, model = carry(PLANS[name]), residual(frozen=False)
    data = noise((4, 3, SIDE, SIDE - 4), 3, (4,))
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


@pytest.mark.parametrize("name", ["tiles", "two streamed stages", "weights apart"])
def test_without_statistics_all_layers_are_one_sweep(name: str) -> None:
    model, data = residual(), noise((4, 3, SIDE, SIDE - 4), 3, (4,))
    plan = carry(PLANS[name])
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))


@pytest.mark.parametrize("name", ["pipeline", "tiles, others keep inputs"])
def test_over_processes(name: str) -> None:
    plan = carry(PLANS[name])
    found = join(spawn(plan.world, one_rank, plan))
    data = noise((4, 3, SIDE, SIDE - 4), 3, (4,), 1)
    assert_equal(found, plainly(residual(frozen=False), data, plan.total))


@pytest.mark.parametrize("offload", [(), ("values:host",), ("values:disk",)])
@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("tiles", [(), ("1x2", "1x2")])
def test_skips_of_a_u_net_are_handed_on(tiles: Any, norm: str, offload: Any) -> None:
    """As late as the layers around them make the decoder; in memory, or in a store."""
    torch.manual_seed(0)
    model = build("unet", norm=norm, width=2, levels=3).double()
    data = noise((2, 3, 27, 22), 2, (2, 27, 22))
    plan = Plan(
        stages=2, stream=["3x2", "2x4"], spatial=tiles, micro_batches=2, offload=offload,
        stream_halo="carry",
    )  # fmt: skip
    assert_equal(
        planned(model, data, plan, F.cross_entropy), plainly(model, data, 2, F.cross_entropy)
    )


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_waits_for_the_cells_it_compares(name: str, norm: str) -> None:
    """Its patches run in backward only, after a forward that makes their halos, or in both."""
    torch.manual_seed(0)
    model = build("unet", norm=norm, width=2, levels=2).double()
    data, loss = noise((2, 3, 19, 22), 2, (2, 19, 22)), LOSSES[name]
    plan = Plan(stream="3x2", micro_batches=2, stream_halo="carry", schedule="gpipe")
    assert_equal(planned(model, data, plan, loss), plainly(model, data, 2, loss))


class SumAtTheEnd(nn.Module):
    """Of what is shallow and what is deep: only their sum looks at the convolutions' results."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Conv2d(3, 2, 3, padding=1)
        self.deep = nn.Sequential(
            nn.Conv2d(3, 4, 5, padding=2), nn.Tanh(), nn.Conv2d(4, 2, 5, padding=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.side(x) + self.deep(x)  # type: ignore[no-any-return]


def test_a_forward_for_halos_makes_what_only_a_sum_looks_at() -> None:
    torch.manual_seed(0)
    model, data = SumAtTheEnd().double(), noise((1, 3, 24, 20), 2, (1, 24, 20))
    plan = Plan(stream="4x2", stream_halo="carry")
    assert_equal(
        planned(model, data, plan, F.cross_entropy), plainly(model, data, 1, F.cross_entropy)
    )


class TwoMaps(nn.Module):
    """A loss between two maps of which one is behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.then = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        return F.mse_loss(self.then(y), y, reduction="sum") / y.numel() + y.mean()


def test_maps_that_are_compared_are_cut_alike() -> None:
    Plain(TwoMaps(), torch.randn(1, 3, 17, 13)).stream((4, 3), carry=True)


def test_patches_without_a_cell_at_some_depth_hand_on_all_the_same() -> None:
    """Of 24 rows in 12 patches, seven layers eat those of the first ones."""
    layers = [nn.Conv2d(3 if k == 0 else 4, 4, 5, padding=2) for k in range(7)]
    model = nn.Sequential(*(x for layer in layers for x in (layer, nn.Tanh())), nn.MaxPool2d(2))
    stream = Plain(model, torch.randn(1, 3, 24, 9)).stream((12, 3), carry=True)
    own = [x.own for x in stream.swept[-1].laid.layouts.values()]
    assert any(a == b for spans in own for a, b in spans[0]), "some are empty"


def test_a_reflected_border_is_handed_on_over_a_patch_that_does_not_read_it() -> None:
    """Story: patches were bound among those up to the first that wants nothing of them."""
    model = nn.Sequential(
        nn.Upsample((8, 16), mode="bilinear", align_corners=True),
        nn.ReflectionPad2d((0, 2, 1, 3)), nn.Upsample(scale_factor=0.7), nn.AvgPool2d(2, (2, 3)),
    )  # fmt: skip
    plain = Plain(model, torch.randn(2, 2, 7, 10))
    for patches in ((3, 3), (4, 2), (2, 5)):
        plain.stream_tiles((2, 1), patches, carry=True)
        plain.stream(patches, carry=True)


def test_dropout_drops_what_it_drops_when_the_image_is_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.4), nn.Conv2d(4, 4, 5, padding=2), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).double()  # fmt: skip
    data = noise((2, 3, 17, 19), 3, (2,))
    whole = Plan(stages=1, micro_batches=2, schedule="sequential")
    plan = Plan(stages=2, ranks=1, stream="3x3", schedule="sequential", micro_batches=2)
    assert_equal(planned(model, data, carry(plan)), planned(model, data, whole))


def test_what_the_model_itself_recomputes_takes_its_halos_twice() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), Checkpointed(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 3),
    ).double()  # fmt: skip
    data = noise((1, 3, 13, 11), 3, (1,))
    plan = Plan(stages=2, ranks=1, stream="3x2", schedule="sequential", stream_halo="carry")
    assert_equal(planned(model, data, plan), plainly(model, data, 1))


def test_what_a_patch_handed_on_is_not_changed_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), ChangesInPlace(),
        nn.Conv2d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).double()  # fmt: skip
    data = noise((1, 3, 13, 11), 3, (1,))
    plan = Plan(stages=2, ranks=1, stream="3x2", schedule="sequential", stream_halo="carry")
    assert_equal(planned(model, data, plan), plainly(model, data, 1))


def test_prediction_carries_too_and_keeps_nothing() -> None:
    torch.manual_seed(0)
    model = build("unet", width=2, levels=2)
    image = torch.randn(2, 3, 21, 30)
    model.eval()
    with torch.no_grad():
        expected = model(image)
    plan = Plan(stream=(4, 3), stream_halo="carry")
    trainer = make(copy.deepcopy(model), plan, tuple(image.shape))
    assert torch.allclose(trainer.predict(image), expected, atol=1e-5)


@pytest.mark.parametrize("known", [0, 10**6])
def test_patches_may_be_known_from_the_last_time_or_not(
    known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gems.torch.runtime.stream_code.KNOWN", known)
    torch.manual_seed(0)
    model = build("unet", norm="none", width=2, levels=2).double()
    data = noise((2, 3, 19, 22), 2, (2, 19, 22))
    plan = Plan(stream="4x3", micro_batches=2, stream_halo="carry", schedule="sequential")
    assert_equal(
        planned(model, data, plan, F.cross_entropy), plainly(model, data, 2, F.cross_entropy)
    )


# --- work and memory ------------------------------------------------------------------------------


def layers(depth: int) -> nn.Module:
    torch.manual_seed(0)
    found: list[nn.Module] = []
    for k in range(depth):
        found += [nn.Conv2d(4 if k else 3, 4, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*found, nn.Conv2d(4, 2, 1)).double()


def cells_of(model: nn.Module, plan: Plan, loss: Any, cells: list[int]) -> int:
    """Of all convolutions forward, in a step."""
    cells.clear()
    data = noise((1, 3, 24, 20), 2, (1, 24, 20), 1)
    assert_equal(planned(copy.deepcopy(model), data, plan, loss), plainly(model, data, 1, loss))
    return sum(cells)


@pytest.mark.parametrize("stream", ["4x2", "6x1", "5x4"])
def test_each_cell_is_computed_once_forward_and_once_backward(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the cell; where halos are recomputed it is more."""
    cells, image = counting(monkeypatch), 24 * 20
    model, loss = layers(4), LOSSES["Dice"]
    carried = cells_of(model, Plan(stream=stream, stream_halo="carry"), loss, cells)
    assert carried == 2 * 5 * image
    assert cells_of(model, Plan(stream=stream), loss, cells) > 1.1 * carried


def test_a_forward_that_only_makes_halos_stops_at_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is behind the last halo runs in backward alone, and so does the last patch."""
    cells, image = counting(monkeypatch), 24 * 20
    plan = Plan(stream="4x1", stream_halo="carry")
    found = cells_of(layers(4), plan, F.cross_entropy, cells)
    # Three of five convolutions, but for the last of four patches, are computed forward as well.
    assert found == 5 * image + 20 * (19 + 18 + 17)


def test_what_is_carried_is_counted_and_predicted() -> None:
    torch.manual_seed(0)
    model = build("unet", norm="none", width=4, levels=3)
    image, target = torch.randn(1, 3, 96, 96), torch.randint(2, (1, 96, 96))
    for stream in ((2, 2), (4, 1), (1, 3), (4, 4)):
        plan = Plan(stream=stream, stream_halo="carry")
        found, predicted = peaks(copy.deepcopy(model), plan, image, target)
        assert predicted == pytest.approx(found, rel=0.01)
    plan = Plan(stream=(3, 2), spatial="1x2", stream_halo="carry")
    found, predicted = peaks(model, plan, image, target)
    assert predicted == pytest.approx(found, rel=0.05)


def test_in_a_store_only_the_halos_of_a_patch_are_on_the_device() -> None:
    torch.manual_seed(0)
    model = build("unet", norm="none", width=4, levels=3)
    image, target = torch.randn(1, 3, 96, 96), torch.randint(2, (1, 96, 96))
    plan = Plan(stream="6x1", stream_halo="carry", schedule="sequential")
    [(whole, _, _, _)] = measured(model, plan, image, target)
    plan = replace(plan, offload=("values:disk",))
    [(peak, predicted, rows, forecast)] = measured(model, plan, image, target)
    assert predicted == pytest.approx(peak, rel=0.05) and peak < whole
    assert rows["0F0"].offloaded == forecast["0F0"].offloaded > 0
    assert rows["0B0"].offloaded == forecast["0B0"].offloaded == 0


def test_sweeps_carry_and_store_what_they_hand_each_other() -> None:
    target, image = torch.zeros(1, dtype=torch.int64), torch.randn(1, 3, 96, 96)
    plan = Plan(stages=2, ranks=1, stream="3x3", schedule="sequential", stream_halo="carry")
    plan = replace(plan, offload=("values:disk",))
    [(peak, predicted, rows, forecast)] = measured(normed(8), plan, image, target)
    assert predicted == pytest.approx(peak, rel=0.05)
    assert rows["0F0"].offloaded == forecast["0F0"].offloaded


def test_patches_that_are_alike_share_one_program() -> None:
    """Those at the ends of an axis differ from those inside, which are alike."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1),
    )  # fmt: skip
    stream = Plain(model, torch.randn(1, 3, 80, 80)).stream((10, 10), carry=True)
    (swept,) = (s for s in stream.swept if s.known)
    programs = {id(run) for runs in swept.known.values() for run in runs.values()}
    assert 0 < len(programs) <= 25 * len(swept.laid.calls)


# --- the planner ----------------------------------------------------------------------------------


def test_the_planner_carries_halos_where_they_fit_and_reports_it() -> None:
    model = build("unet", norm="none", width=16)
    sample = torch.empty(1, 3, 512, 512, device="meta")
    options: dict[str, Any] = {"ranks": 1, "micro_batches": 1, "state": 0.0}
    plan = gems.plan(model, sample, memory="75MiB", **options)
    assert plan.stream_halo == "carry" and "with halos carried" in plan.why
    # The least bytes, where the halos of so many patches do not fit the store.
    plan = gems.plan(model, sample, memory="1GiB", objective="memory", store="1MiB", **options)
    assert plan.stream and plan.stream_halo == "recompute" and "halos carried" in plan.why


def test_carrying_is_not_considered_where_little_is_computed_twice() -> None:
    """Norms in training mode end a sweep after each convolution."""
    sample = torch.empty(1, 3, 256, 256, device="meta")
    for frozen, patches, halos in ((False, (2, 2), {"recompute"}), (True, (8, 8), {*STREAM_HALOS})):
        model = residual(frozen).float()
        graph = with_halos(trace(model, sample), model)
        plans = [choice.plan for choice in streaming(graph, 1, 1, "disk")]
        assert {plan.stream_halo for plan in plans if plan.streams[0] == patches} == halos


# --- what is rejected -----------------------------------------------------------------------------


def test_halos_that_are_left_over_are_noticed() -> None:
    halos = Halos(True)
    halos.put(0, 1, ("a", "x", 1), [torch.ones(3)])
    halos.put(1, 0, ("a", "x", 1), [torch.ones(2), torch.ones(1)])
    with pytest.raises(AssertionError, match="left over"):
        halos.finished()
    with pytest.raises(AssertionError, match="left over"):
        halos.done(0)
    with pytest.raises(AssertionError, match="there already"):
        halos.put(0, 1, ("a", "x", 1), [torch.ones(3)])


class IntoTheFirst(nn.Module):
    """Changes in place what came earlier by what came later."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.conv, self.then, self.last = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) * 2
        z = self.then(y.tanh())
        if self.way == "+=":
            y += z
        else:
            getattr(y, self.way)(z)
        return self.last(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["+=", "mul_", "copy_"])
def test_a_change_in_place_by_what_comes_later_has_the_cells_of_what_comes_later(way: str) -> None:
    Plain(IntoTheFirst(way), torch.randn(1, 3, 16, 12)).stream((4, 2), carry=True)


def test_a_change_in_place_that_is_no_result_is_rejected_by_name() -> None:
    plain = Plain(IntoTheFirst("+="), torch.randn(1, 3, 16, 12))
    (call,) = (call for call in plain.record.calls if call.mutates)
    (old, _), calls = call.mutates[0], plain.record.calls
    changed = replace(call, mutates=[(old, call.writes[0])])
    plain.record = replace(plain.record, calls=[changed if c is call else c for c in calls])
    with pytest.raises(CallNotTileable, match=r"add.*changes mul in place.*new tensor.*recompute"):
        plain.stream((4, 2), carry=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_needs_the_whole_image_is_rejected_as_ever(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), copy.deepcopy(REFUSED[kind]), nn.Conv2d(4, 4, 1))
    with pytest.raises(PlanError, match=rf"stage 0 streams 2x2.* 1 \({kind}\).*end at 0"):
        make(model, Plan(stream=(2, 2), stream_halo="carry"), (1, 3, 16, 16))


def test_a_plan_rejects_what_it_does_not_know() -> None:
    with pytest.raises(PlanError, match=r"'carry' .* no stage of this plan streams; give stream"):
        Plan(stream_halo="carry")
    with pytest.raises(PlanError, match="stream_halo 'keep' is unknown; choose one of recompute"):
        Plan(stream="2x2", stream_halo="keep")


def test_the_command_line_carries(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    network = ["--model", "tests.networks:convnext_tiny", "--image-size", "64"]
    streamed = ["--stages", "2", "--stream", "2x2", "--stream-halo", "carry", "--out", str(file)]
    assert main(["plan", *network, *streamed]) == 0
    plan = from_json(Plan, file.read_text())
    assert plan.stream_halo == "carry" and plan.activations[0].carries
    assert from_json(Plan, to_json(plan)) == plan != replace(plan, stream_halo="recompute")
    assert main(["check", "--plan", str(file), *network]) == 0
