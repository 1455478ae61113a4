"""One network under each technique, one training step of each beside the plain model's."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.coverage.networks import Case
from gems.errors import GemsError
from gems.plans.plan import Plan
from gems.torch.spatial.halo_costs import with_halos
from gems.torch.tracing.trace import Trace, as_arguments, trace
from gems.transport.threads import run
from tests.exact import Outcome, Recordings, join, part, plainly, trained

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
ROUNDED = 1e-6  # of networks that compute in float32 inside, whatever type they are given
LARGE = 6_000_000  # parameters; above, only one pipeline and one grid of tiles are tried
LARGER = 30_000_000  # above, only the pipeline
LARGEST = 60_000_000  # above, nothing: its copies do not fit the memory that a process is given
SMALL = 1e-2  # of the largest gradient: smaller ones are compared with this much of it
TECHNIQUES = ("record", "pipeline", "gems", "tiles 1x2", "tiles 2x2")
PLANS = {
    "pipeline": Plan(stages=2, micro_batches=2, schedule="1f1b"),
    "gems": Plan(stages=2, replications=1, schedule="gems"),
    "tiles 1x2": Plan(stages=2, micro_batches=1, spatial=[(1, 2)]),
    "tiles 2x2": Plan(stages=2, micro_batches=1, spatial=[(2, 2)]),
}
WITH_RANDOM = ("pipeline", "tiles 1x2")  # these draw masks, if the network does; others do not
Found = dict[str, Any]


class Mismatch(Exception):
    """Other numbers than the plain model's."""


def check(case: Case, quick: bool = False) -> Found:
    """What came out, by technique: exact, rejected, mismatch or crash, and why."""
    torch.manual_seed(0)
    try:
        model = case.build().to(case.dtype).train()
        if (parameters := sum(p.numel() for p in model.parameters())) > LARGEST:
            return {"network": case.title, "library": case.library, "large": parameters}
        torch.manual_seed(1)
        data = [(_in(case.dtype, case.inputs(4)), torch.rand(4, dtype=torch.float64))]
        random = draws(model)
        still = quiet(model)
        expected = Outcome([0.0]) if quick else plainly(still, data, 2, loss)
        restless = not quick and plainly(still, data, 2, loss).losses != expected.losses
        if not all(torch.isfinite(torch.tensor(expected.losses))):
            return {"network": case.title, "unusable": "the plain model's loss is not finite"}
    except Exception as error:
        return {"network": case.title, "unusable": _last(error)}
    found: Found = {"network": case.title, "library": case.library}
    found["parameters"] = parameters
    found["random"] = random or restless
    found["rounds"] = rounds(still, data[0][0]) if case.dtype is torch.float64 else False
    tolerance = ROUNDED if found["rounds"] else TOLERANCE[case.dtype]
    found["record"], traced = _recorded(model, part(data[0][0], 0, 2))
    if traced is None:
        return found
    found["calls"] = len(traced.record.calls)
    found["whole"] = list(traced.record.leaves)
    if quick:
        return found | (_reach(traced, model) if case.dims else {})
    recordings = {False: Recordings(), True: Recordings()}
    oracles: dict[Any, Outcome] = {(4, False, False): expected}
    for name in _tried(case, found["parameters"]):
        plan, masked = PLANS[name], random and name in WITH_RANDOM
        drawing = masked or restless
        samples = 2 * plan.total
        own = [(part(x, 0, samples), y[:samples]) for x, y in data]
        subject = model if masked else still

        def compare(
            plan: Plan = plan, drawing: bool = drawing, own: Any = own, subject: nn.Module = subject
        ) -> None:
            key = (len(own[0][1]), drawing, subject is model)
            if key not in oracles:
                oracles[key] = (
                    _planned(subject, own, _alone(plan.total), recordings[subject is model])
                    if drawing
                    else plainly(subject, own, plan.total, loss)
                )
            found = _planned(subject, own, plan, recordings[subject is model])
            same(found, oracles[key], tolerance)

        found[name] = _outcome(compare)
    if case.dims:
        found |= _reach(traced, model)
    return found


def _tried(case: Case, parameters: int) -> tuple[str, ...]:
    if parameters > LARGER:
        return ("pipeline",)
    if parameters > LARGE:
        return ("pipeline", "tiles 2x2") if case.dims else ("pipeline",)
    return TECHNIQUES[1:] if case.dims else TECHNIQUES[1:3]


def _in(dtype: torch.dtype, inputs: Any) -> Any:
    change = lambda x: x.to(dtype) if x.is_floating_point() else x  # noqa: E731
    return pytree.tree_map(change, inputs)


def _recorded(model: nn.Module, sample: Any) -> tuple[Found, Trace | None]:
    traced: list[Trace] = []
    outcome = _outcome(lambda: traced.append(trace(model, sample, twice=True)))
    return outcome, traced[0] if traced else None


def _outcome(work: Callable[[], Any]) -> Found:
    try:
        work()
    except Mismatch as error:
        return {"outcome": "mismatch", "why": str(error)}
    except AssertionError as error:
        return {"outcome": "mismatch", "why": _last(error), "trace": _short()}
    except GemsError as error:
        return {"outcome": "rejected", "why": f"{type(error).__name__}: {error}"}
    except BaseException as error:
        return {"outcome": "crash", "why": _last(error), "trace": _short()}
    return {"outcome": "exact"}


def _alone(total: int) -> Plan:
    return Plan(stages=1, micro_batches=total, schedule="sequential")


