"""Batches: the same whoever reads them, in whatever boxes, with however many workers."""

from __future__ import annotations

import pickle
import threading
import time
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems.data.augment import Augment
from gems.data.boxed import Boxed
from gems.data.loader import AHEAD, Loader
from gems.data.source import Box, Image, Subset, spans, split, whole
from gems.data.synthetic import Synthetic


class Watched(Synthetic):
    """Noise that notes what is read of it, and by whom."""

    @cached_property
    def seen(self) -> list[tuple[int, Box, str]]:
        return []

    def read(self, index: int, box: Box) -> Image:
        self.seen.append((index, box, threading.current_thread().name))
        return super().read(index, box)


def contents(loader: Loader, epoch: int, start: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.asarray(x), np.asarray(y)) for x, y in loader.epoch(epoch, start)]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(p, q)
        for one, other in zip(a, b, strict=True)
        for p, q in zip(one, other, strict=True)
    )


@pytest.fixture(params=["classify", "segment"])
def source(request: pytest.FixtureRequest) -> Synthetic:
    return Synthetic((6, 6), classes=3, samples=11, task=request.param)


def test_an_epoch_has_every_sample_once_and_batches_as_asked(source: Synthetic) -> None:
    loader = Loader(source, 4)
    batches = contents(loader, 0)
    assert loader.steps == 3 and [len(x) for x, _ in batches] == [4, 4, 3]
    assert {x.tobytes() for xs, _ in batches for x in xs} == {
        source.read(i, whole((6, 6))).tobytes() for i in range(11)
    }
    assert Loader(source, 4, last="drop").steps == 2
    assert [len(x) for x, _ in Loader(source, 4, last="drop").epoch()] == [4, 4]


def test_images_come_with_their_own_targets(source: Synthetic) -> None:
    number = {source.read(i, whole((6, 6))).tobytes(): i for i in range(11)}
    for images, targets in contents(Loader(source, 4, seed=3), 1):
        assert targets.dtype == np.int64
        for image, target in zip(images, targets, strict=True):
            wanted = source.target(number[image.tobytes()], whole((6, 6)))
            assert np.array_equal(target, wanted)


def test_order_depends_on_seed_and_epoch(source: Synthetic) -> None:
    first = contents(Loader(source, 4, seed=1), 0)
    assert same(first, contents(Loader(source, 4, seed=1), 0))
    assert not same(first, contents(Loader(source, 4, seed=1), 1))
    assert not same(first, contents(Loader(source, 4, seed=2), 0))
    plain = Loader(source, 4, shuffle=False)
    assert plain.order(0).tolist() == plain.order(5).tolist() == list(range(11))


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_and_resumption_change_nothing(source: Synthetic, workers: int) -> None:
    plain = contents(Loader(source, 2, seed=5, augment=Augment()), 2)
    with Loader(source, 2, seed=5, augment=Augment(), workers=workers) as loader:
        assert same(plain, contents(loader, 2))
        for start in range(loader.steps + 1):
            assert same(plain[start:], contents(loader, 2, start))


@given(data=st.data())
def test_any_box_of_a_batch_is_the_box_of_the_whole(data: st.DataObject) -> None:
    source = Synthetic((5, 5), classes=3, samples=7, task="segment")
    with Loader(source, 4, augment=Augment(), workers=data.draw(st.integers(0, 1))) as loader:
        for images, masks in loader.epoch(1):
            for array in (images, masks):
                assert isinstance(array, Boxed)
                box = tuple(slice(*data.draw(bounds(n))) for n in array.shape)
                part = array[box]
                assert part.dtype == array.dtype and np.array_equal(part, np.asarray(array)[box])


def bounds(side: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, side), st.integers(0, side)).map(lambda x: (min(x), max(x)))


def test_only_the_box_that_is_asked_for_is_read() -> None:
    source = Watched((8, 8), samples=6)
    for images, _ in Loader(source, 3, shuffle=False).epoch():
        images[1:2, :, 2:5, 4:8]
    assert [(i, box) for i, box, _ in source.seen] == [
        (1, (slice(2, 5), slice(4, 8))),
        (4, (slice(2, 5), slice(4, 8))),
    ]


def test_a_rank_that_asks_for_nothing_reads_nothing() -> None:
    source = Watched((8, 8), samples=20)
    with Loader(source, 2, workers=2) as loader:
        for _ in loader.epoch():
            pass
    assert not source.seen


def test_workers_read_the_same_box_of_the_next_two_batches_ahead() -> None:
    source = Watched((8, 8), samples=10)
    box = (slice(0, 4), slice(0, 8))
    with Loader(source, 2, shuffle=False, workers=1) as loader:
        batches = loader.epoch()
        images, _ = next(batches)
        images[0:2, :, 0:4]
        wanted = [0, 1, 2, 3, 4, 5]  # this batch, and AHEAD = 2 more
        assert AHEAD == 2
        until(lambda: len(source.seen) == 6)
        assert sorted(i for i, _, _ in source.seen) == wanted
        assert all(b == box for _, b, _ in source.seen)
        assert all(name.startswith("gems-data") for _, _, name in source.seen)
        images, _ = next(batches)
        assert np.array_equal(images[0:2, :, 0:4][1], Synthetic((8, 8)).read(3, box))
        until(lambda: len(source.seen) == 8)
        batches.close()  # type: ignore[attr-defined]
        assert sorted(i for i, _, _ in source.seen) == [*wanted, 6, 7]  # nothing was read twice


