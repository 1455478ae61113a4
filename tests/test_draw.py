"""Pictures: charts in characters, SVG, traces, cuts of models, and tables."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.scatter import Point, front, scatter
from gems.draw.arrows import arrows
from gems.draw.chrome import chrome
from gems.draw.compare import aligned, difference
from gems.draw.levels import levels
from gems.draw.mark import marks
from gems.draw.partition.cells import CELLS, Partition, partitioned
from gems.draw.partition.svg import svg as partition_svg
from gems.draw.partition.text import text as partition_text
from gems.draw.svg import svg
from gems.draw.table import report, table
from gems.draw.text import text
from gems.draw.units import seconds, size
from gems.errors import GemsError
from gems.model.costs import Cost, Costs, unit
from gems.model.graph import Block, Graph, Value, Weight
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.predict.timeline import Event, Memory, Timeline
from gems.schedule.build import lowered

SVG = "{http://www.w3.org/2000/svg}"


def drawn(plan: Plan) -> Timeline:
    return simulate(lowered(plan), plan, unit(plan.depth))


def lines(block: str) -> str:
    return "\n".join(line.strip() for line in block.strip().splitlines()) + "\n"


MEASURED = Timeline(
    events=(
        Event(0, "0F0", 0.0, 0.010, 0.010),
        Event(0, "0F0>1", 0.010, 0.011),
        Event(1, "1F0", 0.011, 0.021, 0.010),
        Event(1, "1B0", 0.021, 0.041, 0.020),
        Event(0, "0B0", 0.042, 0.062, 0.020),
        Event(0, "0A", 0.062, 0.063),
    ),
    memory=(
        ((0.0, Memory(weights=4 << 20)), (0.010, Memory(weights=4 << 20, activations=1 << 20))),
        ((0.0, Memory(weights=2 << 20)), (0.021, Memory(weights=2 << 20, boundary=3 << 19))),
    ),
    peaks=(Memory(weights=4 << 20, activations=1 << 20), Memory(weights=2 << 20, boundary=3 << 19)),
    max_in_flight=(1, 1),
)


# --- text ---------------------------------------------------------------------------------------


def test_in_unit_costs_a_column_is_a_step_of_time() -> None:
    assert text(drawn(Plan(stages=3, micro_batches=3, schedule="gpipe"))) == lines(
        """
        step 15 units · bubble 40.0% · simulated clock
        rank 0  F0 F1 F2 .. .. .. .. .. .. B2--- B1--- B0---
        rank 1  .. F0 F1 F2 .. .. .. B2--- B1--- B0--- .. ..
        rank 2  .. .. F0 F1 F2 B2--- B1--- B0--- .. .. .. ..
        """
    )


def test_the_second_replica_is_written_small() -> None:
    assert text(drawn(Plan(stages=2, schedule="gems-zb", replications=1))) == lines(
        """
        step 9 units · bubble 33.3% · simulated clock
        rank 0  F0 .. .. I0 W0 f1 i1 w1 ..
        rank 1  .. F0 I0 W0 f1 .. .. i1 w1
        """
    )


def test_with_several_stages_on_a_rank_the_stage_is_written_too() -> None:
    plan = Plan(stages=4, placement="fold", micro_batches=1, schedule="sequential")
    assert text(drawn(plan)) == lines(
        """
        step 12 units · bubble 50.0% · simulated clock
        rank 0  0F0 ... ... 3F0 3B0---- ... ... ... ... 0B0----
        rank 1  ... 1F0 2F0 ... ... ... 2B0---- 1B0---- ... ...
        """
    )


def test_measured_times_are_scaled_to_the_width() -> None:
    assert text(MEASURED, width=40) == lines(
        """
        step 63 ms · bubble 50.8% · wall clock
        rank 0  F0---................B0--------.
        rank 1  ......F0---B0--------...........
        """
    )


def test_a_chart_is_as_wide_as_asked_and_short_actions_keep_their_letter() -> None:
    timeline = drawn(Plan(stages=4, micro_batches=16, schedule="zero-bubble"))
    rows = text(timeline, width=70).splitlines()[1:]
    assert {len(row) for row in rows} == {70}
    assert set("".join(row[8:] for row in rows)) <= set("FIW.-0123456789")


def test_a_step_in_which_nothing_ran_is_a_heading() -> None:
    assert text(Timeline(())) == "step 0 ns · bubble 0.0% · wall clock\n"


# --- SVG ----------------------------------------------------------------------------------------


def boxes(picture: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(picture).iter(f"{SVG}rect") if e.get("class")]


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble", "gems", "gems-zb"])
def test_the_picture_is_xml_with_one_box_per_action(name: str) -> None:
    plan = Plan(stages=3, micro_batches=4, schedule=name)
    timeline = drawn(plan)
    found = boxes(svg(timeline, plan=plan))
    tips = sorted((box.findtext(f"{SVG}title") or "").split()[0] for box in found)
    assert tips == sorted(event.action for event in timeline.events)


def test_a_box_is_as_long_as_its_action_and_says_so() -> None:
    found = {(b.findtext(f"{SVG}title") or "").split()[0]: b for b in boxes(svg(MEASURED))}
    widths = {name: float(box.get("width") or 0) for name, box in found.items()}
    assert widths["1B0"] / widths["1F0"] == pytest.approx(2, rel=0.01)
    assert found["1B0"].findtext(f"{SVG}title") == "1B0 on rank 1: 20 ms, from 21 ms"
    heights = {name: float(box.get("height") or 0) for name, box in found.items()}
    assert heights["0F0>1"] < heights["0F0"] / 4  # messages are thin
    assert heights["0A"] == heights["0F0>1"]


def test_no_box_leaves_the_picture_or_meets_its_neighbour() -> None:
    timeline = drawn(Plan(stages=4, micro_batches=8))
    lanes: dict[str, list[tuple[float, float]]] = {}
    for box in boxes(svg(timeline)):
        x, width = float(box.get("x") or 0), float(box.get("width") or 0)
        if float(box.get("height") or 0) > 10:
            lanes.setdefault(box.get("y") or "", []).append((x, x + width))
    assert len(lanes) == 4
    for lane in lanes.values():
        ordered = sorted(lane)
        assert all(a[1] <= b[0] for a, b in pairwise(ordered))
        assert ordered[0][0] >= 110 and ordered[-1][1] <= 1176.01


def test_the_header_and_the_lanes_say_what_is_shown_and_titles_may_hold_any_character() -> None:
    plan = Plan(stages=3, schedule="gems", replications=1)
    root = ElementTree.fromstring(svg(drawn(plan), 'a < b & "c"', plan))
    said = [e.text for e in root.iter(f"{SVG}text")]
    assert {'a < b & "c"', "gems · 3 stages · 2 micro-batches", "rank 0", "stages 0, 2"} <= {*said}
    assert "step 16 units · bubble 62.5% · simulated clock" in said
    first = next(root.iter(f"{SVG}rect"))
    assert (first.get("fill"), first.get("width")) == ("#ffffff", root.get("width"))


def test_bytes_are_drawn_below_if_they_were_counted() -> None:
    root = ElementTree.fromstring(svg(MEASURED))
    said = {e.text for e in root.iter(f"{SVG}text")}
    assert {
        "Live bytes",
        "peak 5.0 MiB",
        "peak 3.5 MiB",
        "weights",
        "activations",
        "boundary",
    } <= said
    assert "optimizer" not in said
    assert (
        len(list(root.iter(f"{SVG}path"))) == 4
    )  # two ranks, two kinds each; what is nought is not drawn
    assert "Live bytes" not in svg(bare(MEASURED))


@pytest.mark.parametrize("f", [1e-7, 3e-4, 0.02, 7.0, 5000.0])
def test_the_time_axis_has_a_handful_of_round_ticks_at_any_scale(f: float) -> None:
    plan = Plan(stages=2, micro_batches=2)
    costs = Costs((Cost(f=f * 1.01, i=f, w=f),) * 2)
    root = ElementTree.fromstring(svg(simulate(lowered(plan), plan, costs)))
    assert 5 <= len(list(root.iter(f"{SVG}line"))) <= 13


def test_an_empty_step_is_still_a_picture() -> None:
    assert boxes(svg(Timeline(()))) == []


# --- one step over another -----------------------------------------------------------------------

PIPE = Plan(stages=2)  # what MEASURED ran


def bare(timeline: Timeline) -> Timeline:
    """The same step, its bytes not counted."""
    return replace(timeline, memory=(), peaks=())


def longer(timeline: Timeline, factor: float) -> Timeline:
    """The same step, predicted to take so many times as long."""
    events = (replace(e, start=e.start * factor, stop=e.stop * factor) for e in timeline.events)
    return replace(timeline, events=tuple(events), clock="simulated")


def test_how_far_two_steps_differ_is_one_line() -> None:
    assert difference(longer(MEASURED, 0.5), MEASURED) == (
        "predicted step 31.5 ms, measured 63 ms (+100%) · forward +100% · backward +100%"
        " · furthest off: 1B0 on rank 1, 10 ms → 20 ms"
    )
    assert difference(MEASURED, MEASURED) == (
        "first step 63 ms, second 63 ms (+0%) · forward +0% · backward +0%"
    )


def test_units_over_seconds_are_as_long_as_makes_both_equally_busy() -> None:
    predicted = drawn(PIPE)
    units, seconds_ = aligned(predicted, MEASURED)
    busy = [sum(e.seconds for e in t.events if "A" not in e.action) for t in (units, seconds_)]
    assert busy[0] == pytest.approx(busy[1] - 0.001)  # the send is not computing
    assert difference(predicted, MEASURED).endswith("a unit is 10 ms")
    assert aligned(MEASURED, predicted)[1].seconds == units.seconds


def test_two_steps_of_different_plans_are_refused_with_what_differs() -> None:
    with pytest.raises(GemsError) as error:
        aligned(drawn(Plan(stages=2, micro_batches=4)), MEASURED)
    assert str(error.value) == (
        "these two steps are not of one plan:\n"
        "  - only the first runs 0B1 on rank 0, 0B2 on rank 0, 0B3 on rank 0 and 9 more"
    )


def test_one_chart_over_the_other_shares_its_columns() -> None:
    assert text(drawn(PIPE), 60, MEASURED) == (
        "predicted step 60 ms, measured 63 ms (+5%) · forward +0% · backward +0%"
        " · a unit is 10 ms\n"
        "rank 0  predicted  F0-----...................B0-----------..\n"
        "         measured  F0-----....................B0-----------.\n"
        "rank 1  predicted  .......F0----B0-----------...............\n"
        "         measured  .......F0-----B0-----------..............\n"
    )


def test_one_picture_over_the_other_has_two_rows_per_rank_and_says_how_far_they_differ() -> None:
    predicted = longer(MEASURED, 0.5)
    root = ElementTree.fromstring(svg(predicted, "two", PIPE, MEASURED))
    said = [e.text for e in root.iter(f"{SVG}text")]
    assert difference(predicted, MEASURED) in said
    assert said.count("predicted") == said.count("measured") == 2
    found: dict[str, list[ElementTree.Element]] = {}
    for box in boxes(svg(predicted, "two", PIPE, MEASURED)):
        found.setdefault((box.findtext(f"{SVG}title") or "").split()[0], []).append(box)
    above, under = found["1B0"]
    assert float(above.get("y") or 0) < float(under.get("y") or 0)
    ratio = float(under.get("width") or 0) / float(above.get("width") or 0)
    assert ratio == pytest.approx(2, rel=0.02), "one time axis"


def test_over_a_step_with_bytes_the_total_of_the_first_is_a_line() -> None:
    picture = svg(longer(MEASURED, 1), "", None, MEASURED)
    paths = list(ElementTree.fromstring(picture).iter(f"{SVG}path"))
    assert sum(path.get("fill") == "none" for path in paths) == 2  # one per rank
    assert "line: predicted" in picture
    assert "line: predicted" not in svg(bare(drawn(PIPE)), "", None, MEASURED)


# --- live bytes in characters --------------------------------------------------------------------


def test_bytes_stand_under_the_chart_in_its_columns() -> None:
    assert levels(MEASURED, width=40) == (
        "rank 0  ▇▇▇▇▇███████████████████████████  5.0 MiB in all\n"
        "             ███████████████████████████  1.0 MiB activations\n"
        "                                          0 B boundary\n"
        "rank 1  ▄▄▄▄▄▄▄▄▄▄▄▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆  3.5 MiB in all\n"
        "                                          0 B activations\n"
        "                   █████████████████████  1.5 MiB boundary\n"
    )
    assert levels(bare(MEASURED)) == ""


def test_a_peak_shorter_than_a_column_is_not_lost() -> None:
    row = [(t / 1000, Memory(activations=8 if t == 31 else 1)) for t in range(63)]
    chart = levels(replace(MEASURED, memory=(tuple(row), ()), peaks=()), width=28)
    assert chart.splitlines()[0].count("█") == 1


# --- traces --------------------------------------------------------------------------------------


def traced(*given: Any) -> dict[str, list[dict[str, Any]]]:
    """The entries of a trace by their phase."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in json.loads(chrome(*given))["traceEvents"]:
        found.setdefault(entry["ph"], []).append(entry)
    return found


