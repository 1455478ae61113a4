"""`gems verify`: train two steps under a plan and as one device would, and compare the numbers.

Losses, weights and buffers in float64, of a network with random weights on random images. Started
alone, it launches one local process per rank of the plan.

  gems verify --model unet --image-size 64 --split-size 3 --times 1
  gems verify --model my.networks:build --spatial 2x2 --image-size 128
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gems.cli.model_options import MODEL, micro_batch, model_from, sampled
from gems.cli.options import DEVICE, add_options, choice, real
from gems.cli.plan_options import PLAN, plan_from
from gems.cli.ranks import end_with_launcher, start

OPTIONS = {
    "--tolerance": real(
        1e-10, "largest relative difference (default 1e-10; a network that computes some values "
        "in float32 whatever its weights are needs 1e-5)",
    ),
    "--device": DEVICE,
    "--backend": choice(("gloo", "nccl"), None, "default: nccl on GPUs, gloo on CPUs"),
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
    plan = plan_from(given)
    micro_batch(given)
    import torch

    from gems.torch.device_choice import usable
    from gems.torch.launchers import place
    from gems.torch.parity import compare

    usable(given.device, given.backend)
    here = place()
    if plan.world > 1 and here is None:
        return start([sys.executable, "-m", "gems", *given.typed], plan.world)
    _, sample = sampled(given)
    torch.manual_seed(0)
    found = compare(model_from(given), sample, plan, device=given.device, backend=given.backend)
    if found is None:  # rank 0 has it
        return 0
    passed = found.error <= given.tolerance
    print(
        f"{'equal' if passed else 'DIFFERENT'}: {found.steps} steps on {plan.world} ranks and by "
        f"{found.oracle}. Largest relative difference: loss {found.loss:.1e}, weights and buffers "
        f"{found.state:.1e} ({found.worst}); tolerance {given.tolerance:g}"
    )
    return 0 if passed else 1
