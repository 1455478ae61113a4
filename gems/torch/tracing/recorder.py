"""Record a model: run its own forward once on fake tensors and note the calls it makes.

Two kinds of calls are noted: leaf modules (everything under `torch.nn` that is not a container,
and modules that cannot be recorded inside) and the torch functions between them. Shapes are
concrete, so Python that looks at shapes just runs; nothing is computed and no memory is taken.
Recording again for another input signature costs about a millisecond per call.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

from gems.errors import TraceError
from gems.model.graph import Value
from gems.torch.runtime.running_stats import tracked
from gems.torch.tracing.assigned import assign_buffer, keeps_tensors, set_data, take_away
from gems.torch.tracing.caches import forget_cached, let_go, reject_kept, uncompiled
from gems.torch.tracing.calls import Attr, Call, Record, Ref, tensors_in
from gems.torch.tracing.fake_weights import FakeWeights
from gems.torch.tracing.frozen import MISSING, Difference, difference, freeze, tensors_within
from gems.torch.tracing.norm_calls import adopt_norms, norm_paths
from gems.torch.tracing.op_meter import CallMeter, reject_own_generator, storage_of
from gems.torch.tracing.python_random import reject_python_random
from gems.torch.tracing.reads import INTERNAL, Access, Reads, variables, variables_of_hooks
from gems.torch.tracing.value_checks import Branches

log = logging.getLogger(__name__)
REMEDY = (
    "Give it as an nn.Sequential or as a list of stages, each an nn.Module, and GEMS will cut "
    "between those; or move the part that looks at values into a module of its own."
)
BACKWARD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
# They look at no value of what they are given.
SHAPED = {
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
}
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
    whole, made = set(leaves), []
    expects, first = False, None
    for _ in range(len(list(model.modules())) + 2):
        try:
            found = _recorded(model, args, kwargs or {}, torch.device(device), whole, expects, made)
            reject_kept(made)
            return found
        except _Unrecordable as error:
            let_go(error)
            first = first or error
            if error.expectable and not expects and _most_of(model, error.path):
                expects = True
            elif error.path in whole:
                raise TraceError(
                    f"{type(model).__name__}.forward cannot be recorded: {first.reason}. {REMEDY}"
                ) from first.__cause__
            else:
                if not error.path:
                    _warn_whole(model, error.reason)
                whole.add(error.path)
    raise AssertionError("every retry adds a leaf, so this is never reached")


def _warn_whole(model: nn.Module, reason: str) -> None:
    log.warning(
        "%s.forward cannot be recorded (%s), so the whole model is one block, which runs on one "
        "stage. %s", type(model).__name__, reason, REMEDY,
    )  # fmt: skip


def _most_of(model: nn.Module, path: str) -> bool:
    """Whether a module has more than half of the model's parameters: as one block, it would leave
    nothing to partition."""
    inside = sum(p.numel() for p in model.get_submodule(path).parameters())
    return 2 * inside > sum(p.numel() for p in model.parameters()) or not path


def _recorded(
    model: nn.Module, args: Any, kwargs: Any, device: torch.device, whole: set[str], expects: bool,
    made: list[weakref.ref[torch.Tensor]],
) -> Record:  # fmt: skip
    """One recording; the Python state of the model is as before, whatever forward did to it.

    What is still in memory of the tensors that it made goes to `made`.
    """
    with _lock:
        first = _Recorder(model, device, whole, expects)
        try:
            with reject_python_random(
                lambda: _Recorder(model, device, whole, expects), args, kwargs
            ):
                found = first.run(args, kwargs)
            kept = [x for x in first.reads.accesses if not x.wrote and x.change() is not None]
            if kept:
                _judge(first, kept, args, kwargs)
            found.impure = first.impure
        finally:
            written = [(x, x.name.mapping.get(x.name.key)) for x in first.reads.accesses if x.wrote]
            first.reads.undo()
            made += first.forget()
        for access, value in written:
            if not access.outer or access.path is None:
                continue
            if keeps_tensors(value):
                take_away(access)
            else:
                found.assigned.append((access.path, access.name.key, value))
        return found


def _judge(first: _Recorder, kept: list[Access], args: Any, kwargs: Any) -> None:
    """Forward changed Python state that it reads. A cache may be filled once: what is in it must be
    the same for all samples, and a second run must leave it alone. All else is refused."""
    for access in kept:
        if access.name.path is not None and access.outer:
            raise _Unrecordable(access.name.path, f"a hook changes state: {access.change()}")
    again = _Recorder(first.model, first.device, first.whole, first.expects, first)
    try:
        again.run(args, kwargs)
        changed = {x.name.place: x.change() for x in again.reads.accesses}
    finally:
        again.reads.undo()
        again.forget()
    for access in kept:
        before, after = access.change(), changed.get(access.name.place)
        assert before is not None
        if not access.outer:
            if after is not None and access.by in first.whole:
                first.impure.append((access.by or "", access.name.label))
        elif after is not None:
            raise TraceError(_changing(before))
        else:
            _reject_first(first, access.name.label, access.name.mapping.get(access.name.key))


def _reject_first(recorder: _Recorder, label: str, value: Any) -> None:
    if source := recorder.depends(value):
        raise TraceError(
            f"forward keeps a tensor in {label} when it first runs, and computes it from {source}, "
            "so all later samples would depend on the first; compute it in every forward, or "
            "register it as a buffer and fill it before training"
        )


def _changing(what: Difference) -> str:
    return (
        f"forward changes {what.label} in every run ({what}), and what Python remembers is not "
        "recorded; hold it in a buffer (register_buffer) and change that with torch operations, "
        "change it between steps, or leave it out"
    )


def is_leaf(module: nn.Module) -> bool:
    """Modules that run as they are: all of `torch.nn` but its containers, and compiled code."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return type(module).__module__.startswith("torch.nn") and not container


