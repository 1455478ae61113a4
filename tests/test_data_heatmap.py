"""Heat maps, opened again by the readers that people use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gems.data.heatmap import COLOURS, RAMP, heat_map, ramp
from gems.data.slides import Slides
from gems.errors import GemsError
from tests.slides import on_glass, write

pytest.importorskip("skimage")
NAMES = ("normal", "tumor")


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("heat") / "case 7.tif", on_glass())


def scores(tiles: int) -> np.ndarray:
    tumor = np.linspace(0, 1, tiles)
    return np.stack([1 - tumor, tumor], axis=1)


def test_the_picture_tints_tiles_and_leaves_glass_alone(slide: Path, tmp_path: Path) -> None:
    from PIL import Image

    source = Slides(slide, 64, tissue=0.5)
    coords = source.tiles[0].coords
    maps = heat_map(tmp_path, slide, coords, 64, scores(len(coords)), NAMES)
    assert maps.png.name == "case 7.png" and sorted(p.name for p in tmp_path.iterdir()) == [
        "case 7.geojson",
        "case 7.ome.tif",
        "case 7.png",
    ]
    picture = np.asarray(Image.open(maps.png)).astype(int)
    assert picture.shape == (700, 600, 3)  # smaller than 2048, so as it is
    plain = on_glass().astype(int)
    tinted = np.zeros((700, 600), bool)
    for (x, y), (_, tumor) in zip(coords.tolist(), scores(len(coords)), strict=True):
        place = slice(y, y + 64), slice(x, x + 64)
        tinted[place] = True
        wanted = (plain[place] + ramp(np.array(tumor))) / 2
        assert np.abs(picture[place] - wanted).max() <= 0.51
    assert np.array_equal(picture[~tinted], plain[~tinted])


def test_the_outlines_are_what_qupath_reads(slide: Path, tmp_path: Path) -> None:
    coords, found = [[0, 0], [64, 0], [64, 128]], [[0.9, 0.1], [0.25, 0.75], [0.5, 0.5]]
    told = json.loads(heat_map(tmp_path, slide, coords, 64, found, NAMES).geojson.read_text())
    assert told["type"] == "FeatureCollection" and len(told["features"]) == 3
    assert len({f["id"] for f in told["features"]}) == 3
    second = told["features"][1]
    assert second["type"] == "Feature" and second["geometry"]["type"] == "Polygon"
    assert second["geometry"]["coordinates"] == [[[64, 0], [128, 0], [128, 64], [64, 64], [64, 0]]]
    properties = second["properties"]
    assert properties["objectType"] == "tile"
    assert properties["classification"] == {"name": "tumor", "color": list(COLOURS[1])}
    assert properties["measurements"] == {"normal": 0.25, "tumor": 0.75}
    again = json.loads(heat_map(tmp_path, slide, coords, 64, found, NAMES).geojson.read_text())
    assert again == told


@pytest.mark.parametrize("stride", [64, 32])
def test_the_raster_has_a_plane_per_class_and_physical_sizes(
    slide: Path, tmp_path: Path, stride: int
) -> None:
    import tifffile

    source = Slides(slide, 64, stride=stride, tissue=0.5)
    coords = source.tiles[0].coords
    maps = heat_map(tmp_path, slide, coords, 64, scores(len(coords)), NAMES)
    with tifffile.TiffFile(maps.ome) as file:
        assert file.is_ome and file.series[0].axes == "CYX"
        planes = file.asarray()
        told = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
    assert planes.dtype == np.float32
    assert planes.shape == (2, -(-700 // stride), -(-600 // stride))
    assert told["PhysicalSizeX"] == told["PhysicalSizeY"] == 0.5 * stride
    assert told["PhysicalSizeXUnit"] == "µm"
    assert [c["Name"] for c in told["Channel"]] == list(NAMES)
    assert np.isfinite(planes[0]).sum() == len(coords)
    x, y = coords[5] // stride
    assert np.allclose(planes[:, y, x], scores(len(coords))[5])


def test_another_class_can_be_shown_and_scores_run_from_blue_to_red(
    slide: Path, tmp_path: Path
) -> None:
    from PIL import Image

    shown = [
        np.asarray(Image.open(heat_map(tmp_path, slide, [[0, 0]], 64, [[0, 1]], NAMES, n).png))
        for n in (0, 1)
    ]
    blue, red = (picture[:64, :64].mean(axis=(0, 1)) for picture in shown)
    assert blue[2] > red[2] and red[0] > blue[0]
    assert np.array_equal(ramp(np.array([0.0, 0.5, 1.0])), RAMP[[0, 2, 4]])


def test_what_does_not_fit_together_is_refused(slide: Path, tmp_path: Path) -> None:
    with pytest.raises(GemsError, match=r"scores are \(1, 3\); 1 tiles of the 2 classes"):
        heat_map(tmp_path, slide, [[0, 0]], 64, [[1, 2, 3]], NAMES)
    with pytest.raises(GemsError, match=r"coords are \(0,\)"):
        heat_map(tmp_path, slide, [], 64, [], NAMES)
    with pytest.raises(GemsError, match="does not exist"):
        heat_map(tmp_path, tmp_path / "none.svs", [[0, 0]], 64, [[0, 1]], NAMES)
    assert not list(tmp_path.iterdir())
