"""From a model to its Graph: recorded calls, grouped into the blocks that are never cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.errors import TraceError
from gems.model.graph import Block, Graph
from gems.torch.tracing.calls import Attr, Call, Record, Ref, is_placeholder
from gems.torch.tracing.keras_module import is_keras, keras_module
from gems.torch.tracing.record import record


@dataclass(frozen=True)
class Trace:
    """A graph, and the recorded calls behind each of its blocks."""

    graph: Graph
    record: Record
    runs: tuple[tuple[int, int], ...]  # first and last call of each block

    def calls(self, block: int) -> list[Call]:
        first, last = self.runs[block]
        return self.record.calls[first : last + 1]


def as_module(model: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, tuple[str, ...]]:
    """The model as one module, and the children to take whole if it came as a list of stages."""
    if is_keras(model):
        return keras_module(model), ()
    if isinstance(model, nn.Module):
        return model, ()
    stages = list(model)
    if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
        raise TraceError(
            "a model is an nn.Module or a list of them, one per stage; got "
            f"{[type(stage).__name__ for stage in stages]}"
        )
    return nn.Sequential(*stages), tuple(str(i) for i in range(len(stages)))


def as_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What forward is called with: a tensor, a tuple of arguments, or a dict of named ones."""
    if isinstance(sample, dict):
        return (), dict(sample)
    return (tuple(sample), {}) if isinstance(sample, (tuple, list)) else ((sample,), {})


def trace(
    model: nn.Module | Sequence[nn.Module],
    sample: Any,
    *,
    device: torch.device | str = "cpu",
    leaves: tuple[str, ...] = (),
    twice: bool = False,
) -> Trace:
    """Record `model` as it is now (training or not, autocast or not) on inputs like `sample`.

    `leaves` are modules to take whole. `twice` records again and compares, to catch a forward
    that does not do the same every time.
    """
    module, whole = as_module(model)
    args, kwargs = as_arguments(sample)
    with uncompiled(module):
        first = record(module, args, kwargs, device=device, leaves=(*whole, *leaves))
        again = record(module, args, kwargs, device=device, leaves=first.leaves) if twice else None
        if again is not None and not _same_calls(first, again):
            raise TraceError(
                f"two runs of {type(module).__name__}.forward made different calls, so it uses "
                "random numbers of Python or numpy, or remembers earlier runs; draw with torch "
                "instead, so that the same layers run for every sample"
            )
    return Trace(*_graph(first))


def is_optimized(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile(module)` gives. Its class takes seconds to import."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("torch._dynamo.eval_frame", "OptimizedModule")


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """With modules that came compiled calling what was compiled, whose calls can be recorded."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        mine = vars(module)
        if is_optimized(module):
            found.append((mine, "forward", mine["forward"]))
            mine["forward"] = module._orig_mod.__call__  # type: ignore[operator]
        if mine.get("_compiled_call_impl") is not None:  # by module.compile()
            found.append((mine, "_compiled_call_impl", mine["_compiled_call_impl"]))
            mine["_compiled_call_impl"] = None
    try:
        yield
    finally:
        for mine, key, value in found:
            mine[key] = value


def _same_calls(a: Record, b: Record) -> bool:
    """Whether both made the same calls with the same arguments, objects aside."""
    plain = (Ref, Attr, int, float, complex, str, type(None))

    def spelled(call: Call) -> tuple[Any, ...]:
        leaves = pytree.tree_leaves((call.args, call.kwargs), is_leaf=is_placeholder)
        return call.name, call.reads, [x if isinstance(x, plain) else type(x) for x in leaves]

    return list(map(spelled, a.calls)) == list(map(spelled, b.calls))


def _graph(record: Record) -> tuple[Graph, Record, tuple[tuple[int, int], ...]]:
    runs = _runs(len(record.calls), [*record.atomic, *_hooked(record.calls)])
    storages: dict[int, int] = {}
    blocks = tuple(_block(record, record.calls[a : b + 1], storages) for a, b in runs)
    values = (
        replace(value, storage=storages.setdefault(record.storages[name], len(storages)))
        for name, value in record.values.items()
    )
    graph = Graph(
        blocks=blocks,
        values=tuple(values),
        inputs=record.inputs,
        outputs=record.outputs,
        parameters=tuple(record.parameters.values()),
        buffers=tuple(record.buffers.values()),
    )
    return graph, record, tuple(runs)


def _hooked(calls: Sequence[Call]) -> Iterator[tuple[int, int]]:
    """From each call to the hooks on its results: all of a gradient is only there where its tensor
    was made."""
    maker = {name: i for i, call in enumerate(calls) for name in call.writes}
    for j, call in enumerate(calls):
        if call.function is torch.Tensor.register_hook:
            yield from ((maker[name], j) for name in call.reads if name in maker)


def _runs(count: int, atomic: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Every call by itself, but for the runs that may not be cut; overlapping runs are one."""
    last = list(range(count))
    for a, b in atomic:
        for i in range(a, b + 1):
            last[i] = max(last[i], b)
    runs: list[tuple[int, int]] = []
    start = 0
    while start < count:
        stop = last[start]
        at = start
        while at <= stop:
            stop = max(stop, last[at])
            at += 1
        runs.append((start, stop))
        start = stop + 1
    return runs


def _block(record: Record, calls: list[Call], storages: dict[int, int]) -> Block:
    writes = dict.fromkeys(name for call in calls for name in call.writes)
    reads = dict.fromkeys(n for call in calls for n in call.reads if n not in writes)
    attrs = dict.fromkeys(name for call in calls for name in call.attrs)
    saves = {storages.setdefault(s, len(storages)): n for c in calls for s, n in c.saves.items()}
    return Block(
        name=calls[0].name,
        layer=calls[0].layer,
        reads=tuple(reads),
        writes=tuple(writes),
        parameters=tuple(name for name in attrs if name in record.parameters),
        buffers=tuple(name for name in attrs if name in record.buffers),
        mutates=tuple(
            dict.fromkeys(n for call in calls for n in call.overwrites if n not in writes)
        ),
        saves=tuple(sorted(saves.items())),
        flops=sum(call.flops for call in calls),
        moved=sum(call.moved for call in calls),
    )
