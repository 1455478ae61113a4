"""A `Machine` for the GPUs that torch sees, from their properties.

Peaks are of a table of data sheets, or follow from cores and clock; `notes` tell which. Links are
assumed: torch does not tell how GPUs are connected. Never run on a GPU; measure with
costs="measure", the default there, which needs none of these speeds but the links'.
"""

from __future__ import annotations

import logging
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gems.errors import PlanError
from gems.files import from_json, to_json
from gems.hardware import Device, Link, Machine, machine
from gems.torch import cuda_device
from gems.transport.protocol import Transport

log = logging.getLogger(__name__)

CONTEXT = 512 << 20  # bytes; a CUDA context with cuDNN's and cuBLAS's code is 0.3 to 0.6 GiB
# Bytes per NCCL communicator: 544 MB of two A100s over NVLink, 688 MB of more (NVIDIA/nccl#964).
COMMUNICATOR = 544 << 20
BETWEEN = Link(25e9, 5e-6)  # InfiniBand HDR, a rail for each GPU
DISK = Link(1e9, 1e-4)
LATENCY, COPY = 5e-6, 10e-6  # seconds, of a message between GPUs and of a copy to the host


class Peak(NamedTuple):
    """Of a data sheet: dense FLOP/s of fp32, and of fp16 and bf16 on tensor cores; bytes/s."""

    name: str
    flops: float
    fp16: float | None
    bf16: float | None
    bandwidth: float
    link: float = 0.0  # NVLink to another GPU of the node, bytes/s each way


# NVIDIA's data sheets. A name is a word, or several, of what torch calls the device.
PEAKS = (
    Peak("V100-SXM2", 15.7e12, 125e12, None, 900e9, 25e9),
    Peak("V100", 14e12, 112e12, None, 900e9),
    Peak("A100-SXM4-80GB", 19.5e12, 312e12, 312e12, 2039e9, 300e9),
    Peak("A100-SXM4", 19.5e12, 312e12, 312e12, 1555e9, 300e9),
    Peak("A100 80GB PCIe", 19.5e12, 312e12, 312e12, 1935e9),
    Peak("A100", 19.5e12, 312e12, 312e12, 1555e9),
    Peak("H200", 67e12, 989e12, 989e12, 4.8e12, 450e9),
    Peak("H100 PCIe", 51e12, 756e12, 756e12, 2e12),
    Peak("H100", 67e12, 989e12, 989e12, 3.35e12, 450e9),
    Peak("T4", 8.1e12, 65e12, None, 320e9),
    Peak("A10", 31.2e12, 125e12, 125e12, 600e9),
    Peak("A40", 37.4e12, 149.7e12, 149.7e12, 696e9),
    Peak("RTX A6000", 38.7e12, 154.8e12, 154.8e12, 768e9),
    Peak("L4", 30.3e12, 121e12, 121e12, 300e9),
    Peak("L40S", 91.6e12, 362e12, 362e12, 864e9),
    Peak("RTX 3090", 35.6e12, 71e12, 71e12, 936e9),
    Peak("RTX 4090", 82.6e12, 165e12, 165e12, 1008e9),
)
# fp32 units of a multiprocessor, by compute capability; 128 for those not listed.
UNITS = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
CLOCK = 1.4e9  # Hz, where torch does not tell


def machine_on(
    given: str | Path | Machine, device: torch.device, transport: Transport | None = None
) -> Machine:
    """The machine that was given. "auto" is one of the GPUs of all ranks, if the device is one,
    else `cpu`. All ranks must call it."""
    if isinstance(given, Machine):
        return given
    if given != "auto":
        return machine(given)
    if device.type != "cuda":
        return machine("cpu")
    mine = described(device.index or 0)
    return mine if transport is None else _agreed(mine, device, transport)


def machine_here(given: str | Path | Machine) -> Machine:
    """The machine that was given. "auto" is of this computer's first GPU, else `cpu`."""
    gpu = given == "auto" and cuda_device.count()
    return machine_on(given, torch.device("cuda", 0) if gpu else torch.device("cpu"))


