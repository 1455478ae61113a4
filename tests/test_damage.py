"""Checkpoints that are damaged, foreign or malicious: refused on all ranks, and nothing is run."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gems.errors import CheckpointError
from gems.torch.checkpoint import manifest as manifests
from gems.torch.checkpoint.validate import _alike
from gems.torch.checkpoint.weight_files import read_weights
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests.exact import same_state
from tests.saved import TWO, network, on_ranks, saved

FILES = ("manifest.json", "state.json", ".metadata", "__0_0.distcp", "__1_0.distcp")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "step-2"
    saved(path, TWO)
    assert {p.name for p in path.iterdir()} == set(FILES)
    return path


@pytest.fixture(scope="module")
def pair() -> Iterator[Callable[[Callable[[Trainer], Any]], list[Any]]]:
    """Two ranks that stay, and do one thing after the other."""
    trainers: dict[int, Trainer] = {}

    def prepared(work: Callable[[Trainer], Any]) -> list[Any]:
        if not trainers:
            on_ranks(TWO, lambda trainer: trainers.update({trainer.rank: trainer}), weights=3)
        return run(2, lambda transport: work(trainers[transport.rank]))

    yield prepared


class Malice:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def malicious(marker: Path) -> bytes:
    return pickle.dumps(Malice(marker), 2)


def malicious_torch(marker: Path) -> bytes:
    """The same, as torch.save would pack it."""
    packed = io.BytesIO()
    torch.save(Malice(marker), packed)
    return packed.getvalue()


def flipped(data: bytes, at: float) -> bytes:
    place = int(at * (len(data) - 1))
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


DAMAGE: dict[str, Callable[[bytes, Path], bytes | None]] = {
    "missing": lambda data, marker: None,
    "empty": lambda data, marker: b"",
    "truncated": lambda data, marker: data[:-1],
    "cut in half": lambda data, marker: data[: len(data) // 2],
    "longer": lambda data, marker: data + b"\n\n{}",
    "first bit flipped": lambda data, marker: flipped(data, 0),
    "a bit flipped": lambda data, marker: flipped(data, 0.37),
    "last bit flipped": lambda data, marker: flipped(data, 1),
    "a pickle": lambda data, marker: malicious(marker),
    "a pickle of the same size": lambda data, marker: malicious(marker).ljust(len(data))[
        : len(data)
    ],
    "a pickle by torch": lambda data, marker: malicious_torch(marker),
}


def damaged(whole: Path, to: Path, name: str, change: Callable[[bytes], bytes | None]) -> Path:
    shutil.copytree(whole, to)
    data = change((to / name).read_bytes())
    if data is None:
        (to / name).unlink()
    else:
        (to / name).write_bytes(data)
    return to


def refusals(path: Path, pair: Any) -> list[str]:
    """What each of two ranks says; their weights stay as they are."""

    def load(trainer: Trainer) -> str:
        before = trainer.state_dict()
        with pytest.raises(CheckpointError) as rejected:
            trainer.load(path)
        same_state(trainer.state_dict(), before, 0.0)
        assert trainer.steps == 0
        return str(rejected.value)

    return pair(load)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_by_name_on_all_ranks(
    name: str, damage: str, whole: Path, tmp_path: Path, pair: Any
) -> None:
    marker = tmp_path / "marker"
    path = damaged(whole, tmp_path / "step-2", name, lambda data: DAMAGE[damage](data, marker))
    said = refusals(path, pair)
    assert said[0] == said[1]
    assert name in said[0]
    assert "take another checkpoint" in said[0]
    with pytest.raises(CheckpointError):
        read_weights(path)
    assert not marker.exists()


@pytest.mark.parametrize("pack", [malicious, malicious_torch])
@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_runs_no_code_even_if_its_checksum_fits(
    name: str, pack: Any, whole: Path, tmp_path: Path, pair: Any
) -> None:
    """Who can write the files can write the manifest, too. DCP's own index is never opened."""
    marker = tmp_path / "marker"
    places = [p for p in manifests.read(whole).tensors.values() if p.file == name]

    def forged(data: bytes) -> bytes:
        """The pickle; where tensors are, each is one."""
        for place in places:
            held = pack(marker).ljust(place.bytes)
            data = data[: place.offset] + held + data[place.offset + place.bytes :]
        return data if places else pack(marker)

    path = damaged(whole, tmp_path / "step-2", name, forged)
    sign(path, files={name: (path / name).read_bytes()})
    assert manifests.is_complete(path)
    if name == ".metadata":
        assert pair(lambda trainer: trainer.load(path) and trainer.steps) == [2, 2]
        pair(lambda trainer: setattr(trainer.session, "steps", 0))
    else:
        refusals(path, pair)
        with pytest.raises(CheckpointError):
            read_weights(path)
    assert not marker.exists()
    if pack is malicious:  # it is one: see what it does when it is unpickled
        pickle.loads((path / name).read_bytes())
        assert marker.exists()


