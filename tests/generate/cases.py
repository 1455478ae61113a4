"""One case: a model, a plan, an optimizer, batches, a precision. Drawn from its number alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from gems.errors import PlanError
from gems.plans.fields import ASYNCHRONOUS
from gems.plans.plan import Plan
from tests.generate.models import Model, draw_model
from tests.generate.optimizers import OPTIMIZERS, SCHEDULERS, SPARSE
from tests.generate.plans import Options, draw_plan

BETWEEN = ("predict", "state", "reload", "export")


@dataclass(frozen=True)
class Case:
    """`after` is what is done behind each step; `reload` goes on under the plan `other`."""

    name: str
    model: Model
    plan: Options
    optimizer: str = "sgd"
    scheduler: str = ""
    clip: float | None = None
    accumulate: int = 1
    batches: tuple[int, ...] = (4, 4)
    precision: str = "fp64"
    after: tuple[str, ...] = ()
    other: Options = field(default_factory=dict)
    seed: int = 0

    def features(self) -> list[str]:
        """All that is special about it, in words for a table."""
        model = self.model
        kind = "sequence" if model.sequence else f"{model.dims}-D"
        found = [f"model {kind}", f"inputs {model.inputs}", f"outputs {model.outputs}"]
        found += [f"targets {model.targets}", *(f"trait {t}" for t in sorted(model.traits))]
        for piece in model.pieces:
            found.append(f"layer {piece.kind}")
            found += [f"wrap {piece.wrap}"] if piece.wrap else []
            found += [f"joint {piece.joint}"] if piece.joint else []
        for name, value in self.plan.items():
            shown = value if isinstance(value, (int, str)) else "given"
            found.append(f"plan {name}={shown}")
        found += [f"plan offload={part}" for part in self.plan.get("offload", ())]
        found += [f"optimizer {self.optimizer}", f"precision {self.precision}"]
        found += [f"scheduler {self.scheduler}"] if self.scheduler else []
        found += ["clip"] if self.clip else []
        found += ["accumulate"] if self.accumulate > 1 else []
        found += [f"after {what}" for what in set(self.after) if what]
        return list(dict.fromkeys(found))


def draw(number: int, seed: int = 0, ranks: int = 5) -> Case:
    r = Random(f"generate {seed} {number}")
    tiles = r.random() < 0.3
    model = draw_model(r, tiles)
    layers = len(model.pieces)
    plan = draw_plan(r, layers, model.dims, tiles=tiles, ranks=ranks)
    total = Plan(**plan).total
    each = total * r.choice((1, 1, 2))
    sizes = (each, each, max(1, each - r.randint(1, 3)), total, 1, each + 1)
    steps = r.choice((2, 2, 2, 3))
    same = r.random() < 0.6  # each other size is recorded anew, which takes longest
    batches = (each, *(each if same else r.choice(sizes) for _ in range(steps - 1)))
    if r.random() < 0.15:
        batches = (r.choice(sizes), *batches[1:])
    precision = r.choice(("bf16", "fp16")) if r.random() < 0.08 else "fp64"
    after = tuple(r.choice(("predict", "predict", "state", "reload")) if r.random() < 0.25 else ""
                  for _ in batches)  # fmt: skip
    other: Options = {}
    if "reload" in after:
        other = draw_plan(r, layers, model.dims, tiles=tiles, ranks=ranks, micro_batches=total)
    sparse = "sparse" in model.traits
    asynchronous = ASYNCHRONOUS in (plan["schedule"], other.get("schedule"))
    eager = "eager" in (plan.get("optimizer_step"), other.get("optimizer_step"))
    precision = "bf16" if precision == "fp16" and (asynchronous or eager) else precision
    if ASYNCHRONOUS in (plan["schedule"], other.get("schedule")):  # its two versions are one's own
        after = tuple("" if what == "reload" else what for what in after)
        other = {}
    if asynchronous:  # it rejects what several stages share
        model = replace(model, traits=model.traits - {"tied", "shared"})
    free = not asynchronous and not eager
    return Case(
        name=f"{seed}:{number}",
        model=model,
        plan=plan,
        optimizer=r.choice(SPARSE) if sparse else r.choice(sorted(OPTIMIZERS)),
        scheduler=r.choice(sorted(SCHEDULERS)) if r.random() < 0.2 else "",
        clip=r.choice((0.05, 0.5)) if free and not sparse and r.random() < 0.2 else None,
        accumulate=2 if not asynchronous and r.random() < 0.12 else 1,
        batches=batches,
        precision=precision,
        after=after,
        other=other,
        seed=r.randrange(100),
    )


def simpler(case: Case) -> Iterator[Case]:
    """The same without one of the things that make it special."""
    model, plain = case.model, replace
    yield from (plain(case, precision="fp64"),) if case.precision != "fp64" else ()
    for name, value in (
        ("after", ()), ("scheduler", ""), ("clip", None), ("accumulate", 1), ("optimizer", "sgd"),
        ("batches", case.batches[:-1]), ("batches", case.batches[1:]),
        ("batches", (max(case.batches),) * len(case.batches)),
    ):  # fmt: skip
        if value != getattr(case, name) and (name != "batches" or value):
            more = {"after": case.after[: len(value)]} if name == "batches" else {}
            yield plain(case, **{name: value}, **more)
    for i in range(len(model.pieces)):
        pieces = model.pieces[:i] + model.pieces[i + 1 :]
        yield plain(case, model=plain(model, pieces=pieces))
    for i, piece in enumerate(model.pieces):
        for name in ("wrap", "joint"):
            if getattr(piece, name):
                pieces = (*model.pieces[:i], plain(piece, **{name: ""}), *model.pieces[i + 1 :])
                yield plain(case, model=plain(model, pieces=pieces))
    for trait in model.traits:
        yield plain(case, model=plain(model, traits=model.traits - {trait}))
    for name, value in (("inputs", "one"), ("outputs", "one"), ("targets", "tensor")):
        if getattr(model, name) != value:
            yield plain(case, model=plain(model, **{name: value}))
    yield from (plain(case, plan=options) for options in _simpler_plans(case.plan))


def _simpler_plans(options: Options) -> Iterator[Options]:
    for name in options:
        if name not in ("stages", "micro_batches", "schedule"):
            yield from _if_valid({k: v for k, v in options.items() if k != name})
    for name, value in (("schedule", "sequential"), ("schedule", "gpipe")):
        if options["schedule"] not in ("sequential", "gpipe"):
            yield from _if_valid(options | {name: value})
    for name in ("stages", "micro_batches", "zero", "data", "local_dp"):
        value = options.get(name, 0)
        if isinstance(value, int) and value > 1:
            yield from _if_valid(options | {name: value - 1})
    for part in options.get("offload", ()):
        rest = tuple(p for p in options["offload"] if p != part)
        yield from _if_valid(options | {"offload": rest})


def _if_valid(options: Options) -> Iterator[Options]:
    try:
        Plan(**options)
    except PlanError:
        return
    yield options


def smaller(case: Case, fails: Any, tries: int = 150) -> Case:
    """Take things away as long as it still fails in the same way."""
    again = True
    while again and tries > 0:
        again = False
        for one in simpler(case):
            tries -= 1
            if tries > 0 and fails(one):
                case, again = one, True
                break
    return case


def shown(case: Case) -> dict[str, Any]:
    """Short, for a report: what is not as usual."""
    model = case.model
    pieces = [
        " ".join(
            filter(None, (p.kind, p.wrap and f"[{p.wrap}]", p.joint and f"+{p.joint}@{p.back}"))
        )
        for p in model.pieces
    ]
    found: dict[str, Any] = {
        "case": case.name, "shape": model.shape, "layers": pieces, "traits": sorted(model.traits),
        "inputs": model.inputs, "outputs": model.outputs, "targets": model.targets,
        "plan": case.plan, "optimizer": case.optimizer, "scheduler": case.scheduler,
        "clip": case.clip, "accumulate": case.accumulate, "batches": case.batches,
        "precision": case.precision, "after": case.after, "other": case.other,
    }  # fmt: skip
    usual = {"one", "tensor", "", None, 1, "fp64", "sgd"}
    return {
        k: v for k, v in found.items()
        if v and not (isinstance(v, (str, int, float, type(None))) and v in usual)
    }  # fmt: skip
