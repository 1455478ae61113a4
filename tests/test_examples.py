"""The examples run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from tests.rank_server import RankServer, places

ROOT = Path(__file__).parent.parent
# Those of Keras run in tests/keras.
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.py") if not p.stem.startswith("keras"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_with_the_command_it_names(
    path: Path, rank_server: RankServer, tmp_path: Path
) -> None:
    """As torchrun reads the command and starts ranks; torchrun itself starts those of the README,
    below."""
    command = re.search(r"^ {4}torchrun (.*)$", path.read_text(), re.MULTILINE)
    assert command, f"{path} must start with the command to type"
    known = torchrun.parse_args(command[1].split())
    script = [ROOT / known.training_script, *known.training_script_args]
    ends = rank_server.run(script, places(int(known.nproc_per_node)), tmp_path, limit=100)
    said = [(tmp_path / f"{rank}.err").read_text()[-2000:] for rank in range(len(ends))]
    assert all(code == 0 for code, _ in ends), said
    assert any((tmp_path / f"{rank}.out").read_text().strip() for rank in range(len(ends)))


SUMS = """
from pathlib import Path
sums = [p.detach().double().abs().sum().item() for p in trainer.parameters()]
Path(__file__).with_name(f"rank{trainer.rank}").write_text(f"{step.loss} {sums}")
"""


def test_the_readme_s_ten_lines_train_one_network_as_printed(tmp_path: Path) -> None:
    """Story: nothing is seeded but the batch, and both ranks hold both stages. They used to keep
    the weights that each had drawn, and trained two networks under one loss."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code
    script = tmp_path / "ten_lines.py"
    script.write_text(code[1] + SUMS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in range(2))
    assert first == second
