"""One run of a model's forward on fake tensors, noted call by call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gems.errors import TraceError
from gems.torch.tracing.caches import forget_cached, uncompiled
from gems.torch.tracing.call_recorder import CallRecorder
from gems.torch.tracing.calls import Record, name_of
from gems.torch.tracing.fake_weights import FakeWeights
from gems.torch.tracing.intercepted_calls import patched
from gems.torch.tracing.norm_calls import known_momentum, tracked
from gems.torch.tracing.reads import Reads
from gems.torch.tracing.real_run import real_run
from gems.torch.tracing.unrecordable import Unrecordable, reason
from gems.torch.tracing.values import Values
from gems.torch.tracing.variables import variables, variables_of_hooks

BACKWARD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def is_leaf(module: nn.Module) -> bool:
    """Modules that run as they are: all of `torch.nn` but its containers, compiled code, and those
    that are marked so."""
    if isinstance(module, torch.jit.ScriptModule) or getattr(module, "runs_as_it_is", False):
        return True
    container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return type(module).__module__.startswith("torch.nn") and not container


def _has_backward_hooks(module: nn.Module) -> bool:
    """They hang on real tensors, so their module runs as it is."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


class Recorder(TorchFunctionMode):
    """The state of one recording. `whole` are the paths of modules that run as they are."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        whole: set[str],
        expects: bool,
        earlier: Recorder | None = None,
    ) -> None:
        super().__init__()
        self.model, self.device, self.whole, self.expects = model, device, whole, expects
        modules = dict(model.named_modules())
        self.paths = {id(m): path for path, m in modules.items()}
        whole.update(p for p, m in modules.items() if not is_leaf(m) and _has_backward_hooks(m))
        self.leaves = {id(m) for p, m in modules.items() if is_leaf(m) or p in whole}
        self.fake = earlier.fake if earlier else FakeTensorMode(allow_non_fake_inputs=True)
        self.weights = FakeWeights(model, self.fake, device)
        self.values = Values(self.weights.named, device, earlier.values if earlier else None)
        self.current = CallRecorder(model, device, whole, self.weights, self.values)
        self.tape, self.branches = self.current.tape, self.current.branches
        self.reads = Reads(self.paths, lambda: self.current.running, self.current.assign)
        self.impure: list[tuple[str, str]] = []  # leaves whose own Python state changes, and what
        self.thread = threading.get_ident()

    # --- one recording ---------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
        containers = self._note_variables()
        with (
            self.weights.installed(), self.reads.watching(), patched(self), self.fake,
            uncompiled(),
        ):  # fmt: skip
            args, kwargs = pytree.tree_map(self.values.fake, (args, kwargs))
            inputs = self.values.inputs(args, kwargs)
            result = self._forward(args, kwargs)
            output, outputs = self.values.outputs(result, type(self.model).__name__)
            self._reject_made()
        self.tape.finish(self.model, outputs)
        return Record(
            self.tape.calls, self.values.named, inputs, output, outputs,
            self.weights.parameters, self.weights.buffers, self.weights.first_names,
            self.tape.atomic, self.device.type, tuple(sorted(self.whole)), self.values.storages(),
            tuple(dict.fromkeys(
                (x.path, x.name.key) for x in self.reads.accesses
                if x.path is not None and x.guarded and not x.wrote
            )),
            containers,
        )  # fmt: skip

    def _note_variables(self) -> tuple[str, ...]:
        """Note what forward may read, as it is now. Gives the modules that are recorded inside."""
        modules = dict(self.model.named_modules())
        containers = {p: m for p, m in modules.items() if id(m) not in self.leaves}
        leaves = {p: m for p, m in modules.items() if id(m) in self.leaves}
        self.reads.note_hooks(modules.values())
        self.reads.names(variables_of_hooks(containers))
        self.reads.names(variables_of_hooks(leaves), outer=False)
        self.reads.names(variables(containers.values()))
        self.reads.names(variables(leaves.values()), outer=False)
        return tuple(containers)

    def _forward(self, args: Any, kwargs: Any) -> Any:
        with self, torch.autograd.graph.saved_tensors_hooks(self.current.save, lambda x: x):
            try:
                result = pytree.tree_map(self._as_value, self.model(*args, **kwargs))
            except (Unrecordable, TraceError):
                raise
            except Exception as error:
                raise self.current.rejected or Unrecordable("", reason(error)) from error
            if self.current.rejected is not None:
                raise self.current.rejected
            return result

    def _as_value(self, x: Any) -> Any:
        """A weight that forward returns as it is becomes a value, so that the last stage has it."""
        return x.view_as(x) if isinstance(x, torch.Tensor) and id(x) in self.weights.named else x

    def forget(self) -> list[weakref.ref[torch.Tensor]]:
        """Drop all fakes, and empty caches of functions that have one. Gives those that are still
        in memory."""
        made = self.values.forget()
        if any(tensor() is not None for tensor in made):
            forget_cached(self.model.modules())
        return [tensor for tensor in made if tensor() is not None]

    def _reject_made(self) -> None:
        for module, kind, key in self.weights.made():
            path = self.paths.get(id(module), type(module).__name__)
            if kind == "buffer" and key in module._non_persistent_buffers_set:  # a cache
                self.tape.reject_dependent(f"{path}.{key}", module._buffers[key])
                continue
            raise TraceError(
                f"forward makes the {kind} {key} of {path or type(module).__name__} when it first "
                "runs; make it in the constructor, or run the model once on a real micro-batch "
                "before giving it to GEMS"
            )

    # --- what torch shows ---------------------------------------------------------------------

    def notes(self) -> bool:
        return threading.get_ident() == self.thread and not self.current.inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.notes():
            if self.current.running is not None and threading.get_ident() == self.thread:
                self.current.note_used(args)
            return func(*args, **kwargs)
        outcome = self.branches.outcome(func, args, self.values.known, self.tape.calls)
        if outcome is not None:
            return self._expected(args[0], outcome)
        if func in BACKWARD:
            raise self.current.unrecordable(f"{name_of(func)}: it runs backward inside of forward")
        return self.function(func, args, kwargs, func)

    def function(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        return self.current.note(None, func, args, kwargs, run)

    def checkpoint_region(self) -> AbstractContextManager[None]:
        return self.tape.checkpoint_region()

    def module(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self.paths.get(id(module)) if threading.get_ident() == self.thread else None
        if path is None:
            return call(module, *args, **kwargs)
        if self.current.inside:
            if tracked(module):
                self.current.meter.norms.append(path)
            with known_momentum(module):
                return call(module, *args, **kwargs)
        if id(module) in self.leaves and (path or "" in self.whole):
            whole = lambda *a, **k: self._whole(path, call, a, k)  # noqa: E731
            plain = lambda *a, **k: call(module, *a, **k)  # noqa: E731
            with known_momentum(module):
                return self.current.note(
                    path, None, args, kwargs, whole if path in self.whole else plain
                )
        self.current.stack.append(path)
        try:
            return call(module, *args, **kwargs)
        except (Unrecordable, TraceError):
            raise
        except Exception as error:
            why = f"{path or 'its forward'}: {reason(error)}"
            raise self.current.rejected or Unrecordable(path, why) from error
        finally:
            self.current.stack.pop()

    def _expected(self, x: torch.Tensor, outcome: bool) -> bool:
        """A branch that looks for numbers that are not finite: on the whole of a model, expect
        none."""
        if not self.expects:
            why = "bool: it looks at the values of a tensor, which differ from sample to sample"
            raise self.current.unrecordable(why, expectable=True)
        self.function(self.branches.check(outcome, self.current.stack), (x,), {}, lambda _: None)
        return outcome

    def _whole(self, path: str, call: Any, args: Any, kwargs: Any) -> Any:
        """Run a module that is taken whole: on fake tensors, unless it looks at values."""
        module = self.model.get_submodule(path)
        try:
            with self.reads.attempt():
                return call(module, *args, **kwargs)
        except Exception:
            forget_cached(module.modules())
            self.current.meter.restart()
            self.current.real = True
            try:
                found = real_run(path, module, args, kwargs, self.weights, self.values.given)
            finally:
                self.current.real = False
        self.current.meter.used += found.used
        self.impure += [(path, what) for what in found.impure]
        for name in found.changed:
            module.get_buffer(name).zero_()  # a fake one: what its twin did is seen on it

        def fake(x: Any) -> Any:
            """Another branch may want a gradient of it."""
            y = self.values.fake(x)
            if isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex()):
                y.requires_grad_(y.requires_grad or found.differentiable)
            return y

        return pytree.tree_map(fake, found.result)
