"""A Keras model on the torch backend under a plan: a session of gems.torch with the calls and names
of gems.keras.session, so that `fit` is the same on both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend import compute_output_spec

from gems.errors import GemsError, PlanError, ShapeError
from gems.torch import launch
from gems.torch.session import Session
from gems.torch.tracing.keras_module import keras_module
from gems.transport.protocol import Transport

MEANS = ("sum_over_batch_size", "mean")


def connect(backend: str | None = None, timeout: float | None = None) -> Transport:
    """The transport of this process, over the launcher's ranks or alone."""
    given = {} if timeout is None else {"timeout": timeout}
    return launch.connect(backend, device="cpu", **given)[0]


@dataclass(frozen=True)
class BatchResult:
    """What a batch gives, the same on every rank."""

    loss: float
    samples: int


class TorchSession:
    """See gems.keras.session.Session, whose calls these are."""

    def __init__(
        self,
        model: Any,
        loss: Any = None,
        sample: Any = None,
        plan: Any = "auto",
        *,
        transport: Transport,
        **options: Any,
    ) -> None:
        self.model, self.transport, self.rank = model, transport, transport.rank
        self.loss: Any = model._compile_loss if loss is None and model.compiled else loss
        self.ran: list[tuple[Any, Any, Any]] = []  # of the last batch, on the last stage
        self.optimizer: Any = None
        self.steps = 0
        self.module = keras_module(model)
        self.penalized = [v for v in model.trainable_variables if v.regularizer is not None]
        self.session = Session(
            self.module,
            self._loss,
            _arguments(_tensors(sample)),
            plan,
            transport=transport,
            device="cpu",
            regularizer=self._penalty if self.penalized else None,
            **options,
        )
        self.plan = self.session.plan
        self.engine = self.session.engine

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        y, weight = target["y"], target.get("weight")
        self.ran.append((y, keras.tree.map_structure(torch.Tensor.detach, output), weight))
        return self.loss(y, output, weight)

    def _penalty(self, named: Any) -> torch.Tensor:
        """Weight regularizers of a stage."""
        values = dict(named)
        found = [
            v.regularizer(values[name])
            for v in self.penalized
            if (name := self.module.names[v.path]) in values
        ]
        return sum(found, torch.zeros((), dtype=next(iter(values.values())).dtype))

    def _reject_reductions(self, weight: Any) -> None:
        kinds = {str(each.loss.reduction) for each in self.loss._flat_losses or ()}
        if not kinds <= {*MEANS, *(["mean_with_sample_weight"] if weight is None else [])}:
            raise PlanError(
                f"losses have the reductions {', '.join(sorted(kinds))}, which are no means over "
                "samples; on the torch backend use reduction 'sum_over_batch_size'"
            )

    def forward_backward(
        self, inputs: Any, targets: Any = None, sample_weight: Any = None
    ) -> BatchResult:
        """Forward and backward of a whole batch, given to every rank."""
        if self.loss is None:
            raise GemsError("this model has no loss; compile it with one")
        self.ran.clear()
        self._build_loss(inputs, targets, sample_weight)
        self._reject_reductions(sample_weight)
        given = {"y": targets} | ({} if sample_weight is None else {"weight": sample_weight})
        found = self.session.forward_backward(_arguments(_tensors(inputs)), _tensors(given))
        self.steps += 1
        return BatchResult(found.loss, found.samples)

    def _build_loss(self, inputs: Any, targets: Any, weight: Any) -> None:
        """Keras makes parts of a loss when it first sees outputs, and by then counts one batch."""
        if self.loss.built:
            return
        y = keras.tree.map_structure(_symbol, targets)
        w = keras.tree.map_structure(_symbol, weight)
        output = self.output_form(inputs)
        compute_output_spec(self.loss, y, output, w)
        for metric in self.loss.metrics:
            metric.reset_state()

    def evaluate(self, inputs: Any, targets: Any = None, sample_weight: Any = None) -> BatchResult:
        """The loss of a whole batch in inference mode, given to every rank."""
        output = self.session.predict(_arguments(_tensors(inputs)))
        samples = len(keras.tree.flatten(inputs)[0])
        self.ran = []
        if self.loss is None or targets is None:
            return BatchResult(math.nan, samples)
        y, weight = _tensors(targets), _tensors(sample_weight)
        before = [v.numpy() for metric in self.loss.metrics for v in metric.variables]
        with torch.no_grad():
            loss = float(self.loss(y, output, weight))
        if self.rank != 0:  # it counts once
            self._restore(before)
        else:
            self.ran = [(y, output, weight)]
        return BatchResult(loss, samples)

    def _restore(self, values: list[np.ndarray]) -> None:
        variables = [v for metric in self.loss.metrics for v in metric.variables]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def output_form(self, inputs: Any) -> Any:
        """Shapes and types of the output."""
        spec = keras.tree.map_structure(_symbol, inputs)
        return compute_output_spec(self.model, spec, training=False)

    def first_here(self) -> set[str]:
        """The paths of the variables that this rank is the first to hold."""
        names, groups = self.module.names, self.session.owned.replica_groups
        return {v.path for v in self.model.weights if groups[names[v.path]][0] == self.rank}

    @property
    def extra_losses(self) -> int:
        """How many losses the model adds: of regularizers, since others are rejected."""
        return len(self.penalized)

    def predict(self, inputs: Any) -> Any:
        """The model's output in inference mode, for a whole batch, on every rank."""
        found = self.session.predict(_arguments(_tensors(inputs)))
        return keras.tree.map_structure(lambda t: t.numpy(), found)

    def scored(self) -> list[tuple[Any, Any, Any]]:
        """Targets, outputs and sample weights of what this rank has run on the last stage."""
        return self.ran

    # --- the optimizer --------------------------------------------------------------------------

    @property
    def variables(self) -> dict[str, Any]:
        """By path, those that this rank has."""
        held = self.session.owned.on(self.rank)
        return {v.path: v for v in self.model.weights if self.module.names[v.path] in held}

    def add_optimizer(self, optimizer: Any) -> None:
        """Let the session step an optimizer of Keras, which was not built yet."""
        _reject(optimizer)
        here = self.variables
        self.trained = [v for v in self.model.trainable_variables if v.path in here]
        if not optimizer.built:
            optimizer.build(self.trained)
        elif list(map(id, optimizer._trainable_variables)) != list(map(id, self.trained)):
            raise PlanError(
                f"{optimizer.name} was built for {len(optimizer._trainable_variables)} variables, "
                f"and this rank has {len(self.trained)} of the model's; give an optimizer that was "
                "not built yet"
            )
        self.optimizer = optimizer

    def optimizer_step(self) -> None:
        """Step the optimizer with the gradients of the last batch, and free them."""
        factor = self.session.gradient_factor
        with torch.no_grad():
            pairs = [(v, v.value.grad) for v in self.trained]
            given = [(v, g * factor) for v, g in pairs if g is not None]
            self._apply(given)
        self.session.zero_grad()

    def _apply(self, given: list[tuple[Any, torch.Tensor]]) -> None:
        optimizer, most = self.optimizer, self.optimizer.global_clipnorm
        if most:
            first = self.first_here()
            mine = [g for v, g in given if v.path in first]
            squares = sum(float(g.double().square().sum()) for g in mine)
            total = torch.tensor([squares], dtype=torch.float64)
            self.transport.all_reduce(total, tuple(range(self.transport.world))).wait()
            norm = math.sqrt(float(total[0]))
            given = [(v, g * (most / max(norm, most))) for v, g in given]
        if not given:
            optimizer._iterations.assign(optimizer._iterations + 1)
            return
        optimizer.global_clipnorm = None  # by the norm of all ranks' gradients, above
        try:
            optimizer.apply([g for _, g in given], [v for v, _ in given])
        finally:
            optimizer.global_clipnorm = most

    # --- weights --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        """All variables of the model by path, on every rank. All ranks must call it."""
        state = self.session.state_dict()
        return {v.path: state[self.module.names[v.path]].numpy() for v in self.model.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take values by path; each rank takes its part. All ranks must call it with the same."""
        now = self.session.state_dict()
        missing = {v.path for v in self.model.weights} - set(state)
        if missing:
            raise ShapeError(f"the state has no values for {', '.join(sorted(missing)[:8])}")
        for v in self.model.weights:
            name = self.module.names[v.path]
            now[name] = torch.as_tensor(np.array(state[v.path])).to(now[name].dtype)
        self.session.load_state_dict(now)

    def timeline(self) -> Any:
        """The last step as all ranks measured it. All ranks must call it."""
        return self.session.timeline()

    def close(self) -> None:
        """Leave the other ranks."""
        self.session.close()


def _reject(optimizer: Any) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise PlanError(
            "LossScaleOptimizer scales losses by what one device saw overflow; use float32, or "
            "keras.mixed_precision 'mixed_bfloat16', which needs no scale"
        )
    if optimizer.gradient_accumulation_steps and optimizer.global_clipnorm:
        raise PlanError(
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps} with "
            f"global_clipnorm={optimizer.global_clipnorm}: the norm is of several batches, and "
            "ranks know it of one; leave out one of them, or give the plan more micro_batches"
        )
    if optimizer.loss_scale_factor is not None:
        raise PlanError(
            f"loss_scale_factor={optimizer.loss_scale_factor} is applied inside Keras's own "
            "train_step; leave it out, and multiply the loss instead"
        )


def _arguments(inputs: Any) -> Any:
    """As gems.torch takes them: one tensor, a tuple or a dict."""
    return tuple(inputs) if isinstance(inputs, list) else inputs


def _tensors(tree: Any) -> Any:
    return keras.tree.map_structure(
        lambda x: x if x is None or isinstance(x, torch.Tensor) else torch.as_tensor(np.asarray(x)),
        tree,
    )


def _symbol(x: Any) -> Any:
    if x is None:
        return None
    return keras.KerasTensor(tuple(x.shape), keras.backend.standardize_dtype(x.dtype))