def sign(
    path: Path,
    files: Any = (),
    tensors: Any = (),
    change: Callable[[dict[str, Any]], object] = lambda plain: None,
    **fields: Any,
) -> None:
    """Change the manifest and mend its checksums."""
    plain = json.loads((path / "manifest.json").read_text())
    for name, data in dict(files).items():
        plain["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for key, fresh in dict(tensors).items():
        plain["tensors"][key] |= fresh
    plain |= fields
    change(plain)
    plain["sha256"] = manifests._signature(plain)
    (path / "manifest.json").write_text(json.dumps(plain))


FOREIGN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda path: shutil.rmtree(path), "there is no checkpoint"),
    "a file": (
        lambda path: (shutil.rmtree(path), torch.save(network().state_dict(), path)),
        "there is no checkpoint",
    ),
    "a checkpoint of DCP alone": (
        lambda path: (path / "manifest.json").unlink(),
        "has no manifest.json, so it is not a GEMS checkpoint",
    ),
    "another manifest": (
        lambda path: (path / "manifest.json").write_text('{"name": "an app"}'),
        "is not the manifest of a GEMS checkpoint",
    ),
    "a list": (lambda path: (path / "manifest.json").write_text("[1]"), "is not the manifest"),
    "a newer format": (
        lambda path: sign(path, format=2, gems="9.1.0", colour="green"),
        "has format 2, written by GEMS 9.1.0, and this GEMS reads up to format 1; install",
    ),
    "a file elsewhere": (
        lambda path: sign(path, files={"../../secret": b""}),
        "names what is not inside the checkpoint: ['../../secret']",
    ),
    "a tensor elsewhere": (
        lambda path: sign(path, tensors={"model.head.bias": {"file": "/etc/passwd"}}),
        "names what is not inside the checkpoint: ['model.head.bias']",
    ),
    "a type that is none": (
        lambda path: sign(path, tensors={"model.head.bias": {"dtype": "load"}}),
        "head.bias is 5 of load in the checkpoint, 5 of float64 in the model",
    ),
    "a field too many": (lambda path: sign(path, colour="green"), "is not a manifest"),
}


BIAS = "model.head.bias"


def linked(path: Path, name: str) -> None:
    """A file of the checkpoint, as a link to itself elsewhere."""
    moved = path.parent / f"moved {name}"
    (path / name).rename(moved)
    (path / name).symlink_to(moved)


def restated(path: Path, change: Callable[[dict[str, Any]], object], text: str = "") -> None:
    """Change state.json, or put a text in its place, with a checksum that fits."""
    plain = json.loads((path / "state.json").read_text())
    change(plain)
    data = (text or json.dumps(plain)).encode()
    (path / "state.json").write_bytes(data)
    sign(path, files={"state.json": data})


def overlapped(path: Path) -> None:
    place = manifests.read(path).tensors[BIAS]
    sign(path, tensors={BIAS: {"offset": place.offset - 1}})


def tied(path: Path) -> None:
    """A state of the optimizer over the bytes of a weight."""
    weight, state = BIAS, "optimizer.head.bias/momentum_buffer"
    sign(path, tensors={state: json.loads((path / "manifest.json").read_text())["tensors"][weight]})


