"""A stage of a recorded graph as functions: forward, backward, and backward in two halves.

    forward   inputs, weights, state            -> outputs, updates, losses, saved
    plain     the same                          -> outputs, updates, losses
    backward  saved, weights, output gradients  -> input gradients, weight gradients
    first     saved, weights, output gradients  -> input gradients, middle               (I)
    second    saved, middle, output gradients   -> weight gradients                      (W)

Names tell what something is: a value has its own, `w:` is a weight, `s:` state, `u:` its update,
`k:` a saved tensor, `y:` the gradient of an output or a loss, `d:` of an input, `g:` of a weight,
`m:` what the second half reads of the first.

A stage is any part of a recording: of a tiled stage, what lies between two exchanges is one, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from gems.keras.tracing.record import Recording
from gems.keras.tracing.saves import Backward, bytes_of
from gems.keras.tracing.subgraph import Function, Tensor, ancestors, cut, lock

Named = dict[str, Tensor]


@dataclass(frozen=True)
class StageProgram:
    """Functions of one stage; each is built when it is used first.

    inputs, outputs  values from and for elsewhere, the model's own among them
    weights, state   paths of variables that it reads
    updates          of state that the samples change
    wants            inputs whose gradients go back
    seeds            outputs that gradients come for, and losses
    losses           of regularizers and add_loss, computed here
    """

    recording: Recording
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    state: tuple[str, ...]
    updates: tuple[str, ...]
    losses: tuple[str, ...]
    wants: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()
    gradients: Named = field(default_factory=dict)  # `d:` and `g:`
    grad_ys: Named = field(default_factory=dict)  # `y:`
    saved: Named = field(default_factory=dict)  # `k:`
    saved_bytes: int = 0
    temporary_bytes: int = 0  # of what backward recomputes

    # --- functions ------------------------------------------------------------------------------

    @cached_property
    def plain(self) -> Function:
        return self._cut(self.given, self._results)

    @cached_property
    def forward(self) -> Function:
        """A segment of a tiled stage may save what entered an earlier one, from which backward
        computes again what that one made."""
        given = self.given
        known = {t.name for t in given.values()}
        earlier = [t for t in self.saved.values() if t.op.type == "Placeholder"]
        given |= {t.name: t for t in earlier if t.name not in known}
        return self._cut(given, {**self._results, **self.saved})

    @cached_property
    def backward(self) -> Function:
        return self._cut(self.given_backward, self.gradients)

    @cached_property
    def first(self) -> Function:
        early = {n: g for n, g in self.gradients.items() if n not in self._late}
        return self._cut(self.given_backward, {**early, **self._middle})

    @cached_property
    def second(self) -> Function:
        return self._cut({**self.given_backward, **self._middle}, self._late)

    def _cut(self, feeds: Named, fetches: Named) -> Function:
        with lock:
            return cut(self.recording.tf_graph, feeds, fetches)

    # --- tensors --------------------------------------------------------------------------------

    @property
    def given(self) -> Named:
        """What forward may read."""
        r = self.recording
        found = {name: r.tensor(name) for name in self.inputs}
        found |= {f"w:{path}": r.weights[path] for path in self.weights}
        return found | {f"s:{path}": r.state[path] for path in self.state}

    @property
    def _results(self) -> Named:
        r = self.recording
        found = {name: r.tensor(name) for name in (*self.outputs, *self.losses)}
        return found | {f"u:{path}": r.updates[path] for path in self.updates}

    @property
    def given_backward(self) -> Named:
        """What backward may read."""
        weights = {f"w:{path}": self.recording.weights[path] for path in self.weights}
        return {**self.saved, **weights, **self.grad_ys}

    @cached_property
    def _before(self) -> dict[str, Tensor]:
        """What input gradients depend on."""
        inputs = [g for name, g in self.gradients.items() if name.startswith("d:")]
        return ancestors(inputs, {t.name for t in self.given_backward.values()})

    @cached_property
    def _late(self) -> Named:
        """Weight gradients that no input gradient needs."""
        return {
            name: g
            for name, g in self.gradients.items()
            if name.startswith("g:") and g.name not in self._before
        }

    @cached_property
    def _middle(self) -> Named:
        """What the second half reads of the first: where the paths to late gradients leave it."""
        at_hand = {t.name for t in self.given_backward.values()}
        reached = ancestors(self._late.values(), {*at_hand, *self._before})
        return {
            f"m:{name}": t
            for name, t in reached.items()
            if name in self._before and name not in at_hand and t.op.type != "Const"
        }


def stage_program(
    r: Recording,
    ops: Sequence[Any],
    outputs: Sequence[str],
    *,
    losses: Sequence[Tensor] = (),
    recomputed: Collection[str] = (),
) -> StageProgram:
    """Of these live ops, which must give `outputs`. What the ops named in `recomputed` compute is
    not saved, but computed again in backward."""
    program = outline(r, ops, outputs, losses)
    if not r.training:
        return program
    with lock:
        return _with_backward(program, recomputed)


def outline(
    r: Recording, ops: Sequence[Any], outputs: Sequence[str], losses: Sequence[Tensor] = ()
) -> StageProgram:
    """What goes in and comes out, without a backward."""
    own = {op.name for op in ops}
    updates = {path: t for path, t in r.updates.items() if t.op.name in own}
    roots = [*map(r.tensor, outputs), *updates.values(), *losses]
    reached = ancestors(roots, _outside(r, own))
    return StageProgram(
        r,
        inputs=tuple(name for name in _outside(r, own) if name in reached),
        outputs=tuple(outputs),
        weights=tuple(path for path, t in r.weights.items() if t.name in reached),
        state=tuple(path for path, t in r.state.items() if t.name in reached),
        updates=tuple(updates),
        losses=tuple(t.name for t in losses),
    )


def _outside(r: Recording, own: Collection[str]) -> dict[str, None]:
    """Names of the values that a stage does not make itself."""
    return {value.name: None for value in r.graph.values if r.tensor(value.name).op.name not in own}


def _with_backward(p: StageProgram, recomputed: Collection[str]) -> StageProgram:
    """Differentiate in the recorded graph itself: custom gradients may hold tensors of it."""

    r, value = p.recording, p.recording.graph.value
    wants = [name for name in p.inputs if value[name].grad]
    roots = {name: r.tensor(name) for name in p.outputs if value[name].grad}
    roots |= {name: r.tensor(name) for name in p.losses}
    entering = [r.tensor(name) for name in p.inputs]
    weights = [r.weights[path] for path in p.weights]
    with r.tf_graph.as_default():
        ys = {f"y:{n}": tf.compat.v1.placeholder(t.dtype, t.shape) for n, t in roots.items()}
        found = tf.gradients(
            list(roots.values()),
            [*map(r.tensor, wants), *weights],
            grad_ys=list(ys.values()),
            stop_gradients=entering,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        found = [tf.convert_to_tensor(g) for g in found or ()]
    names = [*(f"d:{name}" for name in wants), *(f"g:{path}" for path in p.weights)]
    gradients = dict(zip(names, found, strict=bool(roots)))
    free = {t.name for t in (*weights, *ys.values())}
    saved = Backward(r.forward, free, recomputed).reads(gradients.values()).saved
    every = Backward(r.forward, free).reads(gradients.values()).saved if recomputed else saved
    size = sum(bytes_of(saved.values()).values())
    return replace(
        p,
        wants=tuple(wants),
        seeds=tuple(roots),
        gradients=gradients,
        grad_ys=ys,
        saved={f"k:{name}": t for name, t in saved.items()},
        saved_bytes=size,
        temporary_bytes=sum(bytes_of({**saved, **every}.values()).values()) - size,
    )


def slopes(p: StageProgram) -> dict[str, Any]:
    """Updates that are linear in the old value and of no other influence, with d new / d old: the
    decay of running averages. Nothing else that the stage computes depends on the old value."""
    r = p.recording
    entering = set(p.inputs)
    others = ancestors([r.tensor(name) for name in (*p.outputs, *p.losses)], entering)
    behind = {path: set(ancestors([r.updates[path]], entering)) for path in p.updates}
    found: dict[str, Any] = {}
    with lock, r.tf_graph.as_default():
        for path in p.updates:
            old, new = r.state[path], r.updates[path]
            elsewhere = old.name in others or any(
                old.name in names for q, names in behind.items() if q != path
            )
            if elsewhere or not new.dtype.is_floating:
                continue
            (slope,) = tf.gradients([new], [old], unconnected_gradients="zero")
            if all(t.op.type != "Placeholder" for t in ancestors([slope]).values()):
                found[path] = slope
        made = cut(r.tf_graph, {}, found)
    return made({})
