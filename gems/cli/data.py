"""Options of the data, for `gems train` and `gems eval`, and the source they describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems.cli.model_options import classes, image_shape, model_options
from gems.cli.options import changed, choice, count, path, real, string
from gems.errors import GemsError

if TYPE_CHECKING:
    from gems.data.augment import Augment
    from gems.data.loader import Loader
    from gems.data.source import Source

# The published scripts know the first three by number.
APPS = {"1": "medical", "2": "cifar", "3": "synthetic"}
APP_NAMES = ("medical", "cifar", "synthetic", "folders", "volumes", "pictures", "cosmology", "oct")
DATA = {
    "--app": choice(
        APP_NAMES,
        "pictures",
        "kind of data. medical (1): tiles of whole-slide images, or pictures, a folder per class; "
        "cifar (2): CIFAR-10; synthetic (3): noise of any size; folders: pictures, a folder per "
        "class; volumes: 3-D, HDF5 or Zarr; pictures (default): crops of the pictures of "
        "scikit-image, each a class; cosmology: generated cubes, four numbers of each to regress; "
        "oct: generated scans of a retina, its layers to segment",
        type=lambda text: APPS.get(text, text),
    ),
    "--datapath": path(
        "slides, files or folder (medical has a sample slide: immunohistochemistry, 512 x 512, "
        "positive or negative)",
        "PATH",
    ),
    "--labels": string(
        None,
        "medical: a CSV file slide,label or slide,x,y,label, or the word folders: a folder per "
        "class (default, if there are two or more and no file beside them); volumes: an array's "
        "name or a CSV file (default labels)",
        "WHAT",
    ),
    "--masks": string(
        None,
        "segment instead of classify. medical: a folder of class pictures named like the slides; "
        "volumes: an array's name",
        "WHAT",
    ),
    "--targets": string(
        None, "volumes: regress the numbers of this array or attribute, some per sample", "NAME"
    ),
    "--class-names": string(
        None,
        "classes, or numbers to regress, in order (default: sorted labels; needed with --masks)",
        "A,B,...",
    ),
    "--mpp": real(None, "medical: microns per pixel of a tile", "UM"),
    "--magnification": real(None, "medical: power of the objective, e.g. 20"),
    "--level": count(None, "medical: level of the slide's pyramid (default 0, the finest)"),
    "--stride": count(
        None, "medical: distance between tiles (default: --image-size)", metavar="PX"
    ),
    "--tissue": real(
        0.5, "medical: least share of tissue in a tile (default 0.5; 0 takes all tiles)", "SHARE"
    ),
    "--bad-slides": choice(
        ("skip", "stop"),
        "skip",
        "medical: skip unreadable slides with a warning (default), or stop with an error",
    ),
    "--samples": count(1024, "of generated data and pictures: number of samples (default 1024)"),
    "--task": choice(
        ("classify", "segment"),
        "classify",
        "synthetic, and the sample slide: labels (default) or masks",
    ),
    "--num-workers": count(0, "threads per rank that read ahead (default 0: read when needed)"),
    "--held-out": real(
        0.25,
        "share of the samples kept for evaluation (default 0.25); CIFAR-10 has its own test files",
        "SHARE",
    ),
}
# Options that only some kinds of data use.
APP_OPTIONS: dict[str, tuple[str, ...]] = {
    "--datapath": ("medical", "cifar", "folders", "volumes"),
    "--labels": ("medical", "volumes"),
    "--masks": ("medical", "volumes"),
    "--class-names": ("medical", "folders", "volumes"),
    **dict.fromkeys(("--mpp", "--magnification", "--level", "--stride"), ("medical",)),
    **dict.fromkeys(("--tissue", "--bad-slides"), ("medical",)),
    "--targets": ("volumes",),
    "--samples": ("synthetic", "pictures", "cosmology", "oct"),
    "--task": ("synthetic", "medical"),
    "--held-out": tuple(name for name in APP_NAMES if name != "cifar"),
}


def source_from(given: argparse.Namespace) -> Source:
    """All samples of the data."""
    try:
        return SOURCES[given.app](given)
    except ValueError as error:
        if isinstance(error, GemsError):
            raise
        raise GemsError(f"--app {given.app}: {error}") from error


def divided(given: argparse.Namespace) -> tuple[Source, Source]:
    """Samples to train on, and samples to evaluate on."""
    if given.app == "cifar":
        from gems.data.cifar import Cifar10

        return source_from(given), Cifar10(_path(given), train=False, image_size=given.image_size)
    return halves(given, source_from(given))


def halves(given: argparse.Namespace, source: Source) -> tuple[Source, Source]:
    """The samples to train on, and those held out."""
    from gems.data.source import split

    try:
        return split(source, given.held_out, given.seed)
    except ValueError as error:
        raise GemsError(f"--held-out {given.held_out}: {error}") from error


def loader(
    given: argparse.Namespace,
    source: Source,
    batch_size: int,
    *,
    shuffle: bool = False,
    augment: Augment | None = None,
) -> Loader:
    from gems.data.loader import Loader

    return Loader(
        source,
        batch_size,
        seed=given.seed,
        shuffle=shuffle,
        augment=augment,
        workers=given.num_workers,
    )


def _path(given: argparse.Namespace) -> Path:
    if given.datapath is None:
        raise GemsError(f"--app {given.app} reads files; give their place by --datapath")
    return given.datapath


def _names(given: argparse.Namespace) -> tuple[str, ...] | None:
    return tuple(given.class_names.split(",")) if given.class_names else None


def _medical(given: argparse.Namespace) -> Any:
    from gems.data.slides import Slides

    if given.datapath is None:
        _take_sample(given)
    elif given.labels is None and given.masks is None and (kind := _class_folders(given)):
        if kind == "pictures":
            given.app = "folders"
            return _folders(given)
        given.labels = "folders"
    return Slides(
        _path(given),
        given.image_size,
        stride=given.stride,
        mpp=given.mpp,
        magnification=given.magnification,
        level=given.level,
        labels=given.labels,
        masks=given.masks,
        names=_names(given),
        tissue=given.tissue,
        bad=given.bad_slides,
    )


def _class_folders(given: argparse.Namespace) -> str:
    """What folders named like classes hold, "pictures" or "slides"; "" if they are no classes.

    Samples of the published scripts are whole pictures, in a folder per class. They are tiled, as
    slides are, if an option of tiles is given. Folders may also be patients: more than the network
    has classes.
    """
    from gems.data.folders import ENDINGS
    from gems.data.rasters.opening import TIFFS, is_slide

    inside = [p for p in given.datapath.glob("**/*") if p.is_file() and is_slide(p)]
    parts = {p.relative_to(given.datapath).parts for p in inside}
    names = {each[0] for each in parts}
    most = len(names) if given.num_classes is None else given.num_classes
    if any(len(each) != 2 for each in parts) or not 2 <= len(names) <= most:
        return ""
    tiled = {"--mpp", "--magnification", "--level", "--stride", "--tissue"}
    plain = {p.suffix.lower() for p in inside} <= ENDINGS - TIFFS
    return "pictures" if plain and not tiled & set(changed(given, DATA)) else "slides"


def _take_sample(given: argparse.Namespace) -> None:
    """A slide of real tissue that comes with a dependency, its tiles labelled by their stain."""
    from gems.data.sample import sample_slides

    sample = sample_slides(given.out / "sample", given.image_size)
    given.datapath = sample.slide
    if given.masks or given.task == "segment":
        given.masks, given.class_names, given.tissue = sample.masks, ",".join(sample.names), 0.0
    else:
        given.labels = given.labels or sample.labels


def _cifar(given: argparse.Namespace) -> Any:
    from gems.data.cifar import Cifar10

    return Cifar10(_path(given), image_size=given.image_size)


def _folders(given: argparse.Namespace) -> Any:
    from gems.data.folders import Folders

    return Folders(_path(given), given.image_size, names=_names(given))


def _volumes(given: argparse.Namespace) -> Any:
    from gems.data.volumes import Volumes

    labels = given.labels or (None if given.masks or given.targets else "labels")
    return Volumes(
        _path(given), labels=labels, masks=given.masks, targets=given.targets, names=_names(given)
    )


def _synthetic(given: argparse.Namespace) -> Any:
    from gems.data.synthetic import Synthetic

    channels, *sides = image_shape(given)
    return Synthetic(tuple(sides), classes(given), channels, given.samples, given.task, given.seed)


def _cosmology(given: argparse.Namespace) -> Any:
    from gems.data.cosmology import Cosmology

    channels = model_options(given).get("in_channels", 4)
    return Cosmology(given.image_size, channels, given.samples, given.seed)


def _oct(given: argparse.Namespace) -> Any:
    from gems.data.oct import NAMES, Oct

    channels = model_options(given).get("in_channels", 1)
    count = len(NAMES) if given.num_classes is None else given.num_classes
    return Oct(given.image_size, count, channels, given.samples, given.seed)


def _pictures(given: argparse.Namespace) -> Any:
    from gems.data.pictures import Pictures

    return Pictures(given.image_size, classes(given), given.samples, given.seed)


SOURCES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "medical": _medical,
    "cifar": _cifar,
    "synthetic": _synthetic,
    "folders": _folders,
    "volumes": _volumes,
    "pictures": _pictures,
    "cosmology": _cosmology,
    "oct": _oct,
}