def test_a_trace_has_a_process_per_rank_with_compute_messages_and_bytes() -> None:
    found = traced(MEASURED, "step", PIPE)
    named = [e["args"]["name"] for e in found["M"] if e["name"] == "process_name"]
    assert named == ["rank 0 · stage 0", "rank 1 · stage 1"]
    sliced = [(e["name"], e["pid"], e["tid"], round(e["ts"]), round(e["dur"])) for e in found["X"]]
    assert ("1B0", 1, 0, 21000, 20000) in sliced and ("0F0>1", 0, 1, 10000, 1000) in sliced
    assert len(sliced) == len(MEASURED.events)
    assert found["C"][1]["args"] == {"weights": 4 << 20, "activations": 1 << 20, "boundary": 0}


@pytest.mark.parametrize("plan", [None, PIPE])
def test_arrows_lead_from_a_send_to_the_work_it_feeds(plan: Plan | None) -> None:
    found = marks(MEASURED)
    named = [(found[a].event.action, found[b].event.action) for a, b in arrows(found, plan)]
    back = [("1B0", "0B0")]  # that send was not seen: the work itself gives
    assert named == [("0F0>1", "1F0"), *back]


@pytest.mark.parametrize("name", ["1f1b", "gems", "zero-bubble", "interleaved"])
def test_every_arrow_of_a_trace_has_two_ends_that_lie_on_slices(name: str) -> None:
    plan = Plan(stages=4, ranks=2 if name == "interleaved" else 0, micro_batches=4, schedule=name)
    found = traced(drawn(plan), "", plan)
    assert len(found["s"]) == len(found["f"]) == 2 * 3 * 4
    begins = {e["id"]: e for e in found["s"]}
    slices = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in found["X"]]
    for end in found["f"]:
        start = begins.pop(end["id"])
        assert start["ts"] <= end["ts"] and start["pid"] != end["pid"]
        for tip in (start, end):
            assert any(p == tip["pid"] and a <= tip["ts"] <= b for p, _, a, b in slices)


