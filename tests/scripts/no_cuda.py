"""Stand-ins for the CUDA libraries that PyPI's torch is linked to, where they are not installed.

    python no_cuda.py TORCH/lib FOLDER      # then LD_LIBRARY_PATH=FOLDER python ...

torch 2.6 is a wheel of 0.8 GB that asks for another 2.3 GB of libraries, even on a machine without
a GPU. Each stand-in has the names that torch looks for; all answer "no device" (100). Needs a C
compiler, nm and readelf.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

CUDA = re.compile(r"lib(cu|nv|nccl)")
NAMES = re.compile(r"(__)?(cu|nv|nccl)[A-Za-z_]")


def output(*command: object) -> str:
    return subprocess.run(map(str, command), capture_output=True, text=True, check=True).stdout


def main(torch: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed: set[str] = set()
    versions: dict[str, set[str]] = defaultdict(set)  # of a library
    names: dict[str, set[str]] = defaultdict(set)  # of a version; "" is none
    libraries = sorted(torch.glob("*.so*"))
    for library in libraries:
        needed.update(re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-dW", library)))
        file = ""
        for line in output("readelf", "-VW", library).splitlines():
            if found := re.search(r"File: (\S+)", line):
                file = found[1]
            elif file and (found := re.search(r"Name: (\S+)", line)):
                versions[file].add(found[1])
        for line in output("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            names[version.lstrip("@")].add(name)
    unversioned = set(filter(NAMES.match, names[""]))
    for library in sorted(needed - {library.name for library in libraries}):
        if CUDA.match(library):
            parts = {version: names[version] for version in versions[library]}
            build(folder / library, parts or {"": unversioned})


def build(library: Path, parts: dict[str, set[str]]) -> None:
    code, versions = library.with_suffix(".c"), library.with_suffix(".map")
    every = sorted(set().union(*parts.values()))
    code.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in every))
    versions.write_text(
        "".join(
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(own))} }};\n"
            for version, own in parts.items()
            if version
        )
    )
    script = [f"-Wl,--version-script={versions}"] if all(parts) else []
    output(
        "cc", "-shared", "-fPIC", "-w", code, "-o", library, f"-Wl,-soname,{library.name}", *script
    )


main(Path(sys.argv[1]), Path(sys.argv[2]))
