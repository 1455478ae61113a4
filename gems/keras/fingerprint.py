"""Short numbers that tell whether two ranks have the same thing: a batch, a model."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from gems.distributed.key import key
from gems.model.graph import Graph

SMALL = 1 << 20  # bytes that are read whole at every step
CELLS = 1 << 12  # of what is larger, so many cells, evenly spread


def of_batch(tree: Any) -> int:
    """What a batch holds. Large arrays are sampled."""
    return key(*(_of_array(x) for x in tf.nest.flatten(tree)))


def _of_array(x: Any) -> Any:
    if x is None:
        return None
    array = np.asarray(x)
    shape, name = array.shape, array.dtype.name
    if array.nbytes > SMALL:
        at = np.linspace(0, array.size - 1, CELLS).astype(np.int64)
        array = array.reshape(-1)[at] if array.flags.c_contiguous else array.flat[at]
    return shape, name, zlib.crc32(np.ascontiguousarray(array).tobytes())


def of_graph(graph: Graph, model: Any) -> int:
    """What a model is: its blocks and weights, and the settings of its layers."""
    weights = [(w.shape, w.dtype) for w in (*graph.parameters, *graph.buffers)]
    blocks = [
        (b.flops, b.moved, len(b.reads), len(b.parameters), len(b.buffers)) for b in graph.blocks
    ]
    return key(weights, blocks, _settings(model))


def _settings(model: Any) -> str:
    """Of layers that can tell; names are each process's own."""
    layers = [layer for layer in model._flatten_layers() if not layer._layers]
    found = []
    for layer in layers:
        try:
            config = layer.get_config()
        except Exception:  # a custom layer without one
            config = {}
        config = {k: v for k, v in config.items() if k not in ("name", "seed", "dtype")}
        found.append((type(layer).__name__, sorted(map(str, config.items()))))
    return str(found)
