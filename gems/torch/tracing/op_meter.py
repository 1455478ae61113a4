"""What one call does below Python: FLOPs, bytes moved, random numbers, saved tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gems.errors import TraceError
from gems.torch.tensors.storage import storage_of

# They change running averages without saying so: neither schema nor version shows it.
AVERAGING = (
    torch.ops.aten.native_batch_norm,
    torch.ops.aten.cudnn_batch_norm,
    torch.ops.aten.miopen_batch_norm,
)


# Cell by cell, although ATen does not say so, or not about cells at all.
HARMLESS = {
    torch.ops.aten.detach, torch.ops.aten.alias, torch.ops.aten.clone, torch.ops.aten._to_copy,
    torch.ops.aten.lift_fresh, torch.ops.aten.scalar_tensor,
    torch.ops.aten.hardswish, torch.ops.aten.hardswish_,
}  # fmt: skip


class CallMeter(TorchDispatchMode):
    """What one call does below Python: FLOPs, bytes moved, random numbers, saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.flops = self.moved = 0
        self.random = False
        self.ops = 0
        self.pointwise = True  # as long as all is
        self.changed: list[torch.Tensor] = []  # in place
        self.written: list[int] = []  # storages of running averages
        self.saves: dict[int, int] = {}
        self.norms: list[str] = []  # layers with running statistics that it ran
        self.used: list[str] = []  # weights that it reached in another way than as its module's

    def restart(self) -> None:
        """Forget an attempt on fake tensors that failed, but for what it used and whether it drew.
        How often each layer runs may differ from sample to sample."""
        random, used = self.random, self.used
        self.clear()
        self.random, self.used = random, used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:  # more than half of what is dispatched
            return result
        self.ops += 1
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            self.changed.append(args[0])
        if func.overloadpacket not in HARMLESS and not self._regenerated(func, result):
            self.pointwise &= torch.Tag.pointwise in func.tags
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if func.overloadpacket in AVERAGING and args[5]:  # training
            self.written += [storage_of(t) for t in args[3:5] if t is not None]
        if counter := flop_registry.get(func.overloadpacket):
            self.flops += counter(*args, **kwargs, out_val=result)
        if not func.is_view:
            tensors = pytree.tree_leaves((args, kwargs, result))
            self.moved += sum(
                t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)
            )
        return result

    def _regenerated(self, func: Any, result: Any) -> bool:
        """Whether autograd makes a view once more after it was changed in place: the same cells."""
        if not func.is_view or not isinstance(result, torch.Tensor):
            return False
        return any(_cells(t) == _cells(result) for t in self.changed)


def _cells(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which cells of which memory a tensor sees, and in which order."""
    return storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def reject_own_generator(name: str, arguments: Any) -> None:
    """What a generator of the model's own gives depends on who drew from it before."""
    if any(isinstance(x, torch.Generator) for x in pytree.tree_leaves(arguments)):
        raise TraceError(
            f"{name} draws from a torch.Generator of the model's own, so its numbers would depend "
            "on the plan; leave the generator out: GEMS keys the default one by step and call"
        )
