"""AmoebaNet-D: cells found by evolution, each of which reads the two before it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

# What passes between cells: a cell's output, the one before it and, behind the auxiliary head, its
# logits.
State = tuple[Tensor, ...]

# A Sequential of cells. Each halving doubles the channels inside a cell; a normal cell gives four
# times as many, a reduction three times.
#
#   image ─ stem ─ stem_1 ─ stem_2 ─ normal1_* ─ reduction1 ─ normal2_* ─ reduction2 ─ normal3_* ─
#   side     1/2    1/4      1/8       1/8         1/16         1/16         1/32        1/32
#   inside   F/4    F/2      F         F           2F           2F           4F          4F     head


def amoebanet_d(
    num_layers: int = 18,
    num_filters: int = 256,
    num_classes: int = 1000,
    in_channels: int = 3,
    drop_path: float = 0.0,
    aux_head: bool = False,
) -> nn.Sequential:
    """AmoebaNet-D(L, F): three runs of L/3 normal cells with reductions before and between.

    81.5 M parameters for (18, 208), 122.5 M for (18, 256), 319.0 M for (18, 416). Images may have
    any size. In training, an operation of cell i of n is skipped with probability
    `drop_path * i / n`, sample by sample; and with `aux_head` the network gives a second set of
    logits, from two thirds of the way (its last norm takes two samples or more): train on
    `loss(logits) + 0.4 * loss(second)`.
    """
    problems = [
        *([f"num_layers {num_layers} is not a multiple of 3"] if num_layers % 3 else []),
        *([f"num_layers is {num_layers}, not 3 or more"] if num_layers < 3 else []),
        *([f"num_filters {num_filters} is not a multiple of 8"] if num_filters % 8 else []),
        *([f"num_filters is {num_filters}, not 8 or more"] if num_filters < 8 else []),
        *([f"drop_path is {drop_path}, not in [0, 1)"] if not 0 <= drop_path < 1 else []),
    ]
    if problems:
        raise ValueError(f"this AmoebaNet-D cannot be built: {'; '.join(problems)}")
    model = _network(num_layers // 3, num_filters, num_classes, in_channels, drop_path, aux_head)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def _network(
    run: int, filters: int, classes: int, in_channels: int, drop_path: float, aux_head: bool
) -> nn.Sequential:
    names = ["stem_1", "stem_2"]
    for group in (1, 2, 3):
        names += [f"reduction{group - 1}"] if group > 1 else []
        names += [f"normal{group}_{i + 1}" for i in range(run)]
    inner = filters // 4
    cells: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(in_channels, inner))
    before = last = inner  # channels that the next cell reads
    halved = False
    for index, name in enumerate(names):
        halving = not name.startswith("normal")
        inner *= 2 if halving else 1
        chance = drop_path * (index + 1) / len(names)
        genes = REDUCTION if halving else NORMAL
        cells[name] = cell = Cell(genes, before, last, inner, halving, halved, chance)
        before, last, halved = last, cell.channels, halving
        if aux_head and name == f"normal2_{run}":
            cells["aux_head"] = AuxiliaryHead(last, classes)
    cells["head"] = Head(last, classes)
    return nn.Sequential(cells)


class Cell(nn.Module):
    """Two inputs, five sums of two operations each, and a choice of all of these side by side.

    State 0 is the cell before, state 1 the one before that, both brought to `inner` channels and to
    one size; state 2 + i is sum i. Gives its output and passes on the cell before.
    """

    def __init__(
        self,
        genes: Genes,
        before: int,
        last: int,
        inner: int,
        halving: bool,
        halved: bool,
        drop_path: float,
    ) -> None:
        super().__init__()
        operations, self.chosen = genes
        self.sources = tuple(source for source, _ in operations)
        self.channels = inner * len(self.chosen)
        self.fit_last = _relu_conv_norm(last, inner, 1)
        if halved:  # the one before is still twice as large
            self.fit_before: nn.Module = Halve(before, inner)
        elif before != inner:
            self.fit_before = _relu_conv_norm(before, inner, 1)
        else:
            self.fit_before = nn.Identity()
        # The two inputs of a reduction are halved, its own sums are half as large already.
        self.operations = nn.ModuleList(
            make(inner, 2 if halving and source < 2 else 1) for source, make in operations
        )
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, state: Tensor | State) -> State:
        pair = (state, state) if isinstance(state, Tensor) else state
        last, before, *logits = pair
        states = [self.fit_last(last), self.fit_before(before)]
        results = (
            self._run(operation, states, source)
            for operation, source in zip(self.operations, self.sources, strict=True)
        )
        for one, other in zip(results, results, strict=True):  # two at a time, in order
            states.append(one + other)
        return torch.cat([states[i] for i in self.chosen], dim=1), last, *logits

    def _run(self, operation: nn.Module, states: list[Tensor], source: int) -> Tensor:
        y = operation(states[source])
        return y if isinstance(operation, nn.Identity) else self.drop_path(y)


class Halve(nn.Module):
    """Half the size without losing a half of the cells: two 1x1 convolutions of stride 2.

    One sees the even rows and columns, the other the odd ones; each gives half of the channels.
    """

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(channels, out // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, out // 2, 1, stride=2, bias=False)
        self.shift = nn.ZeroPad2d((-1, 1, -1, 1))
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        return self.norm(torch.cat([self.even(x), self.odd(self.shift(x))], dim=1))


class Head(nn.Module):
    """Mean over the image, linear."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, state: State) -> Tensor | State:
        last, _, *more = state
        logits = self.fc(self.pool(last).flatten(1))
        return (logits, *more) if more else logits


