"""`gems train`: train a network on this computer's ranks, or as one rank of a cluster's.

Alone it starts as many local processes as the plan takes; under torchrun, mpirun or srun it is one
of theirs. Rank 0 shows progress; at the end the last step is drawn as it was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems.cli.options import (
    add_model,
    add_plan,
    image_shape,
    micro_batch,
    model_from,
    plan_from,
)
from gems.cli.ranks import start
from gems.draw.html import html
from gems.draw.svg import svg
from gems.draw.table import report
from gems.draw.units import heading
from gems.files import to_json, write
from gems.plans import Plan

if TYPE_CHECKING:
    from gems.torch.trainer import Step, Trainer

SAMPLES = 1 << 20  # drawn when they are asked for, so they may be many
OTHERS = 128  # samples that accuracy is taken on at the end
OPTIMIZERS = ("sgd", "adam", "adamw")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_plan(parser)
    group = parser.add_argument_group("the training")
    put = group.add_argument
    put(
        "--app",
        choices=("pictures", "synthetic"),
        default="pictures",
        help="data: crops of real pictures (which one is it from?), or noise",
    )
    put("--steps", type=int, default=20, metavar="N", help="updates (default 20)")
    put("--optimizer", choices=OPTIMIZERS, default="sgd", help="default sgd, with momentum 0.9")
    put("--learning-rate", type=float, default=0.05, metavar="LR", help="default 0.05")
    put("--weight-decay", type=float, default=0.0, metavar="X", help="default 0")
    put("--clip", type=float, metavar="NORM", help="largest norm of the gradient")
    put("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="default fp32")
    put(
        "--costs",
        choices=("auto", "estimate", "measure"),
        default="auto",
        help="how to learn what blocks cost, to even out stages (default auto: measure on GPUs)",
    )
    put("--backend", choices=("gloo", "nccl"), help="default: nccl with GPUs, else gloo")
    put("--seed", type=int, default=0, metavar="N", help="of weights, data and dropout")
    put(
        "--out",
        type=Path,
        default=Path("runs/train"),
        metavar="DIR",
        help="where plan, timeline and picture go",
    )
    put("--verbose", action="store_true", help="tell more")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    from gems.torch.launch import place

    plan = plan_from(given)
    micro_batch(given)
    if plan.world > 1 and place() is None:
        return start([sys.executable, "-m", "gems", *sys.argv[1:]], plan.world)
    _train(given, plan)
    return 0


def _train(given: argparse.Namespace, plan: Plan) -> None:
    import torch

    from gems.data.loader import Loader
    from gems.torch.trainer import Trainer

    torch.manual_seed(given.seed)
    size = micro_batch(given)
    trainer = Trainer(
        model_from(given),
        torch.nn.functional.cross_entropy,
        lambda parameters: _optimizer(given, parameters),
        sample=torch.empty(size, *image_shape(given)),
        plan=plan,
        costs=given.costs,
        precision=given.precision,
        clip=given.clip,
        seed=given.seed,
        backend=given.backend,
    )
    loader = Loader(_data(given), size * plan.total, seed=given.seed, last="drop")
    with _progress(trainer.rank == 0, given.steps) as show:
        for images, labels in islice(chain.from_iterable(map(loader.epoch, count())), given.steps):
            show(trainer.step(images, labels))
    _finish(given, trainer, _data(given, seed=1))
    trainer.close()


def _optimizer(given: argparse.Namespace, parameters: Any) -> Any:
    import torch

    if given.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, given.learning_rate, momentum=0.9, weight_decay=given.weight_decay
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[given.optimizer]
    return kind(parameters, given.learning_rate, weight_decay=given.weight_decay)


def _data(given: argparse.Namespace, seed: int = 0) -> Any:
    if given.app == "pictures":
        from gems.data.pictures import Pictures

        return Pictures(given.image_size, given.num_classes, SAMPLES, seed)
    from gems.data.synthetic import Synthetic

    return Synthetic(given.image_size, given.num_classes, samples=SAMPLES, seed=seed)


@contextlib.contextmanager
def _progress(shown: bool, steps: int) -> Iterator[Any]:
    """A bar on standard error, and at the end the first and last loss on standard output."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    seen: list[Step] = []
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:.1f} images/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"), speed=0.0)

        def show(step: Step) -> None:
            seen.append(step)
            recent = seen[-5:]
            speed = sum(s.samples for s in recent) / sum(s.seconds for s in recent)
            progress.update(task, advance=1, loss=step.loss, speed=speed)

        yield show
    if shown and seen:
        steady = seen[1:] or seen
        speed = sum(s.samples for s in steady) / sum(s.seconds for s in steady)
        print(
            f"{len(seen)} steps: loss {seen[0].loss:.4f} -> {seen[-1].loss:.4f}, "
            f"{speed:.1f} images/s"
        )


def _finish(given: argparse.Namespace, trainer: Trainer, data: Any) -> None:
    """Accuracy on samples that training did not draw, and the last step, drawn as measured."""
    import torch

    from gems.data.loader import Loader
    from gems.simulation import virtual

    timeline = trainer.timeline()
    images, labels = next(Loader(data, OTHERS, seed=given.seed).epoch())
    scores = trainer.predict(images)
    if trainer.rank != 0:
        return
    right = (scores.argmax(1) == torch.from_numpy(labels)).double().mean().item()
    alone = virtual(timeline, trainer.schedule, trainer.plan)
    print(f"accuracy on {len(labels)} other samples: {100 * right:.0f}%")
    print(f"as if every rank had a core of its own: {heading(alone)}")
    print(report(timeline))
    write(given.out / "plan.json", to_json(trainer.plan))
    write(given.out / "schedule.txt", str(trainer.schedule))
    write(given.out / "timeline.json", to_json(timeline))
    title = f"{given.model}, {trainer.plan.schedule}"
    for name, drawn in (("schedule", timeline), ("virtual", alone)):
        print(f"wrote {write(given.out / f'{name}.svg', svg(drawn, title, trainer.plan))}")
    print(f"wrote {write(given.out / 'step.html', html(timeline, title, trainer.plan))}")
