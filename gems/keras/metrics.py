"""Metrics of a batch whose outputs are on several ranks.

Each rank updates its copy of the metrics with the micro-batches that it ran on the last stage.
Variables of Keras's metrics are sums, and Keras marks them so; what a batch added to them is summed
over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras.src.backend import compute_output_spec
from keras.src.metrics.reduction_metrics import MeanMetricWrapper

from gems.errors import PlanError, problems
from gems.keras.weight_files import array_of
from gems.transport.protocol import Transport

CHECKED = "gems_checked"  # on metrics that were found to add up
Parts = list[tuple[Any, Any, Any]]  # targets, outputs, sample weights


@contextmanager
def over_ranks(model: Any, session: Any, x: Any, y: Any) -> Iterator[Callable[[Parts], None]]:
    """Around a batch; gives what to call with the parts that this rank has run."""
    compiled, transport = model._compile_metrics, session.transport
    loss = model._compile_loss
    if loss is not None and not loss.built:  # else it makes its own metrics with its first batch
        loss.build(*_forms(session.output_form(x), y))
    if compiled is not None and CHECKED not in vars(compiled):
        _build(compiled, session.output_form(x), y)
        vars(compiled)[CHECKED] = True
    if transport.world == 1 and (loss is None or not loss.metrics):
        yield lambda parts: _update(compiled, parts)
        return
    own = [metric for metric in model.metrics if metric is not model._loss_tracker]
    variables = [v for metric in own for v in metric.variables]
    before = [np.array(array_of(v.value)) for v in variables]

    def add(parts: Parts) -> None:
        for v, start in zip(variables, before, strict=True):
            v.assign(start)  # recording the loss has changed those of single outputs
        _update(compiled, parts)
        _update_losses(loss, parts)
        if transport.world == 1:
            return
        after = [np.array(array_of(v.value)) for v in variables]
        changes = [(b.astype("float64") - a).ravel() for a, b in zip(before, after, strict=True)]
        if not changes:
            return
        total = _summed(transport, np.concatenate(changes))
        for v, start in zip(variables, before, strict=True):
            part, total = total[: start.size], total[start.size :]
            v.assign((start + part.reshape(start.shape)).astype(start.dtype))

    yield add


def penalty(model: Any, session: Any) -> float:
    """The weight regularizers' part of the loss, of which each rank has that of its own weights."""
    penalized = [v for v in model.trainable_variables if v.regularizer is not None]
    if session.extra_losses > len(penalized):
        raise PlanError(
            "this model adds losses of activations (add_loss, activity_regularizer), which are not "
            "computed in inference mode; call evaluate on a model without them"
        )
    if not penalized:
        return 0.0
    first = session.first_here()
    parts = [v.regularizer(v) for v in penalized if v.path in first]
    mine = sum(float(array_of(part)) for part in parts)
    return float(_summed(session.transport, np.array([mine], np.float64))[0])


def _summed(transport: Transport, mine: np.ndarray) -> np.ndarray:
    """Over all ranks, as the backend's transport takes arrays."""
    if keras.backend.backend() != "torch":
        transport.all_reduce(mine, tuple(range(transport.world))).wait()
        return mine
    import torch

    buffer = torch.from_numpy(mine)
    transport.all_reduce(buffer, tuple(range(transport.world))).wait()
    return buffer.numpy()


def _update(compiled: Any, parts: Parts) -> None:
    if compiled is not None:
        for y, output, weight in parts:
            compiled.update_state(y, output, weight)


def _update_losses(compiled: Any, parts: Parts) -> None:
    """The losses of single outputs, which Keras reports where there are several."""
    if compiled is not None and compiled.metrics:
        for y, output, weight in parts:
            compiled(y, output, weight)


def results(model: Any, found: Any) -> dict[str, float]:
    """Of all batches of the epoch, this one included."""
    model._loss_tracker.update_state(found.loss, sample_weight=found.samples)
    return {name: _number(value) for name, value in model.get_metrics_result().items()}


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _number(x) for name, x in value.items()}
    array = array_of(value)
    return float(array) if array.ndim == 0 else array


