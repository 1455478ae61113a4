"""Augmentation: a box of a changed sample is the box of the changed whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems.data.augment import Augment, Change
from gems.data.loader import Loader
from gems.data.source import whole
from gems.data.synthetic import Synthetic
from tests.test_data_loader import bounds

PLAIN = np.arange(2 * 4 * 4, dtype=np.float32).reshape(2, 4, 4)


def changes(augment: Augment, shape: tuple[int, ...], count: int = 200) -> list[Change]:
    return [augment.draw(shape, 0, 0, i) for i in range(count)]


@given(
    data=st.data(),
    sides=st.sampled_from([(4, 4), (3, 5), (2, 3, 4), (3, 3, 3)]),
    flips=st.booleans(),
    turns=st.booleans(),
)
def test_any_box_of_a_changed_sample(
    data: st.DataObject, sides: tuple[int, ...], flips: bool, turns: bool
) -> None:
    source = Synthetic(sides, channels=2, classes=5, task="segment")
    change = Augment(flips, turns, 0.3).draw(source.shape, 1, 2, data.draw(st.integers(0, 99)))
    all_of_it = whole(sides)
    assert change.source(all_of_it, sides) == all_of_it
    image = change.colour(change.turn(source.read(0, all_of_it)))
    mask = change.turn(source.target(0, all_of_it))
    assert image.shape == source.shape
    box = tuple(slice(*data.draw(bounds(n))) for n in sides)
    part = change.source(box, sides)
    pixels = change.colour(change.turn(source.read(0, part)))
    assert np.array_equal(pixels, image[(slice(None), *box)])
    assert np.array_equal(change.turn(source.target(0, part)), mask[box])


def test_all_eight_symmetries_of_the_square_occur_equally() -> None:
    seen = [c.turn(PLAIN).tobytes() for c in changes(Augment(colour=0), PLAIN.shape, 800)]
    eight = {
        np.ascontiguousarray(np.rot90(x, k, (1, 2))).tobytes()
        for x, k in itertools.product((PLAIN, PLAIN[..., ::-1]), range(4))
    }
    assert set(seen) == eight
    assert min(seen.count(x) for x in eight) > 60


def test_turns_alone_are_the_four_rotations() -> None:
    seen = {c.turn(PLAIN).tobytes() for c in changes(Augment(flips=False), PLAIN.shape)}
    assert seen == {np.ascontiguousarray(np.rot90(PLAIN, k, (1, 2))).tobytes() for k in range(4)}


def test_flips_alone_keep_rows_rows_and_volumes_flip_along_each_axis() -> None:
    assert not any(c.swap for c in changes(Augment(turns=False), PLAIN.shape))
    assert not any(c.swap for c in changes(Augment(), (2, 4, 6)))  # no square
    volume = changes(Augment(), (1, 4, 4, 4))
    assert {c.flips for c in volume} == set(itertools.product((False, True), repeat=3))


def test_nothing_happens_when_nothing_may() -> None:
    for change in changes(Augment(False, False, 0.0), PLAIN.shape, 20):
        assert np.array_equal(change.colour(change.turn(PLAIN)), PLAIN)


def test_colours_stay_near_and_differ_by_channel_about_0() -> None:
    for change in changes(Augment(False, False, 0.1), PLAIN.shape, 50):
        assert all(0.9**2 <= f <= 1.1**2 for f in change.factors) and abs(change.shift) <= 0.1
        assert change.factors[0] != change.factors[1]
        assert np.allclose(change.colour(0 * PLAIN), change.shift)
        assert change.colour(PLAIN).dtype == np.float32


def test_a_sample_changes_with_the_epoch_and_its_mask_turns_along() -> None:
    class Same(Synthetic):
        """Its mask is its image."""

        def read(self, index, box):  # type: ignore[no-untyped-def]
            return self.target(index, box)[None].astype(np.float32)

    source = Same(6, channels=1, classes=50, samples=4, task="segment")
    loader = Loader(source, 4, shuffle=False, augment=Augment(colour=0))
    seen = []
    for epoch in (0, 1):
        images, masks = next(loader.epoch(epoch))
        assert np.array_equal(images[()][:, 0], masks[()])
        seen.append(images[()])
    assert not np.array_equal(*seen)


def test_too_much_colour_is_refused() -> None:
    with pytest.raises(ValueError, match="colour is 1"):
        Augment(colour=1)
