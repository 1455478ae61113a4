"""A model cut over a grid of ranks that are threads, beside the plain model. Not a test itself.

    Plain(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 7)).cut((2, 2), fused=3)

compares, in float64, the output, the gradients of inputs and parameters, and the buffers.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.distributed.members import Traffic
from gems.geometry.box import Box
from gems.geometry.layout import Layout, even
from gems.torch.autograd.saved_tensors import SavedTensors
from gems.torch.runtime.codegen import write
from gems.torch.runtime.streaming import Stream
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.partition import StageLayout, lay_out
from gems.torch.spatial.patch_layout import lay_out_patches
from gems.torch.spatial.saved_tiles import SavedTiles
from gems.torch.spatial.tiled_stage import TiledStage, bind
from gems.torch.tensors.rng import Draws
from gems.torch.tensors.storage import storage_of
from gems.torch.tracing.calls import leaves_of
from gems.torch.tracing.record import record
from gems.transport.protocol import Transport
from gems.transport.threads import Local, run

torch.set_num_threads(1)

TOLERANCE = 1e-10
# What is zero but for rounding is compared with larger things: outputs with this much of 1,
# gradients with this much of the largest gradient of all.
SMALL = 0.1

Tensor = torch.Tensor
Points = Sequence[Sequence[int]]  # axis of the grid -> where to cut, one point less than tiles


def cut_at(shape: Sequence[int], dims: Sequence[int], points: Points) -> Layout:
    """A tensor cut at these points, which need not be even and may leave tiles empty."""
    spans = tuple(
        tuple(itertools.pairwise((0, *inner, shape[dim])))
        for dim, inner in zip(dims, points, strict=True)
    )
    return Layout(tuple(shape), tuple(dims), spans, spans)


def _whole(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """The same tensors in one tile."""
    return {name: even(x.shape, x.dims, (1,) * len(x.dims)) for name, x in layouts.items()}


@dataclass
class Seen:
    """What one run of a model gave, by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of inputs and parameters; without one: zeros
    buffers: dict[str, Tensor]


Parts = dict[str, tuple[Box | None, Tensor]]  # by name; None: all of it


@dataclass
class Rank:
    """What one rank of a cut model found: plain tensors, which may travel between processes.

    `forward` and `backward` are what it sent in each, `stash` the bytes it kept between them.
    """

    outputs: Parts
    gradients: Parts
    buffers: dict[str, Tensor]
    activations: int
    forward: Traffic
    backward: Traffic
    laid: StageLayout | None  # stays where it was made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"laid": None}


