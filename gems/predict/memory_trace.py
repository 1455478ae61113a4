"""Live bytes of every rank while a schedule is carried out, counted as the engine counts them."""

from __future__ import annotations

from collections.abc import Sequence

from gems.model.costs import Costs
from gems.plans.plan import Plan
from gems.plans.residency import ADAM, StateBytes
from gems.predict.stored_trace import StoredTrace
from gems.predict.timeline import Memory, Meter
from gems.schedule.action import OF_STAGE, Action, Kind, Message, Schedule
from gems.schedule.lower.messages import Receipts, receipts
from gems.schedule.lower.reduce import takes_over
from gems.schedule.machine import InFlight

Row = list[Memory]  # right after each action


def kept(stage: int, micro_batch: int, plan: Plan, costs: Costs) -> int:
    """Bytes that a forward saves for backward: activations, or inputs to recompute them from."""
    if plan.recomputes(stage, micro_batch):
        return costs.received(stage)
    return round(costs[stage].activations)


def live(
    schedule: Schedule, plan: Plan, costs: Costs, state: float = ADAM, copies: int = 1
) -> list[tuple[Row, Meter]]:
    """For each rank its live bytes after every action, and the meter that knows the peak.

    `state` is the optimizer's bytes per byte of trained weights: 2 for Adam, 1 for momentum. The
    plan may stand for `copies` of itself on further ranks.
    """
    asynchronous, plan = plan.asynchronous, plan.unrolled
    proofs = receipts(schedule, plan)
    return [
        _Rank(rank, plan, costs, state, proofs[rank], copies, asynchronous).run(row)
        for rank, row in enumerate(schedule.ranks)
    ]


