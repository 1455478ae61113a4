"""Checkpoints that are damaged, foreign or malicious: refused on all ranks, and nothing is run."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gems.errors import CheckpointError
from gems.torch import manifest as manifests
from gems.torch.trainer import Trainer
from gems.torch.weight_files import read_weights
from gems.transport.local import run
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
        with pytest.raises(CheckpointError) as refused:
            trainer.load(path)
        same_state(trainer.state_dict(), before, 0.0)
        assert trainer.steps == 0
        return str(refused.value)

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
    path = damaged(whole, tmp_path / "step-2", name, lambda data: pack(marker))
    sign(path, files={name: pack(marker)})
    places = manifests.read(path).tensors
    if name.endswith("distcp"):  # every tensor of it is the pickle, from its first byte
        size = len(pack(marker))
        for key, place in places.items():
            if place.file == name:
                sign(path, tensors={key: {"offset": 0, "bytes": size}})
    if name == ".metadata":
        assert pair(lambda trainer: trainer.load(path) and trainer.steps) == [2, 2]
        pair(lambda trainer: setattr(trainer, "steps", 0))
    else:
        refusals(path, pair)
        with pytest.raises(CheckpointError):
            read_weights(path)
    assert not marker.exists()
    if pack is malicious:  # it is one: see what it does when it is unpickled
        pickle.loads((path / name).read_bytes())
        assert marker.exists()


def sign(path: Path, files: Any = (), tensors: Any = (), **fields: Any) -> None:
    """Change the manifest and mend its checksums."""
    plain = json.loads((path / "manifest.json").read_text())
    for name, data in dict(files).items():
        plain["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for key, change in dict(tensors).items():
        plain["tensors"][key] |= change
    plain |= fields
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
