"""Generated models: layers in a row with skips, several inputs and outputs; their data and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.generate.layers import IMAGE, ON_TILES, SEQUENCE, conv, fitting
from tests.generate.wraps import WRAPS, attach

Tensor = torch.Tensor
CLASSES, TOKENS = 3, 7
INPUTS = ("one", "tuple", "dict", "number")
OUTPUTS = ("one", "tuple", "dict", "mixed")
TARGETS = ("tensor", "dict", "list", "samples")
BATCH_DIM: dict[str, Any] = {"list": 0, "samples": "list"}  # what the trainer is told
TRAITS = ("unused", "tied", "shared", "channels_last", "no_stem", "tokens", "pixels", "sparse")


@dataclass(frozen=True)
class Piece:
    """A layer: its kind, what surrounds it, and how an earlier value joins behind it."""

    kind: str
    seed: int
    wrap: str = ""
    joint: str = ""
    back: int = 0


@dataclass(frozen=True)
class Model:
    """All that a model is drawn from; `shape` is that of one sample behind the stem."""

    seed: int
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    inputs: str = "one"
    outputs: str = "one"
    targets: str = "tensor"
    traits: frozenset[str] = field(default_factory=frozenset)

    @property
    def sequence(self) -> bool:
        return len(self.shape) == 2

    @property
    def dims(self) -> int:
        return 0 if self.sequence else len(self.shape) - 1


def _cat(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((x, y), 1)[:, ::2].contiguous() if x.shape[1] > 1 else x + y


def _in_place(x: Tensor, y: Tensor) -> Tensor:
    x = x * 0.5
    x += y
    return x


def _slice(x: Tensor, y: Tensor) -> Tensor:
    x = 0.5 * x
    x[:, 0] = y[:, -1]
    return x


def _view(x: Tensor, y: Tensor) -> Tensor:
    x = (x + 0.5).contiguous()
    flat = x.view(len(x), -1)
    flat.add_(y.flatten(1), alpha=0.25)
    return x + flat.view_as(x)


def _where(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(y > 0, x, 0.3 * x)


def _stop(x: Tensor, y: Tensor) -> Tensor:
    return x + 0.2 * y.detach()


JOINTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "multiply": lambda x, y: x * (0.5 * y).tanh(),
    "cat": _cat,
    "in place": _in_place,
    "slice": _slice,
    "view": _view,
    "where": _where,
    "stop": _stop,
}


ANYWHERE = ("add", "multiply", "in place", "where", "stop")  # also on tiles


class Net(nn.Module):
    """A stem, layers, a head; values that have the same shape may be joined far behind."""

    def __init__(self, spec: Model) -> None:
        super().__init__()
        torch.manual_seed(spec.seed)
        self.spec = spec
        width, dims = spec.shape[-1] if spec.sequence else spec.shape[0], spec.dims
        if "tokens" in spec.traits:
            self.stem: nn.Module = nn.Embedding(TOKENS, width, sparse="sparse" in spec.traits)
        elif "no_stem" in spec.traits:
            self.stem = nn.Identity()
        else:
            self.stem = nn.Linear(3, width) if spec.sequence else conv(dims, 2, width)
        self.layers = nn.ModuleList()
        self.joints: list[tuple[str, int]] = []
        shape = (2, *spec.shape)
        for piece in spec.pieces:
            made = self._again(shape) if "shared" in spec.traits else None
            found = (made, shape) if made is not None else fitting(piece.kind, piece.seed, shape)
            if found is None:
                continue
            layer, shape = found
            if piece.wrap and made is None:
                layer = WRAPS[piece.wrap](layer)
            self.layers.append(layer)
            self.joints.append((piece.joint, piece.back))
        if "tied" in spec.traits:
            self._tie()
        torch.manual_seed(spec.seed + 1)
        ends = shape[-1] if spec.sequence else shape[1]
        pixels = "pixels" in spec.traits
        self.head = conv(dims, ends, CLASSES, 1) if pixels and dims else nn.Linear(ends, CLASSES)
        self.out_shape = tuple(shape[2:]) if pixels and dims else ()
        if "unused" in spec.traits:
            self.unused, self.never = nn.Linear(2, 2), nn.Parameter(torch.ones(3))

    def _again(self, shape: tuple[int, ...]) -> nn.Module | None:
        """Every third layer is the one before once more, if it keeps the shape."""
        if len(self.layers) % 3 != 2:
            return None
        last = self.layers[-1]
        try:
            with torch.no_grad():
                return last if last(torch.randn(shape)).shape == shape else None
        except (RuntimeError, ValueError):
            return None

    def _tie(self) -> None:
        """Parameters of equal shape in different layers become one."""
        seen: dict[Any, nn.Parameter] = {}
        for module in self.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                if p.dim() > 1 and type(p) is nn.Parameter:
                    setattr(module, name, seen.setdefault(p.shape, p))

    def forward(self, x: Tensor, extra: Tensor | None = None, scale: float = 1.0) -> Any:
        x = self.stem(x)
        if extra is not None:
            x = x + extra * scale
        seen = [x]
        for layer, (joint, back) in zip(self.layers, self.joints, strict=True):
            x = layer(x)
            if joint:
                other = seen[back % len(seen)]
                if other.shape == x.shape:
                    x = JOINTS[joint](x, other)
            seen.append(x)
        y = self._end(x)
        if self.spec.outputs == "one":
            return y
        middle = seen[len(seen) // 2]
        more = middle.mean(tuple(range(1, middle.dim())))
        if self.spec.outputs == "tuple":
            return y, more
        if self.spec.outputs == "dict":
            return {"out": y, "more": [more]}
        return {"out": y, "more": (more,), "none": None, "number": 3}

    def _end(self, x: Tensor) -> Tensor:
        if self.out_shape:
            return self.head(x)
        return self.head(x.mean(1 if self.spec.sequence else tuple(range(2, x.dim()))))


def build(spec: Model, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = Net(spec).to(dtype)
    if "channels_last" in spec.traits and spec.dims == 2:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def draws(model: nn.Module) -> bool:
    """Whether forward draws random numbers, which GEMS keys by step and micro-batch."""
    kinds = (nn.modules.dropout._DropoutNd, nn.RReLU)
    return any(
        getattr(m, "draws", False)
        or (isinstance(m, kinds) and getattr(m, "p", 1) > 0)
        or (isinstance(m, nn.MultiheadAttention) and m.dropout > 0)
        for m in model.modules()
    )


def copy_of(model: nn.Module) -> nn.Module:
    """As a rank has it, with the hooks that copies lose."""
    import copy

    return attach(copy.deepcopy(model))


# --- data and loss --------------------------------------------------------------------------------


def batch(
    model: Net, samples: int, step: int, dtype: torch.dtype = torch.float64
) -> tuple[Any, Any]:
    """Inputs and targets of one step."""
    spec = model.spec
    g = torch.Generator().manual_seed(1000 * spec.seed + step)
    whole = (samples, *spec.shape)
    if "tokens" in spec.traits:
        x = torch.randint(TOKENS, whole[:2], generator=g)
    elif "no_stem" in spec.traits:
        x = torch.randn(whole, generator=g, dtype=dtype)
    else:
        first = (samples, spec.shape[0], 3) if spec.sequence else (samples, 2, *spec.shape[1:])
        x = torch.randn(first, generator=g, dtype=dtype)
    if "channels_last" in spec.traits and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    extra = torch.randn(whole, generator=g, dtype=dtype)
    label = torch.randint(CLASSES, (samples, *model.out_shape), generator=g)
    more = torch.randn(samples, generator=g, dtype=dtype)
    inputs: Any = {
        "one": x,
        "tuple": (x, extra),
        "dict": {"x": x, "extra": extra},
        "number": {"x": x, "extra": extra, "scale": 0.5},
    }[spec.inputs]
    targets: Any = {
        "tensor": label,
        "dict": {"label": label, "more": more},
        "list": [label, more],
        "samples": [{"label": a, "more": b} for a, b in zip(label, more, strict=True)],
    }[spec.targets]
    return inputs, targets


def loss(output: Any, target: Any) -> Tensor:
    if isinstance(target, list) and isinstance(target[0], dict):  # one for each sample
        target = {name: torch.stack([one[name] for one in target]) for name in target[0]}
    if isinstance(target, dict):
        label, wanted = target["label"], target["more"]
    elif isinstance(target, list):
        label, wanted = target
    else:
        label, wanted = target, None
    if isinstance(output, Tensor):
        return F.cross_entropy(output, label)
    y, more = output if isinstance(output, tuple) else (output["out"], output["more"][0])
    found = F.cross_entropy(y, label)
    if wanted is None:
        return found + 0.1 * more.square().mean()
    return found + 0.1 * F.mse_loss(more, wanted)


# --- drawing --------------------------------------------------------------------------------------


def draw_model(r: Random, tiles: bool) -> Model:
    """A model; one for tiles has mostly the layers that can be cut over an image."""
    sequence = not tiles and r.random() < 0.3
    if sequence:
        shape: tuple[int, ...] = (r.randint(3, 6), r.choice((4, 6, 8)))
    else:
        dims = r.choice((1, 2, 2, 2, 2, 3))
        sides = {1: (6, 12), 2: (4, 8), 3: (4, 5)}[dims]
        shape = (r.choice((2, 4)), *(r.randint(*sides) for _ in range(dims)))
    kinds = sorted(SEQUENCE if sequence else IMAGE)
    if tiles and r.random() < 0.85:
        kinds = sorted(ON_TILES)
    pieces = tuple(_piece(r, kinds, tiles) for _ in range(r.randint(1, 4)))
    traits = {t for t in TRAITS if r.random() < 0.12}
    traits -= set() if sequence else {"tokens", "sparse"}
    traits -= {"pixels", "channels_last"} if sequence else set()
    traits -= {"sparse"} if "tokens" not in traits else set()
    outputs = r.choice(("one", *OUTPUTS)) if r.random() < 0.6 else "one"
    return Model(
        seed=r.randrange(1 << 20),
        shape=shape,
        pieces=pieces,
        inputs=r.choice(INPUTS) if r.random() < 0.35 else "one",
        outputs=outputs,
        targets=r.choice(TARGETS) if r.random() < 0.4 else "tensor",
        traits=frozenset(traits),
    )


def _piece(r: Random, kinds: list[str], tiles: bool) -> Piece:
    kind = r.choice(kinds)
    if not tiles and r.random() < 0.15:
        kind = r.choice(
            [k for k in ("convolution", "norm", "block", "linear", "layer_norms") if k in kinds]
        )
    return Piece(
        kind,
        seed=r.randrange(1 << 20),
        wrap=r.choice(sorted(WRAPS)) if r.random() < (0.08 if tiles else 0.3) else "",
        joint=r.choice(sorted(ANYWHERE if tiles else JOINTS)) if r.random() < 0.35 else "",
        back=r.randrange(6),
    )
