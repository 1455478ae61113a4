"""Train any model under any plan: the loop over a session that most users need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gems.distributed.interrupt import Interrupt
from gems.distributed.step import Step
from gems.errors import GemsError, PlanError
from gems.hardware import Machine
from gems.model.costs import Costs
from gems.plans.plan import Plan
from gems.predict.timeline import Timeline
from gems.schedule.action import Schedule
from gems.torch.lifetime import closable
from gems.torch.runtime.compiled_calls import Compile
from gems.torch.runtime.microbatch_loss import Loss
from gems.torch.runtime.regularizer import Regularizer
from gems.torch.session import Session
from gems.torch.state.deferred_init import Initialize
from gems.torch.state.rank_optimizer import MakeOptimizer, MakeScheduler
from gems.transport.protocol import Transport


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
    machine      what estimates and "auto" plans are for: a preset, a file of one, or a Machine;
                 "auto", the default, is the GPUs of all ranks by their properties, else `cpu`
    limit_memory  let the GPU's allocator raise torch.OutOfMemoryError beyond `memory`, of which
                 context and communicators take their part; an error on CPUs
    schedule     an order of one's own, instead of the plan's: compute actions of one copy, or
                 all that every rank does
    precision    "fp32" (as the model is), "bf16" or "fp16" by autocast. Without an optimizer
                 weights are stored in that type, too, but for those of normalisation layers.
                 "int8", without an optimizer: weights of linear and convolutional layers are
                 stored in int8, with a scale per channel; arithmetic is in fp32
    master_weights  with precision="bf16" or "fp16": weights and gradients are stored in that type,
                 and the optimizer steps fp32 master copies, which are part of its state and what
                 checkpoints hold: 2 + 2 + 12 bytes per parameter with Adam. Normalisation layers
                 stay in fp32
    memory_format  "channels_last" or torch.channels_last (channels_last_3d for volumes): weights
                 and inputs get it, and activations, messages, tiles and gradients keep it; if left
                 out, strides are as they come
    compile      True, a backend of torch.compile, or a dict of its options: stages run compiled,
                 forward and backward, but for calls that draw random numbers, run on tiles or
                 patches, defer weight gradients or have hooks
    clip         largest norm of the whole gradient
    accumulate   calls of `step` per update
    initialize   sets up the weights of a module, for models on the meta device
    device       "auto", the default: a GPU for each rank; CPUs where there are none, where ranks of
                 a node are more than its GPUs (a warning tells so), with backend="gloo", or over a
                 `transport` that is not NCCL's. "cpu"; "cuda", an error where GPUs are too few;
                 "cuda:1", the one of that number
    backend      of torch.distributed: "nccl" on GPUs and "gloo" on CPUs if left out; "gloo" on GPUs
                 moves tensors through host memory. "mpi", for ranks of mpirun: mpi4py instead
    scheduler    optimizer -> learning-rate scheduler, stepped after every update; one that looks at
                 a metric is given the loss of the call that made the update
    interrupt    signals to hear: `step` tells all ranks when one was told to stop
    offload_folder  where files of what the plan offloads to disk are; the temporary folder
                 if left out
    batch_dim    where the samples of the targets are, if not along the first dim of tensors or in
                 lists with one entry per sample: a dim, "list", "whole" (all micro-batches get it
                 as it is), or a dict, list or tuple of these, shaped like the targets
    regularizer  a penalty on weights that is added to the loss: [(name, parameter), ...] -> one
                 number, given the parameters of each stage; what it gives is summed over stages
    timeout      seconds without a sign of life after which a rank is lost (default 25); slow work
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
        machine: str | Path | Machine = "auto",
        schedule: Schedule | None = None,
        precision: str = "fp32",
        master_weights: bool = False,
        memory_format: torch.memory_format | str | None = None,
        compile: Compile = False,
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
        limit_memory: bool = False,
    ) -> None:
        self.accumulate, trains = accumulate, optimizer is not None
        self.session = Session(
            model,
            loss if trains else None,
            sample,
            plan,
            memory=memory, costs=costs, machine=machine, schedule=schedule,
            precision=precision,
            master_weights=master_weights,
            memory_format=memory_format,
            compile=compile,
            clip=clip,
            seed=seed,
            initialize=initialize,
            device=device,
            backend=backend,
            transport=transport,
            interrupt=interrupt,
            offload_folder=offload_folder,
            batch_dim=batch_dim,
            timeout=timeout,
            regularizer=regularizer if trains else None,
            limit_memory=limit_memory,
            settings={"accumulate": accumulate},
        )  # fmt: skip
        self._check_loop(optimizer, scheduler)
        if optimizer is not None:
            self.session.add_optimizer(optimizer, scheduler)

    def _check_loop(self, optimizer: Any, scheduler: Any) -> None:
        if self.accumulate < 1:
            raise PlanError(f"accumulate is {self.accumulate}; an update takes at least one step")
        if scheduler is not None and optimizer is None:
            raise PlanError("a scheduler needs an optimizer; give the trainer one")
        if optimizer is not None and self.accumulate > 1 and self.plan.asynchronous:
            raise PlanError(
                f"schedule '2bw' cannot do accumulate={self.accumulate}: it would use weights of "
                "more than two versions; give the plan more micro-batches instead, or use '1f1b'"
            )

    def step(self, inputs: Any, targets: Any = None) -> Step:
        """One step on the whole batch, given to every rank; updates when its window is full."""
        session = self.session
        session.reject_unusable()
        if session.loss is None or not session.optimizers:
            raise GemsError("this trainer has no loss or no optimizer; it can only predict")
        if session.async_pipeline is not None:
            return session.step_async(inputs, targets)
        start = perf_counter()
        session.settings["accumulate"] = self.accumulate
        update = (session.steps + 1) % self.accumulate == 0
        found = session.forward_backward(inputs, targets, update=update)
        updated = update and session.step_optimizers(session.optimizers)
        seconds = perf_counter() - start
        return Step(found.loss, found.samples, seconds, updated, found.norm, found.interrupted)

    # --- what the session has -------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model, with this rank's weights in place."""
        return self.session.model

    @property
    def plan(self) -> Plan:
        """The plan, written out: stages by name."""
        return self.session.plan

    @property
    def costs(self) -> Costs:
        """What each stage costs on each of its ranks."""
        return self.session.costs

    @property
    def schedule(self) -> Schedule:
        """All actions of all ranks."""
        return self.session.schedule

    @property
    def transport(self) -> Transport:
        """How this rank talks to the others."""
        return self.session.transport

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.session.rank

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.session.device

    @property
    def machine(self) -> Machine:
        """What estimates are for."""
        return self.session.machine

    @property
    def steps(self) -> int:
        """Calls of `step` so far, those before a checkpoint that was loaded included."""
        return self.session.steps

    @property
    def peak(self) -> int:
        """Most live bytes of this rank in the last step or prediction."""
        return self.session.peak

    @property
    def allocator_peak(self) -> tuple[int, int] | None:
        """On a GPU, most bytes in tensors and most that the allocator took for them so far."""
        return self.session.allocator_peak

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.session.closed

    @property
    def clip(self) -> float | None:
        """Largest norm of the whole gradient."""
        return self.session.clip

    @clip.setter
    def clip(self, value: float | None) -> None:
        self.session.clip = value

    @property
    def interrupt(self) -> Interrupt | None:
        """Signals to hear."""
        return self.session.interrupt

    @interrupt.setter
    def interrupt(self, value: Interrupt | None) -> None:
        self.session.interrupt = value

    @property
    def optimizer(self) -> Optimizer | None:
        """This rank's, of its own stages."""
        return self.session.optimizers[0].optimizer if self.session.optimizers else None

    @property
    def scheduler(self) -> LRScheduler | None:
        """This rank's."""
        return self.session.optimizers[0].scheduler if self.session.optimizers else None

    def parameters(self) -> list[nn.Parameter]:
        return self.session.parameters()

    def predict(self, inputs: Any) -> Any:
        return self.session.predict(inputs)

    def flush(self) -> Step | None:
        return self.session.flush()

    def state_dict(self) -> dict[str, Any]:
        return self.session.state_dict()

    def loss_state_dict(self) -> dict[str, torch.Tensor]:
        return self.session.loss_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.session.load_state_dict(state)

    def save(self, path: str | Path, *, extra: Any = None, keep: int = 0) -> Path:
        return self.session.save(path, extra=extra, keep=keep)

    def load(self, path: str | Path, *, strict: bool = True) -> Any:
        return self.session.load(path, strict=strict)

    def export(self, path: str | Path) -> Path:
        return self.session.export(path)

    def forecast(self) -> Timeline:
        return self.session.forecast()

    def timeline(self) -> Timeline:
        return self.session.timeline()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.session.__exit__(kind, error, trace)

    def close(self) -> None:
        self.session.close()


for _name in (
    *("parameters", "predict", "flush", "state_dict", "loss_state_dict", "load_state_dict"),
    *("save", "load", "export", "forecast", "timeline", "close"),
):
    getattr(Trainer, _name).__doc__ = getattr(Session, _name).__doc__  # `help` shows them
