"""All weights of a model under a plan, for files and for Keras's own calls; each rank has some.

Files are written by rank 0 under another name, and get theirs when they are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gems.distributed.agree import on_all_ranks
from gems.errors import CheckpointError
from gems.keras import weight_files
from gems.keras.weight_files import array_of, named_variables
from gems.transport.protocol import Transport

SAFETENSORS = ".safetensors"


class Held(Protocol):
    """A model under a plan, as far as files need it."""

    model: Any
    transport: Transport
    session: Any
    stepping: Any


class Whole:
    """All ranks must make the same calls."""

    def __init__(self, owner: Held) -> None:
        self.owner, self.model, self.transport = owner, owner.model, owner.transport

    def state(self) -> dict[str, np.ndarray]:
        """All weights by path, on every rank."""
        if self.owner.session is None:
            return {v.path: array_of(v.value) for v in self.model.weights}
        return self.owner.session.state_dict()

    def put(self, state: Mapping[str, Any]) -> None:
        """Each rank takes its part. What is not in `state`, such as seeds, stays."""
        if self.owner.session is None:
            self._make_values()
            for path, v in named_variables(self.model).items():
                if path in state:
                    v.assign(state[path])
        else:
            now = self.owner.session.state_dict()
            now |= {p: np.asarray(x) for p, x in state.items()}
            self.owner.session.load_state_dict(now)

    def _make_values(self) -> None:
        """Before the first batch nobody knows which rank needs which; a file needs all."""
        for v in self.model.weights:
            if v._value is None:
                v._deferred_initialize()

    def gather(self) -> None:
        """The model has all weights on every rank again, as before it was partitioned."""
        state = self.owner.session.state_dict()
        for path, v in named_variables(self.model).items():
            if path in state:
                _replace(v, state[path])

    # --- files ----------------------------------------------------------------------------------

    def write(self, path: Any, own: Callable[[str], None], overwrite: bool) -> None:
        """By Keras's own writer, which finds all weights and all of the optimizer's state."""
        state, kept = self._everything()

        def written() -> None:
            if self.transport.rank == 0:
                with self._in_place(state, kept):
                    weight_files.whole_or_not(Path(path), own, overwrite)

        on_all_ranks(self.transport, f"writing {path}", written)

    def write_weights(
        self, path: Any, own: Callable[..., None], overwrite: bool, options: dict[str, Any]
    ) -> None:
        """By suffix: Keras's files, or safetensors."""
        if Path(path).suffix != SAFETENSORS:
            self.write(path, lambda new: own(new, overwrite=True, **options), overwrite)
            return
        found = self.state()
        state = {v.path: found[v.path] for v in self.model.weights}  # no seeds

        def written() -> None:
            if self.transport.rank == 0:
                weight_files.write_safetensors(Path(path), state, overwrite)

        on_all_ranks(self.transport, f"writing {path}", written)

    def read_weights(self, path: Any, own: Callable[..., None], options: dict[str, Any]) -> None:
        """Every rank reads the file and takes its part; nothing is taken if one cannot."""
        if Path(path).suffix == SAFETENSORS:
            found: dict[str, Any] = {}
            on_all_ranks(
                self.transport, f"reading {path}",
                lambda: found.update(weight_files.read_safetensors(Path(path), self.model)),
            )  # fmt: skip
            self.put(found)
            return
        state, kept = self._everything()
        after: dict[str, Any] = {}

        def reading() -> None:
            with self._in_place(state, kept) as optimizer:
                own(path, **options)
                every = named_variables(self.model)
                after["state"] = {p: array_of(every[p].value) for p in state}
                after["slots"] = slots(optimizer)

        on_all_ranks(self.transport, f"reading {path}", reading)
        self.put(after["state"])
        if self.owner.stepping is not None:
            assign(self.owner.stepping, after["slots"])

    def _everything(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Weights and the optimizer's variables by path, on every rank."""
        mine = slots(self.owner.stepping)
        told = self.transport.all_gather_object(mine) if mine else [{}]
        return self.state(), {p: x for each in told for p, x in each.items()}

    @contextmanager
    def _in_place(
        self, state: Mapping[str, np.ndarray], kept: Mapping[str, np.ndarray]
    ) -> Iterator[Any]:
        """The model with all weights, and an optimizer for all of them, on this rank."""
        if self.owner.session is None:
            self._make_values()
            yield getattr(self.model, "optimizer", None)
            return
        before: list[Callable[[], None]] = []
        own: Any = getattr(self.model, "optimizer", None)
        every = named_variables(self.model)
        for path, value in state.items():  # seeds and counters as well as weights
            before.append(_show(every[path], value))
        try:
            if self.owner.stepping is not None:
                copy = type(own).from_config(own.get_config())
                copy.build(self.model.trainable_variables)
                assign(copy, kept)
                self.model.optimizer = copy
            yield getattr(self.model, "optimizer", None)
        finally:
            if own is not None:
                self.model.optimizer = own
            for put_back in before:
                put_back()


def slots(optimizer: Any) -> dict[str, np.ndarray]:
    """The variables of an optimizer by path."""
    if optimizer is None or not optimizer.built:
        return {}
    found = {v.path: array_of(v.value) for v in optimizer.variables}
    if len(found) != len(optimizer.variables):
        raise CheckpointError(
            f"two variables of {optimizer.name} have one name, since two layers have; name layers "
            "apart, and their optimizer's state can be written"
        )
    return found


def assign(optimizer: Any, state: Mapping[str, np.ndarray]) -> None:
    """Give an optimizer the values of those of its variables that are in `state`."""
    for v in optimizer.variables:
        if v.path in state:
            v.assign(state[v.path])


def _show(v: Any, value: np.ndarray) -> Callable[[], None]:
    """Have a variable show this value; gives what undoes it."""
    if "held" in vars(v):
        import torch

        vars(v)["whole"] = torch.nn.Parameter(torch.from_numpy(np.array(value)), False)

        def hide() -> None:
            del vars(v)["whole"]

        return hide
    if v._value is None:
        v._initialize(value)

        def forget() -> None:
            v._value = None

        return forget
    old = array_of(v.value)
    v.assign(value)

    def put_back() -> None:
        v.assign(old)

    return put_back


def _replace(v: Any, value: np.ndarray) -> None:
    """Give a variable this value for good."""
    if "held" in vars(v):
        import torch

        module, key = vars(v)["held"]
        whole = torch.from_numpy(np.array(value))
        if key in module._parameters:
            module._parameters[key] = torch.nn.Parameter(whole, v.trainable)
        else:
            module._buffers[key] = whole
    elif v._value is None:
        v._initialize(value)
    else:
        v.assign(value)
