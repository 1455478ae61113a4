"""What stages keep for backward, in words: all of it, their inputs, or the blocks that are named.

    all            every tensor that backward reads
    inputs         only what the stage received; its forward runs again before backward (R)
    except-last    the same, but the last micro-batch of a step keeps all: its backward is next
    auto           as many blocks as the memory has room for; `planner` writes out their names
    ("a", "b")     the blocks of these names, or inside the modules of these names, keep what they
                   save; the runs of blocks between them run again inside backward, one by one

GPipe's own words are understood: `always` is inputs, `never` is all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Kept = str | tuple[str, ...]  # of one stage
Keep = str | tuple[Kept, ...]  # one for all stages, or one for each

WORDS = ("all", "inputs", "except-last", "auto")
GPIPE = {"always": "inputs", "never": "all"}


def keep_of(given: str | Sequence[str | Sequence[str]]) -> Keep:
    """As a plan has it: tuples inside, and one word for one thing."""
    if isinstance(given, str):
        return GPIPE.get(given, given)
    return tuple(GPIPE.get(k, k) if isinstance(k, str) else tuple(k) for k in given)


def for_each(keep: Keep) -> bool:
    """Whether it says something for each stage, and not names for all of them."""
    return not isinstance(keep, str) and any(k in WORDS or isinstance(k, tuple) for k in keep)


def by_stage(keep: Keep, stages: int) -> tuple[Kept, ...]:
    if isinstance(keep, str):
        return (keep,) * stages
    return keep if for_each(keep) else (keep,) * stages  # type: ignore[return-value]


def keep_problems(keep: Keep, stages: int) -> Iterable[str]:
    known = ", ".join((*WORDS, *GPIPE))
    if isinstance(keep, str):
        if keep not in WORDS:
            yield f"keep {keep!r} is unknown; choose one of {known}, or a list of module names"
        return
    if not for_each(keep):
        return
    if len(keep) != stages:
        yield f"keep has {len(keep)} entries for {stages} stages; give one each, or one for all"
    for stage, kept in enumerate(keep):
        if isinstance(kept, str) and kept not in WORDS:
            yield (
                f"keep of stage {stage} is {kept!r}; choose one of {known}, or put module names in "
                "a list of their own"
            )


def spelled(text: str) -> Keep:
    """As the command line writes it: `inputs`, `layer1,layer2`, and with a slash for each stage:
    `inputs/layer2,layer3/all`."""
    stages = [tuple(filter(None, part.split(","))) for part in text.split("/")]
    words = [part[0] if len(part) == 1 and _word(part[0]) else part for part in stages]
    if len(words) == 1 and isinstance(words[0], tuple) and all(map(_word, words[0])):
        return keep_of(words[0])  # a word for each stage
    return keep_of(words if len(words) > 1 else words[0])


def _word(text: str) -> bool:
    return text in WORDS or text in GPIPE
