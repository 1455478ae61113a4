"""The examples run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_with_the_command_it_names(path: Path) -> None:
    command = re.search(r"^ {4}torchrun (.*)$", path.read_text(), re.MULTILINE)
    assert command, f"{path} must start with the command to type"
    arguments = [sys.executable, "-m", "torch.distributed.run", *command[1].split()]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_the_readme_s_ten_lines_run(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code
    script = tmp_path / "ten_lines.py"
    script.write_text("import torch; torch.manual_seed(0)\n" + code[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    said = "".join(done.stdout.split())  # the two ranks' lines may have run into each other
    assert said and said[: len(said) // 2] == said[len(said) // 2 :]
