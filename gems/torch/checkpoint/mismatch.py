"""Where a checkpoint and a trainer do not fit: other weights, another optimizer or scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gems.errors import CheckpointError, problems
from gems.torch.checkpoint.manifest import TensorEntry
from gems.torch.checkpoint.training_state import TrainingState, saved_optimizers
from gems.torch.checkpoint.weight_keys import buffer_keys, model_keys, weights_of
from gems.torch.state.master_weights import HALVES
from gems.torch.state.optimizer_state import type_name
from gems.torch.state.rank_optimizer import RankOptimizer
from gems.transport.encoding import sendable

Tensor = torch.Tensor
Tensors = Mapping[str, TensorEntry]
AFRESH = "or load with strict=False, which takes what fits and leaves the rest as it is"


@dataclass(frozen=True)
class Mismatch:
    """Where the weights of a checkpoint do not fit, and why training cannot go on from it."""

    weights: tuple[str, ...] = ()
    training: tuple[str, ...] = ()

    def reject(self) -> None:
        if whys := (*self.weights, *self.training):
            raise CheckpointError(
                problems(
                    "this checkpoint does not fit the trainer; give the trainer the model, "
                    f"optimizer and scheduler that it was saved with, {AFRESH}:",
                    whys,
                )
            )


sendable(Mismatch)


def mismatch(trainer: TrainingState, plain: Mapping[str, Any], tensors: Tensors) -> Mismatch:
    """As this rank sees it: it knows the groups of its own weights only."""
    training = _of_training(trainer, plain, tensors)
    return Mismatch(tuple(_of_weights(trainer, tensors)), tuple(training))


def merged(found: Sequence[Mismatch]) -> Mismatch:
    """As all ranks see it."""
    return Mismatch(
        tuple(dict.fromkeys(why for each in found for why in each.weights)),
        tuple(dict.fromkeys(why for each in found for why in each.training)),
    )


def _of_weights(trainer: TrainingState, tensors: Tensors) -> Iterator[str]:
    weights, expected = weights_of(trainer), model_keys(trainer)
    for key, name in (expected | buffer_keys(trainer)).items():
        label, form = key.partition(".")[2], _form(weights[name])
        if (entry := tensors.get(key)) is None:
            if key in expected or name in trainer.loss_weights:
                yield f"missing: {label}, {form}"
        elif _form(entry) != form and not _widened(trainer, entry, weights[name]):
            yield f"{label} is {_form(entry)} in the checkpoint, {form} in the model"
    for key, entry in tensors.items():
        if key.startswith("model.") and key not in expected:
            yield f"unexpected: {key.removeprefix('model.')}, {_form(entry)}"


def _widened(trainer: TrainingState, entry: TensorEntry, weight: Tensor) -> bool:
    """Whether it is an fp32 weight that this trainer stores in half."""
    half = trainer.in_half and weight.dtype in HALVES and entry.dtype == "float32"
    return half and tuple(entry.shape) == tuple(weight.shape)


def _form(tensor: Tensor | TensorEntry) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{'×'.join(map(str, tensor.shape)) or 'one number'} of {dtype}"


def _of_training(trainer: TrainingState, plain: Mapping[str, Any], tensors: Tensors) -> list[str]:
    """A trainer without an optimizer only predicts: it loads the weights of any checkpoint."""
    if not trainer.optimizers:
        return []
    every = saved_optimizers(plain) or [plain]
    if len(every) != len(trainer.optimizers):
        return [
            f"there are {len(every)} optimizers in the checkpoint, {len(trainer.optimizers)} here"
        ]
    found = []
    for own, saved in zip(trainer.optimizers, every, strict=True):
        for what, mine in (("optimizer", own.optimizer), ("scheduler", own.scheduler)):
            here, there = mine and type_name(mine), saved[what] and saved[what]["kind"]
            if here != there:
                found.append(
                    f"the {what} is {there or 'absent'} in the checkpoint, {here or 'absent'} "
                    "in the trainer"
                )
    pairs = zip(trainer.optimizers, every, strict=True)
    return found or [
        why for own, saved in pairs for why in _of_groups(trainer, own, saved["names"], tensors)
    ]


def _of_groups(
    trainer: TrainingState, own: RankOptimizer, saved: list[list[str]], tensors: Tensors
) -> list[str]:
    groups = own.optimizer.param_groups
    if len(groups) != len(saved):
        return [f"the optimizer has {len(saved)} groups in the checkpoint, {len(groups)} here"]
    name_of = {id(p): name for name, p in trainer.weights.stepped().items()}
    group_of = {name: i for i, names in enumerate(saved) for name in names}
    return [
        f"{name} is in group {i} of the optimizer here, in group {group_of.get(name, 'none')} in "
        "the checkpoint"
        for i, group in enumerate(groups)
        for p in group["params"]
        if (name := name_of.get(id(p))) is not None
        and f"model.{name}" in tensors
        and group_of.get(name) != i
    ]
