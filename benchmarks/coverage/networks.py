# ruff: noqa: E501, E731
"""The networks of the survey: of five libraries, as small as their constructors allow, unweighted."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
CLASSES = 5


@dataclass(frozen=True)
class Case:
    """A network, and inputs for it: `inputs(samples)` gives a tensor, a tuple or a dict."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    dims: int = 2  # of the image; 0: no image, so no tiles
    dtype: torch.dtype = torch.float64  # float32 where the library's own code insists on it

    @property
    def title(self) -> str:
        return f"{self.library}/{self.name}"


def picture(*shape: int) -> Callable[[int], Tensor]:
    return lambda samples: torch.randn(samples, *shape, dtype=torch.float64)


def cases() -> Iterator[Case]:
    for library in (timm, torchvision, monai, smp, transformers):
        yield from library()


# --- timm: the smallest of each of its modules -------------------------------------------------

VIT = {"embed_dim": 32, "depth": 3, "num_heads": 2, "img_size": 64}
STAGED = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "beit_base_patch16_224": (64, VIT),
    "beitv2_base_patch16_224": (64, VIT),
    "botnet26t_256": (128, {"img_size": 128}),
    "halonet26t": (256, {}),
    "lambda_resnet26t": (128, {"img_size": 128}),
    "test_byobnet": (64, {}),
    "gernet_s": (64, {}),
    "mobileone_s0": (64, {}),
    "repvgg_a0": (64, {}),
    "resnet26t": (64, {}),
    "cait_xxs24_224": (64, {**VIT, "depth": 2}),
    "coat_lite_tiny": (64, {"img_size": 64}),
    "coat_tiny": (64, {"img_size": 64}),
    "convit_tiny": (64, {**VIT, "num_heads": 4}),
    "convnext_tiny": (64, STAGED),
    "convnext_tiny_hnf": (64, STAGED),
    "convnextv2_tiny": (64, STAGED),
    "convnextv2_atto": (64, STAGED),
    "cpubone_nano": (64, {}),
    "crossvit_tiny_240": (240, {"embed_dim": (16, 32), "num_heads": (2, 2)}),
    "csatv2": (64, {}),
    "cs3darknet_s": (64, {}),
    "cspresnet50": (64, {}),
    "darknet17": (64, {}),
    "davit_tiny": (64, {"depths": (1, 1, 2, 1), "embed_dims": (16, 32, 48, 64), "num_heads": (2, 2, 2, 2)}),
    "deit_tiny_patch16_224": (64, VIT),
    "deit_tiny_distilled_patch16_224": (64, VIT),
    "deit3_small_patch16_224": (64, VIT),
    "densenet121": (64, {"growth_rate": 8, "block_config": (2, 2, 3, 2)}),
    "densenetblur121d": (64, {"growth_rate": 8, "block_config": (2, 2, 3, 2)}),
    "dla34": (64, {}),
    "dla60_res2net": (64, {}),
    "dpn48b": (64, {}),
    "edgenext_xx_small": (64, {}),
    "efficientformer_l1": (224, {}),
    "efficientformerv2_s0": (64, {"img_size": 64}),
    "test_efficientnet": (64, {}),
    "efficientnet_b0": (64, {}),
    "mnasnet_small": (64, {}),
    "mixnet_s": (64, {}),
    "tinynet_e": (64, {}),
    "tf_efficientnetv2_b0": (65, {}),
    "efficientvim_m1": (64, {}),
    "efficientvit_b0": (64, {}),
    "efficientvit_m0": (128, {"img_size": 128}),
    "eva02_tiny_patch14_224": (56, {**VIT, "img_size": 56}),
    "vit_pe_core_tiny_patch16_384": (64, {"img_size": 64, "depth": 3}),
    "vit_small_patch16_dinov3": (64, {**VIT, "embed_dim": 64}),
    "vit_small_patch16_rope_224": (64, {**VIT, "embed_dim": 64}),
    "fasternet_t0": (64, {}),
    "fastvit_t8": (64, {}),
    "gcvit_xxtiny": (64, {"img_size": 64}),
    "ghostnet_050": (64, {}),
    "ghostnetv2_100": (64, {}),
    "ghostnetv3_050": (64, {}),
    "hardcorenas_a": (64, {}),
    "hgnet_tiny": (64, {}),
    "hgnetv2_b0": (64, {}),
    "hiera_tiny_224": (64, {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 2, 1)}),
    "hieradet_small": (64, {"embed_dim": 16}),
    "hrnet_w18_small": (64, {}),
    "iformer_t": (64, {}),
    "inception_next_atto": (64, {}),
    "inception_resnet_v2": (96, {}),
    "inception_v3": (96, {}),
    "inception_v4": (96, {}),
    "lcnetv2_small": (64, {}),
    "lcnet_050": (64, {}),
    "levit_128": (64, {"img_size": 64}),
    "levit_conv_128s": (64, {"img_size": 64}),
    "lowformer_b0": (64, {}),
    "test_mambaout": (64, {}),
    "mambaout_femto": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mobilenetv4_conv_small_035": (64, {}),
    "mobilenetv4_hybrid_medium": (64, {}),
    "mobilenetv2_050": (64, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "naflexvit_base_patch16_gap": (64, {"embed_dim": 32, "depth": 3, "num_heads": 2}),
    "nextvit_small": (64, {}),
    "test_nfnet": (64, {}),
    "nf_resnet26": (64, {}),
    "pit_ti_224": (64, {"img_size": 64}),
    "pnasnet5large": (96, {}),
    "pvt_v2_b0": (64, {}),
    "rdnet_tiny": (64, {}),
    "regnetx_002": (64, {}),
    "regnety_002": (64, {}),
    "regnetz_005": (64, {}),
    "repghostnet_050": (64, {}),
    "repvit_m0_9": (64, {}),
    "res2net50_26w_4s": (64, {"layers": (1, 1, 1, 1)}),
    "resnest14d": (64, {}),
    "test_resnet": (64, {}),
    "resnet18": (64, {}),
    "resnet18d": (64, {}),
    "resnext26ts": (64, {}),
    "resnetblur18": (64, {}),
    "seresnet18": (64, {}),
    "ecaresnet26t": (64, {}),
    "resnetrs50": (64, {"layers": (1, 1, 1, 1)}),
    "resnetv2_18": (64, {}),
    "resnetv2_50x1_bit": (64, {}),
    "rexnet_100": (64, {}),
    "selecsls42": (64, {}),
    "legacy_seresnet18": (64, {}),
    "sequencer2d_s": (64, {"layers": (1, 1, 2, 1)}),
    "shvit_s1": (128, {}),
    "skresnet18": (64, {}),
    "starnet_s050": (64, {}),
    "swiftformer_xs": (64, {}),
    "swin_tiny_patch4_window7_224": (64, {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}),
    "swinv2_cr_tiny_224": (64, {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}),
    "tiny_vit_5m_224": (64, {"depths": (1, 1, 2, 1)}),
    "tnt_s_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "tresnet_m": (64, {"layers": (1, 1, 1, 1)}),
    "twins_svt_small": (64, {"img_size": 64, "depths": (2, 2, 2, 2)}),
    "twins_pcpvt_small": (64, {"img_size": 64, "depths": (1, 1, 2, 1)}),
    "vgg11": (64, {"mlp_ratio": 0.03}),
    "vgg11_bn": (64, {"mlp_ratio": 0.03}),
    "visformer_tiny": (64, {"img_size": 64}),
    "vit_tiny_patch16_224": (64, VIT),
    "vit_medium_patch16_gap_240": (64, VIT),
    "vit_small_patch14_reg4_dinov2": (56, {**VIT, "img_size": 56}),
    "vit_tiny_r_s16_p8_224": (64, {"img_size": 64, "depth": 2}),
    "vit_relpos_small_patch16_224": (64, VIT),
    "vit_srelpos_small_patch16_224": (64, VIT),
    "samvit_base_patch16_224": (64, {**VIT, "window_size": 2}),
    "vitamin_small_224": (64, {"img_size": 64, "depth": 2}),
    "ese_vovnet19b_slim": (64, {}),
    "legacy_xception": (96, {}),
    "xception41": (96, {}),
    "xcit_tiny_12_p8_224": (64, {"depth": 2}),
    "qwen3_vit_88m": (64, {"embed_dim": 64, "depth": 2, "num_heads": 2}),
    "gemma4_vit_167m": (96, {"embed_dim": 64, "depth": 2, "num_heads": 2}),
    "deepseek_vit_412m": (56, {"embed_dim": 64, "depth": 2, "num_heads": 2}),
    "mobilenetv5_300m": (64, {"channel_multiplier": 0.125}),
}  # fmt: skip


