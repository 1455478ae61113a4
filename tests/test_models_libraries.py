"""Networks of other people's libraries, by name: built, cut, and as exact as our own.

MONAI is always here; the others where they are installed.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gems import models
from gems.models import libraries
from gems.plans.plan import Plan
from tests.exact import assert_equal, batches, plainly, planned

CLASSES = 3
PIPELINE = Plan(stages=2, micro_batches=2, schedule="1f1b")
TILES = Plan(stages=2, micro_batches=2, schedule="1f1b", spatial=[(2, 1)])

# Thin, with every kind of block that the real thing has: options, and which plans.
NETWORKS: dict[str, tuple[dict[str, Any], tuple[Plan, ...]]] = {
    "monai/UNet": ({"channels": (4, 8, 8), "strides": (2, 2)}, (PIPELINE, TILES)),
    "monai/SegResNet": (
        {"init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
        (PIPELINE, TILES),
    ),
    "monai/DenseNet121": (
        {"init_features": 8, "growth_rate": 4, "block_config": (2, 2)},
        (PIPELINE,),
    ),
    "monai/AttentionUnet": ({"channels": (4, 8, 8), "strides": (2, 2)}, (PIPELINE,)),
    "monai/UNETR": (
        {"image_size": 32, "hidden_size": 8, "mlp_dim": 8, "num_heads": 2, "feature_size": 4},
        (PIPELINE,),
    ),
    "transformers/resnet": (
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]},
        (PIPELINE, TILES),
    ),
    "transformers/convnext": (
        {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2, "layer_scale_init_value": 0.1},
        (PIPELINE,),
    ),
    "transformers/vit": (
        {"image_size": 32, "patch_size": 8, "hidden_size": 8, "intermediate_size": 8}
        | {"num_hidden_layers": 2, "num_attention_heads": 2},
        (PIPELINE,),
    ),
    "transformers/segformer": (
        {"hidden_sizes": [4, 4, 8, 8], "depths": [1, 1, 1, 1], "decoder_hidden_size": 8}
        | {"num_attention_heads": [1, 1, 2, 2], "drop_path_rate": 0.0}
        | {"classifier_dropout_prob": 0.0},
        (PIPELINE,),
    ),
    "timm/resnet18": ({"channels": (4, 4, 8, 8)}, (PIPELINE,)),
    "torchvision/resnet18": ({}, (PIPELINE,)),
    "smp/Unet": (
        {"encoder_name": "resnet18", "encoder_depth": 3, "decoder_channels": (8, 8, 4)},
        (PIPELINE,),
    ),
}
CASES = [(name, plan) for name, (_, plans) in NETWORKS.items() for plan in plans]


def installed(library: str) -> bool:
    try:
        return bool(libraries.names(library))
    except ValueError as error:
        assert library != "monai", f"MONAI is what these tests stand on: {error}"
        return False


def need(library: str) -> None:
    if not installed(library):
        pytest.skip(f"{library} is not installed, or does not import beside this torch")


def network(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return models.build(name, num_classes=CLASSES, **(NETWORKS[name][0] | channels(name) | more))


def channels(name: str) -> dict[str, int]:
    return {"in_channels": 3} if "in_channels" in models.options_of(name) else {}


def one_class(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy with one class for the image, or for each of its pixels."""
    return cross_entropy(output, target.view(-1, *[1] * (output.dim() - 2)).expand(
        -1, *output.shape[2:]
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "plan"), CASES, ids=[f"{n}, {'tiles' if p.spatial else 'stages'}" for n, p in CASES]
)
def test_a_library_s_network_trains_like_the_plain_one(name: str, plan: Plan) -> None:
    need(name.partition("/")[0])
    model = network(name).double()
    data = batches((4, 3, 32, 32), CLASSES, 1, torch.float64)
    assert_equal(planned(model, data, plan, one_class), plainly(model, data, 2, one_class))


