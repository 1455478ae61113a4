"""Tables of command-line options: how a group is written, and which of its options are given."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gems.hardware import MACHINES, Machine, machine

# Flags, separated by spaces, to what argparse's add_argument takes.
Options = Mapping[str, Mapping[str, Any]]


def count(default: int | None, help: str, **more: Any) -> dict[str, Any]:
    """An option that takes a whole number."""
    return {"type": int, "default": default, "metavar": "N", "help": help, **more}


def real(default: float | None, help: str, metavar: str = "X") -> dict[str, Any]:
    """An option that takes a number."""
    return {"type": float, "default": default, "metavar": metavar, "help": help}


def string(default: str | None, help: str, metavar: str) -> dict[str, Any]:
    return {"default": default, "metavar": metavar, "help": help}


def choice(choices: Any, default: Any, help: str, **more: Any) -> dict[str, Any]:
    return {"choices": tuple(choices), "default": default, "help": help, **more}


def switch(default: bool | None, help: str) -> dict[str, Any]:
    """`--flag` and `--no-flag`."""
    return {"action": argparse.BooleanOptionalAction, "default": default, "help": help}


def path(help: str, metavar: str = "FILE", default: Path | None = None) -> dict[str, Any]:
    return {"type": Path, "default": default, "metavar": metavar, "help": help}


DEVICE = string(
    "auto",
    "auto (default): a GPU for each rank; CPUs where ranks are more than GPUs, or with "
    "--backend gloo. cpu; cuda: an error where GPUs are too few; cuda:N: this one",
    "DEVICE",
)


def machine_option(purpose: str, default: str | None) -> dict[str, Any]:
    known = f"auto, {', '.join(MACHINES)}, local (see gems machine), or a file like theirs"
    return string(default, f"{purpose}: {known}", "NAME")


def machine_of(name: str) -> Machine:
    """The machine of an option: `auto` is this computer's GPU, or `cpu`."""
    if name != "auto":
        return machine(name)
    from gems.torch.gpu_machine import machine_here

    return machine_here(name)


def add_options(parser: argparse.ArgumentParser, options: Options, title: str = "") -> None:
    """Add a table of options, under a heading of the help if there is a title."""
    group = parser.add_argument_group(title) if title else parser
    for flags, settings in options.items():
        group.add_argument(*flags.split(), **settings)


def changed(given: argparse.Namespace, options: Options) -> list[str]:
    """Flags of a table whose values are not the defaults."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, options)
    usual = parser.parse_args([])
    flags = {action.dest: action.option_strings[0] for action in reversed(parser._actions)}
    return [
        flag
        for dest, flag in reversed(flags.items())
        if getattr(given, dest, None) != getattr(usual, dest)
    ]
