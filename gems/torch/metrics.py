"""How good outputs are: counts and scores that add up over batches and ranks, and what they say.

    scores = Scores("classification", classes=2)
    scores.add(trainer.predict(images), labels)
    scores.summary()                              # {"accuracy": 0.93, "auc": 0.97}

Nothing is an average of averages: the sum of two `Scores` is that of all their samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

NAN = float("nan")


# --- from counts: a confusion matrix has a row for each true class, a column for each guess -------


def confusion(guess: Tensor, target: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """How often each true class (row) was taken for each class (column), as integers.

    `guess` and `target` have one shape, any; cells whose target is `ignore` do not count.
    """
    if guess.shape != target.shape:
        raise ValueError(
            f"guesses have shape {tuple(guess.shape)}, but targets {tuple(target.shape)}"
        )
    guess, target = guess.flatten().long(), target.flatten().long()
    if ignore is not None:
        kept = target != ignore
        guess, target = guess[kept], target[kept]
    for what, values in (("guess", guess), ("target", target)):
        outside = (values < 0) | (values >= classes)
        if outside.any():
            first = values[outside].unique().tolist()[:5]
            raise ValueError(
                f"a {what} is a class from 0 to {classes - 1}, but some are "
                f"{', '.join(map(str, first))}; give ignore_index if they stand for no class"
            )
    counts = torch.bincount(target * classes + guess, minlength=classes**2)
    return counts.view(classes, classes).cpu()


def accuracy(counts: Tensor) -> float:
    """The share of cells that were guessed right; nan if there were none."""
    total = int(counts.sum())
    return int(counts.diagonal().sum()) / total if total else NAN


def dice(counts: Tensor) -> list[float]:
    """Of each class: twice what is in both, over guessed plus true. Nan if it is in neither."""
    return _overlap(counts, lambda both, guessed, true: (2 * both, guessed + true))


def iou(counts: Tensor) -> list[float]:
    """Of each class: what is in both, over what is in either. Nan if it is in neither."""
    return _overlap(counts, lambda both, guessed, true: (both, guessed + true - both))


def _overlap(counts: Tensor, ratio: Callable[[int, int, int], tuple[int, int]]) -> list[float]:
    both, guessed, true = counts.diagonal(), counts.sum(0), counts.sum(1)
    pairs = [ratio(*map(int, n)) for n in zip(both, guessed, true, strict=True)]
    return [over / under if under else NAN for over, under in pairs]


def mean(values: list[float]) -> float:
    """Of those that are numbers; nan if none is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else NAN


# --- from scores ----------------------------------------------------------------------------------


def auc(scores: Tensor, positive: Tensor) -> float:
    """The chance that a positive sample scores above a negative one, ties counting half.

    Exact, by ranks (Mann and Whitney): n log n, not n². Nan unless there are samples of both.
    """
    scores, positive = scores.flatten(), positive.flatten().bool()
    yes = int(positive.sum())
    no = positive.numel() - yes
    if not yes or not no:
        return NAN
    _, place, ties = scores.unique(return_inverse=True, return_counts=True)
    # Samples of one score share the mean of their ranks. Twice that is an integer: exact.
    twice_rank = 2 * ties.cumsum(0) - ties + 1
    twice_wins = int(twice_rank[place][positive].sum()) - yes * (yes + 1)
    return twice_wins / (2 * yes * no)


def macro_auc(scores: Tensor, target: Tensor) -> float:
    """The mean over classes of each against the rest; `scores` has a column for each class.

    Classes that no sample has, or all have, do not count.
    """
    return mean([auc(scores[:, c], target == c) for c in range(scores.shape[1])])


def margins(logits: Tensor) -> Tensor:
    """The log odds of each class (dim 1), which rank as its probability does.

    Probabilities themselves round to 1 where the network is sure, and would tie.
    """
    logits = logits.double()
    total = logits.logsumexp(1, keepdim=True)
    others = total + torch.log1p(-(logits - total).exp())
    # Of the surest class that would cancel: sum up the others themselves.
    surest = logits.argmax(1, keepdim=True)
    rest = logits.scatter(1, surest, -torch.inf).logsumexp(1, keepdim=True)
    return logits - others.scatter(1, surest, rest)


# --- kept over batches ----------------------------------------------------------------------------


