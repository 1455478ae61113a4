"""A stage on one rank of its spatial group: segments of the local graph, with messages between.

It has the functions of a `StageProgram`, and their names for what goes in and comes out: values by
their recorded names, this rank's tiles of those that are tiled. Inputs of the model are given
whole, since every rank has them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tensorflow as tf

from gems.geometry.box import Box
from gems.keras.spatial.group import SpatialGroup
from gems.keras.spatial.halo_exchange import Communication
from gems.keras.spatial.local_graph import LocalGraph
from gems.keras.spatial.partition import StageLayout
from gems.keras.tracing.record import Recording
from gems.keras.tracing.saves import bytes_of
from gems.keras.tracing.stage_program import StageProgram, outline, stage_program
from gems.keras.tracing.subgraph import Function, Tensor, dependents, lock
from gems.model.graph import Graph, Value

Named = dict[str, Tensor]
At = dict[str, Any]


@dataclass(frozen=True)
class TiledStage:
    """Functions of one stage on one rank; see StageProgram for their names.

    `here` has the local name of every recorded one: of inputs, outputs and losses.
    """

    recording: Recording  # of the model
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    state: tuple[str, ...]
    updates: tuple[str, ...]
    losses: tuple[str, ...]
    wants: tuple[str, ...]
    seeds: tuple[str, ...]
    grad_ys: Named
    here: dict[str, str]
    boxes: dict[str, Box]  # of the model's inputs that are tiled
    group: SpatialGroup
    segments: tuple[StageProgram, ...]
    comms: tuple[Communication, ...]  # behind each segment but the last
    saved: Named = field(default_factory=dict)
    saved_bytes: int = 0
    temporary_bytes: int = 0

    # --- functions ------------------------------------------------------------------------------

    @cached_property
    def plain(self) -> Function:
        return Function(self._forward(keeps=False), self._feeds, self._results)

    @cached_property
    def forward(self) -> Function:
        fetches = (*self._results, *self.saved)
        return Function(self._forward(keeps=True), self._feeds, fetches)

    @cached_property
    def backward(self) -> Function:
        own = dict.fromkeys(n for s in self.segments for n in s.gradients if n[:2] == "g:")
        fetches = (*(f"d:{n}" for n in self.wants), *own)
        return Function(self._backward(_whole, fetches), self._at_backward, fetches)

    @cached_property
    def first(self) -> Function:
        fetches = [f"d:{n}" for n in self.wants]
        fetches += [n for s in self.segments for n in s.first.fetches if n[:2] != "d:"]
        fetches += [f"m:{n}" for s in self.segments for n in s.second.feeds if n[:2] == "y:"]
        names = tuple(dict.fromkeys(fetches))
        return Function(self._backward(_early, names), self._at_backward, names)

    @cached_property
    def second(self) -> Function:
        feeds = dict.fromkeys(n for s in self.segments for n in s.second.feeds)
        names = tuple(f"m:{n}" if n[:2] == "y:" else n for n in feeds)
        fetches = dict.fromkeys(n for s in self.segments for n in s.second.fetches)

        def run(*values: Any) -> list[Any]:
            at, found = dict(zip(feeds, values, strict=True)), {}
            for segment in self.segments:
                _add_all(found, segment.second(at))
            return [found[name] for name in fetches]

        return Function(run, names, tuple(fetches))

    # --- running --------------------------------------------------------------------------------

    @property
    def _feeds(self) -> tuple[str, ...]:
        weights, state = (f"w:{p}" for p in self.weights), (f"s:{p}" for p in self.state)
        return (*self.inputs, *weights, *state)

    @property
    def _results(self) -> tuple[str, ...]:
        return (*self.outputs, *self.losses, *(f"u:{p}" for p in self.updates))

    @property
    def _at_backward(self) -> tuple[str, ...]:
        return (*self.saved, *(f"w:{p}" for p in self.weights), *self.grad_ys)

    def _forward(self, *, keeps: bool) -> Callable[..., list[Any]]:
        names = (*self._results, *self.saved) if keeps else self._results

        def run(*values: Any) -> list[Any]:
            at = dict(zip(self._feeds, values, strict=True))
            for name in self.inputs:
                x = at.pop(name)
                if (box := self.boxes.get(name)) is not None:
                    x = tf.slice(x, box.start, box.shape)
                at[self.here[name]] = x
            for number, segment in enumerate(self.segments):
                if number:
                    at |= self.comms[number - 1].forward(self.group, at)
                at |= (segment.forward if keeps else segment.plain)(at)
            return [at[self.here.get(name, name)] for name in names]

        return run

    def _backward(
        self, part: Callable[[StageProgram], Function], fetches: Sequence[str]
    ) -> Callable[..., list[Any]]:
        def run(*values: Any) -> list[Any]:
            at = dict(zip(self._at_backward, values, strict=True))
            gradients: At = {}  # of local values
            for name in self.seeds:
                _add_all(gradients, {self.here[name]: at[f"y:{name}"]})
            found: At = {}
            for number in reversed(range(len(self.segments))):
                self._through(self.segments[number], part, at, gradients, found)
                if number and self.comms[number - 1].grad:
                    comm = self.comms[number - 1]
                    given = {t.name: _taken(gradients, t) for t in comm.arrivals}
                    _add_all(gradients, comm.backward(self.group, given))
            for name in self.wants:
                t = self.segments[0].recording.tensor(self.here[name])
                found[f"d:{name}"] = _taken(gradients, t)
            return [found[name] for name in fetches]

        return run

    def _through(
        self,
        segment: StageProgram,
        part: Callable[[StageProgram], Function],
        at: At,
        gradients: At,
        found: At,
    ) -> None:
        """Backward of one segment: gradients of what entered it are added to `gradients`, those of
        weights and what is for later to `found`."""
        for name in segment.seeds:
            at[f"y:{name}"] = _taken(gradients, segment.recording.tensor(name))
        made = part(segment)(at)
        _add_all(gradients, {n[2:]: g for n, g in made.items() if n[:2] == "d:"})
        _add_all(found, {n: g for n, g in made.items() if n[:2] != "d:"})
        for name in segment.seeds:
            y = at.pop(f"y:{name}")
            if part is _early:
                found[f"m:y:{name}"] = y


def _whole(segment: StageProgram) -> Function:
    return segment.backward


def _early(segment: StageProgram) -> Function:
    return segment.first


def _taken(gradients: At, t: Tensor) -> Any:
    """A gradient that is complete; zero if none came."""
    found = gradients.pop(t.name, None)
    return tf.zeros(t.shape, t.dtype) if found is None else found


def _add_all(found: At, more: Mapping[str, Any]) -> None:
    for name, x in more.items():
        found[name] = found[name] + x if name in found else x


# --- building -------------------------------------------------------------------------------------


def tiled_stage(
    r: Recording,
    laid: StageLayout,
    outputs: Sequence[str],
    group: SpatialGroup,
    *,
    losses: Sequence[Tensor] = (),
    recomputed: Collection[str] = (),
) -> TiledStage:
    """The stage of these live ops, which must give `outputs`. What the ops named in `recomputed`
    compute is not saved, but computed again in backward, from what enters their segment."""
    plain = outline(r, laid.ops, outputs, losses)
    with lock:
        return _tiled_stage(r, laid, plain, group, recomputed)


def _tiled_stage(
    r: Recording,
    laid: StageLayout,
    plain: StageProgram,
    group: SpatialGroup,
    recomputed: Collection[str],
) -> TiledStage:
    local = LocalGraph(r, laid, group.me, _differentiated(r, plain))
    given: dict[str, Tensor] = {}
    results: dict[str, Tensor] = {}

    def write() -> None:
        for name in plain.inputs:
            t, layout = r.tensor(name), laid.layouts.get(name)
            shape = t.shape if layout is None else layout.boxes()[group.me].shape
            given[name] = local.at[name] = tf.compat.v1.placeholder(t.dtype, shape)
        for op in laid.ops:
            if op.name not in laid.covered:
                local.write(op)
        for name in plain.outputs:
            results[name] = local.result(name)
        for name in plain.losses:
            results[name] = local.whole(r.tensor(name))
        for path in plain.updates:
            results[f"u:{path}"] = local.whole(r.updates[path])

    graph = tf.compat.v1.wrap_function(write, []).graph
    q = _local_recording(r, plain, local, graph, given, results)
    segments = _segments(
        q,
        local,
        [results[name].name for name in plain.outputs],
        [results[name] for name in plain.losses],
        local.derived | {n for op in recomputed for n in local.made.get(op, ())},
    )
    here = {name: t.name for name, t in {**given, **results}.items() if name[:2] != "u:"}
    saved = {name: t for s in segments for name, t in s.saved.items()}
    seeds = [n for n in plain.outputs if q.graph.value[here[n]].grad]
    seeds += plain.losses if r.training else ()
    return TiledStage(
        r,
        plain.inputs,
        plain.outputs,
        tuple(dict.fromkeys(p for s in segments for p in s.weights)),
        tuple(dict.fromkeys(p for s in segments for p in s.state)),
        plain.updates,
        plain.losses,
        tuple(n for n in plain.inputs if r.graph.value[n].grad) if r.training else (),
        tuple(seeds),
        {f"y:{name}": results[name] for name in seeds},
        here,
        {n: laid.layouts[n].boxes()[group.me] for n in plain.inputs
         if n in r.graph.inputs and n in laid.layouts},
        group,
        tuple(segments),
        tuple(local.comms),
        saved,
        sum(bytes_of(saved.values()).values()),
        max((s.temporary_bytes for s in segments), default=0),
    )  # fmt: skip


def _differentiated(r: Recording, plain: StageProgram) -> set[str]:
    """Recorded tensors that a gradient may come back for: what depends on weights of the stage, or
    on inputs whose gradients are wanted. Every rank finds the same."""
    if not r.training:
        return set()
    sources = [r.weights[path] for path in plain.weights]
    sources += [r.tensor(name) for name in plain.inputs if r.graph.value[name].grad]
    ops = dependents(r.tf_graph, sources) & r.forward
    found = {t.name for t in sources}
    return found | {t.name for name in ops for t in r.tf_graph.get_operation_by_name(name).outputs}


def _local_recording(
    r: Recording,
    plain: StageProgram,
    local: LocalGraph,
    graph: Any,
    given: Named,
    results: Named,
) -> Recording:
    """The local graph as a recording, with the values that pass from segment to segment."""
    weights = {p: local.feeds[t.name] for p, t in r.weights.items() if t.name in local.feeds}
    state = {p: local.feeds[t.name] for p, t in r.state.items() if t.name in local.feeds}
    arrivals = {t.name: t for comm in local.comms for t in comm.arrivals}
    q = Recording(
        graph, list(given.values()), weights, state, [], None,
        {path: results[f"u:{path}"] for path in plain.updates}, [], [], r.training, arrivals,
    )  # fmt: skip
    entering = [*given.values(), *arrivals.values()]
    q.live = dependents(graph, entering)
    q.forward = {op.name for op in graph.get_operations()}
    wanted = [given[n] for n in plain.inputs if r.graph.value[n].grad]
    wanted += [t for comm in local.comms if comm.grad for t in comm.arrivals]
    trained = dependents(graph, [*weights.values(), *wanted]) | {t.op.name for t in wanted}
    values = {t.name: t for t in entering}
    values |= _passing(q, local)
    values |= {t.name: t for comm in local.comms for t in comm.given}
    values |= {results[name].name: results[name] for name in plain.outputs}
    q.graph = Graph(
        (),
        tuple(_value(t, r.training and t.op.name in trained) for t in values.values()),
        tuple(t.name for t in given.values()), (), (), (),
    )  # fmt: skip
    return q


def _value(t: Tensor, grad: bool) -> Value:
    shape = tuple(t.shape.as_list())
    return Value(t.name, shape, (), t.dtype.name, grad and t.dtype.is_floating)


def _passing(q: Recording, local: LocalGraph) -> Named:
    """What a segment makes of inputs or arrivals and a later one reads, itself or to compute
    something of no segment's own."""
    number_of = _segment_numbers(q, local)
    found: Named = {}
    for op in q.tf_graph.get_operations():
        at = number_of.get(op.name)
        for t in op.inputs if at is not None else ():
            if t.op.name in q.live and number_of[t.op.name] != at:
                found[t.name] = t
    return found


