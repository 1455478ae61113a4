"""Run one stage for one micro-batch: forward, recomputation, backward, offloaded activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.autograd.graph import get_gradient_edge

from gems.errors import TraceError
from gems.predict.recompute_cost import Footprint
from gems.torch.autograd.absent_gradient import absent, is_absent
from gems.torch.autograd.saved_tensors import SavedTensors, unpacked
from gems.torch.autograd.split_backward import Entry, flush, receive
from gems.torch.offload.activations import OffloadedTensors
from gems.torch.offload.stored_value import StoredValue
from gems.torch.offload.stores import Store
from gems.torch.runtime.activation_checkpoint import as_it_was, snapshot, touched
from gems.torch.runtime.codegen import Program
from gems.torch.runtime.microbatch import read_box, tensors
from gems.torch.runtime.microbatch_loss import MicrobatchLoss
from gems.torch.runtime.running_stats import unrecorded
from gems.torch.runtime.stage_programs import StagePrograms
from gems.torch.runtime.step_state import SavedMicrobatch, StepState
from gems.torch.runtime.streaming import Stream
from gems.torch.spatial.saved_tiles import SavedTiles
from gems.torch.spatial.tile import ForwardContext
from gems.torch.spatial.tiled_stage import TiledStage
from gems.torch.state.overlapped_reduction import OverlappedReduction, Start
from gems.torch.state.rank_weights import RankWeights, size

Tensor = torch.Tensor
Tensors = dict[str, Any]  # values by name: tensors, or in a store; None for no gradient in one
Key = tuple[int, int]  # a stage and a micro-batch


class StageRunner:
    """The stages of one rank, run with the user's own modules."""

    def __init__(
        self,
        programs: StagePrograms,
        weights: RankWeights,
        loss: MicrobatchLoss,
        *,
        deferred: Set[Key],
        offloaded: Set[Key],
        activation_store: Store | None = None,
    ) -> None:
        """`deferred`: whose weight gradients are an action of their own; `offloaded`: whose
        activations are stored between forward and backward."""
        self.programs, self.weights, self.loss = programs, weights, loss
        self.plan, self.draws = programs.plan, programs.draws
        self.deferred, self.offloaded = deferred, offloaded
        self.activation_store = activation_store

    # --- forward ------------------------------------------------------------------------------

    def forward(self, state: StepState, stage: int, i: int, received: Tensors) -> Tensors:
        deferred = state.training and (stage, i) in self.deferred
        saved = SavedMicrobatch([] if deferred else None)
        if state.training and (stage, i) in self.offloaded:
            saved.offloaded = OffloadedTensors(self.weights.storages, self.programs.device)
        later = state.training and self.plan.recomputes(stage, i)
        if stage in state.advances:
            state.advances[stage].begin(state.position[i])
        if later:
            self._save_inputs(state, stage, i, received, saved)
        with ExitStack() as stack:
            if stage in state.statistics:
                stack.enter_context(state.statistics[stage].during(state.position[i]))
            if later:
                stack.enter_context(torch.no_grad())
            results = self._run(state, stage, i, received, saved)
        if state.training:
            state.saved[stage, i] = saved
            state.losses += [(i, loss) for loss in saved.known_losses]
        return {n: x if isinstance(x, StoredValue) else x.detach() for n, x in results.items()}

    def _save_inputs(
        self, state: StepState, stage: int, i: int, received: Tensors, saved: SavedMicrobatch
    ) -> None:
        """Save what a stage received to recompute it from: all of it, or a part if the other ranks
        of the spatial group save the rest."""
        partitioned = state.partitions[i]
        bound = self.programs.bound(partitioned, stage, i)
        state.activation_bytes[stage, i] = 0
        parts = self.plan.activations[stage].partitioned
        for name, x in received.items():
            sharding = bound.sharding(name) if bound is not None and parts else None
            packed = SavedTensors(sharding, saved.offloaded).pack(x, x._version)
            state.activation_bytes[stage, i] += packed.nbytes
            saved.received[name] = packed
        saved.before = snapshot(touched(partitioned.calls(stage), self.programs.model))

    def recompute(self, state: StepState, stage: int, i: int) -> None:
        """Run a forward again that saved its inputs only. Its statistics were taken before."""
        partitioned, saved = state.partitions[i], state.saved[stage, i]
        # In one order on all ranks of a spatial group, which may have to gather shards.
        received = {name: unpacked(x) for name, x in saved.received.items()}
        saved.received, saved.offloaded = {}, None
        norms = [module for module, _ in self.programs.norms(stage, partitioned)]
        buffers = touched(partitioned.calls(stage), self.programs.model)
        with unrecorded(norms), as_it_was(buffers, saved.before):
            self._run(state, stage, i, received, saved)
        saved.before = ()

    def _run(
        self, state: StepState, stage: int, i: int, received: Tensors, saved: SavedMicrobatch
    ) -> Tensors:
        """One run of a stage's program, which saves what backward needs if one follows it."""
        partitioned = state.partitions[i]
        program = self._program(state, stage, i)
        bound = self.programs.bound(partitioned, stage, i)
        saves = state.training and torch.is_grad_enabled()
        arguments = self._arguments(state, stage, i, program, received, saved, bound)
        self.draws.at(state.step, i)
        offloaded = saved.offloaded if saves else None
        tiles = SavedTiles(self.weights.storages) if bound is not None and saves else None
        if isinstance(program, Stream):
            program.saved = SavedTensors(offloaded)
        with self._saving(bound, tiles, saved.deferred if saves else None, offloaded):
            with self.programs.compiling.running(stage):
                results = dict(zip(program.outputs, program.run(*arguments), strict=True))
            del arguments
            if isinstance(program, Stream) and saves:
                saved.in_store, saved.token = program.take_in_store()
            if stage in self.weights.shards:
                results = self.weights.shards[stage].clone_views(results)
            if stage == self.plan.depth - 1:
                self.loss.finish_forward(state, i, results, saved, bound)
        if saves:
            self._note_edges(state, stage, i, results, saved)
            self._count(state, stage, i, results, tiles)
        return results

    def _program(self, state: StepState, stage: int, i: int) -> Program | Stream:
        loss = state.streamed_losses.get(i) if stage == self.plan.depth - 1 else None
        if loss is not None:
            return self.programs.stream_with_loss(state.partitions[i], i, loss)
        return self.programs.program(state.partitions[i], stage, i)

    def _stream(self, state: StepState, stage: int, i: int) -> Stream | None:
        streamed = stage in state.partitions[i].streamed
        return cast("Stream", self._program(state, stage, i)) if streamed else None

    def _arguments(
        self,
        state: StepState,
        stage: int,
        i: int,
        program: Program | Stream,
        received: Tensors,
        saved: SavedMicrobatch,
        bound: TiledStage | None,
    ) -> list[Tensor]:
        """The stage's inputs: the model's own, or what was received, ready for a gradient."""
        partitioned = state.partitions[i]
        graph, streamed = partitioned.trace.graph, stage in partitioned.streamed
        own = dict(zip(graph.inputs, tensors(state.batch.inputs[i]), strict=True))
        mutated = {n for block in partitioned.blocks[stage] for n in graph.blocks[block].mutates}
        wants, arguments = [], []
        own |= state.streamed_targets(i)
        for name in program.inputs:
            if name in own:
                x = own[name]
                if not streamed:  # a stream reads boxes of it
                    x = read_box(x, bound.box(name) if bound else None)
                    x = x.to(self.programs.device, non_blocking=True)
                    x = self.programs.memory_format(x)
                    x = x.clone() if name in mutated else x
                arguments.append(x)
                continue
            x = received.pop(name)
            if name in mutated and not streamed:
                x = x.clone()  # another stage of this rank may still read it
            if state.training and torch.is_grad_enabled() and graph.value[name].grad:
                wants.append(name)
            if name in wants and not isinstance(x, StoredValue):
                x = receive(x, lambda g, name=name: saved.gradients.__setitem__(name, g))
            arguments.append(x)
        saved.wants = tuple(wants)
        return arguments

    @contextmanager
    def _saving(
        self,
        bound: TiledStage | None,
        tiles: SavedTiles | None,
        deferred: list[Entry] | None,
        offloaded: OffloadedTensors | None = None,
    ) -> Iterator[None]:
        """What a stage runs in: autocast, and the hooks on tensors that autograd saves."""
        context = ForwardContext() if bound is None else bound.context
        store = self.programs.weight_grads
        with ExitStack() as stack:
            stack.enter_context(self.programs.autocast())
            stack.enter_context(SavedTensors(tiles, offloaded).hooks())
            context.saved, store.saved = tiles, SavedTensors(offloaded)
            store.entries = context.deferred = deferred
            try:
                yield
            finally:
                store.entries = context.deferred = context.saved = None
                store.saved = SavedTensors()

    def _note_edges(
        self, state: StepState, stage: int, i: int, results: Tensors, saved: SavedMicrobatch
    ) -> None:
        """Where the gradients of what the stage sends will enter."""
        partitioned = state.partitions[i]
        sent = {n for (a, _), names in partitioned.crossing.items() if a == stage for n in names}
        saved.edges = {
            n: get_gradient_edge(t) for n, t in results.items() if n in sent and _leads_back(t)
        }
        for name in saved.edges:
            if not partitioned.trace.graph.value[name].grad:
                raise TraceError(
                    f"{name} wants a gradient in this step, and did not when the model was "
                    "recorded, so none would come back for it; let forward compute it in the "
                    "same way for every sample, or give the model as a list of stages"
                )

    def _count(
        self, state: StepState, stage: int, i: int, results: Tensors, tiles: SavedTiles | None
    ) -> None:
        """The bytes that a micro-batch saves from here on."""
        stream, last = self._stream(state, stage, i), stage == self.plan.depth - 1
        ends = list(results.values()) if last else []
        saved, temporary = _saved_bytes(state.partitions[i].footprint(stage), tiles, stream, ends)
        state.activation_bytes[stage, i], state.temporary_bytes[stage, i] = saved, temporary

    # --- backward -----------------------------------------------------------------------------

    def backward(
        self,
        state: StepState,
        stage: int,
        i: int,
        gradients: Sequence[Tensors],
        *,
        whole: bool,
        reduce: Start | None = None,
    ) -> Tensors:
        """Gradients of what was received; not `whole`: those of weights are a later action.

        `reduce` begins to all-reduce gradients of weights; this backward completes them.
        """
        state.place_gradients(stage, self.weights)
        saved = state.saved.pop((stage, i)) if whole else state.saved[stage, i]
        summed = _summed(gradients)
        self._agree_on_absence(state, stage, i, summed)
        roots = [(edge, summed[name]) for name, edge in saved.edges.items() if name in summed]
        roots += self.loss.seed(state, stage, i, saved)
        if saved.in_store is not None:
            saved.in_store.given = _in_store(gradients)
            roots += [(saved.token, torch.empty(0))] if saved.in_store.given else []
        saved.edges, saved.loss, saved.token = {}, None, None
        del summed, gradients
        if roots:
            self.draws.at(state.step, i)  # a recomputed run draws what it drew before
            with (
                self._recomputing(state, stage, i, saved.deferred),
                self._reducing(state, stage, i, reduce),
                self.programs.compiling.running(stage),
            ):
                edges, seeds = zip(*roots, strict=True)
                del roots
                torch.autograd.backward(edges, seeds)
            if (stream := self._stream(state, stage, i)) is not None:
                state.temporary_bytes[stage, i] = stream.temporary
        found: Tensors = {**saved.gradients}
        saved.gradients = {}
        if saved.in_store is not None:
            found |= saved.in_store.sums
            state.losses += [(i, loss) for loss in saved.in_store.loss]
        for name in saved.wants:
            if name in state.partitions[i].stored:
                found.setdefault(name, None)
            elif name not in found:  # no path from the loss leads here, but its sender waits for it
                found[name] = self._absent(state, stage, i, name)
        return found

    def _reducing(
        self, state: StepState, stage: int, i: int, reduce: Start | None
    ) -> AbstractContextManager[None]:
        if reduce is None or not state.update:
            return nullcontext()
        counts = state.partitions[i].accumulations.setdefault(stage, {})
        return OverlappedReduction(state.buckets[stage], counts, reduce)

    def weight_gradients(self, state: StepState, stage: int, i: int) -> None:
        saved = state.saved.pop((stage, i))
        if saved.deferred:
            flush(saved.deferred)

    def _agree_on_absence(self, state: StepState, stage: int, i: int, summed: Tensors) -> None:
        """A rank that receives no part of a gradient cannot see whether it exists. The spatial
        group agrees: all run backward through it, or none."""
        partitioned = state.partitions[i]
        bound = self.programs.bound(partitioned, stage, i)
        if bound is None or not (unseen := partitioned.unseen_gradients(stage, i)):
            return
        seen = [float(n in summed and summed[n].numel() > 0) for n in unseen]
        counts = bound.group.all_reduce(torch.tensor(seen, device=self.programs.device)).tolist()
        for name, count in zip(unseen, counts, strict=True):
            if not count:
                summed.pop(name, None)
            elif name not in summed:
                summed[name] = torch.zeros_like(self._absent(state, stage, i, name))

    @contextmanager
    def _recomputing(
        self, state: StepState, stage: int, i: int, deferred: list[Entry] | None
    ) -> Iterator[None]:
        """Backward, in which checkpointed runs of layers are recomputed as forward ran them."""
        partitioned, recomputation = state.partitions[i], self.programs.recomputation
        bound = self.programs.bound(partitioned, stage, i)

        def around() -> AbstractContextManager[None]:
            tiles = None if bound is None else SavedTiles(self.weights.storages)
            return self._saving(bound, tiles, deferred)

        recomputation.around = around
        try:
            with unrecorded(partitioned.recomputed.get(stage, ())):
                yield
        finally:
            recomputation.around = nullcontext

    def _absent(self, state: StepState, stage: int, i: int, name: str) -> Tensor:
        """No gradient for what a stage received."""
        partitioned, group = state.partitions[i], self.plan.spatial_group_for(stage, i)
        box = partitioned.boxes(stage, name, group, own=False)[self.weights.rank]
        dtype = getattr(torch, partitioned.trace.graph.value[name].dtype)
        return absent(box.shape, dtype, self.programs.device)


