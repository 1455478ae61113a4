"""Options from a file: the same names, the same meaning; the command line wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gems.cli.config import effective, expanded
from gems.cli.main import main
from gems.errors import GemsError
from tests.runs import judged, parser_of, trained

YAML = """
app: 3                      # by number, as the published scripts say it
num_epochs: 2               # underscores are dashes
split-size: 3
num-spatial-parts: [4, 2]
halo-D2: true
local_DP: 2
learning-rate: 1e-3
precision: fp_16
augment: true
enable-evaluation: false
model-option: [width=6, drop=0.1]
datapath:
"""
TOML = """
app = 3
num_epochs = 2
split-size = 3
num-spatial-parts = [4, 2]
halo-D2 = true
local_DP = 2
learning-rate = 1e-3
precision = "fp_16"
augment = true
no-enable-evaluation = true
[model-option]
width = 6
drop = 0.1
"""
MEANT: dict[str, Any] = {
    "app": "synthetic",
    "num_epochs": 2,
    "stages": 3,
    "num_spatial_parts": "4,2",
    "halo": "d2",
    "local_dp": 2,
    "learning_rate": 1e-3,
    "precision": "fp16",
    "augment": True,
    "enable_evaluation": False,
    "model_option": ["width=6", "drop=0.1"],
    "datapath": None,
}


def given(*words: object, command: str = "train") -> Any:
    """The options in force."""
    parser, both = parser_of(command), [parser_of("train"), parser_of("eval")]
    return parser.parse_args(expanded([*map(str, words)], parser, both))


@pytest.mark.parametrize(("ending", "text"), [("yaml", YAML), ("toml", TOML)])
def test_a_file_says_what_the_command_line_would(tmp_path: Path, ending: str, text: str) -> None:
    file = tmp_path / f"run.{ending}"
    file.write_text(text)
    found = vars(given("--config", file))
    assert {name: found[name] for name in MEANT} == MEANT
    untold = vars(given())
    assert all(found[n] == untold[n] for n in found if n not in (*MEANT, "config", "run"))


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(YAML + "tensorboard: true\nverbose: true\nresume: true\n")
    words = ["--num-epochs", 5, "--no-augment", "--enable-evaluation", "--halo", "d1"]
    words += ["--no-tensorboard", "--no-verbose", "--model-option", "width=8"]
    for found in (given("--config", file, *words), given(*words, f"--config={file}")):
        assert found.num_epochs == 5 and not found.augment and found.enable_evaluation
        assert found.halo == "d1" and not found.tensorboard and not found.verbose
        assert sorted(found.model_option) == ["drop=0.1", "width=8"]
        assert found.stages == 3 and found.resume


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num-epoch: 2\nlearnig_rate: 1", ["(do you mean num-epochs?)", "mean learning-rate?)"]),
        ("augment: 3", ["augment: 3 is neither true nor false"]),
        ("verbose: loud", ["verbose: 'loud' is neither true nor false"]),
        ("out: true", ["out: it is no switch, so True means nothing"]),
        ("seed: {a: 1}", ["seed: {'a': 1} has names inside"]),
        ("- 3", ["holds list; write lines like num-epochs: 5"]),
        ("a: [", ["cannot be read: "]),
        ("config: other.yaml", ["config"]),
    ],
)
def test_what_is_wrong_in_a_file_is_said_all_at_once(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(GemsError) as error:
        given("--config", file)
    assert all(word in str(error.value) for word in words), error.value
    assert str(file) in str(error.value)


WRONG = ["num-epochs: many", "num-epochs: 2.5", "app: dreams", "clip: [1, 2]"]


@pytest.mark.parametrize("text", WRONG)
def test_values_of_another_type_are_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["train", "--config", str(file)])
    assert end.value.code == 2
    assert f"argument --{text.partition(':')[0]}: invalid" in capsys.readouterr().err


def test_a_file_that_is_not_there_or_shortened_options_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--conf` was taken for `--config` by one parser and not looked for by the other."""
    with pytest.raises(SystemExit) as end:
        main(["train", "--config", "nowhere.yaml"])
    assert end.value.code == 1 and "nowhere.yaml" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--conf", "nowhere.yaml"])
    assert "unrecognized arguments: --conf" in capsys.readouterr().err


def test_the_options_in_force_are_saved_and_give_the_same_run_again(tmp_path: Path) -> None:
    options = ["--learning-rate-decay", 0.5, "--augment", "--model-option", "width=5", "--clip", 1]
    first = trained(tmp_path / "a", *options)
    file = tmp_path / "a" / "config.yaml"
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "b")]) == 0
    saved = [yaml.safe_load((tmp_path / x / "config.yaml").read_text()) for x in "ab"]
    assert saved[0] | {"out": 0} == saved[1] | {"out": 0} and saved[0]["clip"] == 1.0
    again = trained(tmp_path / "c", "--config", file, base=[])
    assert again.losses == first.losses != trained(tmp_path / "d").losses
    assert not {"resume", "overwrite", "config", "help", "halo-D2"} & saved[0].keys()


def test_what_is_saved_is_read_back_as_it_was(tmp_path: Path) -> None:
    words = ["--halo-D2", "--spatial", "2x1", "--stages", "2", "--balance", "3,1", "--app", "1"]
    words += ["--class-names", "yes,no", "--labels", "on", "--times", "1", "--precision", "bp_16"]
    words += ["--no-save", "--datapath", "some where/slide.tif", "--model-option", "a=(1, 2)"]
    words += ["--memory", "1e3", "--num-spatial-parts", "", "--seed", "010"]
    found = given(*words)
    file = tmp_path / "run.yaml"
    file.write_text(effective(found, parser_of("train")))
    again = given("--config", file)
    ours = {"config", "run"}
    assert {k: v for k, v in vars(again).items() if k not in ours} == {
        k: v for k, v in vars(found).items() if k not in ours
    }


def test_eval_takes_the_file_of_a_training_run_but_not_where_that_began_and_wrote(
    tmp_path: Path,
) -> None:
    """The weights that training began with were judged, instead of those it ended with."""
    begun = trained(tmp_path / "a", "--export", tmp_path / "begin.pt")
    options = ["--save", "--checkpoint", tmp_path / "begin.pt", "--seed", 1]
    run = trained(tmp_path / "b", *options, "--model-option", "width=4")
    file = run.folder / "config.yaml"
    found = given("--config", file, command="eval")
    assert found.checkpoint is None and found.out == Path("runs/eval")
    assert found.seed == 1 and found.model == "tests.tiny:net" and found.samples == 12
    assert main(["eval", "--config", str(file)]) == 1, "what is to be judged?"
    told = judged(tmp_path / "c", "--config", file, "--checkpoint", run.folder, base=[])
    assert told == {name: run.of(name, "eval")[-1] for name in ("accuracy", "auc")}
    assert begun.losses != run.losses
    own = tmp_path / "eval.yaml"
    own.write_text("checkpoint: here\nout: there\npart: train\n")
    mine = given("--config", own, command="eval")
    assert (str(mine.checkpoint), str(mine.out), mine.part) == ("here", "there", "train")
    with pytest.raises(GemsError, match="do you mean num-epochs"):
        own.write_text("num-epoch: 3")
        given("--config", own, command="train")
