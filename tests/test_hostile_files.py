"""Every file that GEMS reads, made hostile: it is read, or rejected with one message of ours.

Within bounded time and memory, and nothing of it is run. GEMS_HOSTILE=1000 tries a thousand changes
of every kind of file instead of the few of CI; GEMS_HOSTILE_SEED takes others.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import random
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gems.cli.main import main
from gems.data.cifar import Cifar10
from gems.data.folders import Folders
from gems.data.masks import Mask
from gems.data.slides import Slides
from gems.data.source import whole as everything
from gems.data.tiles import read_coords
from gems.data.volumes import Volumes
from gems.draw.html import _embedded
from gems.errors import GemsError
from gems.files import to_json
from gems.hardware import MACHINES
from gems.plans.plan import Plan
from gems.schedule.build import lowered
from gems.torch.checkpoint import manifest as manifests
from gems.torch.checkpoint.weight_files import read_weights, write_weights
from gems.torch.trainer import Trainer
from tests.exact import same_state
from tests.hostile import bounded, changed, outcome, replaced, spelled
from tests.saved import ONE, network, on_ranks, saved
from tests.test_damage import Malice, sign

TIMES = int(os.environ.get("GEMS_HOSTILE", "0"))
SEED = int(os.environ.get("GEMS_HOSTILE_SEED", "13"))


def tried(
    times: int, change: Callable[[random.Random], bytes], read: Callable[[bytes], Any], name: str
) -> Counter[str]:
    """How often it was read or rejected; anything else fails, with the bytes that did it."""
    found: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    for number in range(TIMES or times):
        data = change(random.Random(f"{SEED} {name} {number}"))
        how = outcome(lambda data=data: read(data))
        found[how] += 1
        if how not in ("read", "rejected"):
            wrong.setdefault(how[:60], f"number {number}: {how}\n    {data[:300]!r}")
    assert not wrong, f"{name}: {dict(found)}\n" + "\n".join(wrong.values())
    assert found["rejected"], f"no change of {name} was rejected: the generator is too mild"
    return found


# --- the command line -----------------------------------------------------------------------------


def typed(*words: object) -> None:
    """Run a command; an error of one message is a GemsError here, and a traceback is none."""
    told, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(printed):
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
    if code:
        assert code in (1, 2), code
        said = told.getvalue()
        assert "Traceback" not in said and said.strip(), said
        assert not any(c < " " and c not in "\n\t" for c in said), repr(said)
        raise GemsError(said)


TIMELINE = (Path(__file__).parent.parent / "docs" / "step.json").read_bytes()
PLANS = (
    Plan(stages=2, micro_batches=4),
    Plan(stages=3, replications=2, schedule="gems"),
    Plan(stages=3, spatial=((2, 2), (1, 2)), halo="d2", fused_layers=2),
    Plan(
        stages=(("a",), ("b", "c")), placement=(0, 1), recompute=("always", "never"), zero=1, data=2
    ),
)
CONFIG = b"""# a run
model: resnet110-v2
image-size: 32
num_epochs: 5
learning-rate: 0.1
model-option: {width: 8}
balance: [1, 2]
split-size: 2
augment: true
out: runs/x
"""
TOML = (
    b'model = "resnet18"\nimage-size = 32\nlearning-rate = 0.1\naugment = true\nbalance = [1, 2]\n'
)


@dataclass(frozen=True)
class Kind:
    """A kind of file: how one is written and changed, and what reads it."""

    ending: str
    valid: Callable[[], bytes]
    read: Callable[[Path], Any]
    times: int = 40
    as_json: bool = False


def of_json(value: Any) -> Callable[[], bytes]:
    return lambda: to_json(value).encode()


def image(kind: str, mode: str = "RGB") -> Callable[[], bytes]:
    def made() -> bytes:
        from PIL import Image

        pixels = np.random.default_rng(0).integers(0, 255, (40, 48, 3), np.uint8)
        held = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(held, kind)
        return held.getvalue()

    return made


def tiled() -> bytes:
    import tifffile

    held = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)
    with tifffile.TiffWriter(held, bigtiff=True) as file:
        for n in (1, 2):
            file.write(
                pixels[::n, ::n], tile=(16, 16), photometric="rgb", compression="zlib",
                resolution=(20_000 / n,) * 2, resolutionunit="CENTIMETER", metadata=None,
            )  # fmt: skip
    return held.getvalue()


def mask() -> bytes:
    import tifffile

    held = io.BytesIO()
    pixels = np.zeros((64, 96), np.uint8)
    tifffile.imwrite(held, pixels, tile=(16, 16), compression="zlib", metadata=None)
    return held.getvalue()


def volumes() -> bytes:
    import h5py

    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        file["images"] = np.zeros((3, 4, 4, 4), np.float32)
        file["labels"] = np.arange(3)
    return held.getvalue()


def zarr_at(path: Path) -> None:
    """The metadata of an array of a Zarr group."""
    import zarr

    group = path.parent / "v.zarr"
    if not group.exists():
        made = zarr.open_group(str(group), mode="w")
        made.create_array("images", data=np.zeros((3, 4, 4, 4), np.float32))
        made.create_array("labels", data=np.arange(3))
    (group / "images" / "zarr.json").write_bytes(path.read_bytes())
    all_of(Volumes(group, labels="labels"))


def zarr_form() -> bytes:
    import tempfile

    import zarr

    with tempfile.TemporaryDirectory() as folder:
        zarr.create_array(folder, name="a", data=np.zeros((3, 4, 4, 4), np.float32))
        return (Path(folder) / "a" / "zarr.json").read_bytes()


def coords() -> bytes:
    import h5py

    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        made = file.create_dataset("coords", data=np.zeros((5, 2), np.int64))
        made.attrs["patch_size_level0"] = 16
    return held.getvalue()


def cifar(binary: bool = False) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (4, 3072), np.uint8)
    if binary:
        return b"".join(bytes([3]) + row.tobytes() for row in pixels)
    return pickle.dumps({b"data": pixels, b"labels": [1, 2, 3, 4]}, 2)


def archive() -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as file:
        for name in (
            "data_batch_1",
            "data_batch_2",
            "data_batch_3",
            "data_batch_4",
            "data_batch_5",
        ):
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(data := cifar())
            file.addfile(info, io.BytesIO(data))
    return held.getvalue()


def weights(ending: str) -> Callable[[], bytes]:
    def made() -> bytes:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            return write_weights(Path(folder) / f"w{ending}", network().state_dict()).read_bytes()

    return made


def all_of(source: Any) -> None:
    """Every sample and target."""
    if math.prod(source.shape) > 10**6:  # it may be as large: reading it takes its time
        return
    for i in range(min(len(source), 4)):
        source.read(i, everything(source.shape[1:]))
        source.target(i, everything(source.shape[1:]))


def cifar_at(path: Path) -> None:
    for i in range(2, 6):
        (path.parent / f"data_batch_{i}{path.suffix}").write_bytes(cifar(path.suffix == ".bin"))
    all_of(Cifar10(path.parent))


def folders_at(path: Path) -> None:
    (path.parent / "cat").mkdir(exist_ok=True)
    os.replace(path, path.parent / "cat" / path.name)
    all_of(Folders(path.parent, 16))


def slides_at(path: Path) -> None:
    all_of(Slides(path, 16, tissue=0.0))
    if path.suffix == ".tif":  # which says its scale
        all_of(Slides(path, 16, tissue=0.1, mpp=1.0))


def mask_at(path: Path) -> None:
    Mask(path).at(np.arange(0.5, 20), np.arange(0.5, 20), (64, 96), 300)


def labels_at(path: Path) -> None:
    from gems.data.labels import numbered, read_table

    table = read_table(path)
    numbered(table.values, None)
    if (slide := path.parent / "s.tif").exists() or slide.write_bytes(tiled()):
        all_of(Slides(slide, 16, labels=path, tissue=0.0))


def timeline_at(path: Path) -> None:
    made = path.parent
    pages = ("--svg", made / "x.svg", "--html", made / "x.html", "--trace", made / "x.trace")
    typed("draw", path, *pages)
    assert "<script>alert" not in (made / "x.html").read_text()
    assert "<script>alert" not in (made / "x.svg").read_text()


def journal_at(path: Path) -> None:
    from gems.cli.journal import Journal

    os.replace(path, path.parent / "metrics.jsonl")
    kept = Journal(path.parent, writes=True, tensorboard=False, keep=3)
    kept.note("train", 4, loss=1.0)
    assert kept.of("train", "loss")[-1] == (4, 1.0) and "kind" not in kept.names("eval")
    kept.close()


TILES = b"slide,x,y,label\ns,0,0,1\ns,16,0,2\ns,0,16,2\n"
JOURNAL = b"".join(
    b'{"kind": "%s", "step": %d, "loss": 0.5, "epoch": 0}\n' % (kind, step)
    for step, kind in enumerate((b"train", b"train", b"eval"), 1)
)

KINDS: dict[str, Kind] = {
    **{
        f"plan {i}": Kind(".json", of_json(p), lambda x: typed("check", "--plan", x), 60, True)
        for i, p in enumerate(PLANS)
    },
    "machine": Kind(
        ".json", of_json(MACHINES["v100"]), lambda x: typed("machine", "--machine", x), 60, True
    ),
    "machine of a prediction": Kind(
        ".json", of_json(MACHINES["v100"]),
        lambda x: typed("simulate", "--model", "tests.tiny:net", "--image-size", 8, "--machine", x),
        8, True,
    ),
    "timeline": Kind(".json", lambda: TIMELINE, timeline_at, 25, True),
    "schedule": Kind(
        ".txt", lambda: str(lowered(PLANS[0])).encode(),
        lambda x: typed("check", "--stages", 2, "--parts", 4, x), 60,
    ),
    "config": Kind(".yaml", lambda: CONFIG, lambda x: config_at(x), 60),
    "config in TOML": Kind(".toml", lambda: TOML, lambda x: config_at(x), 40),
    "labels": Kind(".csv", lambda: TILES, labels_at, 60),
    "labels of slides": Kind(".csv", lambda: b"slide,label\ns,1\n", labels_at),
    "weights": Kind(".pt", weights(".pt"), read_weights),
    "weights as safetensors": Kind(".safetensors", weights(".safetensors"), read_weights, 60),
    "CIFAR-10": Kind("", cifar, cifar_at),
    "CIFAR-10 in binary": Kind(".bin", lambda: cifar(True), cifar_at, 20),
    "CIFAR-10 as an archive": Kind(".tar.gz", archive, lambda x: all_of(Cifar10(x)), 20),
    "PNG": Kind(".png", image("png"), folders_at),
    "JPEG": Kind(".jpg", image("jpeg"), folders_at),
    "BMP": Kind(".bmp", image("bmp"), folders_at),
    "WebP": Kind(".webp", image("webp"), folders_at, 20),
    "TIFF": Kind(".tif", image("tiff"), folders_at),
    "slide": Kind(".tif", tiled, slides_at, 60),
    "slide as a picture": Kind(".png", image("png"), slides_at, 20),
    "mask": Kind(".tif", mask, mask_at, 60),
    "mask as a picture": Kind(".png", image("png", mode="L"), mask_at, 20),
    "HDF5": Kind(".h5", volumes, lambda x: all_of(Volumes(x, labels="labels"))),
    "HDF5 of coordinates": Kind(".h5", coords, lambda x: read_coords(x, 16)),
    "Zarr": Kind(".json", zarr_form, zarr_at, 40, True),
    "journal": Kind(".jsonl", lambda: JOURNAL, journal_at),
}  # fmt: skip


def config_at(path: Path) -> None:
    """A config that parses, of options that exist, would train: --auto 1 with --zero stops it."""
    typed("train", "--config", path, "--auto", 1, "--zero", 1)


@pytest.mark.parametrize("name", KINDS)
def test_a_changed_file_is_read_or_rejected(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    valid = kind.valid()
    path = tmp_path / f"{'data_batch_1' if 'CIFAR' in name else 'file'}{kind.ending}"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        kind.read(path)

    if not name.startswith("config"):
        assert outcome(lambda: read(valid)) == "read"

    def change(dice: random.Random) -> bytes:
        if kind.as_json and dice.random() < 0.8:
            return spelled(replaced(json.loads(valid), dice))
        return changed(valid, dice)

    tried(kind.times, change, read, name)


# --- single traps ---------------------------------------------------------------------------------


LAUGHS = "a0: &a0 [x,x]\n" + "".join(
    f"a{i}: &a{i} [*a{i - 1},*a{i - 1},*a{i - 1},*a{i - 1}]\n" for i in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"\x00\x01\xff\xfe" * 100, "is not a text file"),
        (b"\x89PNG\r\n\x1a\n", "is not a text file"),
        (b"model: [" + b"[" * 100_000, "cannot be read"),
        (LAUGHS.encode(), "it has more than 10000 values"),
        (b"balance: &a [*a]", "nested more than 20 levels deep"),
        (b"model: !!python/object/apply:os.system ['touch /tmp/gems-was-here']", "cannot be read"),
        (b"x" * (2 << 20), "has more than 1048576 bytes"),
        (b"- 1\n- 2\n", "holds list; write lines like"),
        (b"7", "holds int; write lines like"),
        (b"learning-rate: .nan", "invalid number 'nan'"),
        (b"learning-rate: .inf", "invalid number 'inf'"),
        (b"batch-size: 1000000000000", "1000000000000 is too large; give 1000000000 at most"),
        (b"image-size: 1e+30", "invalid whole number '1e+30'"),
        (b"model: os:system\nmodel-option: {command: 'touch /tmp/gems-was-here'}", "Python's own"),
    ],
)
def test_a_config_that_is_a_trap_is_rejected_in_words(
    text: bytes, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_bytes(text)
    words = ("train", "--config", tmp_path / "run.yaml", "--out", tmp_path / "out")
    with pytest.raises(GemsError) as rejected, bounded():
        typed(*words, "--app", "synthetic")
    assert expected in str(rejected.value)
    assert not Path("/tmp/gems-was-here").exists() and not (tmp_path / "out" / "plan.json").exists()


TRAIN = ("train", "--app", "synthetic", "--model", "tests.tiny:net", "--image-size", "8")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((*TRAIN, "--image-size", "1e30"), "invalid whole number '1e30'"),
        ((*TRAIN, "--image-size", "9" * 5000), "invalid whole number"),
        ((*TRAIN, "--image-size", "1" + "0" * 30), "is too large; give 10000000 at most"),
        ((*TRAIN, "--batch-size", "1" + "0" * 12), "is too large; give 1000000000 at most"),
        ((*TRAIN, "--split-size", "-1"), "stages is -1; it must be at least 1"),
        ((*TRAIN, "--split-size", "1" + "0" * 9), "is too large; give 1048576 at most"),
        ((*TRAIN, "--split-size", "1000000", "--parts", "1000"), "forwards in one step"),
        ((*TRAIN, "--learning-rate", "nan"), "invalid number 'nan'"),
        ((*TRAIN, "--learning-rate=-inf"), "invalid number '-inf'"),
        ((*TRAIN, "--weight-decay", "1e999"), "invalid number '1e999'"),
        ((*TRAIN, "--clip", "nan"), "invalid number 'nan'"),
        ((*TRAIN, "--held-out", "nan"), "invalid number 'nan'"),
        ((*TRAIN, "--seed", "1" + "0" * 30), "is too large"),
        ((*TRAIN, "--memory", "1e999GiB"), "is not a size"),
        ((*TRAIN, "--num-layers", "1" + "0" * 9), "is too large; give 100000 at most"),
        ((*TRAIN, "--spatial", "1000000000x1000000000"), "are more than 1048576 tiles"),
        ((*TRAIN, "--spatial", "square:1000000007"), "are more than 1048576 tiles"),
        ((*TRAIN, "--stream", "99999x99999"), "are more than 1048576 tiles"),
        (("plan", "--model", "tests.tiny:net", "--memory=-1GiB"), "is not a size"),
        (("trace", "--image-size", "10000000", "--batch-size", "1000"), "3e+17 numbers; take a"),
        (("check", "--stages", "1000000", "--parts", "1000"), "1000000000 forwards in one step"),
        (("draw", "--stages", "2", "--width", "1" + "0" * 9), "is too large; give 100000 at most"),
        ((*TRAIN, "--image-size", "1000000"), "not enough memory: take a smaller"),
    ],
)
def test_an_absurd_number_is_rejected_in_words(
    words: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    out = ("--out", tmp_path / "out") if words[0] == "train" else ()
    with pytest.raises(GemsError) as rejected, bounded():
        typed(*words, *out)
    assert expected in str(rejected.value)


@pytest.mark.parametrize("field", ["stages", "micro_batches", "data", "ranks", "local_dp"])
def test_a_plan_of_a_billion_of_anything_allocates_nothing(field: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({field: 10**9}))
    with (
        pytest.raises(GemsError, match=f"{field} is 1000000000; a plan has"),
        bounded(5, 200 << 20),
    ):
        typed("check", "--plan", tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text(json.dumps({"spatial": [[10**9, 10**9]], "stages": 2}))
    with pytest.raises(GemsError, match="are more than 1048576 tiles"), bounded(5, 200 << 20):
        typed("check", "--plan", tmp_path / "plan.json")


def giant_png() -> bytes:
    """A header of 10^6 x 10^6 pixels, and next to nothing after it."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", 10**6, 10**6, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + content + chunk(b"IEND", b"")


