"""GEMS: train networks on images too large for one device, exactly, on any number of them.

The nouns are plain data and load at once; what needs a framework loads it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gems.version import __version__

if TYPE_CHECKING:
    from gems.distributed.interrupt import Interrupt as Interrupt
    from gems.errors import GemsError as GemsError
    from gems.hardware import Machine as Machine
    from gems.model.costs import Costs as Costs
    from gems.model.graph import Graph as Graph
    from gems.plans.plan import Plan as Plan
    from gems.predict.simulate import simulate as simulate
    from gems.predict.timeline import Timeline as Timeline
    from gems.schedule.action import Schedule as Schedule
    from gems.torch.checkpoint.manifest import latest as latest
    from gems.torch.checkpoint.weight_files import read_weights as read_weights
    from gems.torch.parity import verify as verify
    from gems.torch.planning import plan as plan
    from gems.torch.session import Session as Session
    from gems.torch.trainer import Trainer as Trainer

_WHERE = {
    "Costs": "gems.model.costs",
    "GemsError": "gems.errors",
    "Graph": "gems.model.graph",
    "Interrupt": "gems.distributed.interrupt",
    "Machine": "gems.hardware",
    "Plan": "gems.plans.plan",
    "Schedule": "gems.schedule.action",
    "Session": "gems.torch.session",
    "Timeline": "gems.predict.timeline",
    "Trainer": "gems.torch.trainer",
    "latest": "gems.torch.checkpoint.manifest",
    "plan": "gems.torch.planning",
    "read_weights": "gems.torch.checkpoint.weight_files",
    "simulate": "gems.predict.simulate",
    "verify": "gems.torch.parity",
}

__all__ = [
    "Costs",
    "GemsError",
    "Graph",
    "Interrupt",
    "Machine",
    "Plan",
    "Schedule",
    "Session",
    "Timeline",
    "Trainer",
    "__version__",
    "latest",
    "plan",
    "read_weights",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gems' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
