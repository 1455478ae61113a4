"""A machine from the properties of GPUs, and memory that holds no tensors. No GPU is needed: what
torch.cuda would answer is replaced in `gems.torch.cuda_device`; so none of this ran on one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gems
from gems.cli.main import main
from gems.draw.table import report
from gems.errors import PlanError
from gems.files import from_json, to_json
from gems.hardware import Link, Machine, machine
from gems.model.estimate import estimate
from gems.planner.compile import compile_plan
from gems.planner.request import Request
from gems.planner.reserve import reserved
from gems.plans.plan import Plan
from gems.predict.timeline import Timeline, timeline_problems
from gems.schedule.communicators import most_communicators
from gems.torch import cuda_device, gpu_machine
from gems.torch.gpu_machine import CONTEXT, described, machine_here, machine_on
from gems.torch.gpu_memory import GpuMemory
from gems.torch.planning import Study

GIB = 1 << 30
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
Patch = pytest.MonkeyPatch
A100 = {
    "name": "NVIDIA A100-SXM4-40GB", "major": 8, "minor": 0, "multi_processor_count": 108,
    "total_memory": 40 * GIB, "uuid": "GPU-7", "clock_rate": 1410000,
    "memory_clock_rate": 1215000, "memory_bus_width": 5120,
}  # fmt: skip


class FakeGpu:
    """What torch.cuda tells of one GPU, and what was asked of it."""

    def __init__(self, monkeypatch: Patch, **changed: Any) -> None:
        self.properties = SimpleNamespace(**A100 | changed)
        self.free, self.held, self.used = 30 * GIB, 8 * GIB, 2 * GIB
        self.limits: list[int] = []
        self.resets = 0
        answers = {
            "count": lambda: 1,
            "current": lambda: 0,
            "use": lambda index: None,
            "properties": lambda index: self.properties,
            "free_memory": lambda index: self.free + self.held,
            "peaks": lambda index: (3 * GIB, 9 * GIB),
            "now": lambda index: (self.used, self.held),
            "reset_peaks": lambda index: setattr(self, "resets", self.resets + 1),
            "limit": lambda index, size: self.limits.append(size),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(cuda_device, name, answer)


@pytest.fixture
def gpu(monkeypatch: Patch) -> FakeGpu:
    return FakeGpu(monkeypatch)


# --- the machine ----------------------------------------------------------------------------------


def test_a_known_gpu_has_the_peaks_of_its_data_sheet(gpu: FakeGpu) -> None:
    found, preset = described(0), machine("a100")
    assert found.device.flops == preset.device.flops
    assert found.device.flops_in("bf16") == preset.device.flops_in("bf16") == 312e12
    assert found.device.bandwidth == pytest.approx(preset.device.bandwidth, rel=0.01)
    assert found.link == preset.link and found.host_link == preset.host_link
    assert "data sheet" in found.notes["device.flops"]
    assert "assumed" in found.notes["link"]
    assert from_json(Machine, to_json(found)) == found


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("Tesla V100-SXM2-32GB", 15.7e12), ("Tesla V100-PCIE-16GB", 14e12), ("NVIDIA A10", 31.2e12),
        ("NVIDIA A100 80GB PCIe", 19.5e12), ("NVIDIA H100 80GB HBM3", 67e12),
        ("NVIDIA H100 PCIe", 51e12), ("NVIDIA L4", 30.3e12), ("NVIDIA L40S", 91.6e12),
    ],
)  # fmt: skip
def test_names_are_told_apart(name: str, flops: float, gpu: FakeGpu) -> None:
    gpu.properties.name = name
    assert described(0).device.flops == flops


def test_an_unknown_gpu_is_counted_from_its_cores_and_clock(gpu: FakeGpu) -> None:
    gpu.properties.name = "NVIDIA Something"
    found = described(0)
    assert found.device.flops == 108 * 64 * 2 * 1.41e9
    assert found.device.flops_in("bf16") == found.device.flops
    assert found.link.bandwidth == found.host_link.bandwidth == 24e9  # PCIe 4
    assert "108 multiprocessors of 64 fp32 units, at 1.41 GHz" in found.notes["device.flops"]
    for old in ("clock_rate", "memory_clock_rate", "memory_bus_width"):  # an older torch
        delattr(gpu.properties, old)
    found = described(0)
    assert "assumed" in found.notes["device.flops"] and "assumed" in found.notes["device.bandwidth"]


def test_its_memory_is_what_this_process_can_have(gpu: FakeGpu) -> None:
    device = described(0).device
    assert device.memory - device.context == gpu.free + gpu.held


def test_auto_is_the_gpu_where_there_is_one(gpu: FakeGpu, monkeypatch: Patch) -> None:
    assert machine_here("auto").name == machine_on("auto", CUDA).name == "auto"
    assert machine_on("auto", CPU) == machine_here("cpu") == machine("cpu")
    assert machine_on("v100", CUDA) == machine("v100")
    assert machine_on(machine("v100"), CUDA) == machine("v100")
    monkeypatch.setattr(cuda_device, "count", lambda: 0)
    assert machine_here("auto") == machine("cpu")


def test_the_command_shows_the_gpu_of_this_computer(
    gpu: FakeGpu, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine", "--machine", "auto"]) == 0
    shown = capsys.readouterr().out
    for part in ("NVIDIA A100-SXM4-40GB", "312 TFLOP/s", "context", "544.0 MiB each"):
        assert part in shown


class Told:
    """A transport whose other ranks tell what they are given."""

    world, rank = 4, 0

    def __init__(self, backend: str, *others: tuple[str, str, Machine]) -> None:
        self.backend, self.others = backend, others

    def all_gather_object(self, mine: Any) -> list[Any]:
        return [mine, *((host, uuid, to_json(one)) for host, uuid, one in self.others)]


def agreed(monkeypatch: Patch, backend: str, *others: tuple[str, str, Machine]) -> Machine:
    monkeypatch.setattr(gpu_machine.socket, "gethostname", lambda: "a")
    told: Any = Told(backend, *others)
    return machine_on("auto", CUDA, told)


def test_all_ranks_plan_for_the_same_machine(
    gpu: FakeGpu, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is free differs from rank to rank, and so would their plans."""
    mine = described(0)
    less = replace(mine, device=replace(mine.device, memory=mine.device.memory - 5))
    found = agreed(monkeypatch, "nccl", ("a", "GPU-8", less))
    assert found == replace(less, notes=found.notes)
    assert (found.node, found.between, caplog.messages) == (None, None, [])
    slow = replace(mine, device=replace(mine.device, name="Tesla T4", flops=8e12))
    with caplog.at_level(logging.WARNING):
        assert agreed(monkeypatch, "nccl", ("a", "GPU-8", slow)).device.name == "Tesla T4"
    assert "different GPUs (NVIDIA A100-SXM4-40GB, Tesla T4)" in caplog.text


