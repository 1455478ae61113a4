"""Heat maps of slides: the class probabilities of their tiles."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems.cli.options import Options, string, switch
from gems.errors import GemsError

if TYPE_CHECKING:
    import torch

    from gems.data.source import Source


def heat_map_options(default: bool) -> Options:
    return {
        "--heat-map": switch(
            default,
            "medical: at the end, write PNG, GeoJSON and OME-TIFF of every slide "
            f"({'default' if default else 'default: not'})",
        ),
        "--shown-class": string(None, "class that the pictures show (default: the last)", "NAME"),
    }


def wanted(given: argparse.Namespace) -> bool:
    return given.app == "medical" and given.heat_map


def heat_maps(given: argparse.Namespace, source: Source, probabilities: torch.Tensor) -> list[Path]:
    """The pictures of all slides, GeoJSON and OME-TIFF beside them; printed as they are written."""
    from gems.data.heatmap import heat_map
    from gems.data.source import Subset

    names = list(source.names)
    names += [f"class {i}" for i in range(len(names), given.num_classes)]
    shown = _shown(given.shown_class, names)
    whole: Any = source.source if isinstance(source, Subset) else source
    indices = source.indices if isinstance(source, Subset) else range(len(source))
    places = [whole.place(int(i)) for i in indices]
    pictures = []
    for tiles in whole.tiles:
        rows = [row for row, (path, _, _) in enumerate(places) if path == tiles.path]
        if not rows:
            continue
        coords = [places[row][1:] for row in rows]
        scores = probabilities[rows].numpy()
        folder = _folder(given.out, tiles.path, whole.paths)
        maps = heat_map(folder, tiles.path, coords, tiles.covered, scores, names, shown)
        for path in (maps.png, maps.geojson, maps.ome):
            print(f"wrote {path}")
        pictures.append(maps.png)
    return pictures


def _folder(out: Path, slide: Path, slides: Sequence[Path]) -> Path:
    """Where the maps of a slide go; those of one name in several folders each to their own."""
    if sum(other.stem == slide.stem for other in slides) == 1:
        return out
    return out / slide.relative_to(os.path.commonpath([p.parent for p in slides]))


def _shown(name: str | None, names: list[str]) -> int | None:
    if name is None:
        return None
    if name not in names:
        raise GemsError(f"--shown-class {name} is none of {', '.join(names)}")
    return names.index(name)
