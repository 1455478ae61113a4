"""Samples of real and of random images."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gems.data import pictures
from gems.data.pictures import FILES, Pictures
from gems.data.source import whole
from gems.data.synthetic import Synthetic
from gems.errors import GemsError

ROOT = Path(pictures.__file__).parents[2]
ALL = whole((32, 32))


@pytest.fixture(scope="module")
def source() -> Pictures:
    pytest.importorskip("skimage")
    return Pictures(image_size=32, classes=10)


def test_every_picture_is_a_file_of_the_wheel() -> None:
    pytest.importorskip("skimage")
    shipped = {str(f) for f in importlib.metadata.files("scikit-image") or ()}
    assert {f"skimage/data/{file}" for file in FILES} <= shipped


def test_samples_are_float32_with_int64_labels(source: Pictures) -> None:
    image, label = source.read(3, ALL), source.target(3, ALL)
    assert image.shape == source.shape == (3, 32, 32) and image.dtype == np.float32
    assert label.shape == () and label.dtype == np.int64 and label == 3


def test_the_same_seed_gives_the_same_samples(source: Pictures) -> None:
    again, other = Pictures(samples=5), Pictures(seed=4)
    assert np.array_equal(source.read(3, ALL), again.read(3, ALL))
    assert not np.array_equal(source.read(3, ALL), other.read(3, ALL))
    assert not np.array_equal(source.read(3, ALL), source.read(13, ALL))  # the same picture


def test_all_classes_occur_and_pixels_are_normalised(source: Pictures) -> None:
    images = np.stack([source.read(i, ALL) for i in range(600)])
    assert {int(source.target(i, ALL)) for i in range(600)} == set(range(10))
    assert np.abs(images.mean(axis=(0, 2, 3))).max() < 0.2
    assert np.abs(images.std(axis=(0, 2, 3)) - 1).max() < 0.2


def test_a_sample_is_a_piece_of_the_picture_of_its_label(source: Pictures) -> None:
    for index in range(5):
        pixels = source.read(index, ALL).transpose(1, 2, 0) * source._deviation + source._mean
        whole = source._pictures[int(source.target(index, ALL))]
        corners = np.argwhere((np.abs(whole - pixels[0, 0]) < 0.01).all(axis=2))
        assert any(
            np.allclose(whole[y : y + 32, x : x + 32], pixels, atol=0.01)
            for y, x in corners
            if whole[y : y + 32, x : x + 32].shape == pixels.shape
        )


def test_a_crop_larger_than_the_picture_continues_in_its_mirror() -> None:
    pytest.importorskip("skimage")
    source = Pictures(image_size=1100, classes=1)  # the tissue is 512 x 512
    image = source.read(0, (slice(0, 9), slice(0, 1100)))
    assert image.shape == (3, 9, 1100)
    assert np.array_equal(image[..., :76], image[..., 1024:])  # the period is 2 x 512


def test_mirrored_indices_turn_around_at_both_edges() -> None:
    class Start:
        def integers(self, high: int) -> int:
            assert high == 3
            return 2

    index = pictures._window(3, 8, Start())  # type: ignore[arg-type]
    assert index.tolist() == [2, 2, 1, 0, 0, 1, 2, 2]


def test_grey_pictures_have_three_equal_channels() -> None:
    pytest.importorskip("skimage")
    brick = pictures.read_picture("brick.png")
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
    with pytest.raises(GemsError, match=r"scikit-image.*pip install gems-hires\[data\]"):
        Pictures()


def test_a_picture_that_is_not_in_the_wheel_is_named() -> None:
    pytest.importorskip("skimage")
    with pytest.raises(GemsError, match=r"does not contain lily\.tif"):
        pictures._resource("lily.tif")


def test_data_needs_no_framework() -> None:
    code = (
        "import sys, gems.data.loader, gems.data.pictures, gems.data.synthetic, gems.data.slides\n"
        "import gems.data.volumes, gems.data.cifar, gems.data.folders, gems.data.heatmap\n"
        "heavy = ('torch', 'skimage', 'imageio', 'openslide', 'tifffile', 'h5py', 'zarr', 'PIL')\n"
        "sys.exit(any(m in sys.modules for m in heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("size", "shape"), [(8, (3, 8, 8)), ((5, 7), (3, 5, 7)), ((2, 3, 4), (3, 2, 3, 4))]
)
def test_synthetic_samples_have_any_size(
    size: int | tuple[int, ...], shape: tuple[int, ...]
) -> None:
    source = Synthetic(image_size=size, classes=4)
    first, second = (source.read(i, whole(shape[1:])) for i in (0, 1))
    assert source.shape == first.shape == shape and first.dtype == np.float32
    assert not np.array_equal(first, second)
    assert np.array_equal(first, Synthetic(size, classes=4, samples=1).read(0, whole(shape[1:])))
    assert not np.array_equal(first, Synthetic(size, seed=1).read(0, whole(shape[1:])))


def test_noise_has_mean_0_and_deviation_1_in_every_channel_and_row() -> None:
    noise = Synthetic(400).read(7, whole((400, 400)))
    assert np.abs(noise.mean(axis=(1, 2))).max() < 0.01
    assert np.abs(noise.std(axis=(1, 2)) - 1).max() < 0.01
    assert np.abs(noise.mean(axis=2)).max() < 0.25 and np.abs(noise.mean(axis=1)).max() < 0.25
    assert abs(np.corrcoef(noise[0, :-1].ravel(), noise[0, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.01


def test_noise_of_an_image_that_no_memory_holds_is_drawn_by_the_box() -> None:
    source = Synthetic((10**6, 10**6), task="segment", classes=3)
    box = (slice(999_000, 999_004), slice(500_000, 500_005))
    assert source.read(0, box).shape == (3, 4, 5)
    inner = (slice(999_001, 999_003), slice(500_002, 500_005))
    assert np.array_equal(source.read(0, box)[:, 1:3, 2:], source.read(0, inner))
    assert np.array_equal(source.target(0, box)[1:3, 2:], source.target(0, inner))


def test_synthetic_labels_cover_the_classes_and_nothing_else() -> None:
    source = Synthetic(image_size=1, classes=3, samples=100)
    assert {int(source.target(i, ALL)) for i in range(100)} == {0, 1, 2}
    mask = Synthetic(20, classes=3, task="segment").target(0, whole((20, 20)))
    assert mask.shape == (20, 20) and mask.dtype == np.int64 and set(mask.flat) == {0, 1, 2}
