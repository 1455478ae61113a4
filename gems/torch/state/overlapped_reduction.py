"""All-reduces that begin inside the last backward of a stage, chunk by chunk of its gradients.

Backward completes gradients from the last layer to the first. A chunk whose gradients are complete
is reduced while backward goes on with earlier layers:

    backward    layer 9 ... 7 | layer 6 ... 4 | layer 3 ... 0 |
    all-reduce                | chunk 0       | chunk 1       | chunk 2, flags, statistics

How often each gradient is accumulated in one backward (once; more often where patches or recomputed
layers follow each other) is counted first and used from the next time on. Chunks begin in one order
on all ranks, since collectives pair up by order; what has not begun by then, begins after backward:
so does all from a chunk on in which a weight got no gradient the last time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from torch import nn

from gems.torch.state.grad_bucket import GradBucket, Tensor

Start = Callable[[Tensor], None]


class OverlappedReduction:
    """While it is entered, `start` is called with each chunk of a bucket as soon as it is complete.
    `counts`, by parameter id, are those of an earlier backward, and are set to those of this one.
    """

    def __init__(self, bucket: GradBucket, counts: dict[int, int], start: Start) -> None:
        self.bucket, self.counts, self.start = bucket, counts, start
        self.seen = dict.fromkeys(map(id, bucket.parameters), 0)
        self.chunk_of = {i: n for n, chunk in enumerate(bucket.chunks) for i in chunk.indices}
        self.incomplete = [len(chunk.indices) for chunk in bucket.chunks]

    def __enter__(self) -> None:
        self.hooks = [
            self.bucket.parameters[index].register_post_accumulate_grad_hook(self._hook(number))
            for index, number in self.chunk_of.items()
            if self.bucket.parameters[index].requires_grad  # else frozen since it got a gradient
        ]

    def _hook(self, number: int) -> Callable[[nn.Parameter], None]:
        def accumulated(parameter: Tensor) -> None:
            self.seen[id(parameter)] += 1
            if self.seen[id(parameter)] == self.counts.get(id(parameter)):
                self.incomplete[number] -= 1
                while self._ready():
                    self.start(self.bucket.begin_chunk())

        return accumulated

    def _ready(self) -> bool:
        at = self.bucket.begun
        return at < len(self.incomplete) and not self.incomplete[at] and self.bucket.in_place(at)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for hook in self.hooks:
            hook.remove()
        if error is None:
            self.counts.clear()
            self.counts.update(self.seen)
