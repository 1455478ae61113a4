"""Run a rank's stages of a PyTorch model: forward, backward, and what crosses between them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from gems.errors import PlanError, ShapeError
from gems.graph import Value, crossings
from gems.plan import Plan
from gems.planner.assign import stages_by_name
from gems.schedule.core import Action, Kind, Message
from gems.timeline import Memory
from gems.torch.batch import Batch, describe, tensors
from gems.torch.defer import Entry, Ledger, receive, settle
from gems.torch.norms import Statistics
from gems.torch.program import Program, write
from gems.torch.random import Draws
from gems.torch.record import Attr, Ref
from gems.torch.trace import Trace, trace
from gems.torch.weights import Ownership

Tensor = torch.Tensor
Loss = Callable[[Any, Any], Tensor]
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Cut:
    """The model cut into the plan's stages, for one input signature."""

    trace: Trace
    stage_of: list[int]
    crossing: dict[tuple[int, int], tuple[str, ...]]
    blocks: list[list[int]]
    programs: dict[int, Program] = field(default_factory=dict)
    stash: dict[int, int] = field(default_factory=dict)

    def values(self, message: Message) -> list[Value]:
        """What a message carries; gradients travel the same way back, for what has one."""
        graph = self.trace.graph
        if message.what == "output":
            names = self.crossing.get((message.source, message.target), ())
            return [graph.value[n] for n in names]
        names = self.crossing.get((message.target, message.source), ())
        return [graph.value[n] for n in names if graph.value[n].grad]


@dataclass
class Kept:
    """What one micro-batch keeps on one stage between forward and backward."""

    edges: dict[str, Any]  # value -> where its gradient enters
    loss: Tensor | None
    gradients: dict[str, Tensor]  # of received values, filled in by backward
    wants: tuple[str, ...]  # the received values that want one
    page: list[Entry] | None  # weight gradients put off


