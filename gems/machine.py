"""On what it runs: speeds, sizes and delays. Plain data, the inputs of every prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gems.errors import PlanError, faults


@dataclass(frozen=True)
class Device:
    """One rank's compute device.

    `flops` per second and `bandwidth` in bytes per second are the data sheet's; the efficiencies
    (0 to 1) say how much of each a real layer reaches. `memory` in bytes, `launch` in seconds per
    kernel.
    """

    name: str
    flops: float
    bandwidth: float
    memory: int
    launch: float
    compute_efficiency: float
    memory_efficiency: float

    def __post_init__(self) -> None:
        found = [
            f"{n} is {getattr(self, n)}, not above 0"
            for n in ("flops", "bandwidth", "memory")
            if not getattr(self, n) > 0
        ]
        found += [f"launch is {self.launch}, not 0 or more"] if not self.launch >= 0 else []
        found += [
            f"{n} is {getattr(self, n)}, not above 0 and at most 1"
            for n in ("compute_efficiency", "memory_efficiency")
            if not 0 < getattr(self, n) <= 1
        ]
        if found:
            raise PlanError(faults(f"device {self.name!r} cannot be", found))


@dataclass(frozen=True)
class Link:
    """A way between two places: `bandwidth` in bytes per second each way, `latency` in seconds."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.latency >= 0):
            raise PlanError(
                f"a link of {self.bandwidth} bytes/s and {self.latency} s cannot be: "
                "give a bandwidth above 0 and a latency of 0 or more"
            )

    def seconds(self, size: float) -> float:
        """One message of `size` bytes."""
        return self.latency + size / self.bandwidth

    def allreduce_seconds(self, size: float, ranks: int) -> float:
        """Summing `size` bytes over `ranks`: `2(P-1)/P·n/BW + 2 log2(P)·α`."""
        if ranks < 1:
            raise PlanError(f"an all-reduce over {ranks} ranks cannot be; take 1 or more")
        p, n = ranks, size
        return 2 * (p - 1) / p * n / self.bandwidth + 2 * math.log2(p) * self.latency


@dataclass(frozen=True)
class Machine:
    """Equal devices, the `link` between any two of them and each one's `host_link`."""

    name: str
    device: Device
    link: Link
    host_link: Link


def machine(name: str) -> Machine:
    """The preset `name`."""
    if name not in MACHINES:
        raise PlanError(
            f"there is no machine {name!r}; choose one of {', '.join(sorted(MACHINES))}, "
            "or describe yours with gems.machine.Machine"
        )
    return MACHINES[name]


# Speeds and sizes are the vendors'. Efficiencies, launch times and latencies are inputs: the middle
# of what is usually seen (0.3 to 0.7 of the FLOPs, 0.75 to 0.8 of the bandwidth, 7 to 10 µs). Fit
# the two efficiencies on one measured point before claiming more than a ratio.
_V100 = Machine(
    name="v100",
    device=Device(
        name="V100-SXM2-16GB",
        flops=15.7e12,
        bandwidth=900e9,
        memory=16 * 2**30,
        launch=8.5e-6,
        compute_efficiency=0.5,
        memory_efficiency=0.775,
    ),
    link=Link(bandwidth=25e9, latency=5e-6),  # one NVLink, one direction
    host_link=Link(bandwidth=12e9, latency=10e-6),  # PCIe 3
)
_A100 = Machine(
    name="a100",
    device=Device(
        name="A100-SXM4-40GB",
        flops=19.5e12,  # fp32; TF32 has 156e12
        bandwidth=1555e9,
        memory=40 * 2**30,
        launch=8.5e-6,
        compute_efficiency=0.5,
        memory_efficiency=0.775,
    ),
    link=Link(bandwidth=300e9, latency=5e-6),  # all NVLinks, one direction
    host_link=Link(bandwidth=24e9, latency=10e-6),  # PCIe 4: an input, twice PCIe 3
)
# One core of an ordinary server: all of it is input. On a 2.45 GHz EPYC core torch multiplied
# matrices at 77 GFLOP/s, copied at 19 GB/s (read and write) and needed 4 µs for a tiny operation.
_CPU = Machine(
    name="cpu",
    device=Device(
        name="one CPU core",
        flops=80e9,
        bandwidth=20e9,
        memory=8 * 2**30,
        launch=5e-6,
        compute_efficiency=0.5,
        memory_efficiency=0.775,
    ),
    link=Link(bandwidth=2e9, latency=50e-6),
    host_link=Link(bandwidth=5e9, latency=1e-6),
)

MACHINES: dict[str, Machine] = {m.name: m for m in (_V100, _A100, _CPU)}


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{prefix}IB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)
}


def bytes_of(size: str | float) -> int:
    """A size as people write it: `bytes_of("16GiB")`, `bytes_of("500 MB")`, `bytes_of(4096)`."""
    if not isinstance(size, str):
        return int(size)
    number = size.strip().rstrip("BbIiKkMmGgTt").strip()
    unit = size.strip()[len(number) :].strip().upper() or "B"
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError):
        raise PlanError(f"{size!r} is not a size; write one like 16GiB, 500MB or 4096") from None
