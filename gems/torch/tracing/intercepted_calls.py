"""What a recording patches in torch to see calls that a TorchFunctionMode does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint


class Watcher(Protocol):
    """Who is told of calls."""

    def notes(self) -> bool:
        """Whether calls of this thread are to be noted now."""
        ...

    def module(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any: ...

    def function(self, func: Any, args: Any, kwargs: Any, run: Any) -> Any: ...

    def checkpoint_region(self) -> AbstractContextManager[None]: ...


@contextmanager
def patched(watcher: Watcher) -> Iterator[None]:
    """Show modules, autograd functions, TorchScript and checkpoint regions to `watcher`."""
    call = nn.Module.__call__
    # Below `Function.apply`, so that an `apply` somebody took hold of earlier leads here, too.
    below: Any = torch.autograd.function._SingleLevelFunction
    region = torch_checkpoint._checkpoint_without_reentrant_generator
    scripted: Any = torch.jit.ScriptFunction
    script_call = scripted.__call__

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return watcher.module(call, module, args, kwargs)

    def script(function: Any, *args: Any, **kwargs: Any) -> Any:
        """TorchScript is one call: torch shows a TorchFunctionMode only its inside."""
        run = lambda *a, **k: script_call(function, *a, **k)  # noqa: E731
        noted = watcher.notes()
        return watcher.function(function, args, kwargs, run) if noted else run(*args, **kwargs)

    def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = super(below, cls).apply
        if not watcher.notes():
            return original(*args, **kwargs)
        if issubclass(cls, torch_checkpoint.CheckpointFunction):
            return reentrant(args[0], args[2:])
        return watcher.function(cls.apply, args, kwargs, original)

    def reentrant(function: Any, args: Any) -> Any:
        """If nothing that it is given wants a gradient, neither does its result, and weights inside
        of it have none."""
        wants = any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        with watcher.checkpoint_region(), nullcontext() if wants else torch.no_grad():
            return function(*args)

    def region_generator(fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if not watcher.notes():
            yield from region(fn, *args, **kwargs)
            return
        with watcher.checkpoint_region():
            yield

    nn.Module.__call__ = module_call  # type: ignore[method-assign]
    below.apply = classmethod(function_apply)
    scripted.__call__ = script
    torch_checkpoint._checkpoint_without_reentrant_generator = region_generator
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        del below.apply
        scripted.__call__ = script_call
        torch_checkpoint._checkpoint_without_reentrant_generator = region
