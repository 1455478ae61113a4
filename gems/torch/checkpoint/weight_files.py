"""A plain model's state dict as a file: `.pt` by torch, `.safetensors`, or out of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gems.errors import CheckpointError, GemsError
from gems.files import in_one_move

Tensor = torch.Tensor
State = Mapping[str, Any]
WRAPPED = ("state_dict", "model_state_dict", "model")  # where training scripts put the state dict


def write_weights(path: str | Path, state: State) -> Path:
    """Write a state dict in the format of the name's ending, whole or not at all."""
    path = Path(path)
    _, put = _format(path)
    with in_one_move(path) as temporary:
        put(state, str(temporary))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
    return path


def read_weights(path: str | Path) -> dict[str, Any]:
    """The state dict in a `.pt` or `.safetensors` file or a GEMS checkpoint, in host memory.

    It is for `trainer.load_state_dict` or the plain model's own. Nothing of the file is run.
    """
    path = Path(path)
    if path.is_dir():
        from gems.torch.checkpoint.save_load import weights_in

        return weights_in(path)
    take, _ = _format(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    try:
        found = take(path)
    except GemsError:
        raise
    except Exception as error:
        line = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read as weights ({type(error).__name__}: {line}); it must be a "
            "state dict of tensors, as torch.save(model.state_dict(), ...) writes it"
        ) from error
    return _state_in(found, path)


def _state_in(found: Any, path: Path) -> dict[str, Any]:
    for key in WRAPPED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not any(isinstance(x, Tensor) for x in found.values()):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not names with tensors")
    return dict(found)


def _take_torch(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _put_torch(state: State, path: str) -> None:
    torch.save(dict(state), path)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise GemsError(
            "files of this kind take the package safetensors; install it (pip install "
            "safetensors), or use the ending .pt"
        ) from error
    return safetensors.torch


def _take_safetensors(path: Path) -> Any:
    return _safetensors().load_file(path, device="cpu")


def _put_safetensors(state: State, path: str) -> None:
    if strange := [name for name, x in state.items() if not isinstance(x, Tensor)]:
        raise CheckpointError(
            f"a safetensors file holds tensors only, and these are none: {', '.join(strange)}; "
            "use the ending .pt"
        )
    # Tied weights share memory, which the format has no word for: each name gets its own.
    tensors = {name: x.detach().clone().contiguous() for name, x in state.items()}
    _safetensors().save_file(tensors, path, metadata={"format": "pt"})


FORMATS: dict[str, tuple[Callable[[Path], Any], Callable[[State, str], None]]] = {
    ".pt": (_take_torch, _put_torch),
    ".pth": (_take_torch, _put_torch),
    ".bin": (_take_torch, _put_torch),
    ".safetensors": (_take_safetensors, _put_safetensors),
}


def _format(path: Path) -> tuple[Callable[[Path], Any], Callable[[State, str], None]]:
    if path.suffix not in FORMATS:
        raise CheckpointError(
            f"{path} has the ending {path.suffix!r}; weights are read and written as "
            f"{', '.join(FORMATS)}, or read from the folder of a checkpoint"
        )
    return FORMATS[path.suffix]
