"""`gems`: one subcommand per verb."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from gems.cli import (
    check,
    config,
    doctor,
    draw,
    eval,
    like,
    machine,
    plan,
    simulate,
    slurm,
    trace,
    train,
    verify,
)
from gems.cli.numbers import bound
from gems.cli.version import ShowVersion
from gems.errors import GemsError, short
from gems.errors import note as add_note

COMMANDS = (train, eval, plan, simulate, draw, check, verify, trace, machine, doctor, slurm)
LONGEST = 4000  # characters of a message
EXAMPLES = """examples:
  gems train --model resnet110-v2 --split-size 4 --times 2 --app pictures
  gems draw --schedule 1f1b --stages 4 --parts 8 --svg 1f1b.svg --html 1f1b.html
  gems draw --partition --model unet --image-size 256 --stages 5 --svg unet.svg
  gems trace --model unet --image-size 512
  gems plan --model resnet110-v2 --image-size 1024 --auto 8 --machine v100 --out plan.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gems",
        description="Train networks on images too large for one device, exactly.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersion)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in COMMANDS:
        command.add(commands)
    for subparser in commands.choices.values():
        file = " [FILE]" if any(a.dest == "file" for a in subparser._actions) else ""
        subparser.usage = f"{subparser.prog}{file} [OPTION ...]"
        bound(subparser)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    typed = tuple(arguments)
    try:
        if arguments and arguments[0] in ("train", "eval"):
            both = [commands.choices[name] for name in ("train", "eval")]
            own = commands.choices[arguments[0]]
            arguments[1:] = like.expanded(config.expanded(arguments[1:], own, both), own)
    except (GemsError, OSError) as error:
        parser.exit(1, rendered(arguments[0], error))
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    given.typed = typed  # what its ranks are started with
    logging.basicConfig(format="%(message)s")
    level = logging.INFO if getattr(given, "verbose", False) else logging.WARNING
    logging.getLogger("gems").setLevel(level)
    try:
        return given.run(given)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (GemsError, OSError) as error:
        sys.stderr.write(rendered(given.command, error))
        return 1
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        shown = GemsError(f"{short(error, 300) or 'out of memory'}; {SMALLER}")
        for note in getattr(error, "__notes__", ()):
            add_note(shown, note)
        sys.stderr.write(rendered(given.command, shown))
        return 1


SMALLER = (
    "not enough memory: take a smaller --image-size, --batch-size or model, more ranks, "
    "or see gems plan for what fits"
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch has no type of its own for that on CPUs."""
    message = str(error)
    return isinstance(error, MemoryError) or any(
        part in message for part in ("can't allocate memory", "out of memory", "not enough memory")
    )


def rendered(command: str, error: BaseException) -> str:
    """An error for the terminal: with its notes, and without control characters."""
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    text = short(f"gems {command}: {error}{notes}", LONGEST)
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
