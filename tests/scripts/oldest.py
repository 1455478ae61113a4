"""A smoke test for the oldest torch that pyproject.toml allows: `make oldest` runs it.

python oldest.py                                  # families of plans beside the plain loop
torchrun --nproc-per-node 2 train.py '{"stages": 2, "micro_batches": 4}'
"""

from __future__ import annotations

import sys

import torch

from gems.torch import doctor

FAMILIES = ("1f1b", "zero-bubble", "GEMS-MASTER", "tiles", "ZeRO-3", "offload to host")

checks = []
for name in FAMILIES:
    torch.manual_seed(0)
    checks.append(doctor.parity(2, name))
    print(f"torch {torch.__version__}: {checks[-1].name}: {checks[-1].seen}")
sys.exit(0 if all(check.passed for check in checks) else 1)
