"""One rank of a training run of a PyTorch network: its trainer, loss and optimizer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gems.cli.keras_models import is_keras, seed_keras
from gems.cli.model_options import micro_batch, model_from
from gems.cli.reject import as_gems_error
from gems.cli.training_loop import TrainingLoop
from gems.errors import GemsError
from gems.plans.plan import Plan
from gems.torch.checkpoint import manifest
from gems.torch.checkpoint.weight_files import read_weights
from gems.torch.losses import loss, loss_of
from gems.torch.optimizers import optimizer
from gems.torch.trainer import Trainer

if TYPE_CHECKING:
    from gems.data.source import Source

files = manifest


class Job(TrainingLoop):
    """A run whose network is an nn.Module."""

    files = manifest

    def _trainer(self, plan: Plan | str) -> Trainer:
        given = self.given
        return trainer_from(
            given,
            plan,
            self.train,
            loss=self._loss(),
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            master_weights=given.master_weights,
            clip=given.clip,
            accumulate=given.accumulate,
            interrupt=self.interrupt,
        )

    def _begin(self) -> None:
        begin(self.trainer, self.start, self._take_position)

    @property
    def _rate(self) -> float:
        return self.trainer.optimizer.param_groups[0]["lr"] if self.trainer.optimizer else 0.0

    def _loss(self) -> Any:
        with as_gems_error():
            name = loss_of(self.given.loss, self.train.task)
            return loss(name, self._class_weights(), self.given.ignore_index)

    def _class_weights(self) -> list[float] | None:
        text, classes = self.given.class_weights, self.given.num_classes
        if text is None:
            return None
        if text == "balanced":
            return balanced(self.train, classes)
        try:
            weights = [float(word) for word in text.split(",")]
        except ValueError:
            raise GemsError(f"--class-weights {text!r}: write numbers, or balanced") from None
        if len(weights) != classes:
            raise GemsError(f"--class-weights {text}: {len(weights)} numbers, {classes} classes")
        return weights

    def _optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        given = self.given
        with as_gems_error():
            return optimizer(
                given.optimizer,
                parameters,
                given.learning_rate,
                weight_decay=given.weight_decay,
                momentum=given.momentum,
            )

    def _scheduler(self, steered: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(steered, self._factor())

    def _apply_options(self) -> None:
        held, scheduler = self.trainer.optimizer, self.trainer.scheduler
        assert held is not None and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        fresh = self._optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
        for group in held.param_groups:
            group.update({k: fresh[k] for k in ("weight_decay", "momentum") if k in fresh})
            group["initial_lr"] = fresh["lr"]
            group["lr"] = fresh["lr"] * scheduler.lr_lambdas[0](scheduler.last_epoch)
        scheduler.base_lrs = [fresh["lr"]] * len(held.param_groups)


def trainer_from(
    given: argparse.Namespace, plan: Plan | str, source: Source, **more: Any
) -> Trainer:
    """A trainer of the model of the options, for samples like the source's."""
    torch.manual_seed(given.seed)
    if is_keras(given):
        seed_keras(given)
    return Trainer(
        model_from(given),
        sample=torch.empty(micro_batch(given), *source.shape),
        plan=plan,
        memory=given.memory,
        limit_memory=given.limit_memory,
        costs=given.costs,
        machine=given.machine,
        precision=given.precision,
        memory_format=given.memory_format,
        compile=given.compile,
        seed=given.seed,
        device=given.device,
        backend=given.backend,
        offload_folder=given.offload_folder,
        timeout=given.timeout,
        **more,
    )


def begin(trainer: Trainer, path: Path | None, position: Any = None) -> None:
    """Take a checkpoint, or weights alone; `position` is called with what is known of the data."""
    if path is None:
        return
    if path.is_dir():
        extra = trainer.load(path)
        if position is not None and extra:
            position(extra)
    else:
        trainer.load_state_dict(read_weights(path))


def balanced(source: Source, classes: int) -> list[float]:
    """Weights that make rare classes count as much as frequent ones: n / (classes x count)."""
    if source.task != "classify":
        raise GemsError("--class-weights balanced counts labels; for masks, give numbers")
    counts = [0] * classes
    for i in range(len(source)):
        counts[int(source.target(i, ()))] += 1
    if empty := [c for c, n in enumerate(counts) if not n]:
        raise GemsError(f"--class-weights balanced: no sample to train on has class {empty[0]}")
    return [len(source) / (classes * n) for n in counts]
