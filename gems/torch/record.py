"""Record a model: run its own forward once on fake tensors and note the calls it makes.

Two kinds of calls are noted: leaf modules (everything under `torch.nn` that is not a container,
and modules that cannot be recorded inside) and the torch functions between them. Shapes are
concrete, so Python that looks at shapes just runs; nothing is computed and no memory is taken.
Recording again for another input signature costs about a millisecond per call.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

from gems.errors import TraceError
from gems.graph import Value
from gems.torch.calls import Attr, Call, Record, Ref, tensors_in
from gems.torch.fakes import FakeWeights
from gems.torch.meter import CallMeter, refuse_own_generator, storage_of
from gems.torch.norms import tracked

REMEDY = (
    "Give it as an nn.Sequential or as a list of stages, each an nn.Module, and GEMS will cut "
    "between those; or move the part that looks at values into a module of its own."
)
_lock = threading.RLock()  # recording patches globals of torch; one at a time


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    device: torch.device | str = "cpu",
    leaves: tuple[str, ...] = (),
) -> Record:
    """Record one forward of `model` on inputs like these; only their shapes and types matter.

    A module whose inside cannot be recorded becomes a leaf, and recording starts again.
    """
    whole = set(leaves)
    for _ in range(len(list(model.modules())) + 1):
        recorder = _Recorder(model, torch.device(device), whole)
        try:
            return recorder.run(args, kwargs or {})
        except _Unrecordable as error:
            if not error.path or error.path in whole:
                raise TraceError(
                    f"{type(model).__name__}.forward cannot be recorded: {error.reason}. {REMEDY}"
                ) from error.__cause__
            whole.add(error.path)
    raise AssertionError("every retry adds a leaf, so this is never reached")


def is_leaf(module: nn.Module) -> bool:
    """Modules that run as they are: all of `torch.nn` but its containers, and compiled code."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return type(module).__module__.startswith("torch.nn") and not container


class _Unrecordable(Exception):
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path, self.reason = path, reason


