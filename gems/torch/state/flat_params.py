"""Flat parameters: all parameters of one type of a stage in one tensor, sharded over ranks.

    weights    | conv.weight      | conv.bias | norm.weight   | ...            | padding |
    ranks      |  0            |  1            |  2            |  3                      |
    rank 1                     | ParamShard | ParamShard |

A parameter is a view of the flat one, so that an all-gather of the shards copies nothing; it keeps
its memory format, and elements are counted in the order of memory. What a rank owns of a parameter
is a `ParamShard`: a parameter of its own, which the optimizer steps.

torch's FSDP2 shards each parameter along its first dim, and unshards and reshards in hooks of
modules. Our stages are runs of recorded calls, not modules; the schedule has the actions that
unshard and reshard, and `check` proves the order of the collectives. Flat shards also need no
padding but at the end of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from gems.torch.offload.host_copy import HostCopy, resize
from gems.torch.offload.stores import Slot, Store
from gems.torch.state.sparse_gradients import dense, square_norm
from gems.torch.tensors.released import release
from gems.torch.tensors.strides import fitting, flattened, laid_out
from gems.transport.protocol import Work, own_part

Tensor = torch.Tensor


@dataclass(frozen=True)
class ParamShard:
    """Elements `start` to `stop` of a parameter of these strides, counted in the order of memory,
    as a parameter of its own; one that has all of them has the parameter's shape and strides. They
    begin at element `at` of the rank's shard."""

    name: str
    start: int
    stop: int
    at: int
    strides: tuple[int, ...]
    param: nn.Parameter

    def of(self, whole: Tensor) -> Tensor:
        """These elements of a tensor shaped like the whole parameter."""
        return self.shaped(flattened(whole, self.strides)[self.start : self.stop])

    def shaped(self, flat: Tensor) -> Tensor:
        """Elements as the optimizer sees them, beside the parameter."""
        return laid_out(flat, self.param.shape, self.param.stride())

    def inside(self, shard: Tensor) -> Tensor:
        """These elements of a tensor shaped like the rank's shard of the flat parameter."""
        return shard[self.at : self.at + self.param.numel()]