def test_a_trace_of_two_steps_has_two_processes_per_rank() -> None:
    found = traced(drawn(PIPE), "", None, MEASURED)
    named = [(e["pid"], e["args"]["name"]) for e in found["M"] if e["name"] == "process_name"]
    assert sorted(named) == [
        *((0, "rank 0 predicted"), (1, "rank 0 measured")),
        *((2, "rank 1 predicted"), (3, "rank 1 measured")),
    ]


# --- cuts ----------------------------------------------------------------------------------------


def model(*blocks: tuple[str, str, str]) -> Graph:
    """Blocks as (name, what it reads, what it writes); every value is a KiB, so is a weight."""
    names = ["x", *(writes for _, _, writes in blocks)]
    return Graph(
        blocks=tuple(
            Block(n, n, tuple(reads.split()), (writes,), (f"{n}.weight",), saves=((i, 2048),))
            for i, (n, reads, writes) in enumerate(blocks)
        ),
        values=tuple(Value(name, (256,), (1,), "float32", True) for name in names),
        inputs=("x",),
        outputs=(names[-1],),
        parameters=tuple(Weight(f"{n}.weight", (256,), "float32") for n, _, _ in blocks),
        buffers=(),
    )


UNET = model(
    ("enc.0", "x", "a"),
    ("enc.1", "a", "b"),
    ("mid", "b", "c"),
    ("dec.1", "c b", "d"),
    ("dec.0", "d a", "e"),
)