def _segment_numbers(q: Recording, local: LocalGraph) -> dict[str, int]:
    """The segment of each live op."""
    found = {}
    for at, op in enumerate(q.tf_graph.get_operations()):
        if op.name in q.live:
            found[op.name] = bisect_right(local.ends, at)
    return found


def _segments(
    q: Recording,
    local: LocalGraph,
    outputs: Sequence[str],
    losses: Sequence[Tensor],
    recomputed: Collection[str],
) -> list[StageProgram]:
    number_of, count = _segment_numbers(q, local), len(local.ends) + 1
    ops: list[list[Any]] = [[] for _ in range(count)]
    for name, number in number_of.items():
        ops[number].append(q.tf_graph.get_operation_by_name(name))
    made: list[dict[str, None]] = [{} for _ in range(count)]
    passing = _passing(q, local)
    entering = {t.name for t in (*q.inputs, *q.arrivals.values())}
    given = {t.name: k for k, comm in enumerate(local.comms) for t in comm.given}
    for name in dict.fromkeys([*passing, *given, *outputs]):
        op = q.tensor(name).op
        if name in entering:
            continue
        if op.name not in number_of:  # of a tile without cells: it depends on nothing
            number_of[op.name] = given.get(name, count - 1)
            ops[number_of[op.name]].append(op)
        made[number_of[op.name]][name] = None
    mine: list[list[Tensor]] = [[] for _ in range(count)]
    for t in losses:
        mine[number_of.get(t.op.name, count - 1)].append(t)
    return [
        stage_program(q, ops[k], list(made[k]), losses=mine[k], recomputed=recomputed)
        for k in range(count)
    ]
