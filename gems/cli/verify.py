"""`gems verify`: train a few steps under a plan and as one device would, and compare the numbers.

Losses, gradients, parameters, buffers, random numbers and bytes, in float64, of a network with
random weights on random images. The exit code is 0 if all are equal, 1 if not. Started alone, it
launches one local process per rank of the plan; under torchrun, mpirun or srun it uses their ranks.

  gems verify --model unet --image-size 64 --split-size 3 --times 1
  gems verify --model my.networks:build --spatial 2x2 --image-size 128
  gems verify --model networks.py:build --plan plan.json --against other.json
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gems.cli.keras_models import is_keras
from gems.cli.model_options import MODEL, micro_batch, model_from, sampled
from gems.cli.options import DEVICE, add_options, choice, count, path, real
from gems.cli.plan_options import PLAN, plan_from, plan_in
from gems.cli.ranks import end_with_launcher, reject_mpi, start
from gems.errors import GemsError

OPTIONS = {
    "--against": path(
        "a second plan from a file, compared with the first instead of the plain model; it runs "
        "on threads of rank 0"
    ),
    "--steps": count(2, "steps that are compared (default 2)"),
    "--tolerance": real(
        1e-10, "largest relative difference (default 1e-10; a network that computes some values "
        "in float32 whatever its weights are needs 1e-5)",
    ),
    "--device": DEVICE,
    "--backend": choice(("gloo", "nccl", "mpi"), None, "default: nccl on GPUs, gloo on CPUs"),
}  # fmt: skip


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare a plan with one device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, MODEL, "model")
    add_options(parser, PLAN, "parallel plan")
    add_options(parser, OPTIONS)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    end_with_launcher()
    if is_keras(given):
        raise GemsError(
            "gems verify compares PyTorch models; python -m tests.keras.applications does it for "
            "keras.applications, in float64 under every schedule (docs/keras.md)"
        )
    plan = plan_from(given)
    other = None if given.against is None else plan_in(given.against)
    micro_batch(given)
    import torch

    from gems.distributed.launchers import place
    from gems.torch.device_choice import usable
    from gems.torch.parity import verify

    usable(given.device, given.backend)
    here = place()
    if plan.world > 1 and here is None:
        reject_mpi(given.backend, plan.world)
        return start([sys.executable, "-m", "gems", *given.typed], plan.world)
    _, sample = sampled(given)
    torch.manual_seed(0)
    found = verify(
        model_from(given), sample, plan, against=other, steps=given.steps,
        tolerance=given.tolerance, device=given.device, backend=given.backend,
    )  # fmt: skip
    if here is not None and here.rank:  # rank 0 tells
        return 0
    print(found)
    return 0 if found.passed else 1