def compressed(path: Path) -> None:
    """A tensor that takes more memory than its bytes: here little more, up to a thousand times."""
    entry = manifests.read(path).tensors[BIAS]
    held, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(1000, dtype=torch.float64), held)
    with (
        zipfile.ZipFile(held) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    data = (path / entry.file).read_bytes()
    (path / entry.file).write_bytes(data + packed.getvalue())
    sign(
        path,
        files={entry.file: data + packed.getvalue()},
        tensors={BIAS: {"offset": len(data), "bytes": len(packed.getvalue())}},
    )


def piped(path: Path) -> None:
    """A state without a checksum, which whoever reads it waits for."""
    sign(path, change=lambda plain: plain["files"].pop("state.json"))
    (path / "state.json").unlink()
    os.mkfifo(path / "state.json")


FORGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor that is compressed": (compressed, "is not stored as torch stores it, uncompressed"),
    "a state that is a pipe": (piped, "lists no state.json"),
    "a position outside of numpy's state": (
        lambda path: restated(
            path, lambda plain: plain["random"]["0"]["numpy"]["state"].update(pos=10**6)
        ),
        "the states of random generators are not valid",
    ),
    "five learning rates": (
        lambda path: restated(
            path, lambda plain: plain["optimizer"]["groups"][0].update(lr={"$tensor": BIAS})
        ),
        "lr of group 0 of the optimizer is {'$tensor'",
    ),
    "momentum of integers": (
        lambda path: sign(
            path, tensors={"optimizer.head.bias/momentum_buffer": {"dtype": "int64"}}
        ),
        "the optimizer's momentum_buffer of head.bias does not fit it",
    ),
    "gradients of integers": (
        lambda path: (
            sign(path, tensors={"optimizer.head.bias/momentum_buffer": {"dtype": "int64"}}),
            restated(
                path,
                lambda plain: plain.update(
                    window=1,
                    first=1,
                    state={},
                    gradients={
                        "head.bias/0": {"$tensor": "optimizer.head.bias/momentum_buffer"}
                    },
                ),
            ),
        ),
        "head.bias/0 is not of the shape and type of the weight",
    ),
    "more names than groups": (
        lambda path: restated(path, lambda plain: plain["names"].append([])),
        "2 lists of names for 1 groups of the optimizer",
    ),
    "a tensor by a list": (
        lambda path: restated(path, lambda plain: plain.update(extra={"$tensor": [1]})),
        "state.json refers to a tensor [1], which there is not",
    ),
    "10^15 numbers": (
        lambda path: sign(path, tensors={BIAS: {"shape": [10**15]}}),
        "model.head.bias is (1000000000000000,) in",
    ),
    "10^400 numbers": (
        lambda path: sign(path, tensors={BIAS: {"shape": [10**400]}}),
        "model.head.bias has the shape, type, offset or bytes",
    ),
    "many dims": (
        lambda path: sign(path, tensors={BIAS: {"shape": [1] * 1000}}),
        "model.head.bias is (1, 1,",
    ),
    "less than nothing": (
        lambda path: sign(path, tensors={BIAS: {"shape": [-5]}}),
        "model.head.bias has the shape, type, offset or bytes",
    ),
    "an offset below 0": (
        lambda path: sign(path, tensors={BIAS: {"offset": -1}}),
        "model.head.bias has the shape, type, offset or bytes",
    ),
    "beyond the end": (
        lambda path: sign(path, tensors={BIAS: {"offset": 10**12}}),
        "model.head.bias ends at byte",
    ),
    "bytes of another tensor": (overlapped, "overlap in __1_0.distcp"),
    "a state in the bytes of a weight": (tied, "overlap in __1_0.distcp"),
    "a file of another name": (
        lambda path: sign(path, files={"weights.bin": b""}),
        "names what is not inside the checkpoint: ['weights.bin']",
    ),
    "a step that is no number": (lambda path: sign(path, step=float("nan")), "step is nan"),
    "a step below 0": (lambda path: sign(path, step=-1), "step is -1"),
    "a name twice": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"gems":', '"step": 1, "gems":', 1)
        ),
        "an object has the name 'step' twice",
    ),
    "a hundred thousand brackets": (
        lambda path: (path / "manifest.json").write_text("[" * 100_000),
        "nested more than 100 levels deep",
    ),
    "brackets in the state": (
        lambda path: restated(path, lambda plain: None, '{"extra":' * 150 + "1" + "}" * 150),
        "nested more than 100 levels deep",
    ),
    "no text": (
        lambda path: (path / "manifest.json").write_bytes(b'{"what": "\xff\xfe"}'),
        "is damaged or not JSON",
    ),
    "data that is a link": (lambda path: linked(path, "__0_0.distcp"), "__0_0.distcp is a link"),
    "a state that is a link": (lambda path: linked(path, "state.json"), "state.json is a link"),
    "a manifest that is a link": (
        lambda path: linked(path, "manifest.json"), "manifest.json is a link",
    ),
    "a count that is a text": (
        lambda path: restated(path, lambda plain: plain.update(steps="2")),
        "steps of state.json is '2'",
    ),
    "no generators": (
        lambda path: restated(path, lambda plain: plain.pop("random")), "state.json has no random",
    ),
    "generators of another state": (
        lambda path: restated(
            path, lambda plain: plain["random"]["0"]["python"].update(version=[3])
        ),
        "the states of random generators are not valid",
    ),
    "a tensor that there is not": (
        lambda path: restated(path, lambda plain: plain.update(extra={"$tensor": "x"})),
        "state.json refers to a tensor x, which there is not",
    ),
    "a learning rate that is a text": (
        lambda path: restated(
            path, lambda plain: plain["optimizer"]["groups"][0].update(lr="fast")
        ),
        "lr of group 0 of the optimizer is 'fast'",
    ),
    "a learning rate that is nan": (
        lambda path: restated(
            path, lambda plain: plain["optimizer"]["groups"][0].update(lr=float("nan"))
        ),
        "lr of group 0 of the optimizer is nan",
    ),
    "no learning rate": (
        lambda path: restated(path, lambda plain: plain["optimizer"]["groups"][0].pop("lr")),
        "group 0 of the optimizer has no lr",
    ),
    "a state of another weight": (
        lambda path: restated(
            path,
            lambda plain: plain["state"]["head.bias"].update(
                momentum_buffer={"$tensor": "optimizer.head.weight/momentum_buffer"}
            ),
        ),
        "the optimizer's momentum_buffer of head.bias does not fit it",
    ),
    "a set of lists": (
        lambda path: restated(path, lambda plain: plain.update(extra={"$set": [[1]]})),
        "is a $set of what cannot be in one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_checkpoint_is_rejected_on_all_ranks_and_changes_nothing(
    name: str, whole: Path, tmp_path: Path, pair: Any
) -> None:
    """All checksums fit. Nothing is allocated by a size that its file does not have."""
    make, expected = FORGED[name]
    shutil.copytree(whole, path := tmp_path / "step-2")
    make(path)
    said = refusals(path, pair)
    assert said[0] == said[1]
    assert expected in said[0]
    assert "take another checkpoint" in said[0]