def _build(compiled: Any, output: Any, y: Any) -> None:
    """On every rank, from shapes alone, so that ranks without outputs have the variables as well.
    Raises for metrics that are no sums."""
    target, output = _forms(output, y)
    if not compiled.built:  # Keras builds them before, on torch
        compiled.build(target, output)
    for metric in compiled.metrics:
        if getattr(metric, "_built", True) is False:  # it makes its variables with its first batch
            _make_variables(metric, target, output)
    found = [
        f"{metric.name}: {why}"
        for metric in compiled.metrics
        if (why := _why_not_additive(metric, target, output))
    ]
    if found:
        raise PlanError(
            problems(
                "these metrics of a batch do not follow from those of its micro-batches; use "
                "metrics whose variables are sums, or call model.predict and compute them:",
                found,
            )
        )


def _forms(output: Any, y: Any) -> tuple[Any, Any]:
    """Targets, as many as outputs, and outputs."""
    rows = keras.tree.flatten(output)[0].shape[0]

    def form(t: Any) -> Any:
        return keras.KerasTensor((rows, *t.shape[1:]), keras.backend.standardize_dtype(t.dtype))

    return keras.tree.map_structure(form, y), output


def _make_variables(metric: Any, target: Any, output: Any) -> None:
    if keras.tree.is_nested(target) or keras.tree.is_nested(output):
        raise PlanError(
            f"{metric.name} makes its variables with its first batch, which not all ranks have, "
            "and this model has several outputs; leave it out, or call model.predict and compute it"
        )
    numbers = np.random.default_rng(0)
    metric.update_state(_drawn(target, numbers), _drawn(output, numbers))
    metric.reset_state()


def _why_not_additive(metric: Any, target: Any, output: Any) -> str | None:
    others = [v.path for v in metric.variables if v.aggregation != "sum"]
    if others:
        return f"{', '.join(others)} is not summed (its aggregation is not 'sum')"
    if keras.tree.is_nested(target) or keras.tree.is_nested(output):
        return None
    if not type(metric).__module__.startswith("keras.") and not _adds_up(metric, target, output):
        return "its variables after two batches are not the sum of those after each"
    if not isinstance(metric, MeanMetricWrapper):
        return None
    function = lambda y, out: metric._fn(y, out, **metric._fn_kwargs)  # noqa: E731
    value: Any = compute_output_spec(function, target, output)
    if hasattr(value, "shape") and not value.shape:
        return "its function gives one number for a batch, not one for each sample"
    return None


def _adds_up(metric: Any, target: Any, output: Any) -> bool:
    """Whether the variables of somebody's own metric are sums over samples: tried on numbers. Keras
    marks all variables of metrics as sums, whatever they are."""
    numbers = np.random.default_rng(0)
    batches = [[_drawn(form, numbers) for form in (target, output)] for _ in range(2)]
    before = [np.array(array_of(v.value)) for v in metric.variables]
    found = []
    try:
        for chosen in (batches[:1], batches[1:], batches):
            metric.reset_state()
            start = [array_of(v.value).astype("float64") for v in metric.variables]
            for y, out in chosen:
                metric.update_state(y, out)
            ends = [array_of(v.value) for v in metric.variables]
            found.append([end - begin for end, begin in zip(ends, start, strict=True)])
    except Exception:  # it takes no such numbers; what it does with others is its own affair
        return True
    finally:
        for v, value in zip(metric.variables, before, strict=True):
            v.assign(value)
    return all(np.allclose(a + b, both, 1e-4, 1e-4) for a, b, both in zip(*found, strict=True))


def _drawn(form: Any, numbers: Any) -> Any:
    drawn = keras.ops.convert_to_tensor(numbers.uniform(0.1, 1.9, form.shape))
    return keras.ops.cast(drawn, form.dtype)  # of whole numbers both 0 and 1
