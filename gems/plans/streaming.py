"""Stages that run one patch of the image after the other: what a plan may ask of them.

It is spatial parallelism in time instead of over ranks. Each patch of a stage's output is computed
from the box of the input that it reads, and recomputed in backward, so that the stage saves only
its inputs and no more than one patch's activations are live. On a stage that is tiled, each rank
runs the patches of its tile.

Patches read halos around their own cells. They `recompute` these from their boxes; or they `carry`:
values are cut so that a patch reads earlier ones only, which hand it its halos.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gems.geometry.grid import Grid
from gems.plans.recompute import Recompute, is_per_stage

STREAM_HALOS = ("recompute", "carry")
STREAMED = ("never", "always", "auto")  # what a plan may ask of a stage that streams


def stream_problems(
    streams: Sequence[tuple[int, ...]], halo: str, grids: Sequence[Grid], recompute: Recompute,
    slices: int,
) -> Iterable[str]:  # fmt: skip
    """Of the patches that the first stages are to run one after the other."""
    if halo not in STREAM_HALOS:
        yield f"stream_halo {halo!r} is unknown; choose one of {', '.join(STREAM_HALOS)}"
    elif halo != "recompute" and not streams:
        yield (
            f"stream_halo={halo!r} is how patches get their halos, but no stage of this plan "
            "streams; give stream a grid, as in '4x4', or remove it"
        )
    if len(streams) > len(grids):
        yield (
            f"stream has {len(streams)} grids for {len(grids)} stages; give at most one per stage, "
            "or use more stages"
        )
    if slices > 1 and streams and len(streams) >= len(grids):
        yield (
            f"local_dp={slices} splits the stages after the streamed ones, but all {len(grids)} "
            "stream; leave one of the two out, or use more stages"
        )
    for stage, stream in enumerate(streams[: len(grids)]):
        shown = Grid(tiles=stream)
        if not 1 <= len(stream) <= 3 or min(stream) < 1:
            yield (
                f"stage {stage} streams {shown}; give columns, rows and columns, or depth, rows "
                "and columns, at least 1 patch along each"
            )
    for stage in range(len(streams)):
        policy: object = recompute
        if is_per_stage(recompute):
            policy = recompute[stage] if stage < len(recompute) else "never"
        if policy not in STREAMED:
            yield (
                f"stage {stage} streams, so it saves its inputs and recomputes the rest, but its "
                f"recompute is {policy!r}; give it 'always', and one entry to each other stage"
            )
