"""One micro-batch on its way through a streamed stage, forward and back.

Backward takes the sweeps in reverse. The gradient of a value is summed in one place, by all sweeps
that read it, before the sweep that made it. Whole calls keep their small graph in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial, reduce
from math import prod
from typing import Any

import torch

from gems.geometry.box import Box
from gems.model.graph import ITEMSIZE
from gems.torch.autograd.saved_tensors import Saved, unpacked
from gems.torch.autograd.split_backward import receive
from gems.torch.offload.stored_value import StoredValue
from gems.torch.runtime.carried_halos import Halos
from gems.torch.runtime.stream_code import StreamCode, inside
from gems.torch.runtime.sweep import Patch, Receive, Swept
from gems.torch.spatial.halo_exchange import HaloExchange
from gems.torch.spatial.moments import merged
from gems.torch.tensors.storage import storage_of
from gems.torch.tensors.wide import accumulated_in_fp32, wide

Tensor = torch.Tensor
Later = Callable[[], Tensor]
Gradients = dict[str, list[tuple[Any, Box | None]]]  # parts that are summed, each with its box


class Pass:
    """Values, while they are needed; then their gradients."""

    def __init__(self, stream: StreamCode, inputs: Sequence[Any], saves: bool) -> None:
        self.stream, self.saves = stream, saves
        self.values: dict[str, Any] = dict(zip(stream.inputs, inputs, strict=True))
        self.given = dict(self.values)
        self.boxes = dict(stream.frames)  # as the values are now: with their halos, once exchanged
        self.saved: dict[str, Saved | StoredValue] = {}  # what sweeps read
        self.graphs: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # of whole calls
        self.known: dict[str, Tensor] = {}  # moments of the whole image
        self.sums: dict[str, Any] = {}  # gradients so far
        self.late = stream.late if saves else None  # the sweep that is left to backward
        self.loss: Tensor | None = None  # what it came to
        self.halos: dict[int, Halos] = {}  # of each sweep, until its patches have run

    # --- forward --------------------------------------------------------------------------------

    def forward(self) -> dict[str, Any]:
        stream = self.stream
        outputs = {n: self.values[n] for n in stream.outputs if n in self.values}
        for at in range(len(stream.swept)):
            for name, x in (*self._run_whole(at).items(), *self._sweep(at).items()):
                if name in stream.outputs:
                    outputs[name] = x
            for name in stream.last_use[at]:
                self.values.pop(name, None)
        if self.saves:
            tensors = [x for x in map(_tensor, self.saved.values()) if x is not None]
            stream.bytes = sum({storage_of(x): x.nbytes for x in tensors if x.numel()}.values())
            stream.bytes += sum(halos.bytes for halos in self.halos.values())
        self.values.clear()
        self.given = {n: x for n, x in self.given.items() if n in stream.own and self.saves}
        return {n: x if isinstance(x, StoredValue) else x.detach() for n, x in outputs.items()}

    def _run_whole(self, at: int) -> dict[str, Tensor]:
        """The whole calls before a sweep, with a graph of their own."""
        stream, program = self.stream, self.stream.whole[at]
        leaves: dict[str, Tensor] = {}
        for name in program.inputs:
            x = stream.begin(name, self.values[name], None, None)().detach()
            wants = self.saves and stream.values[name].grad and x.is_floating_point()
            leaves[name] = x.requires_grad_() if wants else x
        with torch.set_grad_enabled(self.saves):
            given = [x.clone() for x in leaves.values()]  # a leaf may not be changed in place
            results = dict(zip(program.outputs, program.run(*given), strict=True))
        self.graphs.append((leaves, results) if self.saves else ({}, {}))
        found = {name: x.detach() for name, x in results.items()}
        self.values.update(found)
        return found

    def _sweep(self, at: int) -> dict[str, Any]:
        stream, swept = self.stream, self.stream.swept[at]
        if not swept.outputs:
            return {}
        if self.saves:
            self._save(swept.inputs)
        made = {name: stream.empty(name) for name in swept.outputs}

        def write(name: str, box: Box, part: Tensor) -> None:
            x = made[name]
            if isinstance(x, StoredValue):
                x.write(inside(box, x.frame), part)
            else:
                x[inside(box, stream.frames[name]).slices()] = part

        halos = self.halos[at] = Halos(self.saves, stream.store if swept.carrying else None)
        if at != self.late:
            swept.forward(self._begin, write, made, halos)
        elif swept.carrying:
            swept.hand_on(self._begin, halos)
        if at == self.late and stream.early is not None:
            stream.early.forward(self._begin, write, made, Halos(False))
        _join(stream, made)
        for name, x in made.items():
            self.values[name] = self._with_halo(name, x)
            if name in stream.layout.moments:
                self.known[name] = x
        return made

    def _with_halo(self, name: str, x: Any) -> Any:
        """A value with what this rank's patches read of other tiles."""
        if isinstance(x, StoredValue):
            x.settle()
        if name not in self.stream.exchanges:
            return x
        exchange, self.boxes[name] = self.stream.exchanges[name]
        if not isinstance(x, StoredValue):
            return exchange.assemble(x, exchange.start(x).wait())
        own = self.stream.frames[name]
        halos = exchange.start(_Window(x, own)).wait()  # type: ignore[arg-type]
        for box, halo in zip(exchange.received, halos, strict=True):
            x.write(box, halo)
        x.settle()
        return x

    def _save(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.stream.own or name in self.saved:
                continue
            x = self.values[name]
            stored = isinstance(x, StoredValue)
            self.saved[name] = x if stored else self.stream.saved.pack(x.detach(), x._version)

    def _begin(self, name: str, box: Box | None) -> Later:
        return self.stream.begin(name, self.values[name], box, self.boxes.get(name))

    # --- backward -------------------------------------------------------------------------------

    def backward(
        self, arrived: dict[str, Tensor], in_store: Mapping[str, list[StoredValue]],
        wanted: Sequence[bool],
    ) -> dict[str, Any]:  # fmt: skip
        """From the gradients of outputs, of which some are in a store, to those of inputs."""
        stream = self.stream
        self.arrived, self.in_store = arrived, dict(in_store)
        self.wants = {n for n, wants in zip(stream.inputs, wanted, strict=True) if wants}
        inner = stream.values.keys() - set(stream.inputs)
        self.wants |= {n for n in inner | stream.stored if stream.values[n].grad}
        self.values = dict(self.given)
        self.freed, stream.temporary = 0, 0
        with accumulated_in_fp32(stream.trained()):
            for at in reversed(range(len(stream.swept))):
                self._sweep_back(at)
                self._whole_back(at)
        for name, g in self.arrived.items():
            if name in stream.inputs:  # an output that is an input
                self._add(name, g)
        found, self.sums = {n: g for n, g in self.sums.items() if n in stream.inputs}, {}
        return {n: g if n in stream.stored else stream.narrow(n, g) for n, g in found.items()}

    def _sweep_back(self, at: int) -> None:
        stream, swept = self.stream, self.stream.swept[at]
        arrived = dict(self.arrived)
        gradients = self._gradients(swept.outputs)
        if swept.measuring is not None:
            self._measure_back(at, swept.measuring, gradients, arrived)
        if gradients or at == self.late:
            late = [n for n in swept.outputs if at == self.late]
            sums = {n: stream.empty(n) for n in late}
            self._run_back(swept, gradients, self._receive, sums, self.halos.pop(at))
            if sums:
                _join(stream, sums)
                self.loss = _finished(stream, at, sums)
        self._forget(at, swept.inputs)

    def _run_back(
        self, swept: Swept, gradients: Gradients, receive: Receive, sums: dict[str, Tensor],
        halos: Halos,
    ) -> None:  # fmt: skip
        stream, carried = self.stream, halos.bytes
        for name in swept.inputs:
            if name in self.saved and name not in self.values:
                x = self.saved[name]
                self.values[name] = x if isinstance(x, StoredValue) else unpacked(x)

        def gradient(name: str, box: Box | None) -> Later:
            return lambda: reduce(torch.add, (_box_of(*g, box) for g in gradients[name]))

        received = [self.values[n] for n in swept.inputs if n not in stream.own]
        tensors = [x for x in received if isinstance(x, Tensor)]
        uncounted = stream.weights | {storage_of(x) for x in tensors}
        sizes = partial(_boxes, stream, self.wants, swept)
        most = swept.backward(
            self._begin, receive, gradient, gradients.keys(), self.known, stream.around,
            uncounted, sizes, sums, halos,
        )  # fmt: skip
        held = [g for parts in gradients.values() for g, _ in parts]
        held += [*self.sums.values(), *self.arrived.values()]
        size = sum(x.nbytes for x in held if isinstance(x, Tensor)) + most - self.freed
        if prod(stream.layout.patches) > 1:  # one's gradient is added to that of those before
            size += max((p.nbytes for p in stream.trained(swept.laid.calls)), default=0)
        stream.temporary = max(stream.temporary, size)
        self.freed += carried

    def _measure_back(
        self, at: int, measuring: Swept, gradients: Gradients, arrived: Mapping[str, Tensor]
    ) -> None:
        """Add the gradient of moments to that of values, which the sweep need not make again."""
        stream = self.stream
        moments = {n: gradients.pop(n) for n in measuring.outputs if n in gradients}

        def add(name: str, gradient: Tensor, box: Box) -> None:
            if name not in gradients:
                gradients[name] = [(torch.zeros_like(stream.empty(name)), stream.frames[name])]
            ((total, frame),) = gradients[name]
            if total is arrived.get(name):  # another stage's
                gradients[name] = [(total := total.clone(), frame)]
            assert frame is not None
            total[inside(box, frame).slices()].add_(gradient)

        def receive_box(name: str, box: Box | None, x: Tensor) -> Tensor:
            assert box is not None
            return receive(x, lambda gradient: add(name, gradient, box))

        if moments:
            self._run_back(measuring, moments, receive_box, {}, Halos(True))
        self._forget(at, measuring.inputs)

    def _forget(self, at: int, names: Sequence[str]) -> None:
        """What no sweep reads that comes yet."""
        stream = self.stream
        earlier = {n for sweep in stream.swept[:at] for n in sweep.inputs}
        measured = (sweep.measuring for sweep in stream.swept[:at])
        earlier |= {n for one in measured if one is not None for n in one.inputs}
        for name in set(names) - earlier:
            self.values.pop(name, None)
            saved = self.saved.pop(name, None)
            if saved is not None and name not in stream.inputs and name not in stream.stored:
                self.freed += saved.nbytes

    def _gradients(self, names: Sequence[str]) -> Gradients:
        """Those of what a sweep made, of all that read it, on all ranks: parts that are summed box
        by box, with the box of each that is here."""
        stream = self.stream
        found: Gradients = {}
        if stream.group is not None:
            names = self._anywhere(names)
        for name in names:
            if name in stream.stored:
                if parts := self._stored_gradients(name):
                    found[name] = [(g, g.frame) for g in parts]
                continue
            if name in stream.layout.added:
                total = self._total(name)
                total = total if stream.group is None else _all_reduced(stream, name, total)
            else:
                if name in stream.exchanges:
                    self.sums[name] = _returned(stream, name, self.sums.pop(name, None))
                total = self._total(name)
            if total is not None:
                found[name] = [(total, stream.frames.get(name))]
        return found

    def _anywhere(self, names: Sequence[str]) -> list[str]:
        """Those that have a gradient on any rank of the group: all do the same."""
        group, stream = self.stream.group, self.stream
        assert group is not None
        if not (names := [n for n in names if n in self.wants]):
            return []
        have = [float(n in self.sums or n in self.arrived or n in self.in_store) for n in names]
        counts = group.all_reduce(torch.tensor(have, device=stream.device)).tolist()
        return [name for name, count in zip(names, counts, strict=True) if count]

    def _stored_gradients(self, name: str) -> list[StoredValue]:
        """The same of one in a store, of its own sweeps and of other stages."""
        stream = self.stream
        given = [self.sums.pop(name, None), *self.in_store.pop(name, ())]
        parts: list[StoredValue] = [g for g in given if g is not None]
        if name in stream.exchanges:
            parts = parts or [stream.empty(name)]
            for g in parts:
                g.settle()
            _return_halos(stream.exchanges[name][0], parts, stream.frames[name])
        for g in parts:
            g.settle()
        return parts

    def _total(self, name: str) -> Tensor | None:
        """What sweeps summed of a gradient, with what another stage sent."""
        mine, theirs = self.sums.pop(name, None), self.arrived.pop(name, None)
        if mine is None:
            return theirs
        return self.stream.narrow(name, mine if theirs is None else mine.add_(theirs))

    def _whole_back(self, at: int) -> None:
        leaves, results = self.graphs.pop()
        pairs = []
        for name, x in results.items():
            g = self._total(name)
            if g is not None and x.requires_grad:
                pairs.append((x, g))
        if not pairs:
            return
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        for name, x in leaves.items():
            if x.grad is not None:
                self._add(name, x.grad)

    def _receive(self, name: str, box: Box | None, x: Tensor) -> Tensor:
        """What a patch reads, with a gradient that is summed if it is wanted."""
        if name not in self.wants:
            return x
        whole = self.values[name]
        if not isinstance(whole, StoredValue):
            return receive(x, lambda gradient: self._add(name, gradient, box))
        if name not in self.sums:
            self.sums[name] = whole.values.like(whole)
        total: StoredValue = self.sums[name]
        so_far = total.begin(None if box is None else inside(box, total.frame))
        return receive(x, lambda gradient: total.add(so_far, gradient))

    def _add(self, name: str, gradient: Tensor, box: Box | None = None) -> None:
        """Sum a gradient of a value, or of a box of it."""
        if name not in self.sums:
            like = self.values[name] if isinstance(self.values.get(name), Tensor) else gradient
            dtype = wide(like.dtype) if box is None else like.dtype  # every patch adds to it all
            self.sums[name] = torch.zeros_like(like, dtype=dtype)
        where = ... if box is None else inside(box, self.boxes[name]).slices()
        self.sums[name][where].add_(gradient)


def _join(stream: StreamCode, made: dict[str, Any]) -> None:
    """What sums up over the image, over all tiles."""
    group, layout = stream.group, stream.layout
    for name, total in made.items():
        if name not in layout.added:
            continue
        if group is not None and name in layout.moments:
            total = reduce(merged, group.all_gather(total)).clone()
        elif group is not None:
            total = group.all_reduce(total)
        made[name] = stream.narrow(name, total)


class _Window:
    """The tile in a stored value that has its halo as well, for an exchange to read boxes of."""

    def __init__(self, x: StoredValue, own: Box) -> None:
        self.x, self.own = x, inside(own, x.frame)
        self.device, self.dtype = x.values.device, x.dtype

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        box = Box(tuple(s.start for s in where), tuple(s.stop for s in where))
        return self.x.begin(box.shift(self.own.start)).finish()


def _return_halos(exchange: HaloExchange, parts: Sequence[StoredValue], own: Box) -> None:
    """Send the gradient of halos, summed over its parts, to their owners, and add what they send of
    this tile."""
    g = parts[0]
    window = _Window(g, own)
    halos = [
        reduce(torch.add, (part.begin(box).finish() for part in parts)) for box in exchange.received
    ]
    pending = exchange.start_backward(window, halos)  # type: ignore[arg-type]
    boxes = [box for group, _ in pending.arriving for box in group]
    for box, part in zip(boxes, pending.wait(), strict=True):
        here = box.shift(window.own.start)
        g.add(g.begin(here), part)


def _box_of(g: Any, frame: Box | None, box: Box | None) -> Tensor:
    here = None if box is None or frame is None else inside(box, frame)
    if isinstance(g, StoredValue):
        return g.begin(here).finish()
    return g if here is None else g[here.slices()]  # type: ignore[no-any-return]


def _tensor(saved: Any) -> Tensor | None:
    """The memory that is saved on the device, if any."""
    return saved if isinstance(saved, Tensor) else getattr(saved, "tensor", None)


def _finished(stream: StreamCode, at: int, sums: dict[str, Tensor]) -> Tensor:
    """The loss, of its sums."""
    (name,) = stream.outputs
    if name in sums:
        return sums[name]
    (program,) = (p for p in stream.whole[at + 1 :] if p.outputs)
    with torch.no_grad():
        given = [sums[n] for n in program.inputs]
        return dict(zip(program.outputs, program.run(*given), strict=True))[name]  # type: ignore


def _boxes(
    stream: StreamCode, wants: Set[str], swept: Swept, patch: Patch, following: Patch | None
) -> int:
    """Bytes of boxes of stored values beside what a patch saves: of what was begun for the next
    patch, of sums that are added to, and of gradients."""

    def size(name: str, box: Box | None) -> int:
        return 0 if box is None else prod(box.shape) * ITEMSIZE[stream.values[name].dtype]

    stored = [n for n in swept.inputs if n in stream.stored]
    found = sum(size(n, patch.reads[n]) for n in stored if n in wants)
    found += sum(size(n, following.reads[n]) for n in stored) if following else 0
    made = [n for n in patch.parts if n in stream.stored and n in wants]
    return found + sum(size(n, patch.parts[n][0]) for n in made)


def _all_reduced(stream: StreamCode, name: str, g: Tensor | None) -> Tensor:
    """The gradient of a sum over all ranks."""
    group = stream.group
    assert group is not None
    return group.all_reduce(stream.narrow(name, stream.empty(name)) if g is None else g)


def _returned(stream: StreamCode, name: str, g: Tensor | None) -> Tensor:
    """A gradient with that of halos, at their owners."""
    exchange, _ = stream.exchanges[name]
    if g is None:
        dtype = getattr(torch, stream.values[name].dtype)
        g = torch.zeros(exchange.frame, dtype=dtype, device=stream.device)
    return exchange.adjoint(g)
