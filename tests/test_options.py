"""Every option of `gems train` and `gems eval` does what it says: none is accepted and ignored."""

from __future__ import annotations

import csv
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from unittest import mock

import h5py
import numpy as np
import pytest
import torch

from gems.cli.data import SOURCES, divided, loader, source_from
from gems.cli.job import trainer_from
from gems.cli.main import main
from gems.cli.model_options import fitted
from gems.cli.plan_options import plan_from
from gems.data.sample import Sample, sample_slides
from gems.data.slides import Slides
from gems.data.synthetic import Synthetic
from gems.data.volumes import Volumes
from gems.errors import GemsError
from gems.files import from_json, to_json, write
from gems.plans.plan import Plan
from gems.predict.timeline import Memory, Timeline
from gems.schedule.build import lowered
from tests.runs import PIXELS, TINY, Run, judged, parsed, parser_of, trained

SHOWN: dict[str, str] = {}  # option: the test that fails if it is ignored
ELSEWHERE = {"--help", "-h", "--config", "--like"}  # test_config.py, test_from_mpi4dl.py
RESNET = ["--model", "resnet-v2", "--num-layers", "11", "--num-filters", "4", "--batch-size", "3"]
RESNET += ["--app", "synthetic", "--samples", "4", "--image-size", "8", "--num-classes", "2"]
T = TypeVar("T")


