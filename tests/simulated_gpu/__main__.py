"""Run families by name, or all; print what each asked of the GPU as JSON."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path


def main() -> None:
    library = Path(sys.argv[1])
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # before torch looks for devices
    from tests.simulated_gpu import cuda, distributed

    device, world = cuda.install(library), distributed.install()
    from tests.simulated_gpu.run import run  # and with it gems, which finds both replaced

    print(json.dumps(run(device, world, sys.argv[2:])))


main()
