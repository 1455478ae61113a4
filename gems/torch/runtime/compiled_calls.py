"""torch.compile for the calls of a stage: which of them, how, and errors.

    stage      conv  norm  relu  dropout  conv  relu  halo exchange  norm  relu
    compiled   └──── piece0 ───┘          └ piece1 ┘                 └ piece2 ┘

A piece is a run of calls that depend on nothing but their tensors and modules; autograd sees it as
one operation whose backward AOT autograd compiled. Between pieces, calls run as without compiling:
those that draw random numbers (they are keyed by step and micro-batch), run on tiles or patches
(they exchange halos), defer their weight gradient (split backward), have hooks, or assign to
modules; also a single call of torch itself, for which there is nothing to fuse.

A program has one signature of inputs, so that its pieces are compiled for fixed shapes; another
batch size or mode is another program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gems.errors import GemsError, PlanError, note
from gems.torch.autograd.norm_gradients import normalises
from gems.torch.autograd.split_backward import hooked
from gems.torch.tracing.calls import Call, Record
from gems.torch.tracing.trace import is_optimized

Compile = bool | str | Mapping[str, Any]
KNOWN = ("backend", "mode", "options", "dynamic", "fullgraph")
Reaching = Mapping[str, set[int]]  # weights and inputs -> results that depend on them
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")
GRAPHS = ("reduce-overhead", "max-autotune")  # modes that record CUDA graphs


class CompileOptions:
    """What `compile=` asks for: False; True; the name of a backend; or torch.compile's options."""

    def __init__(self, asked: Compile = False) -> None:
        self.enabled = bool(asked)
        if not isinstance(asked, bool | str | Mapping):
            raise PlanError(f"compile is {asked!r}; give True, a backend's name, or a dict")
        given = {"backend": asked} if isinstance(asked, str) else asked
        self.options = {} if isinstance(given, bool) else dict(given)
        if unknown := sorted(set(self.options) - set(KNOWN)):
            raise PlanError(f"compile has {unknown}; torch.compile has the options {list(KNOWN)}")
        if self.enabled:
            _reject_graphs(self.options)
            _reject_backend(self.options.get("backend"))

    def __str__(self) -> str:
        """The same on all ranks that ask for the same."""
        if not self.enabled:
            return "off"
        spelled = (f"{k}={getattr(v, '__qualname__', v)}" for k, v in sorted(self.options.items()))
        return ", ".join(spelled) or "on"

    def compiled(self, function: Callable[..., Any], reaching: Reaching) -> Callable[..., Any]:
        compiled = torch.compile(function, **{"dynamic": False, **self.options})
        if not reaching:
            return compiled

        def run(*args: Any) -> Any:
            results = compiled(*args)
            _watch(results, reaching)
            return results

        return run

    @contextmanager
    def running(self, stage: int) -> Iterator[None]:
        """Around a stage, forward or backward: pieces are compiled when they first run."""
        if not self.enabled:
            yield
            return
        try:
            yield
        except GemsError:
            raise
        except Exception as error:
            remedy = "compile=False runs it as it is; compile='aot_eager' needs no C++ compiler"
            if not type(error).__module__.startswith(COMPILER):  # a backend's, or the model's own
                note(error, f"in stage {stage}, which runs compiled ({self}); {remedy}")
                raise
            raise GemsError(
                f"stage {stage} cannot be compiled ({self}): {error}\n{remedy}"
            ) from error


def _watch(results: Sequence[Any], reaching: Reaching) -> None:
    """Raise in backward if a result gets no gradient that weights depend on by themselves.

    Compiled code takes zeros for it, and gives zeros to such weights where autograd gives none: an
    optimizer with weight decay or momentum would step them.
    """
    nodes: dict[Any, dict[int, int]] = {}  # of compiled backwards: result by output
    for number, result in enumerate(results):
        if isinstance(result, torch.Tensor) and result.requires_grad:
            node, output = result.grad_fn, result.output_nr
            while node is not None and "CompiledFunction" not in node.name():
                node, output = (*node.next_functions, (None, 0))[0]  # a view of a result
            if node is not None:
                nodes.setdefault(node, {})[output] = number

    def check(by_output: Mapping[int, int], gradients: Sequence[Any]) -> None:
        present = {n for output, n in by_output.items() if gradients[output] is not None}
        if lost := [name for name, reached in reaching.items() if not reached & present]:
            raise GemsError(
                f"the loss does not depend on {', '.join(lost[:8])} in this step, and compiled "
                "code would give gradients of zeros where PyTorch gives none; use compile=False, "
                "or leave what the loss does not use out of the model"
            )

    for node, by_output in nodes.items():
        if len(by_output) > 1:
            node.register_prehook(partial(check, by_output))


