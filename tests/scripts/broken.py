"""The user's script of train.py with one thing wrong, on one rank or on all.

broken.py '{"stages": 2, "micro_batches": 4}' killed 1
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from train import Net, loader, trainer

import gems
from gems.distributed.launchers import place
from gems.schedule.action import parse

PLAN = gems.Plan(**json.loads(sys.argv[1]))
FAULT = sys.argv[2]
AT = place()
HERE = sys.argv[3] in ("all", str(AT and AT.rank))  # whether this rank has the fault
BACKEND = os.environ.get("TEST_BACKEND")
STEP = 1  # the step in which things go wrong: one has gone well


# --- what is wrong before the first step: options of the Trainer ----------------------------------


class Untraceable(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum().item() > 0 else -x)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 5))


def no_optimizer(parameters: Any) -> Any:
    raise RuntimeError("no optimizer today")


def no_model() -> Any:
    raise OSError("no weights on this node")


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "cannot be traced": lambda: {"model": Untraceable().double()},
    "another model": lambda: {"model": Wider().double()},
    "another model inside": lambda: {"model": nn.Sequential(Net()).double()},
    "a model that raises": lambda: {"model": no_model()},
    "an optimizer that raises": lambda: {"optimizer": no_optimizer},
    "stopped before": lambda: {"model": stop_before()},
    "a bad schedule": lambda: {"schedule": parse("0: 0F0 0B0\n1: 1B0 1F0")},
}


# --- what goes wrong in a step --------------------------------------------------------------------


def kill(mine: gems.Trainer) -> None:
    """SIGKILL when a gradient comes in, in the middle of backward."""
    for p in mine.parameters():
        p.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def raise_in_loss(mine: gems.Trainer) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such label")

    mine.session.runner.loss.function = loss


def be_slow(mine: gems.Trainer) -> None:
    """Longer than the timeout: in the loss or, where there is none, between two steps."""
    plain = mine.session.runner.loss.function

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mine.session.runner.loss.function = plain
        time.sleep(5)
        return plain(output, target)  # type: ignore[misc]

    mine.session.runner.loss.function = loss
    if mine.rank == 0:
        time.sleep(5)


def raise_in_data(mine: gems.Trainer) -> None:
    raise OSError("slide 7 cannot be read")


def stop(mine: gems.Trainer) -> None:
    """SIGSTOP when a gradient comes in: alive, and silent."""
    for p in mine.parameters():
        p.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGSTOP))


def close(mine: gems.Trainer) -> None:
    """The process goes on with something else."""
    mine.close()
    time.sleep(12)
    sys.exit("done with something else")


def run_out(mine: gems.Trainer) -> None:
    """As a loader that is shorter on one rank: the script ends well."""
    sys.exit(0)


def stop_before(mine: Any = None) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(mine: gems.Trainer) -> None:
    sys.exit("this rank has had enough")


BREAK: dict[str, Callable[[gems.Trainer], None]] = {
    "killed": kill,
    "stopped": stop,
    "closes": close,
    "runs out": run_out,
    "slow": be_slow,
    "loss raises": raise_in_loss,
    "loss raises, and the script goes on": raise_in_loss,
    "data raise": raise_in_data,
    "leaves": leave,
}
BATCH: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "another shape": lambda images, labels: (images.repeat(1, 2, 1, 1), labels),
    "another batch": lambda images, labels: (images[:6], labels[:6]),
    "nan": lambda images, labels: (images * torch.nan, labels),
}


def main() -> None:
    short = 3.0 if BACKEND is None else 8.0  # over MPI also the time for ranks to come
    timeout = {"timeout": short} if "stopped" in FAULT or FAULT == "slow" else {}
    backend = {"backend": BACKEND} if BACKEND else {}
    mine = trainer(
        PLAN, **timeout, **backend, **OPTIONS[FAULT]() if HERE and FAULT in OPTIONS else {}
    )
    for number, (images, labels) in enumerate(loader()):
        if HERE and number == STEP:
            BREAK.get(FAULT, lambda _: None)(mine)
            images, labels = BATCH.get(FAULT, lambda *same: same)(images, labels)
        try:
            mine.step(images, labels)
        except KeyError:
            if "goes on" not in FAULT:
                raise
            time.sleep(3)
            mine.step(images, labels)


if __name__ == "__main__":
    main()
