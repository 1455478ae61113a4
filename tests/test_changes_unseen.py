"""State that forward reads by less usual ways, changed between steps: each was once not noticed."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.changes import ONE, assert_exact

Tensor = torch.Tensor


class Settings:
    """A class that is used as a namespace, as in many training scripts."""

    scale = 1.0
    inner = types.SimpleNamespace(scale=1.0)

    class Inner:
        scale = 1.0


class Derived(Settings):
    pass


class InModule:
    scale = 1.0


SETTINGS = types.ModuleType("settings_of_a_user")
SETTINGS.__dict__.update(Kind=InModule, config=types.SimpleNamespace(scale=1.0), scale=1.0)
sys.modules["settings_of_a_user"] = SETTINGS
# Classes that forward reaches in one way only.
MADE: dict[str, Any] = {}


def made(kind: str) -> Any:
    MADE[kind] = MADE.get(kind) or type("Made", (), {"scale": 1.0, "by_text": 1.0})
    return MADE[kind]


def set_made(kind: str, name: str = "scale") -> Callable[[Any, int], None]:
    return lambda model, step: setattr(made(kind), name, IN_PLACE[step])


OTHER = types.ModuleType("other_settings_of_a_user")
OTHER.__dict__["scale"] = 1.0
CLASSES = {"a": [made("class in a table")]}
BY_TEXT = made("name as a text")


class Holder:
    """An object that holds a class and a function, which lead further."""

    def __init__(self) -> None:
        self.kind = made("class in an object")
        self.function = around(made("function in an object"))


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class ByClass:
    scale = 1.0


BY_CLASS = ByClass()


def nested(depth: int) -> Any:
    found: Any = {"scale": 1.0}
    for _ in range(depth):
        found = {"in": found}
    return found


def innermost(found: Any) -> Any:
    while "in" in found:
        found = found["in"]
    return found


class Block(nn.Module):
    """Multiplies by what it finds somewhere."""

    scale = 1.0
    module: Any = OTHER  # torch copies no module of Python that is an attribute of a layer

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.slotted, self.nested = Slotted(), nested(12)
        self.long = [1.0] * 2000
        self.array = np.ones(5000)
        self.order = OrderedDict(a=2.0, b=3.0)
        self.function = closed(CONFIG)
        self.helper = Helper()
        self.partial = partial(scaled, by=[1.0])
        self.constant = torch.ones((), dtype=torch.float64)
        self.zero = 0.0
        self.default: Any = with_default
        self.kind_of_settings, self.holder = made("class of an attribute"), Holder()
        self.around = around(made("class of a closure"))

    def forward(self, x: Tensor) -> Tensor:
        return self.work(x)

    def work(self, x: Tensor) -> Tensor:
        if self.kind == "class":
            return x * Settings.scale
        if self.kind == "object of a class":
            return x * Settings.inner.scale
        if self.kind == "derived class":
            return x * Derived.scale
        if self.kind == "class of an object":
            return x * BY_CLASS.scale
        if self.kind == "slots":
            return x * self.slotted.scale
        if self.kind == "deep":
            return x * innermost(self.nested)["scale"]
        if self.kind == "long list":
            return x * self.long[1500]
        if self.kind == "large array":
            return x * float(self.array[4000])
        if self.kind == "order":
            return x * next(iter(self.order.values()))
        if self.kind == "closure of an attribute":
            return self.function(x)
        if self.kind == "helper":
            return self.helper.work(x)
        if self.kind == "partial":
            return self.partial(x)
        if self.kind == "tensor":
            return x * float(self.constant)
        if self.kind == "sign of zero":
            return x + torch.atan2(torch.full_like(x, self.zero), -torch.ones_like(x))
        if self.kind == "default":
            return self.default(x)
        if self.kind == "class in a module":
            return x * SETTINGS.Kind.scale
        if self.kind == "object in a module":
            return x * SETTINGS.config.scale
        if self.kind == "class in a class":
            return x * Settings.Inner.scale
        if self.kind == "class of an attribute":
            return x * self.kind_of_settings.scale
        if self.kind == "class in a table":
            return x * CLASSES["a"][0].scale
        if self.kind == "own class":
            return x * type(self).scale
        if self.kind == "name as a text":
            return x * getattr(BY_TEXT, "by_text")  # noqa: B009
        if self.kind == "module of an attribute":
            return x * self.module.scale
        if self.kind == "class of a closure":
            return self.around(x)
        if self.kind == "class in an object":
            return x * self.holder.kind.scale
        if self.kind == "function in an object":
            return self.holder.function(x)
        if self.kind == "import in forward":
            from settings_of_a_user import Kind  # type: ignore[import-not-found]

            return x * Kind.scale
        if self.kind == "attribute of a function":
            return x * scaled.scale  # type: ignore[attr-defined]
        return x.tanh()


CONFIG = types.SimpleNamespace(scale=1.0)
GLOBAL = 1.0


def closed(config: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * config.scale


def around(kind: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * kind.scale


class Helper:
    """No module; its methods are called by one."""

    def work(self, x: Tensor) -> Tensor:
        return x * GLOBAL


def scaled(x: Tensor, by: list[float]) -> Tensor:
    return x * by[0]


scaled.scale = 1.0  # type: ignore[attr-defined]


def with_default(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


def other(self: Any, x: Tensor) -> Tensor:
    return x.sin()


def set_class(model: Any, step: int) -> None:
    Settings.scale = 1.0 + step


def set_class_of_object(model: Any, step: int) -> None:
    ByClass.scale = 1.0 + step


def set_in_module(model: Any, step: int) -> None:
    InModule.scale = 1.0 + step


def set_object_of_class(model: Any, step: int) -> None:
    Settings.inner.scale = 1.0 + step


def patch_class(model: Any, step: int) -> None:
    Block.work = other if step == 1 else WORK  # type: ignore[method-assign]


def patch_forward_of_class(model: Any, step: int) -> None:
    Block.forward = other if step == 1 else FORWARD  # type: ignore[method-assign]


def patch_instance(name: str) -> Callable[[Any, int], None]:
    def patch(model: Any, step: int) -> None:
        if step == 1:
            setattr(model[1], name, types.MethodType(other, model[1]))
        elif step == 2:
            delattr(model[1], name)

    return patch


def doubles(module: nn.Module, args: Any, output: Tensor) -> Any:
    return output * 2 if isinstance(module, Block) else None


def hook_globally(model: Any, step: int) -> None:
    if step == 1:
        HANDLES.append(nn.modules.module.register_module_forward_hook(doubles))
    else:
        unhook()


def unhook() -> None:
    while HANDLES:
        HANDLES.pop().remove()


HANDLES: list[Any] = []
WORK, FORWARD = Block.work, Block.forward
IN_PLACE = (1.0, 2.0, -0.5)
CHANGES: dict[str, Callable[[Any, int], None]] = {
    "class": set_class,
    "derived class": set_class,
    "object of a class": set_object_of_class,
    "class of an object": set_class_of_object,
    "slots": lambda m, i: setattr(m[1].slotted, "scale", IN_PLACE[i]),
    "deep": lambda m, i: innermost(m[1].nested).update(scale=IN_PLACE[i]),
    "long list": lambda m, i: m[1].long.__setitem__(1500, IN_PLACE[i]),
    "large array": lambda m, i: m[1].array.__setitem__(4000, IN_PLACE[i]),
    "order": lambda m, i: m[1].order.move_to_end("a", last=i == 1),
    "closure of an attribute": lambda m, i: setattr(CONFIG, "scale", IN_PLACE[i]),
    "helper": lambda m, i: globals().update(GLOBAL=IN_PLACE[i]),
    "partial": lambda m, i: m[1].partial.keywords["by"].__setitem__(0, IN_PLACE[i]),
    "tensor": lambda m, i: m[1].constant.fill_(IN_PLACE[i]),
    "sign of zero": lambda m, i: setattr(m[1], "zero", (0.0, -0.0, 0.0)[i]),
    "default": lambda m, i: setattr(with_default, "__defaults__", (IN_PLACE[i],)),
    "class in a module": set_in_module,
    "import in forward": set_in_module,
    "object in a module": lambda m, i: setattr(SETTINGS.config, "scale", IN_PLACE[i]),
    "class in a class": lambda m, i: setattr(Settings.Inner, "scale", IN_PLACE[i]),
    "class of an attribute": set_made("class of an attribute"),
    "class in a table": set_made("class in a table"),
    "class of a closure": set_made("class of a closure"),
    "class in an object": set_made("class in an object"),
    "name as a text": set_made("name as a text", "by_text"),
    "own class": lambda m, i: setattr(Block, "scale", IN_PLACE[i]),
    "module of an attribute": lambda m, i: setattr(OTHER, "scale", IN_PLACE[i]),
    "function in an object": set_made("function in an object"),
    "attribute of a function": lambda m, i: setattr(scaled, "scale", IN_PLACE[i]),
    "method of the class": patch_class,
    "forward of the class": patch_forward_of_class,
    "method of the object": patch_instance("work"),
    "forward of the object": patch_instance("forward"),
    "global hook": hook_globally,
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_noticed(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), Block(kind), nn.Linear(4, 5)).double()
    try:
        assert_exact(model, ONE, CHANGES[kind])
    finally:
        for made_kind in MADE.values():
            made_kind.scale = made_kind.by_text = 1.0
        Settings.scale = ByClass.scale = Settings.inner.scale = CONFIG.scale = 1.0
        Settings.Inner.scale = InModule.scale = Block.scale = SETTINGS.config.scale = 1.0
        OTHER.scale = scaled.scale = 1.0  # type: ignore[attr-defined]
        globals().update(GLOBAL=1.0)
        Block.work, Block.forward = WORK, FORWARD  # type: ignore[method-assign]
        with_default.__defaults__ = (1.0,)
        unhook()
