"""`gems.plan`: from a model, an image size and a machine to the plan that fits and runs fastest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.errors import GemsError, PlanError
from gems.hardware import Machine, bytes_of
from gems.model.costs import Costs
from gems.model.estimate import estimate
from gems.model.graph import Graph
from gems.planner.candidates import Choice
from gems.planner.compile import CompiledPlan, compile_plan
from gems.planner.explain import chosen, explain
from gems.planner.request import Request
from gems.planner.search import SearchResult, search
from gems.planner.techniques import gains, levels
from gems.plans.plan import Plan
from gems.plans.residency import ADAM, with_masters
from gems.torch.gpu_machine import machine_here
from gems.torch.runtime.stage_programs import AUTOCAST
from gems.torch.spatial.halo_costs import with_halos
from gems.torch.state.master_weights import stored_in_half
from gems.torch.tracing.profile import measure
from gems.torch.tracing.trace import as_module, trace

MOST = 2**17  # the largest side that is tried
STEP = 32  # sides of images are tried in steps of so many cells


def plan(
    model: nn.Module | Sequence[nn.Module],
    sample: Any,
    *,
    ranks: int,
    machine: str | Machine = "auto",
    memory: str | float | None = None,
    micro_batches: int = 0,
    objective: str = "time",
    costs: str = "auto",
    state: float = ADAM,
    schedule: str = "",
    precision: str = "fp32",
    master_weights: bool = False,
    store: str | float | None = None,
) -> Plan:
    """The best plan for `model` on inputs like `sample`; `plan.explain()` gives the reasons.

    machine        a preset's name, a file, or a gems.Machine; "auto", the default: this computer's
                   GPU by its properties, if there is one, else `cpu`
    memory         bytes per rank, "16GiB"; the machine's own if left out
    micro_batches  of one step, over all copies; two per rank if left out
    objective      `time`; `memory`; or `image`, the largest image that fits: then the sample's own
                   size does not matter, and `plan.why` has the one found
    costs          `estimate`, nothing is run; `measure`, on this computer; `auto` measures if the
                   machine is `local`
    state          bytes of the optimizer's state per byte of trained fp32 parameters: Adam 2
    schedule       plans of this one only; if left out, any but `2bw`, which uses older weights
    precision      `fp32` (as the model is), `bf16` or `fp16` by autocast: bytes of activations, and
                   speed, where the machine has one for it
    master_weights  weights and gradients in `precision`, and fp32 masters with the optimizer's
                   state, as gems.Trainer has them
    store          bytes that each rank may offload, to the host or to disk; any if left out
    """
    on = machine_here(machine)
    budget = None if memory is None else bytes_of(memory)
    study = Study(model, sample, on, costs, precision, master_weights)
    wanted: dict[str, Any] = {
        "objective": objective,
        "state": study.state(state),
        "schedule": schedule,
    }
    if store is not None:
        wanted["store"] = bytes_of(store)
    request = Request.on(on, ranks, budget, micro_batches, **wanted)
    return study.choose(request)[0]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's garbage collector, which would look through all blocks and actions again and
    again for cycles that there are none of: a fifth of the time of a large search."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True)
class Study:
    """A model on inputs of one size, and on others."""

    model: nn.Module | Sequence[nn.Module]
    sample: Any
    machine: Machine
    costs: str = "auto"
    precision: str = "fp32"
    master_weights: bool = False

    @cached_property
    def graph(self) -> tuple[Graph, Costs]:
        """What the model is, and what its blocks cost; recorded under the CPU's autocast."""
        module, _ = as_module(self.model)
        with self._autocast(), self._in_half(module):
            traced = trace(self.model, self.sample)
            graph = with_halos(traced, module)
            if self.costs == "measure" or (self.costs == "auto" and self.machine.name == "local"):
                return graph, measure(traced, module, torch.device("cpu"), on=self.machine)
        return graph, estimate(graph, self.machine, self.precision)

    def _autocast(self) -> torch.autocast:
        if self.precision not in AUTOCAST:
            known = ", ".join(AUTOCAST)
            raise PlanError(f"precision {self.precision!r} is unknown; choose one of {known}")
        dtype = AUTOCAST[self.precision]
        return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)

    def _in_half(self, module: nn.Module) -> AbstractContextManager[None]:
        """The model with its weights in half, if they are stored so."""
        if not self.master_weights:
            return nullcontext()
        dtype = AUTOCAST[self.precision]
        if dtype is None:
            raise PlanError(
                f"master_weights is for weights in half, and precision is {self.precision!r}; give "
                "'bf16' or 'fp16', or leave master_weights out"
            )
        return stored_in_half(module, dtype)

    def state(self, optimizer: float = ADAM) -> float:
        """Bytes of an optimizer's state per byte of weights as they are stored, masters included,
        if it has `optimizer` per byte of fp32 weights."""
        return with_masters(optimizer) if self.master_weights else optimizer

    def search(
        self,
        request: Request,
        *,
        enough: bool = False,
        prune: bool = True,
        first: Choice | None = None,
    ) -> SearchResult:
        return search(*self.graph, self.machine, request, enough=enough, prune=prune, first=first)

    def choose(self, request: Request) -> tuple[Plan, Study]:
        """The best plan, and the study of the images that it is for."""
        with _uncollected():
            if request.objective != "image":
                return self.plan(request), self
            sides, fitting = self._largest_sides(
                replace(request, objective="memory"), MOST, levels()
            )
            if not sides[-1][1]:
                raise self.none_fits(request)
            study = self.at(sides[-1][1])
            plan = study.plan(replace(request, objective="time"), fitting)
            return replace(plan, why=f"{plan.why}{gains(sides)}"), study

    def plan(self, request: Request, fitting: Choice | None = None) -> Plan:
        """The best plan, with its reasons; if none fits, an error has what would. One that is known
        to fit is tried if no other does."""
        found = self.search(request, first=fitting)
        best = chosen(found, "" if found.fitting else self.hint(request))
        self.compiled(best.plan, request).schedule  # noqa: B018  (validated, or an error)
        return replace(best.plan, why=f"images of {self.size}\n" + explain(found, self.samples))

    def compiled(self, plan: Plan, request: Request) -> CompiledPlan:
        return compile_plan(plan, *self.graph, self.machine, request)

    # --- other sizes ----------------------------------------------------------------------------

    @property
    def images(self) -> list[torch.Tensor]:
        tensors = [x for x in pytree.tree_leaves(self.sample) if isinstance(x, torch.Tensor)]
        return [x for x in tensors if x.dim() > 2]

    @property
    def samples(self) -> int:
        return self.images[0].shape[0] if self.images else 1

    @property
    def size(self) -> str:
        return " x ".join(map(str, self.images[0].shape[2:])) if self.images else "one sample"

    def at(self, side: int) -> Study:
        """The same on images of another side; other inputs stay as they are."""

        def resized(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.dim() < 3:
                return x
            shape = (*x.shape[:2], *(side,) * (x.dim() - 2))
            return torch.empty(shape, dtype=x.dtype, device="meta")

        return replace(self, sample=pytree.tree_map(resized, self.sample))

    def largest_side(self, request: Request, most: int = MOST) -> int:
        """The largest square (or cubic) image for which some plan fits."""
        side = self.largest_sides(request, most, [("", ())])[-1][1]
        if not side:
            raise self.none_fits(request)
        return side

    def largest_sides(
        self,
        request: Request,
        most: int = MOST,
        wanted: Sequence[tuple[str, tuple[str, ...]]] = (),
    ) -> list[tuple[str, int]]:
        """The largest side with each technique on top of those before it, 0 if none fits; the last
        is with all."""
        return self._largest_sides(request, most, wanted or levels())[0]

    def _largest_sides(
        self, request: Request, most: int, wanted: Sequence[tuple[str, tuple[str, ...]]]
    ) -> tuple[list[tuple[str, int]], Choice | None]:
        """The same, and a plan that fits the last. Plans that fit one side are tried first on the
        next."""
        if not self.images:
            raise PlanError("the sample holds no image, a tensor of three dims or more")
        paper = replace(self, costs="estimate")  # what fits does not depend on seconds
        studies: dict[int, Study] = {}
        first: Choice | None = None
        fitting: dict[int, Choice | None] = {}

        def fits(side: int, request: Request) -> bool:
            nonlocal first
            try:
                here = studies.setdefault(side, paper.at(side))
                found = here.search(request, enough=True, first=first)
            except GemsError:  # too small for the network, or more tiles than pixels
                return False
            if found.fitting:
                first = fitting[side] = found.fitting[0].choice
            return bool(found.fitting)

        sides: list[tuple[str, int]] = []
        side = 0
        for name, without in wanted:
            limited = replace(request, without=(*request.without, *without))
            side = _largest(partial(fits, request=limited), STEP, most, side // STEP)
            sides.append((name, side))
        return sides, fitting.get(side)

    def none_fits(self, request: Request) -> PlanError:
        return PlanError(
            f"not even images of {STEP} x {STEP} fit {request.ranks} ranks with "
            f"{request.memory:,.0f} bytes each; give more memory or more ranks"
        )

    def hint(self, request: Request) -> str:
        """What image would fit, where this one does not."""
        try:
            side = self.largest_side(request, most=max(self.images[0].shape[2:]))
        except (GemsError, IndexError):
            return ""
        return f"the largest image that fits is {side} x {side}"


def _largest(fits: Callable[[int], bool], step: int, most: int, low: int = 0) -> int:
    """The largest multiple of `step` up to `most` that fits, if all smaller ones do; 0 if none.
    `low` steps are known to fit."""
    high = max(8, low + 1)  # in steps; low fits, high may not
    last = most // step
    while high <= last and fits(high * step):
        low, high = high, 2 * high
    if high > last > low and fits(last * step):
        return last * step
    high = min(high, last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step
