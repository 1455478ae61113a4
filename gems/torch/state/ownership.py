"""Which rank has which parameters and buffers, and getting and giving them as a whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gems.errors import PlanError, ShapeError, problems
from gems.model.graph import Graph
from gems.plans.plan import Plan
from gems.schedule.action import Kind, Schedule
from gems.torch.runtime.rng import key
from gems.torch.tracing.held_weights import remember_replaced, replace_held
from gems.torch.tracing.trace import Trace
from gems.transport.protocol import Transport

Initialize = Callable[[nn.Module], None]
_drawing = threading.Lock()  # ranks may be threads, which share torch's generator


@dataclass(frozen=True)
class Ownership:
    """For each parameter and buffer, by first name, the stages that use it and who has it.

    What no stage uses belongs to stage 0. What several stages use is tied: its gradients are summed
    over all of its replica_groups.
    """

    stages: dict[str, tuple[int, ...]]
    replica_groups: dict[str, tuple[int, ...]]

    def on(self, rank: int) -> set[str]:
        return {name for name, ranks in self.replica_groups.items() if rank in ranks}

    def only(self, stage: int) -> list[str]:
        """The names that this stage alone uses."""
        return [name for name, stages in self.stages.items() if stages == (stage,)]

    def tied(self) -> list[str]:
        """The names that several stages on several ranks use."""
        return [n for n, s in self.stages.items() if len(s) > 1 and len(self.replica_groups[n]) > 1]


def ownership(graph: Graph, stage_of: Iterable[int], plan: Plan) -> Ownership:
    used: dict[str, set[int]] = {name: set() for name in graph.weight}
    for block, stage in zip(graph.blocks, stage_of, strict=True):
        for name in (*block.parameters, *block.buffers):
            used[name].add(stage)
    stages = {name: tuple(sorted(found)) or (0,) for name, found in used.items()}
    replica_groups = {
        name: tuple(sorted({rank for s in found for rank in plan.replica_groups[s]}))
        for name, found in stages.items()
    }
    return Ownership(stages, replica_groups)


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by every name it has."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def keep_only(
    model: nn.Module,
    names: set[str],
    first_name: Mapping[str, str],
    device: torch.device,
    seed: int,
    initialize: Initialize | None = None,
    later: Collection[str] = (),
) -> Unmade:
    """Have just these weights on the device; the others become shapes without memory.

    Weights that were only shapes so far (a model built on the meta device) are made and
    initialised: by `initialize(module)` or by the module's own `reset_parameters`, from random
    numbers that depend on the seed and the module's name alone. Modules with weights that are
    wanted `later` are left for later.
    """
    placed: dict[int, torch.Tensor] = {}
    fresh: dict[str, nn.Module] = {}
    left: dict[str, Left] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own in (module._parameters, module._buffers):
            for label, tensor in own.items():
                if tensor is None:
                    continue
                name = first_name[f"{path}.{label}" if path else label]
                if id(tensor) not in placed:
                    target = device if name in names else torch.device("meta")
                    new = _moved(tensor, target)
                    placed[id(tensor)] = placed[id(new)] = new
                    if new is not tensor:
                        remember_replaced(tensor, new)
                    if name in names and tensor.is_meta:
                        fresh.setdefault(path, module)
                        if name in later:
                            left.setdefault(path, {})[name] = (new, new.nbytes)
                            new.untyped_storage().resize_(0)
                own[label] = placed[id(tensor)]  # type: ignore[assignment]
    replace_held(model, placed)
    _reject_unknown(fresh, initialize)
    _initialize({path: m for path, m in fresh.items() if path not in left}, seed, initialize)
    return Unmade({path: (fresh[path], left[path]) for path in left}, seed, initialize)


Left = dict[str, tuple[torch.Tensor, int]]  # by name, and the bytes that it will have


class Unmade:
    """Modules whose weights have no memory yet."""

    def __init__(
        self, modules: dict[str, tuple[nn.Module, Left]], seed: int, initialize: Initialize | None
    ) -> None:
        self.modules, self.seed, self.initialize = modules, seed, initialize

    def make(self, names: Collection[str] | None = None) -> None:
        """Make and initialise the modules that have one of these weights, or all that are left."""
        wanted = {
            path: module
            for path, (module, left) in self.modules.items()
            if names is None or not left.keys().isdisjoint(names)
        }
        for path in wanted:
            for tensor, size in self.modules.pop(path)[1].values():
                tensor.untyped_storage().resize_(size)
        _initialize(wanted, self.seed, self.initialize)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    new = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
    if not isinstance(tensor, nn.Parameter):
        return new
    return nn.Parameter(new, requires_grad=tensor.requires_grad)


def _reject_unknown(fresh: dict[str, nn.Module], initialize: Initialize | None) -> None:
    unknown = [path for path, m in fresh.items() if not initialize and not _own_reset(m)]
    if unknown:
        raise PlanError(
            problems(
                "this model is on the meta device, and these modules do not say how to initialise "
                "themselves; give initialize=a function of a module, define reset_parameters(), or "
                "build the model with real weights:",
                (path or "the model itself" for path in unknown),
            )
        )


def _initialize(fresh: dict[str, nn.Module], seed: int, initialize: Initialize | None) -> None:
    with _drawing:
        state = torch.get_rng_state()
        try:
            for path, module in fresh.items():
                torch.manual_seed(key(seed, "initialize", path))
                reset = initialize or _own_reset(module)
                assert reset is not None
                with torch.no_grad():
                    reset(module)
        finally:
            torch.set_rng_state(state)


def _own_reset(module: nn.Module) -> Initialize | None:
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(type(module), name):
            return getattr(type(module), name)
    return None


def stats_owners(
    model: nn.Module, traced: Trace, stage_of: Sequence[int], owned: Ownership, plan: Plan
) -> dict[str, int]:
    """Whose word counts for what modules give as `get_extra_state`: the first rank that runs them.

    By their labels in the state dict: all of it that is not a weight.
    """
    found: dict[str, int] = {}
    for label in model.state_dict(keep_vars=True):
        if label in traced.record.names:
            continue
        path = label.removesuffix("_extra_state")
        ranks = [
            r for name, held in owned.replica_groups.items() if name.startswith(path) for r in held
        ]
        if not ranks:
            ranks = [
                plan.replica_groups[stage][0]
                for block, stage in enumerate(stage_of)
                if any(
                    f"{call.module or call.name}.".startswith(path) for call in traced.calls(block)
                )
            ]
        found[label] = min(ranks, default=0)
    return found


def whole_state(
    model: nn.Module,
    owned: Ownership,
    first_name: Mapping[str, str],
    stats_owners: Mapping[str, int],
    transport: Transport,
    copy: Callable[[str], torch.Tensor],
) -> dict[str, Any]:
    """The plain model's state dict, on every rank, in host memory: one broadcast per rank. `copy`
    gives a weight that this rank has."""
    wanted = model.state_dict(keep_vars=True)
    by_rank: dict[int, list[str]] = {}
    for name in dict.fromkeys(first_name[label] for label in wanted if label not in stats_owners):
        by_rank.setdefault(owned.replica_groups[name][0], []).append(name)
    local = named_weights(model)
    found: dict[str, Any] = {}
    for rank, names in sorted(by_rank.items()):
        shapes = [(n, local[n].shape, local[n].dtype) for n in names]
        sizes = [s.numel() * d.itemsize for _, s, d in shapes]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        if rank == transport.rank:
            for name, part in zip(names, flat.split(sizes), strict=True):
                own = copy(name).detach().cpu().contiguous()
                part.copy_(own.flatten().view(torch.uint8))
        if transport.world > 1:
            transport.broadcast(flat, rank)
        for (name, shape, dtype), part in zip(shapes, flat.split(sizes), strict=True):
            found[name] = part.clone().view(dtype).reshape(shape)
    if stats_owners:
        said = transport.all_gather_object({label: wanted[label] for label in stats_owners})
        found |= {label: said[rank][label] for label, rank in stats_owners.items()}
    return {label: found[first_name.get(label, label)] for label in wanted}


def load_state(
    model: nn.Module,
    state: Mapping[str, Any],
    held: set[str],
    first_name: Mapping[str, str],
    put: Callable[[str, torch.Tensor], None],
) -> None:
    """Take from a plain model's state dict what this rank has; the keys must be the model's. `put`
    lets a weight that this rank has be what a tensor says."""
    wanted = model.state_dict(keep_vars=True)
    found = [f"missing: {label}" for label in wanted if label not in state]
    found += [f"unexpected: {label}" for label in state if label not in wanted]
    found += [
        f"{label} has shape {tuple(state[label].shape)}, the model {tuple(tensor.shape)}"
        for label, tensor in wanted.items()
        if label in state and label in first_name and state[label].shape != tensor.shape
    ]
    if found:
        raise ShapeError(problems("this state dict is not the model's:", found))
    for label in wanted:
        if label not in first_name:
            set_extra_state(model, label, state[label])
        elif first_name[label] in held:
            put(first_name[label], state[label])


def set_extra_state(model: nn.Module, label: str, value: Any) -> None:
    """Hand a module, on every rank, what `get_extra_state` gave on the one that runs it."""
    model.get_submodule(label.removesuffix("_extra_state").rstrip(".")).set_extra_state(value)


def unordered(plan: Plan, schedule: Schedule) -> set[int]:
    """The stages of which no rank sees all samples, in order."""
    seen: dict[tuple[int, int], list[int]] = {}
    for rank, action in schedule:
        if action.kind is Kind.FORWARD and action.computes:
            seen.setdefault((action.stage, rank), []).append(action.micro_batch)
    several = {s for s in range(plan.depth) if len({row[s] for row in plan.spatial_groups}) > 1}
    return several | {stage for (stage, _), order in seen.items() if order != sorted(order)}


def reject_unordered(
    model: nn.Module,
    traced: Trace,
    owned: Ownership,
    unordered: set[int],
    free: Collection[str] = (),
) -> None:
    """A buffer that forward changes must be changed by one stage, and on one rank in sample order.

    Running statistics of normalisation layers may be on several ranks (see running_stats.py).
    Anything else would depend on who saw which sample first, unless it is `free`: no sample changes
    it (see sampleless_buffers.py). So do they in a module that was taken whole because it looks at
    values: nobody knows how often it runs them.
    """
    found = []
    for call in traced.record.calls:
        for name in call.touches:
            known = name.rpartition(".")[0] in call.norms or name in free
            several = len(owned.stages[name]) > 1
            if several or (not known and unordered.intersection(owned.stages[name])):
                found.append(
                    f"{name} is changed by {call.name} on ranks "
                    f"{owned.replica_groups[name]}, in stages {owned.stages[name]}"
                )
        if call.module is not None:
            module = model.get_submodule(call.module)
            if isinstance(module, nn.SyncBatchNorm):
                found.append(
                    f"{call.module} is a SyncBatchNorm, which talks to all ranks by itself"
                )
    if found:
        raise PlanError(
            problems(
                "these buffers would not come out as the plain model's; use BatchNorm, put the "
                "blocks into one stage, and have one replica of it:",
                dict.fromkeys(found),
            )
        )
