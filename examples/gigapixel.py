"""How do I train on an image whose activations take a hundred times the memory that I have?

    torchrun --nproc-per-node 1 examples/gigapixel.py

One step of a U-Net with BatchNorm in training mode, patch by patch, with what its sweeps hand each
other in a file on disk (docs/memory.md, "Values in a store"). Image and labels are computed box by
box, as a slide would be read. Another process watches how much memory this one holds: that depends
on --patch, and not on --side. Prints what plain PyTorch would save for backward, and what was held.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import torch
from torch import nn

import gems
from gems import models
from gems.torch.tracing.trace import trace

WATCH = """
import sys, time
most = 0
try:
    while True:
        rows = open(f"/proc/{sys.argv[1]}/status").read().splitlines()
        now = next(int(row.split()[1]) for row in rows if row.startswith("VmRSS"))
        if now > most:
            most = now
            print(most // 1024, flush=True)
        time.sleep(0.05)
except (OSError, StopIteration):
    pass
"""


class Waves:
    """An image, or its labels, of which only boxes exist: any array with slices will do."""

    def __init__(self, side: int, *, labels: bool = False) -> None:
        self.labels = labels
        self.dtype = "int64" if labels else "float32"
        self.shape = (1, side, side) if labels else (1, 3, side, side)

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        rows, columns = (torch.arange(s.start or 0, n if s.stop is None else s.stop)
                         for s, n in zip(box[-2:], self.shape[-2:], strict=True))  # fmt: skip
        wave = torch.sin(rows[:, None] / 17) * torch.cos(columns / 23)
        if self.labels:
            return (wave > 0).long()[None]
        return torch.stack([wave, wave * wave, wave.abs()])[None]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--side", type=int, default=256)
    options.add_argument("--patch", type=int, default=64)
    options.add_argument("--width", type=int, default=4)
    options.add_argument("--folder", default=None, help="for the file; default: TMPDIR")
    given = options.parse_args()
    torch.manual_seed(0)
    model = models.build("unet", width=given.width, levels=3)
    parts = max(given.side // given.patch, 1)
    plan = gems.Plan(stream=(parts, parts), schedule="sequential", offload="values:disk")
    image, labels = Waves(given.side), Waves(given.side, labels=True)
    trainer = gems.Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
        sample=torch.empty(image.shape, device="meta"),
        plan=plan,
        costs="estimate",
        offload_folder=given.folder,
    )
    watch = subprocess.Popen(
        [sys.executable, "-c", WATCH, str(os.getpid())], stdout=subprocess.PIPE, text=True
    )
    before, cpu = time.perf_counter(), time.process_time()
    step = trainer.step(image, labels)
    seconds, cpu = time.perf_counter() - before, time.process_time() - cpu
    watch.terminate()
    held = [int(line) for line in watch.communicate()[0].split()] or [0]
    graph = trace(model, torch.empty(image.shape, device="meta")).graph
    plain = graph.activations(range(len(graph.blocks))) / 2**30
    stored = max(memory.offloaded for _, memory in trainer.timeline().memory[0])
    print(f"{given.side} x {given.side} pixels, {parts} x {parts} patches: loss {step.loss:.4f}")
    print(f"{seconds:.0f} s, {cpu:.0f} s of CPU; tensors held {trainer.peak / 2**20:.1f} MiB")
    print(f"in the file {stored / 2**30:.2f} GiB; resident {held[0]} MiB -> {max(held)} MiB")
    print(f"plain PyTorch would save {plain:.2f} GiB for backward")
    trainer.close()


if __name__ == "__main__":
    main()