class TorchAdapter:
    """The stages that one rank has, run with the user's own modules."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        actions: Sequence[Action],
        owned: Ownership,
        *,
        rank: int,
        loss: Loss | None,
        device: torch.device,
        precision: str,
        seed: int,
        leaves: tuple[str, ...] = (),
    ) -> None:
        self.model, self.plan, self.owned, self.rank = model, plan, owned, rank
        self.loss, self.device, self.precision = loss, device, precision
        self.leaves = leaves
        self.draws = Draws(seed, device)
        self.ledger = Ledger()
        self.stages = plan.stages_on[rank]
        self.put_off = {(a.stage, a.micro_batch) for a in actions if a.kind is Kind.INPUT}
        self.unordered = {s for s in self.stages if self._out_of_order(s, actions)}
        self.cuts: dict[Any, Cut] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.held = owned.on(rank)
        weights = {id(t): t for n, t in self._weights().items() if n in self.held}
        self.weight_bytes = sum(t.numel() * t.element_size() for t in weights.values())

    def _out_of_order(self, stage: int, actions: Sequence[Action]) -> bool:
        """Whether this rank does not see all samples of a stage, in order."""
        seen = [
            a.micro_batch
            for a in actions
            if a.kind is Kind.FORWARD and a.computes and a.stage == stage
        ]
        return len(self.plan.holders[stage]) > 1 or seen != sorted(seen)

    def _weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self.model.named_parameters())
        return found | dict(self.model.named_buffers())

    # --- one step -----------------------------------------------------------------------------

    def begin(
        self, batch: Batch, step: int, *, training: bool, scale: float = 1.0, update: bool = True
    ) -> None:
        """Get ready for a step. A micro-batch's loss weighs its share of samples times `scale`."""
        self.batch, self.step, self.training = batch, step, training
        self.scale, self.update = scale, update
        self.kept: dict[tuple[int, int], Kept] = {}
        self.losses: list[tuple[int, Tensor]] = []
        self.outputs: dict[int, Any] = {}
        self.stash_bytes: dict[tuple[int, int], int] = {}
        real = [i for i, size in enumerate(batch.sizes) if size]
        self.position = {i: at for at, i in enumerate(real)}
        self.of: dict[int, Cut] = {i: self.cut(batch.inputs[i]) for i in real}
        self.statistics: dict[int, Statistics] = {}
        if training and real:
            for stage in self.unordered:
                self.statistics[stage] = Statistics(self._norms(stage, self.of[real[0]]), len(real))

    def skips(self, micro_batch: int) -> bool:
        return not self.batch.sizes[micro_batch]

    def cut(self, inputs: Any) -> Cut:
        """The model, recorded on inputs of this signature and cut; remembered."""
        leaves = pytree.tree_leaves(inputs)
        signature = (
            tuple(
                (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x
                for x in leaves
            ),
            self.model.training,
            torch.is_grad_enabled(),
        )
        if signature not in self.cuts:
            self.cuts[signature] = self._new_cut(inputs)
        return self.cuts[signature]

    def _new_cut(self, inputs: Any) -> Cut:
        with self._autocast():
            traced = trace(self.model, inputs, device=self.device, leaves=self.leaves)
        assert not isinstance(self.plan.stages, int)
        stage_of = stages_by_name(traced.graph, self.plan.stages, known=False)
        crossing = crossings(traced.graph, stage_of)
        if extra := set(crossing) - set(self.plan.chain):
            raise PlanError(
                f"inputs {describe(inputs)} make the model send values between stages "
                f"{sorted(extra)}, which the plan's sample did not; give a sample of that shape"
            )
        blocks = [
            [i for i, s in enumerate(stage_of) if s == stage] for stage in range(self.plan.depth)
        ]
        return Cut(traced, stage_of, crossing, blocks)

    def program(self, cut: Cut, stage: int) -> Program:
        if stage not in cut.programs:
            graph = cut.trace.graph
            calls = [call for block in cut.blocks[stage] for call in cut.trace.calls(block)]
            sent = [n for (a, _), names in cut.crossing.items() if a == stage for n in names]
            if stage == self.plan.depth - 1:
                sent += graph.outputs
            splits = any(s == stage for s, _ in self.put_off)
            cut.programs[stage] = write(
                cut.trace.record,
                self.model,
                calls,
                tuple(dict.fromkeys(sent)),
                self.draws.call,
                self.ledger.deferral if splits else None,
            )
            cut.stash[stage] = graph.stash(cut.blocks[stage])
        return cut.programs[stage]

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _norms(self, stage: int, cut: Cut) -> list[tuple[nn.Module, int]]:
        """The modules of a stage with how often each is called."""
        calls = [c for block in cut.blocks[stage] for c in cut.trace.calls(block)]
        uses = Counter(c.module for c in calls if c.module is not None and c.touches)
        return [(self.model.get_submodule(path), times) for path, times in uses.items()]

    # --- compute ------------------------------------------------------------------------------

    def forward(
        self, stage: int, micro_batch: int, received: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        i = micro_batch
        cut = self.of[i]
        program = self.program(cut, stage)
        kept = Kept({}, None, {}, (), [] if self.training and (stage, i) in self.put_off else None)
        arguments = self._arguments(cut, stage, i, program, received, kept)
        self.draws.at(self.step, i)
        self.ledger.page = kept.page
        statistics = self.statistics.get(stage)
        around = statistics.during(self.position[i]) if statistics else nullcontext()
        with around, self._autocast():
            results = dict(zip(program.outputs, program.run(*arguments), strict=True))
            del arguments
            if stage == self.plan.depth - 1:
                self._arrive(cut, i, results, kept)
        self.ledger.page = None
        if self.training:
            sent = {n for (a, _), names in cut.crossing.items() if a == stage for n in names}
            kept.edges = {
                n: get_gradient_edge(t) for n, t in results.items() if n in sent and t.requires_grad
            }
            self.kept[stage, i] = kept
        self.stash_bytes[stage, i] = cut.stash[stage] if self.training else 0
        return {name: tensor.detach() for name, tensor in results.items()}

    def _arguments(
        self,
        cut: Cut,
        stage: int,
        i: int,
        program: Program,
        received: dict[str, Tensor],
        kept: Kept,
    ) -> list[Tensor]:
        """The stage's inputs: the model's own, or what was received, ready for a gradient."""
        graph = cut.trace.graph
        own = tensors(self.batch.inputs[i])
        mutated = {n for block in cut.blocks[stage] for n in graph.blocks[block].mutates}
        wants, arguments = [], []
        for name in program.inputs:
            if name in graph.inputs:
                x = own[graph.inputs.index(name)]
                x = x.to(self.device, non_blocking=True)
                arguments.append(x.clone() if name in mutated else x)
                continue
            x = received.pop(name)
            if name in mutated:
                x = x.clone()  # another stage of this rank may still read it
            if self.training and graph.value[name].grad:
                wants.append(name)
                x = receive(x, lambda g, name=name: kept.gradients.__setitem__(name, g))
            arguments.append(x)
        kept.wants = tuple(wants)
        return arguments

    def _arrive(self, cut: Cut, i: int, results: dict[str, Tensor], kept: Kept) -> None:
        """The last stage is through: the model's output, hence the loss or the prediction."""
        record = cut.trace.record
        weights = self._weights()

        def put(x: Any) -> Any:
            if isinstance(x, Ref):
                return results[x.name]
            return weights[x.name] if isinstance(x, Attr) else x

        output = pytree.tree_map(put, record.output, is_leaf=lambda x: isinstance(x, (Ref, Attr)))
        if not self.training or self.loss is None:
            self.outputs[i] = output
            return
        target = pytree.tree_map(self._to_device, self.batch.targets[i])
        loss = self.loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ShapeError(f"loss must give one number, the mean over a micro-batch; got {shape}")
        kept.loss = loss
        self.losses.append((i, loss.detach()))

    def _to_device(self, x: Any) -> Any:
        return x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x

    def backward(
        self, stage: int, micro_batch: int, gradients: Sequence[dict[str, Tensor]], *, whole: bool
    ) -> dict[str, Tensor]:
        i = micro_batch
        kept = self.kept.pop((stage, i)) if whole else self.kept[stage, i]
        summed: dict[str, Tensor] = {}
        for part in gradients:
            for name, gradient in part.items():
                summed[name] = summed[name] + gradient if name in summed else gradient
        roots = [edge for name, edge in kept.edges.items() if name in summed]
        seeds: list[Tensor | None] = [summed[name] for name in kept.edges if name in summed]
        if kept.loss is not None and kept.loss.requires_grad:
            weight = self.scale * self.batch.sizes[i] / self.batch.samples
            roots.append(get_gradient_edge(kept.loss))
            seeds.append(torch.full_like(kept.loss, weight))
        kept.edges, kept.loss = {}, None
        del summed, gradients
        if roots:
            self.draws.at(self.step, i)  # a recomputed region draws what it drew before
            torch.autograd.backward(roots, seeds)
        found, kept.gradients = kept.gradients, {}
        for name in kept.wants:
            if name not in found:  # no path from the loss leads here, but somebody waits for it
                found[name] = self._empty(self.of[i].trace.graph.value[name]).zero_()
        return found

    def weight(self, stage: int, micro_batch: int) -> None:
        kept = self.kept.pop((stage, micro_batch))
        if kept.page:
            settle(kept.page)

    # --- messages -----------------------------------------------------------------------------

    def select(self, message: Message, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {v.name: tensors[v.name] for v in self.of[message.micro_batch].values(message)}

    def pack(self, message: Message, tensors: dict[str, Tensor]) -> list[Tensor]:
        values = self.of[message.micro_batch].values(message)
        return [_flat(tensors[v.name], v) for v in values if v.bytes]

    def buffers(self, message: Message) -> list[Tensor]:
        values = self.of[message.micro_batch].values(message)
        return [
            torch.empty(v.bytes, dtype=torch.uint8, device=self.device) for v in values if v.bytes
        ]

    def unpack(self, message: Message, buffers: list[Tensor]) -> dict[str, Tensor]:
        found, arrived = {}, iter(buffers)
        for value in self.of[message.micro_batch].values(message):
            dtype = getattr(torch, value.dtype)
            if not value.bytes:
                found[value.name] = self._empty(value)
            else:
                strides = value.strides if _dense(value) else _row_major(value.shape)
                flat = next(arrived).view(dtype)
                found[value.name] = flat.as_strided(value.shape, strides)
        return found

    def _empty(self, value: Value) -> Tensor:
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device=self.device)

    # --- gradients ----------------------------------------------------------------------------

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """The trainable parameters that this stage alone uses, in one order everywhere."""
        weights = self._weights()
        mine = [weights[name] for name in self.owned.only(stage)]
        return [p for p in mine if isinstance(p, nn.Parameter) and p.requires_grad]

    def bucket(self, stage: int) -> list[Tensor]:
        """Gradients, whether there are any, and running statistics, flat, one buffer per type.

        A parameter that nobody gave a gradient must end without one, as in plain training, so
        each comes with a flag that is summed along.
        """
        parts: dict[torch.dtype, list[Tensor]] = {}
        if self.update:
            for p in self.parameters(stage):
                gradient = p.grad if p.grad is not None else torch.zeros_like(p)
                flag = torch.full((1,), float(p.grad is not None), dtype=p.dtype, device=p.device)
                parts.setdefault(p.dtype, []).extend((gradient.reshape(-1), flag))
                p.grad = None
        for total in self.statistics[stage].sums if stage in self.statistics else ():
            parts.setdefault(total.dtype, []).append(total.reshape(-1))
        return [torch.cat(part) for part in parts.values()]

    def unbucket(self, stage: int, buffers: list[Tensor]) -> None:
        flat = {buffer.dtype: buffer for buffer in buffers}
        at = dict.fromkeys(flat, 0)

        def take(like: Tensor, count: int) -> Tensor:
            start = at[like.dtype]
            at[like.dtype] += count
            return flat[like.dtype][start : start + count]

        if self.update:
            for p in self.parameters(stage):
                gradient, flag = take(p, p.numel()).view(p.shape), take(p, 1)
                p.grad = gradient if flag.item() else None
        if stage in self.statistics:
            statistics = self.statistics[stage]
            statistics.finish([take(s, s.numel()).view(s.shape) for s in statistics.sums])

    def settle_alone(self) -> None:
        """Statistics of stages that this rank holds alone, but saw out of order."""
        for stage, statistics in self.statistics.items():
            if len(self.plan.holders[stage]) == 1:
                statistics.finish(statistics.sums)

    def weighted_loss(self) -> float:
        """This rank's share of the step's loss."""
        samples = self.batch.samples
        return sum(float(loss) * self.batch.sizes[i] / samples for i, loss in sorted(self.losses))

    # --- bytes and seconds --------------------------------------------------------------------

    def stash(self, stage: int, micro_batch: int) -> int:
        return self.stash_bytes[stage, micro_batch]

    def standing(self) -> Memory:
        gradients = 0
        for name, p in self.model.named_parameters():
            if p.grad is not None and name in self.held:
                gradients += p.grad.numel() * p.grad.element_size()
        state = self.optimizer.state.values() if self.optimizer else ()
        tensors = [x for entry in state for x in entry.values() if isinstance(x, Tensor)]
        optimizer = sum(x.numel() * x.element_size() for x in tensors)
        return Memory(weights=self.weight_bytes, gradients=gradients, optimizer=optimizer)

    def size(self, buffers: Sequence[Tensor]) -> int:
        return sum(b.numel() * b.element_size() for b in buffers)

    def stamp(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter(), time.thread_time()

    def seconds(self, stamp: Any) -> tuple[float, float]:
        """On a GPU both are the device's time since the first stamp of the run."""
        if isinstance(stamp, tuple):
            return stamp
        if not hasattr(self, "first_stamp"):
            self.first_stamp = stamp
        stamp.synchronize()
        passed = self.first_stamp.elapsed_time(stamp) / 1e3
        return passed, passed


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _dense(value: Value) -> bool:
    """Whether the strides visit one block of memory, each element once, in any order of dims."""
    step = 1
    for stride, length in sorted(zip(value.strides, value.shape, strict=True)):
        if length != 1:
            if stride != step:
                return False
            step *= length
    return True


def _flat(tensor: Tensor, value: Value) -> Tensor:
    """The tensor's memory as bytes, in the order that the value's strides say."""
    strides = value.strides if _dense(value) else _row_major(value.shape)
    if tensor.stride() != strides:
        copy = torch.empty_strided(value.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = copy.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
