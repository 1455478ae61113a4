"""Stages that run one block of the image after the other: what a plan may say about them.

It is a spatial cut in time instead of over ranks. Each block of a stage's output is computed from
the box of the input that it reads, and computed again in backward, so that the stage keeps only its
inputs and no more than one block's activations are live.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gems.geometry.grid import Grid
from gems.plans.recompute import Keep, for_each

STREAMED = ("all", "inputs")  # what may be said about a streamed stage: it keeps its inputs


def stream_problems(
    streams: Sequence[tuple[int, ...]], grids: Sequence[Grid], keep: Keep, slices: int
) -> Iterable[str]:
    """Of the blocks that the first stages are to run one after the other."""
    if len(streams) > len(grids):
        yield (
            f"stream has {len(streams)} grids for {len(grids)} stages; give at most one per stage, "
            "or use more stages"
        )
    if slices > 1 and streams and len(streams) >= len(grids):
        yield (
            f"local_dp={slices} cuts the stages after the streamed ones, but all {len(grids)} "
            "stream; leave one of the two out, or use more stages"
        )
    for stage, (stream, grid) in enumerate(zip(streams, grids, strict=False)):
        shown = Grid(tiles=stream)
        if not 1 <= len(stream) <= 3 or min(stream) < 1:
            yield (
                f"stage {stage} streams {shown}; give columns, rows and columns, or depth, rows "
                "and columns, at least 1 block along each"
            )
        if grid.size > 1:
            yield (
                f"stage {stage} streams {shown} blocks on one rank, but is cut over {grid.size} "
                f"({grid}); leave one of the two out, or give more blocks instead of more ranks"
            )
    yield from _keep_problems(len(streams), keep)


def _keep_problems(streamed: int, keep: Keep) -> Iterable[str]:
    """A streamed stage keeps its inputs, whatever is said; so nothing else may be said."""
    each = for_each(keep)
    for stage in range(streamed):
        kept = (keep[stage] if stage < len(keep) else "all") if each else keep
        if kept != "auto" and kept not in STREAMED:
            yield (
                f"stage {stage} streams, so it keeps its inputs and nothing else, but keep says "
                f"{kept!r}; say 'inputs' for it, and what you like for each of the others"
            )