@pytest.mark.parametrize(("hosts", "node"), [("aabb", 2), ("abab", 1), ("aaab", 1), ("abcd", 1)])
def test_nodes_are_the_hosts_of_the_ranks(
    hosts: str, node: int, gpu: FakeGpu, monkeypatch: Patch
) -> None:
    others = [(host, f"GPU-{i}", described(0)) for i, host in enumerate(hosts[1:])]
    found = agreed(monkeypatch, "nccl", *others)
    assert (found.node, found.between) == (node, Link(25e9, 5e-6))


def test_over_gloo_there_are_no_communicators_and_a_gpu_may_be_shared(
    gpu: FakeGpu, monkeypatch: Patch
) -> None:
    found = agreed(monkeypatch, "gloo", ("a", "GPU-7", described(0)))
    assert found.device.communicator == 0
    assert found.device.memory == described(0).device.memory // 2
    assert found.link == found.host_link


# --- what holds no tensors ------------------------------------------------------------------------

FAMILIES = {
    "alone": (Plan(), 0),
    "two stages": (Plan(stages=2, micro_batches=4), 2),  # there, and back
    "replicas": (Plan(data=2), 1),
    "both": (Plan(stages=2, data=2, micro_batches=2), 3),
    "three stages": (Plan(stages=3, micro_batches=4), 4),  # the middle one has two neighbours
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rank_with_most_communicators_counts(family: str) -> None:
    plan, wanted = FAMILIES[family]
    assert most_communicators(plan) == wanted


RESERVING = replace(
    machine("v100"),
    device=replace(machine("v100").device, context=CONTEXT, communicator=GIB),
)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)))


