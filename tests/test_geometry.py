"""Boxes: who has which cell, who wants it, and that it arrives once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems.files import from_json, to_json
from gems.geometry.box import Box, Move, moves, split_points, tiles

Cell = tuple[int, ...]
small = settings(max_examples=60, deadline=None)


def cells(box: Box) -> set[Cell]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


def boxes(dims: int, low: int = -3, high: int = 7) -> st.SearchStrategy[Box]:
    span = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    return st.lists(span, min_size=dims, max_size=dims).map(
        lambda spans: Box(tuple(a for a, _ in spans), tuple(b for _, b in spans))
    )


@st.composite
def several(draw: st.DrawFn, lists: int) -> tuple[list[Box], ...]:
    """Lists of boxes of the same dims, overlapping as they like, some empty."""
    dims = draw(st.integers(1, 3))
    high = 7 if dims < 3 else 3
    box = boxes(dims, -2, high)
    return tuple(draw(st.lists(box, min_size=1, max_size=5)) for _ in range(lists))


@st.composite
def shapes_and_grids(draw: st.DrawFn) -> tuple[Cell, Cell]:
    dims = draw(st.integers(1, 3))
    number = st.lists(st.integers(0, 6), min_size=dims, max_size=dims)
    parts = st.lists(st.integers(1, 4), min_size=dims, max_size=dims)
    return tuple(draw(number)), tuple(draw(parts))


def test_a_box_knows_its_shape_size_and_slices() -> None:
    box = Box((1, 2), (4, 6))
    assert (box.shape, box.size, box.empty) == ((3, 4), 12, False)
    assert Box.whole((4, 6)) == Box((0, 0), (4, 6))
    assert box.slices() == (slice(1, 4), slice(2, 6))
    assert box.shift((-1, 5)) == Box((0, 7), (3, 11))
    assert box.relative_to(Box((1, 1), (9, 9))) == Box((0, 1), (3, 5))
    assert Box((2, 0), (2, 5)).empty and Box((2, 0), (2, 5)).size == 0


def test_a_box_without_dims_is_one_cell_like_a_scalar() -> None:
    assert Box((), ()).size == 1 and not Box((), ()).empty


def test_a_box_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot stop before it starts: \[3:1\]"):
        Box((3,), (1,))
    with pytest.raises(ValueError, match="one start and one stop per dim"):
        Box((3,), (4, 5))
    with pytest.raises(ValueError, match=r"1 dims and .* has 2"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))
    with pytest.raises(ValueError, match="offset"):
        Box((0,), (1,)).shift((1, 2))


def test_slices_below_zero_are_refused_since_they_would_count_from_the_end() -> None:
    with pytest.raises(ValueError, match="relative_to"):
        Box((-1,), (2,)).slices()


@small
@given(st.integers(0, 3).flatmap(boxes))
def test_a_box_reads_back_from_text_and_from_json(box: Box) -> None:
    assert Box.parse(str(box)) == box
    assert from_json(Box, to_json(box)) == box
    move = Move(3, 12, box)
    assert Move.parse(str(move)) == move
    assert from_json(Move, to_json(move)) == move


@pytest.mark.parametrize("text", ["1:2", "[1]", "[a:b]", "[1:2:3]"])
def test_text_that_is_no_box_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a box"):
        Box.parse(text)
    with pytest.raises(ValueError, match="is not a move"):
        Move.parse(text)


@small
@given(several(lists=2))
def test_intersect_and_without_share_out_the_cells(two: tuple[list[Box], list[Box]]) -> None:
    a, b = two[0][0], two[1][0]
    assert cells(a.intersect(b)) == cells(a) & cells(b)
    assert a.meets(b) == b.meets(a) == bool(cells(a) & cells(b))
    rest = a.without(b)
    assert not any(piece.empty for piece in rest)
    assert sum(piece.size for piece in rest) == len(cells(a) - cells(b))
    assert union(rest) == cells(a) - cells(b)
    assert (b in a) == (cells(b) <= cells(a))


def union(pieces: Iterable[Box]) -> set[Cell]:
    return set().union(*map(cells, pieces))


@small
@given(st.integers(0, 50), st.integers(1, 60))
def test_cuts_are_near_equal_and_the_larger_pieces_come_first(length: int, parts: int) -> None:
    points = split_points(length, parts)
    pieces = [b - a for a, b in itertools.pairwise(points)]
    assert (points[0], points[-1], len(pieces)) == (0, length, parts)
    assert max(pieces) - min(pieces) <= 1
    assert pieces == sorted(pieces, reverse=True)


def test_cuts_by_example() -> None:
    assert split_points(10, 4) == (0, 3, 6, 8, 10)
    assert split_points(2, 4) == (0, 1, 2, 2, 2)
    with pytest.raises(ValueError, match="into 0 parts"):
        split_points(3, 0)


@small
@given(shapes_and_grids())
def test_tiles_cover_the_shape_and_do_not_overlap(shape_and_grid: tuple[Cell, Cell]) -> None:
    shape, grid = shape_and_grid
    pieces = tiles(shape, grid)
    whole = Box(tuple(0 for _ in shape), shape)
    assert sum(piece.size for piece in pieces) == whole.size
    assert union(pieces) == cells(whole)


def test_tiles_are_row_major() -> None:
    assert [str(t) for t in tiles((5, 4), (2, 2))] == [
        "[0:3, 0:2]", "[0:3, 2:4]", "[3:5, 0:2]", "[3:5, 2:4]"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="put 1 in the grid"):
        tiles((5, 4), (2,))


def test_a_halo_exchange_by_hand() -> None:
    have = [Box.parse("[0:3]"), Box.parse("[3:6]")]
    want = [Box.parse("[0:4]"), Box.parse("[2:6]")]
    assert [str(m) for m in moves(have, want)] == [
        "0->0 [0:3]", "0->1 [2:3]", "1->0 [3:4]", "1->1 [3:6]"
    ]  # fmt: skip


def test_four_tiles_to_two_then_to_batch_slices() -> None:
    two, four = tiles((1, 4, 4), (1, 2, 1)), tiles((1, 4, 4), (1, 2, 2))
    nothing = Box((0, 0, 0), (0, 0, 0))
    assert [(m.source, m.target) for m in moves(four, [*two, nothing, nothing])] == [
        (0, 0), (1, 0), (2, 1), (3, 1)
    ]  # fmt: skip
    spatial, batch = tiles((4, 2, 2), (1, 2, 2)), tiles((4, 2, 2), (4, 1, 1))
    assert len(moves(spatial, batch)) == 16


@small
@given(several(lists=2))
def test_every_wanted_cell_is_delivered_once_by_one_who_has_it(
    have_and_want: tuple[list[Box], list[Box]],
) -> None:
    have, want = have_and_want
    delivered: Counter[tuple[int, Cell]] = Counter()
    for move in moves(have, want):
        assert not move.box.empty
        assert move.box in have[move.source] and move.box in want[move.target]
        delivered.update((move.target, cell) for cell in cells(move.box))
    somewhere = union(have)
    assert delivered == Counter(
        (target, cell) for target, box in enumerate(want) for cell in cells(box) & somewhere
    )


@small
@given(several(lists=2))
def test_what_a_rank_has_itself_it_takes_from_itself(
    have_and_want: tuple[list[Box], list[Box]],
) -> None:
    have, want = have_and_want
    found = moves(have, want)
    for rank, (had, wanted) in enumerate(zip(have, want, strict=False)):
        own = [m.box for m in found if m.source == m.target == rank]
        assert own == ([] if had.intersect(wanted).empty else [had.intersect(wanted)])


@small
@given(shapes_and_grids(), st.data())
def test_with_one_owner_per_cell_the_moves_are_the_intersections(
    shape_and_grid: tuple[Cell, Cell], data: st.DataObject
) -> None:
    have = tiles(*shape_and_grid)
    want = data.draw(st.lists(boxes(len(shape_and_grid[0])), min_size=1, max_size=4))
    expected = [
        Move(s, t, h.intersect(w))
        for s, h in enumerate(have)
        for t, w in enumerate(want)
        if not h.intersect(w).empty
    ]
    assert moves(have, want) == tuple(expected)


def test_replicas_share_the_sending() -> None:
    whole, nothing = Box((0,), (4,)), Box((0,), (0,))
    have = [nothing, whole, nothing, whole]
    assert [(m.source, m.target) for m in moves(have, [whole] * 4)] == [
        (1, 0), (1, 1), (3, 2), (3, 3)
    ]  # fmt: skip


Layout = list[dict[Cell, int]]


def carry(found: tuple[Move, ...], x: Layout, ranks: int) -> Layout:
    """Mx: copy every part from its source to its target."""
    y: Layout = [{} for _ in range(ranks)]
    for move in found:
        y[move.target].update({cell: x[move.source][cell] for cell in cells(move.box)})
    return y


def carry_back(found: tuple[Move, ...], y: Layout, have: list[Box]) -> Layout:
    """M'y: the same parts travel back and add up."""
    x: Layout = [dict.fromkeys(cells(box), 0) for box in have]
    for move in found:
        for cell in cells(move.box):
            x[move.source][cell] += y[move.target][cell]
    return x


def dot(a: Layout, b: Layout) -> int:
    return sum(
        value * other.get(cell, 0)
        for one, other in zip(a, b, strict=True)
        for cell, value in one.items()
    )


def filled(pieces: list[Box], data: st.DataObject) -> Layout:
    numbers = data.draw(st.randoms(use_true_random=False))
    return [{cell: numbers.randint(-9, 9) for cell in sorted(cells(box))} for box in pieces]


@small
@given(several(lists=2), st.data())
def test_going_back_is_the_adjoint_of_going(
    have_and_want: tuple[list[Box], list[Box]], data: st.DataObject
) -> None:
    have, want = have_and_want
    found = moves(have, want)
    x, y = filled(have, data), filled(want, data)
    assert dot(carry(found, x, len(want)), y) == dot(x, carry_back(found, y, have))
