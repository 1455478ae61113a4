"""Short numbers that tell whether two ranks have the same thing: a batch, a loss, a model."""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.distributed.key import key
from gems.geometry.box import Box
from gems.torch.runtime.microbatch import Lazy
from gems.torch.tensors.strides import as_bytes
from gems.torch.tracing.calls import Attr, Call, Ref, is_placeholder
from gems.torch.tracing.trace import Trace

Tensor = torch.Tensor
SMALL = 1 << 20  # bytes that are read whole at every step
LARGE = 1 << 28  # bytes that are read whole where all is asked for
CELLS = 1 << 12  # of what is larger, so many cells, evenly spread


def of_batch(tree: Any, *, thorough: bool, reads_gpu: bool = True) -> int:
    """What a batch holds. Large tensors are sampled; `thorough` reads all of those that fit LARGE,
    and a few cells of arrays that are read box by box. Unless it `reads_gpu`, for which the host
    would wait, only shapes and types of tensors there are compared."""
    leaves, form = pytree.tree_flatten(tree)
    return key(str(form), *(_of_leaf(x, thorough, reads_gpu) for x in leaves))


def _of_leaf(x: Any, thorough: bool, reads_gpu: bool) -> Any:
    if isinstance(x, Tensor) and x.is_cuda and not reads_gpu:
        return key("cuda", tuple(x.shape), str(x.dtype))
    if isinstance(x, Tensor):
        return of_tensor(x, whole=LARGE if thorough else SMALL)
    if isinstance(x, Lazy):
        return _of_lazy(x, thorough)
    return x if isinstance(x, (int, float, complex, str, bytes, type(None))) else type(x).__name__


def of_tensor(x: Tensor, *, whole: int = LARGE) -> int:
    """Values, shape and type. Beyond `whole` bytes only some of the values."""
    flat = x.detach()
    if flat.is_meta:
        return key("meta", tuple(x.shape), str(x.dtype))
    if flat.is_sparse or flat.is_quantized:
        return key(str(flat.layout), tuple(x.shape), str(x.dtype))
    if flat.numel() * flat.element_size() > whole:
        flat = flat[_places(flat.shape, flat.device)]
    flat = flat.contiguous().resolve_conj().resolve_neg()
    data: Any = as_bytes(flat).cpu().numpy() if flat.numel() else b""
    return key(tuple(x.shape), str(x.dtype), zlib.crc32(data))


@functools.lru_cache(maxsize=32)
def _places(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Cells of a tensor, evenly spread, as indices."""
    at = torch.linspace(0, shape.numel() - 1, CELLS, dtype=torch.float64, device=device)
    return torch.unravel_index(at.long(), shape)


def _of_lazy(x: Lazy, thorough: bool) -> Any:
    """Of an array that is read box by box: its own `checksum`, if it has one."""
    about = (tuple(x.shape), str(x.dtype), x.start)
    if (checksum := getattr(x.source, "checksum", None)) is not None:
        return (*about, checksum() if callable(checksum) else checksum)
    if not thorough or 0 in x.shape:
        return about
    corners = [tuple(0 for _ in x.shape), tuple(n // 2 for n in x.shape)]
    cells = [x.read(Box(at, tuple(i + 1 for i in at))) for at in corners]
    return (*about, *(of_tensor(cell) for cell in cells))


def of_function(thing: Any) -> Any:
    """What a loss, an optimizer's or a scheduler's function is, as far as that can be compared.

    Its name and code, what `partial` holds, a module with its settings and what it does not train;
    of a closure the floats and the tensors. (Integers and strings may well differ: a rank.)
    """
    if isinstance(thing, functools.partial):
        inner = of_function(thing.func)
        return key(inner, [_value(x) for x in thing.args], sorted(_pairs(thing.keywords)))
    if isinstance(thing, nn.Module):
        fixed = [p for p in thing.parameters() if not p.requires_grad]
        return key(repr(thing), [of_tensor(t) for t in (*fixed, *thing.buffers())])
    if isinstance(thing, types.MethodType):
        return key("method", of_function(thing.__func__))
    if isinstance(thing, types.FunctionType):
        cells = [_cell(cell) for cell in thing.__closure__ or ()]
        defaults = [_value(x) for x in thing.__defaults__ or ()]
        return key(thing.__qualname__, thing.__code__.co_code, defaults, cells)
    return key(getattr(thing, "__qualname__", type(thing).__qualname__))


def _pairs(named: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, _value(x)) for name, x in named.items()]


def _value(x: Any) -> Any:
    if isinstance(x, Tensor):
        return of_tensor(x)
    plain = isinstance(x, (int, float, complex, str, type(None)))
    return x if plain else type(x).__qualname__


def _cell(cell: Any) -> Any:
    try:
        held = cell.cell_contents
    except ValueError:
        return "empty"
    return _value(held) if isinstance(held, (float, Tensor)) else type(held).__qualname__


def of_model(traced: Trace, model: nn.Module) -> int:
    """What a model does and is made of, but for the values of its weights: recorded calls with
    their arguments, settings of layers, names and shapes of weights, which of them are trained."""
    modules = dict(model.named_modules())

    def spelled(call: Call) -> Any:
        leaves = pytree.tree_leaves((call.args, call.kwargs), is_leaf=is_placeholder)
        settings = modules[call.module].extra_repr() if call.module in modules else ""
        return call.name, call.reads, settings, [_argument(x) for x in leaves]

    weights = [
        (name, tuple(t.shape), str(t.dtype), t.requires_grad, t.is_meta)
        for named in (model.named_parameters(), model.named_buffers())
        for name, t in named
    ]
    return key([spelled(call) for call in traced.record.calls], weights)


def _argument(x: Any) -> Any:
    return x.name if isinstance(x, (Ref, Attr)) else _value(x)
