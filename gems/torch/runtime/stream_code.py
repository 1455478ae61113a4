"""A streamed stage on one rank: the code of its sweeps and of what runs between them, and the
boxes of the values that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch
from torch import nn

from gems.geometry.box import Box
from gems.geometry.layout import Layout
from gems.torch.autograd.saved_tensors import SavedTensors
from gems.torch.offload.stored_value import StoredValue, ValueStore
from gems.torch.runtime.codegen import Program, write
from gems.torch.runtime.microbatch import read_box
from gems.torch.runtime.sweep import Swept
from gems.torch.spatial.group import SpatialGroup
from gems.torch.spatial.halo_exchange import HaloExchange
from gems.torch.spatial.patch_layout import StreamLayout, Sweep
from gems.torch.tensors.memory_format import MemoryFormat
from gems.torch.tensors.rng import Draws
from gems.torch.tensors.strides import strided, tile_strides
from gems.torch.tensors.wide import wide
from gems.torch.tracing.calls import Call, Record

Tensor = torch.Tensor
Later = Callable[[], Tensor]
KNOWN = 2048  # calls of all patches that a stage remembers, of some 3 KB each


def inside(box: Box, frame: Box) -> Box:
    """A box as seen from the first cell of the frame; an empty one, wherever it was."""
    return Box.whole(box.shape) if box.empty else box.relative_to(frame)


class StreamCode:
    """What a stream is made of. Of the model's own inputs, tensors or arrays, only boxes are read.
    Patches are recomputed inside the context that `around` makes. With a `group`, this rank runs
    the patches of its tile. Of the last forward, `bytes` are those it saves for backward; of the
    last backward, `temporary` are those beyond, at their peak.
    """

    def __init__(
        self,
        record: Record,
        model: nn.Module,
        outputs: Sequence[str],
        layout: StreamLayout,
        draws: Draws,
        *,
        device: torch.device,
        weights: Set[int],
        around: Callable[[], AbstractContextManager[Any]],
        memory_format: MemoryFormat | None = None,
        group: SpatialGroup | None = None,
        store: ValueStore | None = None,
        stored: Set[str] = frozenset(),
        handed_on: Mapping[str, Layout] | None = None,
        loss: bool = False,
    ) -> None:
        """`stored` are the inputs and outputs that are in the `store`; what sweeps hand each other
        is there as well. Of those `handed_on` to other stages of the group a rank
        has its tile with halos. With `loss`, backward begins at the output, which is one number."""
        self.layout, self.device, self.weights, self.around = layout, device, weights, around
        self.memory_format = memory_format or MemoryFormat()
        self.values, self.outputs = layout.record.values, tuple(outputs)
        self.own = set(record.inputs)  # not received from another stage
        self.group, self.model, self.draws = group, model, draws
        self._sweeps()
        self.late = self._late() if loss else None
        self.frames = self._frames()
        self.exchanges = {} if group is None else self._exchanges(group, handed_on or {})
        self.saved = SavedTensors()  # of this forward
        self.bytes = self.temporary = 0
        self.store = store
        self.stored = {n for n in (*self.inputs, *self.outputs) if n in stored}
        if store is not None:
            produced = {n for swept in self.swept for n in swept.outputs} - layout.added
            self.stored |= produced.difference(self.outputs)
        self._apart()

    # --- what runs ------------------------------------------------------------------------------

    def _sweeps(self) -> None:
        """Generate the code of every sweep, and of the whole calls before it."""
        layout = self.layout
        self.whole: list[Program] = []
        self.swept: list[Swept] = []
        needed = set(self.outputs)
        for at in reversed(range(len(layout.sweeps))):
            sweep = layout.sweeps[at]
            made = [n for call in sweep.calls for n in call.writes if n in needed]
            swept = self._swept(sweep, made)
            needed.update(swept.inputs)
            given = [n for call in sweep.before for n in call.writes if n in needed]
            program = write(
                layout.record, self.model, sweep.before, given, self.draws, None, layout.finish
            )
            needed.update(program.inputs)
            self.swept.insert(0, swept)
            self.whole.insert(0, program)
        produced = {n for p in (*self.whole, *self.swept) for n in p.outputs}
        read = [n for p in (*self.whole, *self.swept) for n in p.inputs] + list(self.outputs)
        self.inputs = tuple(dict.fromkeys(n for n in read if n not in produced))
        self.last_use: list[set[str]] = []  # values that no later sweep reads
        later = set(self.outputs)
        for program, swept in zip(reversed(self.whole), reversed(self.swept), strict=True):
            used = {*program.inputs, *swept.inputs}
            self.last_use.insert(0, used - later)
            later |= used

    def _apart(self) -> None:
        """The code of what runs beside sweeps: sums that are known early, and moments of values."""
        layout = self.layout
        self.early = None if self.late is None else self._alone(layout.early.get(self.late))
        for at, swept in enumerate(self.swept):
            measuring = self._alone(layout.measuring.get(at))
            # From a store, reading a value would take longer than making it.
            if measuring is not None and self.stored.isdisjoint(measuring.inputs):
                swept.measure_apart(measuring)

    def _alone(self, sweep: Sweep | None) -> Swept | None:
        if sweep is None:
            return None
        return self._swept(sweep, [n for call in sweep.calls for n in call.writes])

    def _swept(self, sweep: Sweep, outputs: Sequence[str]) -> Swept:
        layout = self.layout
        places = [
            range(at * n, (at + 1) * n)
            for at, n in zip(self._coordinate(), layout.patches, strict=True)
        ]
        count = prod(layout.patches) * sum(len(sweep.calls) for sweep in layout.sweeps)
        return Swept(
            layout, sweep.laid, self.model, outputs, self.draws, places, keep=count <= KNOWN
        )

    def _late(self) -> int | None:
        """The last sweep, if it only sums up the loss whose gradient is known before: then patches
        run in backward only, and the loss comes with its gradients."""
        layout = self.layout
        at = max((k for k, swept in enumerate(self.swept) if swept.outputs), default=None)
        if at is None or len(self.outputs) != 1 or not self.values[self.outputs[0]].grad:
            return None
        sums = set(self.swept[at].outputs)
        if not sums <= layout.added - layout.moments:
            return None
        early = {n for call in layout.early.get(at, Sweep()).calls for n in call.writes}
        after = [call for sweep in layout.sweeps[at + 1 :] for call in sweep.before]
        if not after:
            return at if sums == set(self.outputs) else None
        finishes = len(after) == 1 and after[0].name in layout.finish
        return at if finishes and len(sums - early) == 1 and early < sums else None

    def _coordinate(self) -> tuple[int, ...]:
        """This rank's tile."""
        if self.group is None:
            return (0,) * len(self.layout.tiles)
        real = iter(self.group.coordinate)
        return tuple(next(real) if n > 1 else 0 for n in self.layout.tiles)

    def _frames(self) -> dict[str, Box]:
        """The box of every tiled value that this rank has when it arrives, or is made."""
        if self.group is None:
            return {name: Box.whole(x.shape) for name, x in self.layout.layouts.items()}
        found = {}
        for name, layout in self.layout.tiled(self.outputs).items():
            boxes = layout.boxes() if name in self.inputs else layout.own_boxes()
            whole = Box.whole(layout.shape)
            found[name] = whole if name in self.own else boxes[self.group.me]
        return found

    def _exchanges(
        self, group: SpatialGroup, handed_on: Mapping[str, Layout]
    ) -> dict[str, tuple[HaloExchange, Box]]:
        """How a tile gets the halo that later sweeps, and stages, read of a value, and what it then
        has."""
        found = {}
        for name, layout in self.layout.tiled(self.outputs).items():
            have, want = layout.own_boxes(), handed_on.get(name, layout).boxes()
            if name in self.inputs or all(w in h for w, h in zip(want, have, strict=True)):
                continue
            mine = want[group.me]
            exchange = HaloExchange(group, have, [want], [Box.whole(mine.shape)], mine.shape)
            found[name] = exchange, mine
        return found

    def trained(self, calls: Sequence[Call] | None = None) -> list[nn.Parameter]:
        """The weights of these calls, or of all of its own, that train."""
        if calls is None:
            calls = [c for sweep in self.layout.sweeps for c in (*sweep.before, *sweep.calls)]
        names = {name for call in calls for name in call.attrs}
        return [p for n, p in self.model.named_parameters() if n in names and p.requires_grad]

    # --- values ---------------------------------------------------------------------------------

    def empty(self, name: str) -> Any:
        """A value before the first patch."""
        value, frame = self.values[name], self.frames.get(name)
        if name in self.stored:
            return self._place(name)
        dtype, added = getattr(torch, value.dtype), name in self.layout.added
        like = torch.empty(0, dtype=wide(dtype) if added else dtype, device=self.device)
        if frame is None or frame.shape == value.shape:
            found = strided(value.shape, value.strides, like)
        else:
            found = strided(frame.shape, tile_strides(value, frame.shape), like)
        return found.zero_() if added else found

    def narrow(self, name: str, x: Tensor) -> Tensor:
        """A sum, in the type of the value."""
        return x.to(getattr(torch, self.values[name].dtype))

    def _place(self, name: str) -> StoredValue:
        """In the store, with the halo that this rank will have."""
        layout, store = self.layout.layouts[name], self.store
        assert store is not None
        frame = self.exchanges[name][1] if name in self.exchanges else self.frames[name]
        parts = self.layout.patches if self.group is not None else layout.grid
        return store.make(self.values[name], layout.dims, parts, frame)

    def begin(self, name: str, x: Any, box: Box | None, frame: Box | None) -> Later:
        """Begin to read a box of a value: a view, but for what is in a store, and the model's own
        inputs."""
        if name in self.own:
            part = read_box(x, box).to(self.device, non_blocking=True)
            part = self.memory_format(part)
            return lambda: part
        if isinstance(x, StoredValue):
            return x.begin(None if box is None else inside(box, x.frame)).finish
        here = None if box is None or frame is None else inside(box, frame)
        return lambda: x if here is None else x[here.slices()]
