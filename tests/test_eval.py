"""`gems eval`: any checkpoint or weights, any plan, forward only; slides become heat maps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from gems.cli.evaluate import probabilities
from gems.cli.main import main
from gems.data.sample import Sample, sample_slides
from gems.torch.checkpoint.weight_files import read_weights
from tests.runs import Run, judged, on_ranks, trained

TILE = 128


@pytest.fixture(scope="module")
def tissue(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return sample_slides(tmp_path_factory.mktemp("tissue"), tile=TILE)


def slides(tissue: Sample, *options: object, model: str = "net") -> list[str]:
    given = ["--app", "medical", "--datapath", tissue.slide, "--image-size", TILE, *options]
    return [*map(str, given), "--model", f"tests.tiny:{model}", "--batch-size", "4"]


@pytest.fixture(scope="module")
def labelled(tissue: Sample) -> list[str]:
    return slides(tissue, "--labels", tissue.labels)


@pytest.fixture(scope="module")
def run(tissue: Sample, labelled: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    options = ["--save", "--num-epochs", 2, "--export", folder / "net.safetensors"]
    found = trained(folder, *options, "--learning-rate", 0.5, base=labelled)
    torch.save({"state_dict": read_weights(folder / "net.safetensors")}, folder / "net.pt")
    return found


def scores(folder: Path) -> np.ndarray:
    """Of each tile and class, as they are in the outlines."""
    features = json.loads((folder / "ihc.geojson").read_text())["features"]
    return np.array([list(f["properties"]["measurements"].values()) for f in features])


def test_weights_come_from_checkpoints_runs_and_plain_files(
    run: Run, labelled: list[str], tmp_path: Path
) -> None:
    last = run.folder / "checkpoints" / "step-000006"
    assert last.is_dir()
    found = [
        judged(tmp_path / str(i), "--checkpoint", path, "--part", "all", base=labelled)
        for i, path in enumerate([last, run.folder / "net.safetensors", run.folder / "net.pt"])
    ]
    assert found[0] == found[1] == found[2] and found[0].keys() == {"accuracy", "auc"}
    maps = [scores(tmp_path / str(i)) for i in range(3)]
    assert (maps[0] == maps[1]).all() and (maps[0] == maps[2]).all() and len(maps[0]) == 16
    best = next(p for p in (run.folder / "checkpoints").iterdir() if p.name.startswith("best"))
    of_run = judged(tmp_path / "run", "--checkpoint", run.folder, base=labelled)
    assert of_run == judged(tmp_path / "best", "--checkpoint", best, base=labelled)
    shutil.copytree(last, tmp_path / "other" / "step-000006")
    newest = judged(tmp_path / "c", "--checkpoint", tmp_path / "other", base=labelled)
    assert newest == judged(tmp_path / "d", "--checkpoint", last, base=labelled)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "gems eval needs --checkpoint"),
        (["--checkpoint", "nowhere"], "nowhere is no checkpoint, no run with checkpoints"),
        (["--checkpoint", "pyproject.toml"], "has the ending '.toml'"),
    ],
)
def test_what_is_no_network_is_refused(
    words: list[str], said: str, labelled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *labelled, *words]) == 1
    assert said in capsys.readouterr().err


def test_forward_only_in_both_directions_gives_the_scores_of_one_rank(
    run: Run, labelled: list[str], tmp_path: Path
) -> None:
    given = ["--checkpoint", run.folder, "--part", "all"]
    alone = judged(tmp_path / "one", *given, base=labelled)
    both = ["--split-size", 2, "--times", 1, "--batch-size", 2, "--out", tmp_path / "two"]
    assert on_ranks(2, "eval", *labelled, *given, *both) == [0, 0]
    found = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert found.pop("images_per_second") > 0 and found.pop("batch_latency")
    assert found == pytest.approx(alone, abs=1e-6)
    assert scores(tmp_path / "two") == pytest.approx(scores(tmp_path / "one"), abs=2e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8"])
def test_lower_precision_gives_nearly_the_same_scores(
    precision: str, run: Run, labelled: list[str], tmp_path: Path
) -> None:
    given = ["--checkpoint", run.folder / "net.safetensors", "--part", "all"]
    judged(tmp_path / "a", *given, base=labelled)
    judged(tmp_path / "b", *given, "--precision", precision, base=labelled)
    exact, rough = scores(tmp_path / "a"), scores(tmp_path / "b")
    assert rough == pytest.approx(exact, abs=0.02) and (rough != exact).any()


def test_slides_without_labels_get_heat_maps_of_all_tiles_and_no_metrics(
    run: Run, tissue: Sample, tmp_path: Path
) -> None:
    """A quarter of the slide was mapped: the part that would be held out, had it labels."""
    unknown = slides(tissue, "--tissue", 0, "--num-classes", 2)
    assert judged(tmp_path, "--checkpoint", run.folder / "net.pt", base=unknown) == {}
    maps = {"ihc.png", "ihc.geojson", "ihc.ome.tif"}
    assert {p.name for p in tmp_path.iterdir()} == maps | {"metrics.json"}
    found = json.loads((tmp_path / "ihc.geojson").read_text())
    assert found["type"] == "FeatureCollection" and len(found["features"]) == 16
    kinds = {f["properties"]["classification"]["name"] for f in found["features"]}
    assert kinds <= {"class 0", "class 1"}
    assert scores(tmp_path).sum(1) == pytest.approx(1, abs=1e-5)
    assert Image.open(tmp_path / "ihc.png").size == (512, 512)
    with tifffile.TiffFile(tmp_path / "ihc.ome.tif") as file:
        assert file.is_ome and file.asarray().shape == (2, 4, 4)


def test_what_has_neither_labels_nor_maps_is_refused(
    run: Run, tissue: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = slides(tissue, "--num-classes", 2, "--tissue", 0, "--out", tmp_path)
    weights = ["--checkpoint", str(run.folder / "net.pt")]
    assert main(["eval", *unknown, *weights, "--no-heat-map"]) == 1
    assert "has no labels to evaluate by" in capsys.readouterr().err
    assert main(["train", *unknown]) == 1
    assert "nothing to train on" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_network_of_masks_is_judged_by_pixels_and_its_map_shows_their_mean(
    tissue: Sample, tmp_path: Path
) -> None:
    masks = ["--masks", tissue.masks, "--class-names", "negative,positive", "--tissue", 0]
    base = slides(tissue, *masks, model="pixels")
    found = trained(tmp_path / "run", "--save", "--num-epochs", 2, base=base)
    metrics = judged(tmp_path / "eval", "--checkpoint", found.folder, "--part", "all", base=base)
    assert {"accuracy", "dice", "iou", "dice_0", "iou_1"} <= metrics.keys()
    assert metrics["accuracy"] > 0.6
    share: Any = scores(tmp_path / "eval")
    assert share.shape == (16, 2) and share.sum(1) == pytest.approx(1, abs=1e-5)
    noted = {name: found.of(name, "eval")[-1] for name in metrics}
    last = found.folder / "checkpoints" / "step-000006"
    assert judged(tmp_path / "c", "--checkpoint", last, base=base) == pytest.approx(noted)


def test_cifar_has_its_own_held_out_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "--app", "cifar", "--datapath", str(tmp_path), "--checkpoint", "x.pt"]
    assert main([*words, "--part", "all"]) == 1
    assert "--part train or held-out" in capsys.readouterr().err


def test_the_score_of_a_tile_is_the_mean_over_its_pixels() -> None:
    output = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(probabilities(output), output.softmax(1).mean((2, 3)))
    assert torch.equal(probabilities(output[..., 0, 0]), output[..., 0, 0].softmax(1))
