"""Machines are plain data, and refuse to be nonsense."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from gems.errors import PlanError
from gems.files import from_json, to_json
from gems.hardware import FOLDER, MACHINES, Device, Link, Machine, machine

ROOT = Path(__file__).parent.parent


def test_presets_carry_the_constants_of_the_data_sheets() -> None:
    v100, a100 = machine("v100"), machine("a100")
    assert (v100.device.flops, v100.device.bandwidth) == (15.7e12, 900e9)
    assert (v100.link.bandwidth, v100.host_link.bandwidth) == (25e9, 12e9)
    assert v100.device.memory == 17_179_869_184
    assert (a100.device.flops, a100.device.bandwidth) == (19.5e12, 1555e9)
    assert (a100.link.bandwidth, a100.between) == (300e9, Link(25e9, 5e-6))
    assert (v100.node, a100.node, machine("h100").node) == (4, 8, 8)
    assert (v100.between, machine("cpu").between) == (Link(12.5e9, 5e-6), None)
    h100 = machine("h100")
    assert (h100.device.flops, h100.device.bandwidth) == (67e12, 3.35e12)
    assert (h100.link.bandwidth, h100.between) == (450e9, Link(50e9, 5e-6))
    assert 7e-6 <= v100.device.launch <= 10e-6


@pytest.mark.parametrize("name", MACHINES)
def test_presets_are_known_by_their_own_name_and_read_back_from_json(name: str) -> None:
    preset = machine(name)
    assert preset.name == name
    assert 0.3 <= preset.device.compute_efficiency <= 0.7
    assert 0.75 <= preset.device.memory_efficiency <= 0.8
    again = from_json(Machine, to_json(preset))
    assert (again, again.notes) == (preset, preset.notes)


def numbers(machine: Machine) -> set[str]:
    """The names of all numbers of a machine: `device.flops`, `node`."""
    found = set()
    for name, value in dataclasses.asdict(machine).items():
        if isinstance(value, dict) and name != "notes":
            found |= {f"{name}.{n}" for n, v in value.items() if not isinstance(v, str | bool)}
        elif isinstance(value, int):
            found.add(name)
    return found


@pytest.mark.parametrize("name", MACHINES)
def test_every_number_of_a_preset_has_its_source(name: str) -> None:
    preset = machine(name)
    assert set(preset.notes) == numbers(preset)


def test_presets_are_read_when_they_are_asked_for_and_once() -> None:
    code = (
        "import json, gems.hardware as m\n"
        "assert list(m.MACHINES) == ['a100', 'cpu', 'h100', 'v100'] and 'v100' in m.MACHINES\n"
        "assert m._preset.cache_info().currsize == 0\n"
        "assert m.MACHINES['v100'] is m.machine('v100')\n"
        "assert m._preset.cache_info().currsize == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- files of one's own -------------------------------------------------------------------------


def edited(path: Path, text: str, other: str) -> Path:
    """A copy of a preset's file with one thing changed."""
    file = path / "mine.json"
    original = (FOLDER / "v100.json").read_text(encoding="utf-8")
    assert text in original
    file.write_text(original.replace(text, other, 1), encoding="utf-8")
    return file


@pytest.mark.parametrize("kind", [str, Path])
def test_an_edited_copy_is_read_by_its_path(tmp_path: Path, kind: type) -> None:
    mine = machine(kind(edited(tmp_path, '"memory": 17179869184', '"memory": 32e9')))
    wanted = dataclasses.replace(machine("v100").device, memory=32_000_000_000)
    assert mine == dataclasses.replace(machine("v100"), device=wanted)
    assert isinstance(mine.device.memory, int)


@pytest.mark.parametrize(
    ("text", "other", "complaint"),
    [
        ('"flops": 15.7e12', '"flops": "15.7 TFLOPS"', "device.flops is '15.7 TFLOPS', not a num"),
        ('"flops"', '"flop"', "no field device.flop; device.flops is missing; the fields are name"),
        ('"node": 4,', "", "node does not say how many"),
        ('"node": 4', '"node": 4.5', "node is 4.5, not a whole number"),
        ('"node": 4', '"node": 0', "node is 0, not 1 device or more"),
        (
            '"flops": 15.7e12',
            '"flops": -1',
            r"device: device 'V100-SXM2-16GB' cannot be\n  - flops is -1",
        ),
        ('"link": {"bandwidth": 25e9, "latency": 5e-6}', '"link": 25e9', "link is 25.*not an obj"),
        ('"between": {"bandwidth": 12.5e9', '"between": {"bandwidth": 0', "between: a link of 0"),
        ('"notes": {', '"notes": {"x": 4,', "notes.x is 4, not a text"),
        ('"node": 4,', '"node": 4', "Expecting ',' delimiter: line 1[0-9]"),
    ],
)
def test_a_file_with_a_fault_is_answered_with_its_name_the_field_and_a_remedy(
    tmp_path: Path, text: str, other: str, complaint: str
) -> None:
    with pytest.raises(PlanError, match=complaint) as caught:
        machine(edited(tmp_path, text, other))
    assert str(caught.value).startswith(f"{tmp_path / 'mine.json'} does not describe a machine")
    assert f"begin with a copy of {FOLDER / 'v100.json'}" in str(caught.value)


