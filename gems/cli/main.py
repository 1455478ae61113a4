"""`gems`: one subcommand per verb."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gems.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gems", description=__doc__)
    parser.add_argument("--version", action="version", version=f"gems {__version__}")
    parser.parse_args(arguments)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