def _timm_classes() -> dict[str, tuple[int, Callable[[], nn.Module]]]:
    """Networks whose entry points fix their size, from the classes behind them."""
    get: Any = lambda name: importlib.import_module(f"timm.models.{name}")
    small: dict[str, Any] = {"num_classes": CLASSES}
    staged = {**small, "depths": (1, 1, 2, 1), "dims": (32, 32, 64, 64)}
    meta, mlp, maxx, mvit = (get(n) for n in ("metaformer", "mlp_mixer", "maxxvit", "mvitv2"))
    mixer = {**small, "img_size": 64, "num_blocks": 3, "embed_dim": 32}

    def maxxvit(kind: str, width: int = 32) -> nn.Module:
        found = maxx.model_cfgs[kind]
        sized = {"embed_dim": (width, width, 2 * width, 2 * width), "depths": (1, 1, 1, 1)}
        return maxx.MaxxVit(replace(found, **sized), img_size=64, **small)

    return {
        "ConvMixer": (64, lambda: get("convmixer").ConvMixer(16, 3, 7, 4, **small)),
        "FocalNet": (64, lambda: get("focalnet").FocalNet(embed_dim=16, depths=(1, 1, 2, 1), **small)),
        "MaxVit": (64, lambda: maxxvit("maxvit_nano_rw")),
        "MaxxVit": (64, lambda: maxxvit("maxxvit_rmlp_nano_rw", 64)),
        "CoAtNet": (64, lambda: maxxvit("coatnet_nano_rw")),
        "CoAtNeXt": (64, lambda: maxxvit("coatnext_nano_rw", 64)),
        "PoolFormer": (64, lambda: meta.MetaFormer(
            **staged, downsample_norm=None, norm_layers=meta.GroupNorm1, mlp_act=nn.GELU,
            mlp_bias=True, layer_scale_init_values=1e-5, res_scale_init_values=None,
            use_mlp_head=False,
        )),
        "ConvFormer": (64, lambda: meta.MetaFormer(
            **staged, token_mixers=meta.SepConv, norm_layers=meta.LayerNorm2dNoBias
        )),
        "CAFormer": (64, lambda: meta.MetaFormer(
            **staged, token_mixers=[meta.SepConv, meta.SepConv, meta.Attention, meta.Attention],
            norm_layers=[meta.LayerNorm2dNoBias] * 2 + [meta.LayerNormNoBias] * 2,
        )),
        "MLP-Mixer": (64, lambda: mlp.MlpMixer(**mixer)),
        "gMLP": (64, lambda: mlp.MlpMixer(
            **mixer, mlp_ratio=6, block_layer=mlp.SpatialGatingBlock, mlp_layer=mlp.GatedMlp
        )),
        "ResMLP": (64, lambda: mlp.MlpMixer(
            **mixer, mlp_ratio=4, block_layer=mlp.ResBlock, norm_layer=mlp.Affine
        )),
        "MViTv2": (64, lambda: mvit.MultiScaleVit(
            mvit.MultiScaleVitCfg(depths=(1, 1, 2, 1), embed_dim=16), img_size=64, **small
        )),
        "NesT": (64, lambda: get("nest").Nest(
            img_size=64, embed_dims=(16, 32, 48), num_heads=(2, 2, 2), depths=(1, 1, 2), **small
        )),
        "VOLO": (64, lambda: get("volo").VOLO(
            layers=(1, 1, 1, 1), img_size=64, embed_dims=(16, 32, 32, 32), num_heads=(2, 2, 2, 2),
            stem_hidden_dim=16, **small
        )),
        "NASNet-A": (96, lambda: get("nasnet").NASNetALarge(
            stem_size=16, channel_multiplier=2, num_features=384, **small
        )),
    }  # fmt: skip


