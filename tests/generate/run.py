"""A case under its plan, with ranks as threads, and the verdict on it."""

from __future__ import annotations

import math
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from gems.errors import LossError, PlanError, ShapeError, TraceError
from gems.plans.fields import ASYNCHRONOUS
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.threads import Hung, run
from tests.exact import Recordings, part, samples_in
from tests.generate.cases import Case
from tests.generate.models import BATCH_DIM, Net, batch, build, copy_of, draws, loss
from tests.generate.optimizers import OPTIMIZERS, SCHEDULERS
from tests.generate.oracle import Outcome, plain
from tests.generate.wraps import later

Tensor = torch.Tensor
TOLERANCE = 1e-10
LOOSE = 0.05  # of bf16 and fp16, in which a rounding may tip
SECONDS = 60.0
REJECTIONS = (PlanError, TraceError, ShapeError)
# A rejection says what to do; these are the words for it.
REMEDY = re.compile(
    r"\b(use|give|leave|put|choose|write|wrap|make|remove|lower|move|pass|set|call|start|say|try|"
    r"take|keep|replace|register|mark|add|clone|assign|return|compute|change|convert|split|let|end|hold|list)\b",
    re.IGNORECASE,
)
GOOD = ("exact", "rejected", "invalid", "sensitive")
BAD = ("mismatch", "crashed", "hung", "no remedy")


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of GOOD or BAD; `text` says why, `place` where: failures are sorted by them."""

    kind: str
    text: str = ""
    place: str = ""
    trace: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in BAD

    @property
    def sort(self) -> str:
        """The same for failures of one class: numbers and names of layers do not count."""
        text = re.sub(r"[\d.]+(e[+-]?\d+)?", "#", self.text.split("\n")[0])
        if self.kind == "mismatch":
            text = text.split(":")[0]
            text = "state" if text.startswith("state") else text
        return f"{self.kind} {text[:120]} {self.place}"


class Shared(Recordings):
    """One recording for all ranks of a case, whose models are copies: also by their attributes."""

    def __call__(self, model: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        simple = (bool, int, float, str)
        attributes = [
            {k: v for k, v in vars(m).items() if type(v) in simple} for m in model.modules()
        ]
        with mock.patch("tests.exact._form", lambda x: (_FORM(x), repr(attributes))):
            return super().__call__(model, args, kwargs, **options)


from tests.exact import _form as _FORM  # noqa: E402

# --- one rank -------------------------------------------------------------------------------------


def dtype_of(case: Case) -> torch.dtype:
    return torch.float64 if case.precision == "fp64" else torch.float32


def phases(case: Case) -> list[tuple[dict[str, Any], range]]:
    """Plans, and the steps under each: a reload changes to the other plan, and back."""
    found, start, plans = [], 0, [case.plan, case.other]
    for step in range(len(case.batches)):
        ends = step < len(case.after) and case.after[step] == "reload"
        if ends or step == len(case.batches) - 1:
            found.append((plans[len(found) % 2] or case.plan, range(start, step + 1)))
            start = step + 1
    return found


def work(case: Case, model: Net, plan: Plan, steps: range, folder: Path) -> Callable[[Any], Any]:
    """What each rank does in one phase; weights of later phases come from the file."""
    dtype = dtype_of(case)

    def rank(transport: Any) -> Outcome:
        mine = copy_of(model)
        inputs = batch(model, case.batches[steps[0]], steps[0], dtype)[0]
        sample = _sample(inputs, plan.total)
        later(mine, steps[0])
        trainer = Trainer(
            mine,
            loss,
            OPTIMIZERS[case.optimizer],
            sample,
            plan,
            transport=transport,
            precision="fp32" if case.precision == "fp64" else case.precision,
            clip=case.clip,
            accumulate=case.accumulate,
            scheduler=SCHEDULERS[case.scheduler] if case.scheduler else None,
            seed=case.seed,
            batch_dim=BATCH_DIM.get(case.model.targets),
        )
        found = Outcome()
        if steps[0]:
            trainer.load(folder / f"at-{steps[0]}")
        for step in steps:
            if step and any("later" in vars(m) for m in mine.modules()):
                _flushed(trainer, found)  # modes may not change while a batch is in flight
            later(mine, step)
            _step(case, trainer, model, plan, step, found)
        if steps[-1] + 1 < len(case.batches):
            trainer.save(folder / f"at-{steps[-1] + 1}")
        _flushed(trainer, found)
        found.state = {k: v.clone() for k, v in trainer.state_dict().items()}
        trainer.close()
        return found

    return rank


def _sample(inputs: Any, total: int) -> Any:
    whole = pytree.tree_map(lambda x: x if isinstance(x, Tensor) else None, inputs)
    count = -(-samples_in([x for x in pytree.tree_leaves(whole) if x is not None]) // total)
    return pytree.tree_map(lambda x: part(x, 0, count) if isinstance(x, Tensor) else x, inputs)


def _flushed(trainer: Any, found: Outcome) -> None:
    if rest := trainer.flush():
        found.losses.append(rest.loss)
        found.updated.append(rest.updated)


def _step(case: Case, trainer: Any, model: Net, plan: Plan, step: int, found: Outcome) -> None:
    samples, dtype = case.batches[step], dtype_of(case)
    inputs, targets = batch(model, samples, step, dtype)
    given = trainer.step(inputs, targets)
    asynchronous = plan.asynchronous
    if not asynchronous or given.updated:  # else the loss is that of no batch
        found.losses.append(given.loss)
        found.updated.append(given.updated)
    found.norms.append(given.norm)
    what = case.after[step] if step < len(case.after) else ""
    if what:
        _flushed(trainer, found)
    if what == "predict":
        found.seen.append(trainer.predict(batch(model, samples, 100 + step, dtype)[0]))
    elif what == "state":
        found.seen.append({k: v.clone() for k, v in trainer.state_dict().items()})


def planned(case: Case, model: Net, seconds: float = SECONDS) -> Outcome:
    """All phases, and what all ranks agreed on."""
    found = Outcome()
    # Two at most are compared; many recordings of one model would take most of the time.
    recording = mock.patch("gems.torch.tracing.trace.record", Shared())
    with tempfile.TemporaryDirectory() as folder, recording:
        for options, steps in phases(case):
            plan = Plan(**options)
            outcomes = run(plan.world, work(case, model, plan, steps, Path(folder)), seconds)
            for rank, other in enumerate(outcomes):
                if text := difference(other, outcomes[0], 0.0):
                    raise Mismatch(f"ranks 0 and {rank} differ: {text}")
            for name in ("losses", "norms", "updated", "seen"):
                getattr(found, name).extend(getattr(outcomes[0], name))
            found.state = outcomes[0].state
    return found


def alone(case: Case) -> Case:
    """The same on one rank and one stage: the oracle where random numbers are drawn."""

    def one(options: dict[str, Any]) -> dict[str, Any]:
        if not options:
            return {}
        plan = Plan(**options)
        schedule = ASYNCHRONOUS if plan.asynchronous else "sequential"
        return {"stages": 1, "micro_batches": plan.total, "schedule": schedule}

    return replace(case, plan=one(case.plan), other=one(case.other))


# --- comparing ------------------------------------------------------------------------------------


class Mismatch(Exception):
    pass


def difference(found: Outcome, expected: Outcome, tolerance: float) -> str:
    """What differs first, or nothing."""
    if found.updated != expected.updated:
        return f"updated: {found.updated}, not {expected.updated}"
    for name in ("losses", "norms"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if (a is None) != (b is None):
                return f"{name}: step {step} has {a}, not {b}"
            if (
                a is not None
                and repr(a) != repr(b)
                and not abs(a - b) <= tolerance * max(1.0, abs(b))
            ):
                return f"{name}: step {step} has {a!r}, not {b!r}, off by {abs(a - b):.3g}"
    for i, (mine, theirs) in enumerate(zip(found.seen, expected.seen, strict=True)):
        if text := _trees(mine, theirs, tolerance):
            return f"seen {i}: {text}"
    if list(found.state) != list(expected.state):
        return f"state keys: {list(found.state)}, not {list(expected.state)}"
    text = _trees(dict(found.state), dict(expected.state), tolerance)
    return f"state {text}" if text else ""


def _trees(mine: Any, theirs: Any, tolerance: float) -> str:
    a, form = pytree.tree_flatten_with_path(mine)
    b, other = pytree.tree_flatten_with_path(theirs)
    if form != other:
        return f"of the form {form}, not {other}"
    for (path, x), (_, y) in zip(a, b, strict=True):
        name = pytree.keystr(path)
        if not isinstance(x, Tensor):
            if x != y:
                return f"{name}: {x}, not {y}"
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name}: {tuple(x.shape)} {x.dtype}, not {tuple(y.shape)} {y.dtype}"
        if not x.numel():
            continue
        off = float((x.double() - y.double()).abs().max())
        size = float(y.double().abs().max())
        if not off <= tolerance * max(1.0, size):
            return f"{name}: off by {off:.3g} of {size:.3g}"
    return ""


# --- the verdict ----------------------------------------------------------------------------------


def judge(case: Case, seconds: float = SECONDS) -> Verdict:
    """Run a case and say what came of it."""
    # oneDNN's kernels for AMX end the process on virtual machines that announce it and lack it.
    torch._C._set_mkldnn_enabled(case.precision == "fp64")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _judge(case, seconds)
        except Hung as hung:
            return Verdict("hung", "ranks wait for ever", _where(str(hung)), str(hung))
        finally:
            torch._C._set_mkldnn_enabled(True)


def _judge(case: Case, seconds: float) -> Verdict:
    model = build(case.model, dtype_of(case))
    assert isinstance(model, Net)
    keyed = draws(model) or case.precision != "fp64"
    expected = _expected(case, model, keyed, seconds)
    if isinstance(expected, Verdict):
        return expected
    try:
        found = planned(case, model, seconds)
    except Hung:
        raise
    except REJECTIONS as error:
        text = f"{type(error).__name__}: {error}"
        return Verdict("rejected" if REMEDY.search(str(error)) else "no remedy", text)
    except Mismatch as error:
        return Verdict("mismatch", str(error))
    except BaseException as error:
        return crashed(error)
    tolerance = TOLERANCE if case.precision == "fp64" else LOOSE
    if case.precision == "fp16" and found.updated != expected.updated:
        return Verdict("sensitive", "parts of a gradient that overflows do not")
    if text := difference(found, expected, tolerance):
        if not keyed and _sensitive(case, model, expected, text):
            return Verdict("sensitive", text)
        return Verdict("mismatch", text)
    return Verdict("exact")


def _expected(case: Case, model: Net, keyed: bool, seconds: float) -> Outcome | Verdict:
    """The oracle's outcome, or why there is none."""
    try:
        if keyed:
            found = planned(alone(case), model, seconds)
        else:
            found = plain(case, model, counts(case), case.plan["schedule"] == ASYNCHRONOUS)
    except REJECTIONS as error:
        text = f"{type(error).__name__}: {error}"
        return Verdict("rejected" if REMEDY.search(str(error)) else "no remedy", text)
    except Hung:
        raise
    except Exception as error:
        absent = isinstance(error, NotImplementedError) and case.precision != "fp64"
        if keyed and not absent and not isinstance(error, LossError):
            return crashed(error)
        return Verdict("invalid", f"{type(error).__name__}: {error}")
    if not all(map(math.isfinite, found.losses)):
        return Verdict("invalid", f"losses {found.losses}")
    return found


