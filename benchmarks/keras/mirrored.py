"""tf.distribute on the work of copies.py: two logical devices of one process (MirroredStrategy), or
two processes (MultiWorkerMirroredStrategy), if STRATEGY is `workers`."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from benchmarks.keras.copies import compiled, fitted
from benchmarks.keras.ranks import Size, answer

LONGEST = 200  # seconds


def measure(size: Size) -> Any:
    workers = os.environ["STRATEGY"] == "workers"
    rank = int(os.environ["RANK"])
    signal.alarm(LONGEST)  # workers that do not find each other would wait for ever
    try:
        return _measured(size, workers, rank)
    except Exception as error:  # what it does not run is a row of the table
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        return {"rejected": text[:200]} if rank == 0 else None


def _measured(size: Size, workers: bool, rank: int) -> Any:
    if workers:
        hosts = [f"127.0.0.1:{port}" for port in os.environ["PORTS"].split(",")]
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": task})
    import tensorflow as tf

    if workers:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        (cpu,) = tf.config.list_physical_devices("CPU")
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = compiled(size)
    found = fitted(model, size)
    return found if rank == 0 else None


if __name__ == "__main__":
    answer(measure)
