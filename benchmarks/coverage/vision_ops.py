"""Makes torchvision importable beside a torch without CUDA: declares the two compiled operators
whose absence stops its import. None of the surveyed networks calls them."""

from __future__ import annotations

import torch


def declare() -> None:
    """Declare `nms` and `qnms` if torchvision's own library could not be loaded."""
    for name in ("nms", "qnms"):
        try:
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
        except RuntimeError:  # it is there already: a torchvision that fits this torch
            return
