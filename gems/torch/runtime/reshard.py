"""Values and gradients between stages, as bytes in flat buffers: out of boxes, and into boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

import torch

from gems.distributed.transfer import Transfer, box_bytes
from gems.errors import TraceError
from gems.geometry.box import Box
from gems.model.graph import Value
from gems.torch.autograd.absent_gradient import absent, by_note, is_absent, marked
from gems.torch.tensors.strides import as_bytes, as_recorded, row_major, strided, tile_strides

Tensor = torch.Tensor


def pack(
    transfers: Sequence[Transfer], tensors: Mapping[str, Tensor], rank: int, target: int
) -> list[Tensor]:
    """What `rank` sends to `target`, in one flat buffer, if anything: a message is one operation.
    Behind a second one, other streams of a GPU might wait for both (gems/schedule/nccl.py).

    Behind gradients on a GPU is a note in host memory, with a byte for each: whether it is absent.
    """
    found: list[Tensor] = []
    for transfer in transfers:
        tensor, value = tensors[transfer.value.name], transfer.value
        if not transfer.back:
            _reject_unlike(tensor, transfer, rank)
        if transfer.plain and value.bytes:
            found.append(flat(tensor, value))
        elif value.bytes:
            held = transfer.sent_from(rank)
            boxes = transfer.between(rank, target)
            found += [_piece(tensor, held, box).view(torch.uint8) for box in boxes]
    one = [torch.cat(found)] if len(found) > 1 else found
    if not found or not _noted(transfers, found[0].device):
        return one
    gone = [is_absent(tensors[transfer.value.name]) for transfer in transfers]
    return [*one, torch.tensor(gone, dtype=torch.uint8)]


def _reject_unlike(tensor: Tensor, transfer: Transfer, rank: int) -> None:
    """A module that was not recorded inside, as it looks at values, may give another form of tensor
    in another branch; the receiver waits for the recorded one."""
    value, shape = transfer.value, transfer.held[rank].shape
    if tensor.dtype is _dtype(value) and (tensor.shape == shape or not value.shape):
        return
    raise TraceError(
        f"{value.name} is {tuple(tensor.shape)} {_name(tensor.dtype)} in this forward, and "
        f"{tuple(shape)} {value.dtype} in the recording that the next stage was made from: a "
        "branch on values gave a tensor of another form. Let every branch return the same shape "
        "and dtype (for example y.to(x.dtype)), or keep its stage and the next on one rank"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _noted(transfers: Sequence[Transfer], device: torch.device) -> bool:
    return by_note(device) and any(transfer.back for transfer in transfers)


def buffers(
    transfers: Sequence[Transfer], rank: int, source: int, device: torch.device
) -> list[Tensor]:
    """An empty buffer for what `source` sends to `rank`, if anything, and one for its note."""
    size = sum(box_bytes(transfers, rank, source))
    found = [torch.empty(size, dtype=torch.uint8, device=device)] if size else []
    noted = size and _noted(transfers, device)
    return [*found, torch.empty(len(transfers), dtype=torch.uint8)] if noted else found


def _boxes(buffer: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """The bytes of each box of a message. Several have memory of their own: one value may be saved
    for longer than another."""
    return iter([buffer] if len(sizes) == 1 else [x.clone() for x in buffer.split(list(sizes))])


def unpack(
    transfers: Sequence[Transfer],
    rank: int,
    own: Mapping[str, Tensor] | None,
    arrived: Mapping[int, Sequence[Tensor]],
    device: torch.device,
) -> dict[str, Tensor]:
    """The values on `rank`: of what it has itself, and of what the others sent."""
    found = {}
    parts = {
        source: _boxes(buffers[0], box_bytes(transfers, rank, source))
        for source, buffers in arrived.items()
    }
    noted = _noted(transfers, device)
    notes = {source: buffers[-1].tolist() for source, buffers in arrived.items() if noted}
    for at, transfer in enumerate(transfers):
        value = transfer.value
        mine = None if own is None else own[value.name]
        gone = {source for source, note in notes.items() if note[at]}
        if not value.bytes:
            found[value.name] = torch.empty(value.shape, dtype=_dtype(value), device=device)
        elif transfer.plain:
            only = mine if mine is not None else _only(parts, value, transfer.back)
            found[value.name] = marked(only) if gone else only
        else:
            found[value.name] = _assembled(transfer, rank, mine, parts, gone, device)
    return found


def _only(parts: Mapping[int, Iterator[Tensor]], value: Value, back: bool) -> Tensor:
    (buffers,) = parts.values()
    return shaped(next(buffers), value, back)


def _assembled(
    transfer: Transfer,
    rank: int,
    own: Tensor | None,
    parts: Mapping[int, Iterator[Tensor]],
    gone: Set[int],
    device: torch.device,
) -> Tensor:
    """A value's part on this rank, out of boxes; those of a gradient are summed, but for those of
    ranks that have none (`gone`, by their notes)."""
    value, frame = transfer.value, transfer.received_in(rank)
    present = False
    found = torch.empty(0, dtype=_dtype(value), device=device)
    if not value.shape:
        found = found.new_zeros(frame.shape)
    else:
        found = strided(frame.shape, tile_strides(value, frame.shape), found)
        found = found.zero_() if transfer.back else found
    for source in sorted({*parts, rank}):
        for box in transfer.between(source, rank):
            if source != rank:
                part = next(parts[source]).view(found.dtype)
                without = transfer.back and (source in gone or is_absent(part))
            else:
                assert own is not None
                part = _piece(own, transfer.sent_from(rank), box)
                without = transfer.back and is_absent(own)
            here = found[box.relative_to(frame).slices()]
            part = part.view(box.shape)
            if without:
                continue
            present = True
            here.add_(part) if transfer.back else here.copy_(part)
    if transfer.back and not present:
        return absent(frame.shape if value.shape else (), found.dtype, device)
    if transfer.back or frame.shape != value.shape:
        return found if value.shape else found.view(())
    return as_recorded(found, value) if value.shape else found.view(())


def _piece(tensor: Tensor, held: Box, box: Box) -> Tensor:
    """A box of a tensor that holds another one, flat."""
    return tensor.reshape(held.shape)[box.relative_to(held).slices()].contiguous().view(-1)


def _dtype(value: Value) -> torch.dtype:
    return getattr(torch, value.dtype)


def dense(value: Value) -> bool:
    """Whether the strides visit one block of memory, each element once, in any order of dims."""
    step = 1
    for stride, length in sorted(zip(value.strides, value.shape, strict=True)):
        if length != 1:
            if stride != step:
                return False
            step *= length
    return True


def flat(tensor: Tensor, value: Value) -> Tensor:
    """The tensor's memory as bytes, in the order of the value's strides."""
    strides = value.strides if dense(value) else row_major(value.shape)
    if tensor.stride() != strides:
        copy = torch.empty_strided(value.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = copy.copy_(tensor)
    return as_bytes(tensor)


def shaped(buffer: Tensor, value: Value, back: bool = False) -> Tensor:
    """The tensor that `flat` made bytes of. A value has the recorded strides, gaps and all; of a
    gradient only the order of dims is kept."""
    if dense(value):
        return buffer.view(_dtype(value)).as_strided(value.shape, value.strides)
    found = buffer.view(_dtype(value)).as_strided(value.shape, row_major(value.shape))
    return found if back else as_recorded(found, value)