class _Recorder(TorchFunctionMode):
    """The state of one recording."""

    def __init__(self, model: nn.Module, device: torch.device, whole: set[str]) -> None:
        super().__init__()
        self.model, self.device, self.whole = model, device, whole
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.weights = FakeWeights(model, self.fake, device)
        self.attrs = self.weights.named
        self.thread = threading.get_ident()
        self.paths = {id(m): path for path, m in model.named_modules()}
        self.leafy = {id(m) for p, m in model.named_modules() if is_leaf(m) or p in whole}
        self.layered = isinstance(model, nn.Sequential)
        self.calls: list[Call] = []
        self.values: dict[str, Value] = {}
        self.known: dict[int, tuple[str, torch.Tensor]] = {}  # id of a tensor -> its value
        self.seen_in: dict[int, list[int]] = {}  # storage -> ids of the tensors that see it
        self.names_in: dict[int, list[str]] = {}  # storage -> all values that ever saw it
        self.kept: list[Any] = []  # keeps ids of tensors and storages unique
        self.counts: dict[str, int] = {}
        self.stack: list[str] = []
        self.inside = 0  # depth of leaf calls: nothing is noted inside
        self.region: int | None = None
        self.regions = 0
        self.glued: list[tuple[int, int]] = []
        self.shared_memory: dict[int, int] = {}  # a change in place -> first call on that memory
        self.norms: list[str] = []  # layers with running statistics, in the call under way
        self.meter = CallMeter()

    # --- one recording ---------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
        with _lock, self.weights.installed(), self._patched(), self.fake:
            args, kwargs = pytree.tree_map(self._fake_input, (args, kwargs))
            inputs = self._name_inputs(args, kwargs)
            with self, torch.autograd.graph.saved_tensors_hooks(self._saved, lambda x: x):
                self.ambient = self._autocast_state()
                try:
                    result = pytree.tree_map(self._made, self.model(*args, **kwargs))
                except (_Unrecordable, TraceError):
                    raise
                except Exception as error:
                    raise _Unrecordable("", _reason(error)) from error
            output, outputs = self._name_outputs(result)
        self._prune(outputs)
        return Record(
            self.calls, self.values, inputs, output, outputs,
            self.weights.parameters, self.weights.buffers, self.weights.first_names,
            self.glued, self.device.type, tuple(sorted(self.whole)),
            {name: storage for storage, names in self.names_in.items() for name in names},
        )  # fmt: skip

    def _fake_input(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device)
        return y.requires_grad_(x.requires_grad)

    def _name_inputs(self, args: Any, kwargs: Any) -> tuple[str, ...]:
        found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        return tuple(self._new_value(x, f"input{i}" if i else "input") for i, x in enumerate(found))

    def _made(self, x: Any) -> Any:
        """A weight that forward returns as it is becomes a value, so that the last stage has it."""
        return x.view_as(x) if isinstance(x, torch.Tensor) and id(x) in self.attrs else x

    def _name_outputs(self, result: Any) -> tuple[Any, tuple[str, ...]]:
        names: dict[str, None] = {}

        def template(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if id(x) not in self.known:
                raise TraceError(
                    f"{type(self.model).__name__}.forward returns a tensor that no recorded call "
                    f"made (shape {tuple(x.shape)}). {REMEDY}"
                )
            names[self.known[id(x)][0]] = None
            return Ref(self.known[id(x)][0])

        output = pytree.tree_map(template, result)
        if not names:
            raise TraceError(
                f"{type(self.model).__name__}.forward returns {type(result).__name__}, in which "
                "no tensor was found; return a tensor, or tuples, lists or dicts of them"
            )
        return output, tuple(names)

    # --- what is noted ------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside or threading.get_ident() != self.thread:
            return func(*args, **kwargs)
        return self._note(None, func, args, kwargs, lambda: func(*args, **kwargs))

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """See module calls, autograd functions and checkpoint regions; restored at the end."""
        call = nn.Module.__call__
        # Below `Function.apply`, so that an `apply` somebody took hold of earlier leads here, too.
        below: Any = torch.autograd.function._SingleLevelFunction
        region = torch_checkpoint._checkpoint_without_reentrant_generator

        def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread or id(module) not in self.paths:
                return call(module, *args, **kwargs)
            if not self.inside:
                return self._module(call, module, args, kwargs)
            if tracked(module):
                self.norms.append(self.paths[id(module)])
            with _known_momentum(module):
                return call(module, *args, **kwargs)

        def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            original = super(below, cls).apply
            if threading.get_ident() != self.thread or self.inside:
                return original(*args, **kwargs)
            if issubclass(cls, torch_checkpoint.CheckpointFunction):
                return self._region(lambda: args[0](*args[2:]))
            return self._note(None, cls.apply, args, kwargs, lambda: original(*args, **kwargs))

        def region_generator(fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
            if threading.get_ident() != self.thread or self.inside:
                yield from region(fn, *args, **kwargs)
                return
            with self._in_region():
                yield

        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        below.apply = classmethod(function_apply)
        torch_checkpoint._checkpoint_without_reentrant_generator = region_generator
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]
            del below.apply
            torch_checkpoint._checkpoint_without_reentrant_generator = region

    def _region(self, run: Callable[[], Any]) -> Any:
        with self._in_region():
            return run()

    @contextmanager
    def _in_region(self) -> Iterator[None]:
        """All calls of one `torch.utils.checkpoint` region run, and are recomputed, together."""
        outer, self.region = self.region, self.regions if self.region is None else self.region
        self.regions += outer is None
        first = len(self.calls)
        try:
            yield
        finally:
            self.region = outer
            if outer is None and len(self.calls) > first:
                self.glued.append((first, len(self.calls) - 1))

    def _module(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self.paths[id(module)]
        run = lambda: call(module, *args, **kwargs)  # noqa: E731
        if id(module) in self.leafy and path:
            with _known_momentum(module):
                if path in self.whole:
                    return self._note(
                        path, None, args, kwargs, lambda: self._whole(path, run, args, kwargs)
                    )
                return self._note(path, None, args, kwargs, run)
        self.stack.append(path)
        try:
            return run()
        except (_Unrecordable, TraceError):
            raise
        except Exception as error:
            raise _Unrecordable(path, f"{path or 'its forward'}: {_reason(error)}") from error
        finally:
            self.stack.pop()

    def _note(
        self, path: str | None, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Any:
        self.inside += 1  # from here on nothing is noted, our own looking at tensors included
        try:
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if _is_tensor(x)]
            watched = self._watched(path, tensors)
            self.norms = []
            if path is not None and tracked(self.model.get_submodule(path)):
                self.norms.append(path)
            before = [t._version for t in watched]
            result = self._metered(path, func, run)
            if self.meter.random and path is None:
                refuse_own_generator(name_of(func), (args, kwargs))
            changed = [t for t, v in zip(watched, before, strict=True) if t._version != v]
            made = list(tensors_in(result))
            # Otherwise it gave a shape, a dtype, a flag: Python has that.
            if made or changed or self.meter.written:
                self._add(path, func, args, kwargs, tensors, changed, made)
            return result
        finally:
            self.inside -= 1

    def _metered(self, path: str | None, func: Any, run: Callable[[], Any]) -> Any:
        self.meter.clear()
        try:
            with self.meter:
                return run()
        except Exception as error:
            if path is not None and path not in self.whole and not _looks_at_values(error):
                raise TraceError(f"{path} does not take its input: {_reason(error)}") from error
            inner = self.stack[-1] if self.stack else ""
            raise _Unrecordable(inner, f"{path or name_of(func)}: {_reason(error)}") from error

    def _watched(self, path: str | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that a call might change: what it is given, and its module's buffers."""
        found = {id(t): t for t in tensors}
        if path is not None:
            found |= {id(b): b for b in self.model.get_submodule(path).buffers()}
        return list(found.values())

    def _add(
        self, path: str | None, func: Any, args: Any, kwargs: Any,
        tensors: list[torch.Tensor], changed: list[torch.Tensor],
        made: list[tuple[tuple[Any, ...], torch.Tensor]],
    ) -> None:  # fmt: skip
        args, kwargs = pytree.tree_map(self._template, (tuple(args), dict(kwargs)))
        attrs = [self.attrs[id(t)] for t in tensors if id(t) in self.attrs]
        if path is not None:
            module = self.model.get_submodule(path)
            attrs += [self.attrs[id(t)] for t in (*module.parameters(), *module.buffers())]
        name = self._unique(path if path is not None else self._within(name_of(func)))
        state = self._autocast_state()
        call = Call(
            name=name,
            layer=name.partition(".")[0].partition(":")[0] if self.layered else name,
            module=path,
            function=func,
            args=args,
            kwargs=kwargs,
            reads=tuple(
                dict.fromkeys(self.known[id(t)][0] for t in tensors if id(t) in self.known)
            ),
            attrs=tuple(dict.fromkeys(attrs)),
            touches=tuple(
                dict.fromkeys(
                    name
                    for storage in (*map(storage_of, changed), *self.meter.written)
                    for name in self.weights.in_storage.get(storage, ())
                )
            ),
            norms=tuple(self.norms),
            grad=torch.is_grad_enabled(),
            autocast=None if state == self.ambient else state,
            random=self.meter.random,
            pointwise=self.meter.pointwise and self.meter.ops > 0,
            region=self.region,
            saves=self.meter.saves,
            flops=self.meter.flops,
            moved=self.meter.moved,
        )
        self.calls.append(call)
        results = {id(t) for _, t in made}
        self._note_changes(call, [t for t in changed if id(t) in self.known], results)
        for at, tensor in made:
            if id(tensor) not in self.attrs:
                call.outs.append((at, self._new_value(tensor, self._unique(name, "#"))))

    def _note_changes(self, call: Call, changed: list[torch.Tensor], results: set[int]) -> None:
        """A change in place gives new versions of all values that see the same memory.

        If there are several such values, what happened since their memory was first seen must
        stay on one rank up to this call: each would otherwise get a copy of its own. Later
        readers are sent the new versions and need not.
        """
        for storage in {storage_of(t) for t in changed}:
            sharing = [self.known[i] for i in self.seen_in[storage]]
            ours = {id(t) for t in changed}
            call.overwrites += tuple(self.names_in[storage])
            for name, tensor in sharing:
                if id(tensor) not in results:
                    new = self._new_value(tensor, self._unique(name, "~"))
                    call.mutates.append((name, new))
                else:
                    call.mutates.append((name, None))
            here = len(self.calls) - 1
            if any(id(t) not in ours for _, t in sharing) or storage in self.weights.in_storage:
                first = min(
                    (
                        i
                        for i, c in enumerate(self.calls)
                        if {n for n, _ in sharing} & set(c.writes)
                    ),
                    default=here,
                )
                self.shared_memory[here] = first
                if storage in self.weights.in_storage:  # not a copy of a weight's view
                    self.glued.append((first, here))

    def _prune(self, outputs: tuple[str, ...]) -> None:
        """Forget versions that nobody reads; only those that somebody reads glue calls together."""
        read = set(outputs)
        for here, call in reversed(list(enumerate(self.calls))):
            call.mutates = [(old, new) for old, new in call.mutates if new is None or new in read]
            read.update(old for old, new in call.mutates if new)
            read.update(call.reads)
            if here in self.shared_memory and any(new for _, new in call.mutates):
                self.glued.append((self.shared_memory[here], here))

    def _whole(self, path: str, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run a module that is taken whole: on fake tensors, unless it looks at values."""
        try:
            return run()
        except Exception:
            self.meter.clear()
            self.norms = []  # how often each runs may differ from sample to sample
            return self._really(self.model.get_submodule(path), args, kwargs)

    def _really(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run an unrecordable module once on real numbers, to learn the shapes it gives."""
        self.weights.swap(module, fake=False)
        try:
            with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
                twin = copy.deepcopy(module)
                if any(t.is_meta for t in (*twin.parameters(), *twin.buffers())):
                    twin = twin.to_empty(device="cpu")
                    for t in (*twin.parameters(), *twin.buffers()):
                        t.detach().fill_(0.5)
                real = lambda x: _like(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
                args, kwargs = pytree.tree_map(real, (args, kwargs))
                before = {name: b._version for name, b in twin.named_buffers()}
                result = twin(*args, **kwargs)
        finally:
            self.weights.swap(module, fake=True)
        for name, buffer in twin.named_buffers():
            if buffer._version != before[name]:
                module.get_buffer(name).zero_()  # a fake one: what its twin did is seen on it
        return pytree.tree_map(self._fake_input, result)

    # --- small things -------------------------------------------------------------------------

    def _template(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in self.attrs:
            return Attr(self.attrs[id(x)])
        return Ref(self.known[id(x)][0]) if id(x) in self.known else x

    def _new_value(self, tensor: torch.Tensor, name: str) -> str:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.values[name] = Value(
            name, tuple(tensor.shape), tuple(tensor.stride()), dtype, tensor.requires_grad
        )
        if id(tensor) not in self.known:
            self.seen_in.setdefault(storage_of(tensor), []).append(id(tensor))
        self.known[id(tensor)] = (name, tensor)
        self.names_in.setdefault(storage_of(tensor), []).append(name)
        self.kept.append(tensor)
        return name

    def _unique(self, name: str, mark: str = ":") -> str:
        key = name + mark
        self.counts[key] = self.counts.get(key, 0) + 1
        number = self.counts[key]
        if mark == "#":
            return name if number == 1 else f"{name}#{number - 1}"
        return f"{name}{mark}{number}" if number > 1 or mark == "~" else name

    def _within(self, name: str) -> str:
        return f"{self.stack[-1]}.{name}" if self.stack and self.stack[-1] else name

    def _saved(self, tensor: torch.Tensor) -> Any:
        storage = storage_of(tensor)
        if storage not in self.weights.in_storage:
            self.kept.append(tensor)
            self.meter.saves[storage] = tensor.untyped_storage().nbytes()
        return tensor

    def _autocast_state(self) -> tuple[bool, torch.dtype]:
        kind = self.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@contextmanager
def _known_momentum(module: nn.Module) -> Iterator[None]:
    """A cumulative average looks at how many batches it has seen, and a fake count has no value."""
    unknown = tracked(module) and module.momentum is None
    if unknown:
        module.momentum = 0.0  # type: ignore[assignment]
    try:
        yield
    finally:
        if unknown:
            module.momentum = None  # type: ignore[assignment]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _like(x: torch.Tensor) -> torch.Tensor:
    """Ordinary numbers of the same shape: noise, or zeros where integers are wanted."""
    if not x.is_floating_point():
        return torch.zeros(x.shape, dtype=x.dtype)
    return torch.randn(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad)


def name_of(func: Any) -> str:
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__" or name == "apply":
        name = getattr(owner, "__name__", name)
    return name.strip("_") or name


def _looks_at_values(error: BaseException) -> bool:
    """Whether the fake run failed because Python wanted to see numbers."""
    return any(word in type(error).__name__ for word in ("DataDependent", "DynamicOutput"))


def _reason(error: BaseException) -> str:
    if _looks_at_values(error):
        return "it looks at the values of a tensor, which differ from sample to sample"
    line = str(error).strip().splitlines()
    return f"{type(error).__name__}: {line[0]}" if line else type(error).__name__
