"""Losses of the command line, over a micro-batch: of classes, of every pixel's class, or of
numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import cross_entropy, huber_loss, l1_loss, mse_loss, one_hot

Tensor = torch.Tensor
OF_NUMBERS = {"mse": mse_loss, "mae": l1_loss, "huber": huber_loss}
LOSSES = ("cross-entropy", "dice", *OF_NUMBERS)
DEFAULT = {"classify": "cross-entropy", "segment": "cross-entropy", "regress": "mse"}  # by task


def loss(
    name: str, weights: Sequence[float] | None = None, ignore: int = -100
) -> Callable[[Tensor, Tensor], Tensor]:
    """`loss(output, target)`; outputs are scores (N, classes, ...), targets class numbers (N, ...).

    `weights` are those of the classes, `ignore` a class number that does not count. `dice` is
    cross entropy plus one minus the mean Dice coefficient of the classes, over all pixels of a
    micro-batch. To regress, outputs and targets are numbers (N, numbers): `mse`, `mae`, and `huber`
    with the square up to 1.
    """
    if name not in LOSSES:
        raise ValueError(f"loss {name!r} is unknown; choose one of {', '.join(LOSSES)}")

    if name in OF_NUMBERS and weights is not None:
        raise ValueError(f"class weights {weights}: {name} compares numbers; leave them out")
    if name in OF_NUMBERS:
        return lambda output, target: OF_NUMBERS[name](output, target.to(output.dtype))

    def by_entropy(output: Tensor, target: Tensor) -> Tensor:
        weight = None if weights is None else output.new_tensor(weights)
        return cross_entropy(output, target, weight, ignore_index=ignore)

    def by_dice(output: Tensor, target: Tensor) -> Tensor:
        return by_entropy(output, target) + 1 - soft_dice(output, target, ignore)

    return by_dice if name == "dice" else by_entropy


def loss_of(name: str | None, task: str) -> str:
    """The loss that was asked for, or the usual one of a task."""
    wanted = DEFAULT[task] if name is None else name
    fits = (wanted in OF_NUMBERS) == (task == "regress")
    if wanted not in LOSSES or not fits:
        known = [each for each in LOSSES if (each in OF_NUMBERS) == (task == "regress")]
        raise ValueError(f"loss {wanted!r} does not fit the task {task}; choose {', '.join(known)}")
    return wanted


def soft_dice(output: Tensor, target: Tensor, ignore: int = -100) -> Tensor:
    """The Dice coefficient of probabilities, averaged over classes."""
    counted = target != ignore
    share = output.softmax(1) * counted.unsqueeze(1)
    wanted = one_hot(target * counted, output.shape[1]).movedim(-1, 1) * counted.unsqueeze(1)
    rest = [d for d in range(output.dim()) if d != 1]
    both = (share * wanted).sum(rest)
    return ((2 * both + 1) / (share.sum(rest) + wanted.sum(rest) + 1)).mean()
