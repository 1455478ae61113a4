"""One rank of a training run: data, steps, checkpoints and metrics, from wherever it starts."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from gems.cli.data import divided, loader, source_from
from gems.cli.heat_maps import heat_maps, wanted
from gems.cli.journal import Journal, require_board
from gems.cli.model_options import fitted, micro_batch
from gems.cli.progress import Pace, bar
from gems.cli.reject import as_gems_error
from gems.cli.results import finish
from gems.distributed.interrupt import Interrupt
from gems.distributed.learning_rate import Factor, cosine, step_decay, warmed_up
from gems.distributed.step import Step
from gems.draw.units import size
from gems.errors import GemsError
from gems.files import to_json, write
from gems.plans.plan import Plan
from gems.predict.timeline import Timeline

log = logging.getLogger(__name__)


class TrainingLoop(ABC):
    """A run of `gems train` as one rank sees it, whatever the framework.

    `epoch` and `within`, the number of its batches done, are the position in the data. Every
    checkpoint has them, so that a resumed run continues with the next batch.
    """

    files: Any  # the module that knows the framework's checkpoints

    def __init__(self, given: argparse.Namespace, plan: Plan | str, options: str) -> None:
        self.given, self.options = given, options
        self.epoch = self.within = 0
        self.best = -math.inf
        self.noted = 0  # rows of the journal when the checkpoint was written
        self.judged = 0  # after which step metrics were taken last
        self.timeline: Timeline | None = None  # of the last step
        self.checkpoints = given.out / "checkpoints"
        self.start = self._where_to_start()
        self.train, self.rest = divided(given)
        fitted(given, self.train)
        self.size = micro_batch(given) * (2 * given.auto if isinstance(plan, str) else plan.total)
        if given.tensorboard:
            require_board()
        if not self.train.classes:
            raise GemsError(
                f"{given.datapath} has no labels, so there is nothing to train on; give --labels"
            )
        from gems.data.augment import Augment

        augment = Augment() if given.augment else None
        self.batches = loader(given, self.train, self.size, shuffle=True, augment=augment)
        self.interrupt = Interrupt()
        self.trainer: Any = self._trainer(plan)
        self.first = self.trainer.rank == 0
        self.pace = Pace()
        self.late = self.trainer.plan.asynchronous  # losses come one step later

    # --- setting up -----------------------------------------------------------------------------

    def _where_to_start(self) -> Path | None:
        """The checkpoint to begin with, if any."""
        given, newest = self.given, self.files.latest(self.checkpoints)
        if given.resume and newest is not None:
            return newest
        if newest is not None and not given.overwrite:
            raise GemsError(
                f"{self.checkpoints} has checkpoints of an earlier run ({newest.name}); continue "
                "with --resume, choose another --out, or start over with --overwrite"
            )
        return given.checkpoint

    @property
    def steps(self) -> int:
        """Calls of `trainer.step` of the whole run."""
        most = self.given.num_epochs * self.batches.steps
        wanted = self.given.steps * self.given.accumulate
        return min(most, wanted) if wanted else most

    def _factor(self) -> Factor:
        """Of the learning rate, by the updates so far."""
        given, updates = self.given, self.steps // self.given.accumulate
        if given.learning_rate_schedule == "cosine":
            if updates <= given.warm_up:
                raise GemsError(
                    f"a run of {updates} updates is no longer than --warm-up {given.warm_up}; "
                    "train longer, or warm up for fewer updates"
                )
            factor = cosine(updates - given.warm_up)
        else:
            every = given.decay_epochs * self.batches.steps // given.accumulate
            with as_gems_error():
                factor = step_decay(given.learning_rate_decay, max(1, every))
        return warmed_up(factor, given.warm_up)

    # --- what a framework has -------------------------------------------------------------------

    @abstractmethod
    def _trainer(self, plan: Plan | str) -> Any:
        """With the calls of gems.Trainer that this loop makes."""

    @abstractmethod
    def _begin(self) -> None:
        """Load `self.start`, if there is one; `_take_position` gets what it has of the data."""

    @abstractmethod
    def _apply_options(self) -> None:
        """Options of the command line override those of the checkpoint's optimizer."""

    @property
    @abstractmethod
    def _rate(self) -> float:
        """The learning rate of the next update."""

    # --- the run --------------------------------------------------------------------------------

    def run(self) -> int:
        """Train to the end, or until interrupted; returns the exit code."""
        self._begin()
        if self.first and self.given.overwrite:  # or the old ones would be taken for the newest
            self.files.remove_all(self.checkpoints)
        self.journal = Journal(
            self.given.out,
            writes=self.first,
            tensorboard=self.given.tensorboard,
            keep=self.noted if self.start and self.start.parent == self.checkpoints else 0,
            after=self.trainer.steps,
        )
        if self.first:
            write(self.given.out / "config.yaml", self.options)
            write(self.given.out / "plan.json", to_json(self.trainer.plan))
        drawn = self.first and not self.given.verbose
        with self.interrupt, bar("training", self.steps, drawn, self.trainer.steps) as show:
            if self._train(show):
                self._stop()  # in here: the signal may reach this rank last, while all are saving
                return self.interrupt.code
        self._end()
        return 0

    def _take_position(self, extra: Any) -> None:
        if not _is_position(extra):
            raise GemsError(
                f"the checkpoint {self.start} was not written by gems train, so its "
                "position in the data is unknown; begin with weights alone (see --export)"
            )
        mine = {"seed": self.given.seed, "samples to train on": len(self.train)}
        if wrong := [f"{k}: {extra[k]}, now {v}" for k, v in mine.items() if extra[k] != v]:
            raise GemsError(
                f"the checkpoint {self.start} is of a run with other data ({'; '.join(wrong)}), "
                "and samples held out then would be trained on now; give the same options, or "
                "begin with weights alone (see --export)"
            )
        self._apply_options()
        self.epoch, self.best = extra["epoch"], extra["best"]
        self.noted, self.judged = extra["noted"], extra["judged"]
        self.within, rest = divmod(extra["samples"], self.size)
        if extra["samples"] == len(self.train):  # the last batch of an epoch may be smaller
            self.within = self.batches.steps
        elif rest:
            raise GemsError(
                f"the checkpoint was written after {extra['samples']} samples of epoch "
                f"{self.epoch}, which is no whole number of steps of {self.size} samples; choose "
                "--batch-size so that a step takes as many samples as before"
            )

    def _train(self, show: Any) -> bool:
        """Whether it was interrupted."""
        every = self.given.save_every * self.given.accumulate
        while self._unfinished():
            for images, targets in self.batches.epoch(self.epoch, start=self.within):
                rate = self._rate
                step = self.trainer.step(images, targets)
                self.within += 1
                self._note(step, rate, show, self.trainer.steps - self.late)
                stop = step.interrupted
                if stop or (every and self.trainer.steps % every == 0):
                    stop = self._drained(show) or stop
                if stop:
                    return True
                if every and self.trainer.steps % every == 0:
                    self._save()
                if self._enough():
                    break
            if self._drained(show):
                return True
            self._turn()
            if (over := not self._unfinished()) and self.pace.steps:
                self.timeline = self.trainer.timeline()
            self._evaluate()
            if not every or over:
                self._save()
        if self.judged != self.trainer.steps:  # the last checkpoint is older than its metrics
            self._turn()
            self._evaluate()
            self._save()
        return False

    def _drained(self, show: Any) -> bool:
        """With 2BW, finish the batch in flight. Whether the run was interrupted."""
        rate, step = self._rate, self.trainer.flush()
        if step is not None:
            self._note(step, rate, show, self.trainer.steps)
        return step is not None and step.interrupted

    def _turn(self) -> None:
        """To the next epoch, if this one is over."""
        if self.within == self.batches.steps:
            self.epoch, self.within = self.epoch + 1, 0

    def _enough(self) -> bool:
        """Whether --steps have been done."""
        wanted = self.given.steps * self.given.accumulate
        return 0 < wanted <= self.trainer.steps

    def _unfinished(self) -> bool:
        return self.epoch < self.given.num_epochs and not self._enough()

    def _note(self, step: Step, rate: float, show: Any, number: int) -> None:
        """Of the step with this number, which with 2BW is the one before."""
        self.pace.add(step.samples, step.seconds)
        if math.isnan(step.loss):  # there was none before
            return
        text = f"loss {step.loss:.4f}  {self.pace.now:.1f} images/s  {size(self.trainer.peak)}"
        show(text)
        log.info("step %d of %d, epoch %d  %s", number, self.steps, self.epoch, text)
        numbers = {"loss": step.loss, "learning_rate": rate, "images_per_second": self.pace.now}
        if step.norm is not None:
            numbers["gradient_norm"] = step.norm
        self.journal.note("train", number, epoch=self.epoch, **numbers)

    def _evaluate(self) -> None:
        """Metrics of the held-out samples; the best checkpoint so far is kept."""
        self.judged = self.trainer.steps
        if not self.given.enable_evaluation:
            return
        from gems.cli.evaluate import HEADLINE_METRIC, predicted

        found, _ = predicted(self.given, self.trainer, self.rest, self.size, self.first)
        self.journal.note("eval", self.trainer.steps, epoch=self.epoch, **found)
        scores = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        log.info("evaluated after step %d: %s", self.trainer.steps, scores)  # on rank 0 alone
        name, sign = HEADLINE_METRIC[self.rest.task]
        if (score := sign * found[name]) > self.best:
            self.best = score
            if self.given.save:
                self._save("best", keep=1)

    def _save(self, stem: str = "step", keep: int = 0) -> None:
        if self.given.save:
            self.trainer.save(
                self.checkpoints / f"{stem}-{self.trainer.steps:06d}",
                extra=self._position(),
                keep=keep or self.given.keep_checkpoints,
            )

    def _position(self) -> dict[str, Any]:
        """Where this run is, besides the trainer's own state."""
        return {
            "epoch": self.epoch,
            "samples": self._seen(),
            "best": self.best,
            "noted": len(self.journal.rows),
            "judged": self.judged,
            "seed": self.given.seed,
            "samples to train on": len(self.train),
        }

    def _seen(self) -> int:
        """Samples of this epoch that were trained on."""
        return min(self.within * self.size, len(self.train))

    def _stop(self) -> None:
        self._save()
        self.journal.close()
        if self.first:
            how = "continue with --resume" if self.given.save else "nothing was saved (--no-save)"
            print(f"stopped after step {self.trainer.steps}; {how}", file=sys.stderr)
        self.batches.close()
        self.trainer.close()

    def _end(self) -> None:
        if self.given.export:
            self.trainer.export(self.given.export)
        finish(self, _maps(self))
        self.journal.close()
        self.batches.close()
        self.trainer.close()


def _maps(job: TrainingLoop) -> list[Path]:
    """Heat maps of the slides, with all their tiles."""
    if not wanted(job.given):
        return []
    from gems.cli.evaluate import predicted

    source = source_from(job.given)
    _, likely = predicted(job.given, job.trainer, source, job.size, job.first)
    return heat_maps(job.given, source, likely) if job.first else []


def _is_position(extra: Any) -> bool:
    """Whether it is what `_position` gives."""
    if not isinstance(extra, dict) or type(extra.get("best")) not in (int, float):
        return False
    counts = ("epoch", "samples", "noted", "judged", "seed", "samples to train on")
    return all(type(extra.get(name)) is int and extra[name] >= 0 for name in counts)
