"""The pictures of docs/ are what the commands beside them draw; `make pictures` draws them anew."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gems.cli.main import main

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
