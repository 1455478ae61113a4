"""Transports move arrays of numpy as they move tensors of torch: the same bits on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from gems.transport.encoding import pack
from gems.transport.protocol import EXCHANGES
from gems.transport.threads import run
from tests.worlds import spawn


def operations(transport: Any) -> list[list[float]]:
    """Every operation once, on arrays: what this rank has then."""
    rank, ranks = transport.rank, (0, 1)
    other = 1 - rank
    transport.prepare([ranks], [(0, 1), (1, 0)], {ranks: [(0, 1), (1, 0)]})
    got, swapped = np.zeros(3), np.zeros(2, np.float32)
    work = [transport.irecv(got, other), transport.isend(np.arange(3.0) + rank, other)]
    mine = np.array([rank, 7], np.float32)
    work.append(transport.exchange([(mine, other)], [(swapped, other)], ranks))
    total, scattered = np.array([1.0 + rank, 2]), np.arange(4.0) * (rank + 1)
    gathered, halves = np.full(4, float(rank)), np.full(2, float(rank))
    work += [transport.all_reduce(total, ranks), transport.reduce_scatter(scattered, ranks)]
    work += [transport.all_gather(gathered, ranks), transport.all_gather(halves, ranks, EXCHANGES)]
    for handle in work:
        handle.wait()
    told = np.array([5 + rank])
    transport.broadcast(told, 1)
    part = scattered[2 * rank : 2 * rank + 2]
    return [x.tolist() for x in (got, swapped, total, part, gathered, halves, told)]


@pytest.mark.parametrize("worlds", [run, spawn])
def test_every_operation_takes_arrays(worlds):
    assert worlds(2, operations) == [
        [[1, 2, 3], [1, 7], [3, 4], [0, 3], [0, 0, 1, 1], [0, 1], [6]],
        [[0, 1, 2], [0, 7], [3, 4], [6, 9], [0, 0, 1, 1], [0, 1], [6]],
    ]


def test_a_rank_without_torch_tells_arrays_and_rejects_tensors():
    import torch

    told = json.dumps([list(pack({"x": np.arange(3)})), list(pack(torch.ones(2)))])
    code = f"""
import sys
from gems.transport.encoding import Malformed, unpack
from gems.transport import threads
array, tensor = map(bytes, {told})
assert unpack(array)["x"].tolist() == [0, 1, 2]
try:
    unpack(tensor)
except Malformed as error:
    assert "torch is not loaded here" in str(error)
else:
    raise SystemExit("took a tensor")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
