"""A model whose stages are on the ranks of a plan: what it predicts, and its weights as a whole."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gems import hardware as machines
from gems.distributed.agree import on_all_ranks
from gems.distributed.consensus import attempt
from gems.distributed.cores import have_spare_cores
from gems.distributed.interrupt import Interrupt
from gems.distributed.usable import Usable
from gems.engine.executor import Engine
from gems.engine.measured import Measured
from gems.errors import GemsError, PlanError, ShapeError
from gems.model.costs import Costs
from gems.planner.reserve import reserved
from gems.plans.plan import Plan
from gems.predict.simulate import simulate
from gems.predict.timeline import Timeline, merged
from gems.schedule.action import Schedule
from gems.torch import fingerprint
from gems.torch.checkpoint.weight_files import write_weights
from gems.torch.gpu_machine import machine_on
from gems.torch.gpu_memory import GpuMemory
from gems.torch.handshake import Handshake
from gems.torch.lifetime import connected
from gems.torch.offload.malloc import mmap_large, trim
from gems.torch.rank_model import RankModel
from gems.torch.runtime.adapter import OneBatch, TorchAdapter
from gems.torch.runtime.begin_step import begin_step
from gems.torch.runtime.compiled_calls import Compile, CompileOptions, precompiled
from gems.torch.runtime.loss_parameters import whole_loss_state
from gems.torch.runtime.microbatch import Batch, tensors
from gems.torch.runtime.microbatch_loss import Loss
from gems.torch.runtime.outputs import collect
from gems.torch.runtime.regularizer import Regularizer
from gems.torch.runtime.stage_programs import PRECISIONS
from gems.torch.runtime.step_state import StepState
from gems.torch.setup import Surroundings, set_up
from gems.torch.state.deferred_init import Initialize
from gems.torch.state.full_state_dict import full_state_dict, load_full_state_dict
from gems.torch.state.int8_weights import Int8Report, rounded, store_in_int8
from gems.torch.state.master_weights import HALVES, store_in_half
from gems.torch.state.rank_optimizer import RankOptimizer
from gems.torch.state.rank_weights import size
from gems.torch.tensors.memory_format import MemoryFormat
from gems.torch.tracing.trace import as_module
from gems.transport.protocol import Transport

log = logging.getLogger(__name__)


class DistributedModel(Usable):
    """The part of `Session` that needs no gradients. The arguments are Session's."""

    name = "trainer"
    machine: machines.Machine

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss: Loss | None = None,
        sample: Any = None,
        plan: Plan | str | Path = "auto",
        *,
        memory: str | float | None = None,
        costs: str | Costs = "auto",
        machine: str | Path | machines.Machine = "auto",
        schedule: Schedule | None = None,
        precision: str = "fp32",
        master_weights: bool = False,
        memory_format: torch.memory_format | str | None = None,
        compile: Compile = False,
        clip: float | None = None,
        seed: int = 0,
        initialize: Initialize | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        transport: Transport | None = None,
        interrupt: Interrupt | None = None,
        offload_folder: str | Path | None = None,
        batch_dim: Any = None,
        timeout: float | None = None,
        regularizer: Regularizer | None = None,
        limit_memory: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.transport, self.device = connected(transport, backend, timeout, device)
        self.rank = self.transport.rank
        self.loss, self.clip, self.seed, self.precision = loss, clip, seed, precision
        self.memory_format, self.compiling = MemoryFormat(memory_format), CompileOptions(compile)
        self.memory = None if memory is None else machines.bytes_of(memory)
        self.gpu = GpuMemory(self.device, self.memory, limit=limit_memory)
        self.offload_folder, self.batch_dim = offload_folder, batch_dim
        self.interrupt, self.regularizer = interrupt, regularizer
        self.master_weights, self.settings = master_weights, dict(settings or {})
        self.optimizers: list[RankOptimizer] = []
        self.steps = 0  # batches so far
        self.window = 0  # samples of the gradients that are accumulated
        self.first = 0  # those of the first batch of them
        self.updates = True  # whether an optimizer step follows the last batch
        self.closed = False
        self.last: Measured | None = None  # step or prediction, on this rank
        self.failed: BaseException | None = None  # what left this session unusable

        self.spare_cores = have_spare_cores(self.transport, torch.get_num_threads())

        def prepare() -> None:
            self.machine = machine_on(machine, self.device, self.transport)
            self._prepare(model, sample, plan, costs, schedule, initialize)
            self._prepare_training()

        attempt(self.transport, prepare)

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
        """Record, plan, schedule, keep what is ours. All ranks must come to the same."""
        _check_options(self, sample)
        self.model, leaves = as_module(model)
        self.int8 = _stored_in_int8(self)
        self.in_half = _stored_in_half(self)
        self.memory_format.apply(self.model, sample)
        self.precompiled = precompiled(self.model)
        where = Surroundings(
            self.transport, self.device, self.machine, self.memory, self.precision,
            self.memory_format, self.compiling, self.master_weights, self.spare_cores,
        )  # fmt: skip
        found = set_up(self.model, leaves, sample, plan, costs, schedule, where)
        self.plan, self.costs, self.schedule = found.plan, found.costs, found.schedule
        same_model = fingerprint.of_model(found.traced, self.model)
        state, saved = self.plan.residency[0], self.plan.activations[0]
        places = {saved.offload, state.weights_offload, state.optimizer_offload}
        self.on_disk = "disk" in places.union(policy.values for policy in self.plan.activations)
        if plan != "auto":
            _reject_folder(self.offload_folder, self.on_disk)
        _reject_eager(self)
        if self.on_disk:
            mmap_large()
        self.part = RankModel(
            self.model,
            self.loss,
            found,
            where,
            seed=self.seed,
            initialize=initialize,
            offload_folder=self.offload_folder,
        )
        self.owned, self.loss_weights = self.part.owned, self.part.loss_weights
        self.handshake = Handshake(self)
        self.handshake.start(same_model, sample)
        _warn_precompiled(self)
        self.part.connect(self.regularizer)
        self.runner = self.part.runner
        self.weights = self.runner.weights
        self.batches = OneBatch()
        self.adapter = TorchAdapter(self.runner, self.batches)
        predicting = self.part.predicting
        self.predictor = Engine(self.plan, predicting, self.adapter, self.transport)
        if self.on_disk:
            trim()
        self.runner.programs.remember(sample, found.traced)
        self.part.connect_stages(self.runner.programs.recordings.values())
        self.part.reject_nothing_partitioned()
        self.gpu.begin(reserved(self.plan, self.machine))

    def _prepare_training(self) -> None:
        """What a session needs besides."""

    # --- prediction -----------------------------------------------------------------------------

    def predict(self, inputs: Any) -> Any:
        """The model's output in evaluation mode, for a whole batch, on every rank's host."""
        self.reject_unusable()
        self.flush()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                self.handshake.batch("predict", inputs, None, self._begin_prediction)
                self.part.connect_stages(self.state.partitions.values())
                self.last = self._run_prediction()
                return collect(self.state, self.plan, self.transport)
        finally:
            self.weights.release_leaked_views()
            for module, training in modes:  # one by one: some may be frozen
                module.training = training

    def _begin_prediction(self, batch: Batch) -> None:
        self.weights.release_memory()
        self.batches.state = begin_step(self.runner, batch, self.steps, training=False)

    def _run_prediction(self) -> Measured:
        try:
            return self.predictor.step(self.steps)
        except BaseException as error:  # nothing has changed, but the others wait for messages
            self.failed = None if self.transport.world == 1 else error
            raise

    @property
    def state(self) -> StepState:
        """Of the last batch that began."""
        return self.batches.state

    def flush(self) -> Any:
        """Nothing is in flight between calls, unless a session trains asynchronously."""
        return None

    # --- weights --------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank has: of its stages and, on ranks of the last stage, of a
        loss that is an nn.Module.

        They are the model's own, whole. With zero=3 or offloaded weights they have no memory
        between steps, and tell their shape, type and gradient only: whatever reads their numbers
        raises (`state_dict` has them). What an optimizer steps is in its `param_groups`: with
        zero=1 and above the parts of parameters that this rank owns, flat.
        """
        return list(self.weights.parameters_here)

    def state_dict(self) -> dict[str, Any]:
        """The plain model's whole state dict, same keys, on every rank, in host memory.

        Weights are as they are stored: with master_weights, and without an optimizer in "bf16" or
        "fp16", in half. Checkpoints have the masters. All ranks must call it.
        """
        self._meet("state_dict")
        with self.weights.unsharded():
            return full_state_dict(
                self.model,
                self.owned,
                self.part.first_name,
                self.part.extra_state_owners,
                self.transport,
                self.weights.copy,
            )

    def loss_state_dict(self) -> dict[str, torch.Tensor]:
        """The trainable parameters of a loss that is an nn.Module, by their names in it, on every
        rank, in host memory; checkpoints have them too. All ranks must call it."""
        self._meet("loss_state_dict")
        with self.weights.unsharded():
            weights, copy = self.loss_weights, self.weights.copy
            return whole_loss_state(weights, self.owned, self.transport, copy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a plain model's state dict; each rank takes its part. gems.read_weights reads one
        from a file. All ranks must call it, with the same."""
        state = rounded(self.model, state) if self.int8 is not None else state
        same = fingerprint.of_batch(dict(state), thorough=False)
        self._meet("load_state_dict", **{"state dict": f"#{same:x}"})
        with self.weights.unsharded(fetched=False):
            held, put = self.owned.on(self.rank), self.weights.put
            load_full_state_dict(self.model, state, held, self.part.first_name, put)
        _put_masters(self, state)

    def export(self, path: str | Path) -> Path:
        """Write the plain model's state dict as `.pt` or `.safetensors`; all ranks must call it."""
        state = self.state_dict()
        path = Path(path)

        def written() -> None:
            if self.rank == 0:
                write_weights(path, state)

        on_all_ranks(self.transport, f"writing {path}", written)
        return path

    def _meet(self, call: str, **facts: Any) -> None:
        """All ranks must make this call; what is in flight is finished first."""
        self.reject_unusable()
        self.flush()
        self.weights.release_memory()
        self.handshake.call(call, **facts)

    # --- seconds and bytes ----------------------------------------------------------------------

    def forecast(self) -> Timeline:
        """What a step of this plan should take: seconds by the costs, and live bytes over time.

        The optimizer's state is counted as it is now; it has none before the first step.
        """
        self.reject_unusable()
        self.handshake.call("forecast")
        state = size(self.weights.optimizer_state())
        trained = size(list(self.weights.stepped().values()))
        states = self.transport.all_gather_object(state / trained if trained else 0.0)
        return simulate(self.schedule, self.plan, self.costs, self.machine, state=max(states))

    @property
    def measured(self) -> Timeline | None:
        """The last step or prediction, as this rank measured it. Waits for a GPU to finish it."""
        return None if self.last is None else self.last.timeline

    def timeline(self) -> Timeline:
        """The last step as all ranks measured it. All ranks must call it."""
        if self.last is None:
            raise GemsError("nothing has run yet; call step first")
        self.reject_unusable()
        self.handshake.call("timeline")
        peak, mine = self.allocator_peak, self.last.timeline
        mine = mine if peak is None else replace(mine, allocator=(peak,))
        return merged(self.transport.all_gather_object(mine))

    @property
    def peak(self) -> int:
        """Most live bytes of this rank in the last step or prediction."""
        return 0 if self.last is None else self.last.peak.total

    @property
    def allocator_peak(self) -> tuple[int, int] | None:
        """Most bytes in tensors, and most that torch's allocator took from the GPU for them, since
        the session was made; None on CPUs. Workspaces and fragments are in it, but neither the
        context nor communicators."""
        return self.gpu.peak()

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the other ranks; those that still need this one raise PeerError. A process group
        that GEMS started ends with the last session on it."""
        if self.closed:
            return
        if self.failed is None and sys.exc_info()[1] is None:
            self.flush()  # else others may be elsewhere, and never come here
        self.closed = True
        for own in self.optimizers:
            own.close()
        self.part.close()
        self.gpu.end()
        self.transport.close()


def _check_options(model: DistributedModel, sample: Any) -> None:
    if not tensors(sample):
        raise ShapeError(
            "sample must have the shapes of one micro-batch of inputs, "
            f"e.g. torch.empty(1, 3, 1024, 1024); got {type(sample).__name__}"
        )
    if model.precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise PlanError(f"precision {model.precision!r} is unknown; choose one of {known}")
    if model.regularizer is not None and model.loss is None:
        raise PlanError("a regularizer is added to the loss; give the trainer one")


def _put_masters(model: DistributedModel, state: Mapping[str, Any]) -> None:
    names = model.part.first_name
    values = {names[label]: value for label, value in state.items() if label in names}
    for own in model.optimizers:
        own.put_masters(values)


def _stored_in_int8(model: DistributedModel) -> Int8Report | None:
    """What was rounded, with precision="int8"."""
    if model.precision != "int8":
        return None
    if model.loss is not None:
        raise PlanError(
            "precision 'int8' is for prediction: weights in int8 have no gradients; leave out the "
            "optimizer, or train with 'bf16' or 'fp16'"
        )
    found = store_in_int8(model.model)
    log.info("%s", found)
    return found


def _stored_in_half(model: DistributedModel) -> bool:
    """Whether weights are stored in half: those of a session that only predicts, and those that
    have masters. Then they are from now on."""
    dtype = PRECISIONS[model.precision]
    in_half = model.master_weights or (model.loss is None and dtype is not None)
    if in_half and dtype is not None:
        store_in_half(model.model, dtype)
    if model.master_weights:
        _reject_masters(model)
    return in_half


def _reject_masters(model: DistributedModel) -> None:
    if model.loss is None:
        raise PlanError(
            "master_weights is for training, and this session has no loss or no optimizer; leave "
            "it out: with precision='bf16' or 'fp16' weights are in half all the same"
        )
    if all(p.dtype not in HALVES for p in model.model.parameters()):
        raise PlanError(
            "master_weights has fp32 copies of weights that are stored in half, and with "
            f"precision={model.precision!r} none of this model's are; give precision='bf16' or "
            "'fp16', or leave master_weights out"
        )


def _warn_precompiled(model: DistributedModel) -> None:
    """All ranks have compared it."""
    if model.precompiled and not model.compiling.enabled:
        log.warning(
            "%s came compiled by torch.compile, which stages do not use: they run the calls that "
            "its forward makes, one by one. Give Trainer(compile=True) to compile those",
            ", ".join(model.precompiled[:8]),
        )


def _reject_folder(folder: str | Path | None, on_disk: bool) -> None:
    if folder is not None and not on_disk:
        raise PlanError(
            f"offload_folder is {str(folder)!r}, but this plan offloads nothing to disk; say what "
            "with Plan(offload='activations:disk'), or leave the folder out"
        )


def _reject_eager(model: DistributedModel) -> None:
    wants = {"clip": model.clip is not None, "precision='fp16'": model.precision == "fp16"}
    if model.plan.residency[0].eager and any(wants.values()):
        what = " and ".join(name for name, is_so in wants.items() if is_so)
        raise PlanError(
            "optimizer_step='eager' updates a stage before the others have their gradients, "
            f"and {what} must see all of them first; use optimizer_step='end', or remove {what}"
        )
