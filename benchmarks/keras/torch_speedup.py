"""What speedup.py measures, by the PyTorch front end on the equal network."""

from __future__ import annotations

from typing import Any

from benchmarks.keras.networks import batch, torch_network
from benchmarks.keras.ranks import Size, answer
from benchmarks.keras.speedup import MICRO_BATCHES, plans, turns


def measure(size: Size) -> Any:
    import torch

    import gems
    from gems.torch.launch import connect
    from gems.transport.threads import World

    torch.set_num_threads(1)
    images, labels = (torch.from_numpy(x) for x in batch(size.samples, size.side))
    images = images.permute(0, 3, 1, 2).contiguous()
    sample = images[: size.samples // MICRO_BATCHES]
    transport = connect("gloo", device="cpu")[0]

    def trainer(plan: Any, on: Any) -> Any:
        return gems.Trainer(
            torch_network(size.blocks, size.width),
            torch.nn.functional.cross_entropy,
            lambda params: torch.optim.SGD(params, 1e-3, momentum=0.9),
            sample,
            plan,
            transport=on,
            device="cpu",
        )

    one, two = plans()
    alone = trainer(one, World(1).rank(0)) if transport.rank == 0 else None
    both = trainer(two, transport)
    return turns(size, transport, alone, both, lambda t: t.step(images, labels))


if __name__ == "__main__":
    answer(measure)
