"""Loaded by the server that forks ranks: what torch imports on first use, it imports here, once."""

from __future__ import annotations

import gc

import rich.progress  # noqa: F401
import torch
import torch.distributed.checkpoint
import yaml  # noqa: F401
from torch import nn

import gems.cli.job
import gems.cli.main  # noqa: F401
from gems.torch.tracing.trace import trace

torch.set_num_threads(1)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
trace(net, torch.empty(2, 3, 8, 8))
torch.optim.SGD(net.parameters()).zero_grad()  # loads the compiler
gc.freeze()  # ranks need not look through what they were forked with
