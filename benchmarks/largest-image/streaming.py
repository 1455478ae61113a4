"""One step by lightstream (StreamingCNN): tile by tile, on one rank.

It is made for GPUs. What is done here for it: its constructor is told to stay on the host.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from functools import cache
from math import sqrt
from typing import Any

import torch
from torch import nn

from benchmarks.pipeline.livebytes import LiveBytes

from . import plain
from .networks import NETWORKS

PART = 0.95  # of the cap that a tile by itself may take: features and their gradients are whole


class Refused(Exception):
    """lightstream cannot stream this network, or not under this cap; in its words, if it spoke."""


def trained_or_words(name: str, images: int, side: int, cap: float) -> tuple[int, str] | str:
    """Bytes and how, or why it cannot."""
    try:
        tile = min(tile_side(name, cap), side)
        return trained(name, images, side, tile), f"tiles of {tile}"
    except ImportError:
        return "not installed; the README says how"
    except Refused as words:
        return str(words)


def trained(name: str, images: int, side: int, tile: int) -> int:
    network = NETWORKS[name]
    model, target = network.make(), network.target(images, side)
    body, head = parts(model)
    streamed = constructed(body, tile)
    optimizer = plain.sgd([*streamed.stream_module.parameters(), *head.parameters()])
    with LiveBytes() as live, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it asks for CUDA's autocast
        for wanted in target.split(1):
            image = torch.ones(1, 3, side, side)
            features = streamed(image)
            features.requires_grad_()
            (network.loss(head(features), wanted) / images).backward()
            streamed.backward(image, features.grad)
            del image, features
        optimizer.step()
    return live.peak + plain.resident(streamed.stream_module, target) + plain.resident(head)


def parts(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """What is streamed, and what sees its output whole."""
    if any(isinstance(m, nn.BatchNorm2d) and m.training for m in model.modules()):
        raise Refused("its norms are in evaluation mode always; see the frozen network")
    if isinstance(model, nn.Sequential):
        return model[:-1], model[-1]
    return model, nn.Identity()


def constructed(body: nn.Module, tile: int) -> Any:
    """lightstream's model of ours, with its statistics of what each layer loses at borders."""
    from lightstream.core.constructor import StreamingConstructor
    from lightstream.core.scnn.scnn import StreamingCNN

    class OnHost(StreamingConstructor):
        def create_streaming_model(self) -> Any:
            return StreamingCNN(
                self.model, (1, 3, self.tile_size, self.tile_size),
                copy_to_gpu=False, statistics_on_cpu=False, normalize_on_gpu=False,
            )  # fmt: skip

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            made = OnHost(body, tile, copy_to_gpu=False).prepare_streaming_model()
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        raise Refused(f"tile {tile}: {type(error).__name__}: {words}") from error
    finally:
        torch.set_grad_enabled(True)
    lost, stride = made.tile_gradient_lost, int(made.output_stride[1])
    if (right := tile - lost.top - lost.bottom) < stride:
        raise Refused(f"tile {tile}: of its {tile} rows, {right} have the right gradient")
    return made


@cache
def tile_side(name: str, cap: float) -> int:
    """The largest tile that a plain step has room for, by two that were counted."""
    one, other = (plain.trained(name, 1, side, False) for side in (64, 128))
    per_cell = (other - one) / (128**2 - 64**2)
    left = PART * cap - (one - per_cell * 64**2)
    return max(int(sqrt(max(left, 0) / per_cell)) // 16 * 16, 16)
