"""What documents show is true: pictures are drawn, plans are valid, files, names and options exist.

`make pictures` draws the pictures anew.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gems.cli.main import main
from gems.plans.plan import Plan

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")
DRAWN = re.findall(r"^gems (draw .*--svg docs/(\S+))$", PAGE, re.MULTILINE)
PRINTED = re.findall(r"^\$ gems (draw .*)\n((?:[^`\n].*\n)+)", PAGE, re.MULTILINE)


def test_every_picture_is_shown_with_its_command() -> None:
    assert {name for _, name in DRAWN} == {path.name for path in (ROOT / "docs").glob("*.svg")}
    assert set(re.findall(r"!\[.*\]\((\S+\.svg)\)", PAGE)) == {name for _, name in DRAWN}
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs").iterdir()}
    assert max(sizes.values()) < 200_000, "a repository is no album"


@pytest.mark.parametrize(("command", "name"), DRAWN, ids=[name for _, name in DRAWN])
def test_a_picture_is_what_its_command_draws(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    given = shlex.split(command)
    given[given.index("--svg") + 1] = str(tmp_path / name)
    assert main(given) == 0
    kept, drawn = ROOT / "docs" / name, tmp_path / name
    assert drawn.read_text() == kept.read_text(), f"docs/{name} is out of date: `make pictures`"


@pytest.mark.parametrize(("command", "shown"), PRINTED)
def test_what_is_shown_as_printed_is_printed(
    command: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.rstrip() == shown.rstrip()


DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*/README.md")),
]
each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS]
)
FOLDERS = "gems|docs|tests|benchmarks|examples"
OTHERS = {
    *("--signal", "--requeue", "--version", "--recipe"),  # of sbatch, gems, rattler-build
    "--nproc-per-node",
    "--nnodes",
    "--master-addr",
    "--cases",
    *("--side", "--patch", "--curve", "--norm"),  # of examples/gigapixel.py
    *("--export-all", "--hostfile"),  # of mpirun_rsh
    *("--halo-len", "--in-channels", "--out-channels", "--iterations", "--warmup"),  # of MPI4DL
    *("--enable-dp", "--dp-per-node", "--mem-per-process", "--unet-b", "--unet-c"),
    *("--fp16-allreduce", "--num-gpus-mp", "--num-gpu-per-node"),
}  # options of torchrun, of our tests, and as the comments say
COMMANDS = (
    *("train", "eval", "plan", "simulate", "draw", "check", "verify", "trace", "machine"),
    *("doctor", "slurm"),
)


def missing_paths(text: str, folder: Path) -> list[str]:
    """Every file or folder of ours that a text names or links to, and that is not there."""
    named = re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*/]", text)
    linked = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    return sorted({name for name in named if not list(ROOT.glob(name.rstrip("/")))}) + sorted(
        {name for name in linked if not (folder / name).exists()}
    )


def missing_names(text: str) -> list[str]:
    """Every `path.py` `name` whose file does not define the name."""
    pairs = re.findall(r"`(gems/[\w/]+\.py)`:? `([\w.]+)(?:\(.*?\))?`", text)
    return [
        f"{path}: {name}"
        for path, name in pairs
        if not re.search(
            rf"^\s*(?:(?:async )?def|class) {name.split('.')[-1]}\b|^\s*{name}\b.* = ",
            (ROOT / path).read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    ]


def plans_in(text: str) -> list[str]:
    """Every `Plan(...)` that a text writes out; one with `...` in it is only spoken of."""
    found = []
    for match in re.finditer(r"(?<!\w)Plan\(", text):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        found.append(text[match.start() : end])
    return [written for written in found if "..." not in written and written != "Plan()"]


@each_document
def test_every_file_that_a_document_names_exists(path: Path) -> None:
    assert not missing_paths(path.read_text(encoding="utf-8"), path.parent)


@each_document
def test_every_name_that_a_document_places_in_a_file_is_there(path: Path) -> None:
    assert not missing_names(path.read_text(encoding="utf-8"))


@each_document
def test_every_plan_that_a_document_writes_is_valid(path: Path) -> None:
    for written in plans_in(path.read_text(encoding="utf-8")):
        eval(written, {"Plan": Plan})


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """The options of each command, by its help."""
    from contextlib import redirect_stdout
    from io import StringIO

    found = {}
    for command in COMMANDS:
        with redirect_stdout(text := StringIO()), pytest.raises(SystemExit):
            main([command, "--help"])
        found[command] = set(re.findall(r"--[\w-]+", text.getvalue()))
    return found


@each_document
def test_every_option_that_a_document_names_exists(
    path: Path, options: dict[str, set[str]]
) -> None:
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for command, rest in re.findall(r"^(?:\$ | {4})?gems (\w+)( .*)?$", text, re.MULTILINE):
        given = set(re.findall(r"(?<!\S)--[a-zA-Z][\w-]*", rest.split("#")[0]))
        if command == "slurm":  # what it is to run is there, too
            given -= options["train"]
        assert given <= options[command], f"gems {command}: {given - options[command]}"
    if path.parent.parent == ROOT / "benchmarks":
        return  # their own scripts have options, too
    every = set().union(*options.values(), OTHERS)
    named = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text))
    assert named <= every, f"no command has {named - every}"


def test_what_is_missing_is_found() -> None:
    assert missing_paths("see `gems/nowhere.py` and [this](there.md)", ROOT) == [
        "gems/nowhere.py",
        "there.md",
    ]
    assert not missing_paths("`gems/plans/plan.py`, gems/machines/*.json, docs/", ROOT)
    assert missing_names("`gems/plans/plan.py` `Plan.nothing`") == [
        "gems/plans/plan.py: Plan.nothing"
    ]
    assert not missing_names("`gems/plans/plan.py`: `Plan.explain()`")
    assert plans_in("`Plan(stages=2, spatial=[(1, 2)])` and `Plan(zero=...)`") == [
        "Plan(stages=2, spatial=[(1, 2)])"
    ]
