"""What is put away comes back bit for bit, from the host's memory or from disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gems.errors import GemsError, PlanError
from gems.plans.offload import offload_of, place_of
from gems.plans.plan import Plan
from gems.torch.offload.arena import SEGMENT, Arena
from gems.torch.offload.stores import DiskStore, make_store

CPU = torch.device("cpu")
each_place = pytest.mark.parametrize("place", ["host", "disk"])


@each_place
def test_bytes_come_back_as_they_went(place: str, tmp_path: Path) -> None:
    home = make_store(place, CPU, tmp_path)
    given = [torch.randn(3, 5), torch.arange(7), torch.zeros(0), torch.tensor(True)]
    slots = [home.slot(x.nbytes) for x in given]
    for handle in [slot.write(x) for slot, x in zip(slots, given, strict=True)]:
        handle.wait()
    assert home.used == sum(x.nbytes for x in given)
    back = [torch.empty_like(x) for x in given]
    for handle in [slot.read(x) for slot, x in zip(slots, back, strict=True)]:
        handle.wait()
    assert all(map(torch.equal, given, back))
    home.close()


@each_place
def test_a_slot_gives_what_was_written_last(place: str, tmp_path: Path) -> None:
    home = make_store(place, CPU, tmp_path)
    slot, into = home.slot(8), torch.zeros(1, dtype=torch.float64)
    handles = [slot.write(torch.full((1,), float(n), dtype=torch.float64)) for n in range(3)]
    handles.append(slot.read(into))
    for handle in handles:
        handle.wait()
    assert into.item() == 2
    home.close()


@each_place
def test_room_that_was_freed_is_used_again(place: str, tmp_path: Path) -> None:
    home = make_store(place, CPU, tmp_path)
    for _ in range(5):
        slot = home.slot(1000)
        slot.write(torch.ones(250)).wait()
        slot.free()
    assert home.used == 0
    if isinstance(home, DiskStore):
        assert os.fstat(home.file.fileno()).st_size == 1000
    home.close()


def test_an_arena_gives_the_smallest_span_that_fits_and_joins_what_is_given_back() -> None:
    arena = Arena(pinned=False)
    taken = [arena.take(size) for size in (1000, 3 << 20, 512)]
    assert [len(memory) for _, memory in taken] == [1000, 3 << 20, 512]
    assert arena.size == SEGMENT + (3 << 20)  # small ones share a segment, a large one has its own
    for _, memory in taken:
        memory.fill_(1)
    for span, _ in taken:
        arena.give(span)
    assert sorted(span.size for span in arena.free) == [SEGMENT, 3 << 20]
    assert arena.take(2 << 20)[0].segment == 1 and arena.size == SEGMENT + (3 << 20)


def test_the_file_has_no_name(tmp_path: Path) -> None:
    home = DiskStore(CPU, tmp_path)
    home.slot(4).write(torch.ones(1)).wait()
    assert list(tmp_path.iterdir()) == []
    home.close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(GemsError, match=r"nowhere.*another folder"):
        DiskStore(CPU, tmp_path / "nowhere")


def test_reading_what_was_never_written_is_an_error(tmp_path: Path) -> None:
    home = DiskStore(CPU, tmp_path)
    with pytest.raises(GemsError, match="are missing"):
        home.slot(8).read(torch.zeros(1, dtype=torch.float64)).wait()
    home.close()


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("", ()),
        ("activations", ("activations:host",)),
        ("optimizer,activations:disk", ("activations:disk", "optimizer:host")),
        (["weights:disk"], ("weights:disk", "optimizer:disk")),
        ({"activations": "disk"}, ("activations:disk",)),
    ],
)
def test_a_plan_says_what_goes_where(said: object, meant: tuple[str, ...]) -> None:
    assert offload_of(said) == meant  # type: ignore[arg-type]
    assert offload_of(offload_of(said)) == meant  # type: ignore[arg-type]
    plan = Plan(offload=said)  # type: ignore[arg-type]
    assert plan.offload == meant
    assert place_of(meant, "gradients") == ""


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("activations:moon", "'moon'; choose one of host, disk"),
        ("gradients", "'gradients'; choose from activations, values, weights, optimizer"),
        ("weights:disk,optimizer:host", "give both one place"),
    ],
)
def test_a_plan_refuses_what_cannot_be_put_away(said: str, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        Plan(offload=said)  # type: ignore[arg-type]
