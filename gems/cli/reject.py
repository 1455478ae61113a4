"""Invalid or unused options: all are found before anything starts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from gems.cli.data import APP_OPTIONS, DATA
from gems.cli.keras_models import on_tensorflow
from gems.cli.model_options import known_options
from gems.cli.options import changed
from gems.cli.plan_options import PLAN
from gems.errors import GemsError, PlanError, problems

LEAST = {
    "accumulate": 1, "auto": 0, "batch_size": 1, "decay_epochs": 1, "image_size": 1,
    "keep_checkpoints": 0, "num_classes": 1, "num_epochs": 1, "num_workers": 0, "parts": 1,
    "samples": 1, "save_every": 0, "seed": 0, "steps": 0, "times": 0, "warm_up": 0,
}  # fmt: skip
WITH_AUTO = ("--parts",)  # which splits --batch-size into micro-batches


def reject(given: argparse.Namespace) -> None:
    """Raise one error with all that is wrong with the options of `gems train` or `gems eval`."""
    checks = (_small, _model, _of_the_app, _with_auto, _rates, _folder, _shown)
    if found := [problem for check in checks for problem in check(given)]:
        raise GemsError(
            found[0] if len(found) == 1 else problems("these options are wrong:", found)
        )
    if on_tensorflow(given):  # see keras_models
        return
    from gems.torch.device_choice import usable

    device = usable(given.device, given.backend)
    if given.limit_memory and (device == "cpu" or given.memory is None):
        raise GemsError(
            "--limit-memory limits the allocator of a GPU to --memory; give --memory on a GPU, or "
            "leave it out"
        )


@contextmanager
def as_gems_error() -> Iterator[None]:
    """Errors of the library about bad values, as errors of the command line."""
    try:
        yield
    except GemsError:
        raise
    except ValueError as error:
        raise GemsError(str(error)) from error


def _small(given: argparse.Namespace) -> Iterator[str]:
    for name, least in LEAST.items():
        value = getattr(given, name, None)
        if value is not None and value < least:
            yield f"--{name.replace('_', '-')} is {value}; give {least} or more"
    clip = getattr(given, "clip", None)
    if clip is not None and not clip > 0:
        yield f"--clip is {clip}; give a norm above 0, or leave it out"
    timeout = getattr(given, "timeout", None)
    if timeout is not None and not timeout > 0:
        yield f"--timeout is {timeout}; give seconds above 0, or leave it out"


def _model(given: argparse.Namespace) -> Iterator[str]:
    if not {":", "/"} & set(given.model):  # those of libraries are looked up where they are built
        try:
            known_options(given)
        except PlanError as error:
            yield str(error)


def _of_the_app(given: argparse.Namespace) -> Iterator[str]:
    for flag in changed(given, DATA):
        apps = APP_OPTIONS.get(flag)
        if apps is not None and given.app not in apps:
            yield f"{flag} is for --app {' or '.join(apps)}, not {given.app}; leave it out"


def _with_auto(given: argparse.Namespace) -> Iterator[str]:
    if given.auto and (extra := [f for f in changed(given, PLAN) if f not in WITH_AUTO]):
        yield f"--auto {given.auto} lets the planner choose; leave out {', '.join(extra)}"


def _rates(given: argparse.Namespace) -> Iterator[str]:
    cosine = getattr(given, "learning_rate_schedule", "step") == "cosine"
    if cosine and given.learning_rate_decay != 1.0:
        yield (
            f"--learning-rate-decay {given.learning_rate_decay:g} belongs to "
            "--learning-rate-schedule step; leave out one of them"
        )


def _folder(given: argparse.Namespace) -> Iterator[str]:
    if getattr(given, "resume", False) and given.overwrite:
        yield "--resume continues and --overwrite starts over; give one of them"
    if not getattr(given, "save", True) and given.save_every:
        yield f"--save-every {given.save_every} and --no-save: give one of them"
    if getattr(given, "export", None) is not None and not on_tensorflow(given):
        from gems.torch.checkpoint.weight_files import FORMATS

        if given.export.suffix not in FORMATS:
            yield f"--export {given.export}: the ending must be one of {', '.join(FORMATS)}"


def _shown(given: argparse.Namespace) -> Iterator[str]:
    if getattr(given, "shown_class", None) and not (given.heat_map and given.app == "medical"):
        yield f"--shown-class {given.shown_class} is for heat maps, which --app medical has"
