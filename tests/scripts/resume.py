"""A user's script that may be stopped at any moment: it saves after every step, and goes on.

    torchrun --nproc-per-node 2 resume.py '{"stages": 2, "micro_batches": 4}' FOLDER STEPS

Two calls of `step` make one update, so that every other checkpoint is inside one. Batches come from
torch's own generator, and their order from Python's; numpy's is another on every rank. All must go
on where they were. At the end every rank prints one line of JSON: its rank, all losses, a number
from its own generator, and a digest of the model's whole state.

With a fourth argument, the disk is full for a while: in the second step, rank 1 and then rank 0 may
write files of a few bytes only, then of some more. (Other people's files may be as large as ever.)
"""

from __future__ import annotations

import json
import random
import resource
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.optim.lr_scheduler import StepLR
from train import digest, trainer

import gems

LIMITS = (0, 100, 3000, 12000)  # bytes of a file


def main() -> None:
    plan, folder, steps = gems.Plan(**json.loads(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3])
    with gems.Interrupt() as interrupt:
        mine = trainer(
            plan,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01),
            scheduler=lambda optimizer: StepLR(optimizer, 2, 0.9),
            accumulate=2,
            interrupt=interrupt,
        )
        torch.manual_seed(3)
        random.seed(3)
        numpy.random.seed(mine.rank)
        losses = []
        if (path := gems.latest(folder)) is not None:
            losses = mine.load(path)["losses"]
        while mine.steps < steps:
            step = mine.step(*batch())
            losses.append(step.loss)
            numpy.random.normal()
            if mine.steps == 2 and len(sys.argv) > 4:
                full(mine, folder)
            mine.save(folder / f"step-{mine.steps}", extra={"losses": losses}, keep=3)
            if step.interrupted:
                sys.exit(interrupt.code)
    own = numpy.random.normal()
    line = {"rank": mine.rank, "losses": losses, "own": own, "digest": digest(mine.state_dict())}
    sys.stdout.write(json.dumps(line) + "\n")
    mine.close()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    order = random.sample(range(8), 8)
    return images[order], torch.randint(5, (8,))


def full(mine: Any, folder: Path) -> None:
    """Say what became of every attempt to save."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for rank in (1, 0):
        for limit in LIMITS:
            if mine.rank == rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            try:
                mine.save(folder / "step-2")
                said = "saved"
            except gems.GemsError as error:
                said = f"{type(error).__name__}: {error}"
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            left = sorted(path.name for path in folder.iterdir())
            print(json.dumps({"full": rank, "limit": limit, "said": said, "left": left}))


if __name__ == "__main__":
    main()
