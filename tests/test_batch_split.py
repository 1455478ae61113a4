"""Targets of any form are split by sample, as the inputs are; what cannot be split is an error."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gems.errors import ShapeError
from gems.geometry.box import Box
from gems.plans.plan import Plan
from gems.torch.runtime.microbatch import split
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import same_state, sgd

Tensor = torch.Tensor
Pair = namedtuple("Pair", "label weight")
X = torch.arange(24.0).view(6, 4)
Y = torch.arange(6)
EACH = [{"boxes": torch.ones(n + 1, 4) * n, "labels": torch.arange(n + 1)} for n in range(6)]


def parts(targets: Any, batch_dim: Any = None, count: int = 3) -> list[Any]:
    return split(X, targets, count, batch_dim).targets


FORMS: dict[str, tuple[Any, Any, Any]] = {
    "a tensor": (Y, None, lambda a, b: Y[a:b]),
    "an array": (Y.numpy(), None, lambda a, b: Y[a:b]),
    "a dict of tensors": ({"y": Y, "z": X}, None, lambda a, b: {"y": Y[a:b], "z": X[a:b]}),
    "a tuple of tensors": ((Y, X), None, lambda a, b: (Y[a:b], X[a:b])),
    "a list of tensors": ([Y, X], None, lambda a, b: [Y[a:b], X[a:b]]),
    "one dict per sample": (EACH, None, lambda a, b: EACH[a:b]),
    "one dict per sample, as a tuple": (tuple(EACH), None, lambda a, b: tuple(EACH[a:b])),
    "one string per sample": (list("abcdef"), None, lambda a, b: list("abcdef")[a:b]),
    "one number per sample": (list(range(6)), None, lambda a, b: list(range(6))[a:b]),
    "a list in a dict": (
        {"each": EACH, "y": Y, "scale": 2.0, "name": None, "t": torch.tensor(3.0)},
        None,
        lambda a, b: {
            "each": EACH[a:b], "y": Y[a:b], "scale": 2.0, "name": None, "t": torch.tensor(3.0),
        },
    ),
    "a named tuple": (Pair(Y, X), None, lambda a, b: Pair(Y[a:b], X[a:b])),
    "an ordered dict": (OrderedDict(y=Y), None, lambda a, b: OrderedDict(y=Y[a:b])),
    "another dim": (X.T, 1, lambda a, b: X.T[:, a:b]),
    "another dim from the end": (X.T, -1, lambda a, b: X.T[:, a:b]),
    "whole": (torch.ones(7), "whole", lambda a, b: torch.ones(7)),
    "each its own": (
        {"y": Y, "weights": torch.ones(5), "t": X.T, "each": [Y] * 6},
        {"y": 0, "weights": "whole", "t": 1, "each": "list"},
        lambda a, b: {
            "y": Y[a:b], "weights": torch.ones(5), "t": X.T[:, a:b], "each": [Y] * (b - a),
        },
    ),
    "six tensors of six": ([Y] * 6, 0, lambda a, b: [Y[a:b]] * 6),
    "six entries of six": ([Y] * 6, "list", lambda a, b: [Y] * (b - a)),
    "nothing": (None, None, lambda a, b: None),
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or hasattr(a, "read"):
        a = a if isinstance(a, Tensor) else torch.as_tensor(a.source[a.start : a.start + len(b)])
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_targets_are_split_as_the_inputs_are(form: str, count: int) -> None:
    targets, batch_dim, expected = FORMS[form]
    found = split(X, targets, count, batch_dim)
    start = 0
    for mine, size in zip(found.targets, found.sizes, strict=True):
        assert same(mine, expected(start, start + size)), (mine, expected(start, start + size))
        start += size
    assert start == 6


REJECTED: dict[str, tuple[Any, Any, str]] = {
    "too short": (torch.ones(5), None, r"targets is float32\[5\].*into 6 samples.*collate"),
    "in a dict": ({"w": torch.ones(5)}, None, r"targets\['w'\] is float32\[5\].*batch_dim"),
    "no such dim": (Y, 1, r"along dim 1"),
    "ambiguous": ([Y] * 6, None, r"batch_dim='list'\) or Trainer\(batch_dim=0\)"),
    "a list of another length": ([1, 2, 3], None, r"list of 3 entries for 6 samples"),
    "no list": (Y, "list", r"is no list"),
    "another shape": ({"a": Y}, {"b": 0}, r"batch_dim has \['b'\] where targets has \['a'\]"),
    "a word": (Y, "rows", r"along dim rows"),
}


@pytest.mark.parametrize("form", REJECTED)
def test_what_cannot_be_split_is_an_error_with_the_remedy(form: str) -> None:
    targets, batch_dim, why = REJECTED[form]
    with pytest.raises(ShapeError, match=why):
        parts(targets, batch_dim)


def test_what_need_not_be_split_is_taken_as_it_is() -> None:
    weights = torch.ones(5)
    assert split(X, weights, 1).targets == [weights]
    assert split(X[:1], weights, 3).targets[0] is weights


def test_arrays_are_split_twice_without_being_read() -> None:
    lazy = split(np.arange(24.0).reshape(6, 4), np.arange(6), 3)
    assert [x.start for x in lazy.inputs] == [0, 2, 4]
    last = lazy.targets[2]
    assert last.read(Box.whole(last.shape)).tolist() == [4, 5]


# --- training -------------------------------------------------------------------------------------


def detection(output: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
    """A loss over targets of another size for each sample."""
    assert len(output) == len(targets), "a micro-batch was given the targets of others"
    pairs = zip(output, targets, strict=True)
    return torch.stack([F.mse_loss(y.expand_as(t["at"]), t["at"]) for y, t in pairs]).mean()


@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=2, micro_batches=3),
        Plan(stages=2, schedule="gems", replications=2),
        Plan(stages=1, micro_batches=2, data=2, zero=1),
        Plan(stages=2, micro_batches=3, schedule="2bw"),
    ],
    ids=str,
)
def test_a_detection_loss_over_lists_of_dicts_gives_the_plain_numbers(plan: Plan) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(7, 4, generator=draw, dtype=torch.float64)
    y = [{"at": torch.randn(n % 3 + 1, 3, generator=draw, dtype=torch.float64)} for n in range(7)]
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())
    for _ in range(1 if plan.schedule == "2bw" else 3):
        optimizer.zero_grad()
        detection(plain(x), y).backward()
        optimizer.step()

    def work(transport: Transport) -> Any:
        trainer = Trainer(copy.deepcopy(model), detection, sgd, x[:2], plan, transport=transport)
        for _ in range(1 if plan.schedule == "2bw" else 3):
            trainer.step(x, y)
        trainer.flush()
        return trainer.state_dict()

    for state in run(plan.world, work):
        same_state(state, plain.state_dict())
