"""The loss of a streamed last stage: its calls follow the model's in every patch.

So the model's output is never whole: each patch compares its own cells with its box of the targets,
and gives its summand of the loss. Recorded like the loss of a tiled output (tiled_loss.py), and by
the same layer rules. A loss that is not made of sums over cells gets the whole output instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from gems.errors import PlanError
from gems.geometry.layout import Layout
from gems.model.graph import Weight
from gems.torch.runtime.microbatch import signature, tensors
from gems.torch.runtime.partitioned_model import PartitionedModel
from gems.torch.runtime.streaming import Stream
from gems.torch.runtime.tiled_loss import Loss, fingerprint_of, layout_of_target, record_loss
from gems.torch.spatial.partition import CallNotTileable
from gems.torch.spatial.patch_layout import StreamLayout
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Attr, Call, Record, Ref, is_placeholder, leaves_of

log = logging.getLogger(__name__)
PREFIX = "loss:"


class _ModelAndLoss(nn.Module):
    """Finds the modules of both by path. It has none of its own."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(both=(model, loss))

    def get_submodule(self, target: str) -> nn.Module:
        model, loss = self.__dict__["both"]
        mine = target.startswith(PREFIX)
        found: nn.Module = (loss if mine else model).get_submodule(target.removeprefix(PREFIX))
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        model, loss = self.__dict__["both"]
        yield from model.named_parameters(*args, **kwargs)
        yield from ((PREFIX + name, p) for name, p in loss.named_parameters(*args, **kwargs))


@dataclass
class StreamedLoss:
    """A model's last stage with a loss, laid out over patches; `value` is the loss's name."""

    model: nn.Module
    layout: StreamLayout
    record: Record
    targets: list[str]
    value: str
    streams: dict[tuple[int, ...], Stream] = field(default_factory=dict)

    def given(self, target: Any) -> dict[str, Any]:
        """The target's tensors by name."""
        return dict(zip(self.targets, tensors(target), strict=True))


Known = dict[Any, tuple[Any, StreamedLoss | None]]  # by signature: fingerprint, and what came of it


def prepare(
    loss: Loss, partitioned: PartitionedModel, model: nn.Module, target: Any, draws: Draws,
    known: Known,
) -> StreamedLoss | None:  # fmt: skip
    """The last stage with the loss for targets like this; None if it needs the whole output."""
    last = partitioned.plan.depth - 1
    outputs = [ref.name for ref in leaves_of(partitioned.trace.record.output)]
    layouts = partitioned.streamed[last].layouts
    if not any(name in layouts for name in outputs):
        return None
    try:
        module, traced = record_loss(loss, partitioned.trace.record, target)
    except PlanError as error:
        return _whole(error)
    fingerprint, key = fingerprint_of(traced), signature(target)
    if key not in known or known[key][0] != fingerprint:
        try:
            found = _laid(module, traced, partitioned, model, draws, outputs, layouts)
        except (CallNotTileable, PlanError) as error:
            found = _whole(error)
        known[key] = fingerprint, found
    return known[key][1]


def _whole(error: Exception) -> None:
    log.info("the loss is not computed patch by patch, the model's output is whole: %s", error)


def _laid(
    module: nn.Module, traced: Record, partitioned: PartitionedModel, model: nn.Module,
    draws: Draws, outputs: list[str], layouts: Mapping[str, Layout],
) -> StreamedLoss | None:  # fmt: skip
    renamed = _Renamed(traced, outputs)
    record = renamed.joined_to(partitioned.trace.record)
    both = _ModelAndLoss(model, module)
    images = [layouts[name] for name in outputs if name in layouts]
    targets = [renamed.value(name) for name in traced.inputs[len(outputs) :]]
    extra = {
        name: layout
        for name in targets
        if (layout := layout_of_target(record.values[name].shape, images)) is not None
    }
    (value,) = map(renamed.value, traced.outputs) if len(traced.outputs) == 1 else ("",)
    layout = partitioned.lay_out_loss(record, both, renamed.calls, value, extra, draws)
    if (
        value not in record.values
        or value in layout.layouts
        or prod(record.values[value].shape) != 1
    ):
        return None  # no one number: an error that is raised when it runs on all of the output
    return StreamedLoss(both, layout, record, targets, value)


class _Renamed:
    """The recording of a loss with names that no model has; its inputs are the model's outputs."""

    def __init__(self, traced: Record, outputs: list[str]) -> None:
        self.traced = traced
        self.inputs = dict(zip(traced.inputs, outputs, strict=False))
        self.calls = [self._call(call) for call in traced.calls]

    def value(self, name: str) -> str:
        return self.inputs.get(name, PREFIX + name)

    def joined_to(self, model: Record) -> Record:
        traced = self.traced
        values = {self.value(n): replace(v, name=self.value(n)) for n, v in traced.values.items()}
        inputs = [self.value(n) for n in traced.inputs if n not in self.inputs]
        return replace(
            model,
            calls=[*model.calls, *self.calls],
            values={**values, **model.values},
            inputs=(*model.inputs, *inputs),
            parameters={**model.parameters, **_weights(traced.parameters)},
            buffers={**model.buffers, **_weights(traced.buffers)},
            storages={
                **{self.value(n): -2 - s for n, s in traced.storages.items()},
                **model.storages,
            },
        )

    def _call(self, call: Call) -> Call:
        def names(given: Any) -> tuple[str, ...]:
            return tuple(map(self.value, given))

        def weights(given: Any) -> tuple[str, ...]:
            return tuple(PREFIX + name for name in given)

        return replace(
            call,
            name=PREFIX + call.name,
            layer=PREFIX + call.layer,
            module=None if call.module is None else PREFIX + call.module,
            args=self._tree(call.args),
            kwargs=self._tree(call.kwargs),
            reads=names(call.reads),
            attrs=weights(call.attrs),
            outs=[(path, self.value(name)) for path, name in call.outs],
            mutates=[(self.value(a), b if b is None else self.value(b)) for a, b in call.mutates],
            overwrites=names(call.overwrites),
            touches=weights(call.touches),
            norms=weights(call.norms),
        )

    def _tree(self, tree: Any) -> Any:
        def one(x: Any) -> Any:
            if isinstance(x, Ref):
                return Ref(self.value(x.name))
            return Attr(PREFIX + x.name) if isinstance(x, Attr) else x

        return pytree.tree_map(one, tree, is_leaf=is_placeholder)


def _weights(given: Mapping[str, Weight]) -> dict[str, Weight]:
    return {PREFIX + n: replace(w, name=PREFIX + w.name) for n, w in given.items()}
