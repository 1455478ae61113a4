"""Two batches in flight (PipeDream-2BW): a step state of each, and the weight version it uses.

The engine numbers the micro-batches of both (see schedule/async_window.py).
"""

from __future__ import annotations

from gems.plans.plan import Plan
from gems.schedule.async_window import AT_ONCE, place
from gems.torch.runtime.step_state import StepState
from gems.torch.state.rank_weights import RankWeights
from gems.torch.state.weight_versions import WeightVersions
from gems.torch.tensors.storage import storage_of


class TwoBatches:
    """The states of the newest batch and of the one before, by the parity of their numbers."""

    def __init__(self, weights: RankWeights, plan: Plan) -> None:
        self.weights, self.plan = weights, plan
        self.versions = WeightVersions(())
        self.states: list[StepState | None] = [None] * AT_ONCE
        self.begun = self.reduced = 0  # batches

    def add(self, state: StepState) -> None:
        """The next batch begins, while the one before is in flight."""
        earlier = self.states[1 - self.begun % AT_ONCE] if self.begun > self.reduced else None
        for stage, statistics in state.statistics.items():
            if earlier is not None and stage in earlier.statistics:
                statistics.follow(earlier.statistics[stage])
        self.states[self.begun % AT_ONCE] = state
        self.begun += 1

    def cover(self) -> None:
        """Allocate a second version of all parameters that are trained."""
        new = self.versions.cover(self.weights.parameters_here)
        self.weights.storages.update(map(storage_of, new))

    def show_newest(self) -> None:
        """Let the model have its newest weights, as between steps."""
        self.versions.show(self.versions.updates)

    def restart(self) -> None:
        """Nothing is in flight: the next batch uses the version before the newest."""
        self.begun = self.reduced = self.versions.updates
        self.states = [None] * AT_ONCE
        self.show_newest()

    def newest(self) -> StepState:
        return self._state((self.begun - 1) % AT_ONCE)

    def _state(self, parity: int) -> StepState:
        state = self.states[parity]
        assert state is not None, "no batch of this parity is in flight"
        return state

    # --- what the adapter asks ----------------------------------------------------------------

    def at(self, micro_batch: int) -> tuple[StepState, int]:
        parity, i = place(micro_batch, self.plan)
        return self._state(parity), i

    def running(self, micro_batch: int) -> tuple[StepState, int]:
        parity, i = place(micro_batch, self.plan)
        newest = self.begun - 1
        batch = newest if newest % AT_ONCE == parity else newest - 1
        self.versions.show(max(batch - 1, 0))
        return self._state(parity), i

    def reducing(self) -> StepState:
        return self._state(self.reduced % AT_ONCE)

    @property
    def version_bytes(self) -> int:
        return self.versions.bytes
