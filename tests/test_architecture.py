"""The map of the package as a test: imports point down, and some packages load no framework."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gems"

# Top to bottom. A package or module may import itself and those of the lines below its own.
INIT = "__init__"
LAYERS = (
    ("__main__",),
    ("cli",),
    (INIT,),
    ("keras",),
    ("torch",),
    ("distributed",),
    ("engine", "planner"),
    ("draw", "transport"),
    ("predict",),
    ("schedule",),
    ("plans", "model"),
    ("geometry", "hardware"),
    ("files",),
    ("errors", "version"),
)
# Inside `gems/torch`, by the same rule.
TORCH_LAYERS = (
    (INIT,),
    ("doctor", "measure_machine"),
    ("parity",),
    ("verification",),
    ("trainer",),
    ("session",),
    ("async_pipeline", "distributed_model"),
    ("handshake", "rank_model"),
    ("checkpoint", "fingerprint", "lifetime", "planning", "setup"),
    ("runtime",),
    ("spatial", "state"),
    ("offload",),
    ("autograd",),
    ("tracing",),
    ("settings",),
    ("tensors",),
    ("launch", "losses", "metrics", "optimizers"),
    ("mpi_ranks",),
    ("device_choice", "gpu_machine", "gpu_memory"),
    ("cuda_device",),
)
# Inside `gems/keras`.
KERAS_LAYERS = (
    (INIT,),
    ("distributed_fit", "trainer"),
    ("callbacks", "metrics", "reject", "same_random", "whole_weights"),
    ("session", "torch_session"),
    ("distributed_model",),
    ("handshake", "rank_model"),
    ("fingerprint", "planning", "setup"),
    ("runtime",),
    ("spatial", "state"),
    ("tracing",),
    ("arrays", "checkpoint", "launch", "lazily_built", "offered", "optimizers", "weight_files"),
)
MAP = {
    ("gems",): LAYERS,
    ("gems", "torch"): TORCH_LAYERS,
    ("gems", "keras"): KERAS_LAYERS,
}
LEVEL = {
    package: {name: level for level, names in enumerate(layers) for name in names}
    for package, layers in MAP.items()
}

# Beside the layers: what each may import of them, and the only ones that may import it.
BESIDE = {"models": set(), "data": {"errors", "files"}}
USERS_OF_BESIDE = {"__main__", "cli", INIT}

# These load no framework. The command line shows its help without one, too.
PURE = {
    *("errors", "version", "files", "geometry", "hardware", "model", "plans"),
    *("schedule", "predict", "draw", "planner"),
}
LIGHT = PURE | {INIT, "__main__", "cli"}
# What one rank of `gems train` or `gems eval` runs: the command line loads it when a rank starts.
RANK = {("gems", "cli", name) for name in ("job", "keras_job", "evaluate")}
FRAMEWORKS = {"torch", "tensorflow", "keras", "numpy"}

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager"}

FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize(
    "path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES]
)


def module(path: Path) -> tuple[str, ...]:
    """`gems/draw/svg.py` is `("gems", "draw", "svg")`; a folder's `__init__.py` is the folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def part(name: tuple[str, ...], package: tuple[str, ...] = ("gems",)) -> str:
    """The part of a package that a module in it belongs to; the package itself is `__init__`."""
    return name[len(package)] if len(name) > len(package) else INIT


def inside(package: tuple[str, ...], name: tuple[str, ...]) -> bool:
    return name[: len(package)] == package


def parts_on_disk(package: tuple[str, ...]) -> set[str]:
    """Every module of a package and every folder in it that holds one."""
    return {part(name, package) for name in map(module, FILES) if inside(package, name)}


def statements(tree: ast.AST, deep: bool) -> Iterator[ast.AST]:
    """The import statements of a file; unless `deep`, only those that run when it is imported."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif deep or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.If):
            yield from statements(child, deep)
        elif isinstance(child, ast.If):
            ran = child.orelse if for_types_only(child) else [*child.body, *child.orelse]
            yield from statements(ast.Module(ran, []), deep)


def for_types_only(node: ast.If) -> bool:
    """Whether this is `if TYPE_CHECKING:`, whose body never runs."""
    return ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported(path: Path, source: str, deep: bool) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The line and absolute name of each import: `from gems import plans` is `gems.plans.plan`."""
    package = module(path) if path.name == "__init__.py" else module(path)[:-1]
    for node in statements(ast.parse(source), deep):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            if base not in MAP:
                yield node.lineno, base
                continue
            for alias in node.names:
                known = alias.name in LEVEL[base] or alias.name in BESIDE
                yield node.lineno, (*base, alias.name) if known else base


def may_import(package: tuple[str, ...], source: str, target: str) -> bool:
    """The rule for parts of a package: oneself, and down."""
    if source == target:
        return True
    if source in BESIDE:
        return target in BESIDE[source]
    if target in BESIDE:
        return source in USERS_OF_BESIDE
    return LEVEL[package][source] < LEVEL[package][target]


def upward(path: Path, source: str) -> list[str]:
    """Every import of `source`, wherever it stands, that goes up or sideways at some level."""
    found = []
    for package in MAP:
        if not inside(package, module(path)):
            continue
        here = part(module(path), package)
        for line, name in imported(path, source, True):
            there = part(name, package)
            if inside(package, name) and not may_import(package, here, there):
                where = f"{path.relative_to(ROOT)}:{line}"
                found.append(f"{where}: {here} imports {there}, which is not below it")
    return found


