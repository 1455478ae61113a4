"""One call at a time: what it is given, what it does, what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from gems.errors import TraceError
from gems.torch.tensors.storage import storage_of
from gems.torch.tracing.assigned import assign_buffer, assigned_buffer, set_data
from gems.torch.tracing.calls import Call, name_of, tensors_in
from gems.torch.tracing.fake_weights import FakeWeights
from gems.torch.tracing.frozen import tensors_within
from gems.torch.tracing.norm_calls import tracked
from gems.torch.tracing.op_meter import CallMeter, reject_own_generator
from gems.torch.tracing.tape import Made, Tape
from gems.torch.tracing.unrecordable import Unrecordable, looks_at_values, reason
from gems.torch.tracing.value_checks import Branches
from gems.torch.tracing.values import Values


class CallRecorder:
    """Puts calls on a tape. `whole` are the paths of modules that run as they are."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        whole: set[str],
        weights: FakeWeights,
        values: Values,
    ) -> None:
        self.model, self.device, self.whole = model, device, whole
        self.weights, self.values, self.attrs = weights, values, weights.named
        self.tape, self.meter, self.branches = Tape(values, weights), CallMeter(), Branches()
        self.ambient = self._autocast()
        self.stack: list[str] = []  # containers that run now
        self.running: str | None = None  # the leaf that runs now
        self.inside = 0  # depth of leaf calls: nothing is noted inside
        self.real = False  # on real numbers
        self.rejected: TraceError | None = None  # torch takes it for a TypeError and goes on

    def note(
        self, path: str | None, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]
    ) -> Any:
        self.inside += 1  # from here on nothing is noted, our own looking at tensors included
        try:
            self.meter.clear()
            args, kwargs = self._with_fakes(path or name_of(func), args, kwargs)
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            watched = self._watched(path, tensors)
            before = [t._version for t in watched]
            result = self._metered(path, func, lambda: run(*args, **kwargs))
            if self.meter.random and path is None:
                reject_own_generator(name_of(func), (args, kwargs))
            changed = [t for t, v in zip(watched, before, strict=True) if t._version != v]
            changed += self._replaced(path, func, args)
            made = list(tensors_in(result))
            # Otherwise it gave a shape, a dtype, a flag: Python has that.
            if made or changed or self.meter.written or self._acts(func, args):
                self._add(path, func, args, kwargs, tensors, changed, made)
            return result
        finally:
            self.inside -= 1

    def _with_fakes(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments with the fakes of weights, however they were reached."""
        found: dict[int, torch.Tensor] = {}
        for x in pytree.tree_leaves((args, kwargs)):
            if not isinstance(x, torch.Tensor) or id(x) in self.values.known or id(x) in self.attrs:
                continue
            if isinstance(x, FakeTensor):  # from an earlier run, or from out of sight
                if id(x) not in self.values.earlier:
                    what = f"{name} is given a tensor {list(x.shape)} that no recorded call made"
                    raise self.unrecordable(what)
                self.values.add(x, self.values.unique("earlier"))
            elif (fake := self.weights.of(x)) is not None:
                found[id(x)] = fake
            elif x.requires_grad:
                self._reject_unregistered(x, name)
        if not found:
            return args, kwargs
        return pytree.tree_map(lambda x: found.get(id(x), x), (args, kwargs))

    def _reject_unregistered(self, x: torch.Tensor, name: str) -> None:
        self.rejected = TraceError(
            f"{name} uses a tensor {list(x.shape)} that wants a gradient but is not a parameter of "
            "the model, so nobody would train it; register it (self.weight = nn.Parameter(...), or "
            "an nn.ParameterList for several), or detach it"
        )
        raise self.rejected

    def _watched(self, path: str | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that a call might change: what it is given, and its module's buffers."""
        found = {id(t): t for t in tensors}
        if path is not None:
            found |= {id(b): b for b in self.model.get_submodule(path).buffers()}
        return list(found.values())

    def _metered(self, path: str | None, func: Any, run: Callable[[], Any]) -> Any:
        if path is not None and tracked(self.model.get_submodule(path)):
            self.meter.norms.append(path)
        outer, self.running = self.running, path
        try:
            with self.meter:
                return run()
        except Unrecordable:
            raise
        except Exception as error:
            if isinstance(error, TraceError) and path is None:
                raise
            whole = path is not None and path in self.whole
            if path is not None and not whole and not looks_at_values(error):
                raise TraceError(f"{path} does not take its input: {reason(error)}") from error
            why = f"{path or name_of(func)}: {reason(error)}"
            raise (Unrecordable(path or "", why) if whole else self.unrecordable(why)) from error
        finally:
            self.running = outer

    def _replaced(self, path: str | None, func: Any, args: Any) -> list[torch.Tensor]:
        """What a call changed without a trace in version counters: `.data` that is set, and buffers
        that a leaf assigned, which it has again for the rest of the recording."""
        if path is None:
            return [args[0]] if set_data(func) else []
        return self.weights.reinstalled(self.model.get_submodule(path))

    def _acts(self, func: Any, args: Any) -> bool:
        """Whether a call matters although it gives no tensor: checks, and hooks on tensors."""
        if func is torch.Tensor.register_hook:
            cells = getattr(args[1], "__closure__", ()) or ()
            if any(tensors_within(cell.cell_contents) for cell in cells):
                raise self.unrecordable("register_hook with a function that holds tensors")
            return True
        return self.branches.checks(func)

    def _add(
        self, path: str | None, func: Any, args: Any, kwargs: Any,
        tensors: list[torch.Tensor], changed: list[torch.Tensor], made: Made,
    ) -> Call:  # fmt: skip
        args, kwargs = pytree.tree_map(self.values.placeholder, (tuple(args), dict(kwargs)))
        attrs = [self.attrs[id(t)] for t in tensors if id(t) in self.attrs]
        if path is not None:
            module = self.model.get_submodule(path)
            attrs += [self.attrs[id(t)] for t in (*module.parameters(), *module.buffers())]
            attrs += self.meter.used
        inner = f"{self.stack[-1]}." if self.stack and self.stack[-1] else ""
        given = path if path is not None else inner + name_of(func)
        name = self.values.unique(given or type(self.model).__name__)
        layered, state = isinstance(self.model, nn.Sequential), self._autocast()
        call = Call(
            name=name,
            layer=name.partition(".")[0].partition(":")[0] if layered else name,
            module=path,
            function=func,
            args=args,
            kwargs=kwargs,
            reads=self.values.names(tensors),
            attrs=tuple(dict.fromkeys(attrs)),
            touches=self.weights.touched(changed, self.meter.written),
            norms=tuple(self.meter.norms),
            grad=torch.is_grad_enabled(),
            autocast=None if state == self.ambient else state,
            random=self.meter.random,
            pointwise=self.meter.pointwise and self.meter.ops > 0,
            region=self.tape.region,
            saves=self.meter.saves,
            flops=self.meter.flops,
            moved=self.meter.moved,
        )
        self.tape.add(call, changed, made)
        return call

    def assign(self, path: str, module: nn.Module, name: str, value: Any) -> bool:
        """Note the assignment of a tensor to a buffer; whether that was one."""
        if self.running is not None or module._buffers.get(name) is None:
            return False
        if not isinstance(value, torch.Tensor):
            return False
        first = assigned_buffer(self.weights, module, path, name, value)
        self.inside += 1
        try:
            self.meter.clear()
            (value,), _ = self._with_fakes("an assignment", (value,), {})
            call = self._add(None, assign_buffer(first), (self.model, value), {}, [value], [], [])
            call.attrs, call.touches = (*call.attrs, first), (first,)
        finally:
            self.inside -= 1
        module._buffers[name] = value
        return True

    def note_used(self, args: Any) -> None:
        """Inside of a leaf: a weight of another module, or one that it holds in a list."""
        for x in args:
            if isinstance(x, nn.Parameter) and type(x) is not FakeTensor:
                if (fake := self.weights.of(x)) is not None:
                    self.meter.used.append(self.attrs[id(fake)])
                elif x.requires_grad and not self.real:
                    self._reject_unregistered(x, self.running or "")

    def save(self, tensor: torch.Tensor) -> Any:
        storage = storage_of(tensor)
        if storage not in self.weights.in_storage:
            self.values.kept.append(tensor)
            self.meter.saves[storage] = tensor.untyped_storage().nbytes()
        # Nobody runs backward but a module that runs as it is. Of an output that its own graph
        # saves, autograd would keep a cycle.
        return tensor if self.running in self.whole else None

    def _autocast(self) -> tuple[bool, torch.dtype]:
        kind = self.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def unrecordable(self, why: str, *, expectable: bool = False) -> Unrecordable:
        """The innermost container that runs now must run as it is."""
        return Unrecordable(self.stack[-1] if self.stack else "", why, expectable=expectable)
