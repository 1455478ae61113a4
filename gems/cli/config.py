"""Options from a file: YAML or TOML, with the names that the command line has."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gems.errors import GemsError, problems, short
from gems.files import read_text

LARGEST = 1 << 20  # bytes of a file of options
DEEPEST, MOST = 20, 10_000  # levels and values of it
OF_ONE_RUN = ("checkpoint", "out", "heat-map", "enable-evaluation")
# About one start, not about the run; and what is in force without it.
NOT_SAVED = {"help", "config", "like", "resume", "overwrite"}


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="options from a YAML or TOML file, by the names they have here without the dashes in "
        "front (num-epochs: 5); the command line wins over the file",
    )


def expanded(
    arguments: Sequence[str],
    parser: argparse.ArgumentParser,
    others: Iterable[argparse.ArgumentParser] = (),
) -> list[str]:
    """The arguments of a command with those of its --config in front, so that later ones win.

    Options of the `others` may be in the file, too: `gems eval` takes the file of a training run.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_config(first)
    path = first.parse_known_args(list(arguments))[0].config
    if path is None:
        return list(arguments)
    values, known = read(path), parser._option_string_actions
    elsewhere = {name for other in others for name in other._option_string_actions} - set(known)
    foreign = [name for name in values if _flag(name) in elsewhere]
    # In the file of another command's run, these are where it began and what it wrote: not ours.
    dropped = {*foreign, *(OF_ONE_RUN if foreign else ())}
    mine = {name: value for name, value in values.items() if name not in dropped}
    return [*_without(written(mine, parser, str(path)), arguments, parser), *arguments]


def _without(
    from_file: list[str], arguments: Sequence[str], parser: argparse.ArgumentParser
) -> list[str]:
    """Without `--model-option width=8` if the command line has another width: it wins."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags = [a.option_strings[0] for a in parser._actions if isinstance(a, argparse._AppendAction)]
    for flag in flags:
        first.add_argument(flag, action="append", default=[], dest=flag)
    typed = vars(first.parse_known_args(list(arguments))[0])
    again = {f"{flag}={text.partition('=')[0]}" for flag in flags for text in typed[flag]}
    return [word for word in from_file if "=".join(word.split("=")[:2]) not in again]


def _flag(name: object) -> str:
    return "--" + str(name).replace("_", "-")


def read(path: Path) -> dict[str, Any]:
    """The file as names and values."""
    text = read_text(path, LARGEST)
    try:
        found = _toml(text) if path.suffix == ".toml" else _yaml(text)
        _check_size(found)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else short(error, 400)
        raise GemsError(f"{path} cannot be read: {why}; write lines like num-epochs: 5") from error
    if not isinstance(found, dict):
        raise GemsError(f"{path} holds {type(found).__name__}; write lines like num-epochs: 5")
    return found


def _check_size(found: Any) -> None:
    """Options are few. YAML's aliases can make a billion values of ten lines, or one that
    contains itself and so has no last level."""
    level, values = [found], 0
    for _ in range(DEEPEST):
        level = [y for x in level for y in _inside(x)]
        values += len(level)
        if values > MOST:
            raise ValueError(f"it has more than {MOST} values")
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return value if isinstance(value, (list, tuple, set, frozenset)) else ()


def _yaml(text: str) -> Any:
    import yaml

    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, AttributeError, TypeError, LookupError) as error:  # of bad tags, too
        raise ValueError(str(error)) from error
    return {} if found is None else found


def _toml(text: str) -> Any:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads(text)


def written(values: dict[str, Any], parser: argparse.ArgumentParser, path: str) -> list[str]:
    """Names and values as one would type them."""
    actions = parser._option_string_actions
    known = sorted(name[2:] for name in actions if name.startswith("--"))
    found: list[str] = []
    wrong: list[str] = []
    for name, value in values.items():
        flag = _flag(name)
        if flag not in actions or flag[2:] in ("help", "config"):
            near = difflib.get_close_matches(short(name, 60), known, 1)
            wrong.append(short(name, 60) + (f" (do you mean {near[0]}?)" if near else ""))
            continue
        try:
            found += _typed(flag, actions[flag], value)
        except ValueError as error:
            wrong.append(f"{name}: {short(error, 200)}")
    if wrong:
        raise GemsError(problems(f"{path} has options that {parser.prog} does not take:", wrong))
    return found


def _typed(flag: str, action: argparse.Action, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")
        positive = action.option_strings[0]
        return [positive if value != (flag == f"--no-{positive[2:]}") else f"--no-{positive[2:]}"]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")
        return [flag] if value else []
    if isinstance(value, bool):
        raise ValueError(f"it is no switch, so {value!r} means nothing; give a value")
    if isinstance(action, argparse._AppendAction):
        if isinstance(value, dict):
            value = [f"{name}={one}" for name, one in value.items()]
        return [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, dict):
        raise ValueError(f"{value!r} has names inside; give a value")
    if isinstance(value, list):
        return [f"{flag}={','.join(map(str, value))}"]
    return [f"{flag}={value}"]


def effective(given: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """All options as they are in force, as YAML that --config takes."""
    import yaml

    values: dict[str, Any] = {}
    for action in parser._actions:
        names = [name[2:] for name in action.option_strings if name.startswith("--")]
        synonym = isinstance(action, argparse._StoreConstAction) and action.const is not True
        if not names or synonym or action.dest in NOT_SAVED:
            continue
        value = getattr(given, action.dest, None)
        if value is not None:
            values[names[0]] = _plain(value)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)
