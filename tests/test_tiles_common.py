"""What common networks do on tiles: computed weights, hooks, shuffles, rolled windows, response
norms, attention. With a layer rule or whole on every rank, the numbers are those of one device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from gems.errors import PlanError
from gems.plans.plan import Plan
from gems.torch.trainer import Trainer
from gems.transport.threads import run
from tests import exact
from tests.exact import alone as planned_alone
from tests.exact import assert_equal, drawing, plainly, planned, sgd
from tests.spatial import Plain

Tensor = torch.Tensor
SHAPE = (2, 3, 8, 6)


class Made(nn.Module):
    """A forward as a function of the modules that it uses."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.parts)


def conv(inputs: int = 3, outputs: int = 4, kernel: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


class Clipped(torch.autograd.Function):
    """x w, with a gradient that is clipped: what comes back in parts would be clipped in parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, w), g = ctx.saved_tensors, gradients[0].clamp(-0.5, 0.5)
        return g * w, (g * x).sum().reshape(1)


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.7]))

    def forward(self, x: Tensor) -> Tensor:
        return Clipped.apply(x, self.weight)  # type: ignore[no-any-return]


class Peeking(nn.Module):
    """Looks at values, so that it is a leaf; inside, a gradient is clipped and a weight tied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.clip, self.rows = conv(4, 4), Clip(), nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 1e9):
            return x
        y = self.clip(self.inner(x))
        return y + self.rows(y[:, 0])[0].unsqueeze(1)


def clipping_backward(module: nn.Module) -> nn.Module:
    def clip(module: nn.Module, inner: Any, outer: Any) -> Any:
        return tuple(None if g is None else g.clamp(-0.3, 0.3) for g in inner)

    module.register_full_backward_hook(clip)
    return module


def scaling_forward(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, inputs, output: output * output.mean())
    return module


def shifting_before(module: nn.Module) -> nn.Module:
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0] - inputs[0].amax(),))
    return module


def rolled_windows(x: Tensor, stem: nn.Module, head: nn.Module) -> Tensor:
    """A block of Swin: roll, cut into windows, attend within them, put together, roll back."""
    x = stem(x).permute(0, 2, 3, 1)
    b, h, w, c = x.shape
    y = torch.roll(x, (-1, -1), (1, 2))
    y = y.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    y = torch.softmax(y @ y.transpose(1, 2), -1) @ y
    y = y.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    x = x + torch.roll(y, (1, 1), (1, 2))
    return head(x.permute(0, 3, 1, 2))


def response_norm(x: Tensor, stem: nn.Module) -> Tensor:
    """The global response norm of ConvNeXt V2, channels last."""
    y = stem(x).permute(0, 2, 3, 1)
    g = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
    return y * (g / (g.mean(-1, keepdim=True) + 1e-6)) + y


def attention(x: Tensor, stem: nn.Module, head: nn.Module, attend: nn.Module) -> Tensor:
    y = stem(x)
    tokens = y.flatten(2).transpose(1, 2)
    return head(y + attend(tokens, tokens, tokens)[0].transpose(1, 2).reshape(y.shape))


def written_in_place(x: Tensor, stem: nn.Module, head: nn.Module) -> Tensor:
    y = stem(x) * 1
    y[:, :, 2] = 0
    y[:, 1] = y[:, 2] * 2
    return head(y)


def copied_then_changed(x: Tensor, stem: nn.Module, head: nn.Module) -> Tensor:
    """`contiguous` copies the whole, but might hand back a tile that is contiguous already."""
    y = stem(x).permute(0, 2, 3, 1)
    z = y.contiguous()
    z.mul_(2)
    return head((y + z).permute(0, 3, 1, 2))


def sampled(x: Tensor, stem: nn.Module, flow: nn.Module) -> Tensor:
    grid = flow(x).permute(0, 2, 3, 1).tanh()
    return F.grid_sample(stem(x), grid, align_corners=False)