def _planned(model: nn.Module, data: Any, plan: Plan, recordings: Recordings) -> Outcome:
    def work(transport: Any) -> Outcome:
        return trained(transport, copy.deepcopy(model), data, plan, loss)

    with mock.patch("gems.torch.tracing.trace.record", recordings):
        return join(run(plan.world, work))


# --- the loss, and what must be equal -----------------------------------------------------------


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Of all that a network gives: each number weighs differently, and each sample by its target.

    (Its mean over micro-batches is that over the batch, as a loss must be.)
    """
    total = torch.zeros((), dtype=torch.float64)
    for x in pytree.tree_leaves(output):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not x.requires_grad:
            continue
        total = total + x.double().square().mean()
        if x.dim() > 1 and x.shape[0] == len(target):
            flat = x.double().flatten(1)
            weights = torch.cos(torch.arange(flat.shape[1], dtype=torch.float64))
            total = total + ((flat * weights).mean(1) * target).mean()
    return total


def same(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Loss, gradients, and all of the state after the step, parameters and buffers."""
    for mine, theirs in zip(found.losses, expected.losses, strict=True):
        if not abs(mine - theirs) <= tolerance * max(SMALL, abs(theirs)):
            raise Mismatch(f"loss {mine!r} instead of {theirs!r}")
    wanted, got = expected.gradients[0], found.gradients[0]
    most = max((float(g.abs().max()) for g in wanted.values() if g is not None), default=0.0)
    for name, gradient in wanted.items():
        mine = got.get(name)
        if (mine is None) != (gradient is None):
            raise Mismatch(f"{name}: {'no' if mine is None else 'a'} gradient")
        if mine is not None and gradient is not None:
            _near(f"gradient of {name}", mine, gradient, SMALL * most, tolerance)
    if list(found.state) != list(expected.state):
        raise Mismatch("state_dict has other names, or in another order")
    for name, tensor in expected.state.items():
        _near(name, found.state[name], tensor, SMALL, tolerance)


def _near(
    name: str, mine: torch.Tensor, theirs: torch.Tensor, least: float, tolerance: float
) -> None:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        raise Mismatch(f"{name}: {tuple(mine.shape)} {mine.dtype} instead of {theirs.dtype}")
    if not theirs.numel():
        return
    mine, theirs = (
        x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (mine, theirs)
    )
    if torch.equal(mine, theirs):  # also where both are infinite
        return
    off, size = float((mine - theirs).abs().max()), float(theirs.abs().max())
    if not off <= tolerance * max(size, least):
        raise Mismatch(f"{name}: off by {off:.3g} of {size:.3g}")


# --- rounding -------------------------------------------------------------------------------------


class Narrow(TorchDispatchMode):
    """Whether something that is given float64 computes in a narrower type."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype is torch.float64:
            self.found |= result.is_floating_point() and result.dtype is not torch.float64
        return result


def rounds(model: nn.Module, inputs: Any) -> bool:
    """Whether a network of float64 rounds what it computes to float32 on the way, as norms of some
    do. The memory layout of a tensor alone then changes the plain model's loss by 5e-8."""
    args, kwargs = as_arguments(part(inputs, 0, 2))
    with Narrow() as narrow:
        copy.deepcopy(model)(*args, **kwargs)
    return narrow.found


# --- random numbers -------------------------------------------------------------------------------


def _rates(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where modules keep a probability of dropping something."""
    for module in model.modules():
        for name, value in vars(module).items():
            dropping = "drop" in name or (name == "p" and "rop" in type(module).__name__)
            dropping = dropping or (name == "p" and "Stochastic" in type(module).__name__)
            if dropping and isinstance(value, float) and 0 < value < 1:
                yield module, name


def draws(model: nn.Module) -> bool:
    return any(True for _ in _rates(model))


def quiet(model: nn.Module) -> nn.Module:
    """The same without dropping anything."""
    still = copy.deepcopy(model)
    for module, name in list(_rates(still)):
        setattr(module, name, 0.0)
    return still


# --- how far tiles reach --------------------------------------------------------------------------


def _reach(traced: Trace, model: nn.Module) -> Found:
    """The share of the work that has an exact cut, and what ends it."""
    from gems.torch.spatial.halo_costs import _cut

    try:
        blocks = with_halos(traced, model).blocks
    except Exception as error:
        return {"reach": None, "ends at": _last(error)}
    total = sum(b.flops for b in blocks) or 1
    found: Found = {"reach": round(sum(b.flops for b in blocks if not b.whole) / total, 3)}
    calls = {call.name: call for call in traced.record.calls}
    for dim in (-1, -2):
        _, stop = _cut(traced, model, dim)
        if stop is not None:
            with _reason(traced, model, dim) as why:
                found["ends at"] = why or calls[stop].name
            break
    return found


@contextmanager
def _reason(traced: Trace, model: nn.Module, dim: int) -> Iterator[str]:
    from gems.geometry.layout import even
    from gems.torch.spatial.partition import CallNotTileable, lay_out
    from gems.torch.tensors.rng import Draws

    record = traced.record
    shapes = {name: record.values[name].shape for name in record.inputs}
    entering = {
        name: even(shape, (len(shape) + dim,), (2,))
        for name, shape in shapes.items()
        if len(shape) - 2 >= -dim
    }
    try:
        lay_out(record, model, record.calls, entering, Draws(0, torch.device("cpu")))
    except CallNotTileable as error:
        yield str(error)
    else:
        yield ""


def _last(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return f"{type(error).__name__}: {text[:600]}"


def _short() -> str:
    return "\n".join(traceback.format_exc().strip().splitlines()[-14:])
