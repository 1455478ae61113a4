"""Weights in int8 for prediction: one byte per number and a scale per channel; arithmetic in fp32.

A layer has its weight as a parametrization (torch.nn.utils.parametrize), which computes it when the
layer runs. So stages, tiles, patches and messages need to know nothing of it. Scales are those of
torch.ao's observer: symmetric, for each output channel. A weight is off by half a scale at most,
1/255 of the largest of its channel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.ao.quantization.observer import PerChannelMinMaxObserver
from torch.nn.utils import parametrize

from gems.errors import PlanError

Tensor = torch.Tensor
LARGEST = 127
# Their output channels; of other classes, also derived ones, nobody knows how they use weights.
CHANNEL_DIM: dict[type[nn.Module], int] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), 0),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), 1),
}


@dataclass(frozen=True)
class Int8Report:
    """The layers whose weights are in int8, by name, and what others have weights, by class."""

    converted: tuple[str, ...]
    others: tuple[str, ...]
    before: int  # bytes of all parameters
    after: int

    def __str__(self) -> str:
        kinds = Counter(self.others)
        others = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none"
        return (
            f"weights in int8: {len(self.converted)} layers ({', '.join(self.converted)}); not "
            f"converted: {others}; {self.before:,} bytes of parameters are {self.after:,}"
        )


class Dequantize(nn.Module):
    """From int8 numbers and scales to a weight; `right_inverse` is the way there."""

    def __init__(self, channel_dim: int) -> None:
        super().__init__()
        self.channel_dim = channel_dim

    def forward(self, numbers: Tensor, scale: Tensor) -> Tensor:
        return numbers.to(scale.dtype) * scale

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight.detach()
        observer = PerChannelMinMaxObserver(
            self.channel_dim,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            quant_min=-LARGEST,
            quant_max=LARGEST,
        )
        observer(weight.float())
        scale, _ = observer.calculate_qparams()
        shape = [1] * weight.dim()
        shape[self.channel_dim] = -1
        scale = scale.view(shape)
        numbers = (weight / scale).round().clamp(-LARGEST, LARGEST)
        return numbers.to(torch.int8), scale


def store_in_int8(model: nn.Module) -> Int8Report:
    """Round the weights of linear and convolutional layers. They are not trained any more."""
    if any(p.is_meta for p in model.parameters()):
        raise PlanError(
            "precision 'int8' rounds the weights that the model has, and some are on the meta "
            "device; build the model with real weights"
        )
    before = _bytes(model)
    converted, others = [], []
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for path, module in list(model.named_modules()):
        own = list(module.parameters(recurse=False))
        if _convertible(module, uses):
            module.weight.requires_grad_(False)  # type: ignore[union-attr]
            rounding = Dequantize(CHANNEL_DIM[type(module)])
            parametrize.register_parametrization(module, "weight", rounding, unsafe=True)
            converted.append(path or "the model itself")
        elif own and not isinstance(module, parametrize.ParametrizationList):
            others.append(type(module).__name__)
    if not converted:
        raise PlanError(
            "precision 'int8' rounds weights of linear and convolutional layers, and this model "
            f"has none that it may round, but {', '.join(sorted(set(others))) or 'no weights'}; "
            "use 'bf16' or 'fp16'"
        )
    return Int8Report(tuple(converted), tuple(others), before, _bytes(model))


def rounded(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A plain state dict as that of a model in int8."""
    found = dict(state)
    for path, rounding in _roundings(model):
        if (weight := found.pop(f"{path}weight", None)) is not None:
            for i, part in enumerate(rounding.right_inverse(weight)):
                found[f"{path}parametrizations.weight.original{i}"] = part
    return found


def _roundings(model: nn.Module) -> Iterator[tuple[str, Dequantize]]:
    for path, module in model.named_modules():
        if isinstance(module, Dequantize):
            yield path.removesuffix("parametrizations.weight.0"), module


def _convertible(module: nn.Module, uses: Mapping[int, int]) -> bool:
    if type(module) not in CHANNEL_DIM:
        return False
    weight: Any = module.weight
    return weight.is_floating_point() and weight.numel() > 0 and uses[id(weight)] == 1


def _bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())