def _saved_bytes(
    whole: Footprint, tiles: SavedTiles | None, stream: Stream | None, ends: Sequence[Tensor]
) -> tuple[int, int]:
    """What a stage saves, and what backward adds: of a tiled one as counted by its hooks; of a
    streamed one what it and its sweeps receive, and the model's output if it is the last."""
    if stream is not None:
        return stream.bytes + size(ends), 0
    if tiles is None:
        return whole.activations, whole.temporary
    part = tiles.bytes / whole.activations if whole.activations else 0.0
    return tiles.bytes, round(whole.temporary * part)


def _summed(gradients: Sequence[Tensors]) -> Tensors:
    """The gradient of each value that is not absent, summed over the stages that read it."""
    summed: Tensors = {}
    for part in gradients:
        for name, gradient in part.items():
            if isinstance(gradient, Tensor) and not is_absent(gradient):
                summed[name] = summed[name] + gradient if name in summed else gradient
    return summed


def _in_store(gradients: Sequence[Tensors]) -> dict[str, list[StoredValue]]:
    """The gradients that are in a store, of which boxes are summed when they are read."""
    found: dict[str, list[StoredValue]] = {}
    for part in gradients:
        for name, gradient in part.items():
            if isinstance(gradient, StoredValue):
                found.setdefault(name, []).append(gradient)
    return found


def _leads_back(x: Any) -> bool:
    """Whether a gradient of it goes anywhere; not if it is in a store. A view made under no_grad
    claims to require one, like its base, but has no function to give it to."""
    if isinstance(x, StoredValue):
        return False
    return x.requires_grad and not (x.grad_fn is None and x._is_view())
