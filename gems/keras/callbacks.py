"""Which callbacks run on which rank: those that only write run on rank 0, all others on all."""

from __future__ import annotations

from typing import Any

from keras import callbacks

from gems.errors import PlanError
from gems.transport.protocol import Transport

WRITERS = (callbacks.CSVLogger, callbacks.TensorBoard, callbacks.RemoteMonitor)


def of_rank(given: Any, transport: Transport) -> Any:
    """Callbacks as `fit` takes them, for one rank. Logs are the same on all ranks, so those that
    stop training, change the learning rate or save do the same on all; `save` writes on rank 0."""
    if isinstance(given, callbacks.CallbackList) or given is None:
        return given
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    if transport.world > 1:
        for each in listed:
            if isinstance(each, callbacks.BackupAndRestore):
                raise PlanError(
                    "BackupAndRestore reads and removes its folder on every rank by itself; use "
                    "ModelCheckpoint('last.weights.h5', save_weights_only=True), and load_weights "
                    "with initial_epoch to go on"
                )
            if isinstance(each, callbacks.TensorBoard) and (
                each.histogram_freq or each.write_images
            ):
                raise PlanError(
                    f"TensorBoard(histogram_freq={each.histogram_freq}, write_images="
                    f"{each.write_images}) would draw the weights that rank 0 holds, and others "
                    "have those of the other stages; leave both out"
                )
    return [each for each in listed if transport.rank == 0 or not isinstance(each, WRITERS)]
