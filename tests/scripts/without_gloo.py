"""The user's script of train.py where torch has no gloo, and no backend is asked for."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist
from train import loader, trainer

import gems

dist.is_gloo_available = lambda: False
mine = trainer(gems.Plan(**json.loads(sys.argv[1])))
losses = [mine.step(images, labels).loss for images, labels in loader()]
kind = type(mine.session.transport).__name__
sys.stdout.write(json.dumps({"rank": mine.rank, "losses": losses, "transport": kind}) + "\n")
