"""Dropout by the cell: the masks of earlier versions, bit for bit, with fewer kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gems.distributed.key import key
from gems.geometry.box import Box
from gems.torch.tensors.rng import GOLDEN, MIXING, REMEMBERED, Draws, _Dropped, _rounded

Tensor = torch.Tensor
CPU = torch.device("cpu")
VIEWS = {"view", "unsqueeze", "detach", "alias", "expand"}
WHOLE = {"0": (), "1": (7,), "2": (3, 5), "3": (2, 3, 4), "4": (2, 3, 4, 5), "5": (1, 2, 3, 2, 3)}


def reference(draws: Draws, x: Tensor, p: float, shape: tuple[int, ...], box: Box) -> Tensor:
    """Dropout as it was written first, one step at a time; checkpoints resume with its masks."""
    place = torch.zeros((), dtype=torch.int64)
    for start, stop, length in zip(box.start, box.stop, shape, strict=True):
        place = (place * length).unsqueeze(-1) + torch.arange(start, stop)
    z = place.mul_(GOLDEN).add_(key(draws.seed, *draws.where, "drop"))
    for shift, factor in MIXING:
        z ^= (z >> shift) & ((1 << (64 - shift)) - 1)
        z *= factor
    z ^= (z >> 31) & ((1 << 33) - 1)
    kept = (z & ((1 << 24) - 1)).to(torch.float32).mul_(2.0**-24) >= p
    return x * kept.to(x.dtype).mul_(1 / (1 - p) if p < 1 else 0.0)


def at(step: int) -> Draws:
    draws = Draws(3, CPU)
    draws.at(step, 1)
    return draws


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", WHOLE)
def test_masks_and_results_are_the_same_bits_as_ever(rank: str, dtype: torch.dtype) -> None:
    shape = WHOLE[rank]
    inner = Box(tuple(min(1, n - 1) for n in shape), shape)
    for step, p in enumerate((0.0, 0.1, 0.3, 0.5, 0.9, 1.0)):
        draws = at(step)
        for box in (Box.whole(shape), inner):
            x = torch.randn(box.shape).to(dtype)
            mine, theirs = (
                draws.dropped(x, p, "drop", shape, box),
                reference(draws, x, p, shape, box),
            )
            assert torch.equal(bits(mine), bits(theirs)), (p, box)


def test_masks_of_many_cells_at_any_probability() -> None:
    draws, shape = at(5), (64, 4096)
    x = torch.ones(shape)
    for p in (0.2, 1 / 3, 2.0**-24, 1 - 2.0**-24, 3e-8, 0.7000001):
        box = Box.whole(shape)
        assert torch.equal(
            draws.dropped(x, p, "drop", shape, box), reference(draws, x, p, shape, box)
        )


def test_integers_and_complex_numbers_are_dropped_too() -> None:
    draws, shape = at(2), (6, 8)
    x = torch.randn(shape, dtype=torch.complex64)
    assert torch.equal(
        draws.dropped(x, 0.5, "drop", shape, Box.whole(shape)),
        reference(draws, x, 0.5, shape, Box.whole(shape)),
    )


def test_the_gradient_has_the_mask() -> None:
    draws, shape = at(4), (6, 8)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = draws.dropped(x, 0.4, "drop", shape, Box.whole(shape))
    y.backward(torch.ones_like(y))
    assert x.grad is not None and torch.equal(x.grad * x.detach(), y.detach())


class Kernels(TorchDispatchMode):
    """Counts kernels, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            self.count += 1
            leaves = pytree.tree_leaves((args, kwargs, found))
            self.bytes += sum(t.nbytes for t in leaves if isinstance(t, Tensor))
        return found


def test_dropout_runs_seventeen_kernels_and_fifteen_on_gpus() -> None:
    """33 kernels and 307 bytes per cell before; places are remembered after the first call."""
    x, draws = torch.randn(2, 8, 32, 32), at(0)

    def drop() -> Tensor:
        return draws.dropped(x, 0.3, "drop", x.shape, Box.whole(x.shape))

    drop()
    draws.at(1, 0)
    with Kernels() as kernels:
        drop()
    assert kernels.count == 17 and kernels.bytes / x.numel() < 247
    fused = lambda x, kept, scale: _Dropped.apply(x, kept, scale)  # noqa: E731
    kept = draws._kept("drop", x.shape, Box.whole(x.shape), 0.3)
    with Kernels() as kernels:
        draws._kept("drop", x.shape, Box.whole(x.shape), 0.3)
        fused(x, kept, 1 / 0.7)
    assert kernels.count == 15 and kernels.bytes / x.numel() < 228


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_way_of_gpus_gives_the_same_bits_and_saves_a_byte_per_cell(dtype: torch.dtype) -> None:
    x = torch.randn(6, 8).to(dtype).requires_grad_()
    kept, scale = torch.rand(6, 8) > 0.3, _rounded(1 / 0.7, dtype)
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.nbytes) or t, lambda t: t
    ):
        y = _Dropped.apply(x, kept, scale)
    expected = x.detach() * kept.to(dtype).mul_(scale)
    assert torch.equal(bits(y.detach()), bits(expected)) and packed == [x.numel()]
    y.backward(torch.ones_like(y))
    assert x.grad is not None and torch.equal(x.grad, kept.to(dtype).mul_(scale))


def test_places_of_few_boxes_are_remembered() -> None:
    draws = at(0)
    for width in range(1, REMEMBERED + 5):
        draws.dropped(torch.ones(width), 0.5, "drop", (width,), Box.whole((width,)))
    assert len(draws.places) == REMEMBERED