# A model, and how many of its calls run whole on every rank of a 2x2 grid.
CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "weight norm": (lambda: parametrizations.weight_norm(conv()), 0),
    "spectral norm": (lambda: parametrizations.spectral_norm(conv()), 0),
    "weight norm, transposed": (
        lambda: parametrizations.weight_norm(nn.ConvTranspose2d(3, 4, 3, 2)),
        0,
    ),
    "weight norm, linear": (
        lambda: Made(
            lambda x, a: a(x.permute(0, 2, 3, 1)), parametrizations.weight_norm(nn.Linear(3, 4))
        ),
        0,
    ),
    "orthogonal": (lambda: parametrizations.orthogonal(conv(3, 4, 1)), 0),
    "channel shuffle": (lambda: nn.Sequential(conv(), nn.ChannelShuffle(2)), 0),
    "area": (lambda: Made(lambda x, a: F.interpolate(a(x), (5, 3), mode="area"), conv()), 0),
    "area by scale": (
        lambda: Made(lambda x, a: F.interpolate(a(x), scale_factor=0.5, mode="area"), conv()),
        0,
    ),
    "roll": (lambda: Made(lambda x, a: a(x).roll((3, -2, 1), (2, 3, 1)), conv()), 0),
    "roll twice round": (lambda: Made(lambda x, a: torch.roll(a(x), -19, 2), conv()), 0),
    "rolled windows": (lambda: Made(rolled_windows, conv(), conv(4, 2)), 1),
    "response norm": (lambda: Made(response_norm, conv()), 0),
    "norm of order 1": (lambda: Made(lambda x, a: a(x).norm(1, (2, 3)), conv()), 0),
    "norm of order 3": (lambda: Made(lambda x, a: a(x).norm(3, (2, 3)), conv()), 1),
    "norm of all": (lambda: Made(lambda x, a: a(x).norm(), conv()), 0),
    "norm of channels": (lambda: Made(lambda x, a: a(x).norm(dim=1, keepdim=True), conv()), 0),
    "vector norm": (
        lambda: Made(lambda x, a: torch.linalg.vector_norm(a(x), dim=(2, 3)), conv()),
        0,
    ),
    "attention": (
        lambda: Made(attention, conv(), conv(4, 2), nn.MultiheadAttention(4, 2, batch_first=True)),
        1,
    ),
    "written in place": (lambda: Made(written_in_place, conv(), conv(4, 2)), 2),
    "copied, then changed": (lambda: Made(copied_then_changed, conv(), conv(4, 2)), 0),
    "a clipped gradient": (lambda: nn.Sequential(conv(), Clip(), conv(4, 2)), 1),
    "a clipped gradient of what is whole": (
        lambda: nn.Sequential(conv(), nn.AdaptiveAvgPool2d(1), Clip(), nn.Flatten(), Clip()),
        0,
    ),
    "a leaf that clips": (lambda: nn.Sequential(conv(), Peeking(), conv(4, 2)), 1),
    "a hook on gradients": (
        lambda: nn.Sequential(conv(), clipping_backward(conv(4, 4)), conv(4, 2)),
        1,
    ),
    "a hook on the output": (lambda: nn.Sequential(conv(), scaling_forward(conv(4, 4))), 1),
    "a hook on a pointwise layer": (
        lambda: nn.Sequential(conv(), scaling_forward(nn.ReLU()), conv(4, 2)),
        1,
    ),
    "a hook on the input": (lambda: nn.Sequential(conv(), shifting_before(conv(4, 4))), 1),
    "rows by an LSTM": (lambda: Made(lambda x, a, b: b(a(x)[:, 0])[0], conv(), nn.LSTM(6, 3)), 1),
    "sampled": (lambda: Made(sampled, conv(), conv(3, 2)), 1),
    "a constant kernel": (
        lambda: Made(lambda x, a: F.conv2d(a(x), torch.ones(2, 4, 3, 3).to(x)), conv()),
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_common_layers_on_tiles_are_exact(name: str) -> None:
    make, whole = CASES[name]
    torch.manual_seed(1)
    plain = Plain(make(), torch.randn(SHAPE))
    for grid, fused in (((2, 1), 1), ((2, 2), 1), ((2, 2), 4), ((4, 3), 1)):
        laid = plain.cut(grid, fused=fused)[0].laid
        assert laid is not None and (grid != (2, 2) or len(laid.gathered()) == whole)


@pytest.mark.parametrize("name", ["rolled windows", "a clipped gradient", "written in place"])
def test_common_layers_on_uneven_tiles_are_exact(name: str) -> None:
    plain = Plain(CASES[name][0](), torch.randn(SHAPE))
    plain.cut((3, 2), points=((1, 7), (4,)))
    plain.cut((3, 2), points=((0, 0), (1,)))  # of which some are empty


NOISE: dict[str, Callable[[], nn.Module]] = {
    "AlphaDropout": lambda: nn.AlphaDropout(0.3),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.3),
    "randn_like": lambda: Made(lambda x: x + torch.randn_like(x)),
    "rand_like": lambda: Made(lambda x: x * torch.rand_like(x)),
    "bernoulli": lambda: Made(lambda x: x * torch.bernoulli(x.sigmoid())),
    "rrelu": lambda: nn.RReLU(),
    "dropout in place": lambda: nn.Dropout(0.3, inplace=True),
    "hooked dropout": lambda: scaling_forward(nn.Dropout(0.3)),
}
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x * 1,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "permuted": lambda x: x.permute(0, 2, 3, 1),
    "sliced": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1, -1),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("noise", NOISE)
