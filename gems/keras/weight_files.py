"""Weights of Keras models as safetensors, by the paths of their variables, and files that appear
whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from gems.errors import CheckpointError, problems


def array_of(x: Any) -> np.ndarray:
    """A tensor of any backend on the host."""
    return np.asarray(keras.ops.convert_to_numpy(x))


def named_variables(model: keras.Model) -> dict[str, Any]:
    """All variables by path, each once. Of several with one path the later ones get a number."""
    found: dict[str, Any] = {}
    for v in model.variables:
        path, number = v.path, 1
        while path in found and found[path] is not v:
            number += 1
            path = f"{v.path}:{number}"
        found[path] = v
    return found


def save_weights(model: Any, path: str | Path) -> None:
    """Write a Keras model's weights as safetensors, by the paths of its variables. Of a model under
    a plan all ranks must call it; Keras on TensorFlow and on torch have the same paths and shapes.
    """
    if "gems" in vars(model):
        model.save_weights(path)
        return
    write_safetensors(Path(path), {v.path: array_of(v.value) for v in model.weights})


def load_weights(model: Any, path: str | Path) -> None:
    """Read what `save_weights` wrote, under any plan, on any backend of Keras."""
    if "gems" in vars(model):
        model.load_weights(path)
        return
    found = read_safetensors(Path(path), model)
    for v in model.weights:
        v.assign(found[v.path])


def write_safetensors(path: Path, state: Mapping[str, np.ndarray], overwrite: bool = True) -> None:
    """Arrays by name."""
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(value) for name, value in state.items()}
    whole_or_not(path, lambda new: save_file(arrays, new, {"format": "keras"}), overwrite)


def read_safetensors(path: Path, model: Any) -> dict[str, np.ndarray]:
    """A file's arrays, which must be those of the model's weights."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    wanted = {v.path: tuple(v.shape) for v in model.weights}
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is not of this model" for name in found if name not in wanted]
    wrong += [
        f"{name} has the shape {found[name].shape}, and the model {shape}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(problems(f"{path} has other weights than the model:", wrong[:8]))
    return found


def whole_or_not(path: Path, write: Callable[[str], None], overwrite: bool = True) -> None:
    """Have a file written under another name, which gets its own when it is complete."""
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} exists, and overwrite=False; give another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = "".join(path.suffixes[-2:]) if path.name.endswith(".weights.h5") else path.suffix
    new = path.with_name(f".{path.name.removesuffix(suffix)}-{secrets.token_hex(4)}{suffix}")
    try:
        write(str(new))
        os.replace(new, path)
    finally:
        if new.is_dir():
            shutil.rmtree(new)
        else:
            new.unlink(missing_ok=True)