class Scores:
    """What is known so far of a network's outputs on samples with targets.

    "classification" takes logits (samples, classes) and a class for each sample, and keeps every
    sample's scores, for the AUC. "segmentation" takes logits (samples, classes, height, width),
    or of volumes, and a class for each pixel, and keeps counts only. With two classes there may be
    one logit instead, of class 1. Targets that are `ignore_index` do not count.
    """

    def __init__(self, task: str, classes: int, ignore_index: int | None = None) -> None:
        problems = [
            *([f"task is {task!r}, not one of {', '.join(TASKS)}"] if task not in TASKS else []),
            *([f"classes is {classes}, not 2 or more"] if classes < 2 else []),
        ]
        if problems:
            raise ValueError(f"these scores cannot be kept: {'; '.join(problems)}")
        self.task, self.classes, self.ignore_index = task, classes, ignore_index
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)
        self.scores: list[Tensor] = []  # log odds, samples x classes, of classification only
        self.targets: list[Tensor] = []

    def add(self, output: Tensor, target: Tensor) -> None:
        """Samples more. They stay where they are; what is kept is on the CPU."""
        output, target = output.detach(), target.detach()
        logits = self._logits(output, target)
        if not torch.isfinite(logits).all():
            raise ValueError("an output is not a finite number; its class is anybody's guess")
        self.counts += confusion(logits.argmax(1), target, self.classes, self.ignore_index)
        if self.task == "classification":
            kept = target != self.ignore_index if self.ignore_index is not None else ...
            self.scores.append(margins(logits[kept]).cpu())
            self.targets.append(target[kept].cpu())

    def _logits(self, output: Tensor, target: Tensor) -> Tensor:
        """Classes in dim 1, as many as there are."""
        single = (target.shape, (len(target), 1, *target.shape[1:]))
        if self.classes == 2 and output.shape in single:
            one = output.reshape(target.shape)
            return torch.stack([torch.zeros_like(one), one], 1)
        expected = (len(target), self.classes, *target.shape[1:])
        flat = self.task == "classification" and target.dim() != 1
        if tuple(output.shape) != expected or flat:
            raise ValueError(
                f"{self.task} into {self.classes} classes: outputs have shape "
                f"{tuple(output.shape)} and targets {tuple(target.shape)}; {TASKS[self.task]}"
            )
        return output

    def __add__(self, other: Scores) -> Scores:
        """Of the samples of both, such as of two ranks."""
        mine, theirs = ((s.task, s.classes, s.ignore_index) for s in (self, other))
        if mine != theirs:
            raise ValueError(f"scores of {mine} and of {theirs} (task, classes, ignored) differ")
        found = Scores(self.task, self.classes, self.ignore_index)
        found.counts = self.counts + other.counts
        found.scores = self.scores + other.scores
        found.targets = self.targets + other.targets
        return found

    def summary(self) -> dict[str, float]:
        """All metrics of the task by name; nan where there is nothing to say."""
        if self.task == "classification":
            return {"accuracy": accuracy(self.counts), "auc": self._auc()}
        overlaps = {"dice": dice(self.counts), "iou": iou(self.counts)}
        found = {"accuracy": accuracy(self.counts)}
        found |= {name: mean(values) for name, values in overlaps.items()}
        return found | {
            f"{name}_{c}": value
            for name, values in overlaps.items()
            for c, value in enumerate(values)
        }

    def _auc(self) -> float:
        if not self.scores:
            return NAN
        scores, targets = torch.cat(self.scores), torch.cat(self.targets)
        if self.classes == 2:
            return auc(scores[:, 1], targets == 1)
        return macro_auc(scores, targets)


class Errors:
    """What is known so far of numbers that a network gives, (samples, numbers), beside the true
    ones: sums, in float64."""

    def __init__(self, numbers: int) -> None:
        if numbers < 1:
            raise ValueError(f"numbers is {numbers}, not 1 or more")
        self.numbers, self.samples = numbers, 0
        # Of each number: |error|, error², the true one, its square.
        self.sums = torch.zeros(4, numbers, dtype=torch.float64)

    def add(self, output: Tensor, target: Tensor) -> None:
        """Samples more."""
        output, target = (x.detach().cpu().double() for x in (output, target))
        if tuple(target.shape) != (len(target), self.numbers) or output.shape != target.shape:
            raise ValueError(
                f"regression of {self.numbers} numbers: outputs have shape {tuple(output.shape)} "
                f"and targets {tuple(target.shape)}; give (samples, {self.numbers}) of both"
            )
        if not torch.isfinite(output).all():
            raise ValueError("an output is not a finite number, so its error is none")
        error = output - target
        parts = (error.abs(), error.square(), target, target.square())
        self.sums += torch.stack([part.sum(0) for part in parts])
        self.samples += len(target)

    def __add__(self, other: Errors) -> Errors:
        """Of the samples of both, such as of two ranks."""
        if self.numbers != other.numbers:
            raise ValueError(f"errors of {self.numbers} and of {other.numbers} numbers differ")
        found = Errors(self.numbers)
        found.sums, found.samples = self.sums + other.sums, self.samples + other.samples
        return found

    def summary(self) -> dict[str, float]:
        """Mean errors over all numbers and of each, and the share of the variance that is
        explained (r2); nan where there is nothing to say."""
        n = self.samples
        absolute, square, total, squares = (self.sums / n if n else self.sums * NAN).unbind()
        variance = squares - total.square()
        share = [1 - float(e / v) if v > 0 else NAN for e, v in zip(square, variance, strict=True)]
        found = {"mse": float(square.mean()), "mae": float(absolute.mean()), "r2": mean(share)}
        for name, values in (("mae", absolute.tolist()), ("r2", share)):
            found |= {f"{name}_{i}": value for i, value in enumerate(values)}
        return found


# Task to the shapes it asks for.
TASKS = {
    "classification": "give (samples, classes) and (samples,)",
    "segmentation": "give (samples, classes, height, width) and (samples, height, width)",
}
