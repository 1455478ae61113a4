"""The Python of one stage: its recorded calls, written out as a function and compiled.

Generated code costs nothing over the user's own forward. It calls the user's own modules, so
hooks, train/eval and state-dict names stay theirs, and it forgets each value after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

from gems.geometry.box import Box
from gems.torch.autograd.norm_gradients import normalises, sound
from gems.torch.autograd.split_backward import hooked
from gems.torch.runtime.activation_checkpoint import Recomputation, Run, touched
from gems.torch.runtime.compiled_calls import CompileOptions, Pieces
from gems.torch.tensors.rng import Draws
from gems.torch.tensors.strides import restrided
from gems.torch.tracing.calls import Attr, Call, Record, Ref, is_placeholder

if TYPE_CHECKING:
    from gems.torch.spatial.tiled_stage import TiledStage

Group = Callable[[Sequence[Call], tuple[str, ...], str], None]
Deferral = Callable[[nn.Module], Callable[..., Any] | None]


@dataclass(frozen=True)
class Program:
    """A compiled stage. `run(*inputs)` gives the outputs, both in the order of their names."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[..., tuple[torch.Tensor, ...]]
    source: str
    pieces: Pieces | None = None  # what torch.compile got, if anything


def write(
    record: Record,
    model: nn.Module,
    calls: Sequence[Call],
    outputs: Sequence[str],
    draws: Draws,
    deferral: Deferral | None = None,
    instead: Mapping[str, Callable[..., Any]] | None = None,
    recompute: tuple[Recomputation, Mapping[str, int]] | None = None,
    tiled: TiledStage | None = None,
    compiling: CompileOptions | None = None,
) -> Program:
    """Compile `calls` into a function that gives `outputs`.

    `draws` gives random numbers to the calls that draw. `deferral` may replace a module by a
    function that defers its weight gradient; `instead` replaces calls by name, with functions that
    draw their own random numbers. `recompute` has the runs of calls that are recomputed in
    backward: the number of its run, by the name of a call. With `tiled`, the spatial group shards
    what such a run reads and all its ranks have. With `compiling`, runs of calls are compiled by
    torch.compile (compiled_calls.py).
    """
    recompute = recompute or (Recomputation(), {})
    writer = _Writer(record, model, draws, deferral, instead or {}, recompute, tiled)
    if compiling is not None and compiling.enabled:
        writer.pieces = Pieces(record, model, writer.instead, writer.defers)
    made = {name for call in calls for name in call.writes}
    inputs = _inputs(calls)
    inputs += tuple(n for n in outputs if n not in made and n not in inputs)
    writer.function("stage", inputs, calls, tuple(outputs))
    source = "\n".join((*writer.above, *writer.lines)) + "\n"
    scope = dict(writer.scope)
    exec(compile(source, f"<stage {calls[0].name if calls else 'empty'}>", "exec"), scope)
    for name, facts in writer.recomputed.items():
        scope[f"_{name}"] = Run(scope[name], *facts)
    if compiling is not None and writer.pieces is not None:
        for name, reaching in writer.pieces.pieces.items():
            scope[f"_{name}"] = compiling.compiled(scope[name], reaching)
    return Program(inputs, tuple(outputs), scope["stage"], source, writer.pieces)


