"""Which weights of the model are on this rank: moved to its device, or made there from the meta
device, stage by stage where they are sharded or offloaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from gems.distributed.key import key
from gems.errors import PlanError, problems
from gems.torch.tracing.held_weights import remember_replaced, replace_held

Initialize = Callable[[nn.Module], None]
_drawing = threading.Lock()  # ranks may be threads, which share torch's generator


def place_weights(
    model: nn.Module,
    names: set[str],
    first_name: Mapping[str, str],
    device: torch.device,
    seed: int,
    initialize: Initialize | None = None,
    deferred: Collection[str] = (),
) -> DeferredInit:
    """Move just these weights to the device, and all others to the meta device.

    Weights that were on the meta device so far are materialized and initialised: by
    `initialize(module)` or by the module's own `reset_parameters`, from random numbers that depend
    on the seed and the module's name alone. Modules with `deferred` weights are left for later.
    """
    placed: dict[int, torch.Tensor] = {}
    fresh: dict[str, nn.Module] = {}
    left: dict[str, Left] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own in (module._parameters, module._buffers):
            for label, tensor in own.items():
                if tensor is None:
                    continue
                name = first_name[f"{path}.{label}" if path else label]
                if id(tensor) not in placed:
                    target = device if name in names else torch.device("meta")
                    new = _moved(tensor, target)
                    placed[id(tensor)] = placed[id(new)] = new
                    if new is not tensor:
                        remember_replaced(tensor, new)
                    if name in names and tensor.is_meta:
                        fresh.setdefault(path, module)
                        if name in deferred:
                            left.setdefault(path, {})[name] = (new, new.nbytes)
                            new.untyped_storage().resize_(0)
                own[label] = placed[id(tensor)]  # type: ignore[assignment]
    replace_held(model, placed)
    _reject_unknown(fresh, initialize)
    _initialize({path: m for path, m in fresh.items() if path not in left}, seed, initialize)
    return DeferredInit({path: (fresh[path], left[path]) for path in left}, seed, initialize)


Left = dict[str, tuple[torch.Tensor, int]]  # by name, with the bytes to allocate


class DeferredInit:
    """Modules whose weights are not allocated and initialised yet."""

    def __init__(
        self, modules: dict[str, tuple[nn.Module, Left]], seed: int, initialize: Initialize | None
    ) -> None:
        self.modules, self.seed, self.initialize = modules, seed, initialize

    def materialize(self, names: Collection[str] | None = None) -> None:
        """Initialise the modules that have one of these weights, or all that are left."""
        wanted = {
            path: module
            for path, (module, left) in self.modules.items()
            if names is None or not left.keys().isdisjoint(names)
        }
        for path in wanted:
            for tensor, size in self.modules.pop(path)[1].values():
                tensor.untyped_storage().resize_(size)
        _initialize(wanted, self.seed, self.initialize)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    new = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
    if not isinstance(tensor, nn.Parameter):
        return new
    return nn.Parameter(new, requires_grad=tensor.requires_grad)


def _reject_unknown(fresh: dict[str, nn.Module], initialize: Initialize | None) -> None:
    unknown = [path for path, m in fresh.items() if not initialize and not _own_reset(m)]
    if unknown:
        raise PlanError(
            problems(
                "this model is on the meta device, and these modules have no way to initialise "
                "themselves; give initialize=a function of a module, define reset_parameters(), or "
                "build the model with real weights:",
                (path or "the model itself" for path in unknown),
            )
        )


def _initialize(fresh: dict[str, nn.Module], seed: int, initialize: Initialize | None) -> None:
    with _drawing:
        state = torch.get_rng_state()
        try:
            for path, module in fresh.items():
                torch.manual_seed(key(seed, "initialize", path))
                reset = initialize or _own_reset(module)
                assert reset is not None
                with torch.no_grad():
                    reset(module)
        finally:
            torch.set_rng_state(state)


def _own_reset(module: nn.Module) -> Initialize | None:
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(type(module), name):
            return getattr(type(module), name)
    return None
