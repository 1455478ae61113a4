"""The vocabulary of the field, as a test: private words stay out of gems/, docs/ and the README.

`docs/glossary.md` has the words to use. A pattern is written so that honest other meanings pass:
`text.strip()`, a block of a network, an image that is cut into tiles, a quarter turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.ratchet import check, limit

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*(ROOT / "gems").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"])

# Pattern of words -> what to write instead. A space in a pattern is any space, `_` or line end.
BANNED = {
    r"put(s|ting)? (\w+ )?away": "offload",
    r"put(s|ting)? off": "defer, delay",
    r"says|said": "is, gives, estimates, states",
    # "we say", "plans say", but not ", say," nor an order to the user: "; say which".
    r"(?<=[a-z] )(?<!not )(?<!you )say(?! ?[,).])": "is, gives, estimates, states",
    r"stash(es|ed|ing)?": "activations, saved tensors",
    r"holders": "replica group",
    r"sharers": "shard group",
    r"shar(e|es|ed|ing) (\w+ ){0,3}out": "shard",
    r"teams?": "spatial group",
    r"(?<!\. )strips?(?! pooling)|slabs?": "halo",
    r"blocks? of (an|the|one|each) images?": "patch",
    r"junctions?": "boundary",
    r"passages?": "transfer, boundary",
    r"rooms?": "capacity, memory budget; package",
    r"caps?|capped": "memory budget, limit",
    r"(?<!long-)standing": "resident",
    r"surges?": "temporary memory",
    r"endless(ly)?": "asynchronous (flush-free)",
    r"minders?": "running statistics",
    r"(?<!page )(?<!segmentation )faults?": "problems, errors",
    r"(?<!connection )refus(e|es|ed|ing|als?)": "reject, raise",
    r"misfits?": "mismatch, problem",
    r"meetings?": "rendezvous",
    r"doors?|towers?|houses?": "package, layer",
    r"under ?way": "in flight",
    r"let(s|ting)? go": "release, free",
    r"com(e|es|ing) and go(es|ing)?|came and went": "loaded and freed; unshard, reshard",
    r"(?<!\. )(?<!xdg cache )homes?(?! (directory|folder))": "host copy",
    r"tak(e|es|ing) turns": "weight version (double-buffered)",
    r"promis(e|es|ed)": "estimate; guarantee",
    r"add(s|ed|ing)? up(?= \()": "all_reduce",
    r"scatter sum": "reduce_scatter",
    r"cuts? (of|up) (a|the|your) models?": "partition",
    r"cuts? (a|the|your) models?": "partition",
    r"models? (is |are |was )?cut": "partition",
    r"cuts? (in|into) (\w+ ){0,2}stages": "partition",
}
# Words that are private in some files only, by a part of the file's path.
BANNED_IN = {
    "/streaming.py": {r"blocks?": "patch"},
    "consensus": {r"together|words?": "consensus; all ranks agree"},
    "agree": {r"together|words?": "consensus; all ranks agree"},
    "async": {r"turns?": "weight version"},
    "versions": {r"turns?": "weight version"},
    "planner/": {r"(?<!\. )cuts?(?! (image|over|stage))": "partition, boundary; tiled"},
    "draw/partition": {r"cuts?": "partition"},
}


def plain(source: str) -> str:
    """Names as the words they are made of, comments and line ends as spaces. `a.strip` becomes
    `a. strip`, so that a method can be told from a word."""
    source = re.sub(r"([a-z])([A-Z])", r"\1 \2", source)
    source = re.sub(r"\.(?=\w)", ". ", source)
    return re.sub(r"[\s_#]+", " ", source).lower()


def pattern(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w])(?:{words})(?![\w])")


def found_in(path: str, source: str) -> Iterator[str]:
    """Every banned word of a file with what stands around it, and what to write instead."""
    text = plain(f"{path.removesuffix('.py').removesuffix('.md')} : {source}")
    local = [words for part, words in BANNED_IN.items() if part in path]
    for words, better in [p for table in (BANNED, *local) for p in table.items()]:
        for match in pattern(words).finditer(text):
            around = text[max(0, match.start() - 30) : match.end() + 30]
            yield f"{path}: '...{around}...': not '{match[0]}' but {better}"


def words_of(path: Path) -> list[str]:
    name = str(path.relative_to(ROOT))
    return list(found_in(name, path.read_text(encoding="utf-8")))


@limit("banned words")
def banned_words() -> Mapping[str, int]:
    counts = {str(path.relative_to(ROOT)): len(words_of(path)) for path in FILES}
    return {name: count for name, count in counts.items() if count}


def test_private_words_only_become_fewer():
    check("banned words", lambda name: "\n".join(words_of(ROOT / name)) + f"\n{name}")


@pytest.mark.parametrize(
    "line",
    [
        "the stash is put away",
        "put them\n    # away",
        "def put_away(team): ...",
        "class HaloStash: ...",
        "what the plan says",
        "as the costs say about it",
        "strips of the neighbours",
        "refuse_unknown(faults)",
        "the memory has room",
        "a greedy order under a cap",
        "its weights come and go",
        "the cut of a model",
        "a model cut into 4 stages",
        "messages under way",
        "parameters at home",
    ],
)
def test_private_words_are_seen(line):
    assert list(found_in("gems/a.py", line))


@pytest.mark.parametrize(
    "line",
    [
        "line.strip().rstrip()",
        "strip pooling",
        "a block of the network; a residual block",
        "the window of a convolution",
        "an image is cut into tiles",
        "drop_last, keepdim, keep_checkpoints",
        "quarter turns; returns; it turns out",
        "run together",
        "Path.home() / 'x'; your home directory; XDG_CACHE_HOME",
        "ConnectionRefusedError: connection refused",
        "a placeholder; headroom; capacity; understanding; default",
        "it does not say its microns per pixel; say which: --datapath",
        "the reader, `head` say, has seen enough",
    ],
)
def test_honest_meanings_pass(line):
    assert not list(found_in("gems/a.py", line))
