"""Save a trainer and go on from there, bit for bit, or under another plan.

A save takes a snapshot, makes a temporary folder, has each rank write its tensors there, writes
state.json and manifest.json, and renames the folder. Until then the checkpoint does not exist, and
what existed before is as it was.

A load reads and validates all that it needs on all ranks before it changes anything of a trainer.

All ranks must see the same folder: on a cluster, one of a shared file system.

Measured 2026-11-16 on two busy cores, one rank, a local disk: ResNet-110-v2 with AdamW (1,658
tensors, 43 MB) takes 0.9 s of CPU time to save and 0.9 s to load, half a millisecond per tensor in
torch.save and torch.load, and 1.8 s by the wall clock each. Ranks share the work.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from gems.distributed.agree import on_all_ranks
from gems.errors import CheckpointError, short
from gems.files import to_json
from gems.torch.checkpoint import manifest as manifests
from gems.torch.checkpoint.atomic_folder import AtomicFolder, foreign, sync, write_synced
from gems.torch.checkpoint.dcp_files import read, write
from gems.torch.checkpoint.json_values import decode, references
from gems.torch.checkpoint.manifest import (
    FORMAT,
    STATE,
    WHAT,
    File,
    Manifest,
    TensorEntry,
    measured,
    number,
    remove_old,
)
from gems.torch.checkpoint.mismatch import Mismatch, merged, mismatch
from gems.torch.checkpoint.restore import load_plan, own_random, restore, restore_stage
from gems.torch.checkpoint.snapshot import take
from gems.torch.checkpoint.training_state import TrainingState
from gems.torch.checkpoint.validate import (
    validate_options,
    validate_random,
    validate_state,
    validate_training,
)
from gems.version import __version__

log = logging.getLogger(__name__)
INDEX = ".metadata"  # DCP's own


def save(trainer: TrainingState, path: str | Path, extra: Any = None, keep: int = 0) -> Path:
    """Write a checkpoint; all ranks call it. See Trainer.save."""
    target, transport = Path(path).absolute(), trainer.transport
    doing = f"writing the checkpoint {target}"
    draft: AtomicFolder | None = None

    def begun() -> tuple[str, str]:
        nonlocal draft
        _check(target, keep)
        if transport.rank == 0:
            draft = AtomicFolder(target)
        return str(target), str(draft.path) if draft else ""

    def seen() -> None:
        if any(path != str(target) for path, _ in folders):
            raise CheckpointError(
                f"ranks were given different checkpoints: "
                f"{sorted({path for path, _ in folders})}; give all of them the same path"
            )
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {transport.rank} does not see {folder}, which rank 0 made; save into a "
                "folder of a file system that all ranks share"
            )

    try:
        taken = take(trainer, extra)
        folders = on_all_ranks(transport, doing, begun)
        folder = Path(folders[0][1])
        on_all_ranks(transport, doing, seen)
        present = taken.present(trainer)
        tensors = write(folder, taken.tensors, taken.aliases, transport, doing, present)
        mine = {entry.file for entry in tensors.values() if _wrote(entry, transport.rank)}
        sums = on_all_ranks(
            transport, doing, lambda: {n: measured(folder / n) for n in sorted(mine)}
        )
        files = {name: file for found in sums for name, file in found.items()}

        def finished() -> None:
            if draft is not None:
                _finish(draft, trainer, taken.plain, tensors, files)
                if keep:
                    remove_old(target, keep)

        on_all_ranks(transport, doing, finished)
    except BaseException:
        if draft is not None:
            draft.discard()
        raise
    log.info("saved step %s as %s", trainer.steps, target)
    return target


def _check(target: Path, keep: int) -> None:
    if keep < 0:
        raise CheckpointError(f"keep is {keep}; give how many to keep, or 0 for all")
    if keep and number(target.name) < 0:
        raise CheckpointError(
            f"keep={keep} tells which of the numbered ones to keep, and {target.name!r} has no "
            "number; name it like step-100"
        )
    if ".tmp-" in target.name:
        raise CheckpointError(f"{target.name!r} is a name of unfinished checkpoints; take another")
    if target.exists() and not (target / manifests.NAME).is_file():
        raise CheckpointError(
            f"{target} exists and is not a checkpoint, so it is not replaced; take another name"
        )
    if target.exists() and (strange := foreign(target)):
        raise CheckpointError(
            f"{target} holds {short(strange, 200)}, which GEMS did not write, so it is not "
            "replaced; move that elsewhere, or take another name"
        )


def _wrote(entry: TensorEntry, rank: int) -> bool:
    """DCP names files after their writers."""
    return entry.file.startswith(f"__{rank}_")


def _finish(
    draft: AtomicFolder,
    trainer: TrainingState,
    plain: Mapping[str, Any],
    tensors: dict[str, TensorEntry],
    files: dict[str, File],
) -> None:
    """On rank 0: write state.json and the manifest, and publish the folder."""
    write_synced(draft.path / STATE, (json.dumps(plain) + "\n").encode())
    files = files | {name: measured(draft.path / name) for name in (STATE, INDEX)}
    whole = Manifest(
        WHAT, FORMAT, __version__, trainer.steps, json.loads(to_json(trainer.plan)), tensors, files
    )
    sync(draft.path)
    write_synced(draft.path / manifests.NAME, manifests.text(whole).encode())
    draft.publish()


def load(trainer: TrainingState, path: str | Path, strict: bool = True) -> Any:
    """Go on from a checkpoint; all ranks call it. See Trainer.load."""
    path, transport = Path(path).absolute(), trainer.transport
    doing = f"loading the checkpoint {path}"

    def verified() -> None:
        nonlocal manifest
        manifest = manifests.read(path)
        names = sorted(manifest.files)
        manifests.verify(path, manifest, names[transport.rank :: transport.world])

    def compared() -> Mismatch:
        nonlocal plain
        plain = state_in(path, manifest.tensors)
        found = mismatch(trainer, plain, manifest.tensors)
        if trainer.optimizers and not found.training:
            validate_training(trainer, plain, manifest.tensors)
        return found

    def fetched() -> None:
        nonlocal plan, tensors
        training = bool(trainer.optimizers) and not found.training
        plan = load_plan(trainer, plain, manifest.tensors, training=training)
        tensors = read(path, manifest, sorted(plan.keys))
        if training:
            validate_options(plain, tensors)
            validate_random(decode(own_random(trainer, plain), tensors), trainer.device)

    def restored() -> None:
        nonlocal extra
        extra = restore(trainer, plain, plan, tensors)

    def restored_offloaded() -> None:
        for stage, keys in plan.by_stage.items():
            restore_stage(trainer, plain, plan, stage, read(path, manifest, sorted(keys)))

    manifest = plain = plan = tensors = extra = cast(Any, None)
    on_all_ranks(transport, doing, verified)
    found = merged(on_all_ranks(transport, doing, compared))
    if strict:
        found.reject()
    for why in (*found.weights, *found.training):
        log.warning("not taken from %s: %s", path, why)
    on_all_ranks(transport, doing, fetched)
    # All was validated, so what fails now is a bug, and leaves the trainer half loaded.
    half = f"{doing}, of which this trainer has a part now (make a new one),"
    on_all_ranks(transport, half, restored)
    tensors.clear()
    on_all_ranks(transport, half, restored_offloaded)
    log.info("loaded step %s from %s", trainer.steps, path)
    return extra


def state_in(path: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """The validated contents of state.json."""
    plain = manifests.read_json(path / STATE)
    validate_state(plain, tensors)
    return plain


def extra_in(path: Path) -> Any:
    """What the user saved besides."""
    manifest = manifests.read(path)
    plain = state_in(path, manifest.tensors)
    return decode(plain["extra"], read(path, manifest, set(references(plain["extra"]))))


def weights_in(path: Path) -> dict[str, Any]:
    """The plain model's state dict out of a checkpoint, verified, in host memory."""
    manifest = manifests.read(path)
    manifests.verify(path, manifest)
    try:
        return _weights_in(path, manifest, state_in(path, manifest.tensors))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint {path} is not what GEMS writes ({type(error).__name__}); "
            f"{manifests.REMEDY}"
        ) from error


def _weights_in(path: Path, manifest: Manifest, plain: Mapping[str, Any]) -> dict[str, Any]:
    keys = [f"model.{label}" for label in manifest.section("model")]
    tensors = read(path, manifest, {*keys, *references(plain["modules"])})
    state = {key.removeprefix("model."): tensors[key] for key in keys}
    return state | {label: decode(x, tensors) for label, x in plain["modules"].items()}