SAMPLE = torch.empty(1, 4, 64, 64)


def test_the_budget_is_less_by_what_is_reserved() -> None:
    plan = Plan(stages=2, micro_batches=4)
    assert reserved(plan, RESERVING) == CONTEXT + 2 * GIB
    assert reserved(plan, machine("v100")) == reserved(Plan(), machine("cpu")) == 0
    graph, costs = Study(small(), SAMPLE, machine("v100")).graph
    request = Request.of(plan, 16 * GIB)
    free, taken = (
        compile_plan(plan, graph, costs, on, request) for on in (machine("v100"), RESERVING)
    )
    more = CONTEXT + 2 * GIB
    assert taken.prediction.bytes - free.prediction.bytes == more
    assert taken.prediction.fullest == free.prediction.fullest
    assert taken.least_bytes == tuple(x + more for x in free.least_bytes)
    assert free.activation_limit is not None
    assert taken.activation_limit == free.activation_limit - more


def test_a_plan_with_more_communicators_may_not_fit() -> None:
    """Two stages need two communicators, replicas one."""
    given: dict[str, Any] = {"ranks": 2, "machine": RESERVING, "costs": "estimate"}
    chosen = gems.plan(small(), SAMPLE, memory="2GiB", **given)
    assert (chosen.data, chosen.depth) == (2, 1)
    with pytest.raises(PlanError, match=r"context and communicators 1\.5 GiB"):
        gems.plan(small(), SAMPLE, memory="1GiB", **given)


def test_recomputation_is_chosen_within_what_is_left() -> None:
    graph, costs = Study(small(), SAMPLE, machine("v100")).graph
    plan = Plan(recompute="auto")
    most = replace(RESERVING.device, context=GIB - 200_000, communicator=0)
    request = Request.of(plan, GIB)
    found = [
        compile_plan(plan, graph, costs, on, request).plan.recompute
        for on in (machine("v100"), replace(RESERVING, device=most))
    ]
    assert found == [("never",), (("0", "2", "3"),)]


# --- precision ------------------------------------------------------------------------------------


def test_a_precision_has_its_bytes_and_its_speed() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1))
    sample, a100 = torch.empty(1, 64, 256, 256, device="meta"), machine("a100")
    full, half = (Study(model, sample, a100, precision=p).graph for p in ("fp32", "bf16"))
    kept = [sum(cost.activations for cost in costs.items) for _, costs in (full, half)]
    # The input of the first layer is saved as it came, and its bf16 copy.
    assert kept[1] < 0.8 * kept[0]
    assert sum(c.f for c in half[1].items) < 0.5 * sum(c.f for c in full[1].items)
    assert estimate(half[0], machine("cpu"), "bf16") == estimate(half[0], machine("cpu"))
    with pytest.raises(PlanError, match="precision 'fp8' is unknown"):
        gems.plan(model, sample, ranks=1, precision="fp8")


def test_the_command_plans_for_a_precision(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*options: str) -> str:
        sizes = ["--model", "unet", "--image-size", "64", "--auto", "1", "--machine", "v100"]
        assert main(["plan", *sizes, *options]) == 0
        return capsys.readouterr().out

    assert shown() == shown("--precision", "fp32") != shown("--precision", "fp16")


# --- the allocator --------------------------------------------------------------------------------


@pytest.fixture
def trainer(gpu: FakeGpu) -> Iterator[gems.Trainer]:
    """On the CPU, but for what it asks the allocator."""
    made = gems.Trainer(
        small(),
        nn.functional.mse_loss,
        lambda p: torch.optim.SGD(p, 0.1),
        SAMPLE,
        Plan(),
        device="cpu",
        memory="1GiB",
    )
    made.session.gpu = GpuMemory(CUDA, GIB, limit=False)
    with made:
        yield made


