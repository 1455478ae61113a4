"""Bytes of values in the store of one rank, while a schedule is carried out.

A value is there from the forward that makes it, or the receive that it comes by, until the last
backward on this rank that reads it, or the send that takes it away; its gradients likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from gems.model.costs import Costs
from gems.plans.plan import Plan
from gems.schedule.action import Message

Key = tuple[Any, ...]  # which of the values, of which micro-batch, and how it came here


class StoredTrace:
    """`change` is told of more bytes, or fewer."""

    def __init__(self, rank: int, plan: Plan, costs: Costs, change: Callable[[int], None]) -> None:
        self.rank, self.plan, self.stored, self.change = rank, plan, costs.stored, change
        self.users: dict[Key, set[Hashable]] = {}  # of each value or gradient that is here

    def forward(self, stage: int, i: int) -> None:
        for k, x in enumerate(self.stored):
            if x.source == stage:
                users = [self._user("output", stage, reader, i) for reader in x.readers]
                self._put((k, i), x.size, users)

    def backward(self, stage: int, i: int) -> None:
        """Gradients of what a stage read; it needs no more what it read, nor their gradients."""
        for k, x in enumerate(self.stored):
            if stage in x.readers and x.gradients:
                user = self._user("gradient", stage, x.source, i)
                self._put((k, i, stage), x.size, [user])
        self._release(("backward", stage, i))

    def send(self, message: Message) -> None:
        self._release(message)

    def post(self, message: Message) -> None:
        """It arrives, and is used by the stage that receives it."""
        i = message.micro_batch
        for k, x in enumerate(self.stored):
            if message.what == "output" and (x.source == message.source):
                if message.target in x.readers:
                    self._put((k, i, message), x.size, [("backward", message.target, i)])
            elif x.source == message.target and message.source in x.readers and x.gradients:
                self._put((k, i, message), x.size, [("backward", message.target, i)])

    def _user(self, what: str, source: int, target: int, i: int) -> Hashable:
        """The backward that needs it on this rank, or the message that it leaves by."""
        if self.rank in self.plan.spatial_group_for(target, i):
            return ("backward", target, i)
        return Message(what, source, target, i)

    def _put(self, key: Key, size: int, users: Iterable[Hashable]) -> None:
        self.users[key] = set(users)
        self.change(size)

    def _release(self, user: Hashable) -> None:
        for key in [key for key, users in self.users.items() if user in users]:
            self.users[key].discard(user)
            if not self.users[key]:
                del self.users[key]
                self.change(-self.stored[key[0]].size)
