"""Run a rank's stages of a PyTorch model: forward, backward, and what crosses between them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from gems.errors import PlanError, ShapeError, TraceError
from gems.hardware import Machine
from gems.plans.plan import Plan
from gems.predict.timeline import Memory
from gems.schedule.action import Action, Kind, Message
from gems.torch.offload.activations import PackedTensor, SavedTensors, unpacked
from gems.torch.offload.split_inputs import StridedForm, shard_of
from gems.torch.offload.stores import Store
from gems.torch.runtime.absent_gradient import absent, is_absent
from gems.torch.runtime.activation_checkpoint import Again, as_it_was, snapshot, touched
from gems.torch.runtime.codegen import Program, write
from gems.torch.runtime.loss_parameters import Leaves
from gems.torch.runtime.microbatch import Batch, describe, read_box, signature, stand_ins, tensors
from gems.torch.runtime.partitioned_model import Cut, partition_model
from gems.torch.runtime.regularizer import Penalty
from gems.torch.runtime.reshard import Transfer, buffers, pack, unpack
from gems.torch.runtime.rng import Draws
from gems.torch.runtime.running_stats import Statistics, unrecorded
from gems.torch.runtime.sampleless_buffers import Advance, free_buffers
from gems.torch.runtime.split_backward import Entry, Ledger, receive, settle
from gems.torch.runtime.streaming import Stream
from gems.torch.runtime.validate import current, holder, reject_misplaced
from gems.torch.spatial.saved_tiles import SavedTiles
from gems.torch.spatial.tile import ForwardContext
from gems.torch.spatial.tiled_loss import TiledLoss, prepare
from gems.torch.spatial.tiled_stage import TiledStage
from gems.torch.state.deferred_init import DeferredInit
from gems.torch.state.grad_bucket import GradBucket
from gems.torch.state.ownership import Ownership, reject_unordered
from gems.torch.state.param_shards import StageShard
from gems.torch.tracing.calls import Ref, is_placeholder
from gems.torch.tracing.guards import Guards, Structure, apply_assigned
from gems.torch.tracing.op_meter import storage_of
from gems.torch.tracing.recordings import Recordings
from gems.torch.tracing.trace import Trace, trace
from gems.transport.protocol import Transport, Work

log = logging.getLogger(__name__)
Tensor = torch.Tensor
Loss = Callable[[Any, Any], Tensor]
# What `begin` sets. Where two batches are under way, each has its own (two_batches.py).
OF_A_BATCH = (
    *("batch", "step", "training", "scale", "update", "kept", "losses", "penalties", "outputs"),
    *("activation_bytes_of", "temporary_bytes_of", "position", "of", "cut_losses", "statistics"),
    *("buckets", "advances"),
)
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Kept:
    """What one micro-batch keeps on one stage between forward and backward."""

    edges: dict[str, Any]  # value -> where its gradient enters
    loss: Tensor | None
    gradients: dict[str, Tensor]  # of received values, filled in by backward
    wants: tuple[str, ...]  # the received values that want one
    page: list[Entry] | None  # weight gradients put off
    received: dict[str, Tensor | PackedTensor]  # what there is until the stage is recomputed
    before: Sequence[Tensor] = ()  # buffers that forward changes, before it did
    forms: dict[str, StridedForm] = field(default_factory=dict)  # of those that are here in parts
    bundle: SavedTensors | None = None  # what of all this is put away until backward


def _leads_back(x: Tensor) -> bool:
    """Whether a gradient of it goes anywhere. A view made under no_grad says that it requires one,
    like its base, but has no function to give it to."""
    return x.requires_grad and not (x.grad_fn is None and x._is_view())


class TorchAdapter:
    """The stages that one rank has, run with the user's own modules."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        actions: Sequence[Action],
        owned: Ownership,
        unordered: set[int],
        *,
        rank: int,
        loss: Loss | None,
        device: torch.device,
        precision: str,
        seed: int,
        machine: Machine,
        transport: Transport,
        leaves: tuple[str, ...] = (),
        activations: Store | None = None,
        deferred: DeferredInit | None = None,
        weight_store: Store | None = None,
        loss_weights: Mapping[str, nn.Parameter] | None = None,
        leaves_of_loss: Leaves | None = None,
    ) -> None:
        """`deferred` initialises weights; `weight_store` is where they are offloaded to."""
        self.model, self.plan, self.owned, self.rank = model, plan, owned, rank
        self.machine, self.transport = machine, transport
        self.loss, self.device, self.precision = loss, device, precision
        self.leaves, self.activation_store = leaves, activations
        self.draws = Draws(seed, device)
        self.ledger = Ledger()
        self.again = Again()
        self.stages = plan.stages_on[rank]
        self.put_off = {
            (a.stage, a.micro_batch) for a in actions if a.kind is Kind.INPUT and a.computes
        }
        self.put_away = {(a.stage, a.micro_batch) for a in actions if a.kind is Kind.STORE}
        self.unordered, self.unordered_anywhere = unordered.intersection(self.stages), unordered
        states = enumerate(plan.residency)
        self.sharded_anywhere = {s for s, state in states if state.zero or state.weights_offload}
        self.cuts: Recordings[Cut] = Recordings()
        self.structure = Structure(model)
        self.optimizer: torch.optim.Optimizer | None = None
        self.held = owned.on(rank)
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        named |= loss_weights or {}
        self.weights = {name: tensor for name, tensor in named.items() if name in self.held}
        self.parameters_here = [t for t in self.weights.values() if isinstance(t, nn.Parameter)]
        self.weight_store, self.deferred = weight_store, deferred
        self.stores = [] if weight_store is None else [weight_store]  # and of optimizer state
        self.wants_norm = False
        self.window: set[int] = set()  # parameters that were trained since the last update
        self.window_over = True
        self.penalty: Penalty | None = None
        self.shards = self._shared_out()
        shared = (shard.parameters.values() for shard in self.shards.values())
        self.in_shards = {id(p) for parameters in shared for p in parameters}
        self.weight_bytes = self.size(
            [t for t in self.weights.values() if id(t) not in self.in_shards]
        )
        self.weight_storages = {storage_of(t) for t in self.weights.values()}
        self.leaves_of_loss = leaves_of_loss or Leaves(model)
        self.leaves_of_loss.allow(self.weights, owned, plan.depth - 1, rank, loss)

    def _shared_out(self) -> dict[int, StageShard]:
        """The stages of this rank whose state is divided among their holders, or put away: one
        after the other, so that of weights that are made here one stage's are there at a time."""
        found: dict[int, StageShard] = {}
        for stage in self.stages:
            if self.deferred is not None:
                self.deferred.materialize(self.owned.only(stage))
            mine = {n: p for n in self.owned.only(stage) if (p := self._trainable(n)) is not None}
            level = self.plan.residency[stage].zero
            if mine and (level or self.weight_store is not None):
                holders = self.plan.replica_groups[stage] if level else (self.rank,)
                found[stage] = StageShard(mine, holders, self.rank, level, self.weight_store)
        if self.deferred is not None:
            self.deferred.materialize()
            self.deferred = None
        return found

    # --- one step -----------------------------------------------------------------------------

    def begin(
        self, batch: Batch, step: int, *, training: bool, scale: float = 1.0, update: bool = True
    ) -> None:
        """Get ready for a step. A micro-batch's loss weighs its share of samples times `scale`."""
        self.batch, self.step, self.training = batch, step, training
        if training:
            if self.window_over:  # a new one of accumulated gradients begins
                self.window.clear()
            self.window_over = update
            trained = (p for p in self.parameters_here if p.requires_grad)
            self.window.update(map(id, trained))
        self.scale, self.update = scale, update
        self.kept: dict[tuple[int, int], Kept] = {}
        self.losses: list[tuple[int, Tensor]] = []
        self.penalties = 0.0  # this rank's share of the penalty on weights
        self.outputs: dict[int, Any] = {}
        self.activation_bytes_of: dict[tuple[int, int], int] = {}
        self.temporary_bytes_of: dict[tuple[int, int], int] = {}
        real = [i for i, size in enumerate(batch.sizes) if size]
        self.position = {i: at for at, i in enumerate(real)}
        mode = self.modes()
        self.cuts.begin()
        self.of: dict[int, Cut] = {i: self.cut(batch.inputs[i], mode) for i in real}
        self.cut_losses = self._cut_losses(real) if training else {}
        self.advances = self._advances(real)
        self.statistics: dict[int, Statistics] = {}
        if training and real:
            for stage in self.unordered:
                # All ranks of a team take the same statistics, and their sums are added up.
                share = 1 / self.plan.sizes[stage]
                norms = self._norms(stage, self.of[real[0]])
                self.statistics[stage] = Statistics(norms, len(real), share)
        self.buckets: dict[int, GradBucket] = {}
        # When the first one comes:
        later = self.plan.residency[0].frees_gradients or self.plan.asynchronous
        for stage in self.stages if training and not later else ():
            self._place(stage)

    def _place(self, stage: int) -> None:
        """Give gradients that will be summed their places, if they have none yet: before anything
        runs; or, if they will be shared out or those of the batch before are still there, when the
        first of them comes."""
        if stage in self.buckets or len(self.plan.replica_groups[stage]) == 1:
            return
        shard = self.shards.get(stage) if self.update else None
        self.buckets[stage] = GradBucket(
            self.parameters(stage) if self.update else [],
            self.statistics[stage].sums if stage in self.statistics else [],
            shard.allocate_grads() if shard else None,
        )

    def touched(self) -> list[tuple[Any, str]]:
        """The buffers of this rank that the forwards of this step change: who has each, its key."""
        cuts = {id(cut): cut for cut in self.of.values()}.values()
        names = (name for cut in cuts for stage in self.stages for name in cut.touches(stage))
        found = [holder(self.model, name) for name in dict.fromkeys(names)]
        return [(own, name) for own, name in found if id(own[name]) not in self.in_shards]

    def _cut_losses(self, real: list[int]) -> dict[int, TiledLoss]:
        """The losses of outputs that are cut; refused on all ranks, before anything runs."""
        found: dict[int, TiledLoss] = {}
        for i in real:
            if self.loss is None:
                break
            cut, target = self.of[i], self.batch.targets[i]
            last = cut.laid.get(self.plan.depth - 1)
            if last is None or not any(n in last.layouts for n in cut.trace.record.outputs):
                continue
            like = next((j for j in found if self._alike(i, j)), None)
            if like is None:
                with self._autocast():
                    model = cut.trace.record
                    found[i] = prepare(self.loss, model, last, target, self.draws, cut.losses)
            else:
                found[i] = found[like]
        return found

    def _alike(self, i: int, j: int) -> bool:
        """Whether two micro-batches have the same shapes."""
        targets = self.batch.targets
        return self.of[i] is self.of[j] and signature(targets[i]) == signature(targets[j])

    def skips(self, micro_batch: int) -> bool:
        return not self.batch.sizes[micro_batch]

    def modes(self) -> int:
        """What else a recording depends on: which modules train, and which parameters."""
        return self.structure.mode()

    def remember(self, inputs: Any, traced: Trace) -> None:
        """A recording that was made already."""
        key = self._signature(inputs, self.modes())
        self.cuts.add(key, Guards(self.model, traced.record), self._cut(inputs, traced))

    def cut(self, inputs: Any, mode: int) -> Cut:
        """The model, recorded on inputs of this signature and cut; remembered while it is as it
        was."""
        signature = self._signature(inputs, mode)
        if (found := self.cuts.find(signature)) is None:
            with self._autocast():
                traced = trace(
                    self.model, stand_ins(inputs), device=self.device, leaves=self.leaves
                )
            found = self._cut(inputs, traced)
            free = self._free(found)
            reject_unordered(self.model, traced, self.owned, self.unordered_anywhere, free)
            self.cuts.add(signature, Guards(self.model, traced.record), found)
        apply_assigned(self.model, found.trace.record)
        return found

    def _free(self, cut: Cut) -> set[str]:
        """The buffers that replicas can keep the same although each sees some of the samples."""
        if self.plan.asynchronous:
            return set()
        record = cut.trace.record
        if record.free is None:
            record.free = free_buffers(record, self.model)
        return record.free

    def _advances(self, real: list[int]) -> dict[int, Advance]:
        """For the stages of which this rank does not see all micro-batches in order."""
        found: dict[int, Advance] = {}
        cuts = list({id(cut): cut for cut in self.of.values()}.values())
        for stage in self.unordered:
            made = [
                Advance(c.trace.record, self.model, c.calls(stage), free, self.draws, len(real))
                for c in cuts
                if (free := self._free(c))
            ]
            made = [advance for advance in made if advance.names]
            if not made:
                continue
            if len(made) != len(cuts) or any(m.names != made[0].names for m in made):
                raise PlanError(
                    f"the micro-batches of a step change different buffers: {made[0].names}"
                )
            if not self.training:
                raise PlanError(
                    f"forward changes {made[0].names} in evaluation mode, and stage {stage} is on "
                    "several ranks; change buffers in training mode only (if self.training)"
                )
            found[stage] = made[0]
        return found

    def _signature(self, inputs: Any, mode: int) -> Any:
        return signature(inputs), mode

    def _cut(self, inputs: Any, traced: Trace) -> Cut:
        found = partition_model(
            traced, self.plan, self.model, self.draws, self.machine, describe(inputs)
        )
        reject_misplaced(found, self.owned, self.sharded_anywhere, self.unordered_anywhere)
        return found

    def bound(self, cut: Cut, stage: int, team: tuple[int, ...]) -> TiledStage | None:
        """This rank's place in a stage that is cut."""
        if stage not in cut.laid:
            return None
        return cut.bind(stage, team, self.rank, self.transport)

    def stream(self, cut: Cut, stage: int) -> Stream:
        """A stage that runs one block after the other."""
        if stage not in cut.streams:
            cut.streams[stage] = Stream(
                cut.trace.record,
                self.model,
                cut.calls(stage),
                cut.sent(stage),
                cut.streamed[stage],
                self.draws,
                device=self.device,
                weights=self.weight_storages,
                around=self._autocast,
            )
        return cut.streams[stage]

    def program(self, cut: Cut, stage: int, team: tuple[int, ...]) -> Program | Stream:
        if stage in cut.streamed:
            return self.stream(cut, stage)
        bound = self.bound(cut, stage, team)
        key = (stage,) if bound is None else (stage, *team)
        if key not in cut.programs:
            calls = cut.calls(stage)
            splits = any(s == stage for s, _ in self.put_off)
            run_of = cut.recomputed_runs(stage)
            cut.programs[key] = write(
                cut.trace.record,
                self.model,
                calls,
                tuple(cut.sent(stage)),
                self.draws,
                self.ledger.deferral if splits else None,
                bound.runs if bound else None,
                (self.again, run_of),
                bound if bound is not None and self.plan.activations[stage].partitioned else None,
            )
            recomputed = run_of or any(
                c.region is not None or c.norms not in ((), (c.module,)) for c in calls
            )
            if twice := [n for c in calls if c.region is not None for n in c.norms]:
                log.info(
                    "%s: running statistics inside torch.utils.checkpoint are updated once per "
                    "micro-batch; plain PyTorch updates them again when it recomputes",
                    ", ".join(dict.fromkeys(twice)),
                )
            if recomputed:
                cut.recomputed[stage] = [module for module, _ in self._norms(stage, cut)]
        return cut.programs[key]

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _norms(self, stage: int, cut: Cut) -> list[tuple[nn.Module, int]]:
        """The layers of a stage that have running statistics, with how often each is called."""
        uses = Counter(path for call in cut.calls(stage) for path in call.norms)
        return [(self.model.get_submodule(path), times) for path, times in uses.items()]

    # --- compute ------------------------------------------------------------------------------

    def forward(
        self, stage: int, micro_batch: int, received: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        i, cut = micro_batch, self.of[micro_batch]
        put_off = self.training and (stage, i) in self.put_off
        kept = Kept({}, None, {}, (), [] if put_off else None, {})
        if self.training and (stage, i) in self.put_away:
            kept.bundle = SavedTensors(self.weight_storages, self.device)
        later = self.training and self.plan.recomputes(stage, i)
        if stage in self.advances:
            self.advances[stage].begin(self.position[i])
        if later:
            bound = self.bound(cut, stage, self.plan.spatial_group_for(stage, i))
            self.activation_bytes_of[stage, i] = 0
            for name, x in received.items():
                self._hold(stage, i, kept, name, x, bound)
            kept.before = snapshot(touched(cut.calls(stage), self.model))
        with ExitStack() as stack:
            if stage in self.statistics:
                stack.enter_context(self.statistics[stage].during(self.position[i]))
            if later:
                stack.enter_context(torch.no_grad())
            results = self._pass(stage, i, received, kept)
        if self.training:
            self.kept[stage, i] = kept
            if kept.loss is not None:
                self.losses.append((i, kept.loss.detach()))
        return {name: tensor.detach() for name, tensor in results.items()}

    def _hold(
        self, stage: int, i: int, kept: Kept, name: str, x: Tensor, bound: TiledStage | None
    ) -> None:
        """Keep what a stage received until it runs again: all of it, or a part if others of the
        team have the rest."""
        partitioned = self.plan.activations[stage].partitioned
        if bound is not None and partitioned and bound.box(name) is None:
            kept.forms[name], x = shard_of(x, bound.group)
        self.activation_bytes_of[stage, i] += self.size([x])
        kept.received[name] = x if kept.bundle is None else kept.bundle.pack(x, x._version)

    def recompute(self, stage: int, micro_batch: int) -> None:
        """The forward once more, which kept nothing; its statistics were taken the first time."""
        i, cut = micro_batch, self.of[micro_batch]
        kept = self.kept[stage, i]
        bound = self.bound(cut, stage, self.plan.spatial_group_for(stage, i))
        received = {name: unpacked(x) for name, x in kept.received.items()}
        for name, form in kept.forms.items():  # in one order on all ranks of a team
            assert bound is not None
            received[name] = form.unshard(received[name], bound.group)
        kept.received, kept.forms, kept.bundle = {}, {}, None
        norms = [module for module, _ in self._norms(stage, cut)]
        buffers = touched(cut.calls(stage), self.model)
        with unrecorded(norms), as_it_was(buffers, kept.before):
            self._pass(stage, i, received, kept)
        kept.before = ()

    def _pass(
        self, stage: int, i: int, received: dict[str, Tensor], kept: Kept
    ) -> dict[str, Tensor]:
        """One run of a stage's program. What backward needs is noted if it will come to it."""
        cut, team = self.of[i], self.plan.spatial_group_for(stage, i)
        program, bound = self.program(cut, stage, team), self.bound(cut, stage, team)
        keeps = self.training and torch.is_grad_enabled()
        arguments = self._arguments(cut, stage, i, program, received, kept, bound)
        self.draws.at(self.step, i)
        bundle = kept.bundle if keeps else None
        saved = SavedTiles(self.weight_storages, bundle) if bound is not None and keeps else None
        if isinstance(program, Stream):
            program.bundle = bundle
        with self._around(bound, saved, kept.page if keeps else None, bundle):
            results = dict(zip(program.outputs, program.run(*arguments), strict=True))
            del arguments
            if stage in self.shards:
                results = self.shards[stage].clone_views(results)
            if stage == self.plan.depth - 1:
                self._arrive(cut, i, results, kept, bound)
        if keeps:
            sent = {n for (a, _), names in cut.crossing.items() if a == stage for n in names}
            kept.edges = {
                n: get_gradient_edge(t) for n, t in results.items() if n in sent and _leads_back(t)
            }
            for name in kept.edges:
                if not cut.trace.graph.value[name].grad:
                    raise TraceError(
                        f"{name} wants a gradient in this step, and did not when the model was "
                        "recorded, so none would come back for it; let forward compute it in the "
                        "same way for every sample, or give the model as a list of stages"
                    )
            self._count(cut, stage, i, saved)
            if stage in cut.streamed:
                self.activation_bytes_of[stage, i] = self._kept_by_stream(cut, stage, results)
        return results

    def _kept_by_stream(self, cut: Cut, stage: int, results: dict[str, Tensor]) -> int:
        """What a streamed stage received; and the model's output, if it is the last."""
        graph = cut.trace.graph
        names = [n for n in cut.streams[stage].inputs if n not in graph.inputs]
        ends = list(results.values()) if stage == self.plan.depth - 1 else []
        return sum(graph.value[n].bytes for n in names) + self.size(ends)

    def _count(self, cut: Cut, stage: int, i: int, saved: SavedTiles | None) -> None:
        """What a micro-batch keeps from here on; of a cut stage, what was seen to be kept."""
        whole = cut.footprint(stage)
        activations = whole.activations if saved is None else saved.bytes
        self.activation_bytes_of[stage, i] = activations
        self.temporary_bytes_of[stage, i] = (
            round(whole.temporary * activations / whole.activations) if whole.activations else 0
        )

    @contextmanager
    def _around(
        self,
        bound: TiledStage | None,
        saved: SavedTiles | None,
        page: list[Entry] | None,
        bundle: SavedTensors | None = None,
    ) -> Iterator[None]:
        """What a stage runs in: autocast, and an eye on what is kept."""
        context = ForwardContext() if bound is None else bound.context
        with ExitStack() as stack:
            stack.enter_context(self._autocast())
            if saved is not None:
                stack.enter_context(saved.hooks())
            elif bundle is not None:
                stack.enter_context(bundle.hooks())
            context.saved, self.ledger.bundle = saved, bundle
            self.ledger.page = context.deferred = page
            try:
                yield
            finally:
                self.ledger.page = context.deferred = context.saved = self.ledger.bundle = None

    def _arguments(
        self,
        cut: Cut,
        stage: int,
        i: int,
        program: Program | Stream,
        received: dict[str, Tensor],
        kept: Kept,
        bound: TiledStage | None,
    ) -> list[Tensor]:
        """The stage's inputs: the model's own, or what was received, ready for a gradient."""
        graph = cut.trace.graph
        own = tensors(self.batch.inputs[i])
        mutated = {n for block in cut.blocks[stage] for n in graph.blocks[block].mutates}
        wants, arguments = [], []
        for name in program.inputs:
            if name in graph.inputs:
                x = own[graph.inputs.index(name)]
                if stage in cut.streamed:  # which reads boxes of it
                    arguments.append(x)
                    continue
                x = read_box(x, bound.box(name) if bound else None)
                x = x.to(self.device, non_blocking=True)
                arguments.append(x.clone() if name in mutated else x)
                continue
            x = received.pop(name)
            if name in mutated and stage not in cut.streamed:
                x = x.clone()  # another stage of this rank may still read it
            if self.training and torch.is_grad_enabled() and graph.value[name].grad:
                wants.append(name)
                x = receive(x, lambda g, name=name: kept.gradients.__setitem__(name, g))
            arguments.append(x)
        kept.wants = tuple(wants)
        return arguments

    def _arrive(
        self, cut: Cut, i: int, results: dict[str, Tensor], kept: Kept, bound: TiledStage | None
    ) -> None:
        """The last stage is through: the model's output, hence the loss or the prediction."""
        record = cut.trace.record

        def put(x: Any) -> Any:
            return results[x.name] if isinstance(x, Ref) else x

        output = pytree.tree_map(put, record.output, is_leaf=is_placeholder)
        if not self.training or self.loss is None:
            self.outputs[i] = output
            return
        loss = self.leaves_of_loss.run(
            lambda: self._loss(cut, i, output, bound),
            [results[name] for name in record.outputs],
            tensors((self.batch.inputs[i], self.batch.targets[i])),
        )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ShapeError(f"loss must give one number, the mean over a micro-batch; got {shape}")
        kept.loss = loss

    def _loss(self, cut: Cut, i: int, output: Any, bound: TiledStage | None) -> Any:
        assert self.loss is not None
        target = self.batch.targets[i]
        if bound is not None and i in self.cut_losses:
            return self.cut_losses[i].run(bound, output, target, self.draws)
        target = pytree.tree_map(lambda x: self._to_device(read_box(x, None)), target)
        return self.loss(output, target)

    def _to_device(self, x: Any) -> Any:
        return x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x

    def backward(
        self, stage: int, micro_batch: int, gradients: Sequence[dict[str, Tensor]], *, whole: bool
    ) -> dict[str, Tensor]:
        i = micro_batch
        self._place(stage)
        kept = self.kept.pop((stage, i)) if whole else self.kept[stage, i]
        summed: dict[str, Tensor] = {}
        for part in gradients:
            for name, gradient in part.items():
                if is_absent(gradient):
                    continue
                summed[name] = summed[name] + gradient if name in summed else gradient
        self._agree_on_absence(stage, i, summed)
        roots = [edge for name, edge in kept.edges.items() if name in summed]
        seeds: list[Tensor | None] = [summed[name] for name in kept.edges if name in summed]
        if kept.loss is not None and kept.loss.requires_grad:
            # Every rank of a team has the loss, and backward on all of them adds up.
            weight = self.scale * self.batch.sizes[i] / self.batch.samples / self._team_size(i)
            roots.append(get_gradient_edge(kept.loss))
            seeds.append(torch.full_like(kept.loss, weight))
        if self.penalty is not None:
            self._penalise(self.penalty, stage, i, roots, seeds)
        kept.edges, kept.loss = {}, None
        del summed, gradients
        if roots:
            self.draws.at(self.step, i)  # a recomputed region draws what it drew before
            with self._reruns(stage, i, kept.page):
                torch.autograd.backward(roots, seeds)
            if stage in self.of[i].streams:
                self.temporary_bytes_of[stage, i] = self.of[i].streams[stage].temporary
        found, kept.gradients = kept.gradients, {}
        for name in kept.wants:
            if name not in found:  # no path from the loss leads here, but somebody waits for it
                found[name] = self._absent(i, stage, name)
        return found

    def _agree_on_absence(self, stage: int, i: int, summed: dict[str, Tensor]) -> None:
        """A rank whose tile has no cells cannot see whether a gradient exists. The spatial group
        decides together: all run backward through it, or none."""
        cut = self.of[i]
        bound = self.bound(cut, stage, self.plan.spatial_group_for(stage, i))
        if bound is None or stage == self.plan.depth - 1:
            return
        wanted = [n for n in cut.sent(stage) if cut.trace.graph.value[n].grad]
        unseen = [n for n in wanted if bound.has_empty_tile(n)]
        if not unseen:
            return
        seen = [float(n in summed and summed[n].numel() > 0) for n in unseen]
        counts = bound.group.all_reduce(torch.tensor(seen, device=self.device)).tolist()
        for name, count in zip(unseen, counts, strict=True):
            if not count:
                summed.pop(name, None)

    def _penalise(
        self, penalty: Penalty, stage: int, i: int, roots: list[Any], seeds: list[Any]
    ) -> None:
        """A micro-batch's share of the penalty on a stage's weights, of which each rank of a team
        takes a part."""
        share = (
            self.batch.sizes[i] / self.batch.samples / len(self.plan.spatial_group_for(stage, i))
        )
        value, root = penalty.of(stage)
        self.penalties += value * share
        if root is not None:
            roots.append(root[0])
            seeds.append(root[1] * (self.scale * share))

    @contextmanager
    def _reruns(self, stage: int, i: int, page: list[Entry] | None) -> Iterator[None]:
        """Backward, in which blocks that kept nothing run again as in forward."""
        cut = self.of[i]
        bound = self.bound(cut, stage, self.plan.spatial_group_for(stage, i))

        def around() -> AbstractContextManager[None]:
            saved = None if bound is None else SavedTiles(self.weight_storages)
            return self._around(bound, saved, page)

        self.again.around = around
        try:
            with unrecorded(cut.recomputed.get(stage, ())):
                yield
        finally:
            self.again.around = nullcontext

    def _team_size(self, i: int) -> int:
        """How many ranks compute the loss of a micro-batch."""
        return len(self.plan.spatial_group_for(self.plan.depth - 1, i))

    def weight(self, stage: int, micro_batch: int) -> None:
        kept = self.kept.pop((stage, micro_batch))
        if kept.page:
            settle(kept.page)

    # --- memory put away ----------------------------------------------------------------------

    def store(self, stage: int, micro_batch: int) -> list[Work]:
        assert self.activation_store is not None
        return self._bundle(stage, micro_batch).offload(self.activation_store)

    def release_stored(self, stage: int, micro_batch: int) -> None:
        self._bundle(stage, micro_batch).free()

    def load(self, stage: int, micro_batch: int) -> list[Work]:
        return self._bundle(stage, micro_batch).prefetch()

    def finish_load(self, stage: int, micro_batch: int) -> None:
        self._bundle(stage, micro_batch).finish_prefetch()

    def _bundle(self, stage: int, micro_batch: int) -> SavedTensors:
        bundle = self.kept[stage, micro_batch].bundle
        assert bundle is not None, "what is not going to be stored is not watched"
        return bundle

    # --- messages -----------------------------------------------------------------------------

    def select(self, message: Message, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {v.name: tensors[v.name] for v in self.of[message.micro_batch].values(message)}

    def transfers(self, message: Message) -> list[Transfer]:
        """How each value of a message travels; gradients are on their way back."""
        cut, i = self.of[message.micro_batch], message.micro_batch
        back = message.what == "gradient"
        ends = (message.target, message.source) if back else (message.source, message.target)
        giving, taking = (self.plan.spatial_group_for(stage, i) for stage in ends)
        return [cut.transfer(v, *ends, giving, taking, back) for v in cut.values(message)]

    def pack(self, message: Message, tensors: dict[str, Tensor], target: int) -> list[Tensor]:
        return pack(self.transfers(message), tensors, self.rank, target)

    def buffers(self, message: Message, source: int) -> list[Tensor]:
        return buffers(self.transfers(message), self.rank, source, self.device)

    def unpack(
        self, message: Message, own: dict[str, Tensor] | None, arrived: dict[int, list[Tensor]]
    ) -> dict[str, Tensor]:
        return unpack(self.transfers(message), self.rank, own, arrived, self.device)

    def _absent(self, i: int, stage: int, name: str) -> Tensor:
        """No gradient for what a stage received."""
        cut = self.of[i]
        box = cut.boxes(stage, name, self.plan.spatial_group_for(stage, i), own=False)[self.rank]
        dtype = getattr(torch, cut.trace.graph.value[name].dtype)
        return absent(box.shape, dtype, self.device)

    # --- gradients ----------------------------------------------------------------------------

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """The trainable parameters that this stage alone uses, in one order everywhere."""
        mine = map(self._trainable, self.owned.only(stage))
        return [p for p in mine if p is not None]

    def _trainable(self, name: str) -> nn.Parameter | None:
        p = self.weights[name]
        return p if isinstance(p, nn.Parameter) and self.trains(p) else None

    def trains(self, p: nn.Parameter) -> bool:
        """Whether a parameter may have a gradient: also one that was frozen since the last update,
        whose accumulated gradient plain training applies all the same."""
        return p.requires_grad or id(p) in self.window

    def bucket(self, stage: int) -> list[Tensor]:
        self._place(stage)
        return self.buckets[stage].pack()

    def scattered(self, stage: int) -> list[Tensor]:
        return self.shards[stage].gradients if self.update and stage in self.shards else []

    def unbucket(self, stage: int) -> None:
        if stage in self.buckets:  # it has several holders
            sums = self.buckets.pop(stage).unpack()
            if stage in self.statistics:
                self.statistics[stage].finish(sums)
        if self.update and stage in self.shards:
            self.shards[stage].take_reduced_grads(norm=self.wants_norm)

    # --- weights that come and go ---------------------------------------------------------------

    def unshard(self, stage: int) -> tuple[list[Tensor], list[Work]]:
        if (shard := self.shards.get(stage)) is None:
            return [], []
        handles = shard.unshard()
        if shard.level < 3:
            return [], handles
        for handle in handles:  # others get our part from here
            handle.wait()
        return shard.flat_weights, []

    def reshard(self, stage: int) -> None:
        if stage in self.advances:  # also on a rank that ran no sample
            self.advances[stage].prepare()
        if stage in self.shards:
            self.shards[stage].reshard()

    @contextmanager
    def unsharded_weights(self, *, fetched: bool = True) -> Iterator[None]:
        """All of this rank's weights that are shared out, in which one may write; all ranks must
        come here, unless what they are now is of no interest and need not be `fetched`. Those that
        are put away just here are to be had one by one: `copy` and `put`."""
        apart = [shard for shard in self.shards.values() if shard.level == 3]
        for handle in [handle for shard in apart for handle in shard.unshard()]:
            handle.wait()
        pairs = [(memory, shard.ranks) for shard in apart for memory in shard.flat_weights]
        for handle in [self.transport.all_gather(*pair) for pair in pairs if fetched]:
            handle.wait()
        try:
            yield
            for shard in apart:
                shard.write_back()
        finally:
            for shard in apart:
                shard.reshard()

    @cached_property
    def host_copies(self) -> dict[str, StageShard]:
        """By name, the weights that are put away just here."""
        away = [shard for shard in self.shards.values() if shard.has_host_copy]
        return {name: shard for shard in away for name in shard.parameters}

    def copy(self, name: str) -> Tensor:
        """A weight, or a copy of it if it is put away."""
        shard = self.host_copies.get(name)
        return self._now(name) if shard is None else shard.copy(name)

    def put(self, name: str, value: Tensor) -> None:
        """Let a weight be what a tensor says, wherever it is."""
        if (shard := self.host_copies.get(name)) is not None:
            shard.put(name, value)
        else:
            with torch.no_grad():
                self._now(name).copy_(value)

    def _now(self, name: str) -> Tensor:
        """A weight that is here: a parameter, of the model or of the loss, or a buffer, which
        forward may have assigned."""
        own = self.weights[name]
        return own if isinstance(own, nn.Parameter) else current(self.model, name)

    def finish_running_stats(self) -> None:
        """Statistics of stages that this rank holds alone, but saw out of order; and buffers that
        every replica changes by itself."""
        for stage, advance in self.advances.items():
            shard = self.shards.get(stage)
            if not advance.states and shard is not None and shard.has_host_copy:
                for handle in shard.unshard():  # its replica had nothing to do in this step
                    handle.wait()
                self.reshard(stage)
            advance.finish()
        for stage, statistics in self.statistics.items():
            if len(self.plan.replica_groups[stage]) == 1:
                statistics.finish(statistics.sums)

    def weighted_loss(self) -> float:
        """This rank's share of the step's loss."""
        samples = self.batch.samples
        return self.penalties + sum(
            float(loss) * self.batch.sizes[i] / samples / self._team_size(i)
            for i, loss in sorted(self.losses, key=lambda pair: pair[0])
        )

    # --- bytes and seconds --------------------------------------------------------------------

    def activation_bytes(self, stage: int, micro_batch: int) -> int:
        return self.activation_bytes_of.get((stage, micro_batch), 0)

    def temporary_bytes(self, stage: int, micro_batch: int) -> int:
        return self.temporary_bytes_of[stage, micro_batch]

    def resident_memory(self) -> Memory:
        alone = [p for p in self.parameters_here if id(p) not in self.in_shards]
        gradients = self.size([p.grad for p in alone if p.grad is not None])
        weights = self.weight_bytes
        for shard in self.shards.values():
            gradients += shard.gradient_bytes
            weights += shard.weight_bytes
        state = self.state()
        away = sum(store.used for store in self.stores)
        if self.plan.residency[0].steps_on_host:  # where the optimizer works, its state is
            away, state = away + self.size(state), []
        here = self.size([x for x in state if x.is_sparse or x.untyped_storage().nbytes()])
        return Memory(weights=weights, gradients=gradients, optimizer=here, offloaded=away)

    def state(self) -> list[Tensor]:
        """The optimizer's, wherever it is."""
        # Lists: an update beside the work may just be adding to these.
        state = list(self.optimizer.state.values()) if self.optimizer else ()
        return [x for entry in state for x in list(entry.values()) if isinstance(x, Tensor)]

    def size(self, buffers: Sequence[Tensor]) -> int:
        return sum(b.numel() * b.element_size() for b in buffers)

    def stamp(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter(), time.thread_time()

    def seconds(self, stamp: Any) -> tuple[float, float]:
        """On a GPU both are the device's time since the first stamp of the run."""
        if isinstance(stamp, tuple):
            return stamp
        if not hasattr(self, "first_stamp"):
            self.first_stamp = stamp
        stamp.synchronize()
        passed = self.first_stamp.elapsed_time(stamp) / 1e3
        return passed, passed
