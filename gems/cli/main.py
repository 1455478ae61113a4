"""`gems`: one subcommand per verb."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from gems.cli import check, config, draw, eval, machine, plan, simulate, trace, train
from gems.errors import GemsError
from gems.version import __version__

EXAMPLES = """examples:
  gems train --model resnet110-v2 --split-size 4 --times 2 --app pictures
  gems draw --schedule 1f1b --stages 4 --parts 8 --svg 1f1b.svg --html 1f1b.html
  gems draw --cut --model unet --image-size 256 --stages 5 --svg cut.svg
  gems trace --model unet --image-size 512
  gems plan --model resnet50 --image-size 1024 --auto 8 --machine v100 --out plan.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gems",
        description="Train networks on images too large for one device, exactly.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gems {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in (train, eval, plan, simulate, draw, check, trace, machine):
        command.add(commands)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    typed = tuple(arguments)
    try:
        if arguments and arguments[0] in ("train", "eval"):
            both = [commands.choices[name] for name in ("train", "eval")]
            own = commands.choices[arguments[0]]
            arguments[1:] = config.expanded(arguments[1:], own, both)
    except (GemsError, OSError) as error:
        parser.exit(1, f"gems {arguments[0]}: {error}\n")
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    given.typed = typed  # what its ranks are started with
    logging.basicConfig(format="%(message)s")
    told = logging.INFO if getattr(given, "verbose", False) else logging.WARNING
    logging.getLogger("gems").setLevel(told)
    try:
        return given.run(given)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (GemsError, OSError) as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"gems {given.command}: {error}{notes}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
