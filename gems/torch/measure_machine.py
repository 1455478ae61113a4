"""Measure this computer: what one rank with one thread computes, copies and sends here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import nn

from gems.hardware import Device, Link, Machine
from gems.plans.plan import Plan
from gems.torch.launch import loopback
from gems.torch.offload.stores import DiskStore
from gems.torch.spatial.group import SpatialGroup
from gems.torch.trainer import Trainer
from gems.transport.torch_distributed import TorchDist

REPEATS, EXCHANGES = 7, 100
LARGE, SMALL = 4 * 2**20, 64  # bytes of the messages that are timed


def measured() -> Machine:
    """This computer as a machine, one rank per core. Takes about ten seconds; let nothing run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        device = _device()
    finally:
        torch.set_num_threads(threads)
    link = _link()
    notes = {
        "device.flops": "measured: a product of two 1024 x 1024 matrices",
        "device.bandwidth": "measured: a copy of 64 MiB, read and written",
        "device.compute_efficiency": "measured: a 3x3 convolution of 32 channels at 128 x 128",
        "device.memory_efficiency": "measured: the negative of 64 MiB",
        "device.launch": "measured: adding two numbers",
        "device.call": "measured: a small convolution on 4 x 4 cells of a streamed image",
        "device.memory": "this computer's memory, shared by its cores",
        "link": "measured: gloo between two processes that work, and then wait for each other",
        "host_link": "a copy within memory",
        "disk": "measured: 64 MiB to a file without a name where temporary files go, and back",
    }
    within = Link(device.bandwidth / 2, 1e-6)
    return Machine("local", device, link, within, disk=_disk(), notes=notes)


def _disk() -> Link:
    """The slower of writing and reading; the system may well keep some of it in memory."""
    store = DiskStore(torch.device("cpu"))

    def seconds(x: torch.Tensor) -> float:
        slot = store.slot(x.nbytes)
        return max(_best(lambda: slot.write(x).wait()), _best(lambda: slot.read(x).wait()))

    try:
        large = torch.ones(16 * 2**20)
        return Link(large.nbytes / seconds(large), seconds(torch.ones(1)))
    finally:
        store.close()


def _device() -> Device:
    a = torch.randn(1024, 1024)
    flops = 2 * 1024**3 / _best(lambda: a @ a)
    x = torch.randn(16 * 2**20)
    y = torch.empty_like(x)
    bandwidth = 2 * x.nbytes / _best(lambda: y.copy_(x))
    image, kernel = torch.randn(1, 32, 128, 128), torch.randn(32, 32, 3, 3)
    work = 2 * 128 * 128 * 32 * 32 * 9
    convolved = work / _best(lambda: F.conv2d(image, kernel, padding=1)) / flops
    passed = 2 * x.nbytes / _best(lambda: torch.neg(x, out=y)) / bandwidth
    one = torch.ones(1)
    tiny = _best(lambda: [one + one for _ in range(1000)]) / 1000
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        name="one core of this computer",
        flops=flops,
        bandwidth=bandwidth,
        memory=memory // (os.cpu_count() or 1),
        launch=tiny,
        call=_call(),
        compute_efficiency=min(convolved, 1.0),
        memory_efficiency=min(passed, 1.0),
        is_host=True,
    )


def _call() -> float:
    """Of a layer on a part of an image that is too small to take much time of its own."""
    layers, blocks = 4, 4
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(layers)))
    plan = Plan(schedule="sequential", stream=((blocks, blocks),))
    image = torch.randn(1, 8, 4 * blocks, 4 * blocks)
    trainer = Trainer(model, None, None, image, plan, costs="estimate")
    try:
        return _best(lambda: trainer.predict(image)) / (layers * blocks**2)
    finally:
        trainer.close()


def _best(work: Callable[[], Any]) -> float:
    """Seconds of the quickest of a few runs, after one that warms up."""
    work()
    found = []
    for _ in range(REPEATS):
        start = perf_counter()
        work()
        found.append(perf_counter() - start)
    return min(found)


def _link() -> Link:
    """Between two processes of this computer, as gloo moves bytes."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_exchange, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
        small, large = map(float, (Path(folder) / "seconds").read_text().split())
    return Link(bandwidth=(LARGE - SMALL) / max(large - small, 1e-9), latency=small)


def _exchange(rank: int, folder: str) -> None:
    """Two processes that work and then want something of each other, as tiles and stages do.

    What counts is how long they wait for it: gloo shakes hands, and a sleeping process must wake.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    transport = TorchDist(leave=dist.destroy_process_group)
    group, work, found = SpatialGroup((2,), (0, 1), rank, transport), torch.randn(512, 512), []
    for size in (SMALL, LARGE):
        mine, waits = torch.zeros(size, dtype=torch.uint8), 0.0
        for _ in range(EXCHANGES):
            torch.mm(work, work)
            start = perf_counter()
            group.all_gather(mine)
            waits += perf_counter() - start
        found.append(waits / EXCHANGES)
    if rank == 0:
        (Path(folder) / "seconds").write_text(" ".join(map(str, found)))
    transport.all_gather_object(rank)
    transport.close()
