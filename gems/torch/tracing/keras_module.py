"""A Keras model on the torch backend as an nn.Module whose weights are where torch looks for them.

Keras keeps each weight in a Variable of its own and calls layers that nn.Module does not see.
Here every layer is a submodule under its path, which has the layer's weights as parameters and
buffers; its Variables look there. So weights are partitioned, freed and stepped as any others, and
blocks have the names of layers: `conv1_conv.conv2d`.

While forward runs, random numbers come from torch's generator, which GEMS keys by step, micro-batch
and call: masks do not depend on the plan, and differ from those that Keras would draw.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from gems.errors import PlanError, TraceError

Tensor = torch.Tensor


class _Recording(threading.local):
    active = False  # whether this thread runs the forward of a KerasModule


_recording = _Recording()
NORM_KEYS = {
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


def is_keras(model: Any) -> bool:
    """Whether this is a Keras model or layer; Keras is not loaded to find out."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.layers.Layer)


def keras_module(model: Any) -> KerasModule:
    """The module of a Keras model, made once."""
    found = vars(model).get("gems_module")
    if found is None:
        found = vars(model)["gems_module"] = KerasModule(model)
    return found


class KerasModule(nn.Module):
    """The model to run, cut and own. The Keras model has its weights, as far as this rank does."""

    keras_model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        _reject(model)
        self.__dict__["keras_model"] = model
        self.names: dict[str, str] = {}  # path of each Keras variable -> name of the weight
        held: dict[int, str] = {}
        for layer in model._flatten_layers(include_self=True, recursive=True):
            module = KerasBatchNorm(layer) if _is_batch_norm(layer) else KerasLayer(layer)
            name = self._free_name(layer)
            for variable, key, trains in _own_variables(layer):
                if id(variable) not in held:  # else it is tied to another layer's
                    _hold(variable, module, key, trains)
                    held[id(variable)] = f"{name}.{key}"
                self.names[variable.path] = held[id(variable)]
            if layer is not model or len(list(module.parameters())):
                self.add_module(name, module)
            if layer is not model:
                layer.__dict__["call"] = module.call
        self.train()

    def _free_name(self, layer: Any) -> str:
        base = name = (layer.path or layer.name).replace(".", "_")
        count = 1
        while name in self._modules or hasattr(self, name):
            count += 1
            name = f"{base}_{count}"
        return name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = kwargs or (args[0] if len(args) == 1 else list(args))
        takes = {"training": self.training} if self.keras_model._call_has_training_arg else {}
        with _torch_draws():
            output = self.keras_model(inputs, **takes)
        for layer in self.keras_model._flatten_layers():
            if layer._losses:
                raise TraceError(
                    f"{layer.path or layer.name} adds a loss of activations, which no other stage "
                    "would see; leave out add_loss and activity_regularizer, or make it part of "
                    "the model's output and its loss"
                )
        return output


class _Initialized:
    """A module that makes what it has on the meta device by Keras's initializers, which have their
    seeds from when they were made: the values are those of plain Keras, bit for bit."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for key, variable in vars(self).get("variables", {}).items():
                value = getattr(self, key)
                if variable._initializer is not None and not value.is_meta:
                    value.copy_(variable._initializer(variable._shape, dtype=variable._dtype))


class KerasLayer(_Initialized, nn.Module):
    """The weights of a Keras layer, and its `call`."""

    own_call: Callable[..., Any]

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.__dict__["own_call"] = layer.call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)


class KerasBatchNorm(_Initialized, _BatchNorm):
    """Keras's BatchNormalization: channels along `axis`, averages of the biased variance, and a
    momentum that is the part which stays."""

    runs_as_it_is = True
    layer: Any
    own_call: Callable[..., Any]

    def __init__(self, layer: Any) -> None:
        nn.Module.__init__(self)
        self.num_features, self.affine, self.track_running_stats = 0, True, True
        self.eps, self.momentum, self.axis = layer.epsilon, 1.0 - layer.momentum, layer.axis
        self.__dict__["layer"], self.__dict__["own_call"] = layer, layer.call
        self.out_dtype = _torch_dtype(layer.compute_dtype)
        for key in ("weight", "bias"):
            self.register_parameter(key, None)
        for key in ("running_mean", "running_var"):
            self.register_buffer(key, None)
        self.register_buffer("num_batches_tracked", torch.tensor(0), persistent=False)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """What stands for the layer's `call`."""
        training = bool(training and self.layer.trainable)
        if mask is not None or (training and not self.training):
            return self.own_call(inputs, training=training, mask=mask)
        return self(inputs) if training == self.training else self.in_inference(inputs)

    def train(self, mode: bool = True) -> KerasBatchNorm:
        """One that is frozen keeps its averages."""
        return super().train(mode and self.layer.trainable)

    def in_inference(self, x: Tensor) -> Tensor:
        inner = _statistics_dtype(x.dtype)
        parts = (self.running_mean, self.running_var, self.weight, self.bias)
        mean, variance, weight, bias = (None if t is None else t.to(inner) for t in parts)
        x = x.to(inner).movedim(self.axis, 1)
        y = F.batch_norm(x, mean, variance, weight, bias, False, 0.0, self.eps)
        return y.movedim(1, self.axis).to(self.out_dtype)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self.in_inference(input)
        inner = _statistics_dtype(input.dtype)
        x = input.to(inner).movedim(self.axis, 1)
        channels, cells = x.shape[1], x.numel() // x.shape[1]
        weight, bias = (None if t is None else t.to(inner) for t in (self.weight, self.bias))
        mean, variance = x.new_zeros(channels), x.new_zeros(channels)
        if cells > 1:
            y = F.batch_norm(x, mean, variance, weight, bias, True, 1.0, self.eps)
        else:  # which torch rejects
            rows = (1, channels, *(1,) * (x.dim() - 2))
            y, mean = x - x, x.detach().reshape(channels)
            y = y if weight is None else y * weight.view(rows)
            y = y if bias is None else y + bias.view(rows)
        with torch.no_grad():
            self._remember(mean, variance, cells)
        return y.movedim(1, self.axis).to(self.out_dtype)

    def _remember(self, mean: Tensor, variance: Tensor, cells: int) -> None:
        assert self.running_mean is not None and self.running_var is not None
        part = float(self.momentum or 0.0)
        biased = part * (cells - 1) / cells  # torch gave the unbiased one
        self.running_mean.mul_(1 - part).add_(mean.to(self.running_mean), alpha=part)
        self.running_var.mul_(1 - part).add_(variance.to(self.running_var), alpha=biased)