class _Unrecordable(Exception):
    """What must run as it is: the module at `path`. `expectable`: unless a branch is expected."""

    def __init__(self, path: str, reason: str, *, expectable: bool = False) -> None:
        super().__init__(reason)
        self.path, self.reason, self.expectable = path, reason, expectable


class _Recorder(TorchFunctionMode):
    """The state of one recording."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        whole: set[str],
        expects: bool,
        earlier: _Recorder | None = None,
    ) -> None:
        super().__init__()
        self.model, self.device, self.whole = model, device, whole
        self.expects, self.branches = expects, Branches()
        self.fake = earlier.fake if earlier else FakeTensorMode(allow_non_fake_inputs=True)
        self.earlier = dict(earlier.known) if earlier else {}  # what an earlier run left behind
        self.weights = FakeWeights(model, self.fake, device)
        self.attrs = self.weights.named
        self.thread = threading.get_ident()
        self.paths = {id(m): path for path, m in model.named_modules()}
        whole.update(p for p, m in model.named_modules() if not is_leaf(m) and _backward_hooks(m))
        self.leafy = {id(m) for p, m in model.named_modules() if is_leaf(m) or p in whole}
        self.running: str | None = None  # the leaf that runs now
        self.real = False  # on real numbers
        self.given: dict[int, torch.Tensor] = {}  # what the model was given, by the fake's id
        self.rejected: TraceError | None = None  # torch takes it for a TypeError and goes on
        self.reads = Reads(self.paths, lambda: self.running, self._assigned)
        self.impure: list[tuple[str, str]] = []  # leaves whose own Python state changes, and what
        self.used: list[str] = []  # weights that a leaf reached in another way than as its own
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
        containers = {p: m for p, m in self.model.named_modules() if id(m) not in self.leafy}
        self.reads.note_hooks(self.model.modules())
        self.reads.names(variables_of_hooks(containers))
        leaves = {p: m for p, m in self.model.named_modules() if id(m) in self.leafy}
        self.reads.names(variables_of_hooks(leaves), outer=False)
        self.reads.names(variables(containers.values()))
        self.reads.names(variables(leaves.values()), outer=False)
        with (
            _lock, self.weights.installed(), self.reads.watching(), self._patched(), self.fake,
            uncompiled(),
        ):  # fmt: skip
            args, kwargs = pytree.tree_map(self._fake_input, (args, kwargs))
            inputs = self._name_inputs(args, kwargs)
            with self, torch.autograd.graph.saved_tensors_hooks(self._saved, lambda x: x):
                self.ambient = self._autocast_state()
                try:
                    result = pytree.tree_map(self._made, self.model(*args, **kwargs))
                except (_Unrecordable, TraceError):
                    raise
                except Exception as error:
                    raise self.rejected or _Unrecordable("", _reason(error)) from error
                if self.rejected is not None:
                    raise self.rejected
            output, outputs = self._name_outputs(result)
            self._reject_made()
        self._prune(outputs)
        self._adopt_norms()
        self._glue_changes()
        return Record(
            self.calls, self.values, inputs, output, outputs,
            self.weights.parameters, self.weights.buffers, self.weights.first_names,
            self.glued, self.device.type, tuple(sorted(self.whole)),
            {name: storage for storage, names in self.names_in.items() for name in names},
            tuple(dict.fromkeys(
                (x.path, x.name.key) for x in self.reads.accesses
                if x.path is not None and x.guarded and not x.wrote
            )),
            tuple(containers),
        )  # fmt: skip

    def forget(self) -> list[weakref.ref[torch.Tensor]]:
        """Let go of all fakes, and empty caches of functions that have one. Gives those that are
        still in memory."""
        made = [weakref.ref(tensor) for _, tensor in self.known.values()]
        for held in (self.known, self.earlier, self.seen_in, self.kept, self.given):
            held.clear()
        if any(tensor() is not None for tensor in made):
            forget_cached(self.model.modules())
        return [tensor for tensor in made if tensor() is not None]

    def _reject_made(self) -> None:
        for module, kind, key in self.weights.made():
            path = self.paths.get(id(module), type(module).__name__)
            if kind == "buffer" and key in module._non_persistent_buffers_set:  # a cache
                _reject_first(self, f"{path}.{key}", module._buffers[key])
                continue
            raise TraceError(
                f"forward makes the {kind} {key} of {path or type(module).__name__} when it first "
                "runs; make it in the constructor, or run the model once on a real micro-batch "
                "before giving it to GEMS"
            )

    def _assigned(self, module: nn.Module, name: str, value: Any) -> bool:
        """Note the assignment of a tensor to a buffer; whether that was one."""
        if self.running is not None or module._buffers.get(name) is None:
            return False
        if not isinstance(value, torch.Tensor):
            return False
        path = self.paths[id(module)]
        first = self.weights.first_names[f"{path}.{name}" if path else name]
        holder = self.weights.holder(first)
        if first not in self.weights.buffers or holder is not module:
            raise TraceError(
                f"forward assigns to {path}.{name}, which has several names; give it one"
            )
        old = module._buffers[name]
        if (value.shape, value.dtype) != (old.shape, old.dtype):  # type: ignore[union-attr]
            raise TraceError(
                f"forward assigns a tensor {list(value.shape)} of {value.dtype} to the buffer "
                f"{first}, which is {list(old.shape)} of {old.dtype}; keep shape and type"  # type: ignore
                ", or, if it is a cache, run the model once on a real micro-batch before giving it "
                "to GEMS"
            )
        self._add_assignment(first, value)
        module._buffers[name] = value
        return True

    def _add_assignment(self, name: str, value: torch.Tensor) -> None:
        self.inside += 1
        try:
            self.meter.clear()
            self.norms, self.used = [], []
            value, _ = self._seen(None, (value,), {})[0][0], None
            self._add(None, assign_buffer(name), (self.model, value), {}, [value], [], [])
            call = self.calls[-1]
            call.attrs, call.touches = (*call.attrs, name), (name,)
        finally:
            self.inside -= 1

    def _fake_input(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device)
        self.given[id(y)] = x
        self.kept.append(y)
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
        if threading.get_ident() != self.thread:
            return func(*args, **kwargs)
        if self.inside:
            if self.running is not None:
                self._use(args)
            return func(*args, **kwargs)
        if (known := self.branches.outcome(func, args, self.known, self.calls)) is not None:
            return self._expected(args[0], known)
        if func in BACKWARD:
            inner = self.stack[-1] if self.stack else ""
            raise _Unrecordable(inner, f"{name_of(func)}: it runs backward inside of forward")
        return self._note(None, func, args, kwargs, func)

    def _expected(self, x: torch.Tensor, outcome: bool) -> bool:
        """A branch that looks for numbers that went wrong: on the whole of a model, expect none."""
        if not self.expects:
            inner = self.stack[-1] if self.stack else ""
            reason = "bool: it looks at the values of a tensor, which differ from sample to sample"
            raise _Unrecordable(inner, reason, expectable=True)
        self._note(None, self.branches.check(outcome, self.stack), (x,), {}, lambda _: None)
        return outcome

    def _use(self, args: Any) -> None:
        """Inside of a leaf: a weight of another module, or one that it holds in a list."""
        for x in args:
            if isinstance(x, nn.Parameter) and type(x) is not FakeTensor:
                if (fake := self.weights.of(x)) is not None:
                    self.used.append(self.attrs[id(fake)])
                elif x.requires_grad and not self.real:
                    self._reject_unregistered(x, self.running or "")

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """See module calls, autograd functions and checkpoint regions; restored at the end."""
        call = nn.Module.__call__
        # Below `Function.apply`, so that an `apply` somebody took hold of earlier leads here, too.
        below: Any = torch.autograd.function._SingleLevelFunction
        region = torch_checkpoint._checkpoint_without_reentrant_generator
        scripted: Any = torch.jit.ScriptFunction
        script_call = scripted.__call__

        def script(function: Any, *args: Any, **kwargs: Any) -> Any:
            """TorchScript is one call: torch shows a TorchFunctionMode only its inside."""
            run = lambda *a, **k: script_call(function, *a, **k)  # noqa: E731
            if threading.get_ident() != self.thread or self.inside:
                return run(*args, **kwargs)
            return self._note(None, function, args, kwargs, run)

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
                return self._region(lambda: args[0](*args[2:]), args[2:])
            return self._note(None, cls.apply, args, kwargs, original)

        def region_generator(fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
            if threading.get_ident() != self.thread or self.inside:
                yield from region(fn, *args, **kwargs)
                return
            with self._in_region():
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

    def _region(self, run: Callable[[], Any], given: Sequence[Any]) -> Any:
        """A reentrant one. If nothing that it is given wants a gradient, neither does its result,
        and weights inside of it have none."""
        wants = any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)
        with self._in_region(), nullcontext() if wants else torch.no_grad():
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
        if id(module) in self.leafy and (path or "" in self.whole):
            whole = lambda *a, **k: self._whole(path, call, a, k)  # noqa: E731
            plain = lambda *a, **k: call(module, *a, **k)  # noqa: E731
            with _known_momentum(module):
                return self._note(path, None, args, kwargs, whole if path in self.whole else plain)
        self.stack.append(path)
        try:
            return call(module, *args, **kwargs)
        except (_Unrecordable, TraceError):
            raise
        except Exception as error:
            reason = f"{path or 'its forward'}: {_reason(error)}"
            raise self.rejected or _Unrecordable(path, reason) from error
        finally:
            self.stack.pop()

    def _note(
        self, path: str | None, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]
    ) -> Any:
        self.inside += 1  # from here on nothing is noted, our own looking at tensors included
        try:
            args, kwargs = self._seen(path or name_of(func), args, kwargs)
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if _is_tensor(x)]
            watched = self._watched(path, tensors)
            self.norms, self.used = [], []
            if path is not None and tracked(self.model.get_submodule(path)):
                self.norms.append(path)
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

    def _seen(self, name: str | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments with the fakes of weights, however they were reached."""
        found: dict[int, torch.Tensor] = {}
        for x in pytree.tree_leaves((args, kwargs)):
            if not isinstance(x, torch.Tensor) or id(x) in self.known or id(x) in self.attrs:
                continue
            if isinstance(x, FakeTensor):
                self._make_known(x, name)
            elif (fake := self.weights.of(x)) is not None:
                found[id(x)] = fake
            elif x.requires_grad:
                self._reject_unregistered(x, name or "an assignment")
        if not found:
            return args, kwargs
        return pytree.tree_map(lambda x: found.get(id(x), x), (args, kwargs))

    def _make_known(self, x: torch.Tensor, name: str | None) -> None:
        """A fake tensor that no recorded call made: from an earlier run, or from out of sight."""
        if id(x) in self.earlier:
            self._new_value(x, self._unique("earlier"))
            return
        inner = self.stack[-1] if self.stack else ""
        what = f"{name} is given a tensor {list(x.shape)} that no recorded call made"
        raise _Unrecordable(inner, what)

    def _reject_unregistered(self, x: torch.Tensor, name: str) -> None:
        self.rejected = TraceError(
            f"{name} uses a tensor {list(x.shape)} that wants a gradient but is not a parameter of "
            "the model, so nobody would train it; register it (self.weight = nn.Parameter(...), or "
            "an nn.ParameterList for several), or detach it"
        )
        raise self.rejected

    def _replaced(self, path: str | None, func: Any, args: Any) -> list[torch.Tensor]:
        """What a call changed without a trace in version counters: `.data` that is set, and buffers
        that a leaf assigned, which it has again for the rest of the recording."""
        if path is None:
            return [args[0]] if set_data(func) else []
        return self.weights.reinstalled(self.model.get_submodule(path))

    def _acts(self, func: Any, args: Any) -> bool:
        """Whether a call matters although it gives no tensor: checks, and hooks on tensors."""
        if func is torch.Tensor.register_hook:
            if any(
                tensors_within(c.cell_contents) for c in getattr(args[1], "__closure__", ()) or ()
            ):
                inner = self.stack[-1] if self.stack else ""
                raise _Unrecordable(inner, "register_hook with a function that holds tensors")
            return True
        return self.branches.checks(func)

    def _metered(self, path: str | None, func: Any, run: Callable[[], Any]) -> Any:
        self.meter.clear()
        outer, self.running = self.running, path
        try:
            with self.meter:
                return run()
        except _Unrecordable:
            raise
        except Exception as error:
            if isinstance(error, TraceError) and path is None:
                raise
            whole = path is not None and path in self.whole
            if path is not None and not whole and not _looks_at_values(error):
                raise TraceError(f"{path} does not take its input: {_reason(error)}") from error
            inner = path if whole else self.stack[-1] if self.stack else ""
            assert inner is not None
            raise _Unrecordable(inner, f"{path or name_of(func)}: {_reason(error)}") from error
        finally:
            self.running = outer

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
            attrs += self.used
        given = path if path is not None else self._within(name_of(func))
        name = self._unique(given or type(self.model).__name__)
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
            touches=tuple(dict.fromkeys(self._touched(changed))),
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

    def _touched(self, changed: list[torch.Tensor]) -> Iterator[str]:
        yield from (self.attrs[id(t)] for t in changed if id(t) in self.attrs)
        for storage in (*map(storage_of, changed), *self.meter.written):
            yield from self.weights.in_storage.get(storage, ())

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

    def _adopt_norms(self) -> None:
        """BatchNorm with a forward of its own has running statistics like any other."""
        counting, together = adopt_norms(self.calls, self.model, norm_paths(self.model))
        self.glued += together
        for at in counting:
            self.calls[at].touches = ()

    def _glue_changes(self) -> None:
        """What changes a weight and what reads it stay on one rank, but for running statistics."""
        changed = {n for c in self.calls for n in c.touches if n.rpartition(".")[0] not in c.norms}
        for name in changed:
            uses = [i for i, call in enumerate(self.calls) if name in call.attrs]
            if len(uses) > 1:
                self.glued.append((uses[0], uses[-1]))

    def _whole(self, path: str, call: Any, args: Any, kwargs: Any) -> Any:
        """Run a module that is taken whole: on fake tensors, unless it looks at values."""
        module = self.model.get_submodule(path)
        try:
            with self.reads.attempt():
                return call(module, *args, **kwargs)
        except Exception:
            forget_cached(module.modules())
            random = self.meter.random
            self.meter.clear()
            self.meter.random = random
            self.norms = []  # how often each runs may differ from sample to sample
            self.real = True
            try:
                return self._really(path, module, args, kwargs)
            finally:
                self.real = False

    def _really(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run an unrecordable module once on real numbers, to learn the shapes it gives."""
        self.weights.swap(module, fake=False)
        try:
            with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
                twin = self._twin(module)
                before = _buffers_now(twin)
                try:
                    args, kwargs = pytree.tree_map(self._given, (args, kwargs))
                    result = twin(*args, **kwargs)
                except Exception:  # a sample may have shapes only, and any numbers in them
                    args, kwargs = pytree.tree_map(_like, (args, kwargs))
                    twin = self._twin(module)
                    before = _buffers_now(twin)
                    result = twin(*args, **kwargs)
                again = {p: freeze(dict(_own_state(m))) for p, m in twin.named_modules()}
                changed = _changed(before, _buffers_now(twin))
                twin(*args, **kwargs)
        finally:
            self.weights.swap(module, fake=True)
        self._note_state(path, twin, again)
        for name in changed:
            module.get_buffer(name).zero_()  # a fake one: what its twin did is seen on it
        sources = (*tensors_within((args, kwargs)), *module.parameters())
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in sources)
        return pytree.tree_map(lambda x: self._any_branch(self._fake_input(x), trains), result)

    @staticmethod
    def _any_branch(x: Any, trains: bool) -> Any:
        """A result of a module that looks at values: another branch may want a gradient of it."""
        if isinstance(x, torch.Tensor) and trains and (x.is_floating_point() or x.is_complex()):
            x.requires_grad_()
        return x

    def _twin(self, module: nn.Module) -> nn.Module:
        """A copy on real numbers: ordinary ones where the weights have no memory just now."""
        copies: dict[int, Any] = self.weights.stand_ins()
        made = set(copies)
        twin = copy.deepcopy(module, copies)
        self.used += self.weights.names_of(set(copies) - made)
        own = (*module.parameters(), *module.buffers())
        self.used += self.weights.names_of({id(t) for t in own})
        return twin

    def _given(self, x: Any) -> Any:
        """The user's own numbers, where a module is given the model's input."""
        if id(x) in self.given and not self.given[id(x)].is_meta:
            return self.given[id(x)].detach().to("cpu", copy=True).requires_grad_(x.requires_grad)
        return _like(x)

    def _note_state(self, path: str, twin: nn.Module, before: dict[str, Any]) -> None:
        """The Python state that a module taken whole changes in its second run, too."""
        for inner, module in twin.named_modules():
            was = before.get(inner, MISSING)
            label = f"{path}.{inner}".strip(".")
            if (what := difference(was, dict(_own_state(module)), label)) is not None:
                self.impure.append((path, str(what)))

    def depends(self, value: Any) -> str | None:
        """What the tensors in a value were computed from that changes: input, weights or chance."""
        makers = {name: call for call in self.calls for name in call.writes}
        changed = {name for call in self.calls for name in call.touches}
        left = [self.known[id(t)][0] for t in tensors_within(value) if id(t) in self.known]
        seen: set[str] = set()
        while left:
            if (name := left.pop()) in seen:
                continue
            seen.add(name)
            if (call := makers.get(name)) is None:
                return f"the input {name}"
            if call.random:
                return f"random numbers ({call.name})"
            for weight in call.attrs:
                if weight in self.weights.parameters or weight in changed:
                    return f"the weight {weight}"
            if name_of(call.function) not in SHAPED:
                left += call.reads
        return None

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
        # Nobody runs backward but a module that runs as it is. Of an output that its own graph
        # saves, autograd would never let go.
        return tensor if self.running in self.whole else None

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


def _backward_hooks(module: nn.Module) -> bool:
    """They hang on real tensors, so their module runs as it is."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


BufferNow = tuple[torch.Tensor, int, torch.Tensor]  # itself, its version, its values


def _buffers_now(module: nn.Module) -> dict[str, BufferNow]:
    return {name: (b, b._version, b.detach().clone()) for name, b in module.named_buffers()}


def _changed(before: dict[str, BufferNow], after: dict[str, BufferNow]) -> list[str]:
    """The buffers that are others, or have others' values: batch norm changes running statistics
    without a new version."""

    def same(name: str) -> bool:
        (a, was, values), (b, now, found) = before[name], after[name]
        return a is b and was == now and torch.equal(values, found)

    return [name for name in after if name not in before or not same(name)]


def _own_state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((k, v) for k, v in vars(module).items() if k not in INTERNAL)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _like(x: Any) -> Any:
    """Ordinary numbers of the same shape: noise, or zeros where integers are wanted."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.dtype is torch.bool:  # a mask that leaves something
        return torch.ones(x.shape, dtype=x.dtype)
    if not (x.is_floating_point() or x.is_complex()):
        return torch.zeros(x.shape, dtype=x.dtype)
    return torch.randn(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad)


def name_of(func: Any) -> str:
    if isinstance(func, torch.jit.ScriptFunction):
        return str(func.qualified_name).rpartition(".")[2]
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
