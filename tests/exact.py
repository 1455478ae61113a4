"""Training twice, plainly and under a plan, and what must be equal. Not a test itself."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

from gems.geometry.box import split_points
from gems.plans.plan import Plan
from gems.torch.tensors.rng import _lock
from gems.torch.tracing.calls import Call, Record
from gems.torch.tracing.record import record
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run

TOLERANCE = 1e-10
Build = Callable[[], nn.Module]


@dataclass
class Outcome:
    """Losses of each step, gradients of each, and the state at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    timeline: Any = None
    updated: list[bool] = field(default_factory=list)


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Around weights that a rank draws: ranks that are threads share torch's generator."""
    with _lock:
        torch.random.manual_seed(seed)
        yield


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=1e-3)


def batches(shape: tuple[int, ...], classes: int, steps: int, dtype: torch.dtype) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(shape, generator=draw, dtype=dtype),
            torch.randint(classes, shape[:1], generator=draw),
        )
        for _ in range(steps)
    ]


def samples_in(inputs: Any) -> int:
    return pytree.tree_leaves(inputs)[0].shape[0]


def part(tree: Any, start: int, stop: int) -> Any:
    """Some samples of all tensors of a batch."""
    return pytree.tree_map(lambda x: x[start:stop], tree)


def micro_batches(inputs: Any, targets: Any, count: int) -> Iterator[tuple[Any, Any, float]]:
    """Inputs, targets and share of samples of each micro-batch that has any."""
    samples = samples_in(inputs)
    for a, b in pairwise(split_points(samples, count)):
        if a < b:
            yield part(inputs, a, b), part(targets, a, b), (b - a) / samples


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def plainly(
    model: nn.Module,
    data: list[Any],
    count: int,
    loss: Any = cross_entropy,
    make: Any = sgd,
    clip: float | None = None,
) -> Outcome:
    """The oracle: one process, one micro-batch after the other, gradients averaged over samples."""
    model = copy.deepcopy(model).train()
    optimizer = make(model.parameters())
    found = Outcome()
    for inputs, targets in data:
        total = 0.0
        for x, y, share in micro_batches(inputs, targets, count):
            value = loss(call(model, x), y) * share
            if value.requires_grad:
                value.backward()
            total += float(value.detach())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        found.losses.append(total)
        found.gradients.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    found.state = model.state_dict()
    return found


def trained(
    transport: Transport,
    model: nn.Module,
    data: list[Any],
    plan: Plan,
    loss: Any = cross_entropy,
    make: Any = sgd,
    **options: Any,
) -> Outcome:
    """What one rank sees of training under a plan."""
    inputs = data[0][0]
    sample = part(inputs, 0, -(-samples_in(inputs) // plan.total))
    seen: list[Any] = []
    trainer = Trainer(
        model, loss, _watched(seen, make), sample, plan, transport=transport, **options
    )
    found = Outcome()
    for inputs, targets in data:
        step = trainer.step(inputs, targets)
        found.losses.append(step.loss)
        found.updated.append(step.updated)
        if step.updated:
            found.gradients.append(dict(zip(_names(trainer), seen.pop(), strict=True)))
    found.state, found.timeline = trainer.state_dict(), trainer.timeline()
    return found


def planned(model: nn.Module, data: list[Any], plan: Plan, *args: Any, **options: Any) -> Outcome:
    """The same under a plan, with ranks as threads; what all ranks agreed on, joined."""

    def work(transport: Transport) -> Outcome:
        return trained(transport, copy.deepcopy(model), data, plan, *args, **options)

    with mock.patch("gems.torch.tracing.trace.record", Recordings()):
        return join(run(plan.world, work))


class Recordings:
    """Records for all ranks at once: they have copies of one model, and recording takes longest.

    Ranks that are processes (test_processes.py) each record for themselves.
    """

    def __init__(self) -> None:
        self.lock, self.made = threading.Lock(), {}

    def __call__(self, model: nn.Module, args: Any, kwargs: Any, **options: Any) -> Record:
        key = repr(
            (
                [_form(x) for x in pytree.tree_leaves((args, kwargs))],
                [m.training for m in model.modules()],
                [p.requires_grad for p in model.parameters()],
                (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), options),
            )
        )
        with self.lock:
            if key not in self.made:
                self.made[key] = record(model, args, kwargs, **options)
            elif any(map(_holds_a_model, self.made[key].calls)):
                return record(model, args, kwargs, **options)
            return self.made[key]


def _holds_a_model(call: Call) -> bool:
    """Whether a call is of one rank's model: it assigns a buffer there."""
    return any(isinstance(x, nn.Module) for x in pytree.tree_leaves((call.args, call.kwargs)))


def _form(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.shape, x.stride(), x.dtype, x.requires_grad


def alone(
    model: nn.Module, data: list[Any], micro_batches: int, *args: Any, **options: Any
) -> Outcome:
    """On one rank: the oracle where random numbers are drawn, since only GEMS keys them."""
    plan = Plan(stages=1, micro_batches=micro_batches, schedule="sequential")
    return planned(model, data, plan, *args, **options)


def join(outcomes: list[Outcome]) -> Outcome:
    """One outcome out of all ranks'; what several ranks have must be the same bits on all."""
    first = outcomes[0]
    for other in outcomes[1:]:
        assert other.losses == first.losses
        assert other.updated == first.updated
        assert other.state.keys() == first.state.keys()
        for key in first.state:
            assert torch.equal(other.state[key], first.state[key]), key
        for mine, theirs in zip(first.gradients, other.gradients, strict=True):
            for name, gradient in theirs.items():
                if name in mine:
                    assert (gradient is None) == (mine[name] is None), name
                    assert gradient is None or torch.equal(gradient, mine[name]), name
                mine[name] = gradient
    return first


def assert_equal(found: Outcome, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    for mine, theirs in zip(found.losses, expected.losses, strict=True):
        assert abs(mine - theirs) <= tolerance * max(1.0, abs(theirs)), (mine, theirs)
    for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert (mine[name] is None) == (gradient is None), f"{name}: one has no gradient"
            if gradient is not None:
                close(name, mine[name], gradient, tolerance)
    same_state(found.state, expected.state, tolerance)


def same_state(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        close(name, found[name], tensor, tolerance)


def close(name: str, mine: Any, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert mine.shape == theirs.shape, name
    assert mine.dtype == theirs.dtype, name
    difference = (mine.double() - theirs.double()).abs().max().item() if mine.numel() else 0.0
    size = theirs.double().abs().max().item() if theirs.numel() else 0.0
    assert difference <= tolerance * max(1.0, size), (
        f"{name}: off by {difference:.3g} of {size:.3g}"
    )


def _watched(seen: list[Any], make: Any) -> Any:
    """An optimizer that notes the gradients it is given."""

    def build(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        optimizer = make(parameters)
        plain = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            real = [p for p in parameters if p.numel()]
            seen.append([None if p.grad is None else p.grad.clone() for p in real])
            return plain(*args, **kwargs)

        optimizer.step = step
        return optimizer

    return build


def _names(trainer: Trainer) -> list[str]:
    return [name for name, p in trainer.session.weights.named_parameters().items() if p.numel()]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