def giant_tiff(side: int, tile: int) -> bytes:
    """So many pixels, and one tile of them that is a few zeros."""
    import struct
    import zlib

    encoded = zlib.compress(b"\0" * 100)
    tags = [
        (256, side), (257, side), (258, 8), (259, 8), (262, 1), (277, 1), (322, tile), (323, tile),
        (324, 8), (325, len(encoded)),
    ]  # fmt: skip
    ifd = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    start = 8 + len(encoded)
    header = struct.pack("<2sHI", b"II", 42, start) + encoded
    return header + struct.pack("<H", len(tags)) + ifd + struct.pack("<I", 0)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("giant.png", giant_png),
        ("giant.tif", lambda: giant_tiff(10**6, 256)),
        ("giant.tif", lambda: giant_tiff(10**6, 10**6)),
        ("giant.tif", lambda: giant_tiff(2**31 - 1, 2**31 - 1)),
    ],
)
def test_a_giant_image_is_rejected_by_its_header(name: str, data: Any, tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / name).write_bytes(data())
    with bounded(10, 1 << 30):
        for read in (
            lambda: all_of(Slides(tmp_path / "slides", 64, tissue=0.0)),
            lambda: all_of(Slides(tmp_path / "slides", 64, tissue=0.5)),
            lambda: all_of(Folders(tmp_path, 64)),
            lambda: mask_at(tmp_path / "slides" / name),
        ):
            with pytest.raises(GemsError):
                read()


