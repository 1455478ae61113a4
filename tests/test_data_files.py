"""CIFAR-10, folders of pictures and volumes, from files as they are published."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems.data.cifar import NORMAL, TEST, TRAIN, Cifar10
from gems.data.folders import Folders
from gems.data.loader import Loader
from gems.data.pixels import Normal
from gems.data.source import Source, whole
from gems.data.volumes import Volumes
from gems.errors import GemsError
from tests.test_data_loader import bounds

ALL = whole((32, 32))
ROWS = np.random.default_rng(0).integers(0, 256, (6, 4, 3072), np.uint8)
LABELS = np.random.default_rng(1).integers(0, 10, (6, 4))


def python_files(folder: Path) -> Path:
    """As Python 2 pickled them: protocol 2, keys and texts are bytes."""
    folder.mkdir(parents=True)
    for name, rows, labels in zip((*TRAIN, *TEST), ROWS, LABELS, strict=True):
        told = {b"batch_label": b"a batch", b"labels": labels.tolist(), b"data": rows}
        content = pickle.dumps(told, protocol=2).replace(b"numpy._core", b"numpy.core")
        (folder / name).write_bytes(content)
    return folder


def binary_files(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, rows, labels in zip((*TRAIN, *TEST), ROWS, LABELS, strict=True):
        records = np.concatenate([labels[:, None].astype(np.uint8), rows], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def archive(files: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        inside = files(folder / "cifar-10-batches")
        path = folder / "cifar-10.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            tar.add(inside, inside.name)
        return path

    return made


def above(folder: Path) -> Path:
    return python_files(folder / "cifar-10-batches-py").parent


@pytest.mark.parametrize(
    "make",
    [python_files, binary_files, above, archive(python_files), archive(binary_files)],
    ids=["python", "binary", "folder above", "python archive", "binary archive"],
)
def test_cifar_is_read_from_each_published_form(make: Any, tmp_path: Path) -> None:
    made = make(tmp_path / "x")
    source = Cifar10(made)
    assert len(source) == 20 and source.shape == (3, 32, 32) and source.names[3] == "cat"
    for index in (0, 5, 19):
        picture = ROWS[:5].reshape(-1, 3, 32, 32)[index].transpose(1, 2, 0)
        assert np.array_equal(source.read(index, ALL), NORMAL.image(picture))
        assert source.target(index, ALL) == LABELS[:5].ravel()[index]
    test = Cifar10(made, train=False)
    assert [int(test.target(i, ALL)) for i in range(4)] == LABELS[5].tolist()


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/gems-was-here"),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({b"data": Evil(), b"labels": []}), "asks for pathlib"),
        (pickle.dumps({b"data": np.array([print], object), b"labels": [1]}), "array of 'O8'"),
        (pickle.dumps({b"data": print, b"labels": [1]}), "asks for builtins"),
        (pickle.dumps([1, 2]), "holds a list"),
        (pickle.dumps({b"data": ROWS[0], b"labels": [1]}), "no list of 4 `labels`"),
        (pickle.dumps({b"data": ROWS[0][:, :9], b"labels": [1]}), "no `data` of 3072"),
        (pickle.dumps({b"data": ROWS[0], b"labels": [1, 2, 3, 10]}), "outside of 0 to 9"),
        (pickle.dumps({b"data": ROWS[0], b"labels": [1]})[:500], "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_a_foreign_or_damaged_pickle_is_refused_and_not_run(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (python_files(tmp_path / "x") / "data_batch_3").write_bytes(content)
    with pytest.raises(GemsError, match=message):
        Cifar10(tmp_path / "x")
    assert not Path("/tmp/gems-was-here").exists()


def test_missing_files_of_cifar_are_named(tmp_path: Path) -> None:
    (binary_files(tmp_path / "x") / "data_batch_2.bin").unlink()
    with pytest.raises(GemsError, match=r"lacks data_batch_2\.bin"):
        Cifar10(tmp_path / "x")
    with pytest.raises(GemsError, match="has no data_batch_1"):
        Cifar10(Path(__file__).parent)
    with pytest.raises(GemsError, match="neither the folder nor the archive"):
        Cifar10(tmp_path / "nowhere.tar.gz")
    (tmp_path / "x" / "data_batch_2.bin").write_bytes(b"123")
    with pytest.raises(GemsError, match="3 bytes, not a multiple of 3073"):
        Cifar10(tmp_path / "x")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of several sizes, modes and endings, in folders `dog` and `cat`."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for name, size in (("cat/a.png", (20, 30)), ("dog/b.png", (40, 40)), ("dog/c/d.png", (9, 50))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / name)
    Image.fromarray(rng.integers(0, 256, (33, 21), np.uint8)).save(folder / "cat" / "grey.png")
    (folder / "cat" / "notes.txt").write_text("not a picture")
    return folder


def test_folders_are_classes(pictures: Path) -> None:
    source = Folders(pictures, 16)
    assert len(source) == 4 and source.names == ("cat", "dog") and source.shape == (3, 16, 16)
    assert [int(source.target(i, ALL)) for i in range(4)] == [0, 0, 1, 1]
    assert Folders(pictures, 16, names=("dog", "cat")).target(0, ALL) == 1
    with pytest.raises(GemsError, match="labels cat, dog are not among"):
        Folders(pictures, 16, names=("bird",))
    with pytest.raises(GemsError, match="no pictures in folders"):
        Folders(pictures / "cat")


def test_a_picture_of_the_right_size_is_as_it_is_and_others_are_fitted(pictures: Path) -> None:
    from PIL import Image

    square = np.asarray(Image.open(pictures / "dog" / "b.png"))
    normal = Normal((0.0,) * 3, (1 / 255,) * 3)  # leaves pixels as they are
    for fit in ("resize", "crop"):
        source = Folders(pictures, 40, fit=fit, normal=normal)
        assert np.allclose(source.read(2, whole((40, 40))), square.transpose(2, 0, 1), atol=1e-3)
        half = Folders(pictures, 20, fit=fit, normal=normal).read(2, whole((20, 20)))
        mean = square.reshape(20, 2, 20, 2, 3).mean(axis=(1, 3)).transpose(2, 0, 1)
        assert np.allclose(half, mean, atol=1e-3)
    wide = np.asarray(Image.open(pictures / "cat" / "a.png"))  # 20 x 30
    cropped = Folders(pictures, 20, fit="crop", normal=normal).read(0, whole((20, 20)))
    assert np.allclose(cropped, wide[:, 5:25].transpose(2, 0, 1), atol=1e-3)


@pytest.mark.parametrize("fit", ["resize", "crop"])
@pytest.mark.parametrize("size", [(11, 11), (64, 48)])
@given(data=st.data())
def test_any_box_of_a_fitted_picture(
    pictures: Path, fit: Any, size: tuple[int, int], data: st.DataObject
) -> None:
    check_box(Folders(pictures, size, fit=fit), data)


@given(data=st.data())
def test_any_box_of_a_resampled_cifar_picture(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "cifar-boxes"
    if not folder.exists():
        binary_files(folder)
    check_box(Cifar10(folder, False, data.draw(st.sampled_from([32, 20, 50]))), data)


def test_sources_go_to_other_processes(pictures: Path, tmp_path: Path) -> None:
    for source in (Folders(pictures, 8), Cifar10(binary_files(tmp_path / "x"))):
        box = whole(source.shape[1:])
        before = source.read(1, box)
        assert np.array_equal(pickle.loads(pickle.dumps(source)).read(1, box), before)


def check_box(source: Source, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(source) - 1))
    sides = source.shape[1:]
    box = tuple(slice(*data.draw(bounds(n))) for n in sides)
    everything = source.read(index, whole(sides))
    assert everything.shape == source.shape and everything.dtype == np.float32
    assert np.array_equal(source.read(index, box), everything[(slice(None), *box)])
    if source.task == "segment":
        assert np.array_equal(source.target(index, box), source.target(index, whole(sides))[box])


def test_a_picture_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "bad.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(GemsError, match=r"bad\.png cannot be read as a picture"):
        Folders(tmp_path, 8).read(0, whole((8, 8)))


CELLS = np.random.default_rng(2).normal(size=(5, 2, 6, 7, 8)).astype(np.float32)
MASKS = np.random.default_rng(3).integers(0, 3, (5, 6, 7, 8)).astype(np.uint8)
NUMBERS = [4, 2, 4, 9, 2]


def store(path: Path, arrays: dict[str, Any]) -> None:
    """Write arrays as HDF5 or Zarr, as the ending says."""
    if path.suffix == ".zarr":
        import zarr

        group = zarr.open_group(str(path), mode="w")
        for name, array in arrays.items():
            chunks = tuple(min(3, n) for n in array.shape)
            group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks)
            group[name][...] = array
        return
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, chunks=True if array.shape else None)


@pytest.fixture(scope="module", params=["one.h5", "one.zarr", "many.h5", "many.zarr"])
def volumes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All samples in one file, or each in its own."""
    count, ending = request.param.split(".")
    folder = tmp_path_factory.mktemp("volumes")
    numbers = np.array(NUMBERS)
    if count == "one":
        arrays = {"images": CELLS, "labels": numbers, "masks": MASKS, "grey": CELLS[:, 0]}
        store(folder / request.param, arrays)
        return folder / request.param
    for i, (image, mask) in enumerate(zip(CELLS, MASKS, strict=True)):
        arrays = {"images": image, "labels": numbers[i : i + 1], "masks": mask, "grey": image[0]}
        store(folder / f"{i}.{ending}", arrays)
    return folder


