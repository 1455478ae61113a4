"""Any model, any plan: random networks with random skips train like the plain ones, or as on one
rank where random numbers are drawn."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gems.plans.plan import Plan
from tests.exact import alone, assert_equal, plainly, planned

Tensor = torch.Tensor
WIDTH, SIDE, CLASSES = 4, 6, 3
SHAPE = (WIDTH, SIDE, SIDE)


def conv(**options: Any) -> nn.Conv2d:
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1, **options)


def frozen() -> nn.Module:
    return conv().requires_grad_(False)


# What a layer may be; the ones below also look at an earlier value.
LAYERS = {
    "conv": conv,
    "frozen": frozen,
    "grouped": lambda: conv(groups=2, bias=False),
    "batch norm": lambda: nn.BatchNorm2d(WIDTH),
    "batch norm, cumulative": lambda: nn.BatchNorm2d(WIDTH, momentum=None),
    "batch norm, fast": lambda: nn.BatchNorm2d(WIDTH, momentum=0.6, affine=False),
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
    "layer norm": lambda: nn.LayerNorm(SHAPE),
    "instance norm": lambda: nn.InstanceNorm2d(WIDTH, affine=True, track_running_stats=True),
    "relu, in place": lambda: nn.Sequential(conv(), nn.ReLU(inplace=True)),
    "squeeze": lambda: Squeeze(),
    "down and up": lambda: Level(),
}
RANDOM = {
    "dropout": lambda: nn.Dropout(0.3),
    "channel dropout": lambda: nn.Dropout2d(0.3),
    "stochastic depth": lambda: StochasticDepth(),
}


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(x.mean((2, 3))).relu()).sigmoid()[:, :, None, None]


class Level(nn.Module):
    """One level of a U-Net, with the pooling's indices on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.conv = conv()

    def forward(self, x: Tensor) -> Tensor:
        y, where = self.pool(x)
        return x + self.unpool(self.conv(y), where)


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.conv(x)
        kept = torch.empty(len(x), 1, 1, 1, dtype=x.dtype).bernoulli_(0.7)
        return x + self.conv(x) * kept