def until(true: Any) -> None:
    end = time.monotonic() + 20
    while not true() and time.monotonic() < end:
        time.sleep(0.002)
    assert true()


class Faulty(Synthetic):
    def read(self, index: int, box: Box) -> Image:
        if index == 2:
            raise OSError("the disk is gone")
        return super().read(index, box)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_its_sample_and_reaches_the_caller(workers: int) -> None:
    with Loader(Faulty(4, samples=4), 1, shuffle=False, workers=workers) as loader:
        seen = 0
        with pytest.raises(OSError, match="the disk is gone") as caught:
            for images, _ in loader.epoch():
                images[()]
                seen += 1
        assert seen == 2
        told = getattr(caught.value, "__notes__", caught.value.args)
        assert "sample 2 of Faulty" in "".join(told)


def test_batches_can_be_kept_and_read_later() -> None:
    with Loader(Synthetic(4, samples=6), 2, workers=1) as loader:
        kept = [images for images, _ in loader.epoch()]
    assert same([(np.asarray(x),) for x in kept], [(x,) for x, _ in contents(loader_of(6), 0)])


def test_a_batch_outlives_its_loader() -> None:
    expected = [np.asarray(x) for x, _ in loader_of(6).epoch()]
    started, go = threading.Event(), threading.Event()

    class Slow(Synthetic):
        def read(self, index: int, box: Box) -> Image:
            started.set()
            assert go.wait(20)
            return super().read(index, box)

    loader = Loader(Slow(4, samples=6), 2, workers=1)
    batches = loader.epoch()
    images, _ = next(batches)
    images.ask(range(2), ((0, 4), (0, 4)))  # the worker begins one; the other waits in line
    assert started.wait(20)
    closing = threading.Thread(target=loader.close)
    closing.start()
    until(lambda: any(future.cancelled() for future in images._ahead.values()))
    go.set()
    closing.join(20)
    assert np.array_equal(np.asarray(images), expected[0])
    batches.close()  # type: ignore[attr-defined]


def loader_of(samples: int) -> Loader:
    return Loader(Synthetic(4, samples=samples), 2)


def test_a_closed_loader_ends_its_threads_and_says_so() -> None:
    before = threading.active_count()
    with Loader(Synthetic(4, samples=6), 2, workers=3) as loader:
        for images, _ in loader.epoch():
            images[()]
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        loader.epoch()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"workers": -1}, "workers is -1"),
        ({"last": "some"}, "last is 'some'"),
        ({"batch_size": 9, "last": "drop"}, "batches of 9 of 6 samples"),
    ],
)
def test_bad_numbers_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(Synthetic(4, samples=6), **{"batch_size": 2, **arguments})


def test_steps_and_epochs_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="one has 3 steps"):
        loader_of(6).epoch(0, 4)
    with pytest.raises(ValueError, match="epoch -1"):
        loader_of(6).epoch(-1)


def test_boxes_are_slices_without_steps() -> None:
    images, _ = next(loader_of(6).epoch())
    with pytest.raises(TypeError, match="by slices"):
        images[0]
    with pytest.raises(ValueError, match="steps"):
        images[::2]


def test_a_split_is_disjoint_complete_and_repeatable() -> None:
    source = Synthetic(4, samples=40)
    train, rest = split(source, 0.25, seed=2)
    assert len(train) == 30 and len(rest) == 10
    assert not set(train.indices) & set(rest.indices)
    again, _ = split(source, 0.25, seed=2)
    other, _ = split(source, 0.25, seed=3)
    assert train.indices.tolist() == again.indices.tolist() != other.indices.tolist()
    assert np.array_equal(
        rest.read(3, whole((4, 4))), source.read(int(rest.indices[3]), whole((4, 4)))
    )
    assert isinstance(pickle.loads(pickle.dumps(rest)), Subset)
    with pytest.raises(ValueError, match="held_out is 1"):
        split(source, 1)
    with pytest.raises(ValueError, match="1 samples"):
        split(Synthetic(4, samples=1))


def test_what_is_no_box_of_an_image_is_refused() -> None:
    for box in ((slice(0, 5),), (slice(0, 9), slice(0, 4)), (slice(0, 4, 2), slice(0, 4))):
        with pytest.raises(ValueError, match="box"):
            spans(box, (8, 8))
    assert spans((slice(None), slice(2, 3)), (8, 8)) == ((0, 8), (2, 3))


def test_targets_are_whole_numbers_per_sample() -> None:
    assert [y.shape for _, y in loader_of(5).epoch()] == [(2,), (2,), (1,)]
