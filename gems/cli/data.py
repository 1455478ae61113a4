"""Which data: options that `gems train` and `gems eval` share, and the source they mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems.cli.options import classes, image_shape
from gems.errors import GemsError

if TYPE_CHECKING:
    from gems.data.augment import Augment
    from gems.data.loader import Loader
    from gems.data.source import Source

# The published scripts know the first three by number.
APPS = {"1": "medical", "2": "cifar", "3": "synthetic"}
TASKS = ("classify", "segment")
# Options that only some kinds of data have a use for.
SLIDES = ("medical",)
APP_OPTIONS: dict[str, tuple[str, ...]] = {
    "--datapath": ("medical", "cifar", "folders", "volumes"),
    "--labels": ("medical", "volumes"),
    "--masks": ("medical", "volumes"),
    "--class-names": ("medical", "folders", "volumes"),
    **dict.fromkeys(("--mpp", "--magnification", "--level", "--stride"), SLIDES),
    **dict.fromkeys(("--tissue", "--bad-slides"), SLIDES),
    "--samples": ("synthetic", "pictures"),
    "--task": ("synthetic", "medical"),
    "--held-out": ("medical", "synthetic", "folders", "volumes", "pictures"),
}


def app(text: str) -> str:
    return APPS.get(text, text)


def add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the data")
    put = group.add_argument
    put(
        "--app",
        type=app,
        choices=tuple(SOURCES),
        default="pictures",
        help="medical (1): tiles of whole-slide images; cifar (2): CIFAR-10; synthetic (3): noise "
        "of any size; folders: pictures, a folder per class; volumes: 3-D, HDF5 or Zarr; pictures "
        "(default): crops of real pictures that come with scikit-image, which one is it from?",
    )
    put(
        "--datapath",
        type=Path,
        metavar="PATH",
        help="slides, files or folders of --app (medical has a sample: immunohistochemistry, 512 x "
        "512, positive or negative)",
    )
    put(
        "--labels",
        metavar="WHAT",
        help="medical: a CSV file slide,label or slide,x,y,label, or the word folders: a folder "
        "per class; volumes: an array's name or a CSV file (default labels)",
    )
    put(
        "--masks",
        metavar="WHAT",
        help="segment instead of classify: medical: a folder of class pictures named like the "
        "slides; volumes: an array's name",
    )
    put(
        "--class-names",
        metavar="A,B,...",
        help="the classes, in order (default: sorted from the labels; needed with --masks)",
    )
    put("--mpp", type=float, metavar="UM", help="medical: microns per pixel of a tile")
    put("--magnification", type=float, metavar="X", help="medical: power of the objective, e.g. 20")
    put(
        "--level", type=int, metavar="N", help="medical: level of the slide (default 0, the finest)"
    )
    put("--stride", type=int, metavar="PX", help="medical: between tiles (default: --image-size)")
    put(
        "--tissue",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="medical: how much of a tile must be tissue (default 0.5; 0 takes all tiles)",
    )
    put(
        "--bad-slides",
        choices=("skip", "stop"),
        default="skip",
        help="medical: slides that cannot be read are reported and left out (default), or an error",
    )
    put("--samples", type=int, default=1024, metavar="N", help="synthetic, pictures: how many")
    put(
        "--task",
        choices=TASKS,
        default="classify",
        help="synthetic, and the sample slide: labels (default) or masks",
    )
    put(
        "--num-workers",
        type=int,
        default=0,
        metavar="N",
        help="threads of each rank that read ahead (default 0: read when needed)",
    )
    put(
        "--held-out",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="samples that training does not see (default 0.25); CIFAR-10 has its own test files",
    )


def source_from(given: argparse.Namespace) -> Source:
    """All samples of what was asked for."""
    try:
        return SOURCES[given.app](given)
    except ValueError as error:
        if isinstance(error, GemsError):
            raise
        raise GemsError(f"--app {given.app}: {error}") from error


def divided(given: argparse.Namespace) -> tuple[Source, Source]:
    """What to train on, and what to judge by."""
    if given.app == "cifar":
        from gems.data.cifar import Cifar10

        return source_from(given), Cifar10(_path(given), train=False, image_size=given.image_size)
    return halves(given, source_from(given))


def halves(given: argparse.Namespace, source: Source) -> tuple[Source, Source]:
    """A source without what is held out, and that."""
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
        raise GemsError(f"--app {given.app} reads files: say where they are by --datapath")
    return given.datapath


def _names(given: argparse.Namespace) -> tuple[str, ...] | None:
    return tuple(given.class_names.split(",")) if given.class_names else None


def _medical(given: argparse.Namespace) -> Any:
    from gems.data.slides import Slides

    if given.datapath is None:
        _take_sample(given)
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

    labels = given.labels or (None if given.masks else "labels")
    return Volumes(_path(given), labels=labels, masks=given.masks, names=_names(given))


def _synthetic(given: argparse.Namespace) -> Any:
    from gems.data.synthetic import Synthetic

    channels, *sides = image_shape(given)
    return Synthetic(tuple(sides), classes(given), channels, given.samples, given.task, given.seed)


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
}
