"""Train any model under any plan: the face of the PyTorch door."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gems import hardware as machines
from gems.engine.executor import Engine
from gems.errors import GemsError, LossError, PeerError, PlanError, ShapeError, TraceError
from gems.model.costs import Costs
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.predict.timeline import Memory, Timeline, merged
from gems.schedule.action import Kind, Schedule
from gems.schedule.lower.passes import forward_only
from gems.torch import fingerprint, settings
from gems.torch.agree import together
from gems.torch.checkpoint.weight_files import write_weights
from gems.torch.consensus import (
    Claim,
    agree,
    agree_on_failure,
    attempt,
    difference,
    listed,
    reject_failed,
)
from gems.torch.interrupt import Interrupt
from gems.torch.launch import device_for
from gems.torch.lifetime import closable, connected
from gems.torch.offload.malloc import mmap_large, trim
from gems.torch.offload.stores import Store, make_store
from gems.torch.runtime.adapter import OneBatch, TorchAdapter
from gems.torch.runtime.async_pipeline import AsyncPipeline
from gems.torch.runtime.begin_step import begin_step, changed_buffers
from gems.torch.runtime.loss_parameters import (
    Leaves,
    parameters_of,
    place,
    whole_loss_state,
    with_loss,
)
from gems.torch.runtime.microbatch import Batch, describe, split, tensors
from gems.torch.runtime.microbatch_loss import Loss, MicrobatchLoss
from gems.torch.runtime.outputs import collect
from gems.torch.runtime.regularizer import Penalty, Regularizer
from gems.torch.runtime.sampleless_buffers import free_buffers
from gems.torch.runtime.stage_programs import PRECISIONS, StagePrograms
from gems.torch.runtime.stage_runner import StageRunner
from gems.torch.runtime.step_state import StepState
from gems.torch.setup import Surroundings, set_up
from gems.torch.spatial.group import CHANNEL
from gems.torch.state.deferred_init import DeferredInit, Initialize, place_weights
from gems.torch.state.full_state_dict import full_state_dict, load_full_state_dict, named_weights
from gems.torch.state.grad_bucket import restored
from gems.torch.state.loss_scale import LossScale
from gems.torch.state.optimizer_step import TIED, StageOptimizer
from gems.torch.state.ownership import extra_state_owners, ownership, reject_unordered, unordered
from gems.torch.state.rank_weights import RankWeights, size
from gems.torch.state.replicate import replicate
from gems.torch.state.rollback import Rollback
from gems.torch.state.sharded_optimizer import shard_optimizer
from gems.torch.state.sparse_gradients import dense, embeddings, reject_rows, square
from gems.torch.step import Step
from gems.torch.tensors.rng import key
from gems.torch.tracing.trace import as_module
from gems.transport.protocol import Done, Transport, Work

log = logging.getLogger(__name__)
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
THOROUGH, EVERY = 2, 100  # batches are compared whole in the first steps, and in every so-manieth
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


@closable
class Trainer:
    """A model under a plan. Every rank makes one, with the same arguments.

    model        any nn.Module (it may be on the meta device), or a list of them, one per stage
    loss         loss(output, target): the mean over a micro-batch. An nn.Module may have trainable
                 parameters: the last stage's ranks have them, and their optimizers step them
    optimizer    parameters -> torch optimizer; each rank has the one of its own stages
    sample       inputs of one micro-batch, for their shapes: a tensor, a tuple or a dict
    plan         a gems.Plan, a file of one, or "auto"
    memory       bytes per rank, e.g. "16GiB": a limit for "auto" plans, schedules and `recompute`
    costs        what blocks cost: "estimate"; "measure", which runs each distinct one; gems.Costs;
                 or "auto", which measures on GPUs and for plan="auto"
    machine      what estimates and "auto" plans are for: a preset, a file of one, or a Machine
    schedule     an order of one's own, instead of the plan's: compute actions of one copy, or
                 all that every rank does
    precision    "fp32" (as the model is), "bf16" or "fp16" by autocast
    clip         largest norm of the whole gradient
    accumulate   calls of `step` per update
    initialize   sets up the weights of a module, for models on the meta device
    scheduler    optimizer -> learning-rate scheduler, stepped after every update; one that looks at
                 a metric is given the loss of the call that made the update
    interrupt    signals to hear: `step` tells all ranks when one was told to stop
    offload_folder  where the files are of what the plan puts away on disk; the temporary folder
                 if left out
    batch_dim    where the samples of the targets are, if not along the first dim of tensors or in
                 lists with one entry per sample: a dim, "list", "whole" (all micro-batches get it
                 as it is), or a dict, list or tuple of these, shaped like the targets
    regularizer  a penalty on weights that is added to the loss: [(name, parameter), ...] -> one
                 number, given the parameters of each stage; what it gives is summed over stages
    timeout      seconds without a sign of life after which a rank is lost (default 60); slow work
                 gives signs of life

    It may be used by `with`, which closes it. A closed one raises GemsError.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        sample: Any = None,
        plan: Plan | str | Path = "auto",
        *,
        memory: str | float | None = None,
        costs: str | Costs = "auto",
        machine: str | Path | machines.Machine = "cpu",
        schedule: Schedule | None = None,
        precision: str = "fp32",
        clip: float | None = None,
        accumulate: int = 1,
        seed: int = 0,
        initialize: Initialize | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        transport: Transport | None = None,
        scheduler: MakeScheduler | None = None,
        interrupt: Interrupt | None = None,
        offload_folder: str | Path | None = None,
        batch_dim: Any = None,
        timeout: float | None = None,
        regularizer: Regularizer | None = None,
    ) -> None:
        self.transport = connected(transport, backend, timeout)
        self.rank = self.transport.rank
        self.device = torch.device(device) if device is not None else device_for(self.transport)
        self.loss, self.clip, self.accumulate, self.seed = loss, clip, accumulate, seed
        self.precision = precision
        self.memory = None if memory is None else machines.bytes_of(memory)
        described = isinstance(machine, machines.Machine)
        self.machine = machine if described else machines.machine(machine)
        self.steps = 0  # calls of `step` so far
        self.window = 0  # samples of the update under way, when several calls make one
        self.first = 0  # those of its first call
        self.interrupt, self.closed = interrupt, False
        self.offload_folder, self.batch_dim = offload_folder, batch_dim
        self.regularizer = regularizer
        self.stores: list[Store] = []
        self._local: Timeline | None = None
        self.trains = optimizer is not None
        self.failed: BaseException | None = None  # what left this trainer unusable
        attempt(
            self.transport,
            lambda: self._prepare(model, sample, plan, costs, schedule, initialize),
        )
        self.scale = LossScale() if precision == "fp16" else None
        self.compared: list[str] = []  # hyper-parameters that must be the same on all ranks
        self._compare_optimizers(
            attempt(self.transport, lambda: self._prepare_updates(optimizer, scheduler))
        )

    # --- setting up -----------------------------------------------------------------------------

    def _prepare(
        self,
        model: nn.Module | Sequence[nn.Module],
        sample: Any,
        plan: Plan | str | Path,
        costs: str | Costs,
        schedule: Schedule | None,
        initialize: Initialize | None,
    ) -> None:
        """Trace, plan, schedule, keep what is ours. All ranks must come to the same."""
        self._check_options(sample)
        self.model, leaves = as_module(model)
        where = Surroundings(self.transport, self.device, self.machine, self.memory, self.precision)
        chosen_here = plan == "auto"
        found = set_up(self.model, leaves, sample, plan, costs, schedule, where)
        traced, stage_of, plan = found.traced, found.stage_of, found.plan
        self.plan, self.costs, self.schedule = plan, found.costs, found.schedule
        self.leaves = traced.record.leaves
        same_model = fingerprint.of_model(traced, self.model)
        state, saved = plan.residency[0], plan.activations[0]
        self.on_disk = "disk" in (saved.offload, state.weights_offload, state.optimizer_offload)
        if self.offload_folder is not None and not (chosen_here or self.on_disk):
            raise PlanError(
                f"offload_folder is {str(self.offload_folder)!r}, but this plan puts nothing away "
                "on disk; say what with Plan(offload='activations:disk'), or leave the folder out"
            )
        self._reject_eager(plan)
        self.owned = ownership(traced.graph, stage_of, plan)
        self.extra_state_owners = extra_state_owners(self.model, traced, stage_of, self.owned, plan)
        self.loss_weights = parameters_of(self.loss, self.model) if self.trains else {}
        self.owned = with_loss(self.owned, self.loss_weights, plan)
        self.leaves_of_loss = Leaves(self.model)
        self.first_name = traced.record.names
        self.unordered = unordered(plan, self.schedule)
        free = free_buffers(traced.record, self.model) if not plan.asynchronous else ()
        reject_unordered(self.model, traced, self.owned, self.unordered, free)
        if self.on_disk:
            mmap_large()
        deferred = place_weights(
            self.model,
            self.owned.on(self.rank),
            self.first_name,
            self.device,
            self.seed,
            initialize,
            deferred=self._put_away_names(),
        )
        last = self.rank in plan.replica_groups[plan.depth - 1]
        device = self.device if last else torch.device("meta")
        self.loss_weights = place(self.loss, self.loss_weights, device)
        self._agree_on_start(same_model, sample)
        self._connect(deferred)
        self.async_pipeline = AsyncPipeline(self) if plan.asynchronous else None
        if self.on_disk:
            trim()
        self.runner.programs.remember(sample, traced)
        self._reject_nothing_shared()

    def _agree_on_start(self, model: int, sample: Any) -> None:
        """Before anything depends on it. A rank that failed meets the others here, too."""
        same = {
            "plan": f"#{key(str(self.schedule), self.plan):x}",
            "sample": describe(sample),
            "seed": self.seed,
            "precision": self.precision,
            "clip": self.clip,
            "accumulate": self.accumulate,
            "loss": _named(self.loss),
            "regularizer": _named(self.regularizer),
        }
        claims = self.transport.all_gather_object(
            Claim("Trainer", model=model, settings=same).words()
        )
        reject_failed(claims)
        if any(claim != claims[0] for claim in claims):
            raise difference(claims, self.rank)

    def _reject_nothing_shared(self) -> None:
        (partitioned,) = self.runner.programs.recordings.values()
        if self.plan.activations[0].partitioned and not partitioned.shared():
            raise PlanError(
                "partition_activations shards the inputs that a spatial group saves whole, but all "
                "that its stages save to recompute from is in tiles already, like the image; "
                "remove it"
            )

    def _reject_eager(self, plan: Plan) -> None:
        wants = {"clip": self.clip is not None, "precision='fp16'": self.precision == "fp16"}
        if plan.optimizer_step == "eager" and any(wants.values()):
            what = " and ".join(name for name, is_so in wants.items() if is_so)
            raise PlanError(
                "optimizer_step='eager' updates a stage before the others have their gradients, "
                f"and {what} must see all of them first; use optimizer_step='end', or remove {what}"
            )

    def _check_options(self, sample: Any) -> None:
        if not tensors(sample):
            raise ShapeError(
                "sample must have the shapes of one micro-batch of inputs, "
                f"e.g. torch.empty(1, 3, 1024, 1024); got {type(sample).__name__}"
            )
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise PlanError(f"precision {self.precision!r} is unknown; choose one of {known}")
        if self.regularizer is not None and self.loss is None:
            raise PlanError("a regularizer is added to the loss; give the trainer one")
        if self.accumulate < 1:
            raise PlanError(f"accumulate is {self.accumulate}; an update takes at least one step")

    def _put_away_names(self) -> set[str]:
        """Of weights that this rank does not have but while a stage runs."""
        if not self.plan.residency[0].weights_offload:
            return set()
        trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
        alone = (self.owned.only(stage) for stage in self.plan.stages_on[self.rank])
        return trained.intersection(name for names in alone for name in names)

    def _connect(self, deferred: DeferredInit) -> None:
        """Set up the links and groups, replicate initial weights, make the adapter and engines."""
        plan, transport = self.plan, self.transport
        rows = (self.schedule, forward_only(plan))
        links = {
            (rank, other, 0)
            for schedule, numbered in zip(rows, (plan.unrolled, plan), strict=True)
            for rank, a in schedule
            if a.way == ">"
            for other in numbered.spatial_group_for(a.peer, a.micro_batch)
            if other != rank
        }
        teams = {team for row in plan.spatial_groups for team in row}
        links |= {(a, b, CHANNEL) for team in teams for a in team for b in team if a != b}
        groups = set(plan.replica_groups) | {
            self.owned.replica_groups[n] for n in self.owned.tied()
        }
        transport.prepare(sorted(groups), sorted(links))
        replicate(named_weights(self.model) | self.loss_weights, self._held_by(), transport)
        for p in (
            *self.model.parameters(),
            *self.loss_weights.values(),
        ):  # what an earlier backward left is no part of a step
            p.grad = None
        self.runner = self._make_runner(deferred)
        self.weights = self.runner.weights
        self.batches = OneBatch()
        self.adapter = TorchAdapter(self.runner, self.batches)
        if not plan.asynchronous:
            early = self._update_early
            self.engine = Engine(plan, self.schedule, self.adapter, transport, early)
        self.reader = Engine(plan, rows[1], self.adapter, transport)

    def _make_runner(self, deferred: DeferredInit) -> StageRunner:
        plan, actions = self.plan, self.schedule.ranks[self.rank]
        split = {(a.stage, a.micro_batch) for a in actions if a.kind is Kind.INPUT and a.computes}
        activation_store = self._store(plan.activations[0].offload)
        weights = RankWeights(
            self.model,
            plan,
            self.owned,
            self.transport,
            loss_weights=self.loss_weights,
            deferred=deferred,
            host=self._store(plan.residency[0].weights_offload),
        )
        weights.needs_norm = self.clip is not None or self.precision == "fp16"
        programs = StagePrograms(
            self.model,
            plan,
            self.owned,
            self.unordered,
            device=self.device,
            precision=self.precision,
            seed=self.seed,
            machine=self.machine,
            transport=self.transport,
            storages=weights.storages,
            deferred={stage for stage, _ in split},
            leaves=self.leaves,
        )
        self.leaves_of_loss.allow(weights.by_name, self.owned, plan.depth - 1, self.rank, self.loss)
        penalty = self.regularizer and Penalty(self.regularizer, self.owned, weights.by_name)
        loss = MicrobatchLoss(
            self.loss, plan, programs.draws, self.device, self.leaves_of_loss, penalty
        )
        return StageRunner(
            programs,
            weights,
            loss,
            deferred=split,
            offloaded={(a.stage, a.micro_batch) for a in actions if a.kind is Kind.STORE},
            activation_store=activation_store,
        )

    def _held_by(self) -> dict[str, tuple[int, ...]]:
        """The holders of what this rank has."""
        return {n: ranks for n, ranks in self.owned.replica_groups.items() if self.rank in ranks}

    def _store(self, place: str) -> Store | None:
        """Where something is while it is put away; None if it stays."""
        if not place:
            return None
        self.stores.append(make_store(place, self.device, self.offload_folder))
        return self.stores[-1]

    def forecast(self) -> Timeline:
        """What a step of this plan should take: seconds by the costs, and live bytes over time.

        The optimizer's state is counted as it is now; it has none before the first step.
        """
        self._meet("forecast")
        state = size(self.weights.optimizer_state())
        trained = size(list(self._stepped().values()))
        states = self.transport.all_gather_object(state / trained if trained else 0.0)
        return simulate(self.schedule, self.plan, self.costs, self.machine, state=max(states))

    def _prepare_updates(
        self, optimizer: MakeOptimizer | None, scheduler: MakeScheduler | None
    ) -> dict[str, Any]:
        """Optimizer and scheduler; tells what must be the same on all ranks."""
        if scheduler is not None and optimizer is None:
            raise PlanError("a scheduler needs an optimizer; give the trainer one")
        self.optimizer = self._make_optimizer(optimizer)
        self.weights.optimizer = self.optimizer
        self.stage_optimizer = self._make_updates()
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None
        if self.optimizer is None:
            return {"kinds": "none"}
        stepped = self._stepped().items()
        several = {id(p): n for n, p in stepped if len(self.owned.replica_groups[n]) > 1}
        return {
            "kinds": f"{_named(self.optimizer)}, {_named(self.scheduler)}",
            "groups": len(self.optimizer.param_groups),
            "comparable": settings.comparable(self.optimizer),
            "replicated": settings.by_parameter(self.optimizer, several),
        }

    def _compare_optimizers(self, told: list[dict[str, Any]]) -> None:
        kinds = [mine["kinds"] for mine in told]
        if len(set(kinds)) > 1:
            raise PeerError(
                f"ranks have different optimizers or schedulers: {listed(kinds)}. Give all ranks "
                "the same"
            )
        if self.optimizer is None:
            return
        self.compared = settings.shared(told)
        for name in {name for mine in told for name in mine["replicated"]}:
            ranks = [rank for rank, mine in enumerate(told) if name in mine["replicated"]]
            if len({told[rank]["replicated"][name] for rank in ranks}) > 1:
                raise PeerError(
                    f"ranks {ranks} hold replicas of {name} with different hyper-parameters; the "
                    "optimizer must give a parameter the same ones on every rank"
                )
        agree(self.transport, Claim("Trainer", settings=self._settings()))

    def _settings(self) -> dict[str, Any]:
        """What may be changed between steps, and must be changed on all ranks."""
        found: dict[str, Any] = {"clip": self.clip, "accumulate": self.accumulate}
        if self.optimizer is not None:
            found |= settings.now(self.optimizer, self.compared)
        if self.scheduler is not None:
            found["steps of the scheduler"] = getattr(self.scheduler, "last_epoch", None)
        return found

    def _make_optimizer(self, make: MakeOptimizer | None) -> torch.optim.Optimizer | None:
        if make is None:
            return None
        mine = self.parameters() or [nn.Parameter(torch.zeros(0, device=self.device))]
        optimizer = make(mine)
        shards = {n for shard in self.weights.shards.values() for n in shard.parameters}
        alone = {n for n, ranks in self.owned.replica_groups.items() if ranks == (self.rank,)}
        reject_rows(optimizer, [n for n in embeddings(self.model) if n in shards or n not in alone])
        shard_optimizer(optimizer, self.weights.shards.values())
        return optimizer

    def _make_updates(self) -> StageOptimizer | None:
        """Stage by stage, where something is put away or updates are eager."""
        late = not self.plan.residency[0].offloads and self.plan.optimizer_step == "end"
        if self.optimizer is None or late:
            return None
        place = self.weights.host
        if place is None:
            place = self._store(self.plan.residency[0].optimizer_offload)
            self.weights.stores += [] if place is None else [place]
        elif self.plan.residency[0].steps_on_host:
            place = None  # the state comes to be there by itself
        stepped, stages = self._stepped(), self.plan.stages_on[self.rank]
        parts = {s: [stepped[n] for n in self.owned.only(s) if n in stepped] for s in stages}
        alone = {id(p) for mine in parts.values() for p in mine}
        parts[TIED] = [p for p in stepped.values() if id(p) not in alone]
        return StageOptimizer(self.optimizer, parts, self.weights.shards, place)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank has: of its stages and, on ranks of the last stage, of a
        loss that is an nn.Module.

        They are the model's own, whole. With zero=3 or offloaded weights they have no memory
        between steps, and tell their shape, type and gradient only: whatever reads their numbers
        raises (`state_dict` has them). What the optimizer steps is in its `param_groups`: with
        zero=1 and above the parts of parameters that this rank owns, flat.
        """
        return [p for _, p in self._named_parameters()]

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        held = self.weights.held
        mine = [*self.model.named_parameters(), *self.loss_weights.items()]
        return [(n, p) for n, p in mine if n in held]

    def _stepped(self) -> dict[str, nn.Parameter]:
        """What this rank's optimizer steps: parameters, or the pieces of them that it owns."""
        shards = self.weights.shards.values()
        shared = {name for shard in shards for name in shard.parameters}
        alone = {n: p for n, p in self._named_parameters() if n not in shared}
        return alone | {n: x.param for shard in shards for n, x in shard.param_shards.items()}

    # --- training -------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any = None) -> Step:
        """One step on the whole batch, given to every rank; updates when its window is full."""
        self.reject_unusable()
        if self.loss is None or self.optimizer is None:
            raise GemsError("this trainer has no loss or no optimizer; it can only predict")
        if self.async_pipeline is not None:
            return self.async_pipeline.step(inputs, targets)
        start = perf_counter()
        before = Rollback.at(self, self.weights.parameters_here)
        try:
            batch = self._begin_step(inputs, targets, before)
        except BaseException:
            before.undo(self)
            raise
        update = self.state.update
        try:
            self._local = self.engine.step(self.steps)
            self.state.finish_running_stats(self.weights)
            self.window += batch.samples
            self.steps += 1
            loss, norm, interrupted = self._agree_on_loss(update)
        except BaseException as error:
            self._break_off(error, before)
            raise
        if not math.isfinite(loss):
            self._forget_gradients()
            before.undo(self)
            raise LossError(
                f"the loss is {loss} in step {self.steps}; no update was made, and all is as "
                "before the step. Look at the data of this step, lower the learning rate, or clip "
                "gradients"
            )
        # Gradients were averaged over the first call's samples, and may be scaled.
        factor = self.first / self.window / (self.scale.value if self.scale else 1.0)
        try:
            updated = update and self._update(factor, norm * factor)
            if updated:
                self._step_scheduler(loss)
        except BaseException as error:  # some weights have made their step, and some have not
            self.failed = error
            raise
        if update:
            self.window = 0
        self._release_kept()
        if self.on_disk:
            trim()
        shown = norm * factor if update and self.clip is not None else None
        return Step(loss, batch.samples, perf_counter() - start, updated, shown, interrupted)

    def _begin_step(self, inputs: Any, targets: Any, before: Rollback) -> Batch:
        """Get ready for a step, and see that all ranks are about to make the same one."""
        update = (self.steps + 1) % self.accumulate == 0

        def begin(batch: Batch) -> None:
            if not self.window:
                self.first = batch.samples
            # Losses are weighed so that gradients are averaged over all samples of the window; the
            # first call does not know their number, so the last one mends it.
            scale = batch.samples / self.first * (self.scale.value if self.scale else 1.0)
            self._begin_batch(batch, training=True, scale=scale, update=update)
            before.save_buffers(changed_buffers(self.state, self.weights))

        batch = self._begin("step", inputs, targets, begin)
        self.factor = self.first / (self.window + batch.samples)  # for eager updates
        if self.stage_optimizer is not None:
            self.stage_optimizer.stepped.clear()
        return batch

    def _break_off(self, error: BaseException, before: Rollback) -> None:
        """A step failed half-way. One rank alone, with all of its state in place, can go on from
        before the step; others cannot know how far their peers came."""
        before.undo(self)
        whole = self.stage_optimizer is None and not self.weights.shards
        if self.transport.world > 1 or not whole or self.runner.activation_store is not None:
            self.failed = error

    def flush(self) -> Step | None:
        """Finish what `step` left under way with schedule "2bw", and make its update; all ranks
        must call it. The next batch uses the weights before the newest, as without it.

        All that needs the model as it is, such as `predict` and `save`, does it first. None if
        nothing is under way, as always with other schedules.
        """
        return self.async_pipeline.flush() if self.async_pipeline is not None else None

    @property
    def state(self) -> StepState:
        """Of the last batch that began."""
        return self.batches.state

    def _begin_batch(self, batch: Batch, **options: Any) -> None:
        self.batches.state = begin_step(self.runner, batch, self.steps, **options)

    def _begin(self, call: str, inputs: Any, targets: Any, begin: Callable[[Batch], None]) -> Batch:
        """Split a batch and get ready for it. All ranks must be about to do the same; otherwise
        messages would not fit, or mix what does not belong together."""
        try:
            batch = split(inputs, targets, self.plan.total, self.batch_dim)
            try:
                begin(batch)
            except TraceError as error:
                raise ShapeError(
                    f"the model does not take inputs {describe(batch.inputs[0])}: {error}"
                ) from error
            claim = self.claim(call, batch, (inputs, targets), self.runner.programs.structure.last)
        except Exception as error:
            agree_on_failure(self.transport, call, error)
            raise
        agree(self.transport, claim)
        return batch

    def claim(self, call: str, batch: Batch, given: Any, mode: int) -> Claim:
        """What this rank is about to do, and with what, for the others to compare. `mode` is the
        model's, see Structure."""
        if self.transport.world == 1:
            return Claim(call)
        first = describe(batch.inputs[0])
        thorough = self.steps < THOROUGH or self.steps % EVERY == 0
        return Claim(
            call,
            progress=self._progress(),
            model=key(mode, self.runner.programs.recordings.digest),
            settings=self._settings(),
            batch=key(batch.sizes, first, fingerprint.of_batch(given, thorough=thorough)),
            given=f"step {self.steps}, {first} first of {batch.samples} samples",
        )

    def _progress(self) -> dict[str, Any]:
        return {"calls of step": self.steps, "samples accumulated": self.window}

    def _meet(self, call: str, **facts: Any) -> None:
        """All ranks must make this call."""
        self.reject_unusable()
        agree(self.transport, Claim(call, progress=self._progress(), settings=facts))

    def _agree_on_loss(self, update: bool) -> tuple[float, float, bool]:
        """The step's loss, the gradient's norm, whether a rank was told to stop: each rank has a
        part of them."""
        if update:
            self._sum_tied()
        wants_norm = update and (self.clip is not None or self.scale is not None)
        mine = self._square_norm() if wants_norm else 0.0
        told = self.interrupt is not None and self.interrupt.wanted
        loss = self.runner.loss.of_step(self.state)
        parts = torch.tensor([loss, mine, told], dtype=torch.float64)
        self.transport.all_reduce(parts, tuple(range(self.transport.world))).wait()
        loss, square, tellings = parts.tolist()
        return loss, math.sqrt(square) if square >= 0 else math.nan, tellings > 0

    def _sum_tied(self) -> None:
        """Weights that several stages use: their gradients are summed like a replica's."""
        if not (tied := self.owned.tied()):
            return
        parameters = dict(self._named_parameters())
        for name in tied:
            p = parameters.get(name)
            if p is None or not self.weights.trains(p):
                continue
            gradient = torch.zeros_like(p) if p.grad is None else dense(p.grad)
            flat = torch.cat((gradient.reshape(-1), gradient.new_tensor([p.grad is not None])))
            self.transport.all_reduce(flat, self.owned.replica_groups[name]).wait()
            p.grad = restored(flat[:-1], p) if flat[-1].item() else None

    def _square_norm(self) -> float:
        """Of the gradients that this rank is the first to have, so that each counts once."""
        total = 0.0
        shards = self.weights.shards.values()
        pieces = {n for shard in shards if shard.level for n in shard.param_shards}
        counted = pieces | {
            n for n, ranks in self.owned.replica_groups.items() if ranks[0] == self.rank
        }
        for name, p in self._stepped().items():
            if p.grad is not None and name in counted:
                total += square(p.grad)
        squares = [(n, square) for shard in shards for n, square in shard.grad_squares.items()]
        return total + sum(square for name, square in squares if name in counted)

    def _update(self, factor: float, norm: float) -> bool:
        """Take the optimizer's step on gradients times `factor`, clipped; `norm` is theirs then."""
        assert self.optimizer is not None
        if self.scale is not None:
            overflowed = not math.isfinite(norm)
            self.scale.update(overflowed)
            if overflowed:
                self._forget_gradients()
                return False
        if self.clip is not None and norm > self.clip:
            factor *= self.clip / (norm + 1e-6)
        if self.stage_optimizer is not None:
            for stage in self.stage_optimizer.unstepped():
                here = self.weights.resident_memory()
                self._count_update(here, self.stage_optimizer.step(stage, factor))
        else:
            if factor != 1.0:
                for p in self._stepped().values():
                    if p.grad is not None:
                        p.grad.mul_(factor)
            self.optimizer.step()
        self._forget_gradients()
        self._gather_updated()
        return True

    def _update_early(self, stage: int) -> tuple[int, Work]:
        """A stage's gradients are complete, and its update need not wait for the others'."""
        assert self.stage_optimizer is not None
        if not self.state.update:  # more calls will add to these gradients
            return 0, Done()
        losses = [(i, float(loss)) for i, loss in self.state.losses]
        for i, loss in losses:
            if not math.isfinite(loss):
                raise LossError(
                    f"the loss of micro-batch {i} is {loss} in step {self.steps}; no update was "
                    "made on this rank. Look at the data of this step, or lower the learning rate"
                )
        return self.stage_optimizer.step_async(stage, self.factor)

    def _count_update(self, here: Memory, brought: int) -> None:
        """What is brought back for a late update may be the most that a step has here."""
        assert self._local is not None
        here = replace(here, optimizer=here.optimizer + brought)
        if here.total > self._local.peaks[0].total:
            self._local = replace(self._local, peaks=(here,))

    def _forget_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        for shard in self.weights.shards.values():
            shard.clear_grads()

    def _gather_updated(self) -> None:
        """Each holder has stepped its part of the weights; where all keep them, all get them."""
        shards = [shard for shard in self.weights.shards.values() if 0 < shard.level < 3]
        resident = [shard for shard in shards if shard.is_unsharded]
        pairs = [(memory, shard.ranks) for shard in resident for memory in shard.flat_weights]
        for handle in [self.transport.all_gather(*pair) for pair in pairs]:
            handle.wait()
        for shard in (x for x in shards if not x.is_unsharded):  # offloaded, one at a time
            for handle in shard.unshard():
                handle.wait()
            for memory in shard.flat_weights:
                self.transport.all_gather(memory, shard.ranks).wait()
            shard.write_back()
            shard.reshard()

    def _release_kept(self) -> None:
        for shard in self.weights.shards.values():
            shard.release_leaked_views()

    def _step_scheduler(self, loss: float) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    # --- prediction -----------------------------------------------------------------------------

    def predict(self, inputs: Any) -> Any:
        """The model's output in evaluation mode, for a whole batch, on every rank's host."""
        self.reject_unusable()
        self.flush()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                self._begin(
                    "predict",
                    inputs,
                    None,
                    lambda batch: self._begin_batch(batch, training=False),
                )
                self._local = self._read()
                return collect(self.state, self.plan, self.transport)
        finally:
            self._release_kept()
            for module, training in modes:  # one by one: some may be frozen
                module.training = training

    def _read(self) -> Timeline:
        try:
            return self.reader.step(self.steps)
        except BaseException as error:  # nothing has changed, but the others wait for messages
            self.failed = None if self.transport.world == 1 else error
            raise

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The plain model's whole state dict, same keys, on every rank, in host memory.

        All ranks must call it.
        """
        self.reject_unusable()
        self.flush()
        self._meet("state_dict")
        with self.weights.unsharded():
            return full_state_dict(
                self.model,
                self.owned,
                self.first_name,
                self.extra_state_owners,
                self.transport,
                self.weights.copy,
            )

    def loss_state_dict(self) -> dict[str, torch.Tensor]:
        """The trainable parameters of a loss that is an nn.Module, by their names in it, on every
        rank, in host memory; checkpoints have them too. All ranks must call it."""
        self.reject_unusable()
        self.flush()
        self._meet("loss_state_dict")
        with self.weights.unsharded():
            weights, copy = self.loss_weights, self.weights.copy
            return whole_loss_state(weights, self.owned, self.transport, copy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a plain model's state dict; each rank takes its part. gems.read_weights reads one
        from a file. All ranks must call it, with the same."""
        self.reject_unusable()
        self.flush()
        same = fingerprint.of_batch(dict(state), thorough=False)
        self._meet("load_state_dict", **{"state dict": f"#{same:x}"})
        with self.weights.unsharded(fetched=False):
            held, put = self.owned.on(self.rank), self.weights.put
            load_full_state_dict(self.model, state, held, self.first_name, put)
        if self.async_pipeline is not None:
            self.async_pipeline.resume({})

    def save(self, path: str | Path, *, extra: Any = None, keep: int = 0) -> Path:
        """Write a checkpoint of all that training goes on from; all ranks must call it.

        It appears at `path` in one move, when it is complete; what has the name already is
        replaced. `extra` is what you need besides, of numbers, texts, lists, dicts, tensors and
        arrays (rank 0's is saved): where the data is, say. `keep=3` leaves the newest three of
        `step-100`, `step-200`, ... All ranks must see the same folder.

        It may be called between any two steps, also while calls of `step` make one update.
        """
        from gems.torch.checkpoint import (
            save_load as checkpoint,  # loads DCP, for which those who do not save need not wait
        )

        self.reject_unusable()
        self.flush()
        self._meet("save")
        with self.weights.unsharded():
            return checkpoint.save(self, path, extra, keep)

    def load(self, path: str | Path, *, strict: bool = True) -> Any:
        """Go on from a checkpoint, saved under this or any other plan; gives its `extra`.

        All ranks must call it. Under the same plan training goes on bit for bit. Options of the
        optimizer, the seed and random generators become the checkpoint's. One that is damaged, of
        another model, optimizer or scheduler is refused on all ranks, and nothing was changed
        then; `strict=False` takes the weights that fit, and starts training afresh where optimizer
        or scheduler do not. Nothing in the file can run code.
        """
        from gems.torch.checkpoint import save_load as checkpoint

        self.reject_unusable()
        self.flush()
        self._meet("load")
        with self.weights.unsharded():
            return checkpoint.load(self, path, strict)

    def export(self, path: str | Path) -> Path:
        """Write the plain model's state dict as `.pt` or `.safetensors`; all ranks must call it."""
        state = self.state_dict()
        path = Path(path)

        def written() -> None:
            if self.rank == 0:
                write_weights(path, state)

        together(self.transport, f"writing {path}", written)
        return path

    def reject_unusable(self) -> None:
        """Raise if this trainer failed in a way that it cannot go on from."""
        if self.failed is not None:
            raise GemsError(
                "this trainer has failed in the middle of a step, and its state is not that of any "
                f"step ({type(self.failed).__name__}: {self.failed}); make a new one, and load the "
                "last checkpoint"
            ) from self.failed

    def timeline(self) -> Timeline:
        """The last step as all ranks measured it. All ranks must call it."""
        if self._local is None:
            raise GemsError("nothing has run yet; call step first")
        self._meet("timeline")
        return merged(self.transport.all_gather_object(self._local))

    @property
    def peak(self) -> int:
        """Most live bytes of this rank in the last step or prediction."""
        if self._local is None:
            return 0
        return max((memory.total for memory in self._local.peaks), default=0)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.transport.fail(error)  # others may be in the middle of something
        self.close()

    def close(self) -> None:
        """Leave the other ranks; those that still need this one raise PeerError. A process group
        that GEMS started ends with the last trainer on it."""
        if self.closed:
            return
        going = self.async_pipeline is not None and self.failed is None
        if going and sys.exc_info()[1] is None:  # else others may be elsewhere, and never come here
            self.flush()
        self.closed = True
        if self.stage_optimizer is not None:
            self.stage_optimizer.close()
        for away in self.stores:
            away.close()
        self.transport.close()


def _named(thing: Any) -> str:
    """What a loss, optimizer or scheduler is, in a form that ranks can compare."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    if thing is None or isinstance(thing, (torch.optim.Optimizer, LRScheduler)):
        return name
    return f"{name} #{fingerprint.of_function(thing):x}"
