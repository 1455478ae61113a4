"""What must come out: plain PyTorch, one process, over the same micro-batches. No GEMS in here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from tests.generate.cases import Case
from tests.generate.models import Net, batch, copy_of, loss
from tests.generate.optimizers import OPTIMIZERS, SCHEDULERS
from tests.generate.wraps import later

Tensor = torch.Tensor


@dataclass
class Outcome:
    """All that is compared."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    updated: list[bool] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)  # predictions and states between the steps
    state: dict[str, Tensor] = field(default_factory=dict)


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def pieces(inputs: Any, targets: Any, samples: int, count: int) -> Iterator[tuple[Any, Any, float]]:
    """Inputs, targets and share of the samples of each micro-batch that is not empty."""
    b = 0
    for i in range(count):
        a, b = b, b + samples // count + (i < samples % count)  # the larger ones first
        if a < b:
            cut = lambda x, a=a, b=b: x[a:b] if isinstance(x, Tensor) else x  # noqa: E731
            each = isinstance(targets, list) and isinstance(targets[0], dict)
            mine = targets[a:b] if each else pytree.tree_map(cut, targets)
            yield pytree.tree_map(cut, inputs), mine, (b - a) / samples


@contextmanager
def correct_norms() -> Iterator[None]:
    """torch's CPU kernel of batch norm's backward is wrong for one sample whose gradient has other
    strides than the input: with both row by row it is right."""

    def right(run: Any) -> Any:
        def norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found = run(input.contiguous(), *args, **kwargs)
            if found.requires_grad and len(found) == 1:
                found.register_hook(lambda g: torch.empty(g.shape, dtype=g.dtype).copy_(g))
            return found

        return norm

    with (
        mock.patch.object(F, "batch_norm", right(F.batch_norm)),
        mock.patch.object(F, "instance_norm", right(F.instance_norm)),
    ):
        yield


def plain(case: Case, model: nn.Module, counts: list[int], asynchronous: bool = False) -> Outcome:
    with correct_norms():
        return _plain(case, model, counts, asynchronous)


def _plain(case: Case, model: nn.Module, counts: list[int], asynchronous: bool) -> Outcome:
    """Train the plain model; `counts` are the micro-batches of each step.

    `asynchronous` is the update equation of PipeDream-2BW: batch t is run with the weights before
    the newest ones, W(t+1) = W(t) - update(gradient of batch t at W(max(t - 1, 0))).
    """
    model = copy_of(model)
    assert isinstance(model, Net)
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[case.optimizer](parameters)
    scheduler = SCHEDULERS[case.scheduler](optimizer) if case.scheduler else None
    before = [p.detach().clone() for p in parameters]
    found, window = Outcome(), 0
    for step, samples in enumerate(case.batches):
        later(model, step)
        inputs, targets = batch(model, samples, step)
        newest = [p.detach().clone() for p in parameters]
        if asynchronous:
            _put(parameters, before)
        total = 0.0
        for x, y, share in pieces(inputs, targets, samples, counts[step]):
            value = loss(call(model, x), y)
            if value.requires_grad:
                (value * share * samples).backward()  # summed over samples until the update
            total += float(value.detach()) * share
        if asynchronous:
            _put(parameters, newest)
            before = newest
        found.losses.append(total)
        window += samples
        update = (step + 1) % case.accumulate == 0
        found.updated.append(update)
        found.norms.append(None)
        if update:
            for p in parameters:
                if p.grad is not None:
                    p.grad.div_(window)
            if case.clip is not None:
                norm = nn.utils.clip_grad_norm_(parameters, case.clip)
                found.norms[-1] = float(norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            window = 0
            if case.scheduler == "plateau":
                scheduler.step(total)  # type: ignore[union-attr]
            elif scheduler is not None:
                scheduler.step()
        what = case.after[step] if step < len(case.after) else ""
        if what == "predict":
            found.seen.append(predicted(model, samples, step, counts[step]))
        elif what == "state":
            found.seen.append({k: v.clone() for k, v in model.state_dict().items()})
    found.state = model.state_dict()
    return found


def _put(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)


def predicted(model: Net, samples: int, step: int, count: int) -> Any:
    """Outputs in evaluation mode, micro-batch by micro-batch, joined."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    inputs, targets = batch(model, samples, 100 + step)
    with torch.no_grad():
        parts = [call(model, x) for x, _, _ in pieces(inputs, targets, samples, count)]
    for module, training in modes:
        module.training = training
    return pytree.tree_map(lambda *x: torch.cat(x) if isinstance(x[0], Tensor) else x[0], *parts)
