"""On what it runs: speeds, sizes and delays. Plain data, the inputs of every prediction."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

from gems.errors import GemsError, PlanError, problems
from gems.files import from_json, read_text


@dataclass(frozen=True)
class Device:
    """One rank's compute device.

    `flops` per second and `bandwidth` in bytes per second are the data sheet's; the efficiencies
    (0 to 1) say how much of each a real layer reaches. `fp16_flops` and `bf16_flops` are those of
    tensor cores; without them these types are as fast as fp32. `memory` in bytes, `launch` in
    seconds per kernel, `call` in seconds that Python takes for a layer on a part of a tensor,
    however small. A device that `is_host` computes in the host's memory, so that only disks are
    elsewhere. Of its memory, `context` bytes hold no tensors, and so many more for each
    `communicator` of a rank.
    """

    name: str
    flops: float
    bandwidth: float
    memory: int
    launch: float
    compute_efficiency: float
    memory_efficiency: float
    is_host: bool = False
    call: float = 0.0
    fp16_flops: float | None = None
    bf16_flops: float | None = None
    context: int = 0
    communicator: int = 0

    def __post_init__(self) -> None:
        found = [
            f"{n} is {getattr(self, n)}, not above 0"
            for n in ("flops", "bandwidth", "memory", "fp16_flops", "bf16_flops")
            if getattr(self, n) is not None and not getattr(self, n) > 0
        ]
        found += [
            f"{n} is {getattr(self, n)}, not 0 or more"
            for n in ("launch", "call", "context", "communicator")
            if not getattr(self, n) >= 0
        ]
        found += [
            f"{n} is {getattr(self, n)}, not above 0 and at most 1"
            for n in ("compute_efficiency", "memory_efficiency")
            if not 0 < getattr(self, n) <= 1
        ]
        if found:
            raise PlanError(problems(f"device {self.name!r} cannot be", found))

    def flops_in(self, precision: str) -> float:
        """Per second, of products whose factors are of a precision: `fp32`, `fp16`, `bf16`."""
        return {"fp16": self.fp16_flops, "bf16": self.bf16_flops}.get(precision) or self.flops


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
    """Equal devices: the `link` between two of a node, and each one's `host_link` to its host.

    `node` is how many devices a node has (None: all are in one) and `between` the link of two
    devices on different nodes, which no other message shares. Rank r is on node `r // node`.
    `disk` is the way to where a host offloads what it does not need now.
    `notes` has the source of each number, by its name: `{"device.flops": "data sheet"}`.
    """

    name: str
    device: Device
    link: Link
    host_link: Link
    node: int | None = None
    between: Link | None = None
    disk: Link = Link(1e9, 1e-4)
    notes: dict[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        found = []
        if self.node is not None and self.node < 1:
            found.append(f"node is {self.node}, not 1 device or more")
        if self.node is None and self.between is not None:
            found.append("between links nodes, but node does not say how many devices one has")
        if found:
            raise PlanError(problems(f"machine {self.name!r} cannot be", found))

    @property
    def elsewhere(self) -> str:
        """The nearest place that is not the device's memory: the `host`, or `disk`."""
        return "disk" if self.device.is_host else "host"

    def way_to(self, place: str) -> Link:
        """The way of what is offloaded: to the `host`, or to `disk`."""
        return self.host_link if place == "host" else self.disk

    def node_of(self, rank: int) -> int:
        return 0 if self.node is None else rank // self.node

    def link_of(self, one: int, other: int) -> Link:
        """The way between two ranks."""
        if self.node_of(one) == self.node_of(other):
            return self.link
        if self.between is None:
            raise PlanError(
                f"ranks {one} and {other} are on two nodes of {self.node} devices, and machine "
                f"{self.name!r} has no link between nodes; give it `between`, or a larger `node`"
            )
        return self.between

    def slowest(self, ranks: Collection[int]) -> Link:
        """The way that holds up a group: of least bandwidth among those between two of it."""
        links = {self.link_of(a, b) for a, b in pairwise(sorted(ranks))} or {self.link}
        return min(links, key=lambda link: (link.bandwidth, -link.latency))

    def allreduce_seconds(self, size: float, ranks: Collection[int]) -> float:
        """Summing `size` bytes over these ranks, at the pace of the slowest link among them."""
        return self.slowest(ranks).allreduce_seconds(size, len(ranks))


# --- machines as files --------------------------------------------------------------------------

FOLDER = Path(__file__).parent / "machines"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
LOCAL = CACHE / "gems" / "local.json"  # this computer, as `gems machine` measured it


def machine(name: str | Path) -> Machine:
    """A preset by its name, or the machine of any file like theirs: `machine("my/cluster.json")`.

    To change a number, copy the preset's file, edit the copy and give its path. `local` is this
    computer, once `gems machine` has measured it.
    """
    if name == "local":
        if not LOCAL.is_file():
            raise PlanError(f"this computer was not measured yet ({LOCAL}); run `gems machine`")
        return _read(LOCAL)
    if name in MACHINES:
        return MACHINES[str(name)]
    path = Path(name)
    if path.is_file():
        return _read(path)
    raise PlanError(
        f"there is no machine {str(name)!r}; choose one of {', '.join(MACHINES)}, local, "
        f"or give the path of a file like {FOLDER / 'v100.json'}"
    )


class _Presets(Mapping[str, Machine]):
    """The files of the folder by their names, each read when it is asked for."""

    def __getitem__(self, name: str) -> Machine:
        if name not in self:
            raise KeyError(name)
        return _preset(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


MACHINES: Mapping[str, Machine] = _Presets()


@cache
def _preset(name: str) -> Machine:
    return _read(FOLDER / f"{name}.json")


def _read(path: Path) -> Machine:
    try:
        return from_json(Machine, read_text(path))
    except GemsError as error:
        raise PlanError(
            f"{path} does not describe a machine: {error}\n"
            f"Mend the file, or begin with a copy of {FOLDER / 'v100.json'}"
        ) from error


# --- sizes --------------------------------------------------------------------------------------

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
        found = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        found = math.nan
    if not 0 <= found < 2**63:
        raise PlanError(f"{size!r} is not a size; write one like 16GiB, 500MB or 4096")
    return int(found)