def timm() -> Iterator[Case]:
    library: Any = importlib.import_module("timm")
    for name, (size, made) in _timm_classes().items():
        yield Case("timm", name, made, picture(3, size, size))
    for name, (size, options) in TIMM.items():

        def build(name: str = name, options: dict[str, Any] = options) -> nn.Module:
            return library.create_model(name, pretrained=False, num_classes=CLASSES, **options)

        yield Case("timm", name, build, picture(3, size, size))


# --- torchvision: classifiers, segmentation, video, optical flow -------------------------------

VISION: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "alexnet": ((3, 96, 96), {}),
    "vgg11": ((3, 64, 64), {}),
    "vgg11_bn": ((3, 64, 64), {}),
    "resnet18": ((3, 64, 64), {}),
    "resnext50_32x4d": ((3, 64, 64), {}),
    "squeezenet1_1": ((3, 64, 64), {}),
    "googlenet": ((3, 96, 96), {"init_weights": False}),
    "inception_v3": ((3, 96, 96), {"init_weights": False, "aux_logits": False}),
    "shufflenet_v2_x0_5": ((3, 64, 64), {}),
    "mobilenet_v2": ((3, 64, 64), {"width_mult": 0.25}),
    "mobilenet_v3_small": ((3, 64, 64), {}),
    "mnasnet0_5": ((3, 64, 64), {}),
    "efficientnet_b0": ((3, 64, 64), {}),
    "efficientnet_v2_s": ((3, 64, 64), {}),
    "regnet_x_400mf": ((3, 64, 64), {}),
    "regnet_y_400mf": ((3, 64, 64), {}),
    "convnext_tiny": ((3, 64, 64), {}),
    "vit_b_32": ((3, 64, 64), {"image_size": 64}),
    "swin_t": ((3, 64, 64), {}),
    "swin_v2_t": ((3, 64, 64), {}),
    "fcn_resnet50": ((3, 64, 64), {"weights_backbone": None}),
    "deeplabv3_mobilenet_v3_large": ((3, 64, 64), {"weights_backbone": None, "aux_loss": True}),
    "lraspp_mobilenet_v3_large": ((3, 64, 64), {"weights_backbone": None}),
    "r3d_18": ((3, 4, 32, 32), {}),
    "mc3_18": ((3, 4, 32, 32), {}),
    "r2plus1d_18": ((3, 4, 32, 32), {}),
    "swin3d_t": ((3, 4, 64, 64), {}),
}  # fmt: skip