def heavy(path: Path, source: str) -> list[str]:
    """Every import that would load a framework together with a package that needs none."""
    if part(module(path)) not in LIGHT or module(path) in RANK:
        return []
    return [
        f"{path.relative_to(ROOT)}:{line}: imports {'.'.join(name)} at the top: move it into the"
        " function that needs it, or the function into another package"
        for line, name in imported(path, source, False)
        if name[0] in FRAMEWORKS or (name[0] == "gems" and part(name) in {"torch", "keras"})
    ]


def modules_after(*imports: str) -> set[str]:
    """What a fresh interpreter has loaded after these imports."""
    code = "import json, sys\n" + "".join(f"import {name}\n" for name in imports)
    done = subprocess.run(
        [sys.executable, "-c", code + "print(json.dumps(sorted(sys.modules)))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("package", MAP, ids=".".join)
def test_the_map_shows_what_is_on_disk(package):
    shown = set(LEVEL[package]) | (set(BESIDE) if package == ("gems",) else set())
    lost, gone = parts_on_disk(package) - shown, shown - parts_on_disk(package)
    assert not lost, f"{sorted(lost)} of {'.'.join(package)} are on no line of the map: add them"
    assert not gone, f"{sorted(gone)} of {'.'.join(package)} are not there any more: remove them"


@every_file
def test_imports_point_down(path):
    found = upward(path, path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@every_file
def test_light_packages_import_no_framework_at_the_top(path):
    found = heavy(path, path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@every_file
def test_every_module_says_first_what_it_is_for(path):
    purpose = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert purpose, f"{path.relative_to(ROOT)} has no docstring"


@every_file
def test_no_file_is_named_after_nothing(path):
    vague = FORBIDDEN_NAMES & {part.strip("_") for part in module(path)}
    assert not vague, f"{path.relative_to(ROOT)}: {vague} says nothing about what is in it"


def test_import_gems_loads_no_framework():
    assert not modules_after("gems") & FRAMEWORKS


def test_pure_packages_load_nothing_of_the_web():
    """An escape function of xml.sax once brought urllib, http and ssl: a third of the import."""
    names = ("gems.planner.search", "gems.schedule.build", "gems.draw.svg", "gems.files")
    assert not modules_after(*names) & {"ssl", "http.client", "urllib.request", "email"}


def test_pure_packages_and_the_command_line_load_no_framework():
    names = [module(path) for path in FILES if path.name != "__main__.py"]
    light = [".".join(name) for name in names if part(name) in LIGHT and name not in RANK]
    loaded = modules_after(*light)
    assert set(light) <= loaded
    assert not loaded & FRAMEWORKS


@pytest.mark.parametrize(
    "file, line",
    [
        ("geometry/box.py", "from gems.plans.plan import Plan"),  # up
        ("geometry/box.py", "import gems.hardware"),  # sideways
        ("engine/loop.py", "from gems.planner import search"),  # sideways, between folders
        ("plans/plan.py", "from gems import schedule"),  # by way of the package
        ("plans/plan.py", "from gems import Plan"),  # through the package
        ("schedule/action.py", "from ..predict.timeline import Event"),  # relative
        ("schedule/__init__.py", "from .. import draw"),  # relative, from a folder's own file
        ("draw/svg.py", "def f():\n    from gems.engine import loop"),  # late
        ("models/resnet.py", "from gems.errors import GemsError"),
        ("data/slides.py", "from gems.plans.plan import Plan"),
        ("torch/trainer.py", "from gems.models import resnet"),
        ("__init__.py", "from gems.cli import main"),
        ("torch/tracing/record.py", "from gems.torch.spatial.partition import lay_out"),
        ("torch/state/flat_params.py", "from gems.torch.spatial import op"),  # sideways
        ("torch/spatial/rules/norms.py", "def f():\n    from ...runtime import reshard"),  # late
        ("torch/settings.py", "if TYPE_CHECKING:\n    from gems.torch import trainer"),  # typed
        ("torch/losses.py", "import gems.torch"),  # through the package
    ],
)
def test_the_rule_sees_what_points_up(file, line):
    assert len(upward(PACKAGE / file, line)) == 1


@pytest.mark.parametrize(
    "file, line",
    [
        ("plans/plan.py", "from gems.geometry.grid import Grid"),
        ("schedule/papers/gpipe.py", "from ..action import Action"),
        ("schedule/__init__.py", "from .action import Action"),
        ("schedule/action.py", "from gems import plans"),
        ("torch/trainer.py", "import torch\nfrom gems.engine.executor import Engine"),
        ("torch/runtime/reshard.py", "from gems.torch import losses\nfrom ..spatial import op"),
        ("data/slides.py", "from gems.errors import GemsError\nfrom gems.data import synthetic"),
        ("models/unet.py", "import torch\nfrom gems.models.resnet import block"),
        ("cli/train.py", "from gems.models import resnet\nimport gems"),
    ],
)
def test_the_rule_lets_pass_what_points_down(file, line):
    assert upward(PACKAGE / file, line) == []


@pytest.mark.parametrize(
    "line, weight",
    [
        ("import numpy as np", 1),
        ("from torch.nn import functional", 1),
        ("from gems.torch.trainer import Trainer", 1),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", 1),
        ("class A:\n    import torch", 1),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import torch", 1),
        ("if TYPE_CHECKING:\n    import torch", 0),
        ("def f():\n    import torch", 0),
        ("import torchlike", 0),
    ],
)
def test_the_rule_sees_a_framework_only_where_it_is_loaded(line, weight):
    assert len(heavy(PACKAGE / "cli" / "plan.py", line)) == weight
