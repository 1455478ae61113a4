"""GEMS: train networks on images too large for one device, exactly, on any number of them.

The nouns are plain data and load at once; what needs a framework loads it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gems.version import __version__

if TYPE_CHECKING:
    from gems.costs import Costs as Costs
    from gems.errors import GemsError as GemsError
    from gems.graph import Graph as Graph
    from gems.machine import Machine as Machine
    from gems.plans import Plan as Plan
    from gems.schedule.core import Schedule as Schedule
    from gems.simulation import simulate as simulate
    from gems.timeline import Timeline as Timeline
    from gems.torch.interrupt import Interrupt as Interrupt
    from gems.torch.manifest import latest as latest
    from gems.torch.planning import plan as plan
    from gems.torch.trainer import Trainer as Trainer
    from gems.torch.weight_files import read_weights as read_weights

_WHERE = {
    "Costs": "gems.costs",
    "GemsError": "gems.errors",
    "Graph": "gems.graph",
    "Interrupt": "gems.torch.interrupt",
    "Machine": "gems.machine",
    "Plan": "gems.plans",
    "Schedule": "gems.schedule.core",
    "Timeline": "gems.timeline",
    "Trainer": "gems.torch.trainer",
    "latest": "gems.torch.manifest",
    "plan": "gems.torch.planning",
    "read_weights": "gems.torch.weight_files",
    "simulate": "gems.simulation",
}

__all__ = [
    "Costs",
    "GemsError",
    "Graph",
    "Interrupt",
    "Machine",
    "Plan",
    "Schedule",
    "Timeline",
    "Trainer",
    "__version__",
    "latest",
    "plan",
    "read_weights",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gems' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
