"""A plan of each family over MPI beside the plain loop, and checkpoints, without any process group.

    mpirun -np 4 python mpi_families.py FOLDER

Plans for fewer ranks run in a part of them, two at a time. Prints one line of JSON per case and
rank: the case, and how far it is from the plain loop.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import gems
from gems.plans.plan import Plan
from gems.torch import doctor
from gems.torch.parity import verify
from gems.torch.trainer import Trainer
from gems.transport.mpi import Mpi
from tests.exact import batches, planned, same_state, sgd, trained
from tests.saved import network

torch.set_num_threads(1)
F64 = torch.float64
FOLDER = Path(sys.argv[1])
PATIENCE = 250.0  # one pair of ranks has more to do than the other


def no_group(*args: Any, **options: Any) -> None:
    raise AssertionError("a process group of torch was asked for")


dist.init_process_group = dist.new_group = no_group  # type: ignore[assignment]
PAIR = doctor.plans(2) | {
    "gems, zero 2": Plan(stages=2, schedule="gems", replications=2, zero=2),
    "zero 3, streamed": Plan(
        stages=2, ranks=1, stream="2x2", schedule="gpipe", data=2, zero=3, micro_batches=2
    ),
    "zero 1, offloaded": Plan(data=2, zero=1, offload=("optimizer",)),
    "streamed, values stored": Plan(
        stages=3, placement=(0, 1, 1), stream=["2x2"] * 2, schedule="gpipe", micro_batches=2,
        offload="values:disk",
    ),
    "fold": Plan(stages=4, ranks=2, placement="fold", schedule="gpipe", micro_batches=2),
}  # fmt: skip
FOUR = {
    "tiles and stages": Plan(stages=2, spatial=[(1, 3)], micro_batches=2),
    "tiles, slices, both ways": Plan(stages=2, spatial=[(2, 1)], local_dp=2, schedule="gems"),
    "stages and copies, zero 2": Plan(stages=2, micro_batches=2, data=2, zero=2),
    "gems, 4 ranks": Plan(stages=4, schedule="gems", replications=2),
}


def report(comm: Any, name: str, found: Any) -> None:
    sys.stdout.write(json.dumps({"case": name, "rank": comm.rank, **found}) + "\n")
    sys.stdout.flush()


def parity(comm: Any, name: str, plan: Plan) -> None:
    world, transport = plan.world, Mpi(comm=comm, patience=PATIENCE)
    torch.manual_seed(0)
    model, sample = doctor.network(world), torch.empty(2, 3, 16, 8 * world)
    found = verify(model, sample, plan, costs="estimate", transport=transport)
    report(comm, name, {"passed": found.passed, "error": found.error, "worst": str(found.worst)})


def asynchronous(comm: Any) -> None:
    """2BW is another algorithm than the plain loop: beside ranks that are threads."""
    plan, data = Plan(stages=2, schedule="2bw", micro_batches=2), batches((4, 3, 8, 8), 5, 4, F64)
    found = trained(Mpi(comm=comm, patience=PATIENCE), network(), data, plan)
    expected = planned(network(), data, plan)
    same_state(found.state, expected.state)
    same = repr(found.losses) == repr(expected.losses)  # nan until the first batch is through
    report(comm, "2bw", {"passed": same, "error": 0.0, "worst": repr(found.losses)})


def resumed(comm: Any) -> None:
    """Three steps, a checkpoint after the second; loaded under another plan; one more step."""
    data = batches((8, 3, 8, 8), 5, 3, F64)

    def trainer(plan: Plan) -> Trainer:
        sample = torch.empty(8 // plan.total, 3, 8, 8, dtype=F64)
        loss = torch.nn.functional.cross_entropy
        return Trainer(
            network(), loss, sgd, sample, plan, transport=Mpi(comm=comm, patience=PATIENCE)
        )

    first = trainer(Plan(stages=2, micro_batches=4))
    for images, labels in data[:2]:
        first.step(images, labels)
    first.save(FOLDER / "ck")
    whole = first.step(*data[2]).loss
    state = first.state_dict()
    first.close()
    second = trainer(Plan(stages=2, schedule="gems", replications=2))
    second.load(FOLDER / "ck")
    again = second.step(*data[2]).loss
    error = max(float((state[k] - x).abs().max()) for k, x in second.state_dict().items())
    second.close()
    report(comm, "resumed", {"passed": error < 1e-10, "error": max(error, abs(whole - again))})


def main() -> None:
    world = MPI.COMM_WORLD
    pair = world.Split(world.rank // 2, world.rank)
    for i, (name, plan) in enumerate(PAIR.items()):
        if i % 2 == world.rank // 2:
            parity(pair, name, plan)
    (resumed if world.rank < 2 else asynchronous)(pair)
    for name, plan in FOUR.items():
        parity(world, name, plan)
    print(json.dumps({"case": "library", "rank": world.rank, "name": MPI.Get_library_version()}))
    assert gems.__file__


if __name__ == "__main__":
    main()
