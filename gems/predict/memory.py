"""Live bytes of every rank while a schedule is carried out, counted as the engine counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gems.model.costs import Costs
from gems.plans.plan import ASYNCHRONOUS, Plan
from gems.predict.state_bytes import Share, share
from gems.predict.timeline import Memory, Meter
from gems.schedule.action import OF_STAGE, OFFLOADS, Action, Kind, Message, Schedule
from gems.schedule.lower.messages import Receipts, receipts
from gems.schedule.lower.offload import Storing

Row = list[Memory]  # right after each action


def kept(stage: int, micro_batch: int, plan: Plan, costs: Costs) -> int:
    """Bytes that a forward leaves for backward: a stash, or what it is recomputed from."""
    if plan.recomputes(stage, micro_batch):
        return costs.received(stage)
    return round(costs[stage].activations)


def live(
    schedule: Schedule, plan: Plan, costs: Costs, state: float = 2.0, copies: int = 1
) -> list[tuple[Row, Meter]]:
    """For each rank its live bytes after every action, and the meter that knows the peak.

    `state` is what the optimizer keeps, in units of the gradients: 2 for Adam, 1 for momentum. The
    plan may stand for so many `copies` of it on further ranks.
    """
    endless, plan = plan.schedule == ASYNCHRONOUS, plan.unrolled
    proofs = receipts(schedule, plan)
    return [
        _Rank(rank, plan, costs, state, proofs[rank], copies, endless).run(row)
        for rank, row in enumerate(schedule.ranks)
    ]


class _Rank:
    """One rank's account. The engine does the same with tensors: see gems/engine/executor.py."""

    def __init__(
        self,
        rank: int,
        plan: Plan,
        costs: Costs,
        state: float,
        proofs: Receipts,
        copies: int,
        endless: bool,
    ) -> None:
        self.endless = endless
        self.rank, self.plan, self.costs, self.proofs = rank, plan, costs, proofs
        self.shares: dict[int, Share] = {}
        self.gradients: dict[int, float] = {}
        self.several: dict[int, bool] = {}  # whether other ranks hold a stage, too
        for s in plan.stages_on[rank]:
            holders, place = (
                len(plan.replica_groups[s]) * copies,
                plan.replica_groups[s].index(rank),
            )
            self.shares[s] = share(costs[s], plan.zero, holders, place, plan.offloaded_state)
            self.several[s] = holders > 1
            # Where several ranks hold a stage, gradients have their place from the start, unless
            # they go when they are summed, or with each update.
            if self.several[s] and not plan.frees_gradients and not endless:
                self.gradients[s] = self.shares[s].gradients
        self.gathered: set[int] = set()
        self.summing: int | None = None  # the stage whose gradients are on their way
        self.state = state
        self.put: set[int] = set()  # stages whose gradients are put away
        self.updating: int | None = None  # beside the work
        self.optimizer = round(state * sum(mine.optimizer for mine in self.shares.values()))
        self.meter = Meter(self._resident())
        self.at_hand: dict[Message, int] = {}
        self.inbox: dict[Message, dict[int, int]] = {}
        self.sending: dict[tuple[Message, int], int] = {}
        self.storing: Storing | None = None
        self.loading: set[tuple[int, int]] = set()

    def _resident(self) -> Memory:
        weights = sum(mine.weights for mine in self.shares.values())
        weights += sum(self.shares[s].gathered for s in self.gathered)
        if self.endless:  # what is trained is there in two versions
            weights += sum(self.costs[s].gradients for s in self.shares)
        gradients = sum(self.gradients.values())
        away = sum(m.away(self.state, summed=s in self.put) for s, m in self.shares.items())
        return Memory(round(weights), round(gradients), self.optimizer, offloaded=round(away))

    def run(self, row: Sequence[Action]) -> tuple[Row, Meter]:
        found = []
        for action in row:
            self._do(action)
            found.append(self.meter.now)
        if any(action.kind is Kind.ALL_REDUCE for action in row):
            self._settle()
            for stage in (
                self.shares
                if self.plan.optimizer_step == "end" and self.plan.offloaded_state
                else ()
            ):
                self._update_late(stage)
        return found, self.meter

    def _update_late(self, stage: int) -> None:
        """After the step, when nothing else is under way."""
        here = self._resident()
        here = replace(here, optimizer=here.optimizer + self._brought(stage))
        if here.total > self.meter.peak.total:
            self.meter.peak = here
        self.put.discard(stage)
        self.gradients.pop(stage, None)

    def _do(self, action: Action) -> None:
        if action.computes:
            self._step_on(action)
        if action.way == ">":
            self._send(action)
        elif action.way == "<":
            self._post(action)
        elif action.kind is Kind.FORWARD:
            self._forward(action)
        elif action.kind is Kind.RECOMPUTE:
            self._recompute(action.stage)
        elif action.kind is Kind.WEIGHT:
            self._release(action.stage)
        elif action.kind in OF_STAGE:
            self._share(action)
        elif action.kind in OFFLOADS:
            self._move(action)
        else:
            self._backward(action)

    def _share(self, action: Action) -> None:
        """A sum, or weights that come or go."""
        if action.kind is Kind.UNSHARD:
            self.gathered.add(action.stage)
        elif action.kind is Kind.RESHARD:
            self.gathered.remove(action.stage)
        elif action.kind is Kind.OPTIMIZER_STEP:
            self._settle()
            self._settle_update()
            self._update(action.stage)
        elif not self.plan.frees_gradients:
            return
        else:
            self._settle()
            self.summing = action.stage
            if not self.several[action.stage]:  # nothing to wait for
                self._settle()
        self.meter.settle(self._resident())

    def _settle(self) -> None:
        """The sum under way is through."""
        if self.summing is not None:
            self.gradients[self.summing] = self.shares[self.summing].summed
            if self.shares[self.summing].home:
                self.put.add(self.summing)
            self.summing = None

    def _update(self, stage: int) -> None:
        """What is put away comes back for a moment; and after an update gradients are gone."""
        self.meter.settle(self._resident())
        brought = self._brought(stage)
        self.meter.add("optimizer", brought)
        self.meter.drop("optimizer", brought)
        self.updating = stage
        if self.plan.offloaded_to("weights") != "host":  # where it runs beside the work
            self._settle_update()

    def _settle_update(self) -> None:
        """The update under way is made."""
        if self.updating is not None:
            self.put.discard(self.updating)
            self.gradients.pop(self.updating, None)
            self.updating = None

    def _brought(self, stage: int) -> int:
        """Bytes that come back for an update: none where the optimizer works on the host."""
        if self.plan.offloaded_to("weights") == "host":
            return 0
        return round(self.shares[stage].updating(self.state))

    def _forward(self, action: Action) -> None:
        s, i = action.stage, action.micro_batch
        for source in self.plan.sources[s]:
            self._take(Message("output", source, s, i))
        keep = self.meter.hold if self.plan.recomputes(s, i) else self.meter.keep
        keep(kept(s, i, self.plan, self.costs))
        for sink in self.plan.sinks[s]:
            self._offer(Message("output", s, sink, i))

    def _recompute(self, stage: int) -> None:
        self.meter.turn(self.costs.received(stage), round(self.costs[stage].activations))

    def _backward(self, action: Action) -> None:
        s, i = action.stage, action.micro_batch
        for sink in self.plan.sinks[s]:
            self._take(Message("gradient", sink, s, i))
        if self.plan.frees_gradients and self.several[s]:
            self.gradients[s] = self.shares[s].gradients
        self.meter.spike(round(self.costs[s].temporary))
        if action.kind is Kind.BACKWARD:
            self._release(s)
        for source in self.plan.sources[s]:
            self._offer(Message("gradient", s, source, i))

    def _release(self, stage: int) -> None:
        self.meter.release(round(self.costs[stage].activations))
        self.gradients.setdefault(stage, self.shares[stage].gradients)
        self.meter.settle(self._resident())

    # --- memory put away ------------------------------------------------------------------------

    def _step_on(self, action: Action) -> None:
        """A compute action begins: a store has had its time, and what was loaded is here."""
        if self.storing is not None and not self.storing.travels():
            self._let_go()
        key = action.stage, action.micro_batch
        if key in self.loading:
            self.loading.remove(key)
            self.meter.arrive(kept(*key, self.plan, self.costs))

    def _move(self, action: Action) -> None:
        self._let_go()
        key = action.stage, action.micro_batch
        size, counts = kept(*key, self.plan, self.costs), not self.plan.recomputes(*key)
        if action.kind is Kind.STORE:
            self.meter.put_away(size)
            self.storing = Storing(*key)
        else:
            self.meter.fetch(size, counts=counts)
            self.loading.add(key)

    def _let_go(self) -> None:
        if self.storing is not None:
            key = self.storing.stage, self.storing.micro_batch
            size = kept(*key, self.plan, self.costs)
            self.meter.let_go(size, counts=not self.plan.recomputes(*key))
            self.storing = None

    # --- messages -------------------------------------------------------------------------------

    def _offer(self, message: Message) -> None:
        self.at_hand[message] = self._bytes(message, self.costs.team(message.source))
        self.meter.add("boundary", self.at_hand[message])

    def _take(self, message: Message) -> None:
        if message in self.at_hand:
            self.meter.drop("boundary", self.at_hand.pop(message))
        for source, size in self.inbox.pop(message, {}).items():
            self.meter.drop("boundary", size)
            for sent in self.proofs.get((message, source), ()):
                self.meter.drop("communication", self.sending.pop((sent, source), 0))

    def _send(self, action: Action) -> None:
        message, team = action.message, self._team(action)
        for target in team:
            if target != self.rank:
                size = self._part(message)
                self.meter.add("communication", size)
                self.sending[message, target] = size
        if self.rank not in team:
            self.meter.drop("boundary", self.at_hand.pop(message))

    def _post(self, action: Action) -> None:
        message = action.message
        others = [source for source in self._team(action) if source != self.rank]
        self.inbox[message] = dict.fromkeys(others, self._part(message))
        for size in self.inbox[message].values():
            self.meter.add("boundary", size)

    def _team(self, action: Action) -> tuple[int, ...]:
        return self.plan.spatial_group_for(action.peer, action.micro_batch)

    def _part(self, message: Message) -> int:
        """What goes from one rank to another: of what does not stay every rank has something for
        every other."""
        if self.costs.stays(*message[:3]):
            return 0
        teams = self.costs.team(message.source) * self.costs.team(message.target)
        return self._bytes(message, teams)

    def _bytes(self, message: Message, parts: int) -> int:
        return -(-self.costs.bytes(message.what, message.source, message.target) // parts)
