"""Build the library that makes torch believe in CUDA devices, with the C++ compiler at hand."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


class CannotBuild(Exception):
    """Why there is no library."""


def build(folder: Path) -> Path:
    """Compile `guard.cpp` against this environment's torch into `folder`."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotBuild("no C++ compiler (g++, clang++) is installed")
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    torch = Path(found.origin).parent
    if not (torch / "include/ATen/detail/CUDAHooksInterface.h").exists():
        raise CannotBuild(f"torch has no C++ headers in {torch / 'include'}")
    into, libraries = folder / "guard.so", torch / "lib"
    done = subprocess.run(
        [
            *(compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-w", f"-I{torch / 'include'}"),
            *(str(SOURCE), f"-L{libraries}", f"-Wl,-rpath,{libraries}"),
            *("-lc10", "-ltorch_cpu", "-o", str(into)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise CannotBuild(f"{compiler} failed: {done.stderr.strip()[-500:]}")
    return into
