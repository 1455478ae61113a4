"""The plain model's full state dict, gathered from all ranks, and loaded into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gems.distributed.ownership import Ownership
from gems.errors import ShapeError, problems
from gems.torch.tensors.strides import as_bytes
from gems.transport.protocol import Transport


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by every name it has."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def full_state_dict(
    model: nn.Module,
    owned: Ownership,
    first_name: Mapping[str, str],
    owners: Mapping[str, int],
    transport: Transport,
    copy: Callable[[str], torch.Tensor],
) -> dict[str, Any]:
    """The plain model's state dict, on every rank, in host memory: one broadcast per rank. `copy`
    returns a weight that this rank has; `owners` have the extra state. All ranks call it."""
    wanted = model.state_dict(keep_vars=True)
    by_rank: dict[int, list[str]] = {}
    for name in dict.fromkeys(first_name[label] for label in wanted if label not in owners):
        by_rank.setdefault(owned.replica_groups[name][0], []).append(name)
    local = named_weights(model)
    found: dict[str, Any] = {}
    for rank, names in sorted(by_rank.items()):
        shapes = [(n, local[n].shape, local[n].dtype) for n in names]
        sizes = [s.numel() * d.itemsize for _, s, d in shapes]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        if rank == transport.rank:
            for name, part in zip(names, flat.split(sizes), strict=True):
                own = copy(name).detach().cpu().contiguous()
                part.copy_(as_bytes(own))
        if transport.world > 1:
            transport.broadcast(flat, rank)
        for (name, shape, dtype), part in zip(shapes, flat.split(sizes), strict=True):
            found[name] = part.clone().view(dtype).reshape(shape)
    if owners:
        states = transport.all_gather_object({label: wanted[label] for label in owners})
        found |= {label: states[rank][label] for label, rank in owners.items()}
    return {label: found[first_name.get(label, label)] for label in wanted}


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any],
    held: set[str],
    first_name: Mapping[str, str],
    put: Callable[[str, torch.Tensor], None],
) -> None:
    """Load what this rank has of a plain model's state dict; the keys must be the model's. `put`
    sets a weight that this rank has."""
    wanted = model.state_dict(keep_vars=True)
    found = [f"missing: {label}" for label in wanted if label not in state]
    found += [f"unexpected: {label}" for label in state if label not in wanted]
    found += [
        f"{label} has shape {tuple(state[label].shape)}, the model {tuple(tensor.shape)}"
        for label, tensor in wanted.items()
        if label in state and label in first_name and state[label].shape != tensor.shape
    ]
    if found:
        raise ShapeError(problems("this state dict is not the model's:", found))
    for label in wanted:
        if label not in first_name:
            set_extra_state(model, label, state[label])
        elif first_name[label] in held:
            put(first_name[label], state[label])


def set_extra_state(model: nn.Module, label: str, value: Any) -> None:
    """Set a module's extra state, as its owner returned it from `get_extra_state`."""
    model.get_submodule(label.removesuffix("_extra_state").rstrip(".")).set_extra_state(value)
