"""From a recorded graph to the planner's: blocks are the layers that the model calls, in order;
TensorFlow between them is blocks of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any

import tensorflow as tf

from gems.errors import TraceError
from gems.keras.tracing.op_meter import flops, moved
from gems.keras.tracing.record import Recording, blocks_of
from gems.keras.tracing.saves import Backward, bytes_of, storage
from gems.keras.tracing.subgraph import Tensor, dependents, is_shape, lock
from gems.model.graph import ITEMSIZE, Block, Graph, Value, Weight


@dataclass
class _Piece:
    """A block, as it is being made: its ops, what they read of others, and which variables."""

    name: str
    layer: str
    ops: list[Any]
    reads: dict[str, Tensor] = field(default_factory=dict)
    variables: dict[str, None] = field(default_factory=dict)

    @property
    def made(self) -> list[Tensor]:
        return [t for op in self.ops for t in op.outputs]


def add_blocks(r: Recording) -> None:
    """Fill in `r.graph` and the ops of its blocks."""
    pieces = list(_pieces(r))
    path_of = {t.name: path for path, t in {**r.weights, **r.state}.items()}
    values = {t.name: t for t in r.inputs}
    for piece in pieces:
        for t in _leaves(piece, r):
            if t.name in path_of:
                piece.variables[path_of[t.name]] = None
            else:
                piece.reads[t.name] = values[t.name] = t
    piece_of = {op.name: piece for piece in pieces for op in piece.ops}
    for path, t in r.updates.items():  # also of what is assigned, and never read
        if t.op.name in piece_of:
            piece_of[t.op.name].variables[path] = None
    values |= {t.name: t for t in r.outputs}
    _reject_unsendable(values.values())
    with lock:
        wanted, saves = _differentiated(r, pieces, values)
    numbers: dict[str, int] = {}
    number = lambda name: numbers.setdefault(name, len(numbers))  # noqa: E731
    r.ops = [piece.ops for piece in pieces]
    r.graph = Graph(
        blocks=tuple(
            Block(
                name=piece.name,
                layer=piece.layer,
                reads=tuple(piece.reads),
                writes=tuple(t.name for t in piece.made if t.name in values),
                parameters=tuple(path for path in piece.variables if path in r.weights),
                buffers=tuple(path for path in piece.variables if path in r.state),
                saves=tuple((number(name), size) for name, size in sorted(mine.items())),
                flops=sum(map(flops, piece.ops)),
                moved=sum(map(moved, piece.ops)),
            )
            for piece, mine in zip(pieces, saves, strict=True)
        ),
        values=tuple(_value(t, t.name in wanted, number(storage(t).name)) for t in values.values()),
        inputs=tuple(t.name for t in r.inputs),
        outputs=tuple(dict.fromkeys(t.name for t in r.outputs)),
        parameters=tuple(_weight(path, t) for path, t in r.weights.items()),
        buffers=tuple(_weight(path, t) for path, t in r.state.items()),
    )


def _pieces(r: Recording) -> Iterator[_Piece]:
    """Runs of live ops of one call. A call that is interrupted by an inner one has several."""
    made_by = blocks_of(r.calls)
    live = [(at, op) for at, op in enumerate(r.tf_graph.get_operations()) if op.name in r.live]
    own = r.calls[-1].path if r.calls else ""
    counts: dict[str, int] = {}
    for number, run in groupby(live, key=lambda pair: made_by.get(pair[0])):
        ops = [op for _, op in run]
        layer = _name(r, number, ops[0].type.lower(), own)
        counts[layer] = counts.get(layer, 0) + 1
        name = layer if counts[layer] == 1 else f"{layer}:{counts[layer]}"
        yield _Piece(name, name, ops)


def _name(r: Recording, number: int | None, kind: str, own: str) -> str:
    if number is None:
        return kind
    call = r.calls[number]
    if call.leaf:
        return call.path.removeprefix(f"{own}.")
    inside = "" if call.path == own else call.path.removeprefix(f"{own}.") + "."
    return inside + kind


def _leaves(piece: _Piece, r: Recording) -> Iterator[Tensor]:
    """What a block reads: values of others, inputs, and the variables behind what is not live."""
    inside = {t.name for t in piece.made}
    inputs = {t.name for t in r.inputs}
    captured = {t.name for _, t in r.tf_graph.captures}
    seen: set[str] = set()
    stack = [t for op in reversed(piece.ops) for t in reversed(op.inputs)]
    while stack:
        t = stack.pop()
        if t.name in inside or t.name in seen or t.name in captured:
            continue
        seen.add(t.name)
        if t.op.name in r.live or t.name in inputs or t.op.type == "Placeholder":
            yield t
        elif not is_shape(t.op):
            stack.extend(t.op.inputs)


def _reject_unsendable(values: Iterable[Tensor]) -> None:
    for t in values:
        if t.dtype.name not in ITEMSIZE or not t.shape.is_fully_defined():
            raise TraceError(
                f"{t.name} passes from one layer to the next as {t.dtype.name} of shape {t.shape}; "
                "stages send each other numbers whose shapes follow from those of the inputs. Give "
                "recurrent layers unroll=True: as loops they keep lists inside TensorFlow"
            )


def _differentiated(
    r: Recording, pieces: Sequence[_Piece], values: dict[str, Tensor]
) -> tuple[set[str], list[dict[str, int]]]:
    """The values that a gradient comes back for, and what each block saves: bytes by storage."""
    nothing: list[dict[str, int]] = [{} for _ in pieces]
    if not r.training or not r.weights:
        return set(), nothing
    trained = dependents(r.tf_graph, [*r.weights.values(), *r.arrivals.values()])
    between = [t for t in values.values() if t.op.name in trained and t.dtype.is_floating]
    outputs = {t.name: t for t in r.outputs if t.op.name in trained and t.dtype.is_floating}
    roots = [*outputs.values(), *r.losses]
    weights = list(r.weights.values())
    with r.tf_graph.as_default():
        seeds = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in roots]
        found = tf.gradients(roots, [*weights, *between], grad_ys=seeds)
        found = [None if g is None else tf.convert_to_tensor(g) for g in found]
    pairs = zip(r.weights, found, strict=False)
    r.unconnected = {path for path, g in pairs if g is None}
    wanted = {t.name for t, g in zip(between, found[len(weights) :], strict=True) if g is not None}
    free = {t.name for t in (*weights, *seeds)}
    gradients = [g for g in found[: len(weights)] if g is not None]
    return wanted, _saves(r, pieces, Backward(r.forward, free), gradients)


def _saves(
    r: Recording, pieces: Sequence[_Piece], backward: Backward, gradients: list[Tensor]
) -> list[dict[str, int]]:
    piece_of = {op.name: i for i, piece in enumerate(pieces) for op in piece.ops}
    reads = backward.reads(gradients)
    found: list[dict[str, int]] = [{} for _ in pieces]
    for name, readers in reads.readers.items():
        for reader in readers:
            block = piece_of.get(_differentiated_op(reader, r.forward))
            block = piece_of.get(reads.saved[name].op.name, 0) if block is None else block
            found[block] |= bytes_of([reads.saved[name]])
    return found


def _differentiated_op(op: Any, forward: set[str]) -> str:
    """The op of forward whose gradient made this op: TensorFlow names the scope after it."""
    _, *parts = op.name.split("/") if op is not None else ("",)
    for end in range(1, len(parts) + 1):
        if parts[end - 1].endswith("_grad"):
            name = "/".join(parts[:end]).removesuffix("_grad")
            if name in forward:
                return name
    return ""


def _value(t: Tensor, grad: bool, number: int) -> Value:
    shape = tuple(t.shape.as_list())
    strides = tuple(prod(max(n, 1) for n in shape[at + 1 :]) for at in range(len(shape)))
    return Value(t.name, shape, strides, t.dtype.name, grad, number)


def _weight(path: str, t: Tensor) -> Weight:
    return Weight(path, tuple(t.shape.as_list()), t.dtype.name)