class FlatParam:
    """Parameters of one type, one after the other, padded to equal shards for all `ranks`.

    `shard` is this rank's: a part of `weights`; with zero=3 (`level`) memory of its own; with a
    store, host memory. `host` has the shard, or below zero=3 all weights.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ranks: tuple[int, ...],
        rank: int,
        level: int,
        store: Store | None,
    ) -> None:
        self.parameters, self.ranks, self.rank, self.level = parameters, ranks, rank, level
        self.store = store
        self.at: dict[str, tuple[int, torch.Size, tuple[int, ...]]] = {}  # first, shape, strides
        total = 0
        for name, p in parameters.items():
            if not p.numel() % 2:
                total += total % 2  # so that it may be viewed as complex numbers
            self.at[name] = (total, p.shape, fitting(tuple(p.shape), p.stride()))
            total += p.numel()
        self.width = -(-total // len(ranks))
        first = next(iter(parameters.values()))
        self.device = first.device
        self.weights = self.zeros(first.dtype)
        for name, view in self.views(self.weights).items():
            view.copy_(parameters[name].detach())
            parameters[name].data = view.data
        self.host: HostCopy | None = None
        if store is None:
            self.shard = self.resident.clone() if level == 3 else self.own(self.weights)
        else:
            self.host = HostCopy(store, self.resident)
            self.shard = self.host.memory if level == 3 else self.own(self.host.memory)
        self.gradients: Tensor | None = None  # of all parameters
        self.reduced: Tensor | None = None  # of the shard
        self.offloaded: Slot | None = None  # the same, offloaded
        self.param_shards = self._param_shards()
        if self.host is not None:
            self.host.free()

    def _param_shards(self) -> list[ParamShard]:
        found = []
        begin = self.ranks.index(self.rank) * self.width
        for name, (at, shape, strides) in self.at.items():
            start, stop = (min(max(x - at, 0), shape.numel()) for x in (begin, begin + self.width))
            if start < stop:
                here = at + start - begin
                part = self.shard[here : here + stop - start].data
                if len(self.ranks) == 1:
                    part = laid_out(part, shape, strides).data
                found.append(ParamShard(name, start, stop, here, strides, nn.Parameter(part)))
        return found

    def own(self, memory: Tensor) -> Tensor:
        return own_part(memory, self.rank, self.ranks)

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """A tensor for something that every element of the weights has."""
        return torch.zeros(self.width * len(self.ranks), dtype=dtype, device=self.device)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        # `.data`: versions of their own, although all share one memory.
        return {
            name: laid_out(memory[at : at + shape.numel()].data, shape, strides).data
            for name, (at, shape, strides) in self.at.items()
        }

    # --- weights ------------------------------------------------------------------------------

    @property
    def resident(self) -> Tensor:
        """The part of `weights` that this rank has while it is resharded."""
        return self.own(self.weights) if self.level == 3 else self.weights

    def unshard(self) -> list[Work]:
        """Allocate all weights, and copy there what this rank has of them."""
        resize(self.weights, len(self.weights))
        if self.host is not None:
            return [self.host.read(self.resident)]
        self.resident.copy_(self.shard)
        return []

    def reshard(self) -> None:
        resize(self.weights, 0)

    def write_back(self) -> None:
        """Copy weights that were changed while unsharded to what this rank has of them."""
        if self.host is not None:
            self.host.write(self.resident)
        else:
            self.shard.copy_(self.resident)

    def copy(self, name: str) -> Tensor:
        """A copy of an offloaded parameter, in host memory."""
        assert self.host is not None
        at, shape, strides = self.at[name]
        found = torch.empty(shape.numel(), dtype=self.weights.dtype)
        self.host.read(found, at).wait()
        return laid_out(found, shape, strides)

    def put(self, name: str, value: Tensor) -> None:
        """Set the host copy of a parameter."""
        assert self.host is not None
        at, _, strides = self.at[name]
        self.host.write(flattened(value.detach().to(self.weights.dtype), strides), at)

    def release_shards(self, why: str) -> None:
        """Parameters that the optimizer steps have no memory while they are on disk."""
        if self.host is not None and not self.host.on_host:
            for piece in self.param_shards:
                release(piece.param, f"parameter {piece.name}", why)

    # --- gradients ----------------------------------------------------------------------------

    def hand_out_grads(self) -> None:
        """Give shards of parameters that have a gradient their part of the reduced ones."""
        assert self.gradients is not None
        self.reduced = self.own(self.gradients)
        if self.level > 1:
            self.reduced, self.gradients = self.reduced.clone(), None
        for piece in self.param_shards:
            has_grad = self.parameters[piece.name].grad is not None
            piece.param.grad = piece.shaped(piece.inside(self.reduced)) if has_grad else None

    def offload_grads(self, *, norm: bool) -> dict[str, Tensor]:
        """Offload the reduced gradients of this rank's shard; returns the squares of their norms,
        if asked for."""
        assert self.store is not None
        squares: dict[str, Tensor] = {}
        reduced = None if self.gradients is None else self.own(self.gradients)
        if self.offloaded is None:
            self.offloaded = self.store.slot(self.shard.nbytes)
        for piece in self.param_shards:
            if (whole := self.parameters[piece.name].grad) is None:
                continue
            gradient = piece.inside(reduced) if reduced is not None else dense(whole)
            if reduced is None:
                gradient = flattened(gradient, piece.strides)
            handle = self.offloaded.write(gradient, piece.at * gradient.element_size())
            if norm:
                squares[piece.name] = square_norm([gradient])
            handle.wait()
        self.gradients = None
        return squares

    def load(self, with_grad: set[str]) -> int:
        """Have the shard, and the gradients `with_grad`, in host memory; returns the bytes read
        from disk."""
        assert self.host is not None
        size = self.host.load()
        handles: list[Work] = []
        for piece in self.param_shards:
            if piece.name not in with_grad:
                continue
            assert self.offloaded is not None
            if self.offloaded.memory is not None:
                gradient = piece.inside(self.offloaded.memory.view(piece.param.dtype))
            else:
                gradient = torch.empty(piece.param.numel(), dtype=piece.param.dtype)
                handles.append(self.offloaded.read(gradient, piece.at * gradient.element_size()))
                size += gradient.nbytes
            piece.param.grad = piece.shaped(gradient)
        for handle in handles:
            handle.wait()
        return size

    def clear_grads(self) -> None:
        self.gradients = self.reduced = None
        if self.offloaded is not None:
            self.offloaded.free()
            self.offloaded = None
        for piece in self.param_shards:
            piece.param.grad = None

    @property
    def gradient_bytes(self) -> int:
        """On the device: of the flat gradient, its shard, or each parameter's own."""
        memory = self.reduced if self.gradients is None else self.gradients
        total = 0 if memory is None else memory.nbytes
        if self.gradients is None:
            grads = (p.grad for p in self.parameters.values())
            total += sum(g.numel() * g.element_size() for g in grads if g is not None)
        return total