class _Writer:
    def __init__(
        self,
        record: Record,
        model: nn.Module,
        draws: Draws,
        deferral: Deferral | None,
        instead: Mapping[str, Callable[..., Any]],
        recompute: tuple[Recomputation, Mapping[str, int]],
        tiled: TiledStage | None,
    ) -> None:
        self.tiled = tiled
        self.record, self.model, self.instead = record, model, instead
        self.run_of = recompute[1]
        self.recomputed: dict[str, tuple[Any, ...]] = {}  # function -> what is known about it
        self.above: list[str] = []  # the functions of these
        self.draws, self.deferral = draws, deferral
        self.ordered = False  # whether values are written with their recorded strides
        self.pieces: Pieces | None = None
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {
            "__name__": __name__,
            "_no_grad": torch.no_grad,
            "_grad": torch.enable_grad,
            "_autocast": torch.autocast,
            "_random": draws.call,
            "_checkpoint": torch_checkpoint.checkpoint,
            "_checkpoint_all": _checkpoint_all,
            "_recompute": recompute[0],
            "_unflatten": pytree.tree_unflatten,
            "_restrided": restrided,
        }
        self.bound: dict[int, str] = {}
        self.sounds: dict[int, Callable[..., Any]] = {}
        self.variables: dict[str, str] = {}

    def function(
        self, name: str, inputs: Iterable[str], calls: Sequence[Call], outputs: tuple[str, ...],
        indent: str = "", inside: str = "",
    ) -> None:  # fmt: skip
        """Write `def name(inputs): calls; return outputs`.

        A stage has runs that are recomputed, both have regions, all have compiled pieces, and those
        nothing: `inside` is which of them this is, `run`, `region` or `piece`.
        """
        arguments = ", ".join(self.var(n) for n in inputs)
        self.lines.append(f"{indent}def {name}({arguments}):")
        body = indent + "    "
        last_use = _last_uses(calls, outputs)
        position, wanted = 0, ()
        while position < len(calls):
            run, write = self._group(calls[position:], inside)
            if write is not None:
                wanted = _wanted_after(run, calls[position + len(run) :], outputs)
                write(run, wanted, body)
            else:
                self._call(run[0], body, inside)
            position += len(run)
            gone = [self.var(n) for n in last_use.get(position - 1, ())]
            if write is not None:
                made = {n for c in run for n in c.writes}
                used = (
                    n for at in range(position - len(run), position) for n in last_use.get(at, ())
                )
                gone = [self.var(n) for n in used if n not in made or n in wanted]
            if gone:
                self.lines.append(f"{body}del {', '.join(gone)}")
        results = "".join(f"{self.var(n)}, " for n in outputs)
        self.lines.append(f"{body}return ({results})")

    def _group(self, calls: Sequence[Call], inside: str) -> tuple[list[Call], Group | None]:
        """The calls that are written together now, and what writes them; None: a call by itself."""
        if not inside and calls[0].name in self.run_of:
            return _first(calls, lambda call: self.run_of.get(call.name)), self._run
        if inside not in ("region", "piece") and calls[0].region is not None:
            region = _first(calls, lambda call: call.region)
            if not self.instead:
                return region, self._region
            if not inside:  # else the run around it is recomputed
                return region, self._run
        if self.pieces is not None and inside != "piece":
            apart = set() if inside else self.run_of.keys()
            piece = self.pieces.first(_first(calls, lambda c: c.region), apart)
            if piece:
                return piece, self._piece
        return [calls[0]], None

    def defers(self, call: Call) -> bool:
        """Whether the weight gradient of a call is deferred."""
        if self.deferral is None or call.module is None or not call.grad or call.region is not None:
            return False
        return self.deferral(self.model.get_submodule(call.module)) is not None

    def _piece(self, run: Sequence[Call], wanted: tuple[str, ...], indent: str) -> None:
        """A run of calls that torch.compile gets as one function."""
        assert self.pieces is not None
        name, inputs = self.pieces.add(run, wanted), _inputs(run)
        self._above(name, inputs, run, wanted, "piece")
        self._invoke(f"_{name}({', '.join(map(self.var, inputs))})", wanted, indent)

    def _above(
        self, name: str, inputs: Sequence[str], run: Sequence[Call], wanted: tuple[str, ...],
        inside: str,
    ) -> None:  # fmt: skip
        """Write a function in front of the stage's."""
        stage, self.lines = self.lines, []
        self.function(name, inputs, run, wanted, "", inside)
        self.above, self.lines = self.above + self.lines, stage

    def _region(self, run: Sequence[Call], wanted: tuple[str, ...], indent: str) -> None:
        """A torch.utils.checkpoint region stays one: its calls are recomputed in backward.

        Not of a tiled stage: torch recomputes when a saved tensor is asked for,
        and a rank that saved none would not come to the exchanges of the others.
        """
        name, inputs = f"region{run[0].region}", _inputs(run)
        self.function(name, inputs, run, wanted, indent, "region")
        # Calls that draw are seeded one by one, so the generator's state need not be kept.
        options = "use_reentrant=False, preserve_rng_state=False"
        how = "_checkpoint_all" if any(call.random for call in run) else "_checkpoint"
        self._invoke(f"{how}({self._listed(name, inputs)}, {options})", wanted, indent)

    def _run(self, run: Sequence[Call], wanted: tuple[str, ...], indent: str) -> None:
        """A run that saves its inputs only."""
        number = self.run_of.get(run[0].name)
        name = f"region{run[0].region}" if number is None else f"run{number}"
        if name in self.recomputed:  # a loss that streams with its model has regions of its own
            name = f"{name}_{len(self.recomputed)}"
        inputs = _inputs(run)
        self._above(name, inputs, run, wanted, "run")
        changed = {n for call in run for n in call.overwrites}
        self.recomputed[name] = (
            tuple(n in changed for n in inputs),
            tuple(self.record.values[n].grad for n in wanted),
            touched(run, self.model),
            [None if self.tiled is None else self.tiled.sharding(n) for n in inputs],
            self.device,
        )
        self._invoke(f"_recompute({self._listed(f'_{name}', inputs)})", wanted, indent)

    def _listed(self, name: str, inputs: Sequence[str]) -> str:
        return ", ".join((name, *map(self.var, inputs)))

    def _invoke(self, invocation: str, wanted: Sequence[str], indent: str) -> None:
        results = "".join(f"{self.var(n)}, " for n in wanted)
        self.lines.append(f"{indent}{results}{'= ' * bool(wanted)}{invocation}")

    def _call(self, call: Call, indent: str, inside: str = "") -> None:
        for context in self._contexts(call):
            self.lines.append(f"{indent}with {context}:")
            indent += "    "
        target = self._target(call, inside)
        self.ordered = self._seeded(call) and not call.mutates
        arguments = [self.expression(a) for a in call.args]
        arguments += [f"{key}={self.expression(a)}" for key, a in call.kwargs.items()]
        self.ordered = False
        invocation = f"{target}({', '.join(arguments)})"
        if len(call.outs) == 1 and call.outs[0][0] == ():
            self.lines.append(f"{indent}{self.var(call.outs[0][1])} = {invocation}")
        else:
            self.lines.append(f"{indent}_ = {invocation}" if call.outs else f"{indent}{invocation}")
            for path, name in call.outs:
                keys = "".join(f"[{key!r}]" for key in path)
                self.lines.append(f"{indent}{self.var(name)} = _{keys}")
            if call.outs:
                self.lines.append(f"{indent}del _")
        for old, new in call.mutates:
            if new:
                self.lines.append(f"{indent}{self.var(new)} = {self.var(old)}")

    def _contexts(self, call: Call) -> list[str]:
        found = []
        if not call.grad:
            found.append("_no_grad()")
        if call.autocast is not None:
            enabled, dtype = call.autocast
            found.append(f"_autocast({self.device!r}, {self.bind(dtype)}, enabled={enabled})")
        if self._seeded(call):
            found.append(f"_random({call.name!r})")
        return found

    def _seeded(self, call: Call) -> bool:
        """Whether a call draws from torch's generator, and so in the order of memory."""
        return call.random and call.name not in self.instead and not is_dropout(call, self.model)

    @property
    def device(self) -> str:
        return self.record.device

    def _target(self, call: Call, inside: str) -> str:
        if call.name in self.instead:
            return self.bind(self.instead[call.name])
        if call.random and is_dropout(call, self.model):
            return self.bind(self._dropout(call))
        if inside != "piece" and normalises(call, self.model):
            return self.bind(self._sound(call))
        if call.module is None:
            hooks = call.function is torch.Tensor.register_hook
            return self.bind(_hooked if hooks else call.function)
        module = self.model.get_submodule(call.module)
        deferred = None
        if self.deferral and call.grad and call.region is None:
            deferred = self.deferral(module)
        return self.bind(deferred or module)

    def _sound(self, call: Call) -> Callable[..., Any]:
        run = call.function if call.module is None else self.model.get_submodule(call.module)
        assert run is not None
        return self.sounds.setdefault(id(run), sound(run))

    def _dropout(self, call: Call) -> Callable[..., torch.Tensor]:
        """Dropout by the cell, so that it does not depend on how the tensor is tiled."""
        module = self.model.get_submodule(call.module) if call.module else None

        def run(input: torch.Tensor, p: float = 0.5, **_: Any) -> torch.Tensor:
            p = p if module is None else module.p  # type: ignore[assignment]
            whole = Box.whole(input.shape)
            return self.draws.dropped(input, p, call.name, input.shape, whole)

        return run

    def expression(self, x: Any) -> str:
        """Python for an argument: values by variable, weights by attribute, the rest as it was."""
        if isinstance(x, Ref):
            if self.ordered:
                return f"_restrided({self.var(x.name)}, {self.bind(self.record.values[x.name])})"
            return self.var(x.name)
        if isinstance(x, Attr):
            path, _, key = x.name.rpartition(".")
            holder = self.bind(self.model.get_submodule(path))
            # The members of an nn.ParameterList are called 0, 1, ...
            return f"{holder}.{key}" if key.isidentifier() else f"getattr({holder}, {key!r})"
        if type(x) in (int, bool, str, type(None)):
            return repr(x)
        if type(x) is tuple:
            return "(" + "".join(f"{self.expression(i)}, " for i in x) + ")"
        if isinstance(x, slice):
            return f"slice({', '.join(map(self.expression, (x.start, x.stop, x.step)))})"
        if type(x) is list:
            return "[" + ", ".join(self.expression(i) for i in x) + "]"
        if type(x) is dict:
            return "{" + ", ".join(f"{k!r}: {self.expression(v)}" for k, v in x.items()) + "}"
        leaves, form = pytree.tree_flatten(x, is_leaf=is_placeholder)
        if any(map(is_placeholder, leaves)):  # a named tuple, an ordered dict, ...
            return f"_unflatten([{', '.join(map(self.expression, leaves))}], {self.bind(form)})"
        return self.bind(x)

    def bind(self, thing: Any) -> str:
        """A name for something that the code uses as it is."""
        if id(thing) not in self.bound:
            self.bound[id(thing)] = name = f"k{len(self.bound)}"
            self.scope[name] = thing
        return self.bound[id(thing)]

    def var(self, name: str) -> str:
        return self.variables.setdefault(name, f"v{len(self.variables)}")


