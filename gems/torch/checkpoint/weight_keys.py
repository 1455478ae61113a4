"""The keys of a trainer's weights in a checkpoint, and which rank writes each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gems.torch.checkpoint.manifest import TensorEntry
from gems.torch.checkpoint.training_state import TrainingState
from gems.torch.state.full_state_dict import named_weights

Tensor = torch.Tensor


def model_keys(trainer: TrainingState) -> dict[str, str]:
    """`model.<label>` for each weight of the plain state dict, with the weight's first name."""
    labels, extra = trainer.model.state_dict(keep_vars=True), trainer.part.extra_state_owners
    return {
        f"model.{label}": trainer.part.first_name[label] for label in labels if label not in extra
    }


def buffer_keys(trainer: TrainingState) -> dict[str, str]:
    """`buffers.<name>` for non-persistent buffers and parameters of the loss."""
    listed = set(model_keys(trainer).values())
    return {f"buffers.{name}": name for name in trainer.owned.replica_groups if name not in listed}


def weights_of(trainer: TrainingState) -> dict[str, Tensor]:
    """Every parameter and buffer by every name it has, also the loss's."""
    return named_weights(trainer.model) | trainer.loss_weights


def loadable(trainer: TrainingState, tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """The keys of a checkpoint whose tensors this rank loads, with the names of their weights: each
    weight that it has once, if the shape fits."""
    weights, keys = weights_of(trainer), model_keys(trainer) | buffer_keys(trainer)
    by_name = {
        name: key
        for key, name in keys.items()
        if name in trainer.weights.held
        and key in tensors
        and tensors[key].shape == tuple(weights[name].shape)
    }
    return {key: name for name, key in by_name.items()}


def writers(trainer: TrainingState) -> dict[str, int]:
    """For each weight, the rank of its replica group that writes it; bytes are balanced."""
    weights, load = weights_of(trainer), dict.fromkeys(range(trainer.transport.world), 0)
    found: dict[str, int] = {}
    for name in sorted(trainer.owned.replica_groups, key=lambda n: (-weights[n].nbytes, n)):
        found[name] = min(trainer.owned.replica_groups[name], key=lambda rank: (load[rank], rank))
        load[found[name]] += weights[name].nbytes
    return found
