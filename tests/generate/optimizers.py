"""Optimizers, parameter groups and learning-rate schedulers of generated cases.

Where an optimizer divides by the size of a gradient, its `eps` is large: a gradient that is nought
but for rounding (of a bias before a norm) would otherwise be a step of full size, of any sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as lr

Make = Callable[[Any], torch.optim.Optimizer]
o = torch.optim
EPS = 1e-2

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: o.SGD(p, 0.05),
    "momentum": lambda p: o.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: o.SGD(p, 0.05, momentum=0.8, nesterov=True),
    "dampened": lambda p: o.SGD(p, 0.05, momentum=0.8, dampening=0.5, maximize=True),
    "sgd foreach": lambda p: o.SGD(p, 0.05, momentum=0.9, foreach=True),
    "sgd fused": lambda p: o.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2, fused=True),
    "adam": lambda p: o.Adam(p, 0.02, eps=EPS),
    "adam foreach": lambda p: o.Adam(p, 0.02, eps=EPS, foreach=True, weight_decay=0.1),
    "adam fused": lambda p: o.Adam(p, 0.02, eps=EPS, fused=True),
    "amsgrad": lambda p: o.Adam(p, 0.02, eps=EPS, amsgrad=True),
    "adamw": lambda p: o.AdamW(p, 0.02, eps=EPS, weight_decay=0.1),
    "adamw fused": lambda p: o.AdamW(p, 0.02, eps=EPS, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: o.RMSprop(p, 0.01, eps=EPS, momentum=0.5, centered=True),
    "adagrad": lambda p: o.Adagrad(p, 0.05, eps=EPS, lr_decay=0.1),
    "adagrad fused": lambda p: o.Adagrad(p, 0.05, eps=EPS, fused=True),
    "nadam": lambda p: o.NAdam(p, 0.02, eps=EPS),
    "radam": lambda p: o.RAdam(p, 0.02, eps=EPS),
    "adamax": lambda p: o.Adamax(p, 0.02, eps=EPS),
    "adadelta": lambda p: o.Adadelta(p, 0.5, eps=EPS),
    "groups": lambda p: o.AdamW(_groups(p), 0.02, eps=EPS, weight_decay=0.1),
    "groups sgd": lambda p: o.SGD(_groups(p), 0.05, momentum=0.9),
    "tensor lr": lambda p: o.Adam(p, torch.tensor(0.02), eps=EPS),
}
SPARSE = ("sgd", "adagrad")  # those that take the gradients of sparse embeddings

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "steps": lambda opt: lr.StepLR(opt, 1, 0.5),
    "lambda": lambda opt: lr.LambdaLR(opt, lambda t: 1 / (1 + t)),
    "cosine": lambda opt: lr.CosineAnnealingLR(opt, 4),
    "warm": lambda opt: lr.SequentialLR(
        opt, [lr.LinearLR(opt, 0.1, 1.0, 2), lr.ExponentialLR(opt, 0.5)], [1]
    ),
    "plateau": lambda opt: lr.ReduceLROnPlateau(opt, factor=0.1, patience=0, threshold=0.5),
    "cycle": lambda opt: lr.OneCycleLR(opt, 0.1, total_steps=6, cycle_momentum=False),
}


def _groups(parameters: Any) -> list[dict[str, Any]]:
    """Weights and the rest, as people do it."""
    parameters = list(parameters)
    wide = [p for p in parameters if p.dim() > 1]
    narrow = [p for p in parameters if p.dim() <= 1]
    return [{"params": wide, "lr": 0.01}, {"params": narrow, "weight_decay": 0.0}]
