"""Collect the outputs of a prediction, from the ranks that hold their boxes, on every host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gems.errors import ShapeError
from gems.geometry.box import Box
from gems.plans.plan import Plan
from gems.torch.runtime.microbatch import tensors
from gems.torch.runtime.partitioned_model import PartitionedModel
from gems.torch.runtime.step_state import StepState
from gems.torch.tracing.calls import Ref, leaves_of
from gems.transport.protocol import Transport


def collect(state: StepState, plan: Plan, transport: Transport) -> Any:
    """The outputs of all micro-batches, joined in order, in host memory of every rank."""
    parts: list[list[torch.Tensor]] = []
    for i, partitioned in state.partitions.items():
        own = tensors(state.outputs.pop(i)) if i in state.outputs else None
        parts.append(_shared(partitioned, own, plan, i, transport))
    sizes = [size for size in state.batch.sizes if size]
    joined = iter([_joined(pieces, sizes) for pieces in zip(*parts, strict=True)])
    return pytree.tree_map(
        lambda x: next(joined) if isinstance(x, (Ref, torch.Tensor)) else x,
        next(reversed(state.partitions.values())).trace.record.output,
        is_leaf=lambda x: isinstance(x, Ref),
    )


def _shared(
    partitioned: PartitionedModel,
    own: list[torch.Tensor] | None,
    plan: Plan,
    i: int,
    transport: Transport,
) -> list[torch.Tensor]:
    """The outputs of one micro-batch, on every rank: each box from the rank that has it."""
    found = []
    last = plan.depth - 1
    group = plan.spatial_group_for(last, i)
    for at, ref in enumerate(leaves_of(partitioned.trace.record.output)):
        value = partitioned.trace.graph.value[ref.name]
        dtype = getattr(torch, value.dtype)
        tensor = torch.empty(value.shape, dtype=dtype)
        boxes = partitioned.boxes(last, ref.name, group, own=True)
        held = partitioned.boxes(last, ref.name, group, own=False)
        for rank in _givers(boxes):
            box = boxes[rank]
            part = torch.empty(box.shape, dtype=dtype)
            if rank == transport.rank and own is not None:
                here = own[at]
                part.copy_(here[box.relative_to(held[rank]).slices()] if box.start else here)
            if transport.world > 1:
                transport.broadcast(part, rank)
            tensor[box.slices() if box.start else ...] = part
        found.append(tensor)
    return found


def _joined(pieces: Sequence[torch.Tensor], sizes: list[int]) -> torch.Tensor:
    """One output of all micro-batches: along the samples, or the one that all agree on."""
    if [piece.shape[0] if piece.dim() else None for piece in pieces] == sizes:
        return torch.cat(list(pieces))
    if all(torch.equal(piece, pieces[0]) for piece in pieces):
        return pieces[0]
    raise ShapeError(
        f"an output of shape {tuple(pieces[0].shape)} has no samples along its first dimension "
        f"(micro-batches have {sizes}) and differs between them, so it cannot be joined; let the "
        "model return it per sample, or predict with one micro-batch"
    )


def _givers(boxes: Mapping[int, Box]) -> list[int]:
    """One rank for each box that is not empty."""
    first: dict[Box, int] = {}
    for rank, box in boxes.items():
        if not box.empty:
            first.setdefault(box, rank)
    return list(first.values())