def shows(*flags: str) -> Callable[[T], T]:
    def mark(test: T) -> T:
        SHOWN.update(dict.fromkeys(flags, test.__name__))  # type: ignore[attr-defined]
        return test

    return mark


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps without any other option, with checkpoints and weights."""
    folder = tmp_path_factory.mktemp("usual")
    return trained(folder, "--save", "--export", folder / "net.pt")


@pytest.fixture(scope="module")
def tissue(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return sample_slides(tmp_path_factory.mktemp("tissue"), tile=128)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


def test_every_option_of_train_and_eval_has_a_test_that_fails_if_it_is_ignored() -> None:
    flags = {
        flag
        for command in ("train", "eval")
        for action in parser_of(command)._actions
        for flag in action.option_strings
        if not flag.startswith("--no-")
    }
    assert flags - ELSEWHERE - set(SHOWN) == set(), "options without a test"
    assert set(SHOWN) - flags == set(), "tests of options that are gone"


# --- the model ------------------------------------------------------------------------------------


@shows("--model", "--num-layers", "--num-filters", "--num-classes", "--model-option", "--export")
def test_the_network_is_the_one_that_was_asked_for(tmp_path: Path, usual: Run) -> None:
    def shapes(name: str, base: list[str], *options: str) -> dict[str, torch.Size]:
        trained(tmp_path, *options, "--steps", 1, "--export", tmp_path / name, base=base)
        return {k: x.shape for k, x in weights(tmp_path / name).items()}

    plain = {k: x.shape for k, x in weights(usual.folder / "net.pt").items()}
    assert plain["head.weight"] == (2, 4)
    wide = shapes("a.pt", TINY, "--model-option", "width=6", "--num-classes", "5")
    assert wide["head.weight"] == (5, 6)
    net = shapes("b.pt", RESNET)
    assert next(iter(net.values()))[0] == 4
    deep = shapes("c.pt", RESNET, "--num-layers", "20", "--num-filters", "6", "--num-classes", "3")
    assert len(deep) > len(net)
    assert next(iter(deep.values()))[0] == 6
    assert list(deep.values())[-1][0] == 3 and list(net.values())[-1][0] == 2


@shows("--image-size", "--batch-size")
def test_images_and_batches_are_as_large_as_was_asked_for(tmp_path: Path, usual: Run) -> None:
    large = trained(tmp_path, "--image-size", 16, "--batch-size", 9)
    assert len(usual.losses) == 3 and len(large.losses) == 1

    def activations(run: Run) -> int:
        timeline = from_json(Timeline, (run.folder / "timeline.json").read_text())
        return timeline.peaks[0].activations

    assert activations(large) > 10 * activations(usual)


# --- the plan -------------------------------------------------------------------------------------


PLANS: list[tuple[str, dict[str, Any]]] = [
    ("--split-size 4", {"depth": 4, "ranks": 4}),
    ("--stages 4", {"depth": 4, "ranks": 4}),
    ("--parts 4", {"micro_batches": 4}),
    ("--times 2 --parts 3", {"schedule": "gems", "replications": 6, "micro_batches": 12}),
    ("--times 2 --parts 3 --schedule gems-zb", {"max_in_flight": 3}),
    ("--schedule gpipe", {"schedule": "gpipe"}),
    ("--data 2", {"data": 2, "world": 2}),
    ("--stages 4 --ranks 2 --schedule interleaved", {"ranks": 2}),
    ("--stages 4 --placement fold --schedule auto", {"placement": "fold", "ranks": 2}),
    ("--stages 5 --placement levels --schedule auto", {"placement": "levels", "ranks": 3}),
    ("--stages 5 --balance layers", {"balance": "layers"}),
    ("--schedule auto --bidirectional", {"bidirectional": True, "directions": 2}),
    ("--schedule auto --max-in-flight 3", {"max_in_flight": 3}),
    ("--stages 2 --balance 3,1", {"balance": (3, 1)}),
    ("--balance memory", {"balance": "memory"}),
    ("--stages 2 --spatial 1x2", {"spatial": ((1, 2),)}),
    ("--stages 2 --num-spatial-parts 4", {"spatial": ((2, 2),)}),
    ("--stages 3 --num-spatial-parts 4,2", {"spatial": ((2, 2), (1, 2))}),
    ("--stages 3 --num-spatial-parts 4 --spatial-size 2", {"spatial": ((2, 2), (2, 2))}),
    (
        "--stages 2 --num-spatial-parts 4 --slice-method vertical",
        {"spatial": ((1, 4),)},
    ),
    ("--stages 2 --num-spatial-parts 4 --slice-method horizontal", {"spatial": ((4, 1),)}),
    ("--local-dp 2", {"local_dp": 2, "ranks": 2}),
    ("--local-DP 2", {"local_dp": 2, "ranks": 2}),
    ("--spatial 2x1 --stages 2 --halo d2", {"halo": "d2"}),
    ("--spatial 2x1 --stages 2 --halo-D2", {"halo": "d2"}),
    ("--spatial 2x1 --stages 2 --halo-D2 --fused-layers 3", {"fused_layers": 3}),
    ("--no-enable-master-comm-opt", {"grad_sync": "end"}),
    ("--recompute always", {"recompute": "always"}),
    ("--stages 2 --ranks 1 --schedule sequential --stream 2x2", {"stream": ((2, 2),)}),
    ("--stages 2 --stream 2x2 --stream-halo carry", {"stream_halo": "carry"}),
    ("--data 2 --zero 2", {"zero": 2}),
    ("--offload activations:disk", {"offload": ("activations:disk",)}),
    ("--stages 2 --ranks 1 --schedule l2l --optimizer-step eager", {"optimizer_step": "eager"}),
    ("--spatial 2x1 --recompute always --partition-activations", {"partition_activations": True}),
]
SHOWN |= {
    word: "test_the_plan_is_the_one_that_was_asked_for"
    for words, _ in PLANS
    for word in words.split()
    if word.startswith("--") and not word.startswith("--no-")
}


@pytest.mark.parametrize(("words", "fields"), PLANS)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_the_plan_is_the_one_that_was_asked_for(
    command: str, words: str, fields: dict[str, Any]
) -> None:
    plan = plan_from(parsed(*words.split(), command=command))
    plain = plan_from(parsed(command=command))
    assert {name: getattr(plan, name) for name in fields} == fields
    assert all(getattr(plain, name) != value for name, value in fields.items())


@shows("--enable-master-comm-opt")
def test_gradients_are_summed_beside_other_work_or_after_it() -> None:
    gems = ["--stages", "4", "--times", "2"]
    early, late = (
        str(lowered(plan_from(parsed(*gems, flag))))
        for flag in ("--enable-master-comm-opt", "--no-enable-master-comm-opt")
    )
    assert early != late and early == str(lowered(plan_from(parsed(*gems))))


@shows("--parts", "--plan")
def test_a_plan_reaches_the_run_from_options_and_from_a_file(tmp_path: Path, usual: Run) -> None:
    by_parts = trained(tmp_path / "a", "--parts", 3)
    assert (usual.plan["micro_batches"], by_parts.plan["micro_batches"]) == (1, 3)
    write(tmp_path / "plan.json", to_json(Plan(stages=1, micro_batches=3, schedule="gpipe")))
    by_file = trained(tmp_path / "b", "--plan", tmp_path / "plan.json", "--parts", 3)
    assert by_file.plan["schedule"] == "gpipe" and by_file.plan["micro_batches"] == 3
    assert by_file.losses == by_parts.losses != usual.losses, "statistics are per micro-batch"


# --- the data -------------------------------------------------------------------------------------


def cifar(folder: Path) -> Path:
    """Files as they were published, with two pictures each."""
    for i, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        pixels = np.random.default_rng(i).integers(0, 256, (2, 3072), np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [i, 9]}))
    return folder


@shows("--app", "--datapath")
def test_each_app_reads_its_own_data_from_where_it_is(tmp_path: Path, tissue: Sample) -> None:
    generated = {"synthetic", "pictures", "cosmology", "oct"}
    assert set(SOURCES) == {"medical", "cifar", "folders", "volumes"} | generated
    for number, name in (("1", "medical"), ("2", "cifar"), ("3", "synthetic")):
        assert parsed("--app", number).app == parsed("--app", name).app == name
    slide = source_from(parsed("--app", "1", "--datapath", tissue.slide, "--image-size", 256))
    assert isinstance(slide, Slides) and slide.paths == (tissue.slide,)
    train, test = divided(parsed("--app", "2", "--datapath", cifar(tmp_path)))
    assert (len(train), len(test)) == (10, 2) and train.names[0] == "airplane"
    assert isinstance(source_from(parsed("--app", "3", "--samples", 2)), Synthetic)
    cubes = ["--app", "cosmology", "--model", "cosmoflow", "--image-size", 8, "--samples", 2]
    assert source_from(parsed(*cubes)).task == "regress"
    scans = ["--app", "oct", "--model", "relaynet", "--image-size", 64, "--samples", 2]
    assert source_from(parsed(*scans)).task == "segment"
    assert source_from(parsed("--samples", 4)).names[0] == "ihc", "pictures, unless told"
    assert main(["train", "--app", "cifar"]) == 1, "where?"


@shows("--class-names")
def test_pictures_in_folders_have_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    from PIL import Image

    for name, grey in (("cat", 0), ("dog", 255)):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4), (grey,) * 3).save(tmp_path / name / "1.png")
    given = ["--app", "folders", "--datapath", tmp_path, "--image-size", 4]
    assert source_from(parsed(*given)).names == ("cat", "dog")
    turned = source_from(parsed(*given, "--class-names", "dog,cat"))
    assert turned.names == ("dog", "cat") and int(turned.target(0, ())) == 1


@shows("--labels", "--masks", "--targets")
def test_labels_masks_and_targets_are_those_that_were_named(tmp_path: Path, tissue: Sample) -> None:
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["images"] = np.zeros((3, 4, 4, 4), np.float32)
        file["labels"], file["other"] = np.array([0, 1, 0]), np.array([0, 1, 2])
        file["seg"] = np.ones((3, 4, 4, 4), np.uint8)
        file["omega"] = np.array([[0.25], [0.5], [0.75]], np.float32)
    volumes = ["--app", "volumes", "--datapath", tmp_path / "v.h5"]
    assert source_from(parsed(*volumes)).classes == 2
    assert source_from(parsed(*volumes, "--labels", "other")).classes == 3
    masked = source_from(parsed(*volumes, "--masks", "seg", "--class-names", "a,b"))
    assert isinstance(masked, Volumes) and masked.task == "segment"
    assert masked.target(0, (slice(4),) * 3).all()
    regressed = source_from(parsed(*volumes, "--targets", "omega"))
    assert regressed.task == "regress" and list(regressed.target(1, ())) == [0.5]
    slides = ["--app", "medical", "--datapath", tissue.slide, "--image-size", 128]
    assert source_from(parsed(*slides)).classes == 0
    said = source_from(parsed(*slides, "--labels", tissue.labels))
    rows = list(csv.DictReader(tissue.labels.open()))
    assert [said.names[int(said.target(i, ()))] for i in range(16)] == [r["label"] for r in rows]
    masks = ["--masks", tissue.masks, "--class-names", "negative,positive", "--tissue", 0]
    assert source_from(parsed(*slides, *masks)).task == "segment"


@shows("--mpp", "--magnification", "--level", "--stride", "--tissue")
def test_tiles_are_cut_at_the_scale_and_the_steps_that_were_asked_for(tissue: Sample) -> None:
    def tiles(*options: object) -> int:
        given = ["--app", "medical", "--datapath", tissue.slide, "--image-size", 128]
        return len(source_from(parsed(*given, *options)))

    everything = ["--tissue", 0]
    assert tiles(*everything) == 16, "512 pixels of half a micron"
    assert tiles(*everything, "--mpp", 1) == tiles(*everything, "--magnification", 10) == 4
    assert tiles(*everything, "--level", 1) == 4
    assert tiles(*everything, "--stride", 64) == 64
    assert 0 < tiles("--tissue", 0.4) < 16


@shows("--bad-slides")
def test_slides_that_cannot_be_read_are_skipped_or_stop_the_run(
    tmp_path: Path, tissue: Sample
) -> None:
    (tmp_path / "good.tif").write_bytes(tissue.slide.read_bytes())
    (tmp_path / "bad.tif").write_bytes(b"not a slide")
    given = ["--app", "medical", "--datapath", tmp_path, "--image-size", 128]
    source: Any = source_from(parsed(*given))
    assert [p.name for p in source.unreadable] == ["bad.tif"]
    with pytest.raises(GemsError, match="slides cannot be read"):
        source_from(parsed(*given, "--bad-slides", "stop"))


@shows("--samples", "--task", "--held-out")
def test_samples_are_as_many_and_of_the_kind_that_was_asked_for(usual: Run) -> None:
    given = ["--app", "synthetic", "--image-size", 4]
    assert len(source_from(parsed(*given, "--samples", 20))) == 20
    assert source_from(parsed(*given)).task == "classify"
    assert source_from(parsed(*given, "--task", "segment")).task == "segment"
    halves = divided(parsed(*given, "--samples", 20, "--held-out", 0.5))
    assert [len(half) for half in halves] == [10, 10]
    assert [len(half) for half in divided(parsed(*given, "--samples", 20))] == [15, 5]


class Watched(Synthetic):
    """Notes who reads."""

    readers: ClassVar[set[str]] = set()

    def read(self, index: int, box: Any) -> Any:
        self.readers.add(threading.current_thread().name.partition("_")[0])
        return super().read(index, box)


@shows("--num-workers")
def test_workers_read_and_change_no_number(tmp_path: Path, usual: Run) -> None:
    for workers, readers in (("0", {threading.current_thread().name}), ("2", {"gems-data"})):
        Watched.readers = set()
        with loader(parsed("--num-workers", workers), Watched(4, samples=4), 2) as batches:
            for images, _ in batches.epoch(0):
                images[:]
        assert readers == Watched.readers
    assert trained(tmp_path, "--num-workers", 2).losses == usual.losses


# --- how it runs ----------------------------------------------------------------------------------


@shows("--auto", "--memory")
def test_the_planner_chooses_within_the_memory_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = trained(tmp_path / "a", "--auto", 1, "--costs", "estimate")
    assert auto.plan["micro_batches"] == 2, "two per rank, as the planner likes it"
    assert main(["train", *TINY, "--auto", "1", "--memory", "1kB", "--out", str(tmp_path)]) == 1
    assert "nothing fits" in capsys.readouterr().err


@shows("--offload-folder")
def test_what_is_put_away_on_disk_is_in_the_folder_that_was_given(
    tmp_path: Path, usual: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["--stages", "4", "--ranks", "1", "--schedule", "gpipe", "--offload", "activations:disk"]
    plan += ["--offload-folder"]
    away = trained(tmp_path / "a", *plan, tmp_path)
    assert away.losses == pytest.approx(usual.losses, rel=1e-6)
    nowhere = str(tmp_path / "nowhere")
    assert main(["train", *TINY, *plan, nowhere, "--out", str(tmp_path / "b")]) == 1
    assert f"cannot make a file for offloaded memory in {nowhere}" in capsys.readouterr().err
    assert main(["train", *TINY, "--offload-folder", nowhere, "--out", str(tmp_path / "c")]) == 1
    assert "offloads nothing to disk" in capsys.readouterr().err


@shows("--timeout")
def test_the_timeout_is_the_trainer_s() -> None:
    """What it does is in test_loud.py."""
    given = parsed(*TINY, "--timeout", "7.5")
    source = source_from(given)
    fitted(given, source)
    with mock.patch("gems.cli.job.Trainer") as made:
        trainer_from(given, plan_from(given), source)
    assert made.call_args.kwargs["timeout"] == 7.5


@shows("--machine", "--costs")
def test_costs_are_of_the_machine_and_measured_if_asked_for() -> None:
    def seconds(*options: str) -> list[float]:
        given = parsed(*TINY, *options)
        source = source_from(given)
        fitted(given, source)
        return [cost.f for cost in trainer_from(given, plan_from(given), source).costs]

    assert seconds() == seconds("--costs", "estimate") == seconds("--machine", "cpu")
    assert seconds("--machine", "v100") != seconds()
    assert seconds("--costs", "measure") != seconds()


@shows("--master-weights")
def test_masters_are_beside_weights_in_half(tmp_path: Path) -> None:
    def peak(*options: str) -> Memory:
        trained(tmp_path, "--precision", "bf16", "--overwrite", *options)
        return from_json(Timeline, (tmp_path / "timeline.json").read_text()).peaks[0]

    full, half = peak(), peak("--master-weights")
    assert half.weights < full.weights and half.optimizer > full.optimizer


@shows("--compare-fp32")
def test_lower_precision_is_compared_with_fp32(usual: Run, tmp_path: Path) -> None:
    given = ["--checkpoint", usual.folder / "net.pt", "--precision", "bf16"]
    assert "same_class_as_fp32" not in judged(tmp_path, *given)
    assert judged(tmp_path, *given, "--compare-fp32")["same_class_as_fp32"] > 0.5


@shows("--precision")
def test_precision_is_that_of_the_arithmetic(tmp_path: Path, usual: Run) -> None:
    def losses(precision: str) -> list[float]:
        return trained(tmp_path / precision, "--precision", precision).losses

    brain, half = losses("bf16"), losses("fp16")
    assert losses("bp_16") == brain and losses("fp_16") == half and losses("fp_32") == usual.losses
    assert len({tuple(x) for x in (brain, half, usual.losses)}) == 3
    assert brain == pytest.approx(usual.losses, rel=0.05)


@shows("--memory-format")
def test_a_memory_format_is_that_of_the_weights() -> None:
    def formats(*options: str) -> set[bool]:
        given = parsed(*TINY, *options)
        source = source_from(given)
        fitted(given, source)
        weights = trainer_from(given, plan_from(given), source).parameters()
        return {w.stride(1) == 1 for w in weights if w.dim() == 4 and min(w.shape[1:]) > 1}

    assert formats() == {False} and formats("--memory-format", "channels_last") == {True}


@shows("--compile")
def test_compiled_stages_are_asked_for() -> None:
    for options, expected in (((), False), (("--compile",), True)):
        given = parsed(*TINY, *options)
        source = source_from(given)
        fitted(given, source)
        trainer = trainer_from(given, plan_from(given), source)
        assert trainer.session.runner.programs.compiling.enabled is expected


@shows("--backend")
@pytest.mark.parametrize(("backend", "words"), [("mpi", "mpirun"), ("nccl", "needs GPUs")])
def test_a_backend_that_cannot_run_here_is_refused(
    backend: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if backend == "nccl" and torch.cuda.is_available():
        pytest.skip("it can run here")
    for ranks in ("1", "2") if backend == "nccl" else ("2",):  # one rank needs no mpirun
        options = [*TINY, "--backend", backend, "--split-size", ranks, "--out", str(tmp_path)]
        assert main(["train", *options]) == 1
        assert words in capsys.readouterr().err
    trained(tmp_path, "--backend", "gloo", "--steps", 1)


@shows("--device")
def test_the_device_is_the_one_that_was_asked_for() -> None:
    """Which one each rank gets is in test_devices.py."""

    def device(*options: str) -> str:
        given = parsed(*TINY, *options)
        source = source_from(given)
        fitted(given, source)
        return trainer_from(given, plan_from(given), source).device.type

    assert device("--device", "cpu") == "cpu"
    assert device() == ("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(GemsError, match="device is cuda, and torch sees no GPU"):
            device("--device", "cuda")


@shows("--limit-memory")
def test_a_hard_limit_is_the_trainer_s(capsys: pytest.CaptureFixture[str]) -> None:
    """What it does is in test_gpu_memory.py."""
    given = parsed(*TINY, "--limit-memory", "--memory", "1GiB")
    source = source_from(given)
    fitted(given, source)
    with mock.patch("gems.cli.job.Trainer") as made:
        trainer_from(given, plan_from(given), source)
    assert made.call_args.kwargs["limit_memory"] is True
    for options in ([], ["--memory", "1GiB", "--device", "cpu"]):
        assert main(["train", *TINY, "--limit-memory", *options]) == 1
        assert "--limit-memory limits the allocator of a GPU" in capsys.readouterr().err


@shows("--seed")
def test_the_seed_decides_weights_and_data(tmp_path: Path, usual: Run) -> None:
    assert trained(tmp_path / "a").losses == usual.losses
    other = trained(tmp_path / "b", "--seed", 1)
    assert not set(other.losses) & set(usual.losses)
    # With the same weights, too: dropout and the order of the samples.
    base = ["--checkpoint", usual.folder / "net.pt", "--model-option", "drop=0.5"]
    same = trained(tmp_path / "c", *base).losses
    assert same != trained(tmp_path / "d", *base, "--seed", 1).losses


@shows("--checkpoint")
def test_a_run_begins_with_weights_or_goes_on_from_a_checkpoint(tmp_path: Path, usual: Run) -> None:
    weighed = trained(tmp_path / "a", "--checkpoint", usual.folder / "net.pt")
    assert weighed.losses[0] != usual.losses[0] and len(weighed.losses) == 3
    newest = usual.folder / "checkpoints" / "step-000003"
    further = trained(tmp_path / "b", "--checkpoint", newest, "--num-epochs", 2)
    whole = trained(tmp_path / "c", "--num-epochs", 2)
    assert further.losses == whole.losses[3:], "bit for bit, as if it had never ended"


@shows("--verbose", "-v")
def test_verbose_tells_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path / "a", "--save")
    assert "saved step" not in caplog.text and "images/s" not in caplog.text
    trained(tmp_path / "b", "--save", "-v")
    assert "saved step 3" in caplog.text
    assert re.search(r"step 3 of 3, epoch 0  loss \d.* images/s", caplog.text)
    assert "evaluated after step 3: accuracy" in caplog.text
    assert parsed("--verbose").verbose


# --- the training ---------------------------------------------------------------------------------


@shows("--num-epochs", "--steps")
def test_it_trains_for_so_many_epochs_or_steps(tmp_path: Path, usual: Run) -> None:
    longer = trained(tmp_path / "a", "--num-epochs", 2)
    assert longer.of("epoch") == [0, 0, 0, 1, 1, 1] and longer.losses[:3] == usual.losses
    assert trained(tmp_path / "b", "--num-epochs", 2, "--steps", 4).losses == longer.losses[:4]


@shows("--optimizer")
def test_each_optimizer_takes_its_own_way(tmp_path: Path, usual: Run) -> None:
    names = ("sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam", "radam")
    decay = ["--weight-decay", 0.1]  # without, adam and adamw are one
    ways = [trained(tmp_path / n, "--optimizer", n, *decay).losses for n in names]
    assert len({way[0] for way in ways}) == 1 and len({way[2] for way in ways}) == len(names)


@shows("--learning-rate", "--momentum", "--weight-decay", "--clip")
def test_numbers_of_the_optimizer_change_the_way_after_the_first_update(
    tmp_path: Path, usual: Run
) -> None:
    ways = [usual]
    for option in ("--learning-rate 0.01", "--momentum 0", "--weight-decay 0.1", "--clip 0.01"):
        ways.append(trained(tmp_path / option.split()[0][2:], *option.split()))
    assert len({way.losses[0] for way in ways}) == 1 and len({way.losses[2] for way in ways}) == 5
    assert ways[1].rates == [0.01] * 3 and usual.rates == [0.05] * 3
    assert ways[4].of("gradient_norm")[0] > 0.01 and not usual.of("gradient_norm")


@shows("--learning-rate-decay", "--decay-epochs", "--learning-rate-schedule", "--warm-up")
def test_learning_rates_follow_the_schedule(tmp_path: Path) -> None:
    def rates(*options: object) -> list[float]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        few = ["--batch-size", 9, "--num-epochs", 4, "--learning-rate", 1e-3]
        return trained(folder, *few, "--no-enable-evaluation", *options).rates

    halves = ["--learning-rate-decay", 0.5]
    assert rates(*halves) == pytest.approx([1e-3, 5e-4, 2.5e-4, 1.25e-4])
    assert rates(*halves, "--decay-epochs", 2) == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4])
    assert rates("--warm-up", 2) == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])
    wave = [1e-3 * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(4)]
    assert rates("--learning-rate-schedule", "cosine") == pytest.approx(wave)


@shows("--accumulate")
def test_several_steps_make_one_update(tmp_path: Path, usual: Run) -> None:
    halves = ["--learning-rate-decay", 0.5, "--num-epochs", 2]
    three = trained(tmp_path, "--accumulate", 3, *halves)
    assert three.rates == [0.05] * 3 + [0.025] * 3
    assert three.losses[0] == usual.losses[0] and three.losses[1] != usual.losses[1]
    one = trained(tmp_path / "one", "--accumulate", 3, "--num-epochs", 2, "--steps", 1)
    assert one.losses == three.losses[:3], "--steps are updates"


@shows("--loss", "--class-weights", "--ignore-index")
def test_the_loss_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    def first(*options: object) -> float:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return trained(folder, *options, "--steps", 1, base=PIXELS).losses[0]

    plain = first()
    assert plain < first("--loss", "dice") < plain + 1
    found = {plain, first("--class-weights", "1,4"), first("--class-weights", "4,1")}
    found |= {first("--ignore-index", 0), first("--ignore-index", 1)}
    assert len(found) == 5


def test_balanced_weights_make_rare_classes_count_as_much(tmp_path: Path) -> None:
    from gems.cli.job import balanced

    train, _ = divided(parsed(*TINY))
    labels = [int(train.target(i, ())) for i in range(len(train))]
    wanted = [9 / (2 * labels.count(c)) for c in (0, 1)]
    assert balanced(train, 2) == wanted and wanted[0] != wanted[1]
    by_name = trained(tmp_path / "a", "--class-weights", "balanced", "--steps", 1)
    by_number = trained(tmp_path / "b", "--class-weights", ",".join(map(str, wanted)), "--steps", 1)
    assert by_name.losses == by_number.losses


@shows("--augment", "--enable-evaluation")
def test_augmentation_and_evaluation_can_be_switched(tmp_path: Path, usual: Run) -> None:
    assert len(usual.of("accuracy", "eval")) == 1
    other = trained(tmp_path, "--augment", "--no-enable-evaluation")
    assert other.losses[0] != usual.losses[0] and not other.of("accuracy", "eval")


# --- the folder -----------------------------------------------------------------------------------


@shows("--out", "--save", "--save-every", "--keep-checkpoints", "--tensorboard")
def test_the_folder_gets_what_was_asked_for(tmp_path: Path, usual: Run) -> None:
    assert usual.checkpoints == ["best-000003", "step-000003"]
    assert {"config.yaml", "plan.json", "metrics.jsonl", "metrics.csv"} < usual.files
    assert {"report.html", "schedule.svg", "timeline.json"} < usual.files
    less = ["--no-enable-evaluation", "--tensorboard"]
    bare = trained(tmp_path / "bare", *less)
    assert not bare.checkpoints and "tensorboard" in bare.files - usual.files
    each = trained(tmp_path / "each", "--save", "--no-enable-evaluation", "--save-every", 1)
    assert each.checkpoints == ["step-000002", "step-000003"]
    one = ["--save", "--no-enable-evaluation", "--save-every", 1, "--keep-checkpoints", 1]
    assert trained(tmp_path / "one", *one).checkpoints == ["step-000003"]
    rows = list(csv.DictReader((usual.folder / "metrics.csv").open()))
    assert [float(row["loss"]) for row in rows if row["kind"] == "train"] == usual.losses


@shows("--resume", "--overwrite")
def test_a_folder_with_checkpoints_is_gone_on_with_or_started_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once the old checkpoints stayed beside the new ones, and --resume went on with an old one."""
    short = trained(tmp_path, "--save").losses
    assert main(["train", *TINY, "--out", str(tmp_path)]) == 1
    assert "continue with --resume, choose another --out, or start over" in capsys.readouterr().err
    longer = trained(tmp_path, "--save", "--num-epochs", 2, "--resume").losses
    assert longer[:3] == short and len(longer) == 6
    over = trained(tmp_path, "--save", "--overwrite", "--seed", 1)
    assert len(over.losses) == 3 and over.losses != short
    assert over.checkpoints == ["best-000003", "step-000003"]
    assert len(trained(tmp_path, "--save", "--num-epochs", 2, "--resume", "--seed", 1).losses) == 6