def unet_partition(costs: Costs | None = None) -> Partition:
    return partitioned(UNET, [0, 0, 1, 2, 3], costs)


def test_a_partition_in_characters_has_rails_for_what_skips_stages() -> None:
    costs = Costs((Cost(f=1e-3, i=1e-3, w=1e-3),) * 5)
    assert partition_text(unet_partition(costs), Plan(stages=4, placement="fold")) == (
        "●─┬─╮  stage 0  rank 0  enc.0 .. enc.1  2 blocks  6 ms  keeps 4.0 KiB  weights 2.0 KiB\n"
        "│ │ │           1.0 KiB to stage 1, 1.0 KiB to stage 2, 1.0 KiB to stage 3 (same rank)\n"
        "● │ │  stage 1  rank 1  mid             1 block   3 ms  keeps 2.0 KiB  weights 1.0 KiB\n"
        "│ │ │           1.0 KiB to stage 2 (same rank)\n"
        "●─╯ │  stage 2  rank 1  dec.1           1 block   3 ms  keeps 2.0 KiB  weights 1.0 KiB\n"
        "│   │           1.0 KiB to stage 3\n"
        "●───╯  stage 3  rank 0  dec.0           1 block   3 ms  keeps 2.0 KiB  weights 1.0 KiB\n"
    )
    assert "ms" not in partition_text(unet_partition()), "no seconds without costs"


