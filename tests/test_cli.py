"""The command line: what each subcommand prints, writes and refuses."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from gems.cli.main import main
from gems.cli.options import add_options
from gems.cli.plan_options import PLAN, plan_from
from gems.files import from_json
from gems.model.graph import Graph
from gems.plans.plan import Plan
from gems.predict.timeline import Timeline
from gems.schedule.action import parse

STEP = str(Path(__file__).parent.parent / "docs" / "step.json")  # four ranks, gems, measured
SMALL = ["--model", "resnet-v2", "--num-layers", "11", "--num-filters", "4", "--image-size", "16"]


def test_the_table_of_the_readme_is_what_gems_draw_says(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    rows = re.findall(r"^\| `(--[^`]*)`[^|]*\| (\d+) \| ", readme, re.MULTILINE)
    assert len(rows) == 8
    for options, step in rows:
        assert main(["draw", "--stages", "4", *options.split()]) == 0
        assert f"step {step} units" in capsys.readouterr().out


def test_draw_prints_a_schedule_that_parses_back_and_writes_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "gems.svg"
    order = ["draw", "--stages", "2", "--times", "1", "--actions", "--svg", str(picture)]
    assert main(order) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if re.match(r"\d+: ", line)]
    file = tmp_path / "order.txt"
    file.write_text("\n".join(rows))
    assert len(parse(file.read_text()).ranks) == 2
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert main(["check", "--stages", "2", "--times", "1", str(file)]) == 0
    assert main(["draw", "--stages", "2", "--times", "1", str(file)]) == 0


def test_draw_writes_a_page_and_a_trace_of_one_step_over_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["draw", "--stages", "4", "--times", "2", "--over", STEP]
    page, trace = tmp_path / "report.html", tmp_path / "step.trace.json"
    assert main([*given, "--html", str(page), "--trace", str(trace), "--title", "two"]) == 0
    printed = capsys.readouterr().out
    assert "predicted step" in printed and "measured" in printed and "in all" in printed
    assert "<title>two</title>" in page.read_text()
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100


def test_draw_partitions_a_model_and_shows_it_over_the_step_in_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, page = tmp_path / "unet.svg", tmp_path / "unet.html"
    given = ["draw", "--partition", *SMALL, "--stages", "2", "--machine", "v100"]
    assert main([*given, "--svg", str(picture), "--html", str(page)]) == 0
    assert "to stage 1" in capsys.readouterr().out
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert 'class="arc"' in page.read_text() and "simulated clock" in page.read_text()


def test_draw_writes_nothing_if_it_cannot_draw(tmp_path: Path) -> None:
    file = tmp_path / "order.txt"
    file.write_text("0: 0F0 0B0\n1: 1F0\n")
    given = ["draw", "--stages", "2", str(file), "--html", str(tmp_path / "report.html")]
    assert main(given) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_check_reports_every_fault_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "order.txt"
    file.write_text("0: 0F0 0B0\n1: 1F0\n")
    assert main(["check", "--stages", "2", str(file)]) == 1
    said = capsys.readouterr().err
    assert "the gradient of stage 1, micro-batch 0 is computed 0 times" in said
    assert "the weight of stage 1, micro-batch 0 is computed 0 times" in said


def test_trace_lists_blocks_and_writes_the_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *SMALL, "--out", str(tmp_path / "graph.json")]) == 0
    graph = from_json(Graph, (tmp_path / "graph.json").read_text())
    printed = capsys.readouterr().out
    assert f"{len(graph.blocks)} blocks in {len(graph.layers)} layers" in printed
    assert all(block.name in printed for block in graph.blocks)


def test_plan_writes_a_plan_that_train_and_simulate_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "plan.json")
    assert main(["plan", *SMALL, "--stages", "2", "--times", "2", "--out", file]) == 0
    plan = from_json(Plan, Path(file).read_text())
    assert plan.depth == 2 and plan.micro_batches == 4 and plan.edges == ((0, 1),)
    assert main(["simulate", "--plan", file, "--out", str(tmp_path / "t.json")]) == 0
    assert from_json(Timeline, (tmp_path / "t.json").read_text()).seconds == 21
    assert main(["draw", str(tmp_path / "t.json")]) == 0
    assert main(["plan", *SMALL, "--auto", "4", "--machine", "v100"]) == 0
    assert "plans simulated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["plan", *SMALL, "--stages", "2", "--balance", "1,1"], "sums to 2, but the model has"),
        (["plan", "--model", "nothing"], "there is no model 'nothing'; choose one of"),
        (
            ["plan", "--model", "cosmoflow", "--num-layers", "3"],
            "--num-layers means nothing to cosmoflow",
        ),
        (
            ["plan", "--model", "resnet-50"],
            "comes from a library: write timm/resnet50 (pip install",
        ),
        (
            ["plan", "--model", "resnet-v3"],
            "no model 'resnet_v3'; did you mean resnet_v2, resnet_v1",
        ),
        (["plan", "--model", "unet", "--model-option", "levels"], "'levels' is not name=value"),
        (
            ["plan", "--model", "unet", "--model-option", "dims=2", "--model-option", "dims=3"],
            "--model-option dims is given twice: 2 and 3",
        ),
        (
            ["plan", "--model", "unet", "--num-layers", "3", "--model-option", "levels=3"],
            "--num-layers and --model-option levels: give one of them",
        ),
        (
            ["plan", "--model", "unet", "--model-option", "num_classes=3"],
            "--model-option num_classes: write --num-classes instead",
        ),
        (["plan", "--model", "unet", "--model-option", "floors=3"], "'unet' has no option floors"),
        (["plan", "--model", "vision/vit"], "there is no library 'vision'; choose one of"),
        (["plan", "--model", "torch.nn:Nothing"], "has no attribute 'Nothing'; write package"),
        (
            ["plan", "--model", "torch.nn:ReLU", "--model-option", "slope=3"],
            "unexpected keyword argument 'slope'; its arguments are given by --model-option",
        ),
        (
            ["plan", *SMALL, "--auto", "2", "--memory", "1kB"],
            "nothing fits 2 ranks with 1000 B each",
        ),
        (["train", "--batch-size", "3", "--parts", "2"], "not a multiple of --parts 2"),
        (["draw", "--stages", "2", "--balance", "a"], "neither time, memory, layers nor numbers"),
        (["draw", "missing.json"], "missing.json"),
        (["draw", "t.json", "--actions"], "t.json is a timeline, which has no schedule to print"),
        (["draw", "t.json", "--machine", "v100"], "t.json has its times, or takes unit costs"),
        (
            ["draw", "--partition", "--actions"],
            "prints the schedule of a step; leave out --partition",
        ),
        (["draw", "--partition", "--over", "t.json"], "--partition draws no step"),
        (
            ["draw", "docs/step.json", "--stages", "3"],
            "docs/step.json is of 4 ranks, the plan of 3",
        ),
        (["draw", "--stages", "4", "--over", STEP], "are not of one plan"),
        (["draw", "--stages", "2", "--spatial", "2by2"], "'2by2' is not a grid; write rows and"),
        (["draw", "--stages", "2", "--fused-layers", "2"], "fused_layers=2 is for halo='d2'"),
    ],
)
def test_what_is_wrong_is_said_on_one_line_with_exit_code_1(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--spatial", "2x2,1x2"], {"spatial": ((2, 2), (1, 2)), "ranks": 7}),
        (["--spatial", "4, vertical:2"], {"spatial": ((2, 2), (1, 2))}),
        (["--spatial", "horizontal:4"], {"spatial": ((4, 1),), "ranks": 6}),
        (["--spatial", "2x2x2"], {"spatial": ((2, 2, 2),)}),
        (["--local-dp", "2"], {"local_dp": 2, "ranks": 6}),
        (["--spatial", "4", "--halo", "d2"], {"halo": "d2", "fused_layers": 0}),
        (["--spatial", "4", "--halo", "d2", "--fused-layers", "3"], {"fused_layers": 3}),
        ([], {"spatial": (), "local_dp": 1, "halo": "d1", "ranks": 3}),
    ],
)
def test_how_stages_are_balanced_can_be_chosen_on_the_command_line(
    options: list[str], fields: dict[str, object]
) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, PLAN)
    plan = plan_from(parser.parse_args(["--stages", "3", *options]))
    assert {name: getattr(plan, name) for name in fields} == fields


def test_a_plan_over_teams_is_checked_written_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiled = ["--stages", "2", "--spatial", "2x2"]
    assert main(["check", *tiled, "--local-dp", "2", "--parts", "4"]) == 0
    assert "on 6 ranks: no deadlock" in capsys.readouterr().out
    file = str(tmp_path / "plan.json")
    assert main(["plan", *SMALL, *tiled, "--out", file]) == 0
    assert "0,1,2,3" in capsys.readouterr().out
    plan = from_json(Plan, Path(file).read_text())
    assert plan.spatial_groups == (((0, 1, 2, 3), (4,)),)
    whole = tmp_path / "whole.json"
    assert main(["plan", *SMALL, "--stages", "2", "--out", str(whole)]) == 0
    blocks = [from_json(Plan, Path(f).read_text()).stages for f in (file, whole)]
    assert len(blocks[0][0]) > len(blocks[1][0]), "four ranks take more of the model than one"
    assert main(["simulate", *SMALL, *tiled, "--machine", "v100"]) == 0
    assert main(["draw", "--plan", file]) == 0


def test_train_starts_its_ranks_and_leaves_plan_timeline_and_picture(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gems", "train", *SMALL, "--app", "synthetic", "--steps", "3"]
    command += ["--stages", "2", "--times", "1", "--batch-size", "2", "--samples", "32"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"loss: [\d.]+ -> [\d.]+ in 3 steps\nspeed: [\d.]+ images/s", done.stdout)
    assert "in flight" in done.stdout
    timeline = from_json(Timeline, (tmp_path / "timeline.json").read_text())
    assert timeline.ranks == 2 and timeline.max_in_flight == (1, 1)
    assert all(peak.total > peak.activations > 0 for peak in timeline.peaks)
    assert json.loads((tmp_path / "plan.json").read_text())["schedule"] == "gems"
    assert ET.parse(tmp_path / "schedule.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_train_fails_when_a_rank_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gems", "train", *SMALL, "--app", "synthetic", "--stages", "2"]
    command += ["--balance", "1,1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.count("sums to 2, but the model has") == 2, "on every rank"
    assert not list(tmp_path.iterdir())


def blocks_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    """What `gems trace` says of each block: its output."""
    assert main(["trace", *options]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {row[1]: row[2] for row in rows if row[1:] and row[0].isdigit() and row[1] != "blocks"}


def test_options_reach_the_network_by_flags_and_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = ["--model", "unet", "--image-size", "16", "--num-filters", "2"]
    assert blocks_of(capsys, *plain, "--num-layers", "2")["encoder.1.0"] == "1x4x8x8"
    assert "encoder.2.0" not in blocks_of(capsys, *plain, "--num-layers", "2")
    volume = ["--model-option", "dims=3", "--model-option", "levels=2"]
    assert blocks_of(capsys, *plain, *volume)["encoder.1.0"] == "1x4x8x8x8"
    cube = ["--model", "cosmoflow", "--image-size", "32", "--num-filters", "2"]
    assert blocks_of(capsys, *cube, "--num-classes", "4")["head"] == "1x4"


def test_a_network_that_looks_at_values_while_it_is_built_is_traced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As MONAI's Swin does: its drop rates are items of a tensor, and on meta there are none."""
    (tmp_path / "looking.py").write_text(
        "import torch\n"
        "def net(most):\n"
        "    rates = [x.item() for x in torch.linspace(0, most, 2)]\n"
        "    return torch.nn.Sequential(*(torch.nn.Dropout(rate) for rate in rates))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = blocks_of(capsys, "--model", "looking:net", "--model-option", "most=0.5")
    assert list(blocks) == ["0", "1"]


def test_options_reach_the_users_own_function(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", "torch.nn:Conv2d", "--image-size", "8", "--model-option", "in_channels=2"]
    own += ["--model-option", "out_channels=5", "--model-option", "kernel_size=(3, 1)"]
    own += ["--model-option", "padding_mode=zeros"]
    assert list(blocks_of(capsys, *own).values()) == ["1x5x6x8"]