# --- nodes --------------------------------------------------------------------------------------

FAST, SLOW = Link(bandwidth=100.0, latency=0.5), Link(bandwidth=10.0, latency=1.0)
TWO_NODES = Machine("toy", machine("cpu").device, FAST, FAST, node=4, between=SLOW)


@pytest.mark.parametrize(
    ("one", "other", "link"), [(0, 3, FAST), (3, 4, SLOW), (7, 4, FAST), (9, 1, SLOW), (2, 2, FAST)]
)
def test_ranks_of_one_node_have_the_link_inside_and_others_the_one_between(
    one: int, other: int, link: Link
) -> None:
    assert TWO_NODES.link_of(one, other) is link
    assert machine("cpu").link_of(one, other) is machine("cpu").link, "all in one node"


def test_an_allreduce_goes_at_the_pace_of_the_slowest_link_of_its_ranks() -> None:
    inside = TWO_NODES.allreduce_seconds(1000, (0, 1, 2, 3))
    assert inside == FAST.allreduce_seconds(1000, 4)
    for ranks in ((0, 1, 2, 4), (0, 4, 8, 12), (3, 2, 9, 1)):
        assert TWO_NODES.allreduce_seconds(1000, ranks) == SLOW.allreduce_seconds(1000, 4)
    assert TWO_NODES.allreduce_seconds(1000, (5,)) == 0
    backwards = dataclasses.replace(TWO_NODES, link=SLOW, between=FAST)
    assert backwards.allreduce_seconds(1000, (3, 4)) == FAST.allreduce_seconds(1000, 2)
    assert backwards.allreduce_seconds(1000, (2, 3, 4)) == SLOW.allreduce_seconds(1000, 3)


def test_a_machine_of_one_node_says_so_to_ranks_beyond_it() -> None:
    alone = dataclasses.replace(TWO_NODES, between=None)
    assert alone.link_of(0, 3) is FAST
    with pytest.raises(PlanError, match=r"ranks 3 and 4 are on two nodes of 4.*give it `between`"):
        alone.link_of(3, 4)


def test_an_unknown_machine_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        PlanError, match=r"no machine 'k80'; choose one of a100, cpu, h100, v100, local, or"
    ):
        machine("k80")


def test_a_message_takes_latency_and_size_over_bandwidth() -> None:
    assert Link(bandwidth=100.0, latency=0.5).seconds(300) == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [(1, 0.0), (2, 1000 / 100 + 2 * 0.5), (4, 1500 / 100 + 4 * 0.5), (8, 1750 / 100 + 6 * 0.5)],
)
def test_an_allreduce_sends_almost_twice_the_bytes(ranks: int, seconds: float) -> None:
    link = Link(bandwidth=100.0, latency=0.5)
    assert link.allreduce_seconds(1000, ranks) == pytest.approx(seconds)


def test_an_allreduce_over_nobody_is_refused() -> None:
    with pytest.raises(PlanError, match="over 0 ranks"):
        Link(bandwidth=1.0, latency=0.0).allreduce_seconds(1, 0)


def test_a_device_reports_all_its_faults_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        Device("toy", flops=0, bandwidth=-1, memory=0, launch=-1, compute_efficiency=1.5,
               memory_efficiency=0, call=-1, fp16_flops=0, bf16_flops=0, context=-1,
               communicator=-1)  # fmt: skip
    for field in dataclasses.fields(Device):
        if field.name not in ("name", "is_host"):  # which can be anything
            assert f"{field.name} is" in str(caught.value)


@pytest.mark.parametrize(("bandwidth", "latency"), [(0.0, 0.0), (1.0, -1.0), (float("nan"), 0.0)])
def test_a_link_that_cannot_be_is_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(PlanError, match="give a bandwidth above 0"):
        Link(bandwidth, latency)
