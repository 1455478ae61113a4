"""Trainable parameters of the loss: they belong to the last stage, which runs it.

A loss that is an nn.Module may have parameters of its own (weights of tasks, a temperature, class
centres). They are treated like those of the last stage: the optimizer is given them on the ranks
that hold it, their gradients are summed with its own, over copies, directions and tiles, they are
sharded and offloaded with it, and saved in checkpoints. Their names are those in the loss, after
`loss:`, which no name in a model has.

What else a loss may lead a gradient to is checked when it has run: a parameter of another stage is
not here, or its gradient was summed without this part, and nobody sums that of a tensor that is
neither the model's nor the loss's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gems.distributed.ownership import Ownership
from gems.errors import GemsError, PlanError, problems
from gems.plans.plan import Plan
from gems.transport.protocol import Transport

Tensor = torch.Tensor
PREFIX = "loss:"
PENALTY = (
    "For a penalty on weights use the optimizer's weight_decay, or Trainer(regularizer=...), a "
    "function of (name, parameter) pairs that is summed over stages"
)


def parameters_of(loss: Any, model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters that a loss has besides the model's, by name."""
    if not isinstance(loss, nn.Module):
        return {}
    shared = {id(p) for p in model.parameters()}
    mine = {n: p for n, p in loss.named_parameters() if p.requires_grad and id(p) not in shared}
    if unmade := [name for name, p in mine.items() if p.is_meta]:
        raise PlanError(
            f"{', '.join(unmade)} of the loss is on the meta device; build the loss with real "
            "weights, also if the model is on the meta device"
        )
    return {PREFIX + name: p for name, p in mine.items()}


def with_loss(owned: Ownership, names: Iterable[str], plan: Plan) -> Ownership:
    """Who has which weights, of the loss as well."""
    last = plan.depth - 1
    names = list(names)
    return Ownership(
        owned.stages | dict.fromkeys(names, (last,)),
        owned.replica_groups | dict.fromkeys(names, tuple(sorted(plan.replica_groups[last]))),
    )


def place(
    loss: Any, parameters: Mapping[str, nn.Parameter], device: torch.device
) -> dict[str, nn.Parameter]:
    """Have these parameters on the device; with "meta", as shapes only. Gives those of now."""
    found: dict[str, nn.Parameter] = {}
    for name, p in parameters.items():
        new = p
        if p.device != device:
            new = nn.Parameter(p.detach().to(device))
        path, _, key = name.removeprefix(PREFIX).rpartition(".")
        found[name] = new
        for module in loss.modules():  # some may have it by several names
            for label, own in module._parameters.items():
                if own is p:
                    module._parameters[label] = new
        assert loss.get_submodule(path)._parameters[key] is new
    return found


def whole_loss_state(
    parameters: Mapping[str, Tensor],
    owned: Ownership,
    transport: Transport,
    copy: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """The trainable parameters of the loss, by their names in it, on every rank's host."""
    found: dict[str, Tensor] = {}
    for name, p in parameters.items():
        value = torch.zeros(p.shape, dtype=p.dtype)
        source = owned.replica_groups[name][0]
        if transport.rank == source:
            value.copy_(copy(name).detach())
        if transport.world > 1:
            transport.broadcast(value, source)
        found[name.removeprefix(PREFIX)] = value
    return found


# --- what a loss leads to -------------------------------------------------------------------------


class Leaves:
    """What the loss of this rank may lead a gradient to, and the names of what it may not."""

    def __init__(self, model: nn.Module) -> None:
        """To be made while `model` is still the user's own, before ranks keep their parts."""
        self.names: dict[int, tuple[weakref.ref[Tensor], str]] = {
            id(p): (weakref.ref(p), name) for name, p in model.named_parameters()
        }
        self.all = [name for name, _ in model.named_parameters()]
        self.allowed: set[int] = set()
        self.changing: list[tuple[str, Tensor]] = []

    def allow(
        self, weights: Mapping[str, Tensor], owned: Ownership, last: int, rank: int, loss: Any
    ) -> None:
        """`weights` are those of this rank."""
        self.missing = [name for name in self.all if name not in weights]
        for name, tensor in weights.items():
            alone = owned.replica_groups[name] == (rank,)
            if last in owned.stages[name] or alone:
                self.allowed.add(id(tensor))
            else:
                self.names[id(tensor)] = (weakref.ref(tensor), name)
        if isinstance(loss, nn.Module):
            self.changing = list(loss.named_buffers())

    def run(self, compute: Callable[[], Any], outputs: Collection[Tensor], given: Any) -> Any:
        """The loss, checked; `given` are tensors of the batch, which may want a gradient."""
        ends = {x.grad_fn for x in outputs if x.grad_fn is not None}
        before = [buffer._version for _, buffer in self.changing]
        try:
            loss = compute()
        except RuntimeError as error:
            if not isinstance(error, GemsError) and "meta" in str(error):
                raise GemsError(self._elsewhere(str(error))) from error
            raise
        self._reject_changes(before)
        if isinstance(loss, Tensor):
            if loss.is_meta:
                raise GemsError(self._elsewhere("it gives a tensor without memory"))
            if loss.requires_grad:
                self._reject_foreign(loss, ends, {id(x) for x in (*outputs, *given)})
        return loss

    def _elsewhere(self, what: str) -> str:
        return (
            f"the loss reads parameters that are not on this rank ({what}): it runs on the ranks "
            f"of the last stage, and this one does not have {self._missing()}. {PENALTY}"
        )

    def _missing(self) -> str:
        shown = ", ".join(self.missing[:3])
        return f"{shown} and {len(self.missing) - 3} more" if len(self.missing) > 3 else shown

    def _reject_changes(self, before: list[int]) -> None:
        pairs = zip(self.changing, before, strict=True)
        if changed := [name for (name, b), version in pairs if b._version != version]:
            raise GemsError(
                f"the loss changes its buffers {', '.join(changed)} in forward, which GEMS neither "
                "sums over ranks nor saves. Keep what changes in the model, e.g. as a layer that "
                "gives an output of its own, or set the loss to evaluation mode"
            )

    def _reject_foreign(self, loss: Tensor, ends: set[Any], given: set[int]) -> None:
        found = []
        for leaf in _leaves(loss, ends):
            if id(leaf) in self.allowed or id(leaf) in given:
                continue
            ref, name = self.names.get(id(leaf), (None, ""))
            if ref is not None and ref() is leaf:
                found.append(f"{name} of the model")
            else:
                found.append(f"a trainable tensor of shape {tuple(leaf.shape)}")
        if found:
            raise GemsError(
                problems(
                    "the loss has a gradient for what is not the last stage's, so that it would be "
                    f"lost, or summed over the wrong ranks. {PENALTY}; trainable weights of the "
                    "loss are parameters of a loss that is an nn.Module. It leads to:",
                    found,
                )
            )


def _leaves(loss: Tensor, ends: set[Any]) -> list[Tensor]:
    """The tensors that a gradient of the loss is added up in, but for those behind `ends`."""
    if loss.grad_fn is None:
        return [loss]
    seen, left, found = set(ends), [loss.grad_fn], []
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            found.append(variable)
        left += [after for after, _ in node.next_functions if after is not None]
    return found