def described(index: int) -> Machine:
    """A machine of GPUs like this one, in one node."""
    found = cuda_device.properties(index)
    peak = next((p for p in PEAKS if re.search(rf"\b{p.name}\b", found.name)), None)
    flops, how = _flops(found, peak)
    bandwidth, read = _bandwidth(found, peak)
    bus = 12e9 if found.major < 8 else 24e9 if found.major < 9 else 48e9
    device = Device(
        name=found.name,
        flops=flops,
        fp16_flops=peak.fp16 if peak else None,
        bf16_flops=peak.bf16 if peak else None,
        bandwidth=bandwidth,
        memory=cuda_device.free_memory(index) + CONTEXT,
        context=CONTEXT,
        communicator=COMMUNICATOR,
        launch=8.5e-6,
        compute_efficiency=0.5,
        memory_efficiency=0.775,
    )
    nvlink = peak.link if peak else 0.0
    notes = {
        "device.flops": how,
        "device.fp16_flops": "data sheet" if peak else "not known: as fast as fp32",
        "device.bf16_flops": "data sheet" if peak else "not known: as fast as fp32",
        "device.bandwidth": read,
        "device.memory": "measured: free now, held by this process, and its context",
        "device.context": "an input: 0.3 to 0.6 GiB are usual",
        "device.communicator": "reported for two A100s (NVIDIA/nccl#964)",
        "device.launch": "an input: the middle of 7 to 10 us",
        "device.compute_efficiency": "an input: the middle of 0.3 to 0.7",
        "device.memory_efficiency": "an input: the middle of 0.75 to 0.8",
        "link": "assumed: NVLink, by the device's name" if nvlink else "assumed: PCIe",
        "host_link": "assumed: PCIe 3, 4 or 5 by compute capability",
        "disk": "an input: what a plain local disk writes",
    }
    link, host_link = Link(nvlink or bus, LATENCY), Link(bus, COPY)
    return Machine("auto", device, link, host_link, disk=DISK, notes=notes)


def _flops(found: Any, peak: Peak | None) -> tuple[float, str]:
    """fp32, and where it is from."""
    if peak is not None:
        return peak.flops, f"data sheet of {peak.name}"
    clock = 1e3 * (getattr(found, "clock_rate", 0) or 0)
    units = UNITS.get((found.major, found.minor), 128)
    flops = found.multi_processor_count * units * 2 * (clock or CLOCK)
    told = f"at {clock / 1e9:.3g} GHz" if clock else f"at {CLOCK / 1e9:.3g} GHz, assumed"
    return flops, f"{found.multi_processor_count} multiprocessors of {units} fp32 units, {told}"


def _bandwidth(found: Any, peak: Peak | None) -> tuple[float, str]:
    clock = 1e3 * (getattr(found, "memory_clock_rate", 0) or 0)
    width = getattr(found, "memory_bus_width", 0) or 0
    if clock and width:
        return 2 * clock * width / 8, f"{width} bits at {clock / 1e9:.3g} GHz, twice per cycle"
    if peak is not None:
        return peak.bandwidth, f"data sheet of {peak.name}"
    return 500e9, "assumed: torch does not tell"


def _agreed(mine: Machine, device: torch.device, transport: Transport) -> Machine:
    """One machine for all ranks, of the least of their devices: plans must be the same."""
    uuid = str(getattr(cuda_device.properties(device.index or 0), "uuid", device))
    told = transport.all_gather_object((socket.gethostname(), uuid, to_json(mine)))
    if failed := [rank for rank, one in enumerate(told) if isinstance(one, str)]:
        raise PlanError(f"rank {failed[0]} could not describe its GPU: {told[failed[0]]}")
    hosts = [host for host, _, _ in told]
    found = [from_json(Machine, text) for _, _, text in told]
    names = sorted({one.device.name for one in found})
    if len(names) > 1:
        log.warning(
            "ranks have different GPUs (%s); plans are made for the slowest, and stages are evened "
            "out as if all were like it",
            ", ".join(names),
        )
    slowest = min(found, key=lambda one: (one.device.flops, one.device.name))
    sharing = Counter((host, uuid) for host, uuid, _ in told)
    memory = min(
        one.device.memory // sharing[host, uuid]
        for one, (host, uuid, _) in zip(found, told, strict=True)
    )
    common = replace(slowest, **_nodes(hosts), notes=slowest.notes | NODES)
    if getattr(transport, "backend", "") == "nccl":
        return replace(common, device=replace(common.device, memory=memory))
    kept = replace(common.device, memory=memory, communicator=0)
    notes = common.notes | {"link": "gloo, through host memory", "device.communicator": "none"}
    return replace(common, device=kept, link=common.host_link, notes=notes)


NODES = {"node": "ranks on one host", "between": "assumed: InfiniBand HDR, a rail for each GPU"}


def _nodes(hosts: Sequence[str]) -> dict[str, Any]:
    """How many ranks a node has. Where nodes have different numbers, or ranks go around nodes, each
    link is taken for one between nodes."""
    if len(set(hosts)) == 1:
        return {}
    first = hosts.count(hosts[0])
    even = all(host == hosts[rank - rank % first] for rank, host in enumerate(hosts))
    blocks = len(hosts) == first * len(set(hosts))
    return {"node": first if even and blocks else 1, "between": BETWEEN}
