"""Images larger than memory, by command: resident memory is measured from outside.

Small here. In full, as docs/large-images.md reports it:

    GEMS_SLIDE=100000 GEMS_VOLUME=512 python -m pytest tests/test_bounded_memory.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gems.data.rasters.openslide import Slide
from gems.data.rasters.tiff import Tiff
from gems.data.slides import Slides
from gems.data.sparse_slide import NAMES, sparse_slide

SIDE = int(os.environ.get("GEMS_SLIDE", "20000"))
CUBE = int(os.environ.get("GEMS_VOLUME", "64"))
LONG = pytest.mark.timeout(3600)  # in full
MOST = {"slide": 1 << 30, "volume": 3 << 30}  # bytes, whatever the size


def resident(*arguments: object) -> tuple[int, str]:
    """The most resident bytes of a `gems` of one rank, as the kernel counted, and what it said."""
    command = [sys.executable, "-m", "gems", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said[-3000:]
    return usage.ru_maxrss * 1024, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slide")


def test_glass_takes_no_space_and_readers_agree_on_it(folder: Path) -> None:
    slide = sparse_slide(folder, 4096, 256).slide
    ours, theirs = Tiff(slide), Slide(slide)
    assert slide.stat().st_size < 4096**2 * 3 / 100
    assert 0 in ours._pages[0].databytecounts
    assert [level.shape for level in ours.levels] == [level.shape for level in theirs.levels]
    for level, (rows, columns) in ((0, (900, 1300)), (0, (3900, 3900)), (1, (100, 300))):
        box = (rows, rows + 300), (columns, columns + 300)
        assert np.array_equal(ours.read(level, *box), theirs.read(level, *box))


def test_labels_are_those_of_the_pixels(folder: Path) -> None:
    found = sparse_slide(folder, 4096, 64)
    slides = Slides(found.slide, 64, labels=found.labels)
    assert slides.names == NAMES
    dark = [[], []]
    for i in range(len(slides)):
        everything = slice(0, 64), slice(0, 64)
        pixels = slides.read(i, everything)
        dark[int(slides.target(i, everything))].append(float(pixels.mean()))
    assert len(dark[0]) > 10 and len(dark[1]) > 10
    assert np.mean(dark[1]) < np.mean(dark[0]) - 0.1, "tumours have more nuclei"


def test_without_labels_tissue_is_looked_for(folder: Path) -> None:
    found = sparse_slide(folder, 4096, 64)
    listed, seen = Slides(found.slide, 64, labels=found.labels), Slides(found.slide, 64)
    first, second = ({x.place(i)[1:] for i in range(len(x))} for x in (listed, seen))
    assert seen.classes == 0
    assert len(first & second) > 0.8 * max(len(first), len(second)), "but for rims"


def test_the_file_is_made_once(folder: Path) -> None:
    first = sparse_slide(folder, 4096, 64)
    before = first.slide.stat()
    assert sparse_slide(folder, 4096, 64) == first
    assert first.slide.stat() == before
    with pytest.raises(ValueError, match="side is 100 and tile 64; take a side of 2048 or more"):
        sparse_slide(folder, 100, 64)


@LONG
def test_a_slide_is_trained_on_and_mapped_in_bounded_memory(folder: Path, tmp_path: Path) -> None:
    found = sparse_slide(folder, SIDE, 256 if SIDE < 50_000 else 512)
    assert MOST["slide"] < SIDE**2 * 3, "or it could be held whole"
    used, said = resident(
        "train", "--app", "medical", "--datapath", found.slide, "--labels", found.labels,
        "--image-size", found.tile // 4, "--level", 1, "--model", "resnet-v2", "--num-layers", 11,
        "--num-filters", 4, "--batch-size", 4, "--steps", 4, "--no-enable-evaluation",
        "--optimizer", "adam", "--learning-rate", 0.01, "--heat-map", "--out", tmp_path,
    )  # fmt: skip
    assert used < MOST["slide"], f"{used:,} bytes"
    picture = tmp_path / f"{found.slide.stem}.png"
    assert "loss:" in said and picture.is_file()
    print(f"{SIDE} x {SIDE}: {used:,} bytes; {picture}")


@LONG
def test_a_volume_is_trained_on_in_patches_in_bounded_memory(tmp_path: Path) -> None:
    stream = ",".join("x".join([str(max(2, CUBE // n))] * 3) for n in (64, 128))
    used, said = resident(
        "train", "--app", "cosmology", "--model", "cosmoflow", "--image-size", CUBE,
        "--samples", 2, "--steps", 1, "--no-enable-evaluation", "--no-save",
        "--split-size", 3, "--ranks", 1, "--schedule", "sequential",
        "--balance", "6,3,19" if CUBE < 128 else "6,3,22", "--stream", stream,
        "--model-option", f"width={4 if CUBE < 128 else 16}", "--out", tmp_path,
    )  # fmt: skip
    assert used < MOST["volume"], f"{used:,} bytes"
    assert "loss" in said
    print(f"{CUBE} x {CUBE} x {CUBE}: {used:,} bytes")
