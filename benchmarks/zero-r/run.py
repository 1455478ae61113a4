"""What ZeRO-R's buffers of constant size and its defragmentation are worth here.

    python -m benchmarks.zero-r.run

Each row is a process of its own, which reads its resident memory from /proc/self/status.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import gems
from benchmarks.where import where
from gems.draw.units import size
from gems.torch.state import master_weights

WIDTH = 2048
PLAN = gems.Plan(stages=4, ranks=1, schedule="sequential", micro_batches=4, recompute="always")


# Every block of 64 KiB and more is memory of its own, and the kernel's again when it is freed: what
# an allocator without fragments would have.
APART = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
APART |= {"MALLOC_MMAP_MAX_": "1000000"}


def status(field: str) -> int:
    """VmRSS, resident memory in bytes, or VmHWM, the most of it since `reset`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def buffer(layers: int, bound: int) -> dict[str, int]:
    """The most that an optimizer step needs besides the state, with fp32 gradients in `bound`."""
    master_weights.BUFFER = bound
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    x, y = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    session = gems.Session(
        model, nn.functional.mse_loss, x, gems.Plan(), precision="bf16", master_weights=True
    )
    session.add_optimizer(lambda p: torch.optim.Adam(p, 1e-4))
    more = 0
    for _ in range(3):  # the first makes the state
        session.forward_backward(x, y)
        reset()
        before = status("VmRSS")
        session.optimizer_step()
        more = status("VmHWM") - before
    session.close()
    return {"extra": more}


def fragments(steps: int, side: int) -> dict[str, int]:
    """Resident memory over many steps, beside what GEMS counts, of a network that recomputes: its
    activations live shortly, the inputs it saves and the gradients long."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64), (64, 96), (96, 128), (128, 160)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 10))
    x, y = torch.randn(8, 3, side, side), torch.randint(10, (8,))
    trainer = gems.Trainer(model, nn.functional.cross_entropy, torch.optim.Adam, x[:2], PLAN)
    base, found = status("VmRSS"), {}
    for step in range(1, steps + 1):
        reset()
        trainer.step(x, y)
        found[f"resident {step}"] = status("VmHWM") - base
    found["counted"] = trainer.peak
    trainer.close()
    return found


def process(*arguments: str, **variables: str) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.zero-r.run", *arguments]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | variables
    )
    return json.loads(done.stdout)


def tables(steps: int) -> None:
    print(where())
    print("| parameters | fp32 gradients | at once | 64 MiB at a time |\n|---|---|---|---|")
    for layers in (8, 16, 32):
        cells, whole = layers * WIDTH**2, str(1 << 40)
        ways = [process("--buffer", str(layers), bound) for bound in (whole, str(64 << 20))]
        extras = " | ".join(size(way["extra"]) for way in ways)
        print(f"| {cells / 1e6:.0f} M | {size(4 * cells)} | {extras} |")
    print("\n| images | counted | step | malloc as it is | every block by itself |")
    print("|---|---|---|---|---|")
    for side, count in ((96, steps), (192, steps // 3)):
        given = ("--fragments", str(count), str(side))
        shared, apart = (process(*given, **variables) for variables in ({}, APART))
        for step in sorted({1, 2, count // 2, count}):
            most = [size(way[f"resident {step}"]) for way in (shared, apart)]
            print(f"| {side}² | {size(shared['counted'])} | {step} | {' | '.join(most)} |")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--steps", type=int, default=12)
    ask.add_argument("--buffer", nargs=2, type=int)
    ask.add_argument("--fragments", nargs=2, type=int)
    given = ask.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if given.buffer:
        print(json.dumps(buffer(*given.buffer)))
    elif given.fragments:
        print(json.dumps(fragments(*given.fragments)))
    else:
        tables(given.steps)


if __name__ == "__main__":
    main()
