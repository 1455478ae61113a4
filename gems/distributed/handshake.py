"""What the ranks of a session compare before each call, so that none waits for what never comes.

Each front end adds what its batches, optimizers and settings are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from gems.distributed.consensus import Claim, agree, difference, reject_failed
from gems.distributed.key import key
from gems.plans.plan import Plan
from gems.schedule.action import Schedule
from gems.transport.protocol import Transport


class Comparisons(ABC):
    """Those that any session makes."""

    transport: Transport

    def begin(self, name: str, model: int, plan: Plan, schedule: Schedule, **settings: Any) -> None:
        """Before anything depends on it. A rank that failed meets the others here, too."""
        same = {"plan": f"#{key(str(schedule), plan):x}"} | settings
        claim = Claim(name, model=model, settings=same)
        claims = self.transport.all_gather_object(claim.contents())
        reject_failed(claims)
        if any(claim != claims[0] for claim in claims):
            raise difference(claims, self.transport.rank)

    def call(self, name: str, **facts: Any) -> None:
        """All ranks must make this call."""
        agree(self.transport, Claim(name, progress=self._progress(), settings=facts))

    @abstractmethod
    def _progress(self) -> dict[str, Any]:
        """Where in its work this rank is."""