def counts(case: Case) -> list[int]:
    """Micro-batches of each step."""
    return [Plan(**options).total for options, steps in phases(case) for _ in steps]


def crashed(error: BaseException) -> Verdict:
    trace = "".join(traceback.format_exception(error))
    if trace.rpartition("File ")[2].find("in _fused_sgd\n") > 0 and "NoneType" in str(error):
        # torch's own: a parameter of a fused SGD with momentum has its first gradient later than
        # others (tests/test_generate.py shows it in plain PyTorch).
        return Verdict("invalid", f"{type(error).__name__}: {error}")
    return Verdict("crashed", f"{type(error).__name__}: {error}"[:2000], _where(trace), trace)


def _where(trace: str) -> str:
    """The innermost line of GEMS."""
    lines = re.findall(r'File ".*?(gems/[\w/]+\.py)", line (\d+),? in (\w+)', trace)
    return f"{lines[-1][0]}:{lines[-1][2]}" if lines else ""


def _sensitive(case: Case, model: Net, expected: Outcome, text: str) -> bool:
    """Whether rounding alone would do as much: weights moved by a few units of the last place."""
    off = re.search(r"off by ([\d.e+-]+)", text)
    if off is None or float(off[1]) > 1e-6:
        return False
    worst = 0.0
    for seed in range(3):
        moved = copy_of(model)
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in moved.parameters():
                p.mul_(1 + 4e-16 * torch.randn_like(p))
        other = plain(case, moved, counts(case), case.plan["schedule"] == ASYNCHRONOUS)
        for size in (10.0**-k for k in range(4, 16)):
            if difference(other, expected, size):
                worst = max(worst, size)
                break
    return worst * 100 >= float(off[1])
