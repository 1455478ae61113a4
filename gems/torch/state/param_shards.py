"""A stage's trainable weights in one piece of memory per type, of which each holder owns a part.

    weights    | conv.weight      | conv.bias | norm.weight   | ...            | padding |
    holders    |  0            |  1            |  2            |  3                      |
    rank 1                     | piece | piece |

A parameter lies in this memory as a view, so that gathering the parts copies nothing. What a rank
owns of a parameter is a `Piece`: a flat parameter of its own, which the optimizer steps. For an
optimizer that works cell by cell that is the same arithmetic as on the whole.

    zero=1   gradients are summed so that each rank has those of its own part; pieces lie in the
             whole memory, and after the optimizer's step the parts are gathered
    zero=2   the same; after the sum the memory of the whole gradient is given back
    zero=3   the own part has memory of its own. The whole memory is there from gather to release

A part has a home: memory of the device, or, if it is put away, of the host or of a file (see
host_weights.py). Then the whole memory is there from gather to release as well, whatever `zero` is:
with zero=0 each holder by itself has all of it at home, in pieces that are whole parameters. When
gradients are summed they go to the same place, and the optimizer works there, between `open` and
`close`.

[Note: memory that comes and goes] `release` gives the bytes back and leaves what autograd has saved
of the parameters as it is: it is whole again after the next gather. Views were made through
`.data`, so filling the memory does not count as a change of them. Parameters themselves, which a
user may have a reference to, are released tensors meanwhile, which raise (released.py).

torch's FSDP2 shards each parameter along its first dim and hangs gather and release on the hooks of
modules. Our stages are runs of recorded calls, not modules; their schedule says when weights are
needed, and `check` proves the order of the collectives. The flat cut also has no padding but at the
end of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from gems.torch.offload.host_weights import Home, room
from gems.torch.offload.stores import Slot, Store, Work
from gems.torch.state.kept_views import Kept
from gems.torch.state.released import release, restore
from gems.torch.state.sparse_gradients import dense, square
from gems.torch.tracing.op_meter import storage_of
from gems.transport.protocol import own_part

Tensor = torch.Tensor


@dataclass(frozen=True)
class Piece:
    """Cells `start` to `stop` of a parameter, counted flat, as a parameter of its own; one that is
    all of it has its shape."""

    name: str
    start: int
    stop: int
    part: nn.Parameter

    def of(self, whole: Tensor) -> Tensor:
        """These cells of something shaped like the whole parameter."""
        return whole.reshape(-1)[self.start : self.stop].view(self.part.shape)


class Shard:
    """What one rank has of a stage whose weights are shared out over its holders, or put away.

    Those that are not shared out have level 0 and this rank as their only holder.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        holders: tuple[int, ...],
        rank: int,
        level: int,
        store: Store | None = None,
    ) -> None:
        self.parameters, self.holders, self.rank, self.level = parameters, holders, rank, level
        self.store = store
        self.passing = level == 3 or store is not None  # memory that comes and goes
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, p in parameters.items():
            kinds.setdefault((p.dtype, p.device), []).append(name)
        self.flats = [_Flat({n: parameters[n] for n in names}, self) for names in kinds.values()]
        self.pieces = {piece.name: piece for flat in self.flats for piece in flat.pieces}
        self.came: set[str] = set()  # what has a gradient that is put away
        self.squares: dict[str, float] = {}  # of the own parts of these gradients, if asked for
        self.whole = True
        if self.passing:
            self.release()
            self._release_pieces()
        self.kept = [Kept(flat.weights) for flat in self.flats if self.passing]

    def own(self, memory: Tensor) -> Tensor:
        return own_part(memory, self.rank, self.holders)

    # --- weights ------------------------------------------------------------------------------

    def gather(self) -> list[Work]:
        """Make room for the whole, and have there what this rank has of it."""
        handles: list[Work] = []
        for flat in self.flats if self.passing else ():
            flat.room(len(flat.weights))
            for name in flat.at:
                restore(self.parameters[name])
            mine = self.own(flat.weights) if self.level == 3 else flat.weights
            if flat.home is None:
                mine.copy_(flat.part)
            else:
                handles.append(flat.home.read(mine))
        self.whole = True
        return handles

    @property
    def memory(self) -> list[Tensor]:
        """The whole, in which the holders' parts are gathered."""
        return [flat.weights for flat in self.flats]

    def keep(self) -> None:
        """Weights were loaded, or gathered: what is here for good becomes what the whole says."""
        for flat in self.flats if self.passing else ():
            mine = self.own(flat.weights) if self.level == 3 else flat.weights
            if flat.home is None:
                flat.part.copy_(mine)
            else:
                flat.home.write(mine)

    def release(self) -> None:
        """Give the memory of the whole back. [Note: memory that comes and goes]"""
        assert self.passing
        for name, p in self.parameters.items():
            release(p, f"parameter {name}", self.why)
        for flat in self.flats:
            flat.room(0)
        self.whole = False

    def release_kept(self) -> None:
        """A step has ended: let views of the weights that somebody kept have no memory either."""
        if not self.whole:
            pieces = [piece.part for piece in self.pieces.values()]
            for kept in self.kept:
                kept.release([*self.parameters.values(), *pieces], self.why)

    def apart(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """The results of a stage, which outlive its weights: copies of those that are views."""
        if not self.passing:
            return results
        weights = {storage_of(flat.weights) for flat in self.flats}
        return {n: t.clone() if storage_of(t) in weights else t for n, t in results.items()}

    @property
    def why(self) -> str:
        """Why weights are not here between steps."""
        sharded = f"is sharded over ranks {self.holders} (zero={self.level})"
        how = [sharded] * (self.level == 3) + ["is offloaded"] * (self.store is not None)
        return f"{' and '.join(how)} and not in memory between steps"

    @property
    def at_home(self) -> bool:
        """Whether all of the weights is put away just here, so that any can be had by itself."""
        return self.store is not None and self.level < 3

    @property
    def on_host(self) -> bool:
        """Whether weights are put away where an optimizer can work on them."""
        return any(flat.home is not None and flat.home.on_host for flat in self.flats)

    def copy(self, name: str) -> Tensor:
        """A parameter as it is at home, on the host."""
        assert self.at_home
        return next(flat for flat in self.flats if name in flat.at).copy(name)

    def put(self, name: str, value: Tensor) -> None:
        """Let a parameter at home be what a tensor says."""
        assert self.at_home
        next(flat for flat in self.flats if name in flat.at).put(name, value)

    @property
    def weight_bytes(self) -> int:
        """On the device."""
        parts = [flat.part for flat in self.flats if self.level == 3 and flat.home is None]
        whole = [flat.weights for flat in self.flats if self.whole]
        return sum(t.nbytes for t in (*parts, *whole))

    # --- gradients ----------------------------------------------------------------------------

    def places(self) -> dict[int, Tensor]:
        """Zeros for the gradient of every parameter, by the parameter's id, for one step."""
        found: dict[int, Tensor] = {}
        for flat in self.flats if self.level else ():
            flat.gradients = flat.zeros()
            for name, view in flat.views(flat.gradients).items():
                found[id(self.parameters[name])] = view
        return found

    @property
    def gradients(self) -> list[Tensor]:
        """The memory of whole gradients, to be summed."""
        return [flat.gradients for flat in self.flats if flat.gradients is not None]

    def settle(self, *, norm: bool = False) -> None:
        """Gradients are summed: hand out those of pieces, None where the parameter has none; or put
        them away. Then `norm` asks for the squares of their norms."""
        if self.store is not None:
            self._put_away(norm)
        else:
            self._hand_out()
        for p in self.parameters.values():
            p.grad = None

    def _hand_out(self) -> None:
        for flat in self.flats:
            assert flat.gradients is not None
            flat.sums = self.own(flat.gradients)
            if self.level > 1:
                flat.sums, flat.gradients = flat.sums.clone(), None
            for piece, at in zip(flat.pieces, flat.starts, strict=True):
                came = self.parameters[piece.name].grad is not None
                piece.part.grad = flat.sums[at : at + len(piece.part)] if came else None

    def _put_away(self, norm: bool) -> None:
        assert self.store is not None
        self.came = {name for name, p in self.parameters.items() if p.grad is not None}
        for flat in self.flats:
            sums = None if flat.gradients is None else self.own(flat.gradients)
            if flat.away is None:
                flat.away = self.store.slot(flat.part.nbytes)
            for piece, at in zip(flat.pieces, flat.starts, strict=True):
                if piece.name not in self.came:
                    continue
                if sums is None:
                    gradient = self.parameters[piece.name].grad
                    assert gradient is not None
                    gradient = dense(gradient).contiguous()
                else:
                    gradient = sums[at : at + piece.part.numel()]
                handle = flat.away.write(gradient, at * gradient.element_size())
                if norm:
                    self.squares[piece.name] = square(gradient)
                handle.wait()
            flat.gradients = None

    def forget(self) -> None:
        """The update is made, or will not be."""
        for flat in self.flats:
            flat.gradients = flat.sums = None
            if flat.away is not None:
                flat.away.free()
                flat.away = None
        for piece in self.pieces.values():
            piece.part.grad = None
        self.came.clear()
        self.squares.clear()

    # --- the update ---------------------------------------------------------------------------

    def open(self) -> int:
        """Have pieces, and the gradients that were put away, where the optimizer works. Gives the
        bytes that this took."""
        assert self.store is not None
        self.store.finish()
        for piece in self.pieces.values():
            restore(piece.part)
        return sum(flat.open(self.came) for flat in self.flats)

    def close(self) -> None:
        """The optimizer is through with them."""
        for flat in self.flats:
            if flat.home is not None:
                flat.home.close()
        self._release_pieces()
        self.forget()

    def _release_pieces(self) -> None:
        """What the optimizer steps has no memory where it is on disk."""
        for flat in self.flats:
            for piece in flat.pieces if flat.home is not None and not flat.home.on_host else ():
                release(piece.part, f"parameter {piece.name}", self.why)

    @property
    def gradient_bytes(self) -> int:
        """Of what is on the device now: as a whole, or in part, or parameter by parameter."""
        total = 0
        for flat in self.flats:
            memory = flat.gradients if flat.gradients is not None else flat.sums
            if memory is not None:
                total += memory.nbytes
            if flat.gradients is None:
                grads = (self.parameters[name].grad for name in flat.at)
                total += sum(g.numel() * g.element_size() for g in grads if g is not None)
        return total


class _Flat:
    """All parameters of one type, one after the other, padded to the same for each holder."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], shard: Shard) -> None:
        self.at: dict[str, tuple[int, torch.Size]] = {}
        total = 0
        for name, p in parameters.items():
            if not p.numel() % 2:
                total += total % 2  # so that it may be viewed as complex numbers
            self.at[name] = (total, p.shape)
            total += p.numel()
        width = -(-total // len(shard.holders))
        first = next(iter(parameters.values()))
        self.weights = torch.zeros(
            width * len(shard.holders), dtype=first.dtype, device=first.device
        )
        for name, view in self.views(self.weights).items():
            view.copy_(parameters[name].detach())
            parameters[name].data = view.data
        mine = shard.own(self.weights)
        self.home: Home | None = None
        if shard.store is None:
            self.part = mine.clone() if shard.level == 3 else mine
        else:
            self.home = Home(shard.store, mine if shard.level == 3 else self.weights)
            self.part = self.home.memory
            if shard.level < 3:
                self.part = shard.own(self.part)
        self.gradients: Tensor | None = None
        self.sums: Tensor | None = None
        self.away: Slot | None = None  # gradients of the own part
        self.pieces: list[Piece] = []
        self.starts: list[int] = []  # of each piece in the own part
        begin = shard.holders.index(shard.rank) * width
        for name, (at, shape) in self.at.items():
            start, stop = (min(max(x - at, 0), shape.numel()) for x in (begin, begin + width))
            if start < stop:
                here = at + start - begin
                part = self.part[here : here + stop - start].data
                if len(shard.holders) == 1:
                    part = part.view(shape).data
                self.pieces.append(Piece(name, start, stop, nn.Parameter(part)))
                self.starts.append(here)
        if self.home is not None:
            self.home.leave()

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        # `.data`: versions of their own, although all share one memory.
        return {
            name: memory[at : at + shape.numel()].data.view(shape).data
            for name, (at, shape) in self.at.items()
        }

    def zeros(self) -> Tensor:
        return torch.zeros(len(self.weights), dtype=self.weights.dtype, device=self.weights.device)

    def room(self, cells: int) -> None:
        room(self.weights, cells)

    def copy(self, name: str) -> Tensor:
        assert self.home is not None
        at, shape = self.at[name]
        found = torch.empty(shape, dtype=self.weights.dtype)
        self.home.read(found, at).wait()
        return found

    def put(self, name: str, value: Tensor) -> None:
        assert self.home is not None
        self.home.write(value.detach().to(self.weights.dtype).contiguous(), self.at[name][0])

    def open(self, came: set[str]) -> int:
        assert self.home is not None
        taken = self.home.open()
        handles: list[Work] = []
        for piece, at in zip(self.pieces, self.starts, strict=True):
            if piece.name not in came:
                continue
            assert self.away is not None
            size = piece.part.numel()
            if self.away.memory is not None:
                gradient = self.away.memory.view(piece.part.dtype)[at : at + size]
            else:
                gradient = torch.empty(size, dtype=piece.part.dtype)
                handles.append(self.away.read(gradient, at * gradient.element_size()))
                taken += gradient.nbytes
            piece.part.grad = gradient.view(piece.part.shape)
        for handle in handles:
            handle.wait()
        return taken
