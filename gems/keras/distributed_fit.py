"""A compiled Keras model whose `fit`, `evaluate`, `predict` and files run under a plan.

What a batch does is replaced, by functions on the model itself; epochs, callbacks, histories and
inputs are Keras's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
from keras.src.backend import compute_output_spec
from keras.src.backend.common.stateless_scope import in_stateless_scope

from gems.errors import GemsError, PlanError
from gems.hardware import Machine
from gems.keras import callbacks, metrics, same_random
from gems.keras.reject import reject_compiled, reject_model, reject_plan
from gems.keras.whole_weights import Whole, assign, slots
from gems.model.costs import Costs
from gems.plans.plan import Plan
from gems.schedule.action import Schedule
from gems.transport.protocol import Transport

REPLACED = (
    *("fit", "evaluate", "predict", "compile", "export"),
    *("make_train_function", "make_test_function", "make_predict_function", "_symbolic_build"),
    *("save", "save_weights", "load_weights", "get_weights", "set_weights"),
)


def distribute(
    model: Any,
    plan: Plan | str | Path = "auto",
    *,
    memory: str | float | None = None,
    costs: str | Costs = "auto",
    machine: str | Path | Machine = "cpu",
    schedule: Schedule | None = None,
    backend: str | None = None,
    transport: Transport | None = None,
    timeout: float | None = None,
) -> Any:
    """The same model, trained under a plan by its own `fit`. Every rank calls it, and all see the
    same data, as one process would.

    plan      a gems.Plan, a file of one, or "auto": the fastest that fits this many ranks
    memory    bytes per rank, e.g. "16GiB": a limit for "auto" plans, schedules and `recompute`
    costs     what layers cost: "estimate", "measure", gems.Costs, or "auto", which measures for
              plan="auto"
    machine   what estimates and "auto" plans are for: a preset, a file of one, or a Machine
    schedule  an order of one's own, instead of the plan's
    backend   what ranks talk over: "mpi" or "gloo" on TensorFlow, "gloo" on torch; see
              gems.keras.launch
    timeout   seconds without a sign of life after which a rank is lost

    The batch of `fit` is the whole batch: it is split into the plan's micro-batches. Weights are
    partitioned at the first batch, whose shapes are those of all plans and prices.
    """
    reject_model(model)
    if "gems" in vars(model):
        raise PlanError(
            f"the model {model.name!r} is under a plan already; build it anew to change the plan"
        )
    if isinstance(plan, Plan):
        reject_plan(plan)
    options = {"memory": memory, "costs": costs, "machine": machine, "schedule": schedule}
    if transport is None:
        transport = _connect(backend, timeout)
    _make_seeds(model)
    vars(model)["gems"] = Distributed(model, plan, transport, options)
    return model


def _make_seeds(model: Any) -> None:
    """Of a lazily built model: states of generators, a few numbers that every rank has."""
    weights = {id(v) for v in model.weights}
    for v in model.variables:
        if v._value is None and id(v) not in weights:
            v._deferred_initialize()


def _connect(backend: str | None, timeout: float | None) -> Transport:
    if keras.backend.backend() == "torch":
        from gems.keras.torch_session import connect
    else:
        from gems.keras.launch import connect
    return connect(backend, timeout)


def _session_class() -> Callable[..., Any]:
    if keras.backend.backend() == "torch":
        from gems.keras.torch_session import TorchSession

        return TorchSession
    from gems.keras.session import Session

    return Session


class Distributed:
    """What a model under a plan has besides: `model.gems`. Each method in REPLACED stands for the
    model's own of that name."""

    def __init__(
        self, model: Any, plan: Plan | str | Path, transport: Transport, options: dict[str, Any]
    ) -> None:
        self.model, self.wanted, self.transport, self.options = model, plan, transport, options
        self.rank = transport.rank
        self.session: Any = None  # made by the first batch
        self.stepping: Any = None  # the optimizer that the session steps
        self.whole = Whole(self)
        for name in REPLACED:
            vars(model)[name] = getattr(self, name)
        if transport.world > 1 and keras.backend.backend() == "tensorflow":
            vars(model)["call"] = self._call

    def _own(self, name: str) -> Callable[..., Any]:
        """The method that the model has of itself."""
        return getattr(type(self.model), name).__get__(self.model)

    @property
    def plan(self) -> Plan:
        """The plan, written out."""
        if self.session is None:
            raise GemsError("the plan is written out at the first batch; call fit or predict first")
        return self.session.plan

    def timeline(self) -> Any:
        """The last batch as all ranks measured it. All ranks must call it."""
        if self.session is None:
            raise GemsError("nothing has run yet; call fit first")
        return self.session.timeline()

    def close(self) -> None:
        """Leave the other ranks; the model cannot be run any more."""
        if self.session is not None:
            self.session.close()
        else:
            self.transport.close()

    def _call(self, *args: Any, **options: Any) -> Any:
        """`model(x)` by people, who would get an answer of weights that were trained elsewhere."""
        if self.session is not None and not in_stateless_scope() and not self.session.holds_all:
            raise GemsError(
                "model(...) would run with what this rank holds, and others have the weights of "
                "the other stages; call model.predict or model.predict_on_batch, on every rank"
            )
        return self._own("call")(*args, **options)

    # --- batches --------------------------------------------------------------------------------

    def _session(self, inputs: Any) -> Any:
        if self.session is None:
            if not self.model.built:
                spec = keras.tree.map_structure(_symbol, inputs)
                compute_output_spec(self.model, spec)
            total = self.wanted.total if isinstance(self.wanted, Plan) else 1
            sample = keras.tree.map_structure(lambda x: x[: -(-len(x) // total)], inputs)
            make = _session_class()
            self.session = make(
                self.model, None, sample, self.wanted, transport=self.transport, **self.options
            )
        return self.session

    def _train(self, batch: Any) -> dict[str, float]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        session, model = self._session(x), self.model
        if self.stepping is not model.optimizer:
            self._take_optimizer(session)
        with metrics.over_ranks(model, session, x, y) as add:
            found = session.forward_backward(x, y, weight)
            add(session.scored())
        session.optimizer_step()
        return metrics.results(model, found)

    def _take_optimizer(self, session: Any) -> None:
        """The session steps the model's optimizer. One that was built, as in a model from a file,
        has state for all weights, of which this rank takes its part."""
        optimizer, state = self.model.optimizer, {}
        if optimizer.built:
            state = slots(optimizer)
            optimizer = self.model.optimizer = type(optimizer).from_config(optimizer.get_config())
        session.add_optimizer(optimizer)
        assign(optimizer, state)
        own = optimizer.finalize_variable_values  # at the end of fit, with averages if it has some
        optimizer.finalize_variable_values = lambda _: own(optimizer._trainable_variables)
        self.stepping = optimizer

    def _test(self, batch: Any) -> dict[str, float]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        session, model = self._session(x), self.model
        with metrics.over_ranks(model, session, x, y) as add:
            found = session.evaluate(x, y, weight)
            add(session.scored())
        found = replace(found, loss=found.loss + metrics.penalty(model, session))
        return metrics.results(model, found)

    def _predict(self, batch: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        found = self._session(x).predict(x)
        return keras.tree.map_structure(keras.ops.convert_to_tensor, found)

    def make_train_function(self, force: bool = False) -> None:
        """`fit` and `train_on_batch` call what this leaves at `train_function`."""
        reject_compiled(self.model)
        self.model.train_function = lambda given: self._train(_first(given))

    def make_test_function(self, force: bool = False) -> None:
        """Of `evaluate`, `test_on_batch` and validation."""
        reject_compiled(self.model)
        self.model.test_function = lambda given: self._test(_first(given))

    def make_predict_function(self, force: bool = False) -> None:
        """Of `predict` and `predict_on_batch`."""
        self.model.predict_function = lambda given: self._predict(_first(given))

    # --- Keras's calls --------------------------------------------------------------------------

    def fit(self, *args: Any, **options: Any) -> Any:
        """As keras.Model.fit, on every rank; rank 0 shows progress and writes files."""
        reject_compiled(self.model)
        same_random.take_rank_0s(self.transport)
        return self._shown("fit", args, options)

    def evaluate(self, *args: Any, **options: Any) -> Any:
        """As keras.Model.evaluate, forward only under the plan."""
        reject_compiled(self.model)
        return self._shown("evaluate", args, options)

    def predict(self, *args: Any, **options: Any) -> Any:
        """As keras.Model.predict: all outputs on every rank."""
        return self._shown("predict", args, options)

    def _shown(self, call: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        own = self._own(call)
        given = inspect.signature(own).bind(*args, **options)
        asked = given.arguments
        asked["callbacks"] = callbacks.of_rank(asked.get("callbacks"), self.transport)
        if self.rank != 0:
            asked["verbose"] = 0
        return own(*given.args, **given.kwargs)

    def compile(self, *args: Any, **options: Any) -> None:
        """As keras.Model.compile. Weights stay; the optimizer starts anew."""
        if self.session is not None:
            self.whole.gather()
            self.session = self.stepping = None
        self._own("compile")(*args, **options)
        reject_compiled(self.model)

    def export(self, *args: Any, **options: Any) -> None:
        """Rejected: it would trace the whole model on one rank."""
        raise GemsError(
            "export traces the whole model on one rank, which has not all weights; call "
            "model.save('model.keras') under the plan, and export what keras.saving.load_model "
            "gives"
        )

    def _symbolic_build(self, *args: Any, **options: Any) -> None:
        """Keras would build the optimizer for weights that other ranks have."""
        optimizer = self.model.optimizer
        if optimizer is None:
            return self._own("_symbolic_build")(*args, **options)
        built, optimizer.built = optimizer.built, True
        try:
            self._own("_symbolic_build")(*args, **options)
        finally:
            optimizer.built = built

    # --- files and weights ----------------------------------------------------------------------

    def save(self, filepath: Any, overwrite: bool = True, **options: Any) -> None:
        """As keras.Model.save: the whole model, written by rank 0. All ranks must call it."""
        own = self._own("save")
        self.whole.write(filepath, lambda path: own(path, overwrite=True, **options), overwrite)

    def save_weights(self, filepath: Any, overwrite: bool = True, **options: Any) -> None:
        """As keras.Model.save_weights, or to `.safetensors`. All ranks must call it."""
        self.whole.write_weights(filepath, self._own("save_weights"), overwrite, options)

    def load_weights(self, filepath: Any, **options: Any) -> None:
        """As keras.Model.load_weights, or from `.safetensors`: each rank takes its part. All ranks
        must call it."""
        self.whole.read_weights(filepath, self._own("load_weights"), options)

    def get_weights(self) -> list[Any]:
        """All weights, on every rank. All ranks must call it."""
        state = self.whole.state()
        return [state[v.path] for v in self.model.weights]

    def set_weights(self, weights: list[Any]) -> None:
        """Of all weights each rank takes its part. All ranks must call it, with the same."""
        own = self.model.weights
        if len(weights) != len(own):
            raise PlanError(f"set_weights: got {len(weights)} arrays for {len(own)} weights")
        self.whole.put({v.path: w for v, w in zip(own, weights, strict=True)})


def _first(given: Any) -> Any:
    """What Keras hands to a function of a batch: an iterator, or a list of one batch."""
    return given[0] if isinstance(given, (list, tuple)) else next(given)


def _symbol(x: Any) -> Any:
    return keras.KerasTensor(tuple(x.shape), keras.backend.standardize_dtype(x.dtype))
