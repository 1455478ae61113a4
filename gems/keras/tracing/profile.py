"""What blocks cost on this computer: each distinct one is run as a stage by itself.

TensorFlow runs a step in threads of its own, so wall seconds are measured, the least of a few runs;
of backward in halves, first and second by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

from gems.hardware import Machine
from gems.keras.tracing.record import Recording
from gems.keras.tracing.stage_program import StageProgram, stage_program
from gems.keras.tracing.subgraph import Function, Tensor
from gems.model.costs import Cost, Costs
from gems.model.estimate import estimate

RUNS = 3
Seconds = tuple[float, float, float, float]  # forward, backward, and its two halves


def measure(r: Recording, machine: Machine) -> Costs:
    """Seconds of every block, in order, on this computer; bytes are those of the estimate."""
    known: dict[Any, Seconds] = {}
    items = []
    read = {name for block in r.graph.blocks for name in block.reads} | set(r.graph.outputs)
    for index, guess in enumerate(estimate(r.graph, machine).items):
        key = _key(r, index)
        if key not in known:
            block = r.graph.blocks[index]
            outputs = [name for name in block.writes if name in read]
            known[key] = _seconds(stage_program(r, r.ops[index], outputs))
        items.append(_cost(guess, known[key]))
    return Costs(tuple(items))


def _cost(guess: Cost, seconds: Seconds) -> Cost:
    forward, backward, first, second = seconds
    apart = first + second
    if not (guess.i or guess.w) or not apart:
        return replace(guess, f=forward, i=0.0, w=0.0)
    i = backward * first / apart
    return replace(guess, f=forward, i=i, w=backward - i, halves=max(apart / backward, 1.0))


def _key(r: Recording, index: int) -> Any:
    """Blocks of one key cost the same: their ops and shapes are the same."""
    value = r.graph.value
    ops = tuple((op.type, tuple(str(t.shape) for t in op.outputs)) for op in r.ops[index])
    block = r.graph.blocks[index]
    reads = tuple((value[name].shape, value[name].grad) for name in block.reads)
    kernels = tuple(r.graph.weight[path].shape for path in block.parameters)
    return ops, reads, kernels, tuple(value[name].grad for name in block.writes)


def _seconds(program: StageProgram) -> Seconds:
    at: dict[str, Any] = {}

    def least(function: Function, given: dict[str, Tensor]) -> float:
        at.update((name, _numbers(t)) for name, t in given.items() if name not in at)
        return _least(lambda: at.update(function(at))) if function.fetches else 0.0

    forward = least(program.forward, program.given)
    backward = least(program.backward, program.given_backward)
    first = least(program.first, {})
    return forward, backward, first, least(program.second, {})


def _numbers(t: Tensor) -> Any:
    """Something of the form of a tensor; floats must not be denormal, which are slow."""
    shape, dtype = t.shape.as_list(), t.dtype
    if dtype.is_floating:
        return tf.constant(np.random.default_rng(0).uniform(0.5, 1.5, shape), dtype)
    return tf.zeros(shape, dtype)


def _least(run: Callable[[], Any]) -> float:
    found = []
    for _ in range(1 + RUNS):  # the first one makes the function
        start = perf_counter()
        run()
        found.append(perf_counter() - start)
    return min(found[1:])
