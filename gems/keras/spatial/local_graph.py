"""The local graph of one rank: the recorded ops of a stage on its tiles, while it is written.

Where ranks talk, a segment ends. Python carries what one segment gives to the next, so that each
segment is a pure function like a stage (`stage_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gems.errors import PlanError
from gems.geometry.box import Box
from gems.geometry.layout import Layout, clipped, coordinate
from gems.keras.spatial.gradients import own_gradient
from gems.keras.spatial.halo_exchange import (
    AllGather,
    AllReduce,
    Communication,
    Halo,
    HaloExchange,
    assembled,
    flat,
    halo,
    sliced,
    unflat,
)
from gems.keras.spatial.partition import StageLayout, exchanged
from gems.keras.spatial.rule import Rule
from gems.keras.tracing.record import Recording
from gems.keras.tracing.subgraph import Tensor, is_shape, shape_value

FORGOTTEN = ("_class", "_output_shapes", "_gradient_op_type")


class LocalGraph:
    """Written inside a graph context; what is recorded is told from what is local by `at`."""

    def __init__(self, r: Recording, laid: StageLayout, me: int, wanted: set[str]) -> None:
        self.r, self.laid, self.me, self.wanted = r, laid, me, wanted
        self.coordinate = coordinate(laid.grid, me)
        self.at: dict[str, Tensor] = {}  # recorded name -> local tensor
        self.feeds: dict[str, Tensor] = {}  # of variables, by the name of the recorded placeholder
        self.comms: list[Communication] = []
        self.ends: list[int] = []  # how many ops there were at each communication
        self.derived: set[str] = set()  # ops that only put tiles together: cheap to run again
        self.made: dict[str, list[str]] = {}  # recorded op -> local ops
        self.arrived: dict[Any, dict[int, Tensor]] = {}  # by member that sent it
        self.padded: dict[Any, Tensor] = {}
        self.captured = {t.name: outside for outside, t in r.tf_graph.captures}
        self.op: Any = None
        self.rule = Rule({}, {}, _nothing)

    @property
    def graph(self) -> Any:
        return tf.compat.v1.get_default_graph()

    def count(self) -> int:
        return len(self.graph.get_operations())

    # --- writing --------------------------------------------------------------------------------

    def write(self, op: Any) -> None:
        """Add a recorded op of the stage."""
        rule = self.laid.rules.get(op.name)
        start = self.count()
        if rule is None:
            self.copy(op, [self.whole(t) for t in op.inputs])
        else:
            self.op, self.rule = op, rule
            results = [self.r.tf_graph.get_operation_by_name(n) for n in rule.covers[-1:]] or [op]
            for t, found in zip(results[0].outputs, rule.write(self), strict=False):
                self._keep(t, found)
        names = [o.name for o in self.graph.get_operations()[start:]]
        self.made[op.name] = [name for name in names if name not in self.derived]

    def _keep(self, t: Tensor, found: Tensor) -> None:
        if (layout := self.rule.outs.get(t.name)) is not None:
            want = layout.boxes()[self.me].shape
            assert tuple(found.shape) == want, (t.name, t.op.type, found.shape, want)
        self.at[t.name] = found

    def whole(self, t: Tensor) -> Tensor:
        """A recorded tensor that is no tile. What depends on no input is written when asked for."""
        stack = [t]
        while stack:
            x = stack[-1]
            if x.name in self.at:
                stack.pop()
            elif is_shape(x.op):
                self.at[x.name] = shape_value(x)
            elif x.op.type == "Placeholder":
                self.at[x.name] = self._placeholder(x)
            elif missing := [i for i in x.op.inputs if i.name not in self.at]:
                stack += missing
            else:
                self.copy(x.op, [self.at[i.name] for i in x.op.inputs])
        return self.at[t.name]

    def _placeholder(self, t: Tensor) -> Tensor:
        if t.name in self.captured:
            return tf.constant(self.captured[t.name].numpy(), t.dtype)
        self.feeds[t.name] = tf.compat.v1.placeholder(t.dtype, t.shape)
        return self.feeds[t.name]

    def copy(self, op: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The recorded op on other inputs; its results are what it gives from now on."""
        made = self._create(op, inputs)
        self.at.update((t.name, m) for t, m in zip(op.outputs, made, strict=True))
        return made

    def _create(self, op: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        if own_gradient(op):  # of weights: ops that read samples were looked at before
            raise PlanError(
                f"{op.name} ({op.type}), which a tiled stage needs, is a function, or has a "
                "gradient of its own (tf.custom_gradient), which cannot be written for a tile. Let "
                "the tiled stages end before its layer"
            )
        attrs = {k: v for k, v in op.node_def.attr.items() if k not in FORGOTTEN}
        dtypes = [t.dtype for t in op.outputs]
        made = self.graph.create_op(op.type, list(inputs), dtypes, attrs=attrs, name=op.name)
        return list(made.outputs)

    # --- what rules ask for (`Tile`) ------------------------------------------------------------

    def copied(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self._create(self.op, inputs)

    def box(self, t: Tensor) -> Box:
        return self.rule.outs[t.name].boxes()[self.me]

    def span(self, t: Tensor, axis: int) -> tuple[int, int]:
        return self.rule.wants[t.name][axis][self.coordinate[axis]]

    def cut(self, t: Tensor, layout: Layout) -> Tensor:
        x, shape, box = self.whole(t), list(t.shape), layout.boxes()[self.me]
        start, stop, lead = [0] * len(shape), list(shape), len(layout.shape) - len(shape)
        for dim in layout.dims:
            if dim >= lead and shape[dim - lead] > 1:
                start[dim - lead], stop[dim - lead] = box.start[dim], box.stop[dim]
        return sliced(x, Box(tuple(start), tuple(stop)), Box.whole(shape))

    def read(self, t: Tensor, fill: float | None = None) -> Tensor:
        if t.name not in self.rule.wants:
            return self.whole(t)
        spans = self.rule.wants[t.name]
        layout = self.laid.layouts[t.name]
        found, box = self._wanted(t, layout, spans), layout.boxes(clipped(spans, layout))[self.me]
        if fill is None:
            return found
        pads = [(0, 0)] * len(box.shape)
        for axis, dim in enumerate(layout.dims):
            low, high = self.span(t, axis)
            before = min(max(box.start[dim] - low, 0), high - low)
            pads[dim] = (before, high - low - before - box.shape[dim])
        if all(p == (0, 0) for p in pads):
            return found

        def border() -> Tensor:
            return self.bordered(found, pads, fill)

        return self._once(("pad", t.name, spans, fill), border)

    def bordered(self, x: Tensor, pads: Sequence[tuple[int, int]], fill: float = 0.0) -> Tensor:
        if all(p == (0, 0) for p in pads):
            return x
        start = self.count()
        found = tf.pad(x, pads, constant_values=tf.constant(fill, x.dtype))
        self.derived.update(o.name for o in self.graph.get_operations()[start:])
        return found

    def _wanted(self, t: Tensor, layout: Layout, spans: Any) -> Tensor:
        """This rank's box of an input, within the image."""
        want, x = clipped(spans, layout), self.at[t.name]
        have, mine = layout.boxes()[self.me], layout.boxes(want)[self.me]
        exchange = exchanged(layout, spans)
        if exchange is None:
            return self._once(("slice", t.name, want), lambda: sliced(x, mine, have))
        parts = halo(*exchange, self.me)
        key = (t.name, want)
        if key not in self.arrived:
            self.arrived[key] = self._exchange(t, x, have, parts)
        arrived = self.arrived[key]

        def assemble() -> Tensor:
            pieces = {box: sliced(x, box, have) for box in parts.here}
            for member, buffer in arrived.items():
                pieces.update(unflat(buffer, parts.receives[member]))
            return assembled(mine, pieces, layout.dims) if pieces else tf.zeros(mine.shape, x.dtype)

        return self._once(("assemble", *key), assemble)

    def _once(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """Ops that only put tiles together, once in each segment."""
        key = (len(self.comms), key)
        if key not in self.padded:
            start = self.count()
            self.padded[key] = make()
            self.derived.update(o.name for o in self.graph.get_operations()[start:])
        return self.padded[key]

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._talk(x, x.shape, lambda y: AllReduce(x, y, self._grad(x)))

    def all_gather(self, x: Tensor) -> Tensor:
        shape = (len(self.laid.layouts) and self._size, *x.shape)
        return self._talk(x, shape, lambda y: AllGather(x, y))

    # --- talking --------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        found = 1
        for n in self.laid.grid:
            found *= n
        return found

    def _grad(self, x: Tensor) -> bool:
        """Whether a gradient may come back; the same on every rank."""
        return x.dtype.is_floating and any(t.name in self.wanted for t in self.op.inputs)

    def _talk(self, x: Tensor, shape: Any, make: Callable[[Tensor], Communication]) -> Tensor:
        self.ends.append(self.count())
        arrival = tf.compat.v1.placeholder(x.dtype, shape)
        self.comms.append(make(arrival))
        return arrival

    def _exchange(self, t: Tensor, x: Tensor, have: Box, parts: Halo) -> dict[int, Tensor]:
        grad = x.dtype.is_floating and t.name in self.wanted
        start = self.count()
        sends = {m: flat(x, boxes, have) for m, boxes in parts.sends.items()}
        self.derived.update(o.name for o in self.graph.get_operations()[start:])
        self.ends.append(self.count())
        arrivals = {
            m: tf.compat.v1.placeholder(x.dtype, [sum(box.size for box in boxes)])
            for m, boxes in parts.receives.items()
        }
        self.comms.append(HaloExchange(x.dtype, sends, arrivals, grad))
        return arrivals

    # --- results ----------------------------------------------------------------------------------

    def result(self, name: str) -> Tensor:
        """What the stage gives of a value: this rank's tile, or all of it."""
        t = self.r.tensor(name)
        if name in self.laid.collected:
            self.op, self.rule = t.op, Rule({}, {name: self.laid.collected[name]}, _nothing)
            return self.read(t)
        found = self.at[name] if name in self.at else self.whole(t)
        # A tile without cells depends on nothing: let nobody else read it.
        return (
            found
            if found.op.type == "Placeholder" or found.shape.num_elements()
            else tf.identity(found)
        )


def _nothing(tile: Any) -> list[Tensor]:
    return []