def test_a_partition_as_a_picture_has_a_cell_per_block_and_an_arc_per_crossing() -> None:
    root = ElementTree.fromstring(
        partition_svg(unet_partition(), "u < net", Plan(stages=4, placement="fold"))
    )
    said = [e.text for e in root.iter(f"{SVG}text")]
    assert {"u < net", "stage 3", "rank 0", "keeps 4.0 KiB", "enc.0", "mid"} <= {*said}
    arcs = [e for e in root.iter(f"{SVG}path") if e.get("class") == "arc"]
    tips = sorted(e.findtext(f"{SVG}title") or "" for e in arcs)
    assert tips == [
        "a: 1.0 KiB from stage 0 to 3",
        "b: 1.0 KiB from stage 0 to 1",
        "b: 1.0 KiB from stage 0 to 2",
        "c: 1.0 KiB from stage 1 to 2",
        "d: 1.0 KiB from stage 2 to 3",
    ]
    dashed = {e.findtext(f"{SVG}title") for e in arcs if e.get("stroke-dasharray")}
    assert dashed == {tips[0], tips[3]}, "what stays on its rank"
    assert said.count("1.0 KiB") == 5
    colours = {e.get("fill") for e in root.iter(f"{SVG}rect") if e.get("class")}
    assert len(colours) == 4


def test_words_of_arcs_do_not_lie_on_each_other() -> None:
    root = ElementTree.fromstring(partition_svg(unet_partition()))
    spots = [
        (float(e.get("x") or 0), float(e.get("y") or 0))
        for e in root.iter(f"{SVG}text")
        if e.text == "1.0 KiB"
    ]
    for n, (x, y) in enumerate(spots):
        assert all(abs(x - u) > 45 or abs(y - v) > 10 for u, v in spots[:n])


