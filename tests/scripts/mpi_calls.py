"""Every call of the protocol over MPI, on arrays of NumPy and, if asked, tensors of PyTorch.

    mpirun -np 3 python mpi_calls.py numpy
    mpirun -np 3 python mpi_calls.py torch

Each rank prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np

from gems.errors import GemsError, PeerError
from gems.transport import mpi_memory
from gems.transport.mpi import Mpi
from gems.transport.protocol import EXCHANGES, own_part

SEEN: dict[str, Any] = {}


def make(numbers: Any, kind: str = "float64") -> Any:
    if sys.argv[1] == "torch":
        import torch

        return torch.tensor(np.asarray(numbers)).to(getattr(torch, kind))
    return np.array(numbers, dtype=kind)


def told(buffer: Any) -> Any:
    return buffer.tolist()


def collectives(transport: Mpi) -> None:
    everyone, rank = transport.everyone, transport.rank
    some, mine = (0, transport.world - 1), rank in (0, transport.world - 1)
    width = 2 * len(everyone)

    buffer = make(np.arange(width) * (rank + 1))
    transport.all_reduce(buffer, everyone).wait()
    SEEN["all_reduce"] = told(buffer)
    if mine:
        buffer = make([1, rank], "int64")
        transport.all_reduce(buffer, some).wait()
        SEEN["of some"] = told(buffer)
    buffer = make(np.arange(width) + 10 * rank)
    transport.reduce_scatter(buffer, everyone).wait()
    SEEN["reduce_scatter"] = told(own_part(buffer, rank, everyone))
    buffer = make(np.full(width, rank))
    sums = transport.all_gather(buffer, everyone)  # both at a time, on a channel each
    other = make(np.full(width, -rank))
    exchanges = transport.all_gather(other, everyone, EXCHANGES)
    exchanges.wait()
    sums.wait()
    SEEN["all_gather"] = [told(buffer), told(other)]
    for kind in ("float16", "float32", "complex64", "uint8", "int8"):
        buffer = make([rank + 1, 2], kind)
        transport.all_reduce(buffer, everyone).wait()
        SEEN[kind] = [float(x.real) for x in told(buffer)]
    buffer = make([3.5, 4.5] if rank == 1 else [0.0, 0.0])
    transport.broadcast(buffer, 1)
    SEEN["broadcast"] = told(buffer)
    SEEN["objects"] = transport.all_gather_object({"rank": rank, "text": "x" * (5 * rank)})
    SEEN["numbers"] = transport.all_gather_numbers([rank, 1 << 40, -rank])
    SEEN["of none"] = transport.all_reduce(make([1.0]), (rank,)).wait()


def narrow_sums(transport: Mpi) -> None:
    """In float32, rounded once: 256 + 1 + 1 is 258, and 256 in steps of bfloat16."""
    if sys.argv[1] == "torch":
        buffer = make([256.0 if transport.rank == 0 else 1.0], "bfloat16")
        transport.all_reduce(buffer, transport.everyone).wait()
        SEEN["bfloat16"] = told(buffer)


def same_bits(transport: Mpi) -> None:
    """Sums of many lengths, in which the order of additions matters."""
    digest = hashlib.sha256()
    for length in (1, 2, 3, 7, 64, 1000, 4097, 70000, 300001):
        draw = np.random.default_rng(length + 1000 * transport.rank)
        buffer = make(draw.standard_normal(length) * 10.0 ** draw.integers(-8, 8, length))
        transport.all_reduce(buffer, transport.everyone).wait()
        digest.update(np.asarray(told(buffer)).tobytes())
    SEEN["same bits"] = digest.hexdigest()


def messages(transport: Mpi, long: int = 200000) -> None:
    """In the order in which they were sent, of any length, waited for in any order."""
    rank, world = transport.rank, transport.world
    after, before = (rank + 1) % world, (rank - 1) % world
    lengths = (1, long // 2, 0, 3, long, 2)
    receives = [make(np.zeros(n)) for n in lengths]
    handles = [transport.irecv(buffer, before) for buffer in receives]
    sends = [make(np.full(n, 100 * rank + i)) for i, n in enumerate(lengths)]
    handles += [transport.isend(buffer, after) for buffer in sends]
    swap = make(np.zeros(3)), make(np.full(3, rank))
    handles.append(transport.exchange([(swap[1], before)], [(swap[0], after)], transport.everyone))
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
    SEEN["messages"] = [set_of(buffer) for buffer in receives]
    SEEN["exchange"] = set_of(swap[0])
    SEEN["nothing"] = transport.exchange([], [], transport.everyone).wait()


def set_of(buffer: Any) -> list[float]:
    return sorted(set(told(buffer)))


def in_pieces(transport: Mpi) -> None:
    """What is longer than MPI can count, with a smaller count."""
    mpi_memory.PIECE = 40
    messages(transport, 60)
    everyone, rank = transport.everyone, transport.rank
    buffer = make(np.full(4 * transport.world, rank))
    transport.all_gather(buffer, everyone).wait()
    SEEN["pieces gathered"] = told(buffer)
    buffer = make(np.full(23, rank + 1))
    transport.all_reduce(buffer, everyone).wait()
    SEEN["pieces summed"] = told(buffer)
    mpi_memory.PIECE = 1 << 30


def mistakes(transport: Mpi) -> None:
    wrong = {
        "no communicator": lambda: transport.all_reduce(make([1.0]), (0, 1)),
        "no sums": lambda: transport.all_reduce(make([True], "bool"), transport.everyone),
        "not contiguous": lambda: transport.isend(make(np.zeros((4, 4)))[:, 1], 0),
    }
    for name, work in wrong.items():
        try:
            work()
        except GemsError as error:
            SEEN[name] = str(error)
    transport.all_gather_object("after")
    try:
        if transport.rank == 0:
            transport.isend(make([1.0, 2.0]), 1).wait()
        elif transport.rank == 1:
            transport.irecv(make([0.0, 0.0, 0.0]), 0).wait()
    except PeerError as error:
        SEEN["shorter"] = str(error)


def main() -> None:
    first = Mpi()
    first.prepare([first.everyone, (0, first.world - 1)], [])
    for work in (collectives, narrow_sums, same_bits, messages, in_pieces):
        work(first)
    first.close()
    second = Mpi()
    mistakes(second)
    frameworks = {"torch", "tensorflow", "keras"} & set(sys.modules)
    line = {"rank": second.rank, "seen": SEEN, "frameworks": sorted(frameworks)}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