def test_many_names_of_one_weight_take_its_memory_once(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, path := tmp_path / "step-2")
    names = [f"model.x{i}" for i in range(100)]
    sign(path, change=lambda p: p["tensors"].update(dict.fromkeys(names, p["tensors"][BIAS])))
    found = read_weights(path)
    assert len({found[f"x{i}"].data_ptr() for i in range(100)}) == 1
    assert torch.equal(found["x7"], found["head.bias"])


def test_the_state_of_an_inner_scheduler_has_no_other_names() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    inner = [torch.optim.lr_scheduler.StepLR(optimizer, 3) for _ in range(2)]
    outer = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [5])
    held, saved = outer.state_dict(), json.loads(json.dumps(outer.state_dict()))
    assert _alike(held, saved, {}, finite=False)
    saved["_schedulers"][0]["get_lr"] = 1.0  # would take the place of a method
    assert not _alike(held, saved, {}, finite=False)


def test_whoever_fails_after_all_was_validated_says_that_the_trainer_is_half_loaded(
    whole: Path, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr("gems.torch.checkpoint.save_load.restore", failing)

    def load(trainer: Trainer) -> str:
        with pytest.raises(CheckpointError) as rejected:
            trainer.load(whole)
        return str(rejected.value)

    said = pair(load)
    assert "of which this trainer has a part now (make a new one), failed on rank 0" in said[0]
    assert said[0] == said[1]


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_checkpoint_of_ours_is_refused(
    name: str, whole: Path, tmp_path: Path, pair: Any
) -> None:
    make, expected = FOREIGN[name]
    shutil.copytree(whole, path := tmp_path / "step-2")
    make(path)
    said = refusals(path, pair)
    assert said[0] == said[1]
    assert expected in said[0]


def test_the_whole_one_loads(whole: Path, tmp_path: Path, pair: Any) -> None:
    """And so does a copy elsewhere, under another name."""
    shutil.copytree(whole, tmp_path / "copy")
    assert pair(lambda trainer: trainer.load(tmp_path / "copy")) == [{"at": 2}] * 2


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_a_learning_rate_in_a_tensor_that_is_not_finite_is_rejected(
    rate: float, tmp_path: Path
) -> None:
    """It is known only once the tensors are read; nothing has changed by then."""

    def made() -> Trainer:
        return Trainer(
            network(0),
            torch.nn.functional.cross_entropy,
            lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
            torch.randn(2, 3, 8, 8, dtype=torch.float64),
        )

    trainer = made()
    trainer.optimizer.param_groups[0]["lr"].fill_(rate)
    trainer.save(tmp_path / "step")
    other = made()
    before = other.state_dict()
    with pytest.raises(CheckpointError, match="lr of group 0 of the optimizer is not a finite"):
        other.load(tmp_path / "step")
    same_state(other.state_dict(), before, 0.0)
    assert other.optimizer.param_groups[0]["lr"] == torch.tensor(0.1)
