"""How do I train on an image whose activations take a hundred times the memory that I have?

    torchrun --nproc-per-node 1 examples/gigapixel.py

One step of a U-Net or a ResNet-110-v2 with BatchNorm in training mode, patch by patch, with what
its sweeps hand each other in a file on disk (docs/memory.md, "Values in a store"); with more ranks,
each has rows of the image. Image and labels are computed box by box, as a slide would be read.
--norm none takes the U-Net without BatchNorm, which hands nothing on, and needs no file; --halo
carry lets patches hand on halos instead of computing them again. Another process watches how much
memory this one holds: that depends on --patch, and not on --side. Prints what plain PyTorch would
save for backward, and what was held; --curve draws it over time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import gems
from gems import models
from gems.cli.progress import bar
from gems.draw.curves import curves
from gems.model.graph import Graph
from gems.predict.streaming_cost import sweeps
from gems.torch.runtime.patch_progress import watched
from gems.torch.spatial.halo_costs import with_halos
from gems.torch.tracing.trace import trace

WATCH = """
import sys, time
began, wait = time.time(), 0.05
try:
    while True:
        rows = open(f"/proc/{sys.argv[1]}/status").read().splitlines()
        now = next(int(row.split()[1]) for row in rows if row.startswith("VmRSS"))
        print(time.time() - began, now / 1024, flush=True)
        time.sleep(wait)
        wait = min(1.01 * wait, 5)
except (OSError, StopIteration):
    pass
"""
MIB, GIB = 2**20, 2**30


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


def network(given: argparse.Namespace) -> tuple[nn.Module, object]:
    """The model, and what its loss compares with: a class per pixel, or one of the image."""
    if given.model == "unet":
        unet = models.build("unet", width=given.width, levels=3, norm=given.norm)
        return unet, Waves(given.side, labels=True)
    resnet = models.build("resnet_v2", depth=given.depth, num_classes=2)
    return resnet, torch.zeros(1, dtype=torch.int64)


def planned(given: argparse.Namespace, ranks: int) -> gems.Plan:
    """One rank has the image, or several have rows of it; each its patches one by one."""
    across = max(given.side // given.patch, 1)
    one_sweep = given.model == "unet" and given.norm == "none"
    return gems.Plan(
        stages=1,
        schedule="sequential",
        stream=(max(across // ranks, 1), across),
        stream_halo=given.halo,
        spatial=() if ranks == 1 else (ranks, 1),
        offload=() if one_sweep and given.halo == "recompute" else "values:disk",
    )


def measured(step: Callable[[], gems.Step]) -> tuple[gems.Step, list[tuple[float, float]]]:
    """A step, and this process's resident MiB over time as another process saw them."""
    command = [sys.executable, "-c", WATCH, str(os.getpid())]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    rows: list[str] = []
    try:
        taken = step()
    finally:
        watch.terminate()
        rows = watch.communicate()[0].splitlines()
    pairs = [tuple(map(float, row.split())) for row in rows]
    return taken, [(pair[0], pair[1]) for pair in pairs if len(pair) == 2] or [(0.0, 0.0)]


def patches(graph: Graph, plan: gems.Plan) -> int:
    """That a rank runs in a step: all in each sweep, forward and backward."""
    down, across = plan.stream[0]
    return 2 * down * across * len(sweeps(graph, range(len(graph.blocks))).blocks)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", choices=("unet", "resnet"), default="unet")
    options.add_argument("--side", type=int, default=256)
    options.add_argument("--patch", type=int, default=64)
    options.add_argument("--width", type=int, default=4, help="of the U-Net")
    options.add_argument("--norm", choices=("batch", "none"), default="batch", help="its")
    options.add_argument("--halo", choices=("recompute", "carry"), default="recompute")
    options.add_argument("--depth", type=int, default=110, help="of the ResNet")
    options.add_argument("--folder", default=None, help="for the file; default: TMPDIR")
    options.add_argument("--curve", type=Path, help="SVG of memory over time, of rank 0")
    given = options.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, labels = network(given)
    image = Waves(given.side)
    plan = planned(given, int(os.environ.get("WORLD_SIZE", "1")))
    sample = torch.empty(image.shape, device="meta")
    trainer = gems.Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
        sample=sample,
        plan=plan,
        costs="estimate",
        offload_folder=given.folder,
    )
    graph = with_halos(trace(model, sample), model)
    before, cpu = time.perf_counter(), time.process_time()
    with bar("patches", patches(graph, plan), trainer.rank == 0) as show, watched(lambda: show("")):
        step, resident = measured(lambda: trainer.step(image, labels))
    seconds, cpu = time.perf_counter() - before, time.process_time() - cpu
    forecast, timeline = trainer.forecast(), trainer.timeline()
    plain = graph.activations(range(len(graph.blocks)))
    stored = max(memory.offloaded for _, memory in timeline.memory[trainer.rank])
    predicted, most = forecast.peaks[trainer.rank].total, max(r for _, r in resident)
    if trainer.rank == 0:
        print(f"{given.side} x {given.side} pixels, patches of {given.patch}: {step.loss:.4f}")
        print(f"plain PyTorch would save {plain / GIB:.2f} GiB for backward")
    print(
        f"rank {trainer.rank}: {seconds:.0f} s, {cpu:.0f} s of CPU; in the file "
        f"{stored / GIB:.2f} GiB; tensors {trainer.peak / MIB:.1f} MiB, predicted "
        f"{predicted / MIB:.1f}; resident {resident[0][1]:.0f} MiB -> {most:.0f} MiB",
        flush=True,
    )
    if given.curve and trainer.rank == 0:
        ends = (0.0, seconds)
        series = {
            "resident, MiB": resident,
            "tensors": [(t, trainer.peak / MIB) for t in ends],
            "predicted": [(t, predicted / MIB) for t in ends],
        }
        given.curve.write_text(curves(f"{given.model} {given.side}²", series))
    trainer.close()


if __name__ == "__main__":
    main()
