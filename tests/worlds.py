"""Ranks as real processes over gloo, started in a fifth of a second. Not a test itself.

A server that has already imported torch forks the ranks; a world that does not end in time is
killed, so nothing here can hang a test run.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from gems.transport.torch_distributed import TorchDist

SECONDS = 60.0
fork = multiprocessing.get_context("forkserver")
fork.set_forkserver_preload(["tests.exact", "tests.worlds", "tests.warm"])


def spawn(size: int, work: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
    """`work(transport, *args)` on `size` processes: what each gave. `work` must be importable."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            fork.Process(target=_rank, args=(rank, size, folder, pipes[rank][1], work, args))
            for rank in range(size)
        ]
        for process, (_, end) in zip(ranks, pipes, strict=True):
            process.start()
            end.close()
        try:
            results = _results([pipe for pipe, _ in pipes], time.monotonic() + seconds)
        finally:
            for process in ranks:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
    if failures := [f"rank {r}: {text}" for r, (good, text) in enumerate(results) if not good]:
        raise AssertionError("\n".join(failures))
    return [torch.load(io.BytesIO(data), weights_only=False) for _, data in results]


def _results(pipes: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
    found: list[tuple[bool, Any]] = []
    for pipe in pipes:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            found.append((False, "did not end in time"))
            continue
        try:
            found.append(pipe.recv())
        except EOFError:
            found.append((False, "died without a word"))
    return found


def _rank(
    rank: int, size: int, folder: str, pipe: Connection, work: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=SECONDS),
        )
        result = work(TorchDist(SECONDS), *args)
        data = io.BytesIO()
        torch.save(result, data)
        pipe.send((True, data.getvalue()))
        dist.barrier()  # nobody hangs up on those who are still at it
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)
