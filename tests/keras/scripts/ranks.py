"""Train under plans on the ranks of a launcher, and print how far from plain Keras each is.

ranks.py exact          a JSON line per rank
ranks.py die            rank 1 ends without a word after a step; the others tell why they end
"""

from __future__ import annotations

import json
import os
import sys

import tests.keras.conftest  # noqa: F401  (sets the environment before TensorFlow is imported)
from gems.errors import PeerError
from gems.keras.launch import connect
from gems.keras.session import Session
from gems.plans.plan import Plan
from tests.keras.exact import build, float64, momentum, plain, planned, worst
from tests.keras.networks import images, loss, subclassed

PLANS = (
    Plan(stages=2, micro_batches=4, schedule="zero-bubble"),
    Plan(stages=2, schedule="gems", replications=2),
    Plan(stages=1, spatial="1x2", micro_batches=4, schedule="sequential"),
)


def tell(facts: object) -> None:
    """A line in one write: ranks share their launcher's output."""
    os.write(1, f"{json.dumps(facts)}\n".encode())


def exact() -> None:
    transport = connect()
    expected, differences = plain(subclassed, loss(), images(), 4), []
    for plan in PLANS:
        found = planned(subclassed, loss(), images(), plan, transport=transport)
        for more in transport.all_gather_object(found.gradients):
            found.gradients |= more
        differences.append(worst(found, expected))
    told = {"rank": transport.rank, "worst": max(differences), "torch": "torch" in sys.modules}
    tell(told | {"backend": transport.backend})
    transport.close()


def die() -> None:
    x, y = images(1)[0]
    session = Session(build(subclassed), loss(), x[:2], PLANS[0], backend="gloo")
    session.add_optimizer(momentum())
    session.step(x, y)
    if session.rank == 1:
        os._exit(3)
    try:
        session.step(x, y)
    except PeerError as error:
        tell({"rank": session.rank, "error": str(error)})
        raise


if __name__ == "__main__":
    float64()
    {"exact": exact, "die": die}[sys.argv[1]]()