def test_a_volume_of_monai_is_cut_in_depth() -> None:
    torch.manual_seed(0)
    thin = {"channels": (2, 4), "strides": (2,)}
    model = models.build("monai/UNet", num_classes=CLASSES, in_channels=1, dims=3, **thin).double()
    data = batches((2, 1, 10, 8, 6), CLASSES, 1, torch.float64)
    data = [(x, y.view(-1, 1, 1, 1).expand(-1, 10, 8, 6)) for x, y in data]
    plan = Plan(stages=1, micro_batches=2, schedule="sequential", spatial=[(2, 1, 1)])
    assert_equal(planned(model, data, plan), plainly(model, data, 2))


# --- names and options ------------------------------------------------------------------------


def test_our_words_reach_the_library_under_its_own() -> None:
    model = models.build("monai/SegResNet", num_classes=5, in_channels=2, dims=3, init_filters=8)
    assert model(torch.zeros(1, 2, 16, 16, 16)).shape == (1, 5, 16, 16, 16)
    model = models.build("monai/DenseNet121", num_classes=5, in_channels=2, block_config=(1, 1))
    assert model(torch.zeros(2, 2, 32, 32)).shape == (2, 5)


def test_every_network_of_monai_says_what_it_takes() -> None:
    names = libraries.names("monai")
    assert {"monai/UNet", "monai/SegResNet", "monai/DenseNet121", "monai/SwinUNETR"} <= set(names)
    assert all(models.options_of(name) is not None for name in names)
    known = models.options_of("monai/DenseNet121")
    assert known[:3] == ("num_classes", "in_channels", "dims")
    assert "growth_rate" in known and "dropout_prob" in known  # of the class above, too
    assert not {"out_channels", "spatial_dims"} & set(known), "one word for one thing"


def test_transformers_give_logits_and_keep_their_names_of_weights() -> None:
    need("transformers")
    model = network("transformers/vit")
    assert "vit.embeddings.cls_token" in model.state_dict()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, CLASSES)
    picture = torch.zeros(2, 3, 40, 56)
    segmenter = network("transformers/segformer")
    assert segmenter(picture).shape == (2, CLASSES, 40, 56)
    assert segmenter(pixel_values=picture).shape == (2, CLASSES, 40, 56)
    assert network("transformers/segformer", task="classification")(picture).shape == (2, CLASSES)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("monai/unet", {}, r"monai has no model 'unet'; did you mean UNet"),
        ("monai/UNet", {"floors": 3}, r"no option floors; it takes num_classes, in_channels"),
        ("monai/UNet", {"out_channels": 3}, r"no option out_channels; it takes num_classes"),
        ("monai/DynUNet", {"num_classes": 3, "in_channels": 1}, r"also needs kernel_size, strides"),
        (
            "monai/UNet",
            {"num_classes": 3, "in_channels": 1, "strides": (1,)},
            r"strides=\(1,\) can",
        ),
        ("transformers/vitt", {}, r"transformers has no model 'vitt'; did you mean vit"),
        ("transformers/vit", {"floors": 3}, r"no option floors; it takes num_classes"),
        ("transformers/vit", {"return_dict": False}, r"no option return_dict"),
        ("transformers/vit", {"task": "segmentation"}, r"task is 'segmentation'; it does classif"),
        ("timm/resnet18", {"floors": 3}, r"unexpected keyword argument 'floors'"),
        ("jax/vit", {}, r"no library 'jax'; choose one of transformers/\.\.\., monai/\.\.\."),
    ],
)
def test_what_a_library_does_not_have_is_said(
    name: str, options: dict[str, Any], words: str
) -> None:
    if name.partition("/")[0] in libraries.LIBRARIES:
        need(name.partition("/")[0])
    with pytest.raises(ValueError, match=words):
        models.build(name, **options)


ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"transformers", "monai", "timm", "torchvision",
                                      "segmentation_models_pytorch", "keras"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from gems.models import libraries
assert "torch" not in sys.modules
for name in libraries.LIBRARIES:
    try:
        libraries.names(name)
    except ValueError as error:
        print(error)
"""


def test_a_library_that_is_not_installed_is_named_with_the_command() -> None:
    done = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.partition(" need ")[0] for line in done.stdout.splitlines()] == [
        f"models of {library}" for library in libraries.LIBRARIES
    ]
    for line, package in zip(done.stdout.splitlines(), libraries.LIBRARIES.values(), strict=True):
        assert line.endswith(f"which is not installed: pip install {package}")