@pytest.mark.parametrize("task", ["classify", "segment"])
def test_volumes_are_read_by_the_box(volumes: Path, task: str) -> None:
    told: Any = {"labels": "labels"} if task == "classify" else {"masks": "masks", "names": "abc"}
    source = Volumes(volumes, mean=0.5, deviation=2.0, **told)
    assert len(source) == 5 and source.shape == (2, 6, 7, 8) and source.task == task

    @settings(max_examples=15)
    @given(index=st.integers(0, 4), spans=st.tuples(bounds(6), bounds(7), bounds(8)))
    def check(index: int, spans: tuple[tuple[int, int], ...]) -> None:
        box = tuple(slice(*span) for span in spans)
        wanted = (CELLS[index] - np.float32(0.5)) / np.float32(2)
        assert np.array_equal(source.read(index, box), wanted[(slice(None), *box)])
        target = source.target(index, box)
        if task == "segment":
            assert target.dtype == np.int64 and np.array_equal(target, MASKS[index][box])
        else:
            assert source.names[int(target)] == str(NUMBERS[index])

    check()
    assert source.names == (("2", "4", "9") if task == "classify" else ("a", "b", "c"))


def test_volumes_without_channels_have_one(volumes: Path) -> None:
    source = Volumes(volumes, images="grey", labels="labels")
    assert source.shape == (1, 6, 7, 8)
    assert np.array_equal(source.read(1, whole((6, 7, 8)))[0], CELLS[1, 0])


