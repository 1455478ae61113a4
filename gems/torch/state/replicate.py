"""Broadcast initial weights: replicas start with those of the first rank of their group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from gems.torch.tensors.strides import as_bytes
from gems.transport.protocol import Transport

Tensor = torch.Tensor
CHUNK = 1 << 26  # bytes per broadcast


def replicate(
    weights: Mapping[str, Tensor],
    replica_groups: Mapping[str, tuple[int, ...]],
    transport: Transport,
) -> None:
    """Broadcast each weight of this rank from the first rank of its replica group, bit by bit.

    Some weights may not be allocated yet: they are initialised from random numbers that depend on
    their names, hence the same everywhere. All ranks call it.
    """
    by_group: dict[tuple[int, ...], list[str]] = {}
    for name in replica_groups:  # in one order everywhere
        if len(replica_groups[name]) > 1 and name in weights and _is_allocated(weights[name]):
            by_group.setdefault(replica_groups[name], []).append(name)
    for ranks, names in sorted(by_group.items()):
        for group in _chunks([weights[name] for name in names]):
            _broadcast(group, ranks, transport)


def _is_allocated(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.nbytes > 0


def _chunks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one device that are about CHUNK bytes, or one larger tensor."""
    found: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if found and (size + tensor.nbytes > CHUNK or tensor.device != found[0].device):
            yield found
            found, size = [], 0
        found.append(tensor)
        size += tensor.nbytes
    if found:
        yield found


def _broadcast(tensors: list[Tensor], ranks: tuple[int, ...], transport: Transport) -> None:
    """As an all-reduce of integers, to which all but the first contribute zeros: exact."""
    sizes = [t.nbytes for t in tensors]
    integers = torch.zeros(-(-sum(sizes) // 4), dtype=torch.int32, device=tensors[0].device)
    parts = integers.view(torch.uint8)[: sum(sizes)].split(sizes)
    if transport.rank == ranks[0]:
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(as_bytes(tensor.detach().contiguous()))
    transport.all_reduce(integers, ranks).wait()
    if transport.rank == ranks[0]:
        return
    with torch.no_grad():
        for part, tensor in zip(parts, tensors, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