class Plain:
    """A model's own forward and backward on some inputs, which any cut of it must repeat.

    `keyed` lets it draw random numbers as on one rank under a plan, instead of torch's own.
    """

    def __init__(self, model: nn.Module, *inputs: Tensor, keyed: bool = False) -> None:
        self.model = copy.deepcopy(model).double()
        self.inputs = [_leaf(x) for x in inputs]
        self.record = record(self.model, tuple(self.inputs))
        self.outputs = [ref.name for ref in leaves_of(self.record.output)]
        torch.manual_seed(0)
        self.seen = self._run(keyed)

    def _run(self, keyed: bool) -> Seen:
        model = copy.deepcopy(self.model)
        if keyed:
            program = write(self.record, model, self.record.calls, self.outputs, _draws())
            taken = dict(zip(self.record.inputs, self.inputs, strict=True))
            found = list(program.run(*(taken[name] for name in program.inputs)))
        else:
            found = [x for x in pytree.tree_leaves(model(*self.inputs)) if isinstance(x, Tensor)]
        self.seeds = {
            name: torch.randn_like(x)
            for name, x in zip(self.outputs, found, strict=True)
            if x.requires_grad
        }
        _backward([(x, self.seeds.get(name)) for name, x in zip(self.outputs, found, strict=True)])
        gradients = {n: _gradient(x) for n, x in zip(self.record.inputs, self.inputs, strict=True)}
        gradients |= {name: _gradient(p) for name, p in model.named_parameters()}
        for x in self.inputs:
            x.grad = None
        outputs = {n: x.detach() for n, x in zip(self.outputs, found, strict=True)}
        return Seen(outputs, gradients, dict(model.named_buffers()))

    # --- the same, cut --------------------------------------------------------------------------

    def cut(
        self,
        grid: Sequence[int],
        *,
        fused: int = 1,
        points: Points | Mapping[str, Points] | None = None,
        dims: Sequence[int] | None = None,
    ) -> list[Rank]:
        """Cut it over a grid of the last dims, or of `dims`, and compare. What each rank found.

        `points` cuts the inputs unevenly: the first one, or each by name.
        """
        worlds: list[Any] = []

        def work(transport: Local) -> Rank:
            worlds.append(transport.shared)
            options = {"fused": fused, "points": points, "dims": dims}
            return self.rank(transport, grid, **options)

        ranks = run(prod(grid), work)
        assert not any(worlds[0].mail.values()), "something was sent that nobody took"
        self.compare(ranks)
        return ranks

    def stream(
        self,
        grid: Sequence[int],
        points: Points | Mapping[str, Points] | None = None,
        *,
        carry: bool = False,
    ) -> Stream:
        """The same on one rank, patch after patch, and compare."""
        model, draws, calls = copy.deepcopy(self.model), _draws(), self.record.calls
        entering = self.layouts(grid, points)
        parts = next(iter(entering.values())).grid
        if carry:
            laid = lay_out_patches(
                self.record, model, calls, _whole(entering), draws, self.outputs, parts,
                entering, carry=True,
            )  # fmt: skip
        else:
            laid = lay_out_patches(self.record, model, calls, entering, draws, self.outputs)
        device, weights = torch.device("cpu"), {storage_of(p) for p in model.parameters()}
        stream = Stream(
            self.record, model, self.outputs, laid, draws,
            device=device, weights=weights, around=nullcontext,
        )  # fmt: skip
        taken = dict(zip(self.record.inputs, map(_leaf, self.inputs), strict=True))
        found = stream.run(*(taken[name] for name in stream.inputs))
        _backward([(x, self.seeds.get(name)) for name, x in zip(self.outputs, found, strict=True)])
        gradients: Parts = {name: (None, _gradient(x)) for name, x in taken.items()}
        gradients |= {name: (None, _gradient(p)) for name, p in model.named_parameters()}
        outputs: Parts = {n: (None, x.detach()) for n, x in zip(self.outputs, found, strict=True)}
        buffers, nothing = dict(model.named_buffers()), Traffic()
        self.compare([Rank(outputs, gradients, buffers, stream.temporary, nothing, nothing, None)])
        return stream

    def stream_tiles(
        self, tiles: Sequence[int], patches: Sequence[int], *, carry: bool = False
    ) -> None:
        """The same over ranks that run the patches of a tile each."""
        self.compare(
            run(prod(tiles), lambda transport: self._streaming(transport, tiles, patches, carry))
        )

    def _streaming(
        self, transport: Local, tiles: Sequence[int], patches: Sequence[int], carry: bool
    ) -> Rank:
        model, draws, calls = copy.deepcopy(self.model), _draws(), self.record.calls
        entering = {
            name: even(x.shape, range(x.dim() - len(tiles), x.dim()), tiles)
            for name, x in zip(self.record.inputs, self.inputs, strict=True)
            if x.dim() >= len(tiles) + 2
        }
        laid = lay_out_patches(
            self.record, model, calls, entering, draws, self.outputs, patches, carry=carry
        )
        axes, members = tuple(n for n in tiles if n > 1), tuple(range(transport.world))
        group = SpatialGroup(axes, members, transport.rank, transport)
        stream = Stream(
            self.record, model, self.outputs, laid, draws, device=torch.device("cpu"),
            weights=set(), around=nullcontext, group=group,
        )  # fmt: skip
        taken = dict(zip(self.record.inputs, map(_leaf, self.inputs), strict=True))
        found = stream.run(*(taken[name] for name in stream.inputs))
        outputs, boundary = dict(zip(self.outputs, found, strict=True)), laid.boundary(self.outputs)
        boxes = {n: x.own_boxes()[group.me] for n, x in boundary.items() if n in outputs}
        seeds = {
            n: seed[boxes[n].slices()] if n in boxes else seed / group.size
            for n, seed in self.seeds.items()
        }
        _backward([(x, seeds.get(name)) for name, x in outputs.items()])
        gradients: Parts = {name: (None, _gradient(x)) for name, x in taken.items()}
        gradients |= {name: (None, _gradient(p)) for name, p in model.named_parameters()}
        seen: Parts = {name: (boxes.get(name), x.detach()) for name, x in outputs.items()}
        nothing = Traffic()
        buffers = dict(model.named_buffers())
        return Rank(seen, gradients, buffers, stream.temporary, nothing, nothing, None)

    def layouts(
        self,
        grid: Sequence[int],
        points: Points | Mapping[str, Points] | None = None,
        dims: Sequence[int] | None = None,
    ) -> dict[str, Layout]:
        """How the inputs are cut; those without so many dims are whole on every rank."""
        names = self.record.inputs
        if points is not None and not isinstance(points, Mapping):
            points = {names[0]: points}
        found = {}
        for name, x in zip(names, self.inputs, strict=True):
            if x.dim() < len(grid) + 2:
                continue
            along = tuple(dims) if dims else tuple(range(x.dim() - len(grid), x.dim()))
            real = [(d, n) for d, n in zip(along, grid, strict=True) if n > 1] or [(along[0], 1)]
            at = tuple(d for d, _ in real)
            if points is not None and name in points:
                found[name] = cut_at(x.shape, at, points[name])
            else:
                found[name] = even(x.shape, at, [n for _, n in real])
        return found

    def rank(
        self,
        transport: Transport,
        grid: Sequence[int],
        *,
        fused: int = 1,
        points: Points | Mapping[str, Points] | None = None,
        dims: Sequence[int] | None = None,
    ) -> Rank:
        """One rank's part of a cut model, over any transport."""
        model, draws, calls = copy.deepcopy(self.model), _draws(), self.record.calls
        entering = self.layouts(grid, points, dims)
        laid = lay_out(self.record, model, calls, entering, draws, fused=fused)
        axes = tuple(n for n in grid if n > 1) or (1,)
        members = tuple(range(transport.world))
        team = SpatialGroup(axes, members, transport.rank, transport)
        bound = bind(laid, team)
        program = write(self.record, model, calls, self.outputs, draws, None, bound.runs)
        boxes = {name: bound.box(name) for name in (*self.record.inputs, *self.outputs)}
        inputs = {
            name: _leaf(x if boxes[name] is None else x[boxes[name].slices()])
            for name, x in zip(self.record.inputs, self.inputs, strict=True)
        }
        bound.context.saved = saved = SavedTiles()
        with SavedTensors(saved).hooks():
            results = program.run(*(inputs[name] for name in program.inputs))
        bound.context.saved = None
        outputs = dict(zip(self.outputs, results, strict=True))
        forward, team.traffic.messages, team.traffic.bytes = copy.copy(team.traffic), 0, 0
        _backward([self._seeded(name, x, bound) for name, x in outputs.items()])
        gradients: Parts = {name: (boxes[name], _gradient(x)) for name, x in inputs.items()}
        gradients |= {name: (None, _gradient(p)) for name, p in model.named_parameters()}
        return Rank(
            {name: (boxes[name], x.detach()) for name, x in outputs.items()},
            gradients,
            dict(model.named_buffers()),
            saved.bytes,
            forward,
            team.traffic,
            laid,
        )

    def _seeded(self, name: str, x: Tensor, bound: TiledStage) -> tuple[Tensor, Tensor | None]:
        """A rank's part of an output, and of its gradient: own cells, or a share of all."""
        if name not in self.seeds:
            return x, None
        layout = bound.laid.layouts.get(name)
        if layout is None:
            return x, self.seeds[name] / bound.group.size
        own, have = (boxes[bound.group.me] for boxes in (layout.own_boxes(), layout.boxes()))
        return x if own == have else x[within(own, have)], self.seeds[name][own.slices()]

    # --- what must be equal ---------------------------------------------------------------------

    def compare(self, ranks: Sequence[Rank]) -> None:
        for name, theirs in self.seen.outputs.items():
            largest = _largest([theirs])
            for number, rank in enumerate(ranks):  # every copy of every cell
                box, mine = rank.outputs[name]
                part = theirs if box is None else theirs[box.slices()]
                close(f"output {name} on rank {number}", mine, part, largest)
        gradients = self._gradients(ranks)
        most = _largest(self.seen.gradients.values())
        for name, theirs in self.seen.gradients.items():
            largest = max(_largest([theirs]), SMALL * most)
            close(f"gradient of {name}", gradients[name], theirs, largest)
        for name, theirs in self.seen.buffers.items():
            close(f"buffer {name}", ranks[0].buffers[name], theirs, _largest([theirs]))
            for rank in ranks[1:]:
                assert torch.equal(rank.buffers[name], ranks[0].buffers[name]), f"{name} drifts"

    def _gradients(self, ranks: Sequence[Rank]) -> dict[str, Tensor]:
        """Of all ranks, added up where they belong."""
        found = {name: torch.zeros_like(x) for name, x in self.seen.gradients.items()}
        for rank in ranks:
            for name, (box, gradient) in rank.gradients.items():
                found[name][... if box is None else box.slices()] += gradient
        return found


