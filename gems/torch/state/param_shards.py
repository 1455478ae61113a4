"""A stage's trainable parameters on one rank, sharded (ZeRO) or offloaded.

    zero=1   gradients are reduce-scattered, so that each rank has those of its own shard; shards
             are views of the whole weights, and are all-gathered after the optimizer step
    zero=2   the same; the whole gradient is freed after the reduce-scatter
    zero=3   the shard has memory of its own. The whole weights exist from unshard to reshard

Offloaded weights have a host copy, in host memory or on disk (host_copy.py). Then the whole weights
exist from unshard to reshard only, whatever `zero` is. With zero=0 each rank has a host copy of all
of them, and its shards are whole parameters. Reduced gradients are offloaded too, and the optimizer
works on the host copy, between `load` and `offload`.

For an optimizer that works element by element, stepping shards is the same arithmetic as stepping
whole parameters.

[Note: resharded weights] `reshard` frees the storage and leaves what autograd has saved of the
parameters as it is: it is valid again after the next unshard. Views were made through `.data`, so
that filling the storage does not change their versions. The parameters themselves, which a user may
have a reference to, are released tensors meanwhile, which raise (released.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gems.torch.offload.stores import Store
from gems.torch.state.flat_params import FlatParam
from gems.torch.state.leaked_views import LeakedViews
from gems.torch.tensors.released import release, restore
from gems.torch.tensors.storage import storage_of
from gems.transport.protocol import Work

Tensor = torch.Tensor


class StageShard:
    """One rank's shard of a stage. `ranks` are its shard group: this rank alone, if the stage is
    only offloaded (`level` 0)."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ranks: tuple[int, ...],
        rank: int,
        level: int,
        store: Store | None = None,
    ) -> None:
        self.parameters, self.ranks, self.level, self.store = parameters, ranks, level, store
        self.reshards = level == 3 or store is not None
        types: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
        for name, p in parameters.items():
            types.setdefault((p.dtype, p.device), {})[name] = p
        self.flats = [FlatParam(found, ranks, rank, level, store) for found in types.values()]
        self.param_shards = {
            piece.name: piece for flat in self.flats for piece in flat.param_shards
        }
        self.with_grad: set[str] = set()  # parameters whose gradients are offloaded
        self.grad_squares: dict[str, Tensor] = {}  # of this rank's shards of them, if asked for
        self.is_unsharded = True
        if self.reshards:
            self.reshard()
            self._release_shards()
        self.leaked = [LeakedViews(flat.weights) for flat in self.flats if self.reshards]

    # --- weights ------------------------------------------------------------------------------

    def unshard(self) -> list[Work]:
        """Allocate the whole weights, and begin to copy what this rank has of them there. With
        zero=3 an all-gather of `flat_weights` must follow."""
        handles: list[Work] = []
        if self.reshards:
            for p in self.parameters.values():
                restore(p)
            handles = [handle for flat in self.flats for handle in flat.unshard()]
        self.is_unsharded = True
        return handles

    @property
    def flat_weights(self) -> list[Tensor]:
        """The whole weights, in which shards are all-gathered."""
        return [flat.weights for flat in self.flats]

    def write_back(self) -> None:
        """Weights were loaded or all-gathered: copy them to what this rank has of them."""
        for flat in self.flats if self.reshards else ():
            flat.write_back()

    def reshard(self) -> None:
        """Free the whole weights. [Note: resharded weights]"""
        assert self.reshards
        for name, p in self.parameters.items():
            release(p, f"parameter {name}", self.why)
        for flat in self.flats:
            flat.reshard()
        self.is_unsharded = False

    def load_updated(self) -> list[Tensor]:
        """The whole weights, of which this rank has updated its shard, to be gathered."""
        if self.has_host_copy:
            for handle in self.unshard():
                handle.wait()
        return self.flat_weights

    def keep_updated(self) -> None:
        """They were gathered: put them where they are kept."""
        if self.has_host_copy:
            self.write_back()
            self.reshard()

    def release_leaked_views(self) -> None:
        """After a step: release views of the weights that somebody still has."""
        if not self.is_unsharded:
            shards = [piece.param for piece in self.param_shards.values()]
            for leaked in self.leaked:
                leaked.release([*self.parameters.values(), *shards], self.why)

    def clone_views(self, results: dict[str, Any]) -> dict[str, Any]:
        """The results of a stage, which outlive its weights: those that are views are cloned."""
        if not self.reshards:
            return results
        weights = {storage_of(flat.weights) for flat in self.flats}
        tensors = {n for n, x in results.items() if isinstance(x, Tensor)}  # others are in a store
        return {
            n: x.clone() if n in tensors and storage_of(x) in weights else x
            for n, x in results.items()
        }

    @property
    def why(self) -> str:
        """Why weights are not in memory between steps."""
        sharded = f"is sharded over ranks {self.ranks} (zero={self.level})"
        how = [sharded] * (self.level == 3) + ["is offloaded"] * (self.store is not None)
        return f"{' and '.join(how)} and not in memory between steps"

    @property
    def has_host_copy(self) -> bool:
        """Whether this rank has a host copy of all weights, so that any can be had by itself."""
        return self.store is not None and self.level < 3

    @property
    def on_host(self) -> bool:
        """Whether weights are offloaded to host memory, where an optimizer can work on them."""
        return any(flat.host is not None and flat.host.on_host for flat in self.flats)

    def copy(self, name: str) -> Tensor:
        """A copy of a parameter out of the host copy."""
        return self._flat(name).copy(name)

    def put(self, name: str, value: Tensor) -> None:
        """Set a parameter in the host copy."""
        self._flat(name).put(name, value)

    def _flat(self, name: str) -> FlatParam:
        assert self.has_host_copy
        return next(flat for flat in self.flats if name in flat.at)

    @property
    def weight_bytes(self) -> int:
        """On the device."""
        shards = [flat.shard for flat in self.flats if self.level == 3 and flat.host is None]
        whole = self.flat_weights if self.is_unsharded else []
        return sum(t.nbytes for t in (*shards, *whole))

    # --- gradients ----------------------------------------------------------------------------

    def allocate_grads(self) -> dict[int, Tensor]:
        """Zeros for the gradient of every parameter, by the parameter's id, for one step."""
        found: dict[int, Tensor] = {}
        for flat in self.flats if self.level else ():
            flat.gradients = flat.zeros(flat.weights.dtype)
            for name, view in flat.views(flat.gradients).items():
                found[id(self.parameters[name])] = view
        return found

    @property
    def gradients(self) -> list[Tensor]:
        """The whole flat gradients, to be reduce-scattered."""
        return [flat.gradients for flat in self.flats if flat.gradients is not None]

    def take_reduced_grads(self, *, norm: bool = False) -> None:
        """After the reduce-scatter: give shards their gradients, None where the parameter has none;
        or offload them, with the squares of their norms if `norm`."""
        if self.store is not None:
            self.with_grad = {name for name, p in self.parameters.items() if p.grad is not None}
        for flat in self.flats:
            if self.store is None:
                flat.hand_out_grads()
            else:
                self.grad_squares |= flat.offload_grads(norm=norm)
        for p in self.parameters.values():
            p.grad = None

    def clear_grads(self) -> None:
        """The optimizer step is done, or skipped."""
        for flat in self.flats:
            flat.clear_grads()
        self.with_grad.clear()
        self.grad_squares.clear()

    @property
    def gradient_bytes(self) -> int:
        """On the device."""
        return sum(flat.gradient_bytes for flat in self.flats)

    # --- the optimizer step -------------------------------------------------------------------

    def load(self) -> int:
        """Have offloaded shards and gradients where the optimizer works; returns the bytes read
        from disk."""
        assert self.store is not None
        self.store.finish()
        for piece in self.param_shards.values():
            restore(piece.param)
        return sum(flat.load(self.with_grad) for flat in self.flats)

    def offload(self) -> None:
        """The optimizer step is done."""
        for flat in self.flats:
            if flat.host is not None:
                flat.host.offload()
        self._release_shards()
        self.clear_grads()

    def _release_shards(self) -> None:
        for flat in self.flats:
            flat.release_shards(self.why)
