"""One stage of a small model whole and on tiles, without sessions: what tests of layer rules
compare. Not a test itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gems.geometry.box import Box
from gems.geometry.layout import even
from gems.keras.spatial.group import SpatialGroup
from gems.keras.spatial.partition import StageLayout, lay_out
from gems.keras.spatial.tiled_stage import TiledStage, tiled_stage
from gems.keras.tracing.stage_program import stage_program
from gems.keras.tracing.subgraph import lock
from gems.keras.tracing.trace import trace
from gems.transport.threads import run
from tests.keras.exact import float64

float64()
Layer = Callable[[Any], Any]


class Weighted(keras.layers.Layer):
    """A weight for every number of the input, so that its gradient is wanted."""

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=shape[1:], initializer="ones", name="w")

    def call(self, x: Any) -> Any:
        return x * self.w


@dataclass
class Compared:
    """The worst relative difference, and what there was to compare."""

    worst: float
    laid: StageLayout
    stages: list[TiledStage]


def compare(
    layer: Layer,
    shape: Sequence[int],
    grid: Sequence[int],
    dims: Sequence[int] | None = None,
    *,
    halves: bool = False,
) -> Compared:
    """A layer, or several, on samples of this shape: outputs, updates, gradients of the input and
    of all weights, against those of the stage on one rank. With `halves` backward runs in two."""
    dims = tuple(range(1, 1 + len(grid))) if dims is None else tuple(dims)
    with lock:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        image = keras.Input(tuple(shape[1:]), batch_size=shape[0])
        model = keras.Model(image, layer(Weighted()(image)))
    numbers = np.random.default_rng(0)
    r = trace(model, tf.TensorSpec(tuple(shape), "float64"), training=True)
    ops, outputs = [op for block in r.ops[1:] for op in block], list(r.graph.outputs)
    (entering,) = r.graph.blocks[0].writes
    values = {v.path: _value(v, numbers) for v in model.variables}
    at = {f"w:{p}": values[p] for p in r.weights} | {f"s:{p}": values[p] for p in r.state}
    at[entering] = tf.constant(numbers.normal(size=shape))
    plain = stage_program(r, ops, outputs, losses=r.losses)
    ys = {n: tf.constant(numbers.normal(size=t.shape), t.dtype) for n, t in plain.grad_ys.items()}
    expected = plain.forward(at)
    expected |= plain.backward({**at, **expected, **ys})
    tiles = even(shape, dims, grid)
    laid = lay_out(ops, {entering: tiles}, grid, r.forward, outputs if halves else ())
    have = laid.layouts[entering].boxes()
    ranks = len(have)

    def rank(t: Any) -> tuple[TiledStage, dict[str, Any]]:
        everyone = tuple(range(ranks))
        t.prepare([], [], {everyone: [(a, b) for a in everyone for b in everyone if a != b]})
        group = SpatialGroup(tuple(grid), everyone, t.rank, t)
        stage = tiled_stage(r, laid, outputs, group, losses=r.losses)
        mine = {**at, entering: _part(at[entering], have[t.rank])}
        found = _called(stage.forward, mine)
        mine |= found | {n: _seed(y, laid, n[2:], t.rank, ranks) for n, y in ys.items()}
        if not halves:
            return stage, found | _called(stage.backward, mine)
        first = _called(stage.first, mine)
        late = {n: x for n, x in {**mine, **first}.items() if n in stage.second.feeds}
        second = _called(stage.second, late)
        both = {n: first[n] + second[n] for n in first.keys() & second.keys()}
        return stage, found | first | second | both

    results = run(ranks, rank, seconds=120)
    found = _joined([x for _, x in results], laid, outputs, entering, at[entering].shape)
    names = [n for n in expected if n[:2] in ("d:", "g:", "u:") or n in (*outputs, *plain.losses)]
    worst = max(_difference(found[n], expected[n].numpy()) for n in names)
    return Compared(worst, laid, [stage for stage, _ in results])


def _value(v: Any, numbers: Any) -> Any:
    if not v.dtype.startswith("float"):
        return tf.convert_to_tensor(v.value)
    noise = numbers.normal(size=v.shape)
    return tf.constant(1 + 0.1 * noise if "variance" in v.path or v.name == "w" else noise, v.dtype)


def _called(function: Any, at: dict[str, Any]) -> dict[str, Any]:
    return function({n: at[n] for n in function.feeds})


def _part(x: Any, box: Box) -> Any:
    return tf.slice(x, box.start, box.shape)


def _seed(y: Any, laid: StageLayout, name: str, rank: int, ranks: int) -> Any:
    layout = laid.layout(name)
    return y / ranks if layout is None else _part(y, layout.boxes()[rank])


def _joined(
    parts: list[dict[str, Any]], laid: StageLayout, outputs: list[str], entering: str, shape: Any
) -> dict[str, np.ndarray]:
    """Of the ranks' results those of the whole: tiles side by side, gradients summed."""
    found: dict[str, np.ndarray] = {}
    for rank, mine in enumerate(parts):
        for name, x in mine.items():
            layout = laid.layout(name) if name in outputs else None
            if name == f"d:{entering}":
                box = laid.layouts[entering].boxes()[rank]
                found.setdefault(name, np.zeros(shape))[box.slices()] += x.numpy()
            elif layout is not None:
                box = layout.boxes()[rank]
                found.setdefault(name, np.full(layout.shape, np.nan))[box.slices()] = x.numpy()
            elif name.startswith("g:"):
                found[name] = found.get(name, 0) + x.numpy()
            elif name in found and not name.startswith(("k:", "m:")):
                assert np.array_equal(found[name], x.numpy()), name
            else:
                found[name] = x.numpy()
    return found


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max(initial=0) / max(1.0, np.abs(b).max(initial=0)))
