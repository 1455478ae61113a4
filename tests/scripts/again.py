"""A user's script that makes one trainer after another, and two at a time.

    again.py ours      GEMS finds the other ranks
    again.py theirs    the user has started a process group, and uses it in between

Prints one line of JSON: the losses of all trainers, which must be the same for each.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from train import loader, trainer

import gems
from gems.distributed.launchers import place

PLAN = gems.Plan(stages=2, micro_batches=4)


def steps(mine: gems.Trainer, count: int = 2) -> list[float]:
    return [mine.step(images, labels).loss for images, labels in loader(count)]


def raised(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except gems.GemsError as error:
        return str(error)
    return "nothing"


def main() -> None:
    theirs = "theirs" in sys.argv
    if theirs:
        dist.init_process_group("gloo")
    found: list[list[float]] = []
    for _ in range(3):
        with trainer(PLAN) as mine:
            found.append(steps(mine))
        if theirs:
            dist.all_reduce(total := torch.ones(1))
            assert total.item() == 2
    first, second = trainer(PLAN), trainer(PLAN)
    batches = list(loader())
    both = [(first.step(*b).loss, second.step(*b).loss) for b in batches]
    found += [list(losses) for losses in zip(*both, strict=True)]
    first.close()
    gone = raised(lambda: first.step(*batches[0]))
    assert second.step(*batches[0]).loss != 0  # the second goes on
    wrong = raised(lambda: trainer(gems.Plan(stages=3, micro_batches=4)))  # takes 3 ranks
    second.close()
    with trainer(PLAN) as mine:  # after one that could not be made
        found.append(steps(mine))
    assert dist.is_initialized() == theirs
    at = place()
    line = {"rank": at.rank if at else 0, "losses": found, "gone": gone, "wrong": wrong}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