def test_peaks_of_the_allocator_are_beside_the_counters(trainer: gems.Trainer) -> None:
    trainer.step(torch.randn(1, 4, 64, 64), torch.randn(1, 4, 64, 64))
    assert trainer.allocator_peak == (3 * GIB, 9 * GIB)
    timeline = trainer.timeline()
    assert timeline.allocator == ((3 * GIB, 9 * GIB),)
    head, _, row = report(timeline).splitlines()[1:4]
    assert head.split()[-2:] == ["allocated", "reserved"]
    assert row.endswith("3.0 GiB   9.0 GiB")
    assert from_json(Timeline, to_json(timeline)) == timeline
    assert not list(timeline_problems(timeline))
    wrong = replace(timeline, allocator=((1, 1), (1, 1)))
    assert list(timeline_problems(wrong)) == ["allocator has 2 rows for 1 ranks"]


def test_a_trainer_plans_for_its_devices_and_leaves_out_what_is_reserved(
    gpu: FakeGpu, monkeypatch: Patch
) -> None:
    asked: list[Any] = []

    def machine_of(*given: Any) -> Machine:
        asked.append(given)
        return RESERVING

    def on_gpu(device: torch.device, *given: Any, **more: Any) -> GpuMemory:
        return GpuMemory(CUDA, *given, **more)

    monkeypatch.setattr("gems.torch.distributed_model.machine_on", machine_of)
    monkeypatch.setattr("gems.torch.distributed_model.GpuMemory", on_gpu)
    options: dict[str, Any] = {"device": "cpu", "memory": "2GiB", "limit_memory": True}
    with gems.Trainer(small(), None, None, SAMPLE, Plan(), **options) as made:
        assert made.machine == RESERVING
        assert asked == [("auto", made.device, made.transport)]
        assert (gpu.limits, gpu.resets) == ([2 * GIB - CONTEXT], 1)
    assert gpu.limits[1:] == [40 * GIB]


def test_a_cpu_has_no_allocator_peak() -> None:
    assert GpuMemory(CPU, None, limit=False).peak() is None


def told(error: BaseException) -> str:
    """Its message and its notes, which Python 3.10 joins."""
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


@pytest.mark.parametrize("fragmented", [True, False])
def test_a_full_gpu_is_explained(
    fragmented: bool, trainer: gems.Trainer, gpu: FakeGpu, monkeypatch: Patch
) -> None:
    gpu.used = 2 * GIB if fragmented else 8 * GIB

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.session.adapter, "forward", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.step(torch.randn(1, 4, 64, 64), torch.randn(1, 4, 64, 64))
    notes = told(caught.value)
    assert "rank 0 on cuda:0: GEMS counts" in notes and "(budget 1.0 GiB)" in notes
    assert "8.0 GiB reserved; 30.0 GiB of the GPU are free" in notes
    assert ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in notes) == fragmented
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.step(torch.randn(1, 4, 64, 64), torch.randn(1, 4, 64, 64))
    assert "expandable_segments" not in told(caught.value)


def test_a_hard_limit_is_the_budget_without_what_is_reserved(gpu: FakeGpu) -> None:
    limited = GpuMemory(CUDA, 16 * GIB, limit=True)
    limited.begin(3 * GIB)
    assert (gpu.limits, gpu.resets) == ([13 * GIB], 1)
    limited.end()
    assert gpu.limits == [13 * GIB, 40 * GIB]
    with pytest.raises(PlanError, match=r"16.0 GiB leaves nothing.* take 16.0 GiB"):
        limited.begin(16 * GIB)
    unlimited = GpuMemory(CUDA, 16 * GIB, limit=False)
    unlimited.begin(0)
    unlimited.end()
    assert (len(gpu.limits), gpu.resets) == (2, 2)


def test_a_hard_limit_needs_a_gpu_and_a_budget() -> None:
    with pytest.raises(PlanError, match="the device is cpu"):
        gems.Trainer(small(), None, None, SAMPLE, Plan(), memory="1GiB", device="cpu",
                     limit_memory=True)  # fmt: skip
    with pytest.raises(PlanError, match="memory is not given"):
        GpuMemory(CUDA, None, limit=True)