def test_arrays_of_absurd_shapes_are_rejected_unread(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, shape in (("images", (10**12, 10**5, 10**5, 10**5)), ("labels", (10**12,))):
            file.create_dataset(name, shape, "f4" if name == "images" else "i8", chunks=True)
        file["few"] = np.zeros((3, 4, 4, 4), np.float32)
        file["texts"] = np.array([b"x"] * 3, object)
        file.create_dataset("many", (10**12,), "i8", chunks=True)
        file.create_dataset("rows", (10**12, 4, 4, 4), "f4", chunks=(1, 4, 4, 4))
        file.create_dataset(
            "outside", (3, 4, 4, 4), "u1", external=[(str(tmp_path / "a.h5"), 0, 192)]
        )
    for images, labels, expected in (
        ("images", "labels", "no such array can be read"),
        ("few", "many", "has 1000000000000 values; it takes 3"),
        ("rows", "many", "take 100000000 at most"),
        ("texts", "labels", "is no array of numbers"),
        ("outside", "labels", "takes its bytes from other files"),
    ):
        with pytest.raises(GemsError, match=expected), bounded(10, 500 << 20):
            Volumes(tmp_path / "a.h5", images=images, labels=labels)


@pytest.mark.parametrize("where", ["filters", "compressor"])
def test_a_zarr_array_that_is_a_pickle_is_not_decoded(where: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    group = tmp_path / "v.zarr"
    for name, shape in (("images", [2, 4, 4, 4]), ("labels", [2])):
        (group / name).mkdir(parents=True)
        codec = {"id": "pickle"}
        form = {
            "zarr_format": 2, "shape": shape, "chunks": shape, "dtype": "|O", "fill_value": 0,
            "order": "C", "filters": None, "compressor": None,
        } | {where: [codec] if where == "filters" else codec}  # fmt: skip
        text = json.dumps(form).replace("pickle", "pi\\u0063kle")
        (group / name / ".zarray").write_text(text)
        chunk = ".".join("0" for _ in shape)
        (group / name / chunk).write_bytes(pickle.dumps(Malice(marker)))
    (group / ".zgroup").write_text('{"zarr_format": 2}')
    with pytest.raises(GemsError, match="wants a pickle decoded, which could run any code"):
        all_of(Volumes(group, labels="labels"))
    assert not marker.exists()


def test_a_pickle_of_cifar_cannot_make_an_array_of_pointers(tmp_path: Path) -> None:
    """numpy.ndarray(shape, object, bytes) takes bytes for addresses: it ended the process."""

    class Pointers:
        def __reduce__(self) -> Any:
            return np.ndarray, ((1, 384), np.dtype("O"), b"A" * 3072)

    content = pickle.dumps({b"data": Pointers(), b"labels": [1]}, 2)
    for i in range(1, 6):
        (tmp_path / f"data_batch_{i}").write_bytes(content)
    with pytest.raises(GemsError, match=r"data_batch_1|array of 'O8'"):
        Cifar10(tmp_path)


def test_an_archive_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    import gzip

    info = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
    info.size = 10**12
    with gzip.open(tmp_path / "cifar.tar.gz", "wb") as file:
        file.write(info.tobuf() + b"\0" * (64 << 20))
    with pytest.raises(GemsError, match="it has much larger files"), bounded(10, 300 << 20):
        Cifar10(tmp_path / "cifar.tar.gz")


def test_weights_run_no_code_and_a_forged_header_allocates_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"a": Malice(marker)}, tmp_path / "w.pt")
    with pytest.raises(GemsError, match="cannot be read as weights"):
        read_weights(tmp_path / "w.pt")
    assert not marker.exists()
    header = b'{"a":{"dtype":"F32","shape":[1000000000000000],"data_offsets":[0,4000000000000000]}}'
    for size in (len(header), 2**63, 2**64 - 1):
        data = size.to_bytes(8, "little") + header
        (tmp_path / "w.safetensors").write_bytes(data)
        with pytest.raises(GemsError, match="cannot be read as weights"), bounded(5, 200 << 20):
            read_weights(tmp_path / "w.safetensors")


