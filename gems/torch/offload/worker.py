"""A thread that works for one rank, on its device: a new thread of CUDA begins with the first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def worker(name: str, device: torch.device) -> ThreadPoolExecutor:
    """It starts when it is first used."""
    if device.type != "cuda":
        return ThreadPoolExecutor(1, name)
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (device,))
