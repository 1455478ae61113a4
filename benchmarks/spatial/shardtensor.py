"""ShardTensor of NVIDIA PhysicsNeMo over gloo: the peer that cuts images, where it is installed.

It lives in an environment of its own, with GEMS beside it, so that none of our pins move:

    python3.11 -m venv /tmp/peer-venv
    /tmp/peer-venv/bin/pip install torch==2.13.0 numpy==2.4.6 rich==15.0.0
    /tmp/peer-venv/bin/pip install warp-lang==1.19.0 tensordict==0.15.3 s3fs==2026.9.0
    /tmp/peer-venv/bin/pip install packaging==26.3 requests==2.34.2 tqdm==4.70.1
    /tmp/peer-venv/bin/pip install treelib==1.8.0 termcolor==3.3.0
    /tmp/peer-venv/bin/pip install --no-deps nvidia-physicsnemo==2.2.2 -e .
    PYTHONPATH=. /tmp/peer-venv/bin/python -m benchmarks.spatial.run

The model is left as it is. Images and targets become ShardTensors of this rank's rows, and every
call on them finds its rule there: a convolution exchanges halos by an all-to-all, its backward
sums each parameter's gradient by an all-reduce of its own. What has no rule goes to DTensor.
"""

from __future__ import annotations

import importlib
import time
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.pipeline.livebytes import LiveBytes
from benchmarks.pipeline.ranks import RankError, Ranks
from benchmarks.spatial import exact
from benchmarks.spatial.networks import WORK

ROWS = 2  # the dim of an image that is cut
COLLECTIVES = ("all_to_all_single", "all_reduce", "all_gather_into_tensor")
WRONG = 1e-9  # further than this from the plain model in float64 is another number


@cache
def absence() -> str | None:
    """Why there is no such row, if there is none. Half an installation is none: what it would
    raise is not the peer's fault."""
    try:
        _register()
    except ImportError as error:
        return (
            f"no row for PhysicsNeMo's ShardTensor: {error}; "
            "benchmarks/spatial/shardtensor.py says how to install it"
        )
    return None


def verdict(work: str) -> dict[str, Any]:
    """How exact its step is, or in its own words why it takes none.

    In processes of their own: it may raise on one rank while the other waits.
    """
    try:
        with Ranks(2, timeout=120) as ranks:
            off = exact.worst(ranks.run(errors, work))
    except RankError as words:
        return {"refused": str(words).strip().splitlines()[-1]}
    # Not `off > WRONG`: nan is wrong too.
    return {"error": off} if off <= WRONG else {"refused": f"wrong numbers, off by {off:.0e}"}


@cache
def _register() -> None:
    """Have the package register its rules for what networks on images call.

    Its own `register_custom_ops()` also registers those for point clouds and for attention to
    neighbours, and imports timm and torchvision for them, of which the wheel on PyPI does not
    load beside a torch without CUDA.
    """
    importlib.import_module("physicsnemo.domain_parallel.custom_ops")
    for name in (
        "conv_patches", "index_ops", "linear_patches", "normalization_patches", "padding",
        "pooling_patches", "unary_ops", "unpooling_patches", "view_ops",
    ):  # fmt: skip
        importlib.import_module(f"physicsnemo.domain_parallel.shard_utils.{name}")


# What follows runs on the ranks.


@cache
def _mesh() -> DeviceMesh:
    """All ranks in a row."""
    _register()
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _own(whole: Tensor) -> Tensor:
    """This rank's rows; labels are everybody's."""
    if whole.dim() <= ROWS:
        return whole
    return whole.chunk(dist.get_world_size(), ROWS)[dist.get_rank()].contiguous()


def _cut(own: Tensor, whole: torch.Size) -> Any:
    from physicsnemo.domain_parallel import ShardTensor

    if len(whole) <= ROWS:
        return own
    return ShardTensor.from_local(
        own, _mesh(), [Shard(ROWS)], sharding_shapes="chunk", global_shape=tuple(whole)
    )


class Step:
    """A model with this rank's rows of a batch. Every call leaves the gradients of the whole
    batch in the parameters of every rank."""

    def __init__(self, work: str, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        _mesh()
        self.model = model
        self.loss = WORK[work].loss
        self.wholes = [whole.shape for whole in batch]
        self.owns = [_own(whole) for whole in batch]

    def __call__(self) -> Any:
        images, targets = map(_cut, self.owns, self.wholes)
        loss = self.loss(self.model(images), targets)
        loss.backward()
        return loss


@cache
def _step(work: str) -> Step:
    return Step(work, WORK[work].model().train(), WORK[work].batch())


def shardtensor(work: str, peak: bool = False) -> tuple[float, float]:
    """As `steps.plain`: seconds and CPU seconds of a step, or live bytes."""
    step = _step(work)
    step.model.zero_grad()
    if peak:
        live = LiveBytes()
        with _Inside(live.here()):
            step()
        return live.peak, 0
    dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    step()
    return time.perf_counter() - wall, time.thread_time() - cpu


def errors(work: str) -> float:
    model = exact.model(work)
    loss = Step(work, model, exact.batch(work))().full_tensor().item()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return exact.error(work, loss, found)


def traffic(work: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Messages and bytes of this rank in one step, as `steps.traffic` counts them: an all-to-all
    or an all-reduce is one. Apart from them, those that sum gradients: one per parameter."""
    step = _step(work)
    step.model.zero_grad()
    seen = _Collectives()
    with _Inside(seen):
        step()
    parameters = list(step.model.parameters())
    sums = len(parameters), sum(p.numel() * p.element_size() for p in parameters)
    return (seen.messages - sums[0], seen.bytes - sums[1]), sums


class _Collectives(TorchDispatchMode):
    """Counts torch's functional collectives, of which all messages of these layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = 0
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name in COLLECTIVES:
            self.messages += 1
            self.bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


class _Inside(TorchDispatchMode):
    """Shows a mode the tensors inside ShardTensors and DTensors, not the wrappers.

    A wrapper has the size of the whole image and no memory; what is done inside it happens below
    the mode that sees it. So let the wrapper unpack itself first: it then calls with what it holds.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        if types:
            return NotImplemented
        return self.mode.__torch_dispatch__(func, types, args, kwargs or {})
