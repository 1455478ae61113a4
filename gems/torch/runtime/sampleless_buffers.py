"""Buffers that forward changes, but no sample does: each replica makes all changes of the step.

Spectral norm takes a step of its power iteration in every forward, and a counter in a buffer counts
forwards. Such a change depends on weights and buffers alone, so a replica that sees some of the
micro-batches can make the changes of the others, too, and come out the same:

    micro-batch     0      1      2      3          s_q: the buffers when micro-batch q begins
    replica 0       s_0    s_1                 s_4
    replica 1                     s_2    s_3   s_4  at the end of the step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from gems.errors import PlanError
from gems.torch.runtime.activation_checkpoint import Buffer
from gems.torch.runtime.codegen import write
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Call, Record

Update = Callable[[], Any]


def free_buffers(record: Record, model: nn.Module) -> set[str]:
    """The buffers that forward changes in a way that depends on no sample and no chance."""
    touched = {n for c in record.calls for n in c.touches if n in record.buffers}
    bound: set[str] = set()
    while True:  # a buffer that samples change makes what is computed from it depend on them
        free = {id(call) for call in _free_calls(record, model, bound)}
        now = {n for c in record.calls if id(c) not in free for n in c.touches if n in touched}
        if now <= bound:
            return touched - bound
        bound |= now


def _free_calls(record: Record, model: nn.Module, bound: set[str]) -> list[Call]:
    depends, found = set(record.inputs), []
    for call in record.calls:
        fixed = not (call.random or bound.intersection(call.attrs))
        if call.module is not None:
            if fixed and _power_iterations(model, call):
                found.append(call)
            depends.update(call.writes)
        elif fixed and depends.isdisjoint(call.reads):
            found.append(call)
        else:
            depends.update(call.writes)
    return found


def _power_iterations(model: nn.Module, call: Call) -> list[Update]:
    """Spectral norm in a leaf: what takes a step of it; none if the leaf changes anything else."""
    assert call.module is not None
    module = model.get_submodule(call.module)
    updates: list[Update] = []
    names: set[str] = set()
    prefix = f"{call.module}." if call.module else ""
    for key, each in getattr(module, "parametrizations", {}).items():
        kinds = (parametrizations._SpectralNorm,)
        for number, one in enumerate(each):
            if isinstance(one, kinds):
                updates.append(each)
                inner = f"{prefix}parametrizations.{key}.{number}."
                names |= {f"{inner}_u", f"{inner}_v"}
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            updates.append(lambda hook=hook: hook(module, None))
            names |= {f"{prefix}{hook.name}_u", f"{prefix}{hook.name}_v"}
    return updates if set(call.touches) <= names else []


class Advance:
    """The free buffers of a stage on one rank during one step of n micro-batches."""

    def __init__(
        self, record: Record, model: nn.Module, calls: Sequence[Call], free: set[str], draws: Draws,
        micro_batches: int,
    ) -> None:  # fmt: skip
        mine = [call for call in calls if free.intersection(call.touches)]
        names = dict.fromkeys(n for call in mine for n in call.touches)
        self.names, self.n = tuple(names), micro_batches
        self.buffers: list[Buffer] = []
        for name in self.names:
            path, _, key = name.rpartition(".")
            self.buffers.append((model.get_submodule(path), key))
        self.updates = [
            u for c in mine if c.module is not None for u in _power_iterations(model, c)
        ]
        self.updates += _program(record, model, calls, mine, draws)
        self.states: list[list[torch.Tensor]] = []

    def begin(self, position: int) -> None:
        """Have the buffers as they are when this micro-batch begins."""
        self.prepare()
        self._install(self.states[position])

    def finish(self) -> None:
        self.prepare()
        self._install(self.states[self.n])

    def prepare(self) -> None:
        """Compute what the buffers will be, all at once: weights may be gone later."""
        if not self.states:
            with torch.no_grad():
                self.states.append(self._now())
                for _ in range(self.n):
                    for update in self.updates:
                        update()
                    self.states.append(self._now())

    def _now(self) -> list[torch.Tensor]:
        return [module._buffers[key].detach().clone() for module, key in self.buffers]  # type: ignore

    def _install(self, values: list[torch.Tensor]) -> None:
        for (module, key), value in zip(self.buffers, values, strict=True):
            module._buffers[key] = value.clone()


def _program(
    record: Record, model: nn.Module, calls: Sequence[Call], mine: list[Call], draws: Draws
) -> list[Update]:
    """The recorded calls that make the changes, and those that they are computed by."""
    wanted = {id(call) for call in mine if call.module is None}
    if not wanted:
        return []
    read: set[str] = set()
    chosen = []
    for call in reversed(calls):
        if id(call) in wanted or read.intersection(call.writes):
            read.update(call.reads)
            chosen.append(call)
    program = write(record, model, chosen[::-1], (), draws)
    if program.inputs:
        raise PlanError(
            f"{', '.join(n for c in mine for n in c.touches)} is changed on several ranks, from "
            f"{', '.join(program.inputs)} of another stage; put the blocks into one stage"
        )
    return [program.run]
