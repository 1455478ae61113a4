"""`gems --version`: GEMS, and the versions of what it runs on, without loading any framework."""

from __future__ import annotations

import argparse
import runpy
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gems.version import __version__


class ShowVersion(argparse.Action):
    def __init__(self, option_strings: Any, dest: str, **more: Any) -> None:
        help = "show versions and exit"
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        found = {"torch": _torch(), "MPI": _mpi(), "tensorflow": _of("tensorflow")}
        known = [f"{name} {text}" for name, text in found.items() if text]
        print("\n".join([f"gems {__version__}", *known]))
        parser.exit(0)


def _of(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _torch() -> str | None:
    """With the CUDA that it was built for, from its file of versions: importing it takes long."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    told = runpy.run_path(str(Path(found.origin).parent / "version.py"))
    cuda, hip = told.get("cuda"), told.get("hip")
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "no CUDA"
    return f"{told['__version__']}, {built}"


def _mpi() -> str | None:
    """The library that mpi4py finds here. It is not initialised."""
    if find_spec("mpi4py") is None:
        return None
    import mpi4py

    mpi4py.rc.initialize = False
    bridge = f"mpi4py {mpi4py.__version__}"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"none that {bridge} can load ({str(error).splitlines()[0]})"
    library = MPI.Get_library_version().strip("\0").partition(",")[0].split("\n")[0]
    return f"{' '.join(library.split())}, {bridge}"
