"""Where a stage's weights, gradients and optimizer state are, and how many bytes of them.

With N ranks in its replica group, P bytes of trained weights, and an optimizer that has `state`
times as much (2 for Adam):

    zero   weights        gradients                          optimizer
    0      P              P                                  state P
    1      P              P                                  state P / N
    2      P              P until they are reduced, then P/N state P / N
    3      P/N, and P     as with 2                          state P / N
           while it runs

Weights in half with fp32 masters (`master_weights`) have P for two bytes, and masters among the
optimizer's state: `with_masters(state)`, 6 for Adam. Those are the ZeRO paper's 2 + 2 + 12 bytes.

What is offloaded is not on the device: of weights P while the stage runs, of gradients nothing once
they are reduced, of optimizer state nothing. A second weight version (PipeDream-2BW) is P more.

Shards are counted in elements of four bytes and padded to the same size; for weights of other types
that is a few bytes off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ELEMENT = 4
ADAM = 2.0  # bytes of optimizer state per byte of trained weights, unless another is given
HALF, FULL = 2, 4  # bytes of a number
SHARDABLE = ("optimizer", "gradients", "weights")  # by zero = 1, 2, 3


def with_masters(state: float) -> float:
    """Bytes of optimizer state per byte of weights in half, with fp32 masters, of an optimizer that
    has `state` per byte of fp32 weights: 12 / 2 for Adam."""
    return FULL * (state + 1) / HALF


@dataclass(frozen=True)
class StateBytes:
    """Of one stage on one rank.

    weights     always on the device
    unsharded   more weights while the stage runs: the whole of what is sharded or offloaded
    gradients   from the first backward on, until they are reduced; `reduced` from then on
    optimizer   what its state is in proportion to, on the device
    host_copy   weights that are offloaded
    own         the part that this rank's optimizer steps
    older       weights of further versions
    """

    weights: float
    unsharded: float
    gradients: float
    reduced: float
    optimizer: float
    host_copy: float
    own: float
    older: float

    def offloaded(self, state: float, *, reduced: bool) -> float:
        """Bytes that are offloaded, before the gradients are `reduced` or after."""
        optimizer = state * self.own if not self.optimizer else 0.0
        return self.host_copy + optimizer + (self.own if self.host_copy and reduced else 0.0)

    def loaded_to_step(self, state: float) -> float:
        """Bytes that an optimizer step loads from disk, for as long as it takes."""
        if self.optimizer:
            return 0.0
        return self.host_copy + (self.own if self.host_copy else 0.0) + state * self.own


def resident_bytes(stages: Iterable[StateBytes], state: float) -> float:
    """Of all stages of a rank: of one of them weights and gradients as a whole."""
    stages = list(stages)
    always = sum(s.weights + s.older + s.reduced + state * s.optimizer for s in stages)
    return always + max((s.unsharded + s.gradients - s.reduced for s in stages), default=0.0)


@dataclass(frozen=True)
class StateResidency:
    """The state of one stage over the ranks of its replica group.

    replicas           ranks of the replica group
    sharded            which of SHARDABLE they shard; () if each has all
    weights_offload    where weights are while the stage does not run: "" for the device, `host` or
                       `disk`
    optimizer_offload  where the optimizer state is
    versions           of the weights at once: 2 with PipeDream-2BW
    eager              whether its optimizer step follows its own gradients, not those of all stages
    """

    replicas: int = 1
    sharded: tuple[str, ...] = ()
    weights_offload: str = ""
    optimizer_offload: str = ""
    versions: int = 1
    eager: bool = False

    @property
    def shards(self) -> int:
        """How many ranks shard the state; 1 if each has it all."""
        return self.replicas if self.sharded else 1

    @property
    def zero(self) -> int:
        """The ZeRO stage that has an effect: 0 where there is one rank."""
        return len(self.sharded) if self.replicas > 1 else 0

    @property
    def shards_weights(self) -> bool:
        return "weights" in self.sharded

    @property
    def offloads(self) -> bool:
        return bool(self.weights_offload or self.optimizer_offload)

    @property
    def gathers_updates(self) -> bool:
        """Whether each rank updates a shard of weights that all ranks hold whole."""
        return self.zero in (1, 2)

    @property
    def steps_by_stage(self) -> bool:
        """Whether optimizer steps are taken stage by stage, not all at once."""
        return self.eager or self.offloads

    @property
    def unsharded_on_demand(self) -> bool:
        """Whether the stage's weights are gathered or loaded when it runs, and freed after."""
        return bool(self.weights_offload) or self.zero == 3

    @property
    def frees_gradients(self) -> bool:
        """Whether whole gradients are freed as soon as they are reduced."""
        return "gradients" in self.sharded or bool(self.weights_offload)

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer runs on the host copy, beside the device's work."""
        return self.weights_offload == "host"

    def bytes(self, weights: float, trained: float, index: int = 0) -> StateBytes:
        """On the rank at `index` of the group, of so many bytes of weights and of what of them is
        trained, hence has gradients."""
        part = padded = own = trained
        if self.zero:
            part = -(-trained // (ELEMENT * self.replicas)) * ELEMENT
            padded = part * self.replicas
            own = min(max(trained - index * part, 0.0), part)
        stored = part if self.zero == 3 else padded  # of the trained weights, here or offloaded
        offloaded = bool(self.weights_offload)
        return StateBytes(
            weights=weights - trained + (0.0 if offloaded else stored),
            unsharded=padded if self.unsharded_on_demand else 0.0,
            gradients=padded,
            reduced=0.0 if offloaded else part if self.zero > 1 else padded,
            optimizer=0.0 if self.optimizer_offload else own,
            host_copy=stored if offloaded else 0.0,
            own=own,
            older=(self.versions - 1) * trained,
        )
