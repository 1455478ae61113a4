"""Images and weights in any memory format, kept from end to end, under optimizers that walk through
memory: the plain numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gems.errors import PeerError, PlanError
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests.exact import batches, micro_batches, plainly, same_state
from tests.test_zero import assert_same, planned

PLANS = {
    "pipeline": Plan(stages=2, micro_batches=2),
    "gems": Plan(stages=2, schedule="gems", replications=1),
    "copies": Plan(stages=1, micro_batches=1, data=2),
    "copies, zero 1": Plan(stages=1, micro_batches=1, data=2, zero=1),
    "copies, zero 3": Plan(stages=1, micro_batches=1, data=2, zero=3),
    "tiles": Plan(stages=1, spatial=["1x2"], micro_batches=2),
    "weights on the host": Plan(stages=2, schedule="gems", offload=("weights:host",)),
}
CUT: tuple[tuple[str, ...], ...] = (("a", "relu", "b"), ("n", "c", "relu:2", "pool", "d", "last"))
MORE = {
    "one rank": Plan(stages=1, micro_batches=2),
    "copies, zero 2": Plan(stages=1, micro_batches=2, data=2, zero=2),
    "zero bubble": Plan(stages=2, micro_batches=2, schedule="zero-bubble"),
    "recomputed": Plan(stages=2, micro_batches=2, recompute="always"),
    "2x2 tiles, two stages": Plan(stages=2, spatial=["2x2"], micro_batches=2),
    "fused halos": Plan(stages=1, spatial=["1x2"], micro_batches=2, halo="d2"),
    "streamed": Plan(stages=CUT, stream=[(2, 2)], micro_batches=2),
    "activations on the host": Plan(
        stages=2, micro_batches=4, schedule="gpipe", offload=("activations:host",)
    ),
}
OPTIMIZERS = {
    f"{kind.__name__}, {way}": (kind, {way: True, "lr": 0.05, **options})
    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adagrad, {}),
    )
    for way in ("foreach", "fused")
}


class Tied(nn.Module):
    """A convolution that is used at the beginning and at the end, hence in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        x = self.norm(self.twice(self.stem(x)).relu())
        return self.head(self.twice(x).mean((2, 3)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_channels_last_weights_train_as_plainly(plan: str, optimizer: str) -> None:
    """Story: summed gradients came back row by row, whatever the weight's format was, and fused
    optimizers paired the wrong cells."""
    kind, options = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    model = Tied().double().to(memory_format=torch.channels_last)
    make = lambda p: kind(p, **options)  # noqa: E731
    data = batches((4, 3, 8, 8), 5, 3, torch.float64)
    found = planned(model, data, PLANS[plan], make=make)
    assert_same(found, plainly(model, data, PLANS[plan].total, make=make))


RELOADED = {
    "from one rank to a pipeline": (Plan(stages=1), Plan(stages=2, micro_batches=2)),
    "from a pipeline to one rank": (Plan(stages=2, micro_batches=2), Plan(stages=1)),
    "to sharded state": (Plan(stages=1), Plan(stages=1, data=2, zero=1)),
    "to weights on the host": (Plan(stages=1), Plan(stages=2, offload=("weights:host",))),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plans", RELOADED)
def test_channels_last_weights_train_on_as_plainly_after_loading(
    plans: str, optimizer: str, tmp_path: Path
) -> None:
    """Story: loaded state was row by row, whatever the weight's format was."""
    kind, options = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    model = Tied().double().to(memory_format=torch.channels_last)
    make = lambda p: kind(p, **options)  # noqa: E731
    data = batches((4, 3, 8, 8), 5, 4, torch.float64)
    before, after = RELOADED[plans]
    counts = [before.total] * 2 + [after.total] * 2
    plain = copy.deepcopy(model)
    plainly_by = make(plain.parameters())
    for (images, labels), count in zip(data, counts, strict=True):
        for x, y, share in micro_batches(images, labels, count):
            (nn.functional.cross_entropy(plain(x), y) * share).backward()
        plainly_by.step()
        plainly_by.zero_grad()

    def part(transport: Any, plan: Plan, steps: list[Any], first: bool) -> Any:
        sample = torch.empty(4 // plan.total, 3, 8, 8, dtype=torch.float64)
        loss, mine = nn.functional.cross_entropy, copy.deepcopy(model)
        trainer = Trainer(mine, loss, make, sample, plan, transport=transport)
        if not first:
            trainer.load(tmp_path / "saved")
        for x, y in steps:
            trainer.step(x, y)
        if first:
            trainer.save(tmp_path / "saved")
        return trainer.state_dict()

    run(before.world, lambda t: part(t, before, data[:2], True))
    for state in run(after.world, lambda t: part(t, after, data[2:], False)):
        same_state(state, plain.state_dict())


# --- from end to end ------------------------------------------------------------------------------


class Pixels(nn.Module):
    """A class for each pixel; convolutions of all kinds, a norm, a pool."""

    def __init__(self, dims: int = 2) -> None:
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
        self.a, self.b = conv(3, 4, 3, padding=1), conv(4, 6, 3, stride=2, padding=1)
        self.n = (nn.BatchNorm2d, nn.BatchNorm3d)[dims - 2](6)
        self.c = conv(6, 4, 3, padding=1)
        self.pool = (nn.MaxPool2d, nn.MaxPool3d)[dims - 2](3, 1, 1)
        self.d = (nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 2](4, 4, 2, stride=2)
        self.last = conv(4, 5, 1)

    def forward(self, x: Any) -> Any:
        x = self.n(self.b(self.a(x).relu()))
        return self.last(self.d(self.pool(self.c(x).relu())))


class Convolutions(TorchDispatchMode):
    """Notes images and weights of convolutions, forward and backward, that are not in a format in
    which all values of a pixel lie side by side."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.dims, self.seen, self.others = dims, 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if "convolution" in str(func):
            for x in (*args, *pytree.tree_leaves(found)):
                # Not the gradient of the loss, which torch makes row-major in any case.
                if isinstance(x, torch.Tensor) and x.dim() == self.dims and x.shape[1] in (3, 4, 6):
                    self.seen += 1
                    if x.stride(1) != 1:
                        self.others.append((str(func), tuple(x.shape), x.stride()))
        return found


def pixels(dims: int, dtype: torch.dtype) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    size = (4, *(8,) * dims)
    return [
        (
            torch.randn(4, 3, *size[1:], generator=draw).to(dtype),
            torch.randint(5, size, generator=draw),
        )
        for _ in range(2)
    ]


def kept(
    plan: Plan, chosen: Any, precision: str = "fp32", dims: int = 2
) -> tuple[Convolutions, Any, Any]:
    """Train under a memory format; what its convolutions saw, the state, and the plain one."""
    torch.manual_seed(0)
    dtype = torch.float64 if precision == "fp32" else torch.float32
    model, data = Pixels(dims).to(dtype), pixels(dims, dtype)
    make = lambda p: torch.optim.AdamW(p, 0.05, fused=True)  # noqa: E731
    sample = torch.empty(4 // plan.total, *data[0][0].shape[1:], dtype=dtype)

    def work(transport: Any) -> Any:
        options: Any = {"precision": precision, "memory_format": chosen}
        loss, mine = nn.functional.cross_entropy, copy.deepcopy(model)
        trainer = Trainer(mine, loss, make, sample, plan, transport=transport, **options)
        with Convolutions(dims + 2) as seen:
            for x, y in data:
                trainer.step(x, y)
        trainer.predict(data[0][0])
        return seen, trainer.state_dict()

    seen, states = zip(*run(plan.world, work), strict=True)
    for one in seen[1:]:
        seen[0].seen += one.seen
        seen[0].others += one.others
    return seen[0], states[0], plainly(model, data, plan.total, make=make).state


@pytest.mark.parametrize("plan", [*PLANS, *MORE])
def test_images_and_weights_keep_the_format_they_are_asked_for(plan: str) -> None:
    """Story: halos, norms on tiles, ZeRO shards and offloaded weights were row-major, and each
    convolution on a GPU would have copied them."""
    seen, found, expected = kept((PLANS | MORE)[plan], torch.channels_last)
    same_state(found, expected)
    assert seen.seen and not seen.others


@pytest.mark.parametrize("plan", ["pipeline", "copies, zero 1", "tiles"])
def test_low_precision_keeps_the_format(plan: str) -> None:
    seen, found, expected = kept(PLANS[plan], "channels_last", "bf16")
    assert seen.seen and not seen.others
    same_state(found, expected, 0.2)


def test_volumes_have_a_format_of_their_own() -> None:
    """torch's own convolution of volumes gives row-major ones on CPUs, so weights are looked at."""
    _, found, expected = kept(PLANS["pipeline"], "channels_last_3d", dims=3)
    same_state(found, expected)
    sample = torch.empty(2, 3, 8, 8, 8)
    trainer = Trainer(Pixels(3), sample=sample, plan=Plan(), memory_format=torch.channels_last_3d)
    assert all(w.stride(1) == 1 for w in trainer.parameters() if w.dim() == 5)


@pytest.mark.parametrize("optimizer", ["SGD, foreach", "AdamW, fused"])
@pytest.mark.parametrize("plan", MORE)
def test_a_format_asked_for_trains_as_plainly_with_any_optimizer(plan: str, optimizer: str) -> None:
    kind, options = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    model, data = Pixels().double(), pixels(2, torch.float64)
    make = lambda p: kind(p, **options)  # noqa: E731
    found = planned(model, data, MORE[plan], make=make, memory_format="channels_last")
    assert_same(found, plainly(model, data, MORE[plan].total, make=make))


def test_capturable_optimizers_take_any_format() -> None:
    """torch has them for accelerators: they keep their step on the device for CUDA graphs."""
    make = lambda p: torch.optim.AdamW(p, 0.05, capturable=True)  # noqa: E731
    model, data = Pixels().double(), pixels(2, torch.float64)
    try:
        expected = plainly(model, data, 2, make=make)
    except AssertionError as error:
        pytest.skip(f"not on this device: {error}")
    assert_same(planned(model, data, PLANS["copies"], make=make), expected)


def test_a_model_without_memory_gets_the_format_when_it_is_initialised() -> None:
    with torch.device("meta"):
        model = Pixels().double()
    sample = torch.empty(2, 3, 8, 8, dtype=torch.float64)
    trainer = Trainer(model, None, None, sample, Plan(), memory_format="channels_last")
    assert all(w.stride(1) == 1 for w in trainer.parameters() if w.dim() == 4)


def test_a_format_that_does_nothing_or_is_unknown_is_rejected() -> None:
    sample = torch.empty(2, 3, 8, 8)
    with pytest.raises(PlanError, match="'channels_first' is unknown; give 'channels_last'"):
        Trainer(Pixels(), sample=sample, plan=Plan(), memory_format="channels_first")
    with pytest.raises(PlanError, match="tensors of 5 dims, and the model has no such weight"):
        Trainer(Pixels(), sample=sample, plan=Plan(), memory_format=torch.channels_last_3d)


def test_ranks_that_ask_for_different_formats_are_told() -> None:
    def work(transport: Any) -> None:
        chosen = ("channels_last", None)[transport.rank]
        sample = torch.empty(2, 3, 8, 8)
        Trainer(
            Pixels(), sample=sample, plan=PLANS["pipeline"], transport=transport,
            memory_format=chosen,
        )  # fmt: skip

    with pytest.raises(PeerError, match=r"memory format \(rank 0: torch.channels_last; rank 1: N"):
        run(2, work)
