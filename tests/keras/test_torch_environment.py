"""Files of this name run with Keras on torch, without CUDA."""

from __future__ import annotations

import keras
import torch


def test_keras_runs_on_torch_without_cuda() -> None:
    assert keras.backend.backend() == "torch"
    assert not torch.version.cuda
