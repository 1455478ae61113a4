"""Pictures: charts in characters, SVG, and tables."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from gems.costs import Cost, Costs, unit
from gems.draw.svg import svg
from gems.draw.table import report, table
from gems.draw.text import text
from gems.draw.units import seconds, size
from gems.plan import Plan
from gems.schedule.build import lowered
from gems.simulate import simulate
from gems.timeline import Event, Memory, Timeline

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
        Event(0, "0R", 0.062, 0.063),
    ),
    memory=(
        ((0.0, Memory(weights=4 << 20)), (0.010, Memory(weights=4 << 20, stash=1 << 20))),
        ((0.0, Memory(weights=2 << 20)), (0.021, Memory(weights=2 << 20, boundary=3 << 19))),
    ),
    peaks=(Memory(weights=4 << 20, stash=1 << 20), Memory(weights=2 << 20, boundary=3 << 19)),
    stashes=(1, 1),
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
    assert heights["0R"] == heights["0F0>1"]


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
    assert {"Live bytes", "peak 5.0 MiB", "peak 3.5 MiB", "weights", "stash", "boundary"} <= said
    assert "optimizer" not in said
    assert (
        len(list(root.iter(f"{SVG}path"))) == 4
    )  # two ranks, two kinds each; what is nought is not drawn
    assert "Live bytes" not in svg(drawn(Plan(stages=2)))


@pytest.mark.parametrize("f", [1e-7, 3e-4, 0.02, 7.0, 5000.0])
def test_the_time_axis_has_a_handful_of_round_ticks_at_any_scale(f: float) -> None:
    plan = Plan(stages=2, micro_batches=2)
    costs = Costs((Cost(f=f * 1.01, i=f, w=f),) * 2)
    root = ElementTree.fromstring(svg(simulate(lowered(plan), plan, costs)))
    assert 5 <= len(list(root.iter(f"{SVG}line"))) <= 13


def test_an_empty_step_is_still_a_picture() -> None:
    assert boxes(svg(Timeline(()))) == []


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
        "rank   busy     peak  weights    stash  boundary  stashes\n"
        "----  -----  -------  -------  -------  --------  -------\n"
        "   0  50.8%  5.0 MiB  4.0 MiB  1.0 MiB       0 B        1\n"
        "   1  47.6%  3.5 MiB  2.0 MiB      0 B   1.5 MiB        1\n"
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
