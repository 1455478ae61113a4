"""Steps under a plan beside the same steps of the plain model, or of another plan."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from gems.distributed.agree import on_all_ranks
from gems.distributed.launchers import place
from gems.distributed.ownership import Ownership
from gems.errors import PlanError
from gems.files import from_json, read_text
from gems.geometry.box import Box, split_points
from gems.plans.plan import Plan
from gems.torch.checkpoint.snapshot import take
from gems.torch.checkpoint.weight_keys import writers
from gems.torch.runtime.microbatch_loss import Loss
from gems.torch.session import Session
from gems.torch.state.full_state_dict import full_state_dict
from gems.torch.tensors.rng import Drawn
from gems.torch.tensors.strides import as_bytes
from gems.torch.trainer import Trainer
from gems.torch.verification import Outcome, Row, Verification, judge, pairs_of
from gems.transport.encoding import sendable
from gems.transport.protocol import Transport
from gems.transport.threads import run

sendable(Box, Drawn, Row, Verification)

TOLERANCE = 1e-10  # in float64
STEPS = 2
PLAIN, ONE_RANK = "the plain loop", "one rank"
MOMENTUM = "momentum_buffer"
Data = list[tuple[Any, Any]]  # inputs and targets of each step


def mean_square(output: Any, target: Any = None) -> torch.Tensor:
    """A loss for any model: of all floating-point tensors that it gives."""
    found = [x for x in pytree.tree_leaves(output) if torch.is_tensor(x) and x.is_floating_point()]
    return torch.stack([x.square().mean() for x in found]).sum()


def verify(
    model: nn.Module,
    sample: Any,
    plan: Plan | str | Path,
    *,
    against: Plan | str | Path | None = None,
    loss: Loss | None = None,
    targets: Any = None,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
    transport: Transport | None = None,
    **options: Any,
) -> Verification:
    """Train `model` in float64 for some steps under `plan` and as one device would, and compare
    losses, gradients, parameters, buffers, random numbers and bytes. `print` it for the table;
    `passed` tells whether all are equal.

    Over the launcher's ranks, which all call it and get the same result; without a launcher the
    ranks are threads of this process. `against` is another plan, which takes the place of the
    plain loop and runs on threads of rank 0. `sample` has the shapes of one micro-batch: numbers
    are drawn for floating-point inputs, others are taken as they are. `targets`, of one micro-batch
    too, are for `loss`; without one it is the mean square of the output. Options are the
    trainer's. The model that was given stays as it is.
    """
    if steps < 1:
        raise PlanError(f"steps is {steps}; at least one must be compared")
    plan, other = _read(plan), None if against is None else _read(against)
    for each in filter(None, (plan, other)):
        _reject_asynchronous(each)
    if other is not None and other.total != plan.total:
        raise PlanError(
            f"one plan has {plan.total} micro-batches per step and the other {other.total}; give "
            "both the same, so that they train on the same micro-batches"
        )
    model = copy.deepcopy(model).double().train()
    data = _batches(sample, targets, plan.total, steps)
    trial = _Trial(model, data, plan, other, mean_square if loss is None else loss, tolerance)
    if transport is None and plan.world > 1 and place() is None and not dist.is_initialized():
        return run(plan.world, lambda rank: trial.run(transport=rank, **options))[0]
    return trial.run(transport=transport, **options)


def _read(plan: Plan | str | Path) -> Plan:
    return plan if isinstance(plan, Plan) else from_json(Plan, read_text(Path(plan)))


def _reject_asynchronous(plan: Plan) -> None:
    if plan.asynchronous:
        raise PlanError(
            "schedule '2bw' does not train as one device does, it equals its own update rule; "
            "verify another schedule"
        )


def _batches(sample: Any, targets: Any, total: int, steps: int) -> Data:
    """Of all micro-batches of a step, the same on every rank."""
    draw = torch.Generator().manual_seed(0)

    def drawn(x: Any) -> Any:
        if not torch.is_tensor(x) or not x.is_floating_point():
            return repeated(x)
        shape = total * x.shape[0], *x.shape[1:]
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def repeated(x: Any) -> Any:
        if not torch.is_tensor(x):
            return x
        x = torch.zeros_like(x, device="cpu") if x.is_meta else x
        return (x.double() if x.is_floating_point() else x).repeat(total, *[1] * (x.dim() - 1))

    return [
        (pytree.tree_map(drawn, sample), pytree.tree_map(repeated, targets)) for _ in range(steps)
    ]


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9)


class _Trial:
    """A model, what it is trained on, and the plans that are compared."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        plan: Plan,
        other: Plan | None,
        loss: Loss,
        tolerance: float,
    ) -> None:
        self.model, self.data, self.plan, self.other = model, data, plan, other
        self.loss, self.tolerance = loss, tolerance
        self.before = copy.deepcopy(model.state_dict())

    def run(self, **options: Any) -> Verification:
        """On one rank; rank 0 compares, and all get the result."""
        with self._trainer(self.plan, **options) as trainer:
            found, session = self._trained(trainer), trainer.session

            def judged() -> Verification | None:
                if session.rank != 0:
                    return None
                oracle, wanted = self._oracle(found, session.device)
                return judge(found, wanted, self.before, session.plan, oracle, self.tolerance)

            result = on_all_ranks(session.transport, "verification", judged)[0]
            assert result is not None
            return result

    def _trainer(self, plan: Plan, **options: Any) -> Trainer:
        sample = _part(self.data[0][0], 0, plan.total)
        return Trainer(copy.deepcopy(self.model), self.loss, _sgd, sample, plan, **options)

    def _trained(self, trainer: Trainer) -> Outcome:
        session = trainer.session
        noted = session.runner.draws.noted = []
        losses = [trainer.step(*batch).loss for batch in self.data]
        counted, predicted = trainer.timeline(), trainer.forecast()
        draws = session.transport.all_gather_object(noted)
        return Outcome(
            losses,
            _gradients(session, self.model),
            trainer.state_dict(),
            _differing(session),
            [drawn for rank in draws for drawn in rank],
            pairs_of(*({f"rank {r}": peak.total for r, peak in enumerate(each.peaks)}
                       for each in (predicted, counted))),
            pairs_of(*({f"rank {a} to {b}": size for a, b, size in each.links}
                       for each in (predicted, counted))),
        )  # fmt: skip

    def _oracle(self, found: Outcome, device: torch.device) -> tuple[str, Outcome]:
        """Where random numbers are drawn, the plain loop draws others, and one rank the same."""
        if self.other is None and not found.draws:
            return PLAIN, self._plain(device)
        alone = Plan(stages=1, micro_batches=self.plan.total, schedule="sequential")
        plan = self.other or alone

        def work(transport: Transport) -> Outcome:
            with self._trainer(plan, transport=transport, device=device) as trainer:
                return self._trained(trainer)

        several = f"{plan.world} rank{'s' if plan.world > 1 else ''}"
        name = ONE_RANK if self.other is None else f"the other plan on {several}"
        return name, run(plan.world, work)[0]

    def _plain(self, device: torch.device) -> Outcome:
        model = copy.deepcopy(self.model).to(device)
        optimizer, losses = _sgd(model.parameters()), []
        for inputs, targets in self.data:
            optimizer.zero_grad()
            loss = 0.0
            for x, y in _parts(inputs, targets, self.plan.total):
                x, y = (pytree.tree_map(lambda t: _on(t, device), part) for part in (x, y))
                value = self.loss(_call(model, x), y) / self.plan.total
                value.backward()
                loss += float(value.detach())
            optimizer.step()
            losses.append(loss)
        moved = {
            name: optimizer.state[p].get(MOMENTUM, torch.full_like(p, math.nan))
            for name, p in model.named_parameters()
        }
        return Outcome(losses, moved, model.state_dict())


