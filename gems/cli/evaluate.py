"""Predictions of a network over samples, and their metrics."""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from gems.cli.data import loader
from gems.cli.progress import Pace, bar
from gems.cli.reject import as_gems_error
from gems.torch.metrics import Errors, Scores

if TYPE_CHECKING:
    from gems.data.source import Source
    from gems.torch.trainer import Trainer

TASKS = {"classify": "classification", "segment": "segmentation"}
# Of the best checkpoint: the larger the better, or the smaller (-1).
HEADLINE_METRIC = {"classify": ("accuracy", 1), "segment": ("dice", 1), "regress": ("mse", -1)}
UNLABELLED = -1


def _scores(given: argparse.Namespace, source: Source) -> Scores | Errors:
    if source.task == "regress":
        return Errors(source.classes)
    return Scores(TASKS[source.task], given.num_classes, given.ignore_index)


def predicted(
    given: argparse.Namespace,
    trainer: Trainer,
    source: Source,
    size: int,
    shown: bool,
    pace: Pace | None = None,
) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics of all samples of a source, in batches of `size`; the same on every rank.

    And the probabilities of each sample's classes, (samples, classes); of pixels, their mean; of
    a regression, the numbers themselves. `pace` gets the time of each batch.
    """
    regress = source.task == "regress"
    scores = _scores(given, source)
    pace, labelled = pace or Pace(), 0
    likely: list[torch.Tensor] = []
    with loader(given, source, size) as batches, bar("evaluating", batches.steps, shown) as show:
        for images, targets in batches.epoch(0):
            start = perf_counter()
            output = trainer.predict(images)
            pace.add(len(images), perf_counter() - start)
            known = torch.as_tensor(targets[:])
            likely.append(output.float() if regress else probabilities(output))
            if source.task == "classify":
                output, known = output[known != UNLABELLED], known[known != UNLABELLED]
            labelled += len(known)
            if len(known):
                with as_gems_error():
                    scores.add(output, known)
            show(f"{pace.now:.1f} images/s")
    found = scores.summary() if labelled else {}
    return found, torch.cat(likely)


Evaluated = tuple[dict[str, float], torch.Tensor]


def compared(task: str, found: Evaluated, exact: Evaluated) -> dict[str, float]:
    """How far two evaluations of the same samples differ: metrics of the exact one, the share of
    samples whose class is the same, and the largest difference of a probability, or number."""
    (_, mine), (metrics, full) = found, exact
    numbers = {f"fp32_{name}": value for name, value in metrics.items()}
    if task != "regress":
        numbers["same_class_as_fp32"] = (mine.argmax(1) == full.argmax(1)).double().mean().item()
    return numbers | {"largest_difference_to_fp32": (mine - full).abs().max().item()}


def probabilities(output: torch.Tensor) -> torch.Tensor:
    """Of each sample's classes, by scores (samples, classes, ...)."""
    likely = output.float().softmax(1)
    return likely.flatten(2).mean(2) if likely.dim() > 2 else likely
