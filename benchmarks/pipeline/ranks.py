"""Processes that wait for commands, so that many measurements can take turns in one run."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gems.cli.ranks import KEEP_MEMORY


class RankError(RuntimeError):
    """A rank raised, died or did not answer. All ranks have been ended."""


class Ranks:
    """`size` processes with gloo between them and one thread each.

        with Ranks(2) as ranks:
            ranks.run(peer.steps, "1f1b", 8)     # one answer per rank, in order

    A command travels as the name of a function that the rank imports, with picklable arguments.
    What a function keeps in its module (a network, a schedule) is there for the next command.
    """

    def __init__(self, size: int, timeout: float = 300) -> None:
        self.size = size
        self.timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        # The same for every contestant. Without the second one, glibc maps tensors above 32 MiB
        # anew each time, and whole images would pay for page faults that tiles do not have.
        os.environ.update({**KEEP_MEMORY, "MALLOC_MMAP_MAX_": "0"})
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_serve, args=(rank, size, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()  # so that a dead rank reads as end of file
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._answers("start")
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(*args)` returns on each rank. Any failure ends all ranks."""
        name = name_of(function)
        try:
            for pipe in self._pipes:
                pipe.send((name, args))
            return self._answers(name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, name: str) -> list[Any]:
        if not self._pipes:
            raise RankError(f"{name}: these ranks have ended; start new ones")
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < self.size:
            waiting = {pipe: r for r, pipe in enumerate(self._pipes) if r not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(map(str, waiting.values()))
                raise RankError(f"{name}: no answer from rank {silent} in {self.timeout:.0f} s")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    good, answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError) as error:
                    raise RankError(f"{name}: rank {rank} died") from error
                if not good:
                    raise RankError(f"{name}: rank {rank} raised\n{answers[rank]}")
        return [answers[rank] for rank in range(self.size)]


def name_of(function: Callable[..., Any]) -> str:
    """`package.module:function`, which another process can import."""
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or not name.isidentifier():
        raise ValueError(
            f"{module}.{name} cannot be imported by name on a rank; "
            "give a function defined at the top of an importable module"
        )
    return f"{module}:{name}"


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = Path(folder) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        pipe.send((True, rank))
        while True:
            name, args = pipe.recv()
            module, function = name.split(":")
            pipe.send((True, getattr(importlib.import_module(module), function)(*args)))
    except EOFError:  # the parent has left
        return
    except Exception:
        pipe.send((False, traceback.format_exc()))