def _parts(inputs: Any, targets: Any, count: int) -> Iterator[tuple[Any, Any]]:
    for i in range(count):
        yield _part(inputs, i, count), _part(targets, i, count)


def _part(tree: Any, index: int, count: int) -> Any:
    """One of `count` micro-batches."""

    def part(x: Any) -> Any:
        if not torch.is_tensor(x):
            return x
        start, stop = list(pairwise(split_points(len(x), count)))[index]
        return x[start:stop]

    return pytree.tree_map(part, tree)


def _on(x: Any, device: torch.device) -> Any:
    return x.to(device) if torch.is_tensor(x) else x


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _gradients(session: Session, model: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's momentum of each parameter, which is the sum of its gradients, those of
    earlier steps by less: whole, whatever the plan, on every rank. NaN where it got none."""
    taken, weights = take(session, None), session.weights
    present = taken.present(session)

    def momentum(name: str) -> torch.Tensor:
        key = f"optimizer.{name}/{MOMENTUM}"
        if key in taken.tensors:
            return present[key]() if key in present else taken.tensors[key]
        own = weights.by_name[name]
        return torch.full(own.shape, math.nan, dtype=own.dtype) if name in names else own

    names = {name for name, _ in model.named_parameters()}
    part, owned = session.part, session.owned
    only = Ownership(owned.stages, {name: (rank,) for name, rank in writers(session).items()})
    found = full_state_dict(
        session.model, only, part.first_name, part.extra_state_owners, session.transport, momentum
    )
    return {name: found[name] for name, _ in model.named_parameters()}


def _differing(session: Session) -> list[str]:
    """Weights and buffers of which not all ranks that hold them have the same bits."""
    with session.weights.unsharded():
        mine = {name: _digest(session.weights.copy(name)) for name in session.weights.by_name}
    every = session.transport.all_gather_object(mine)
    groups = session.owned.replica_groups.items()
    return [name for name, ranks in groups if len({every[r].get(name) for r in ranks}) > 1]


def _digest(x: torch.Tensor) -> str:
    # A copy: memory that numpy has seen cannot be resized, and that of shards must be.
    flat = as_bytes(x.cpu().contiguous()).clone()
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