class AuxiliaryHead(nn.Module):
    """A second classifier on the way, in training only; the pair of cells passes by.

    Pools to 4x4, which is what the published 5x5 pool of stride 3 leaves of a 224² image.
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.classify = nn.Sequential(
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Conv2d(channels, 128, 1, bias=False),
            nn.BatchNorm2d(128),
            *_relu_conv_norm(128, 768, 4, padding=0),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(768, num_classes),
        )

    def forward(self, state: State) -> State:
        return (*state, self.classify(state[0])) if self.training else state


def _stem(in_channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(in_channels, out, 3, stride=2, padding=1, bias=False),
            norm=nn.BatchNorm2d(out),
        )
    )


def _relu_conv_norm(
    channels: int,
    out: int,
    kernel: int | tuple[int, int],
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
) -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(channels, out, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(out),
    )


class StochasticDepth(nn.Module):
    """In training, drop a sample's whole branch with probability `p`; scale the kept ones up."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        keep = 1.0 - self.p
        per_sample = (x.shape[0], *(1 for _ in x.shape[1:]))
        mask = torch.rand(per_sample, dtype=x.dtype, device=x.device) < keep
        return x * mask.to(x.dtype) / keep

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


# --- operations: channels, stride -> module -------------------------------------------------------

Operation = Callable[[int, int], nn.Module]


def _none(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else Halve(channels, channels)


def _average_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def _max_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def _max_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride, ceil_mode=True)  # odd sizes are halved as convolutions do


def _conv_1x1(channels: int, stride: int) -> nn.Module:
    return _relu_conv_norm(channels, channels, 1, stride)


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    """In a bottleneck of a quarter of the channels."""
    quarter = channels // 4
    return nn.Sequential(
        _relu_conv_norm(channels, quarter, 1),
        _relu_conv_norm(quarter, quarter, 3, stride, padding=1),
        _relu_conv_norm(quarter, channels, 1),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """In a bottleneck of a quarter of the channels."""
    quarter = channels // 4
    return nn.Sequential(
        _relu_conv_norm(channels, quarter, 1),
        _relu_conv_norm(quarter, quarter, (1, 7), (1, stride), padding=(0, 3)),
        _relu_conv_norm(quarter, quarter, (7, 1), (stride, 1), padding=(3, 0)),
        _relu_conv_norm(quarter, channels, 1),
    )


# --- what evolution found -------------------------------------------------------------------------

# Two operations make a sum, each with the state it reads; then the states that make the output.
Genes = tuple[tuple[tuple[int, Operation], ...], tuple[int, ...]]

# The paper puts sums 2, 3 and 4 side by side in normal cells too. The released code takes the input
# and states 3, 4 and 6, and only with these does the network have the published parameters.
NORMAL: Genes = (
    (
        *((1, _conv_1x1), (1, _max_3x3)),
        *((1, _none), (0, _conv_1x7_7x1)),
        *((0, _conv_1x1), (0, _conv_1x7_7x1)),
        *((2, _max_3x3), (2, _none)),
        *((1, _average_3x3), (5, _conv_1x1)),
    ),
    (0, 3, 4, 6),
)
REDUCTION: Genes = (
    (
        *((0, _max_2x2), (0, _max_3x3)),
        *((2, _none), (1, _conv_3x3)),
        *((2, _conv_1x7_7x1), (2, _max_3x3)),
        *((3, _none), (1, _max_2x2)),
        *((2, _average_3x3), (3, _conv_1x1)),
    ),
    (4, 5, 6),
)
