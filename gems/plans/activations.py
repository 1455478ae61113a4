"""What a stage saves for backward, where it waits, and how the rest is recomputed."""

from __future__ import annotations

from dataclasses import dataclass

from gems.plans.recompute import WHOLE_STAGE, StageRecompute


@dataclass(frozen=True)
class ActivationPolicy:
    """The activations of one stage between forward and backward.

    recompute    `never`, `always`, `except_last`, `auto`, or the modules that are recomputed
    patches      the grid of patches that the stage runs one after the other; () if it runs at once.
                 Such a stage saves its inputs, and each patch is recomputed inside backward
    carries      whether patches hand on halos of what later ones read, which are saved too,
                 instead of computing halos again
    offload      where saved tensors wait: "" for the device, `host` or `disk`
    values       where a streamed stage finds what other streamed stages hand it, and puts what it
                 hands them: "" for the device, `host` or `disk`
    partitioned  whether a spatial group shards the inputs that each of its ranks would save whole
    """

    recompute: StageRecompute = "never"
    patches: tuple[int, ...] = ()
    carries: bool = False
    offload: str = ""
    values: str = ""
    partitioned: bool = False

    @property
    def saves_all(self) -> bool:
        """Whether nothing is recomputed by the plan's `recompute`."""
        return self.recompute == "never"

    @property
    def whole_stage(self) -> bool:
        """Whether forward saves inputs only, and runs again as an action (R) or by patches."""
        return self.recompute in WHOLE_STAGE

    @property
    def spares_last(self) -> bool:
        """Whether the last micro-batch of a step is not recomputed."""
        return self.recompute == "except_last"

    def recomputes(self, *, last: bool) -> bool:
        """Whether the forward of a micro-batch runs again as an action (R) before backward; `last`
        if it is the last of its step."""
        return self.whole_stage and not self.patches and not (last and self.spares_last)
