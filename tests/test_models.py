"""The plain networks: as large as published, and they train."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from gems import models
from gems.models.amoebanet import Halve, StochasticDepth
from tests.networks import NETWORKS, build

FOLDER = Path(models.__file__).parent

# Small enough for a few milliseconds: options, input shape, output shape.
TINY = {
    "resnet_v1": ({"depth": 8, "width": 4}, (2, 3, 16, 16), (2, 10)),
    "resnet_v2": ({"depth": 11, "width": 4}, (2, 3, 16, 16), (2, 10)),
    "resnet50": ({"num_classes": 5, "width": 4, "layers": (1, 2, 1)}, (2, 3, 33, 31), (2, 5)),
    "resnet101": ({"num_classes": 5, "width": 2}, (2, 3, 33, 31), (2, 5)),
    "resnet152": ({"num_classes": 5, "width": 1}, (2, 3, 33, 31), (2, 5)),
    "densenet121": (
        {"num_classes": 5, "growth": 4, "layers": (2, 3), "width": 8},
        (2, 3, 32, 32),
        (2, 5),
    ),
    "amoebanet_d": (
        {"num_layers": 3, "num_filters": 8, "num_classes": 5},
        (2, 3, 37, 30),
        (2, 5),
    ),
    "convolution": ({"width": 4, "halo": 2, "num_classes": 5}, (2, 3, 9, 8), (2, 5)),
    "unet": ({"width": 4, "levels": 3}, (1, 3, 13, 18), (1, 2, 13, 18)),
    "relaynet": ({"width": 4, "num_classes": 5}, (1, 1, 21, 19), (1, 5, 21, 19)),
    "cosmoflow": ({"image_size": 32, "width": 2}, (2, 4, 32, 32, 32), (2, 4)),
    "cosmoflow_mlperf": ({"image_size": 9, "width": 2}, (2, 4, 9, 9, 9), (2, 4)),
    "efficientnet_b0": (
        {
            "num_classes": 5,
            "groups": ((1, 8, 1, 1, 3), (6, 8, 2, 2, 5)),
            "stem": 8,
            "head": 16,
            "drop_path": 0.0,
        },
        (2, 3, 32, 32),
        (2, 5),
    ),
    "convnext_tiny": (
        {"num_classes": 5, "depths": (1, 2), "dims": (8, 16)},
        (2, 3, 32, 32),
        (2, 5),
    ),
    "vit_base": (
        {"num_classes": 5, "image_size": 16, "patch": 8, "width": 16, "depth": 2, "heads": 2},
        (2, 3, 16, 16),
        (2, 5),
    ),
}


def parameter_count(name: str, **options: object) -> int:
    with torch.device("meta"):
        model = build(name, **options)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "published"),
    [
        ("resnet110_v2", {}, 3_291_610),
        ("resnet1001_v2", {}, 30_251_290),
        ("resnet1001_v2", {"bias": True}, 30_347_658),
        ("resnet50", {}, 25_557_032),
        ("resnet101", {}, 44_549_160),
        ("resnet152", {}, 60_192_808),
        ("densenet121", {}, 7_978_856),
        ("amoebanet_d", {"num_layers": 18, "num_filters": 208}, 81_505_540),
        ("amoebanet_d", {"num_layers": 18, "num_filters": 256}, 122_470_120),
        ("amoebanet_d", {"num_layers": 18, "num_filters": 416}, 319_024_120),
        ("unet", {"in_channels": 1, "num_classes": 1, "norm": "none"}, 31_030_593),
        ("efficientnet_b0", {}, 5_288_548),
        ("convnext_tiny", {}, 28_589_128),
        ("vit_base", {}, 86_567_656),
    ],
)
def test_parameter_counts_are_the_published_ones(
    name: str, options: dict[str, object], published: int
) -> None:
    assert parameter_count(name, **options) == published


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (56, 0.86), (110, 1.73)])
def test_resnet_v1_has_the_papers_millions_of_parameters(depth: int, millions: float) -> None:
    assert parameter_count("resnet_v1", depth=depth) == pytest.approx(millions * 1e6, rel=0.02)


def test_relaynet_has_the_parameters_that_its_paper_describes() -> None:
    """No count is published: seven 7x3 convolutions with biases and norms, and one of 1x1."""
    inputs = [1, 64, 64, 64, 128, 128, 128]
    blocks = sum(7 * 3 * channels * 64 + 64 + 2 * 64 for channels in inputs)
    for classes in (8, 10):
        assert parameter_count("relaynet", num_classes=classes) == blocks + 65 * classes
    convolutions = [m for m in build("relaynet").modules() if isinstance(m, nn.Conv2d)]
    assert [c.kernel_size for c in convolutions] == [(7, 3)] * 7 + [(1, 1)]


def test_cosmoflow_of_mlperf_has_the_parameters_of_the_reference_code() -> None:
    channels = [4, 32, 64, 128, 256, 512]
    convolutions = sum(2**3 * a * b + b for a, b in pairwise(channels))
    linear = sum(a * b + b for a, b in pairwise([512 * 4**3, 128, 64, 4]))
    assert parameter_count("cosmoflow_mlperf") == convolutions + linear


@pytest.mark.parametrize("side", [128, 256, 512])
def test_cosmoflow_has_the_papers_millions_of_parameters_for_every_cube(side: int) -> None:
    assert parameter_count("cosmoflow", image_size=side) == pytest.approx(9.44e6, rel=5e-4)


def test_cosmoflow_leaves_a_cube_of_two_whatever_the_size() -> None:
    for side in (32, 33, 50, 64, 65):
        model = build("cosmoflow", image_size=side, width=1, in_channels=1)
        volume = torch.empty(1, 1, side, side, side)
        assert model.blocks(volume).shape == (1, 16, 2, 2, 2)


def test_the_numbers_of_a_cosmoflow_lie_within_its_bound() -> None:
    torch.manual_seed(0)
    options = {"image_size": 8, "width": 2, "norm": "batch", "dropout": 0.0}
    cubes = 100 * torch.randn(4, 4, 8, 8, 8)
    free = build("cosmoflow_mlperf", bound=0.0, **options)
    bound = build("cosmoflow_mlperf", **options)
    bound.load_state_dict(free.state_dict())
    torch.testing.assert_close(bound(cubes), 1.2 * torch.tanh(free(cubes)))


def test_relaynet_puts_maxima_back_where_they_were() -> None:
    # With one level and blocks that do nothing, the head sees the image and its maxima.
    model = build("relaynet", width=1, levels=1, num_classes=2)
    model.encoder[0] = model.bottom = model.decoder[0] = nn.Identity()
    model.head = nn.Identity()
    image = torch.tensor([[1.0, 5.0, 2.0], [3.0, 4.0, 9.0]])
    skip, unpooled = model(image[None, None])[0]
    assert torch.equal(skip, image)
    assert torch.equal(unpooled, torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("name", "options", "faults"),
    [
        ("relaynet", {"levels": 0, "kernel": (4, 3)}, r"levels is 0.*kernel is \(4, 3\)"),
        ("cosmoflow", {"image_size": 16, "norm": "x"}, r"image_size is 16, not 32.*norm is 'x'"),
        ("cosmoflow_mlperf", {"image_size": 4, "bound": -1}, r"image_size is 4.*bound is -1"),
        ("resnet50", {"norm": "x", "layers": (2, 0)}, r"norm is 'x'.*layers is \(2, 0\)"),
    ],
)
def test_a_network_says_everything_that_is_wrong_at_once(
    name: str, options: dict[str, object], faults: str
) -> None:
    with pytest.raises(ValueError, match=faults):
        build(name, **options)


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    options, shape, expected = TINY[name]
    torch.manual_seed(0)
    model = build(name, **options)
    output = model(torch.randn(shape))
    assert output.shape == expected
    output.square().mean().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize("name", TINY)
def test_every_family_takes_other_classes_and_channels(name: str) -> None:
    options, shape, _ = TINY[name]
    model = build(name, **{**options, "num_classes": 7, "in_channels": 4})
    assert model(torch.randn(2, 4, *shape[2:])).shape[1] == 7


def test_every_family_has_a_tiny_one_in_these_tests() -> None:
    assert {*models.MODELS, *NETWORKS} == {*TINY, "resnet110_v2", "resnet1001_v2"}


def test_resnet_v2_is_a_sequence_of_stem_bottlenecks_and_head() -> None:
    model = build("resnet_v2", depth=20)
    names = [name for name, _ in model.named_children()]
    assert names == [
        "stem", "block1_1", "block1_2", "block2_1", "block2_2", "block3_1", "block3_2", "head"
    ]  # fmt: skip
    assert len(build("resnet110_v2")) == 1 + 36 + 1


def test_resnet_v2_projects_on_first_blocks_and_skips_the_first_activation() -> None:
    model = build("resnet_v2", depth=20)
    blocks = [m for name, m in model.named_children() if name.startswith("block")]
    assert [isinstance(b.shortcut, nn.Conv2d) for b in blocks] == [True, False] * 3
    assert [isinstance(b.norm1, nn.BatchNorm2d) for b in blocks] == [False, *[True] * 5]
    assert [b.conv1.stride[0] for b in blocks] == [1, 1, 2, 1, 2, 1]
    assert [(b.conv2.out_channels, b.conv3.out_channels) for b in blocks[::2]] == [
        (16, 64), (64, 128), (128, 256)
    ]  # fmt: skip


def test_heads_give_logits_and_no_softmax() -> None:
    torch.manual_seed(0)
    scores = build("resnet_v2", depth=11, width=4)(torch.randn(2, 3, 8, 8))
    assert (scores < 0).any()


@pytest.mark.parametrize(("name", "depth", "remedy"), [("v1", 21, "20 or 26"), ("v2", 1, "11")])
def test_a_depth_that_cannot_be_names_the_nearest_that_can(
    name: str, depth: int, remedy: str
) -> None:
    with pytest.raises(ValueError, match=remedy):
        build(f"resnet_{name}", depth=depth)


def test_resnet50_with_group_norm_treats_samples_alone() -> None:
    torch.manual_seed(0)
    model = build("resnet50", norm="group", width=4, layers=(1, 1), num_classes=3)
    batch = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(model(batch)[:1], model(batch[:1]))


def test_resnet50_names_its_children_as_shared_weights_do() -> None:
    with torch.device("meta"):
        keys = build("resnet50").state_dict().keys()
    assert {
        "conv1.weight",
        "layer1.0.downsample.1.running_mean",
        "layer4.2.bn3.bias",
        "fc.bias",
    } <= (set(keys))


def amoebanet(**options: object) -> nn.Sequential:
    torch.manual_seed(0)
    small = {"num_layers": 3, "num_filters": 8, "num_classes": 5}
    return build("amoebanet_d", **{**small, **options})


def test_amoebanet_is_a_sequence_of_runs_of_normal_cells_with_reductions_before_and_between() -> (
    None
):
    names = [name for name, _ in amoebanet(num_layers=6).named_children()]
    assert names == [
        "stem", "stem_1", "stem_2", "normal1_1", "normal1_2", "reduction1", "normal2_1",
        "normal2_2", "reduction2", "normal3_1", "normal3_2", "head"
    ]  # fmt: skip


@pytest.mark.parametrize("side", [32, 33, 47, 64])
def test_amoebanet_halves_five_times_whatever_the_size(side: int) -> None:
    model = amoebanet()
    sizes = {}
    for name, cell in model.named_children():
        cell.register_forward_hook(lambda _, __, y, name=name: sizes.update({name: y[0].shape}))
    model(torch.randn(2, 3, side, side + 3))
    half = [-(-side // 2**n) for n in range(6)]
    assert [sizes[n][-2] for n in ("stem_1", "stem_2", "normal1_1")] == [half[2], half[3], half[3]]
    assert [sizes[n][-2] for n in ("reduction1", "reduction2", "normal3_1")] == [
        half[4], half[5], half[5]
    ]  # fmt: skip
    # F/2, F, F, 2F, 2F, 4F, 4F inside; three or four of them side by side.
    assert [sizes[n][1] for n in ("stem_1", "normal2_1", "normal3_1")] == [12, 64, 128]


def test_the_halving_of_amoebanet_sees_every_cell_once() -> None:
    x = torch.rand(1, 1, 6, 6, requires_grad=True)
    halve = Halve(1, 2).eval()
    nn.init.ones_(halve.even.weight)
    nn.init.ones_(halve.odd.weight)
    even, odd = halve(x)[0] * (1 + halve.norm.eps) ** 0.5
    torch.testing.assert_close(even, x[0, 0, ::2, ::2])
    torch.testing.assert_close(odd, x[0, 0, 1::2, 1::2])


def test_the_second_head_of_amoebanet_speaks_in_training_only() -> None:
    model, image = amoebanet(aux_head=True), torch.randn(2, 3, 64, 64)
    logits, second = model(image)
    assert logits.shape == second.shape == (2, 5)
    (logits.square().mean() + 0.4 * second.square().mean()).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.eval()(image).shape == (2, 5)


def test_amoebanet_skips_operations_in_training_only_and_later_cells_more() -> None:
    model, image = amoebanet(drop_path=0.5), torch.randn(2, 3, 32, 32)
    assert not torch.equal(model(image), model(image))
    model.eval()
    assert torch.equal(model(image), model(image))
    chances = [cell.drop_path.p for cell in model if hasattr(cell, "drop_path")]
    assert chances == pytest.approx([0.5 * i / 7 for i in range(1, 8)])


def test_amoebanet_says_everything_that_is_wrong_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"num_layers 4 .*multiple of 3; num_filters 12 .*drop_path"
    ):
        amoebanet(num_layers=4, num_filters=12, drop_path=1.0)


@pytest.mark.parametrize("name", ["unet", "relaynet"])
def test_an_image_too_small_to_be_halved_so_often_is_refused(name: str) -> None:
    model = build(name, width=2, levels=3, in_channels=1, num_classes=2)
    least = 8 if name == "relaynet" else 4
    assert model(torch.randn(2, 1, least + 1, least)).shape == (2, 2, least + 1, least)
    words = f"image of 9x{least - 1} cannot be halved {least.bit_length() - 1} times; take sides of"
    with pytest.raises(ValueError, match=words):
        model(torch.randn(2, 1, 9, least - 1))


def test_unet_runs_on_volumes_with_odd_sides() -> None:
    model = build("unet", dims=3, width=2, levels=3, in_channels=1)
    assert model(torch.randn(1, 1, 9, 6, 7)).shape == (1, 2, 9, 6, 7)


def test_unet_says_everything_that_is_wrong_at_once() -> None:
    with pytest.raises(ValueError, match=r"dims is 4.*levels is 0.*norm is 'layer'"):
        build("unet", dims=4, levels=0, norm="layer")


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    drop = StochasticDepth(0.25)
    kept = drop(torch.ones(4000, 2, 2))
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (kept.flatten(1).amin(1) == kept.flatten(1).amax(1)).all()
    assert kept.mean().item() == pytest.approx(1.0, abs=0.05)
    assert torch.equal(drop.eval()(kept), kept)


@pytest.mark.parametrize("name", ["efficientnet_b0", "vit_base", "densenet121"])
def test_dropout_is_random_in_training_and_absent_in_evaluation(name: str) -> None:
    options, shape, _ = TINY[name]
    model = build(name, **{**options, "dropout": 0.5})
    x = torch.randn(shape)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no model 'alexnet'.*resnet110_v2.*unet"):
        build("alexnet")


def test_an_unknown_option_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no option image_size; it takes depth, num_classes"):
        build("resnet_v2", image_size=32)


def test_the_table_of_models_loads_no_framework() -> None:
    code = "import sys, gems.models; assert gems.models.MODELS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=FOLDER.parent.parent).returncode == 0


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_a_library_is_answered_with_its_name_there(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' comes from a library: write timm/{name}"):
        models.build(name)


def test_models_never_import_gems() -> None:
    for file in FOLDER.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "import gems" not in text and "from gems" not in text, file.name
