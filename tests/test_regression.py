"""Numbers to regress, and layers to segment: generated data, losses, metrics, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from gems.cli.main import main
from gems.data.cosmology import Cosmology
from gems.data.loader import Loader
from gems.data.oct import NAMES, Oct
from gems.data.volumes import Volumes
from gems.errors import GemsError
from gems.plans.plan import Plan
from gems.torch.losses import loss, loss_of
from gems.torch.metrics import Errors
from tests.exact import assert_equal, drawing, plainly, planned


@pytest.mark.parametrize("source", [Cosmology((9, 12, 10), 3), Oct((40, 24), 6, 2)])
def test_a_box_is_that_of_the_whole_bit_for_bit(source: Any) -> None:
    sides = source.shape[1:]
    everything = tuple(slice(0, n) for n in sides)
    box = tuple(slice(1 + i, n - 2) for i, n in enumerate(sides))
    whole, part = source.read(7, everything), source.read(7, box)
    assert whole.shape == source.shape and whole.dtype == np.float32
    assert np.array_equal(whole[(slice(None), *box)], part)
    if source.task == "segment":
        assert np.array_equal(source.target(7, everything)[box], source.target(7, box))
    else:
        assert np.array_equal(source.target(7, everything), source.target(7, box))
    assert not np.array_equal(whole, source.read(8, everything))


def test_layers_lie_under_each_other_and_all_are_there() -> None:
    for classes in (2, 5, len(NAMES)):
        source = Oct((120, 60), classes)
        mask = source.target(0, (slice(0, 120), slice(0, 60)))
        assert (np.diff(mask, axis=0) >= 0).all() and len(source.names) == classes
        assert set(np.unique(mask)) == set(range(classes))
    with pytest.raises(ValueError, match="classes, 11, 2 to 10"):
        Oct(classes=11)


def test_numbers_can_be_measured_again_in_the_cube() -> None:
    """The mean is one of them, the height of waves another."""
    source, everything = Cosmology(24, 4), (slice(0, 24),) * 3
    cubes = [source.read(i, everything) for i in range(60)]
    numbers = np.stack([source.target(i, everything) for i in range(60)])
    assert np.abs(numbers).max() <= 1
    seen = {0: [c.mean() for c in cubes], 3: [c[3].std() / c[0].std() for c in cubes]}
    for number, values in seen.items():
        assert np.corrcoef(values, numbers[:, number])[0, 1] > 0.9


# --- losses and metrics ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mse", "mae", "huber"])
def test_training_on_numbers_is_exact(name: str) -> None:
    with drawing(0):
        model = nn.Sequential(
            nn.Conv3d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(81, 4)
        ).double()
    draw, shapes = torch.Generator().manual_seed(1), ((4, 2, 5, 5, 5), (4, 4))
    data = [
        tuple(2 * torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
        for _ in range(2)
    ]
    plan = Plan(stages=2, micro_batches=2, schedule="1f1b")
    assert_equal(planned(model, data, plan, loss(name)), plainly(model, data, 2, loss(name)))


def test_a_loss_fits_its_task() -> None:
    assert loss_of(None, "regress") == "mse" and loss_of(None, "segment") == "cross-entropy"
    with pytest.raises(ValueError, match="'dice' does not fit the task regress; choose mse, mae"):
        loss_of("dice", "regress")
    with pytest.raises(ValueError, match="'huber' does not fit the task classify; choose cross"):
        loss_of("huber", "classify")


def test_errors_add_up_over_batches() -> None:
    draw = np.random.default_rng(0)
    guess, true = draw.normal(size=(2, 50, 3))
    parts = [Errors(3), Errors(3)]
    for part, rows in zip(parts, (slice(0, 20), slice(20, 50)), strict=True):
        part.add(torch.tensor(guess[rows]), torch.tensor(true[rows]))
    found = (parts[0] + parts[1]).summary()
    error = guess - true
    assert found["mse"] == pytest.approx((error**2).mean(), rel=1e-12)
    assert found["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-12)
    assert found["mae_1"] == pytest.approx(np.abs(error[:, 1]).mean(), rel=1e-12)
    share = 1 - (error**2).mean(0) / true.var(0)
    assert found["r2"] == pytest.approx(share.mean(), rel=1e-9)
    with pytest.raises(ValueError, match=r"outputs have shape \(2, 2\) and targets \(2, 3\)"):
        parts[0].add(torch.zeros(2, 2), torch.zeros(2, 3))
    assert np.isnan(Errors(2).summary()["mse"])


# --- files ----------------------------------------------------------------------------------------


def test_numbers_come_out_of_an_array_or_of_each_file(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file["images"], file["unit"] = np.zeros((3, 2, 4, 4, 4), np.float32), numbers
        file["bad"] = numbers[:2]
    (tmp_path / "each").mkdir()
    for i, row in enumerate(numbers):
        with h5py.File(tmp_path / "each" / f"{i}.hdf5", "w") as file:
            file["images"], file.attrs["unit"] = np.zeros((2, 4, 4, 4), np.float32), row
    many = Volumes(tmp_path / "all.h5", targets="unit", names=("a", "b", "c", "d"))
    each = Volumes(tmp_path / "each", targets="unit")
    assert each.names == ("number 0", "number 1", "number 2", "number 3")
    for source in (many, each):
        assert (source.task, source.classes, len(source)) == ("regress", 4, 3)
        for _, targets in Loader(source, 3, shuffle=False).epoch():
            assert isinstance(targets, np.ndarray) and np.array_equal(targets, numbers)
    with pytest.raises(GemsError, match=r"bad of .* has shape \[\(2, 4\)\] of float32; it takes"):
        Volumes(tmp_path / "all.h5", targets="bad")
    with pytest.raises(ValueError, match="give one of labels"):
        Volumes(tmp_path / "all.h5", targets="unit", labels="unit")


# --- the command ----------------------------------------------------------------------------------


def metrics(folder: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "mse" in row or "dice" in row][-1]


def test_cosmology_by_command(tmp_path: Path, capsys: Any) -> None:
    command = ["train", "--app", "cosmology", "--model", "cosmoflow", "--image-size", "32"]
    command += ["--model-option", "width=2", "--samples", "8", "--batch-size", "2", "--steps", "2"]
    assert main([*command, "--loss", "huber", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "mae of omega_m, 2 held-out samples:" in said and "r2 of h" in said
    assert {"mse", "mae", "r2", "mae_3"} <= metrics(tmp_path).keys()
    assert list((tmp_path / "checkpoints").glob("best-*"))
    there = ["--checkpoint", str(tmp_path), "--out", str(tmp_path / "eval")]
    assert main(["eval", *command[1:-2], *there]) == 0
    assert "mae_0, 2 samples:" in capsys.readouterr().out
    assert main([*command, "--loss", "dice", "--out", str(tmp_path / "x")]) == 1
    assert "choose mse, mae, huber" in capsys.readouterr().err
    assert main([*command, "--class-weights", "1,2,3,4", "--out", str(tmp_path / "y")]) == 1
    assert "mse compares numbers; leave them out" in capsys.readouterr().err


def test_layers_by_command(tmp_path: Path, capsys: Any) -> None:
    command = ["train", "--app", "oct", "--model", "relaynet", "--image-size", "32"]
    command += ["--model-option", "width=4", "--samples", "8", "--batch-size", "2", "--steps", "2"]
    assert main([*command, "--loss", "dice", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(f"dice of {name}, 2 held-out samples:" in said for name in NAMES)
    assert {"dice", "dice_9"} <= metrics(tmp_path).keys()