# --- the evaluation -------------------------------------------------------------------------------


@shows("--part", "--out")
def test_the_part_that_is_judged_is_the_one_that_was_asked_for(
    tmp_path: Path, usual: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for part, samples in (("held-out", 3), ("train", 9), ("all", 12)):
        found = judged(tmp_path / part, "--checkpoint", usual.folder, "--part", part)
        assert f"accuracy, {samples} samples" in capsys.readouterr().out
        assert found.keys() == {"accuracy", "auc"}
    assert judged(tmp_path, "--checkpoint", usual.folder) == judged(
        tmp_path, "--checkpoint", usual.folder, "--part", "held-out"
    )
    noted = {name: usual.of(name, "eval")[-1] for name in ("accuracy", "auc")}
    assert judged(tmp_path, "--checkpoint", usual.folder) == noted


def test_a_class_that_does_not_count_is_not_judged_by(tmp_path: Path) -> None:
    run = trained(tmp_path, "--save", "--steps", 1, base=PIXELS)
    whole = judged(tmp_path / "a", "--checkpoint", run.folder, base=PIXELS)
    less = judged(tmp_path / "b", "--checkpoint", run.folder, "--ignore-index", 0, base=PIXELS)
    assert whole["accuracy"] != less["accuracy"]
    assert {"dice", "iou", "dice_0", "iou_1"} < whole.keys()


@shows("--heat-map", "--shown-class")
def test_heat_maps_show_the_class_that_was_asked_for(tmp_path: Path, tissue: Sample) -> None:
    slides = ["--app", "medical", "--datapath", str(tissue.slide), "--labels", str(tissue.labels)]
    base = ["--model", "tests.tiny:net", *slides, "--image-size", "128", "--batch-size", "4"]
    run = trained(tmp_path, "--steps", 1, "--export", tmp_path / "n.safetensors", base=base)
    given = ["--checkpoint", run.folder / "n.safetensors", "--part", "all"]
    judged(tmp_path / "a", *given, base=base)
    judged(tmp_path / "b", *given, "--shown-class", "negative", base=base)
    judged(tmp_path / "c", *given, "--no-heat-map", base=base)
    pictures = [(tmp_path / x / "ihc.png").read_bytes() for x in "ab"]
    assert pictures[0] != pictures[1]
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["metrics.json"]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mpp 1 --samples 2", "--mpp is for --app medical, not synthetic"),
        ("--app cifar --held-out 0.5 --datapath x", "--held-out is for --app medical or"),
        ("--auto 2 --split-size 2 --times 1", "leave out --split-size, --times"),
        (
            "--plan p.json --split-size 2",
            "already has the whole plan; leave out --split",
        ),
        ("--slice-method vertical", "needs --num-spatial-parts"),
        ("--spatial-size 2", "needs --num-spatial-parts"),
        ("--spatial 2x2 --num-spatial-parts 4 --stages 2", "--spatial already has the grids"),
        ("--seed -1 --batch-size 0", "--batch-size is 0; give 1 or more\n  - --seed is -1"),
        ("--decay-epochs 0", "--decay-epochs is 0; give 1 or more"),
        ("--clip 0", "give a norm above 0"),
        ("--optimizer adam --momentum 0.9", "adam has no momentum to set to 0.9"),
        ("--learning-rate 0", "learning_rate is 0.0, not above 0"),
        ("--learning-rate-decay 2", "learning-rate decay is 2.0"),
        ("--learning-rate-schedule cosine --warm-up 9", "is no longer than --warm-up 9"),
        ("--learning-rate-schedule cosine --learning-rate-decay 0.5", "leave out one of them"),
        ("--resume --overwrite", "give one of them"),
        ("--no-save --save-every 2", "give one of them"),
        ("--export net.onnx", "the ending must be one of .pt"),
        ("--class-weights 1,2,3", "3 numbers, 2 classes"),
        ("--class-weights a,b", "write numbers, or balanced"),
        ("--num-classes 1 --samples 3 --class-weights balanced,1", "write numbers, or balanced"),
        ("--held-out 1.5", "take a share between 0 and 1"),
        ("--num-layers 3", "--num-layers is for networks by name"),
        ("--times 1 --schedule 1f1b", "'1f1b' is not one"),
        ("--fused-layers 2", "is for halo='d2'"),
        ("--max-in-flight 2", "applies to schedules 'auto'"),
        ("--memory much", "is not a size"),
        ("--machine abacus", "there is no machine 'abacus'"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(
    options: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *TINY, *options.split(), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())
