"""The part of a model that one rank holds and runs under a plan."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from gems.distributed.links import exchanges_inside_stages, links_between_stages
from gems.distributed.ownership import ownership, unordered
from gems.errors import PlanError
from gems.plans.plan import Plan
from gems.schedule import nccl
from gems.schedule.action import Kind, Schedule
from gems.schedule.lower.passes import forward_only
from gems.torch.offload.stored_value import ValueStore
from gems.torch.offload.stores import Store, make_store
from gems.torch.runtime.loss_parameters import Leaves, parameters_of, place, with_loss
from gems.torch.runtime.microbatch_loss import Loss, MicrobatchLoss
from gems.torch.runtime.partitioned_model import PartitionedModel
from gems.torch.runtime.regularizer import Penalty, Regularizer
from gems.torch.runtime.sampleless_buffers import free_buffers
from gems.torch.runtime.stage_programs import StagePrograms
from gems.torch.runtime.stage_runner import StageRunner
from gems.torch.setup import Setup, Surroundings
from gems.torch.state.deferred_init import DeferredInit, Initialize, place_weights
from gems.torch.state.full_state_dict import named_weights
from gems.torch.state.ownership import extra_state_owners, reject_unordered
from gems.torch.state.rank_weights import RankWeights
from gems.torch.state.replicate import replicate
from gems.transport.protocol import Link

QUEUES, MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32


class RankModel:
    """What this rank has of a model and its loss: weights in place, and, once it is connected,
    the runner of its stages."""

    runner: StageRunner

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        found: Setup,
        where: Surroundings,
        *,
        seed: int,
        initialize: Initialize | None,
        offload_folder: str | Path | None,
    ) -> None:
        """Keep the weights of this rank's stages, initialise those that have no values yet."""
        self.model, self.loss, self.where, self.seed = model, loss, where, seed
        self.plan, self.schedule = found.plan, found.schedule
        self.predicting = forward_only(found.plan)
        self.transport, self.rank = where.transport, where.transport.rank
        self.offload_folder = offload_folder
        self.stores: list[Store] = []
        self.links: set[Link] = set()  # that are set up
        traced, plan = found.traced, found.plan
        self.leaves = traced.record.leaves
        self.owned = ownership(traced.graph, found.stage_of, plan)
        self.extra_state_owners = extra_state_owners(
            model, traced, found.stage_of, self.owned, plan
        )
        self.loss_weights = parameters_of(loss, model)
        self.owned = with_loss(self.owned, self.loss_weights, plan)
        self.leaves_of_loss = Leaves(model)
        self.first_name = traced.record.names
        self.unordered = unordered(plan, self.schedule)
        free = free_buffers(traced.record, model) if not plan.asynchronous else ()
        reject_unordered(model, traced, self.owned, self.unordered, free)
        self.deferred = place_weights(
            model,
            self.owned.on(self.rank),
            self.first_name,
            where.device,
            seed,
            initialize,
            deferred=self._offloaded_names(),
        )
        last = self.rank in plan.replica_groups[plan.depth - 1]
        device = where.device if last else torch.device("meta")
        self.loss_weights = place(loss, self.loss_weights, device)

    def _offloaded_names(self) -> set[str]:
        """Of weights that this rank does not have but while a stage runs."""
        if not self.plan.residency[0].weights_offload:
            return set()
        trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
        alone = (self.owned.only(stage) for stage in self.plan.stages_on[self.rank])
        return trained.intersection(name for names in alone for name in names)

    # --- the other ranks ------------------------------------------------------------------------

    def connect(self, regularizer: Regularizer | None) -> None:
        """Set up groups, replicate initial weights, make the runner. All ranks call it,
        once they know that they have the same."""
        if getattr(self.transport, "backend", "") == "nccl":
            require_queues(self.schedule, self.plan)
        self._prepare_groups()
        everything = named_weights(self.model) | self.loss_weights
        groups = self.owned.replica_groups.items()
        replicate(
            everything, {n: ranks for n, ranks in groups if self.rank in ranks}, self.transport
        )
        # What an earlier backward left is no part of a step.
        for p in (*self.model.parameters(), *self.loss_weights.values()):
            p.grad = None
        self.runner = self._make_runner(self.deferred, regularizer)

    def _prepare_groups(self) -> None:
        """For sums of gradients, and for exchanges inside of tiled stages."""
        plan = self.plan
        groups = set(plan.replica_groups) | {
            self.owned.replica_groups[name] for name in self.owned.tied()
        }
        links = self._all_links() if plan.asynchronous else set()
        self.transport.prepare(sorted(groups), sorted(links), exchanges_inside_stages(plan))

    def _all_links(self) -> set[Link]:
        """With schedule "2bw" each rank tells all ranks of the next stage what it is about to do,
        also those that need nothing else of it."""
        return {
            (rank, other)
            for schedule, numbered in (
                (self.schedule, self.plan.unrolled),
                (self.predicting, self.plan),
            )
            for rank, a in schedule
            if a.way == ">"
            for other in numbered.spatial_group_for(a.peer, a.micro_batch)
            if other != rank
        }

    def connect_stages(self, partitions: Iterable[PartitionedModel]) -> None:
        """Set up the links of the ranks that send each other messages if the model is partitioned
        like this. All ranks call it, once they know that they have the same."""
        if self.plan.asynchronous:
            return
        new: set[Link] = set()
        for partitioned in partitions:
            if partitioned.links is None:
                schedules = (self.schedule, self.predicting)
                partitioned.links = links_between_stages(
                    partitioned.message_transfers, self.plan, schedules
                )
            new |= partitioned.links - self.links
        if new:
            self.transport.prepare([], sorted(new))
            self.links |= new

    def _make_runner(self, deferred: DeferredInit, regularizer: Regularizer | None) -> StageRunner:
        plan, actions = self.plan, self.schedule.ranks[self.rank]
        split = {(a.stage, a.micro_batch) for a in actions if a.kind is Kind.INPUT and a.computes}
        activation_store = self.store(plan.activations[0].offload)
        weights = RankWeights(
            self.model,
            plan,
            self.owned,
            self.transport,
            loss_weights=self.loss_weights,
            deferred=deferred,
            host=self.store(plan.residency[0].weights_offload),
            masters=self.where.master_weights,
        )
        programs = StagePrograms(
            self.model,
            plan,
            self.owned,
            self.unordered,
            device=self.where.device,
            precision=self.where.precision,
            memory_format=self.where.memory_format,
            compiling=self.where.compiling,
            seed=self.seed,
            machine=self.where.machine,
            transport=self.transport,
            storages=weights.storages,
            deferred={stage for stage, _ in split},
            leaves=self.leaves,
            values=self._value_store(),
        )
        self.leaves_of_loss.allow(weights.by_name, self.owned, plan.depth - 1, self.rank, self.loss)
        penalty = regularizer and Penalty(regularizer, self.owned, weights.by_name)
        loss = MicrobatchLoss(
            self.loss, plan, programs.draws, self.where.device, self.leaves_of_loss, penalty
        )
        return StageRunner(
            programs,
            weights,
            loss,
            deferred=split,
            offloaded={(a.stage, a.micro_batch) for a in actions if a.kind is Kind.STORE},
            activation_store=activation_store,
        )

    def _value_store(self) -> ValueStore | None:
        """For what streamed stages hand each other, if any of them does so by way of a store."""
        places = {policy.values for policy in self.plan.activations} - {""}
        store = self.store(places.pop()) if places else None
        return None if store is None else ValueStore(store, self.where.device)

    def store(self, place: str) -> Store | None:
        """A store on host or disk; None if there is no such place."""
        if not place:
            return None
        self.stores.append(make_store(place, self.where.device, self.offload_folder))
        return self.stores[-1]

    def close(self) -> None:
        """End the threads of this rank, and give up what is in its stores."""
        if (messages := self.runner.programs.stored_messages) is not None:
            messages.close()
        for store in self.stores:
            store.close()

    def reject_nothing_partitioned(self) -> None:
        (partitioned,) = self.runner.programs.recordings.values()
        if self.plan.activations[0].partitioned and not partitioned.shared():
            raise PlanError(
                "partition_activations shards the inputs that a spatial group saves whole, but all "
                "that its stages save to recompute from is in tiles already, like the image; "
                "remove it"
            )


def require_queues(schedule: Schedule, plan: Plan) -> None:
    """Raise if the streams of a GPU may share hardware queues, and the schedule might hang then."""
    needed = nccl.queues(schedule, plan)
    there = int(os.environ.get(QUEUES, "8"))
    if needed > there:
        advice = f"set {QUEUES}={needed} before the start"
        raise PlanError(
            f"this schedule might hang under NCCL: the {needed} streams of a rank need a hardware "
            f"queue each, and there are {there}; "
            + (advice if needed <= MOST_QUEUES else "take schedule '1f1b', or fewer tiles")
        )