def concatenated(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((x, y), 1).view(len(x), 2, *SHAPE).mean(1)


def added_in_place(x: Tensor, y: Tensor) -> Tensor:
    x = x * 0.5
    x += y
    return x


def slice_changed(x: Tensor, y: Tensor) -> Tensor:
    x = 0.5 * x
    x[:, 0] = y[:, 1]
    x[:, 1:].mul_(0.5)
    return x


def view_changed(x: Tensor, y: Tensor) -> Tensor:
    """Both the base and a view that was changed are used."""
    x = x + 0.5
    flat = x.view(len(x), -1)
    flat.add_(y.flatten(1), alpha=0.25)
    return x + flat.view_as(x)


def halves_changed(x: Tensor, y: Tensor) -> Tensor:
    both = x + y
    a, b = both[:, :2], both[:, 2:]
    a.add_(b)
    return torch.cat((b, a), 1)


def whole_changed(x: Tensor, y: Tensor) -> Tensor:
    """What is changed came through calls that give back the very tensor they were given."""
    x = (x - y).contiguous().view(x.shape)
    return x.tanh_()


def largest(x: Tensor, y: Tensor) -> Tensor:
    """Integers between blocks, and no gradient to where they came from."""
    where = y.argmax(1, keepdim=True)
    return x + 0.1 * torch.zeros_like(x).scatter(1, where, 1.0) * x.gather(1, where)


def masked(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(y > 0, x, 0.3 * x)


def stopped(x: Tensor, y: Tensor) -> Tensor:
    return x + 0.2 * y.detach()


JOINTS = {
    "add": torch.add,
    "concatenate": concatenated,
    "add in place": added_in_place,
    "change a slice": slice_changed,
    "change a view": view_changed,
    "change a half": halves_changed,
    "change it all": whole_changed,
    "argmax": largest,
    "mask": masked,
    "stop": stopped,
}


class Generated(nn.Module):
    """Layers in a row; each joint reads any earlier value, so skips are of any length.

    A layer is (kind, share with which earlier one, joint, which earlier value).
    """

    def __init__(self, layers: list[tuple[str, int, str | None, int]], ends: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList()
        self.joints = [(joint, back) for _, _, joint, back in layers]
        self.ends = ends
        for kind, share, _, _ in layers:
            made = (LAYERS | RANDOM)[kind]()
            if share < len(self.layers) and kind == "conv":
                other = self.layers[share]
                if isinstance(other, nn.Conv2d) and other.groups == 1:
                    # An odd one is the same module, an even one has only its weight.
                    made = other if share % 2 else _with_weight(made, other)
            self.layers.append(made)
        self.unused = nn.Linear(2, 2)
        self.lost = conv()  # runs, but no gradient leads to it
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        x = self.stem(x)
        seen = [x]
        for at, (layer, (joint, back)) in enumerate(zip(self.layers, self.joints, strict=True)):
            x = layer(x)
            if joint is not None:
                x = JOINTS[joint](x, seen[back % len(seen)])
            if extra is not None and at == len(self.layers) // 2:
                x = x + extra
            # In-place joints change values of their own making, never those kept here.
            seen.append(x)
        lost = self.lost(seen[len(seen) // 2]).argmax(1)
        y = self.head((x * (1 + (lost > 1).unsqueeze(1))).mean((2, 3)))
        if self.ends == "one":
            return y
        if self.ends == "pair":
            return y, seen[1].mean((1, 2, 3))
        return {"out": y, "more": [seen[1].mean((1, 2, 3)), lost]}


def _with_weight(made: nn.Conv2d, other: nn.Conv2d) -> nn.Conv2d:
    made.weight = other.weight
    return made


def loss(output: Any, target: Any) -> Tensor:
    if isinstance(output, Tensor):
        return F.cross_entropy(output, target["label"])
    y, more = (output["out"], output["more"][0]) if isinstance(output, dict) else output
    return F.cross_entropy(y, target["label"]) + 0.1 * F.mse_loss(more, target["more"])


@st.composite
def networks(draw: Any, kinds: list[str]) -> Generated:
    layer = st.tuples(
        st.sampled_from(kinds),
        st.integers(0, 5),
        st.one_of(st.none(), st.sampled_from(list(JOINTS))),
        st.integers(0, 9),
    )
    layers = draw(st.lists(layer, min_size=3, max_size=7))
    torch.manual_seed(draw(st.integers(0, 5)))
    return Generated(layers, draw(st.sampled_from(("one", "pair", "dict")))).double()


@st.composite
def plans(draw: Any) -> Plan:
    schedule = draw(
        st.sampled_from(
            ("sequential", "gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "gems-zb", "auto")
        )
    )
    stages = draw(st.integers(1, 4))
    options: dict[str, Any] = {}
    if schedule == "interleaved":
        options["ranks"] = draw(st.sampled_from([r for r in (1, 2, 3, 4) if stages % r == 0]))
    elif schedule not in ("1f1b", "zero-bubble"):
        ways = ["straight", "fold", "wrapped", "explicit"]
        way = draw(st.sampled_from(ways))
        if way == "fold":
            options["placement"] = "fold"
        elif way == "wrapped":
            options["ranks"] = draw(st.integers(1, stages))
        elif way == "explicit":
            ranks = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
            known = sorted(set(ranks))
            options["placement"] = tuple(known.index(r) for r in ranks)
    if schedule in ("auto", "sequential"):
        options["bidirectional"] = draw(st.booleans())
    if schedule in ("auto", "gems", "gems-zb"):
        options["max_in_flight"] = draw(st.integers(0, 4))
    return Plan(
        stages=stages,
        micro_batches=draw(st.integers(1, 8)),
        schedule=schedule,
        data=draw(st.integers(1, 2)),
        balance=draw(st.sampled_from(("time", "memory"))),
        **options,
    )


def some_data(samples: list[int], extra: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for n in samples:
        x = torch.randn(n, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
        more = torch.randn(n, *SHAPE, generator=generator, dtype=torch.float64)
        target = {
            "label": torch.randint(CLASSES, (n,), generator=generator),
            "more": torch.randn(n, generator=generator, dtype=torch.float64),
        }
        found.append(((x, more) if extra else x, target))
    return found


# Batches of any size, so micro-batches are uneven, and some may have no samples.
sizes = st.lists(st.integers(1, 11), min_size=2, max_size=2)


@settings(max_examples=2 * settings().max_examples, report_multiple_bugs=False)
@given(networks(list(LAYERS)), plans(), sizes, st.booleans())
def test_a_generated_model_under_a_generated_plan_trains_like_the_plain_one(
    model: Generated, plan: Plan, samples: list[int], extra: bool
) -> None:
    data = some_data(samples, extra)
    assert_equal(planned(model, data, plan, loss), plainly(model, data, plan.total, loss))


@settings(max_examples=settings().max_examples // 2, report_multiple_bugs=False)
@given(networks([*RANDOM, *RANDOM, *LAYERS]), plans(), sizes)
def test_random_numbers_are_those_of_the_one_rank_plan(
    model: Generated, plan: Plan, samples: list[int]
) -> None:
    data = some_data(samples, False)
    assert_equal(planned(model, data, plan, loss), alone(model, data, plan.total, loss))