class _Rank:
    """One rank's account: what is in flight is its state machine's, bytes are added here.

    The engine counts the same with tensors: see gems/engine/executor.py.
    """

    def __init__(
        self,
        rank: int,
        plan: Plan,
        costs: Costs,
        state: float,
        proofs: Receipts,
        copies: int,
        asynchronous: bool,
    ) -> None:
        self.asynchronous = asynchronous
        self.rank, self.plan, self.costs, self.proofs = rank, plan, costs, proofs
        self.in_flight = InFlight(plan)
        self.shares: dict[int, StateBytes] = {}
        self.gradients: dict[int, float] = {}
        self.replicated: dict[int, bool] = {}  # whether other ranks hold a stage, too
        for s in plan.stages_on[rank]:
            residency, index = plan.residency_over(copies)[s], plan.replica_groups[s].index(rank)
            self.shares[s] = residency.bytes(costs[s].weights, costs[s].gradients, index)
            self.replicated[s] = residency.replicas > 1
            # Gradients of a replicated stage are allocated from the start, unless they are freed
            # once they are reduced, or with each optimizer step, or taken over as they come.
            freed = residency.frees_gradients or asynchronous or takes_over(plan, s, copies)
            if self.replicated[s] and not freed:
                self.gradients[s] = self.shares[s].gradients
        self.gathered: set[int] = set()
        self.state = state
        self.offloaded: set[int] = set()  # stages whose gradients are offloaded
        self.steps_on_host = plan.residency[0].steps_on_host  # beside the computation
        self.optimizer = round(state * sum(mine.optimizer for mine in self.shares.values()))
        self.meter = Meter(self._resident())
        self.stored = StoredTrace(rank, plan, costs, self.meter.store)
        self.at_hand: dict[Message, int] = {}
        self.inbox: dict[Message, dict[int, int]] = {}
        self.sending: dict[tuple[Message, int], int] = {}

    def _resident(self) -> Memory:
        weights = sum(mine.weights for mine in self.shares.values())
        weights += sum(self.shares[s].unsharded for s in self.gathered)
        if self.asynchronous:  # trained weights exist in two versions
            weights += sum(self.costs[s].gradients for s in self.shares)
        gradients = sum(self.gradients.values())
        away = sum(
            m.offloaded(self.state, reduced=s in self.offloaded) for s, m in self.shares.items()
        )
        return Memory(round(weights), round(gradients), self.optimizer, offloaded=round(away))

    def run(self, row: Sequence[Action]) -> tuple[Row, Meter]:
        found = []
        for action in row:
            for begun in self.in_flight.begin(action):
                self._complete(begun)
            self._run(action)
            found.append(self.meter.now)
        for begun in self.in_flight.end():
            self._complete(begun)
        return found, self.meter

    def _run(self, action: Action) -> None:
        if action.way == ">":
            self._send(action)
        elif action.way == "<":
            self._post(action)
        elif action.kind is Kind.FORWARD:
            self._forward(action)
        elif action.kind is Kind.RECOMPUTE:
            saved, activations = self.costs.received(action.stage), self._activations(action.stage)
            self.meter.recompute(saved, activations)
        elif action.kind is Kind.WEIGHT:
            self._free(action.stage)
        elif action.kind in OF_STAGE:
            if action.kind not in (Kind.TIED, Kind.ALL_GATHER):  # which use memory that is there
                self._change_state(action)
        elif action.kind is Kind.STORE:
            self.meter.begin_store(self._saved(action)[0])
        elif action.kind is Kind.LOAD:
            self.meter.begin_load(*self._saved(action))
        else:
            self._backward(action)

    def _complete(self, begun: Action) -> None:
        if begun.kind is Kind.STORE:
            self.meter.end_store(*self._saved(begun))
        elif begun.kind is Kind.LOAD:
            self.meter.end_load(self._saved(begun)[0])
        elif begun.kind is Kind.ALL_REDUCE and self.replicated[begun.stage]:
            self._reduced(begun.stage)
        elif begun.kind is Kind.OPTIMIZER_STEP and self.steps_on_host:
            self._stepped(begun.stage)

    # --- weights, gradients, optimizer state ------------------------------------------------------

    def _change_state(self, action: Action) -> None:
        if action.kind is Kind.UNSHARD:
            self.gathered.add(action.stage)
        elif action.kind is Kind.RESHARD:
            self.gathered.remove(action.stage)
        elif action.kind is Kind.OPTIMIZER_STEP:
            if not (self.asynchronous or self.plan.residency[action.stage].eager):
                self._end_sends()
            self.meter.set_resident(self._resident())
            self.meter.spike("optimizer", self._fetched(action.stage))
            if not self.steps_on_host:
                self._stepped(action.stage)
        elif not self.plan.residency[action.stage].frees_gradients:
            return
        elif not self.replicated[action.stage]:  # there is nothing to wait for
            self._reduced(action.stage)
        self.meter.set_resident(self._resident())

    def _reduced(self, stage: int) -> None:
        if self.plan.residency[stage].frees_gradients:
            self.gradients[stage] = self.shares[stage].reduced
            if self.shares[stage].host_copy:
                self.offloaded.add(stage)

    def _stepped(self, stage: int) -> None:
        """Gradients are freed with the stage's step; if all stages are stepped by one call, with
        the last of them."""
        if self.asynchronous or self.plan.residency[stage].steps_by_stage:
            self.offloaded.discard(stage)
            self.gradients.pop(stage, None)
        elif stage == max(self.shares):
            self.gradients.clear()

    def _fetched(self, stage: int) -> int:
        """Bytes that an optimizer step loads from disk: none where it runs on the host."""
        return 0 if self.steps_on_host else round(self.shares[stage].loaded_to_step(self.state))

    # --- activations ------------------------------------------------------------------------------

    def _activations(self, stage: int) -> int:
        return round(self.costs[stage].activations)

    def _saved(self, action: Action) -> tuple[int, bool]:
        """Bytes that a forward has saved, and whether those are activations."""
        key = action.stage, action.micro_batch
        return kept(*key, self.plan, self.costs), not self.plan.recomputes(*key)

    def _forward(self, action: Action) -> None:
        s, i = action.stage, action.micro_batch
        for source in self.plan.sources[s]:
            self._take(Message("output", source, s, i, action.part))
        self.meter.save(*self._saved(action))
        self.stored.forward(s, i)
        for sink in self.plan.sinks[s]:
            self._offer(Message("output", s, sink, i, action.part))

    def _backward(self, action: Action) -> None:
        s, i = action.stage, action.micro_batch
        for sink in self.plan.sinks[s]:
            self._take(Message("gradient", sink, s, i, action.part))
        if self.plan.residency[s].frees_gradients and self.replicated[s]:
            self.gradients[s] = self.shares[s].gradients
        if self.plan.activations[s].patches:  # the first patch makes those of weights
            self.gradients.setdefault(s, self.shares[s].gradients)
            self.meter.set_resident(self._resident())
        self.meter.spike("activations", round(self.costs[s].temporary))
        if action.kind is Kind.BACKWARD:
            self._free(s)
        self.stored.backward(s, i)
        for source in self.plan.sources[s]:
            self._offer(Message("gradient", s, source, i, action.part))

    def _free(self, stage: int) -> None:
        self.meter.free(self._activations(stage))
        self.gradients.setdefault(stage, self.shares[stage].gradients)
        self.meter.set_resident(self._resident())

    # --- messages -------------------------------------------------------------------------------

    def _offer(self, message: Message) -> None:
        self.at_hand[message] = self._bytes(message, self.costs.group_size(message.source))
        self.meter.add("boundary", self.at_hand[message])

    def _take(self, message: Message) -> None:
        if message in self.at_hand:
            self.meter.drop("boundary", self.at_hand.pop(message))
        for source, size in self.inbox.pop(message, {}).items():
            self.meter.drop("boundary", size)
            for sent in self.proofs.get((message, source), ()):
                self.meter.drop("communication", self.sending.pop((sent, source), 0))

    def _send(self, action: Action) -> None:
        message, group = action.message, self._peers(action)
        for target in group:
            if target != self.rank:
                size = self._part(message)
                self.meter.add("communication", size)
                self.sending[message, target] = size
                self.stored.send(message)
        if self.rank not in group:
            self.meter.drop("boundary", self.at_hand.pop(message))

    def _end_sends(self) -> None:
        """An update at the end begins when nothing is in flight."""
        self.meter.drop("communication", sum(self.sending.values()))
        self.sending.clear()

    def _post(self, action: Action) -> None:
        message = action.message
        others = [source for source in self._peers(action) if source != self.rank]
        self.inbox[message] = dict.fromkeys(others, self._part(message))
        for size in self.inbox[message].values():
            self.meter.add("boundary", size)
        if others and self.rank not in self._peers(action):  # of a tile halos come, unseen here
            self.stored.post(message)

    def _peers(self, action: Action) -> tuple[int, ...]:
        return self.plan.spatial_group_for(action.peer, action.micro_batch)

    def _part(self, message: Message) -> int:
        """Bytes from one rank to another: unless tiles stay where they are, every rank sends a part
        to every other."""
        if self.costs.stays(*message[:3]):
            return 0
        pairs = self.costs.group_size(message.source) * self.costs.group_size(message.target)
        return self._bytes(message, pairs)

    def _bytes(self, message: Message, parts: int) -> int:
        return -(-self.costs.on_device(message.what, message.source, message.target) // parts)