def torchvision() -> Iterator[Case]:
    library: Any = importlib.import_module("torchvision.models")
    for name, (shape, options) in VISION.items():

        def build(name: str = name, options: dict[str, Any] = options) -> nn.Module:
            return library.get_model(name, weights=None, num_classes=CLASSES, **options)

        yield Case("torchvision", name, build, picture(*shape), len(shape) - 1)
    dense: dict[str, Any] = {"growth_rate": 8, "block_config": (2, 2, 3, 2), "num_classes": CLASSES}
    yield Case("torchvision", "DenseNet", lambda: library.DenseNet(**dense), picture(3, 64, 64))
    maxvit: dict[str, Any] = {
        "input_size": (64, 64), "stem_channels": 8, "block_channels": [8, 16], "block_layers": [1, 1],
        "head_dim": 4, "stochastic_depth_prob": 0.0, "partition_size": 4, "num_classes": CLASSES,
    }  # fmt: skip
    yield Case("torchvision", "MaxVit", lambda: library.MaxVit(**maxvit), picture(3, 64, 64))
    mvit = importlib.import_module("torchvision.models.video.mvit")
    yield Case(
        "torchvision", "mvit_v2", lambda: _mvit(mvit), picture(3, 4, 32, 32), 3,
    )  # fmt: skip
    backbone = importlib.import_module("torchvision.models.detection.backbone_utils")
    fpn = lambda: backbone.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, trainable_layers=5
    )
    yield Case("torchvision", "resnet18_fpn", fpn, picture(3, 64, 64))
    two = lambda n: (picture(3, 128, 128)(n), picture(3, 128, 128)(n))
    flow = importlib.import_module("torchvision.models.optical_flow")
    yield Case(
        "torchvision", "raft_small", lambda: flow.raft_small(weights=None), two, dtype=torch.float32
    )