def _torch_dtype(name: str) -> torch.dtype:
    return _keras(".src.backend.torch.core").to_torch_dtype(name)


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """What Keras computes statistics in."""
    return _torch_dtype(_keras(".backend").result_type(dtype, "float32"))


def _keras(name: str) -> Any:
    """A module of Keras, which who has a Keras model has."""
    return importlib.import_module(f"keras{name}")


# --- from a Keras model to modules ----------------------------------------------------------------


def _reject(model: Any) -> None:
    if (backend := _keras(".backend").backend()) != "torch":
        raise PlanError(
            f"this Keras model runs on {backend}, not on torch; give it to "
            "gems.keras.distribute, or set KERAS_BACKEND=torch before Keras is imported"
        )
    if not model.built:
        raise PlanError(
            f"the Keras model {model.name!r} has no weights yet; call model.build(shape), or the "
            "model on one batch, before giving it to GEMS"
        )


def _is_batch_norm(layer: Any) -> bool:
    return type(layer) is _keras(".layers").BatchNormalization and not layer.renorm


def _own_variables(layer: Any) -> Iterator[tuple[Any, str, bool]]:
    """The variables of a layer, without those of layers in it; for each a name of its own, and
    whether it is for optimizers."""
    taken: set[str] = set()
    kinds = (layer._trainable_variables, layer._non_trainable_variables)
    for trains, variables in zip((True, False), kinds, strict=True):
        for variable in variables:
            key = base = NORM_KEYS[variable.name] if _is_batch_norm(layer) else _key(variable.name)
            count = 1
            while key in taken:
                count += 1
                key = f"{base}_{count}"
            taken.add(key)
            yield variable, key, trains


def _key(name: str) -> str:
    """A name that a parameter may have: no dot, and none that nn.Module has."""
    key = name.replace(".", "_")
    return f"{key}_" if hasattr(KerasLayer, key) or key in ("own_call", "training") else key


def _hold(variable: Any, module: nn.Module, key: str, trains: bool) -> None:
    """The value is in the module from now on, and the variable looks there. One that was built
    without a value is on the meta device, and made on the ranks that need it."""
    if variable._value is None:
        value = torch.empty(variable._shape, dtype=_torch_dtype(variable._dtype), device="meta")
    else:
        value = variable._value.detach()
    module.__dict__.setdefault("variables", {})[key] = variable
    if trains:
        module.register_parameter(key, nn.Parameter(value, requires_grad=variable.trainable))
    else:
        module.register_buffer(key, value)
    variable.__dict__.pop("_value", None)
    variable.__dict__["held"] = (module, key)
    variable.__class__ = _held_variable()


@cache
def _held_variable() -> type:
    class Held(_keras(".src.backend.torch.core").Variable):
        """A Keras variable whose value is what a module has under a name, now."""

        @property
        def _value(self) -> Any:
            if "whole" in vars(self):  # while a file is written or read
                return vars(self)["whole"]
            module, key = vars(self)["held"]
            return module._parameters[key] if key in module._parameters else module._buffers[key]

        @_value.setter
        def _value(self, value: Any) -> None:
            module, key = vars(self)["held"]
            own = module._parameters if key in module._parameters else module._buffers
            own[key] = value

    return Held


@contextmanager
def _torch_draws() -> Iterator[None]:
    """Random numbers from torch's generator, on this thread. Devices are compared as torch has
    them, too: Keras compares with a text, and copies whatever it meets."""
    _switch_draws()
    state, device = _keras(".src.backend.common").global_state, "torch_device"
    before = state.get_global_attribute(device)
    here = torch.device(_keras(".src.backend.torch.core").get_device())
    state.set_global_attribute(device, here)
    _recording.active = True
    try:
        yield
    finally:
        _recording.active = False
        state.set_global_attribute(device, before)


@cache
def _switch_draws() -> None:
    """Have Keras ask, wherever it draws, whether this thread runs a forward of ours."""
    random = _keras(".src.backend.torch.random")
    plain_dropout, plain_generator = random.dropout, random.torch_seed_generator

    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        if not _recording.active or noise_shape is not None or rate in (0.0, 1.0):
            return plain_dropout(inputs, rate, noise_shape, seed)
        return F.dropout(inputs, rate, True)

    def torch_seed_generator(seed: Any) -> Any:
        return None if _recording.active else plain_generator(seed)

    random.dropout, random.torch_seed_generator = dropout, torch_seed_generator