def test_threads_read_volumes_at_the_same_time_and_copies_elsewhere(volumes: Path) -> None:
    source = pickle.loads(pickle.dumps(Volumes(volumes, masks="masks", names="abc")))
    with Loader(source, 2, shuffle=False, workers=3) as loader:
        for step, (images, masks) in enumerate(loader.epoch()):
            assert np.array_equal(images[:, :, 1:4], CELLS[2 * step : 2 * step + 2, :, 1:4])
            assert np.array_equal(masks[:, 1:4], MASKS[2 * step : 2 * step + 2, 1:4])


def test_labels_of_volumes_come_from_a_table_or_an_attribute(tmp_path: Path) -> None:
    import h5py

    for i in range(3):
        store(tmp_path / f"{i}.h5", {"images": CELLS[i]})
        with h5py.File(tmp_path / f"{i}.h5", "a") as file:
            file.attrs["grade"] = i % 2
    (tmp_path / "labels.csv").write_text("volume,label\n0,low\n1,high\n2.h5,low\n")
    source = Volumes(tmp_path, labels=tmp_path / "labels.csv")
    assert [source.names[int(source.target(i, ()))] for i in range(3)] == ["low", "high", "low"]
    assert [int(Volumes(tmp_path, labels="grade").target(i, ())) for i in range(3)] == [0, 1, 0]
    (tmp_path / "labels.csv").write_text("volume,label\n0,low\n")
    with pytest.raises(GemsError, match=r"(?s)no label for.*1\.h5.*2\.h5"):
        Volumes(tmp_path, labels=tmp_path / "labels.csv")


def test_volumes_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    store(tmp_path / "a.h5", {"images": CELLS[0], "masks": MASKS[0]})
    store(tmp_path / "b.h5", {"images": CELLS[0, :, :3], "masks": MASKS[0, :, :2]})
    with pytest.raises(GemsError, match=r"(?s)b\.h5 is \(2, 3, 7, 8\).*masks of .*b\.h5 is"):
        Volumes(tmp_path, masks="masks", names="abc")
    with pytest.raises(GemsError, match="has no array 'scans', but images, masks"):
        Volumes(tmp_path / "a.h5", images="scans", labels="labels")
    with pytest.raises(GemsError, match="neither an array nor an attribute 'grade'"):
        Volumes(tmp_path / "a.h5", labels="grade", dims=2)
    with pytest.raises(ValueError, match="give one of labels"):
        Volumes(tmp_path)
    (tmp_path / "b.h5").write_bytes(b"garbage")
    with pytest.raises(GemsError, match=r"b\.h5 cannot be read as HDF5"):
        Volumes(tmp_path, labels="grade")
    source = Volumes(tmp_path / "a.h5", images="masks", masks="masks", names="ab", dims=2)
    with pytest.raises(GemsError, match="classes 0 to 2, but there are 2: 0 to 1"):
        source.target(0, whole((7, 8)))


def test_a_pickle_reads_arrays_as_numpy_writes_them_today() -> None:
    from gems.data.cifar import _Plain

    for protocol in range(2, 6):
        told = {"data": ROWS[0], "labels": [1], b"text": "ü", "more": b"\xff"}
        again = _Plain(io.BytesIO(pickle.dumps(told, protocol)), encoding="bytes").load()
        data = again["data"] if "data" in again else again[b"data"]
        assert np.array_equal(data.pixels, ROWS[0])