def test_labels_are_bounded_and_digits_are_those_of_numbers(tmp_path: Path) -> None:
    from gems.data.labels import numbered, read_table

    assert numbered(["10", "9", "-1"], None) == ("-1", "9", "10")
    assert numbered(["²", "1", "--5", "9" * 5000], None)[0] == "--5"
    path = tmp_path / "labels.csv"
    for text in (b"slide,x,y,label\ns,1" + b"0" * 100 + b",0,a\n", b"slide,label\ns,\xff\n"):
        path.write_bytes(text)
        with pytest.raises(GemsError):
            read_table(path)
    path.write_bytes(b"slide,label\ns," + b"x" * 10**6 + b"\n")
    with pytest.raises(GemsError, match="field larger than field limit"):
        read_table(path)


# --- pages ----------------------------------------------------------------------------------------

SCRIPT = "<script>alert(1)</script>"
QUOTES = "\"><img src=x onerror=alert(1)> ' {{data}} ]]> --> \u2028"


class Tags(HTMLParser):
    """The elements of a page, with the names of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found[" ".join((tag, *sorted(name for name, _ in attrs)))] += 1


def tags(page: str) -> Counter[str]:
    parser = Tags()
    parser.feed(page)
    return parser.found


def pages(word: str, other: str) -> dict[str, str]:
    """Everything that is drawn, with words that come from users: names of files and classes."""
    from gems.draw.html import html
    from gems.draw.report import report_page
    from gems.draw.svg import svg
    from gems.model.costs import unit
    from gems.predict.simulate import simulate

    names = tuple((f"{word}{i}", f"{other}{i}") for i in range(2))
    plan = Plan(stages=names, micro_batches=2)
    timeline = simulate(lowered(plan), plan, unit(2))
    charts = [(word, {word: [(0.0, 1.0), (1.0, 2.0)], other: [(0.0, 1.0)]})]
    pictures = [(f"heat map of {word}", "data:image/png;base64,")]
    facts = {word: other, other: word}
    return {
        "report": report_page(word, timeline, plan, facts, charts, word, pictures),
        "page": html(timeline, other, plan, timeline),
        "picture": svg(timeline, word, plan),
    }  # fmt: skip


@pytest.mark.parametrize("word", [SCRIPT, QUOTES, "</script><script>alert(1)</script>"])
def test_names_of_users_are_words_on_pages_and_never_elements(word: str, tmp_path: Path) -> None:
    assert "<" not in _embedded({"x": word})
    harmless = pages("word", "other")
    for name, page in pages(word, word[::-1] + word).items():
        assert tags(page) == tags(harmless[name]), name
    (tmp_path / "<script>alert(1)<").mkdir()
    file = tmp_path / "<script>alert(1)<" / "script>.json"
    file.write_bytes(TIMELINE)
    typed("draw", file, "--html", tmp_path / "x.html", "--title", word)
    typed("draw", file, "--html", tmp_path / "y.html", "--title", "harmless")
    assert tags((tmp_path / "x.html").read_text()) == tags((tmp_path / "y.html").read_text())


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "step-2"
    saved(
        path, ONE, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2), accumulate=2, steps=3
    )
    return path


@pytest.fixture(scope="module")
def lone() -> Trainer:
    """One rank that stays."""
    return on_ranks(
        ONE, lambda trainer: trainer, weights=3, accumulate=2,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    )[0]  # fmt: skip


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that a load may change."""
    assert trainer.optimizer is not None and trainer.scheduler is not None
    plain: dict[str, Any] = {
        "steps": (
            trainer.steps,
            trainer.session.window,
            trainer.session.first,
            trainer.session.seed,
        ),
        "groups": repr(trainer.optimizer.state_dict()["param_groups"]),
        "scheduler": repr(trainer.scheduler.state_dict()),
        "states": len(trainer.optimizer.state),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "gradients": [p.grad is None for p in trainer.model.parameters()],
    }
    return plain


