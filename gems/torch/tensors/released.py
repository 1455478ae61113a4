"""Tensors whose memory is released: safe to hold, and an error when their numbers are used.

Between steps, weights that are sharded with zero=3 or offloaded have no memory here, but the user's
model still has the parameters, and whoever has a reference to one must not read freed memory.

    release    the tensor gets one cell of NaN in place of its memory, and a class that rejects all
               that would look at numbers: it tells shape, dtype, strides, whether it has a gradient
    restore    its memory and its class are back, and it is the same Python object. What autograd
               has saved of it is whole again

The class does the work: a parameter is `type(p)` again as soon as it is restored, at the cost of
two attributes. The cell is for the few functions of torch that do not ask the class.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from gems.errors import GemsError

Tensor = torch.Tensor


def release(tensor: Tensor, name: str, why: str, *, keep: bool = True) -> None:
    """Let a tensor have no memory, after or before its storage is freed. `why` ends the sentence
    "weight fc.weight ...". Without `keep` it cannot be restored, and refers to the storage no more.
    """
    if is_released(tensor):
        return
    memory = tensor.data
    form = memory
    if not keep:
        form = torch.empty_strided(memory.shape, memory.stride(), dtype=memory.dtype, device="meta")
    cell = torch.full((), torch.nan if _has_nan(memory) else 0, dtype=memory.dtype)
    tensor.data = cell.to(memory.device).expand(memory.shape)
    tensor._gems = (form, name, why)  # type: ignore[attr-defined]
    tensor.__class__ = _guard(type(tensor))


def restore(tensor: Tensor) -> None:
    """Let it have its memory again, which must be there by the time that it is used."""
    if is_released(tensor):
        tensor.__class__ = type(tensor).original  # type: ignore[attr-defined]
        tensor.data = tensor._gems[0]  # type: ignore[attr-defined]
        del tensor._gems  # type: ignore[attr-defined]


def is_released(tensor: Tensor) -> bool:
    return isinstance(tensor, _Released)


def form_of(tensor: Tensor) -> Tensor:
    """The tensor; of one that is released, one of its form whose numbers nobody may look at."""
    return tensor._gems[0] if isinstance(tensor, _Released) else tensor


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Released:
    """What a released tensor's class does; `_guard` mixes it in."""

    _gems: tuple[Tensor, str, str]
    original: type[Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_FORM:  # which is the memory's; the cell has strides of its own
            args, kwargs = pytree.tree_map(
                lambda x: form_of(x) if isinstance(x, Tensor) else x, (args, kwargs)
            )
        elif func not in OF_ITSELF:
            found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _Released)]
            _reject(found[0], getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:
        memory, name, why = self._gems
        dtype = str(memory.dtype).removeprefix("torch.")
        return f"<{name}, {tuple(memory.shape)} of {dtype}, {why}>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _reject(self, "copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _reject(self, "pickling")


def _reject(tensor: _Released, what: str) -> NoReturn:
    _, name, why = tensor._gems
    raise GemsError(
        f"{name} {why}, so {what.strip('_')} cannot read it. For the weights use "
        "trainer.state_dict() or trainer.export(), for the model's output trainer.predict(), for "
        "the optimizer's state trainer.save(); all ranks must call them"
    )


@cache
def _guard(kind: type[Tensor]) -> type[Tensor]:
    return type(f"Released{kind.__name__}", (_Released, kind), {"original": kind})


def _functions(names: str, *owners: Any) -> set[Any]:
    return {getattr(owner, n) for owner in owners for n in names.split() if hasattr(owner, n)}


def _properties(names: str, how: str = "__get__") -> set[Any]:
    found = (getattr(Tensor, name, None) for name in names.split())
    return {getattr(one, how) for one in found if hasattr(one, how)}


# What is known of a tensor without its numbers, or made like it.
OF_FORM = {
    *_properties(
        "shape dtype device ndim layout is_cpu is_cuda is_meta is_sparse is_sparse_csr is_nested "
        "is_quantized is_mkldnn is_xpu is_mps nbytes itemsize"
    ),
    *_functions(
        "size dim ndimension numel nelement stride storage_offset element_size is_contiguous "
        "is_floating_point is_complex is_signed is_conj is_neg is_inference is_same_size "
        "get_device untyped_storage data_ptr __len__ zeros_like ones_like full_like empty_like "
        "rand_like randn_like new_empty new_zeros new_ones new_full new_tensor new_empty_strided",
        Tensor,
        torch,
    ),
}  # fmt: skip
# What concerns the Python object and its place in autograd.
OF_ITSELF = {
    *_properties(
        "grad requires_grad is_leaf grad_fn retains_grad _version _backward_hooks output_nr "
        "_post_accumulate_grad_hooks _grad _grad_fn"
    ),
    *_properties("grad requires_grad _backward_hooks _post_accumulate_grad_hooks _grad", "__set__"),
    *_properties("grad", "__delete__"),
    *_functions(
        "__hash__ requires_grad_ register_hook register_post_accumulate_grad_hook __dir__", Tensor
    ),
}
