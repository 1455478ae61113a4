"""What forward assigns: buffers and `.data`, which stages assign again; all else is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gems.errors import TraceError
from gems.torch.tracing.fake_weights import FakeWeights
from gems.torch.tracing.frozen import tensors_within
from gems.torch.tracing.reads import Access


def assign_buffer(name: str) -> Callable[[nn.Module, torch.Tensor], None]:
    """What a stage calls in place of `module.name = value` for a registered buffer."""
    path, _, key = name.rpartition(".")

    def assign(model: nn.Module, value: torch.Tensor) -> None:
        model.get_submodule(path)._buffers[key] = value

    assign.__name__ = f"assign_{key}"
    return assign


def assigned_buffer(
    weights: FakeWeights, module: nn.Module, path: str, name: str, value: torch.Tensor
) -> str:
    """The first name of a buffer that forward assigns, if a stage can assign it as well."""
    first = weights.first_names[f"{path}.{name}" if path else name]
    if first not in weights.buffers or weights.holder(first) is not module:
        raise TraceError(f"forward assigns to {path}.{name}, which has several names; give it one")
    old: Any = module._buffers[name]
    if (value.shape, value.dtype) != (old.shape, old.dtype):
        raise TraceError(
            f"forward assigns a tensor {list(value.shape)} of {value.dtype} to the buffer {first}, "
            f"which is {list(old.shape)} of {old.dtype}; keep shape and type, or, if it is a "
            "cache, run the model once on a real micro-batch before giving it to GEMS"
        )
    return first


def set_data(func: Any) -> bool:
    """Whether a call is `tensor.data = value`."""
    return func == torch.Tensor.data.__set__  # type: ignore[attr-defined]


def keeps_tensors(value: Any) -> bool:
    return bool(tensors_within(value))


class Lost:
    """In place of a tensor that forward left on a module: stages do not leave it there."""

    def __init__(self, label: str) -> None:
        self._label = label

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise TraceError(
            f"{self._label} is a tensor that forward computes and leaves on the module, and it is "
            "not there after a step: another rank may have computed it. Return it from forward "
            "with the output, so that the loss gets it"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(x for x in args if isinstance(x, Lost))._raise()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._raise()

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = _raise
    __bool__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = __call__ = _raise


def replace_by_lost(access: Access) -> None:
    """Have an error where a recording left a tensor on a module: it is not this step's."""
    if access.path is not None:
        access.name.mapping[access.name.key] = Lost(access.name.label)