def test_random_layers_draw_on_tiles_what_they_draw_on_one_device(noise: str, order: str) -> None:
    layer = NOISE[noise]()
    model = nn.Sequential(conv(), Made(ORDERS[order]), layer, Made(lambda x: x * 2))
    if order == "expanded" and "place" in noise:
        return  # torch does not write to cells that share memory
    plain = Plain(model, torch.randn(SHAPE), keyed=True)
    plain.cut((2, 1))
    plain.cut((2, 2))


# --- under plans ---------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.stem, self.layer, self.head = conv(), layer, nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.stem(x)).mean((2, 3)))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrizations.weight_norm(conv(4, 4)),
    "weight norm by a hook": lambda: weight_norm(conv(4, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(conv(4, 4)),
    "spectral norm by a hook": lambda: spectral_norm(conv(4, 4)),
    "a clipped gradient": Clip,
    "a leaf that clips": lambda: nn.Sequential(Peeking()),
    "rolled windows": lambda: Made(rolled_windows, conv(4, 4), conv(4, 4)),
}


def trained(make: Callable[[], nn.Module], plan: Plan, batch: int = 2) -> dict[str, Tensor]:
    """The model after two steps under a plan, from the same weights every time."""

    def work(transport: Any) -> dict[str, Tensor]:
        with drawing(3):
            model = Small(make()).double()
        sample = torch.empty(batch, *SHAPE[1:]).double()
        trainer = Trainer(model, F.cross_entropy, sgd, sample, plan, transport=transport)
        generator = torch.Generator().manual_seed(5)
        for _ in range(2):
            x = torch.randn(batch * plan.total, *SHAPE[1:], generator=generator).double()
            trainer.step(x, torch.arange(len(x)) % 5)
        return {k: v.detach().clone() for k, v in trainer.state_dict().items()}

    with mock.patch("gems.torch.tracing.trace.record", exact.Recordings()):
        worlds = run(plan.ranks, work)
    for other in worlds[1:]:
        assert all(torch.equal(other[key], worlds[0][key]) for key in worlds[0])
    return worlds[0]


PLANS = {
    "2x2": Plan(stages=1, spatial=(2, 2), schedule="sequential"),
    "2x1, then whole": Plan(
        stages=[["stem", "layer"], ["mean", "head"]], spatial=[(2, 1)], micro_batches=2
    ),
    "recomputed": Plan(stages=1, spatial=(2, 1), schedule="sequential", recompute="always"),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_common_layers_train_under_plans(name: str, plan: str) -> None:
    mine = trained(LAYERS[name], PLANS[plan])
    alone = Plan(stages=1, schedule="sequential", micro_batches=PLANS[plan].micro_batches)
    theirs = trained(LAYERS[name], alone)
    for key, value in theirs.items():
        assert torch.allclose(mine[key], value, rtol=1e-10, atol=1e-11), key


def test_what_runs_whole_is_logged_with_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    plan = PLANS["2x2"]
    with caplog.at_level(logging.INFO, logger="gems"):
        trained(Clip, plan)
    (line, *_) = [r.getMessage() for r in caplog.records if "run whole" in r.getMessage()]
    assert line.startswith("stage 0 is cut 2x2, but 1 calls run whole on every rank")
    assert "layer.Clipped (Clipped) is an autograd function" in line


def test_a_hook_on_a_weight_gradient_is_rejected_on_tiles() -> None:
    """It would see each tile's part of the gradient."""
    model = Small(conv(4, 4))
    sample = torch.empty(*SHAPE)

    def work(transport: Any) -> None:
        mine = copy.deepcopy(model)
        mine.layer.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
        Trainer(mine, F.cross_entropy, sgd, sample, PLANS["2x2"], transport=transport)

    with pytest.raises(PlanError, match=r"hook on the gradient of layer\.weight, of which each"):
        run(4, work)


# --- short batches -------------------------------------------------------------------------------


def images_and(target: str, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for n in sizes:
        x = torch.randn(n, 3, 5, 4, generator=generator).to(dtype)
        y = torch.arange(n) % 4 if target == "classes" else torch.rand(n, 4).to(dtype)
        found.append((x, y))
    return found


def classifier() -> nn.Module:
    torch.manual_seed(4)
    stem = [conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1), conv(4, 4)]
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


LOSSES: dict[str, tuple[str, Any]] = {
    "cross entropy": ("classes", F.cross_entropy),
    "weighted": ("classes", nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5, 3.0]))),
    "smoothed sum": ("classes", nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1)),
    "mse": ("numbers", F.mse_loss),
    "bce": ("numbers", F.binary_cross_entropy_with_logits),
    "own": ("numbers", lambda o, t: ((o - t) ** 2).sum(1).mean() + o.std()),
}
SLICES = {
    "2 slices": Plan(stages=2, spatial=[(2, 1)], local_dp=2, micro_batches=2),
    "4 slices": Plan(stages=3, spatial=[(1, 2)], local_dp=4, micro_batches=1),
    "slices, two directions": Plan(stages=2, spatial=[(1, 2)], local_dp=2, schedule="gems"),
    "slices, two copies": Plan(stages=2, spatial=[(2, 1)], local_dp=2, micro_batches=1, data=2),
    "more tiles than rows": Plan(stages=1, spatial=(6, 1), schedule="sequential"),
}


