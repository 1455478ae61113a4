"""BatchNorm layers with a forward of their own: find their running statistics among the calls.

Libraries derive layers from `nn.BatchNorm2d` whose forward counts the batch, calls `F.batch_norm`
on the layer's own buffers, and goes on with dropout or an activation (timm's `BatchNormAct2d`).
Such a forward is recorded call by call, so that tiles can run it. Where these calls do to the
buffers exactly what BatchNorm does, they are its running statistics (see running_stats.py).
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from gems.torch.tracing.calls import Attr, Call

_signature = inspect.signature(F.batch_norm)
COUNT = "num_batches_tracked"


def tracked(module: nn.Module) -> bool:
    """Whether a forward of this module, as it is now, changes running statistics."""
    return isinstance(module, _NormBase) and module.training and module.running_mean is not None


def adopt_norms(
    calls: Sequence[Call], model: nn.Module, paths: set[str]
) -> tuple[set[int], list[tuple[int, int]]]:
    """Note at each `F.batch_norm` whose running statistics it takes. What changes the same buffers
    in any other way stays as it is: a change of a buffer that is not known.

    Gives the calls that only count batches, which change nothing by themselves any more, and the
    runs of calls that must stay on one stage: a layer's count and its averages.
    """
    changing: dict[str, list[int]] = defaultdict(list)
    for at, call in enumerate(calls):
        for path in {name.rpartition(".")[0] for name in call.touches}:
            if call.module is None and path in paths:
                changing[path].append(at)
    counting: set[int] = set()
    together: list[tuple[int, int]] = []
    for path, found in changing.items():
        averages = [at for at in found if _averages(calls[at], path, model.get_submodule(path))]
        counts = [at for at in found if _counts(calls[at], path)]
        pairs = list(zip(counts, averages, strict=False))
        whole = len(averages) == len(counts) == len(found) - len(averages)
        if not averages or not whole or any(a > b for a, b in pairs):
            continue
        for at in averages:
            calls[at].norms = (path,)
        counting.update(counts)
        together += pairs
    return counting, together


def norm_paths(model: nn.Module) -> set[str]:
    """Layers with averages by the rule of running_stats.py, and perhaps a forward of their own."""
    return {
        path
        for path, m in model.named_modules()
        if isinstance(m, _BatchNorm) and m.training and m.momentum is not None
    }


def _averages(call: Call, path: str, module: Any) -> bool:
    """Whether it is BatchNorm in training, into the layer's averages with its momentum."""
    if getattr(call.function, "__name__", "") != "batch_norm":
        return False
    try:
        given = _signature.bind(*call.args, **call.kwargs)
    except TypeError:
        return False
    given.apply_defaults()
    a = given.arguments
    return (
        a["running_mean"] == Attr(f"{path}.running_mean")
        and a["running_var"] == Attr(f"{path}.running_var")
        and a["training"] is True
        and a["momentum"] == module.momentum
    )


def _counts(call: Call, path: str) -> bool:
    """Whether it adds one to this layer's number of batches, and gives it to nobody."""
    name = getattr(call.function, "__name__", "")
    plain = call.args == (Attr(f"{path}.{COUNT}"), 1) and not call.kwargs
    return name in ("add_", "__iadd__") and plain


@contextmanager
def known_momentum(module: nn.Module) -> Iterator[None]:
    """A cumulative average looks at how many batches it has seen, and a fake count has no value."""
    unknown = tracked(module) and module.momentum is None
    if unknown:
        module.momentum = 0.0  # type: ignore[assignment]
    try:
        yield
    finally:
        if unknown:
            module.momentum = None  # type: ignore[assignment]
