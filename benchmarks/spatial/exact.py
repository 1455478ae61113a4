"""How far a step is from the plain model's, in float64 on small images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.spatial.networks import WORK, Work

PIXELS = 64  # the same layers, fewer cells


def small(work: str) -> Work:
    whole = WORK[work]
    return replace(whole, shape=(*whole.shape[:2], PIXELS, PIXELS))


def model(work: str) -> nn.Module:
    return small(work).model().double().train()


def batch(work: str) -> tuple[Tensor, Tensor]:
    images, targets = small(work).batch()
    return images.double(), targets.double() if targets.is_floating_point() else targets


@cache
def reference(work: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, by parameter name."""
    plain = model(work)
    images, targets = batch(work)
    loss = WORK[work].loss(plain(images), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def error(work: str, loss: float, gradients: Mapping[str, Tensor]) -> float:
    """The largest difference, of the loss or of a gradient relative to the largest entry of its
    tensor. An absent gradient is infinitely far."""
    want, plain = reference(work)
    if gradients.keys() != plain.keys():
        return torch.inf
    # A bias in front of BatchNorm has gradient zero, plus rounding: not a measure of anything.
    least = 1e-3 * max(g.abs().max().item() for g in plain.values())
    off = [
        (gradients[name] - g).abs().max().item() / max(g.abs().max().item(), least)
        for name, g in plain.items()
    ]
    return worst([abs(loss - want) / abs(want), *off])


def worst(errors: Iterable[float]) -> float:
    """The largest, or nan if one is: Python's `max` may pass over it."""
    return torch.tensor(list(errors), dtype=torch.float64).max().item()