def _reject_graphs(options: Mapping[str, Any]) -> None:
    inner = options.get("options") or {}
    if options.get("mode") in GRAPHS or inner.get("triton.cudagraphs"):
        asked = options.get("mode") or "triton.cudagraphs"
        raise PlanError(
            f"compile asks for {asked!r}, which records CUDA graphs: they reuse the memory of "
            "results at the next call, and a stage has several micro-batches in flight; use "
            "mode='default' or 'max-autotune-no-cudagraphs'"
        )


def _reject_backend(backend: Any) -> None:
    if not isinstance(backend, str):
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise PlanError(f"compile has backend {backend!r}; torch has {', '.join(sorted(known))}")


def precompiled(model: nn.Module) -> list[str]:
    """The modules of a model that came compiled, by name; without single layers, which stages call
    as they are."""
    return [
        name or "the model itself"
        for name, module in model.named_modules()
        if is_optimized(module)
        or (getattr(module, "_compiled_call_impl", None) is not None and any(module.children()))
    ]


class Pieces:
    """Which calls of a stage may be compiled, and why the others may not."""

    def __init__(
        self,
        record: Record,
        model: nn.Module,
        instead: Mapping[str, Any],
        defers: Callable[[Call], bool],
    ) -> None:
        self.record, self.model = record, model
        self.instead, self.defers = instead, defers
        self.pieces: dict[str, Reaching] = {}  # the functions to compile
        self.compiled = 0  # calls in them
        self.left: Counter[str] = Counter()  # why other calls are not

    def first(self, calls: Sequence[Call], apart: Collection[str]) -> list[Call]:
        """The calls at the front that make a piece, up to one that is `apart`; none if the first
        runs as it is."""
        found = list(takewhile(lambda c: c.name not in apart and not self.why_not(c), calls))
        if found and self._worth(found):
            return found
        self.left[self.why_not(calls[0]) or "by themselves"] += 1
        return []

    def add(self, calls: Sequence[Call], wanted: Sequence[str]) -> str:
        """Enter a piece that gives the values `wanted`; returns its name."""
        name = f"piece{len(self.pieces)}"
        self.pieces[name] = self._reaching(calls, wanted)
        self.compiled += len(calls)
        return name

    def _reaching(self, calls: Sequence[Call], wanted: Sequence[str]) -> Reaching:
        """Of each trained weight and input that wants a gradient: the results that depend on it, by
        number, unless all that have a gradient do."""
        values, weights = self.record.values, self.record.parameters
        all_of = {i for i, name in enumerate(wanted) if values[name].grad}
        if len(all_of) < 2:
            return {}
        results: dict[str, set[int]] = {name: {i} for i, name in enumerate(wanted)}
        for call in reversed(calls):
            reached = set[int]().union(*(results.get(name, ()) for name in call.writes))
            for name in (*call.reads, *call.attrs, *(old for old, _ in call.mutates)):
                results[name] = results.get(name, set()) | reached
        made = {name for call in calls for name in call.writes}
        return {
            name: reached & all_of
            for name, reached in results.items()
            if name not in made and reached & all_of != all_of
            if (name in values and values[name].grad) or self._learns(name, weights)
        }

    def _learns(self, name: str, weights: Collection[str]) -> bool:
        return name in weights and self.model.get_parameter(name).requires_grad

    def why_not(self, call: Call) -> str:
        """Why a call stays outside; empty if it need not."""
        module = None if call.module is None else self.model.get_submodule(call.module)
        given = pytree.tree_leaves((call.args, call.kwargs))
        if call.name in self.instead:
            return "on tiles or patches"
        if call.random:
            return "draw random numbers"
        if call.function is torch.Tensor.register_hook or (module is not None and hooked(module)):
            return "have hooks"
        if self.defers(call):
            return "defer weight gradients"
        if any(isinstance(x, nn.Module) for x in given) or (call.touches and not call.norms):
            return "assign buffers"
        if self.record.device == "cpu" and normalises(call, self.model):
            first = next((self.record.values[name] for name in call.reads), None)
            if first is not None and len(first.shape) > 2 and first.shape[0] == 1:
                return "norms of one sample"  # see norm_gradients.py
        return ""

    def _worth(self, calls: Sequence[Call]) -> bool:
        """Whether there is something to fuse."""
        if len(calls) > 1:
            return True
        (call,) = calls
        module = None if call.module is None else self.model.get_submodule(call.module)
        return module is not None and not type(module).__module__.startswith("torch.nn.")

    def __str__(self) -> str:
        rest = "; ".join(f"{count} {why}" for why, count in self.left.items())
        found = f"{self.compiled} calls are compiled, in {len(self.pieces)} pieces"
        return f"{found}; as they are: {rest}" if rest else found
