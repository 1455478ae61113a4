"""Batches of real and of random images."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gems.data import pictures
from gems.data.pictures import FILES, Pictures
from gems.data.synthetic import Synthetic
from gems.errors import GemsError

ROOT = Path(pictures.__file__).parents[2]


@pytest.fixture(scope="module")
def source() -> Pictures:
    pytest.importorskip("skimage")
    return Pictures(image_size=32, classes=10)


def test_every_picture_is_a_file_of_the_wheel() -> None:
    pytest.importorskip("skimage")
    shipped = {str(f) for f in importlib.metadata.files("scikit-image") or ()}
    assert {f"skimage/data/{file}" for file in FILES} <= shipped


def test_batches_are_float32_images_with_int64_labels(source: Pictures) -> None:
    batches = list(source.batches(batch_size=4, steps=3, seed=1))
    assert len(batches) == 3
    for images, labels in batches:
        assert images.shape == (4, 3, 32, 32) and images.dtype == np.float32
        assert labels.shape == (4,) and labels.dtype == np.int64
        assert images.flags.c_contiguous


def test_the_same_seed_gives_the_same_batches(source: Pictures) -> None:
    first, again, other = (
        next(source.batches(batch_size=8, steps=1, seed=seed)) for seed in (3, 3, 4)
    )
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])
    assert not np.array_equal(first[0], other[0])


def test_a_longer_run_starts_like_a_shorter_one_and_does_not_repeat(source: Pictures) -> None:
    short = list(source.batches(batch_size=2, steps=1))
    long = list(source.batches(batch_size=2, steps=2))
    assert np.array_equal(short[0][0], long[0][0])
    assert not np.array_equal(long[0][0], long[1][0])


def test_all_classes_occur_and_pixels_are_normalised(source: Pictures) -> None:
    images, labels = next(source.batches(batch_size=600, steps=1))
    assert set(labels.tolist()) == set(range(10))
    assert np.abs(images.mean(axis=(0, 2, 3))).max() < 0.2
    assert np.abs(images.std(axis=(0, 2, 3)) - 1).max() < 0.2


def test_a_sample_is_a_piece_of_the_picture_of_its_label(source: Pictures) -> None:
    images, labels = next(source.batches(batch_size=5, steps=1, seed=7))
    for image, label in zip(images, labels, strict=True):
        pixels = image.transpose(1, 2, 0) * source._deviation + source._mean
        whole = source._pictures[label]
        corners = np.argwhere((np.abs(whole - pixels[0, 0]) < 0.01).all(axis=2))
        assert any(
            np.allclose(whole[y : y + 32, x : x + 32], pixels, atol=0.01)
            for y, x in corners
            if whole[y : y + 32, x : x + 32].shape == pixels.shape
        )


def test_a_crop_larger_than_the_picture_continues_in_its_mirror() -> None:
    pytest.importorskip("skimage")
    source = Pictures(image_size=1100, classes=1)  # the tissue is 512 x 512
    images, _ = next(source.batches(batch_size=1, steps=1))
    assert images.shape == (1, 3, 1100, 1100)
    assert np.array_equal(images[..., :76], images[..., 1024:])  # the period is 2 x 512


def test_mirrored_indices_turn_around_at_both_edges() -> None:
    class Start:
        def integers(self, high: int) -> int:
            assert high == 3
            return 2

    index = pictures._window(3, 8, Start())  # type: ignore[arg-type]
    assert index.tolist() == [2, 2, 1, 0, 0, 1, 2, 2]


def test_grey_pictures_have_three_equal_channels() -> None:
    pytest.importorskip("skimage")
    brick = pictures._read("brick.png")
    assert brick.shape == (512, 512, 3)
    assert np.array_equal(brick[..., 0], brick[..., 2])


def test_bad_numbers_are_refused_with_their_values() -> None:
    with pytest.raises(ValueError, match=f"99 classes, but there are 1 to {len(FILES)}"):
        Pictures(classes=99)
    with pytest.raises(ValueError, match="image_size is 0"):
        Pictures(image_size=0)
    with pytest.raises(ValueError, match="classes 0"):
        Synthetic(classes=0)


def test_without_scikit_image_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(GemsError, match=r"scikit-image.*pip install gems\[data\]"):
        Pictures()


def test_a_picture_that_is_not_in_the_wheel_is_named() -> None:
    pytest.importorskip("skimage")
    with pytest.raises(GemsError, match=r"does not contain lily\.tif"):
        pictures._resource("lily.tif")


def test_data_needs_no_framework() -> None:
    code = (
        "import sys, gems.data.pictures, gems.data.synthetic\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'skimage', 'imageio')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("size", "shape"), [(8, (3, 8, 8)), ((5, 7), (3, 5, 7)), ((2, 3, 4), (3, 2, 3, 4))]
)
def test_synthetic_batches_have_any_size(
    size: int | tuple[int, ...], shape: tuple[int, ...]
) -> None:
    source = Synthetic(image_size=size, classes=4)
    first, second = list(source.batches(batch_size=2, steps=2, seed=5))
    assert source.shape == shape and first[0].shape == (2, *shape)
    assert first[0].dtype == np.float32 and first[1].dtype == np.int64
    assert not np.array_equal(first[0], second[0])
    again = next(source.batches(batch_size=2, steps=1, seed=5))
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])


def test_synthetic_labels_cover_the_classes_and_nothing_else() -> None:
    _, labels = next(Synthetic(image_size=1, classes=3).batches(batch_size=100, steps=1))
    assert set(labels.tolist()) == {0, 1, 2}