def with_own_loss(model: nn.Module, data: list[Any], plan: Plan, loss: Any, **options: Any) -> Any:
    """Every rank has a loss of its own, which may be a module."""

    def work(transport: Any) -> Any:
        mine = copy.deepcopy(loss)
        return exact.trained(transport, copy.deepcopy(model), data, plan, mine, **options)

    with mock.patch("gems.torch.tracing.trace.record", exact.Recordings()):
        return exact.join(run(plan.world, work))


@pytest.mark.parametrize("precision", ["float64", "bf16"])
@pytest.mark.parametrize("plan", SLICES)
def test_short_last_batches_over_slices_are_exact(plan: str, precision: str) -> None:
    """A slice may have no sample, and under autocast must send numbers of the same type."""
    sixty_four = precision == "float64"
    dtype = torch.float64 if sixty_four else torch.float32
    model, options = classifier().to(dtype), {} if sixty_four else {"precision": "bf16"}
    for name in LOSSES if plan == "4 slices" else ("cross entropy", "own"):
        target, loss = LOSSES[name]
        loss = copy.deepcopy(loss).to(dtype) if isinstance(loss, nn.Module) else loss
        data = images_and(target, (4, 1) if name == "cross entropy" else (3, 2), dtype)
        found = with_own_loss(model, data, SLICES[plan], loss, **options)
        if sixty_four:
            assert_equal(found, plainly(model, data, SLICES[plan].total, loss))
        else:
            theirs = planned_alone(model, data, SLICES[plan].total, loss, **options)
            assert found.losses == pytest.approx(theirs.losses, rel=0.05), name


def test_cells_that_count_are_counted_exactly_in_bfloat16() -> None:
    """There are 17 x 19 = 323 cells, which bfloat16 rounds to 324."""
    torch.manual_seed(0)
    model = conv(3, 4, 1)
    x, y = torch.randn(1, 3, 17, 19), torch.arange(17 * 19).view(1, 17, 19) % 4
    plan = Plan(stages=1, spatial=(2, 1), schedule="sequential")
    found = planned(model, [(x, y)], plan, F.cross_entropy, precision="bf16")
    theirs = planned_alone(model, [(x, y)], 1, F.cross_entropy, precision="bf16")
    assert found.losses == pytest.approx(theirs.losses, rel=1e-5)


class Hooks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        if x.requires_grad:
            x.register_hook(lambda g: g / (1 + g.norm()))
        return x


def test_a_hook_that_forward_puts_on_a_tile_is_rejected() -> None:
    """Story: it was put on a gathered copy that nothing reads, and never ran."""
    model = nn.Sequential(conv(3, 4), Hooks(), nn.Flatten(), nn.Linear(4 * 5 * 4, 4)).double()
    data = images_and("classes", (2,), torch.float64)
    with pytest.raises(PlanError, match=r"puts a hook on a tensor of which each rank has a tile"):
        planned(model, data, Plan(stages=1, spatial=(2, 1), schedule="sequential"))
    after = Plan(stages=[["0"], ["1", "2", "3"]], spatial=[(2, 1)], schedule="sequential")
    assert_equal(planned(model, data, after), plainly(model, data, after.total))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=1, spatial=(3, 1), schedule="sequential"),
        Plan(stages=1, spatial=(3, 1), schedule="sequential", recompute="always"),
        Plan(stages=1, spatial=(3, 1), schedule="sequential", recompute=["1", "2", "3"]),
        Plan(stages=2, spatial=[(3, 1)], micro_batches=2),
    ],
)
def test_a_rank_without_cells_comes_to_the_exchanges_of_a_checkpoint_region(
    plan: Plan, reentrant: bool
) -> None:
    """Story: torch recomputes where a saved tensor is asked for, and it had saved none."""

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = conv(4, 4), conv(4, 4)

        def inner(self, x: Tensor) -> Tensor:
            return self.last(F.interpolate(self.first(x), (2, 7), mode="bicubic"))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 4), Region(), nn.Flatten(), nn.Linear(4 * 2 * 7, 4)).double()
    data = images_and("classes", (2, 2), torch.float64)
    assert_equal(planned(model, data, plan), plainly(model, data, plan.total))
