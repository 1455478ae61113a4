"""A streamed stage: the patches of an image run through it one after another, on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from gems.geometry.layout import Layout, Spans
from gems.torch.spatial.partition import CallNotTileable, StageLayout, lay_out
from gems.torch.spatial.rule import OWN, Rule
from gems.torch.tensors.rng import Draws
from gems.torch.tracing.calls import Call, Record


def unstreamable(call: Call, rule: Rule | None) -> str | None:
    """Why the patches of an image cannot run through a call one after another; None if they can.

    A sum or a mean over the image adds up patch by patch: it may be the last call, see `ends`.
    """
    if call.touches:
        return f"changes {', '.join(call.touches)}, once for every patch"
    if rule is None:
        return None
    if rule.sums or any(windows == OWN for windows in rule.windows.values()):
        return "looks at the whole image, which is never in memory at once"
    return "reads the far end of the image beside the near one" if rule.circular else None


def ends(call: Call, rule: Rule | None) -> bool:
    """Whether a call's results add up over the patches of an image, so that a stream may end."""
    return rule is not None and rule.additive and not call.touches


def lay_out_patches(
    record: Record,
    model: nn.Module,
    calls: Sequence[Call],
    entering: Mapping[str, Layout],
    draws: Draws,
    wanted: Iterable[str],
) -> StageLayout:
    """How `calls` run if every patch is computed from what enters, without an exchange."""
    fused = len(calls) + 1
    laid = lay_out(record, model, calls, entering, draws, fused=fused, wanted=wanted, gathers=False)
    read = {name for call in calls for name in call.reads}
    for call, op, rule in zip(calls, laid.ops, laid.rules, strict=True):
        if ends(call, rule) and not read.intersection(call.writes):
            laid.added.update(call.writes)
        elif (why := unstreamable(call, rule)) is not None:
            raise CallNotTileable(call, op.name, why)
    assert not laid.exchanges(), "a patch would have to read another one"
    return laid


def one_patch(laid: StageLayout, coordinate: Sequence[int]) -> StageLayout:
    """One patch of a layout by itself, as if there were no others."""

    def mine(spans: Spans) -> Spans:
        return tuple((row[at],) for row, at in zip(spans, coordinate, strict=True))

    layouts = {
        name: replace(layout, own=mine(layout.own), have=mine(layout.have))
        for name, layout in laid.layouts.items()
    }
    wants = [{name: mine(spans) for name, spans in row.items()} for row in laid.wants]
    return replace(laid, layouts=layouts, wants=wants)
