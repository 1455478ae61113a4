"""The search of benchmarks/largest-image, on bytes and seconds that are made up."""

from __future__ import annotations

from importlib import import_module

import pytest

search = import_module("benchmarks.largest-image.search")
Trial, largest = search.Trial, search.largest


class Steps:
    """Takes `fixed + per_cell * side²` bytes and a second per million cells; notes the sides."""

    def __init__(self, fixed: int, per_cell: int, most: int = 10**9) -> None:
        self.fixed, self.per_cell, self.most = fixed, per_cell, most
        self.tried: list[int] = []

    def __call__(self, side: int) -> search.Trial:
        self.tried.append(side)
        if side > self.most:
            return Trial(side, None, 0.0, "refused")
        return Trial(side, self.fixed + self.per_cell * side**2, side**2 / 1e6)


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize(("fixed", "per_cell"), [(0, 7000), (26_000_000, 1300), (250_000_000, 90)])
def test_the_largest_side_fits_and_the_next_does_not(
    fixed: int, per_cell: int, square: bool
) -> None:
    steps, cap = Steps(fixed, per_cell), 256 * 2**20
    found = largest(steps, cap, 16, square=square)
    assert found.trial.fits(cap) and not found.first.fits(cap)
    assert found.first.side == found.side + 16 and not found.stopped
    assert len(set(steps.tried)) == len(steps.tried)
    assert len(steps.tried) <= (4 if square else 14)


def test_no_side_at_all_is_said_with_why() -> None:
    found = largest(Steps(0, 1, most=0), 10**9, 16)
    assert (found.side, found.first.side, found.first.note) == (0, 16, "refused")


def test_a_way_that_refuses_large_images_is_searched_by_halves() -> None:
    assert largest(Steps(0, 1, most=300), 10**9, 16).side == 288


def test_time_ends_a_search_and_it_says_so() -> None:
    steps = Steps(0, 1)
    found = largest(steps, 10**12, 16, longest=2.0, square=False)
    assert found.stopped and found.first is None
    assert all(side**2 / 1e6 <= 2.0 for side in steps.tried)
    assert found.side > 1200


def test_what_was_tried_before_is_not_tried_again() -> None:
    steps, cap = Steps(0, 7000), 256 * 2**20
    first = largest(steps, cap, 16)
    known = [Steps(0, 7000)(side) for side in steps.tried]
    again = largest(steps, cap, 16, known=known)
    assert again == first and len(steps.tried) == len(known)