def unharmed(trainer: Trainer, path: Path) -> None:
    """Load it; if it is rejected, nothing of the trainer has changed."""
    before, weights = state_of(trainer), {k: v.clone() for k, v in trainer.state_dict().items()}
    try:
        trainer.load(path)
    except GemsError:
        assert state_of(trainer) == before
        same_state(trainer.state_dict(), weights, 0.0)
        raise


def restored(trainer: Trainer, path: Path) -> None:
    """What it took, if it did, leaves a trainer that takes any other checkpoint."""
    try:
        trainer.load(path)
    except GemsError as error:
        raise AssertionError(f"the sound one is rejected now: {error}") from error


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "__0_0.distcp", ".metadata"])
def test_a_forged_checkpoint_is_loaded_or_changes_nothing(
    name: str, sound: Path, tmp_path: Path, lone: Trainer
) -> None:
    """Whoever can change a file can mend its checksums, too: so all of them fit."""
    path = tmp_path / "step-2"
    shutil.copytree(sound, path)
    valid, whole = (sound / name).read_bytes(), (sound / "manifest.json").read_bytes()

    def change(dice: random.Random) -> bytes:
        if name.endswith(".json") and dice.random() < 0.9:
            return spelled(replaced(json.loads(valid), dice))
        return changed(valid, dice)

    def read(data: bytes) -> None:
        (path / "manifest.json").write_bytes(whole)
        (path / name).write_bytes(data)
        if name == "manifest.json":
            mended(path / name)
        else:
            sign(path, files={name: data})
        read_weights(path)
        unharmed(lone, path)
        restored(lone, sound)

    if name == ".metadata":  # nobody opens it
        for number in range(TIMES or 5):
            forged = change(random.Random(number))
            assert outcome(lambda forged=forged: read(forged)) == "read"
        return
    tried(250 if name.endswith(".json") else 60, change, read, name)


def mended(path: Path) -> None:
    """The manifest with a checksum that fits, if it can have one."""
    try:
        plain = json.loads(path.read_bytes())
        plain["sha256"] = manifests._signature({k: v for k, v in plain.items() if k != "sha256"})
        path.write_bytes(spelled(plain))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return