def test_many_blocks_are_folded_into_the_modules_that_hold_them() -> None:
    count = 4 * CELLS
    names = [f"layer{n // 8}.{n % 8}" for n in range(count)]
    graph = model(*((name, f"v{n - 1}" if n else "x", f"v{n}") for n, name in enumerate(names)))
    stage_of = [n // (count // 2) for n in range(count)]
    folded = partitioned(graph, stage_of)
    assert [cell.name for cell in folded.cells] == [f"layer{n}" for n in range(count // 8)]
    assert [i for cell in folded.cells for i in cell.blocks] == list(range(count))
    assert len(folded.crossings) == 1
    uneven = partitioned(graph, [0] * 4 + [1] * (count - 4))
    assert [cell.name for cell in uneven.cells[:3]] == ["layer0", "layer0", "layer1"]


def test_ranks_that_share_a_stage_each_pay_their_part() -> None:
    shared = partitioned(UNET, [0, 0, 1, 1, 1], Costs((Cost(f=1e-3),) * 5), (4, 1))
    assert shared.kept(0) == "keeps 1.0 KiB each" and shared.kept(1) == "keeps 6.0 KiB"
    assert [cell.activations for cell in shared.cells] == [512, 512, 2048, 2048, 2048]


# --- tables -------------------------------------------------------------------------------------


def test_a_table_sets_numbers_to_the_right_and_words_to_the_left() -> None:
    assert table([("gpipe", 12, "1.0x"), ("1f1b", 9, "12.5x")], ("name", "length", "gain")) == (
        "name   length   gain\n"
        "-----  ------  -----\n"
        "gpipe      12   1.0x\n"
        "1f1b        9  12.5x\n"
    )  # fmt: skip
    assert table([], ("name",)) == "name\n----\n"
    with pytest.raises(ValueError, match=r"\['a', 'b'\] has 2 cells for the 1 columns"):
        table([("a", "b")], ("name",))


def test_the_report_of_a_step_tells_each_rank_how_busy_it_was_and_what_it_kept() -> None:
    assert report(MEASURED) == (
        "step 63 ms · bubble 50.8% · wall clock\n"
        "rank   busy     peak  weights  activations  boundary  in flight\n"
        "----  -----  -------  -------  -----------  --------  ---------\n"
        "   0  50.8%  5.0 MiB  4.0 MiB      1.0 MiB       0 B          1\n"
        "   1  47.6%  3.5 MiB  2.0 MiB          0 B   1.5 MiB          1\n"
    )


def test_seconds_and_bytes_are_written_for_people() -> None:
    assert [seconds(s) for s in (2.0, 0.0123, 4.56e-6, 0.0)] == [
        "2 s",
        "12.3 ms",
        "4.56 µs",
        "0 ns",
    ]
    assert seconds(27.0, whole=True) == "27 units"
    assert [size(b) for b in (12, 1536, 3 << 20, 5 << 30)] == [
        *("12 B", "1.5 KiB", "3.0 MiB", "5.0 GiB"),
    ]


# --- costs in two currencies ----------------------------------------------------------------------


def test_the_front_has_what_nothing_beats_in_both_currencies() -> None:
    lean, fast = Point("lean", "a", 10, 4), Point("fast", "b", 40, 1)
    middle, beaten = Point("middle", "a", 20, 2), Point("beaten", "b", 20, 3)
    same_bytes = Point("same bytes, slower", "b", 40, 1.5)
    assert front([fast, beaten, same_bytes, middle, lean]) == [lean, middle, fast]


def test_a_scatter_has_a_disc_per_point_and_a_hollow_one_where_it_was_predicted() -> None:
    points = [
        Point("keep <all>", "keep", 300, 2.5, predicted=(290, 2.4)),
        Point("inputs", "keep", 150, 3.2),
        Point("not run", "keep", float("nan"), 1.0),
    ]
    root = ElementTree.fromstring(scatter("bytes & seconds", points, "MiB", "seconds"))
    discs = {c.find(f"{SVG}title").text: c for c in root.iter(f"{SVG}circle") if c.get("r") != "4"}  # type: ignore[union-attr]
    assert set(discs) == {"keep <all>: 300, 2.5", "inputs: 150, 3.2"}
    all_kept, inputs = discs.values()
    assert float(all_kept.get("cx", 0)) > float(inputs.get("cx", 0))
    assert float(all_kept.get("cy", 0)) > float(inputs.get("cy", 0))  # down is fewer seconds
    hollow = [c for c in root.iter(f"{SVG}circle") if c.get("stroke")]
    assert [c.find(f"{SVG}title").text for c in hollow] == ["keep <all>, predicted: 290, 2.4"]  # type: ignore[union-attr]
    said = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert "1  keep <all>: 300, 2.5" in said and "bytes & seconds" in said


def test_twice_as_much_is_as_far_everywhere_in_a_scatter() -> None:
    points = [Point(str(n), "a", float(2**n), float(2**n)) for n in range(4)]
    root = ElementTree.fromstring(scatter("powers", points, "MiB", "seconds"))
    discs = [c for c in root.iter(f"{SVG}circle") if c.get("r") == "5"]
    for axis in ("cx", "cy"):
        places = [float(c.get(axis, 0)) for c in discs]
        gaps = [b - a for a, b in pairwise(places)]
        assert gaps == pytest.approx([gaps[0]] * 3, abs=0.2) and abs(gaps[0]) > 20
    with_0 = scatter("from 0", [*points, Point("none", "a", 0.0, 1.0)], "MiB", "seconds")
    assert ">0</text>" in with_0


def test_a_scatter_without_points_is_still_a_picture() -> None:
    assert "nothing" in scatter("empty", [], "MiB", "seconds")