def close(name: str, mine: Tensor, theirs: Tensor, largest: float) -> None:
    """Equal up to rounding: within 1e-10 of the `largest` number that it came from."""
    assert mine.shape == theirs.shape, f"{name}: {tuple(mine.shape)} for {tuple(theirs.shape)}"
    assert mine.dtype == theirs.dtype, f"{name}: {mine.dtype} for {theirs.dtype}"
    if not theirs.is_floating_point():
        assert torch.equal(mine, theirs), f"{name}: other integers"
        return
    assert theirs.isfinite().all(), f"{name}: the plain model gives no finite numbers"
    off = _largest([mine - theirs])
    assert off <= TOLERANCE * max(largest, SMALL), f"{name}: off by {off:.3g} of {largest:.3g}"


def within(box: Box, frame: Box) -> tuple[slice, ...]:
    """Where the tensor that holds `frame` keeps `box`."""
    if box.empty:
        return tuple(slice(0, n) for n in box.shape)
    return box.relative_to(frame).slices()


def _draws() -> Draws:
    return Draws(0, torch.device("cpu"))


def _leaf(x: Tensor) -> Tensor:
    x = x.detach().clone()
    return x.double().requires_grad_(True) if x.is_floating_point() else x


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _backward(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """From all outputs that have a gradient at once, as a loss of them would."""
    losses = [(x * seed).sum() for x, seed in pairs if seed is not None]
    if losses:
        reduce(operator.add, losses).backward()


def _largest(tensors: Iterable[Tensor]) -> float:
    found = [float(x.detach().abs().max()) for x in tensors if x.numel()]
    return max((x for x in found), default=0.0)
