"""Machines are plain data, and refuse to be nonsense."""

from __future__ import annotations

import dataclasses

import pytest

from gems.errors import PlanError
from gems.files import from_json, to_json
from gems.machine import MACHINES, Device, Link, Machine, machine


def test_presets_carry_the_constants_of_the_data_sheets() -> None:
    v100, a100 = machine("v100"), machine("a100")
    assert (v100.device.flops, v100.device.bandwidth) == (15.7e12, 900e9)
    assert (v100.link.bandwidth, v100.host_link.bandwidth) == (25e9, 12e9)
    assert v100.device.memory == 17_179_869_184
    assert (a100.device.flops, a100.device.bandwidth) == (19.5e12, 1555e9)
    assert a100.link.bandwidth == 300e9
    assert 7e-6 <= v100.device.launch <= 10e-6


@pytest.mark.parametrize("name", MACHINES)
def test_presets_are_known_by_their_own_name_and_read_back_from_json(name: str) -> None:
    preset = machine(name)
    assert preset.name == name
    assert 0.3 <= preset.device.compute_efficiency <= 0.7
    assert 0.75 <= preset.device.memory_efficiency <= 0.8
    assert from_json(Machine, to_json(preset)) == preset


def test_an_unknown_machine_is_answered_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"no machine 'h100'; choose one of a100, cpu, v100"):
        machine("h100")


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
               memory_efficiency=0)  # fmt: skip
    for field in dataclasses.fields(Device)[1:]:
        assert f"{field.name} is" in str(caught.value)


@pytest.mark.parametrize(("bandwidth", "latency"), [(0.0, 0.0), (1.0, -1.0), (float("nan"), 0.0)])
def test_a_link_that_cannot_be_is_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(PlanError, match="give a bandwidth above 0"):
        Link(bandwidth, latency)
