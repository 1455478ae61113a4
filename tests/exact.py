"""Training twice, plainly and under a plan, and what must be equal. Not a test itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gems.geometry import cuts
from gems.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.local import run

TOLERANCE = 1e-10
Build = Callable[[], nn.Module]


@dataclass
class Outcome:
    """Losses of each step, gradients of each, and the state at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    timeline: Any = None


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


def plainly(
    model: nn.Module, data: list[Any], micro_batches: int, loss: Any = cross_entropy
) -> Outcome:
    """The oracle: one process, one micro-batch after the other, gradients averaged over samples."""
    model = copy.deepcopy(model).train()
    optimizer = sgd(model.parameters())
    found = Outcome()
    for images, labels in data:
        samples, total = len(images), 0.0
        points = cuts(samples, micro_batches)
        for a, b in pairwise(points):
            if a < b:
                part = loss(model(images[a:b]), labels[a:b]) * (b - a) / samples
                part.backward()
                total += float(part.detach())
        found.losses.append(total)
        found.gradients.append(_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    found.state = model.state_dict()
    return found


def planned(
    model: nn.Module, data: list[Any], plan: Plan, loss: Any = cross_entropy, **options: Any
) -> Outcome:
    """The same under a plan, with ranks as threads; what all ranks agreed on, joined."""
    sample = data[0][0][: -(-len(data[0][0]) // plan.total)]

    def work(transport: Any) -> Outcome:
        mine = copy.deepcopy(model)
        trainer = Trainer(
            mine, loss, _watched(seen := [], sgd), sample, plan, transport=transport, **options
        )
        found = Outcome()
        for images, labels in data:
            found.losses.append(trainer.step(images, labels).loss)
            found.gradients.append(dict(zip(_names(trainer), seen.pop(), strict=True)))
        found.state, found.timeline = trainer.state_dict(), trainer.timeline()
        return found

    return join(run(plan.world, work))


def join(outcomes: list[Outcome]) -> Outcome:
    """One outcome out of all ranks'; what several ranks have must be the same bits on all."""
    first = outcomes[0]
    for other in outcomes[1:]:
        assert other.losses == first.losses
        assert other.state.keys() == first.state.keys()
        assert all(torch.equal(other.state[k], first.state[k]) for k in first.state)
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
                _close(name, mine[name], gradient, tolerance)
    assert found.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        _close(name, found.state[name], tensor, tolerance)


def _close(name: str, mine: Any, theirs: torch.Tensor, tolerance: float) -> None:
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
    return [name for name, p in trainer._named_parameters() if p.numel()]


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