def _hooked(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
    """A hook on a tensor. The first of two runs of a stage that is recomputed has no gradients."""
    return tensor.register_hook(hook) if tensor.requires_grad else None


def _checkpoint_all(*args: Any, **kwargs: Any) -> Any:
    """A region that is recomputed to its end. torch would stop at the last tensor to be saved, and
    RReLU saves its noise before it has drawn it."""
    with torch_checkpoint.set_checkpoint_early_stop(False):
        return torch_checkpoint.checkpoint(*args, **kwargs)


def is_dropout(call: Call, model: nn.Module) -> bool:
    """Whether a call drops single cells, and nothing but its result is looked at."""
    if any(new for _, new in call.mutates) or len(call.outs) != 1:
        return False
    if call.module is not None:
        module = model.get_submodule(call.module)
        return type(module) is nn.Dropout and not hooked(module)
    return call.function is nn.functional.dropout


def _last_uses(calls: Sequence[Call], outputs: tuple[str, ...]) -> dict[int, list[str]]:
    """Which values to forget after which call."""
    last: dict[str, int] = {}
    for position, call in enumerate(calls):
        for name in (*call.reads, *call.writes, *(old for old, _ in call.mutates)):
            last[name] = position
    found: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in outputs:
            found.setdefault(position, []).append(name)
    return found


def _first(calls: Sequence[Call], of: Callable[[Call], int | None]) -> list[Call]:
    """The calls at the front that have the same number."""
    return list(takewhile(lambda call: of(call) == of(calls[0]), calls))


def _inputs(run: Sequence[Call]) -> tuple[str, ...]:
    made = {n for call in run for n in call.writes}
    return tuple(dict.fromkeys(n for call in run for n in call.reads if n not in made))


def _wanted_after(
    run: Sequence[Call], later: Sequence[Call], outputs: tuple[str, ...]
) -> tuple[str, ...]:
    """The values of a region that something outside of it reads."""
    read = {n for call in later for n in call.reads} | set(outputs)
    return tuple(n for call in run for n in call.writes if n in read)
