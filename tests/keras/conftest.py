"""Keras reads its backend once per process: files named test_torch_* run with KERAS_BACKEND=torch,
all others with tensorflow. `make keras-tests` runs both, in .venv-keras."""

from __future__ import annotations

import os

# Before anything imports Keras or TensorFlow, which read them once.
BACKEND = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors only
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
for threads in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ.setdefault(threads, "1")

OTHERS = {"tensorflow": ["test_torch_*.py"], "torch": ["test_[!t]*.py", "test_t[!o]*.py"]}
collect_ignore_glob = OTHERS[BACKEND]