def _mvit(mvit: Any) -> nn.Module:
    block = mvit.MSBlockConfig
    setting = [
        block(1, 8, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        block(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return mvit.MViT(
        (32, 32), 4, setting, residual_pool=True, residual_with_cls_embed=False,
        rel_pos_embed=True, proj_after_attn=True, num_classes=CLASSES,
    )  # fmt: skip


# --- MONAI: its networks, flat and with depth --------------------------------------------------


HIGH = [
    {"name": "conv_0", "n_features": 4, "kernel_size": 3},
    {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 1},
    {"name": "res_2", "n_features": 8, "kernels": (3, 3), "repeat": 1},
    {"name": "conv_1", "n_features": 8, "kernel_size": 1},
    {"name": "conv_2", "kernel_size": 1},
]


def monai() -> Iterator[Case]:
    nets: Any = importlib.import_module("monai.networks.nets")

    def case(
        name: str,
        dims: int,
        shape: tuple[int, ...],
        as_: str = "",
        tiled: bool = True,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> Case:
        title = as_ or f"{name} {dims}-D"
        made = lambda: getattr(nets, name)(**options)
        return Case("monai", title, made, picture(*shape), dims if tiled else 0, dtype)

    for dims, size in ((2, 32), (3, 16)):
        image = (1, *(size,) * dims)
        sd: dict[str, Any] = {"spatial_dims": dims, "in_channels": 1, "out_channels": 2}
        steps: dict[str, Any] = {"channels": (4, 8, 16), "strides": (2, 2)}
        yield case("UNet", dims, image, **sd, **steps, num_res_units=2)
        yield case("AttentionUnet", dims, image, **sd, **steps)
        yield case("BasicUNet", dims, (1, *(32,) * dims), **sd, features=(4, 4, 8, 8, 16, 4))
        yield case(
            "BasicUNetPlusPlus", dims, (1, *(32,) * dims), **sd, features=(4, 4, 8, 8, 16, 4)
        )
        yield case(
            "DynUNet", dims, image, **sd, kernel_size=[3, 3, 3], strides=[1, 2, 2],
            upsample_kernel_size=[2, 2], filters=[4, 8, 16],
        )  # fmt: skip
        yield case(
            "DynUNet", dims, image, as_=f"DynUNet {dims}-D deep supervision", **sd,
            kernel_size=[3, 3, 3, 3], strides=[1, 2, 2, 2], upsample_kernel_size=[2, 2, 2],
            filters=[4, 8, 16, 16], deep_supervision=True, deep_supr_num=1, res_block=True,
        )  # fmt: skip
        yield case("SegResNet", dims, image, **sd, init_filters=8)
        yield case(
            "SegResNetDS", dims, image, **sd, init_filters=8, blocks_down=(1, 1, 1), dsdepth=2
        )
        yield case(
            "SegResNetVAE", dims, image, **sd, input_image_size=(size,) * dims, init_filters=8,
            blocks_down=(1, 1), blocks_up=(1,), vae_estimate_std=False,
        )  # fmt: skip
        yield case("VNet", dims, image, **sd, dropout_prob_down=0.5)
        yield case(
            "UNETR", dims, (1, *(32,) * dims), **sd, img_size=32, feature_size=4, hidden_size=24,
            mlp_dim=32, num_heads=2,
        )  # fmt: skip
        big = (1, 64, 64) if dims == 2 else (1, 64, 32, 32)
        yield case("SwinUNETR", dims, big, **sd, feature_size=12, window_size=4)
        yield case(
            "SwinUNETR", dims, big, as_=f"SwinUNETR {dims}-D v2", **sd, feature_size=12,
            window_size=4, use_v2=True,
        )  # fmt: skip
        yield case("HighResNet", dims, image, **sd, layer_params=HIGH)
        yield case("AHNet", dims, (1, *(64 if dims == 2 else 32,) * dims), **sd, psp_block_num=0)
        yield case("RegUNet", dims, image, **sd, num_channel_initial=4, depth=2)
        yield case(
            "LocalNet", dims, image, **sd, num_channel_initial=4, extract_levels=(0, 1),
        )  # fmt: skip
        yield case(
            "MedNeXt", dims, image, **sd, init_filters=4, blocks_down=(1, 1), blocks_up=(1, 1),
            encoder_expansion_ratio=(2, 2), decoder_expansion_ratio=(2, 2),
        )  # fmt: skip
        yield case("AutoEncoder", dims, image, **sd, channels=(4, 8), strides=(2, 2))
        yield case(
            "VarAutoEncoder", dims, image, spatial_dims=dims, in_shape=image, out_channels=1,
            latent_size=2, channels=(4, 8), strides=(2, 2),
        )  # fmt: skip
        kl: dict[str, Any] = {
            "channels": (8, 8), "attention_levels": (False, False), "num_res_blocks": 1, "norm_num_groups": 4,
        }  # fmt: skip
        yield case(
            "AutoencoderKL", dims, image, **(sd | {"out_channels": 1}), **kl, latent_channels=2,
            with_encoder_nonlocal_attn=False, with_decoder_nonlocal_attn=False,
        )  # fmt: skip
        yield case(
            "VQVAE", dims, image, dtype=torch.float32, spatial_dims=dims, in_channels=1, out_channels=1, channels=(8, 8),
            num_res_layers=1, num_res_channels=(8, 8), num_embeddings=8, embedding_dim=4,
            downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)),
            upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
        )  # fmt: skip
        yield case(
            "PatchDiscriminator", dims, image, spatial_dims=dims, in_channels=1, channels=4,
            num_layers_d=2,
        )  # fmt: skip
        yield case(
            "DenseNet", dims, image, **sd, init_features=8, growth_rate=4, block_config=(2, 2, 2)
        )
        yield case(
            "ResNet", dims, image, block="basic", layers=[1, 1, 1, 1], block_inplanes=[4, 8, 8, 16],
            spatial_dims=dims, n_input_channels=1, num_classes=2,
        )  # fmt: skip
        yield case(
            "SEResNet50",
            dims,
            image,
            spatial_dims=dims,
            in_channels=1,
            num_classes=2,
            layers=(1, 1, 1, 1),
        )
        yield case(
            "EfficientNetBN",
            dims,
            image,
            model_name="efficientnet-b0",
            spatial_dims=dims,
            in_channels=1,
            num_classes=2,
            pretrained=False,
        )
        yield case(
            "ViT", dims, image, in_channels=1, img_size=(size,) * dims, patch_size=(size // 2,) * dims,
            spatial_dims=dims, hidden_size=16, mlp_dim=32, num_layers=2, num_heads=2,
            classification=True, num_classes=2,
        )  # fmt: skip
        yield case(
            "ViTAutoEnc", dims, image, in_channels=1, img_size=(size,) * dims,
            patch_size=(size // 2 if dims == 2 else 4,) * dims, spatial_dims=dims, hidden_size=16,
            mlp_dim=32, num_layers=2, num_heads=2,
        )  # fmt: skip
        if dims == 2:
            yield case(
                "FlexibleUNet",
                dims,
                image,
                in_channels=1,
                out_channels=2,
                backbone="efficientnet-b0",
                spatial_dims=dims,
                pretrained=False,
                decoder_channels=(16, 16, 8, 8, 4),
            )
        unet: dict[str, Any] = {
            **sd, "channels": (8, 8), "attention_levels": (False, True), "num_res_blocks": 1,
            "norm_num_groups": 4, "num_head_channels": 4,
        }  # fmt: skip
        steps_of = lambda n, image=image: {
            "x": picture(*image)(n), "timesteps": torch.arange(n) + 3,
        }  # fmt: skip
        made = lambda unet=unet: nets.DiffusionModelUNet(**unet)
        yield Case("monai", f"DiffusionModelUNet {dims}-D", made, steps_of, dims)
        yield case(
            "Discriminator",
            dims,
            image,
            in_shape=image,
            channels=(4, 8),
            strides=(2, 2),
            tiled=True,
        )
        yield case(
            "Classifier", dims, image, in_shape=image, classes=2, channels=(4, 8), strides=(2, 2)
        )
        yield case(
            "Regressor",
            dims,
            image,
            in_shape=image,
            out_shape=(2,),
            channels=(4, 8),
            strides=(2, 2),
        )
    yield case(
        "Generator",
        2,
        (6,),
        tiled=False,
        latent_shape=(6,),
        start_shape=(4, 8, 8),
        channels=(4, 1),
        strides=(2, 2),
    )
    yield case(
        "FullyConnectedNet",
        2,
        (6,),
        tiled=False,
        in_channels=6,
        out_channels=2,
        hidden_channels=(8, 8),
    )


# --- segmentation-models-pytorch: every decoder, and an encoder of every family -----------------

DECODERS = (
    *("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus"),
    *("PAN", "UPerNet", "Segformer", "DPT"),
)
ENCODERS = ("tu-test_resnet", "mobilenet_v2", "mit_b0")
MORE = (
    *("vgg11_bn", "densenet121", "efficientnet-b0", "timm-efficientnet-b0", "mobileone_s0"),
    *("se_resnet50", "dpn68", "xception", "inceptionv4", "inceptionresnetv2", "timm-regnetx_002"),
    *("timm-resnest14d", "timm-res2net50_26w_4s", "timm-skresnet18", "timm-gernet_s"),
    *(
        "timm-mobilenetv3_small_075",
        "tu-convnext_atto",
        "resnet18",
        "tu-resnet18",
        "tu-swin_s3_tiny_224",
    ),
)
UNFIT = {
    *(("Linknet", e) for e in ("mit_b0",)), *(("UnetPlusPlus", e) for e in ("mit_b0",)),
    *(("DPT", e) for e in ENCODERS), ("DeepLabV3", "mit_b0"), ("DeepLabV3Plus", "mit_b0"),
    ("PAN", "mit_b0"), ("FPN", ""),
}  # fmt: skip


def smp() -> Iterator[Case]:
    library: Any = importlib.import_module("segmentation_models_pytorch")

    def case(decoder: str, encoder: str, size: int = 64, **more: Any) -> Case:
        made = lambda: getattr(library, decoder)(
            encoder_name=encoder, encoder_weights=None, classes=2, **more
        )
        return Case("smp", f"{decoder} {encoder}", made, picture(3, size, size))

    for decoder in DECODERS:
        for encoder in ENCODERS:
            if (decoder, encoder) not in UNFIT:
                yield case(decoder, encoder, 128 if decoder == "PAN" else 64)
    for encoder in MORE:
        if encoder == "tu-swin_s3_tiny_224":
            yield case(
                "Unet",
                "tu-swin_tiny_patch4_window7_224",
                224,
                encoder_depth=4,
                decoder_channels=(16, 8, 8, 4),
            )
        else:
            yield case("Unet", encoder)
    yield case("DPT", "tu-vit_tiny_patch16_224", 224)


# --- transformers: images and text, from configurations ----------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
CONV: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
PYRAMID: dict[str, Any] = {
    "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
}  # fmt: skip
SWIN: dict[str, Any] = {
    "image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
}  # fmt: skip
IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTForImageClassification": ("ViTConfig", {**SMALL, "image_size": 64}),
    "DeiTForImageClassification": ("DeiTConfig", {**SMALL, "image_size": 64}),
    "BeitForImageClassification": ("BeitConfig", {**SMALL, "image_size": 64}),
    "BeitForSemanticSegmentation": ("BeitConfig", {**SMALL, "image_size": 64, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "use_relative_position_bias": True}),
    "Data2VecVisionForImageClassification": ("Data2VecVisionConfig", {**SMALL, "image_size": 64}),
    "ViTMSNForImageClassification": ("ViTMSNConfig", {**SMALL, "image_size": 64}),
    "ViTMAEForPreTraining": ("ViTMAEConfig", {**SMALL, "image_size": 64, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 64}),
    "Dinov2ForImageClassification": ("Dinov2Config", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56}),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64}),
    "DINOv3ViTModel": ("DINOv3ViTConfig", {**SMALL, "image_size": 64}),
    "DINOv3ConvNextModel": ("DINOv3ConvNextConfig", CONV),
    "SwinForImageClassification": ("SwinConfig", SWIN),
    "Swinv2ForImageClassification": ("Swinv2Config", SWIN),
    "ConvNextForImageClassification": ("ConvNextConfig", CONV),
    "ConvNextV2ForImageClassification": ("ConvNextV2Config", CONV),
    "ResNetForImageClassification": ("ResNetConfig", {**CONV, "embedding_size": 8}),
    "RegNetForImageClassification": ("RegNetConfig", {**CONV, "embedding_size": 8, "groups_width": 4}),
    "BitForImageClassification": ("BitConfig", {"hidden_sizes": [128, 128, 128, 256], "depths": [1, 1, 1, 1], "embedding_size": 32, "num_groups": 8}),
    "MobileNetV1ForImageClassification": ("MobileNetV1Config", {"depth_multiplier": 0.25}),
    "MobileNetV2ForImageClassification": ("MobileNetV2Config", {"depth_multiplier": 0.25}),
    "MobileNetV2ForSemanticSegmentation": ("MobileNetV2Config", {"depth_multiplier": 0.25}),
    "MobileViTForImageClassification": ("MobileViTConfig", {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "image_size": 64}),
    "MobileViTForSemanticSegmentation": ("MobileViTConfig", {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "image_size": 64}),
    "MobileViTV2ForImageClassification": ("MobileViTV2Config", {"width_multiplier": 0.25, "image_size": 64}),
    "EfficientNetForImageClassification": ("EfficientNetConfig", {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}),
    "SegformerForSemanticSegmentation": ("SegformerConfig", {**PYRAMID, "decoder_hidden_size": 16}),
    "SegformerForImageClassification": ("SegformerConfig", PYRAMID),
    "PvtForImageClassification": ("PvtConfig", {**PYRAMID, "image_size": 64}),
    "PvtV2ForImageClassification": ("PvtV2Config", {**PYRAMID, "image_size": 64}),
    "PoolFormerForImageClassification": ("PoolFormerConfig", CONV),
    "SwiftFormerForImageClassification": ("SwiftFormerConfig", {"embed_dims": [16, 16, 24, 32], "depths": [1, 1, 2, 1]}),
    "LevitForImageClassification": ("LevitConfig", {"image_size": 64, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}),
    "CvtForImageClassification": ("CvtConfig", {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.1]}),
    "FocalNetForImageClassification": ("FocalNetConfig", {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3]}),
    "HieraForImageClassification": ("HieraConfig", {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 8]}),
    "HGNetV2ForImageClassification": ("HGNetV2Config", {}),
    "TextNetForImageClassification": ("TextNetConfig", {}),
    "SiglipForImageClassification": ("SiglipConfig", {"vision_config": {**SMALL, "image_size": 64}}),
    "CLIPForImageClassification": ("CLIPConfig", {"vision_config": {**SMALL, "image_size": 64, "patch_size": 16}}),
    "UperNetForSemanticSegmentation": ("UperNetConfig", {"hidden_size": 16, "auxiliary_in_channels": 24}),
    "DPTForSemanticSegmentation": ("DPTConfig", {**SMALL, "image_size": 64, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8}),
    "GLPNForDepthEstimation": ("GLPNConfig", {**PYRAMID, "decoder_hidden_size": 16}),
    "YolosModel": ("YolosConfig", {**SMALL, "image_size": [64, 64], "num_detection_tokens": 4}),
    "IJepaForImageClassification": ("IJepaConfig", {**SMALL, "image_size": 64, "patch_size": 16}),
    "VitDetModel": ("VitDetConfig", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "window_block_indices": [0], "window_size": 2, "use_relative_position_embeddings": True}),
    "Swin2SRForImageSuperResolution": ("Swin2SRConfig", {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "num_channels": 3}),
    "DepthAnythingForDepthEstimation": ("DepthAnythingConfig", {"reassemble_hidden_size": 32, "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8}),
}  # fmt: skip
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("BertConfig", SMALL),
    "RobertaForSequenceClassification": ("RobertaConfig", SMALL),
    "DistilBertForSequenceClassification": ("DistilBertConfig", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}),
    "AlbertForSequenceClassification": ("AlbertConfig", {**SMALL, "embedding_size": 16}),
    "ElectraForSequenceClassification": ("ElectraConfig", SMALL),
    "DebertaV2ForSequenceClassification": ("DebertaV2Config", {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "num_key_value_heads": 1}),
    "MistralForCausalLM": ("MistralConfig", {**SMALL, "num_key_value_heads": 1}),
    "Qwen2ForCausalLM": ("Qwen2Config", {**SMALL, "num_key_value_heads": 1}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**SMALL, "num_key_value_heads": 1, "head_dim": 16}),
    "Gemma2ForCausalLM": ("Gemma2Config", {**SMALL, "num_key_value_heads": 1, "head_dim": 16}),
    "PhiForCausalLM": ("PhiConfig", SMALL),
    "OPTForCausalLM": ("OPTConfig", {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "BloomForCausalLM": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SMALL),
    "MixtralForCausalLM": ("MixtralConfig", {**SMALL, "num_key_value_heads": 1, "num_local_experts": 2}),
    "MambaForCausalLM": ("MambaConfig", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    "T5EncoderModel": ("T5Config", {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}),
    "BartForSequenceClassification": ("BartConfig", {}),
    "XLNetForSequenceClassification": ("XLNetConfig", {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}),
    "LongformerForSequenceClassification": ("LongformerConfig", {**SMALL, "attention_window": 8}),
    "ModernBertForSequenceClassification": ("ModernBertConfig", SMALL),
}  # fmt: skip
SINGLE = ("MixtralForCausalLM",)  # its product of groups of matrices knows no float64
SIZES = {
    "Dinov2ForImageClassification": 56,
    "Swin2SRForImageSuperResolution": 32,
    "DepthAnythingForDepthEstimation": 56,
}


def transformers() -> Iterator[Case]:
    hf: Any = importlib.import_module("transformers")
    for name, (config, options) in IMAGES.items():

        def build(name: str = name, config: str = config, options: Any = options) -> nn.Module:
            return getattr(hf, name)(_configured(hf, name, config, options))

        size = SIZES.get(name, 64)
        inputs = lambda n, size=size: {"pixel_values": picture(3, size, size)(n)}
        yield Case("transformers", name, build, inputs)
    for name, (config, options) in TEXT.items():

        def write(name: str = name, config: str = config, options: Any = options) -> nn.Module:
            more: dict[str, Any] = {
                "vocab_size": 50,
                "max_position_embeddings": 64,
                "pad_token_id": 0,
            }
            more |= {"bos_token_id": 1, "eos_token_id": 2}
            if name.startswith("XLNet"):
                del more["max_position_embeddings"]
            if name.startswith("Bart"):
                more |= {
                    "d_model": 32,
                    "encoder_layers": 1,
                    "decoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "decoder_attention_heads": 2,
                    "encoder_ffn_dim": 64,
                    "decoder_ffn_dim": 64,
                }
            if "Causal" in name or "LMHead" in name:
                more |= {"use_cache": False}
            return getattr(hf, name)(_configured(hf, name, config, {**more, **options}))

        dtype = torch.float32 if name in SINGLE else torch.float64
        yield Case("transformers", name, write, _words, 0, dtype)


def _configured(hf: Any, name: str, config: str, options: dict[str, Any]) -> Any:
    options = dict(options)
    if config == "UperNetConfig":
        options["backbone_config"] = hf.ConvNextConfig(
            **CONV, out_features=["stage1", "stage2", "stage3", "stage4"]
        )
    if config == "DepthAnythingConfig":
        options["backbone_config"] = hf.Dinov2Config(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=56,
            out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
        )  # fmt: skip
    if "Classification" in name or "Segmentation" in name:
        options["num_labels"] = CLASSES
    return getattr(hf, config)(**options)


def _words(samples: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (samples, 16))
    ids[:, -1] = 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
