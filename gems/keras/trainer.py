"""Train a Keras model under a plan: the loop over a session, with the calls of gems.Trainer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from gems.distributed.agree import on_all_ranks
from gems.distributed.step import Step
from gems.errors import CheckpointError, GemsError
from gems.files import parse_json, to_json
from gems.keras import checkpoint
from gems.keras.session import Session
from gems.keras.weight_files import named_variables
from gems.keras.whole_weights import Whole
from gems.plans.plan import Plan
from gems.predict.timeline import Timeline
from gems.schedule.action import Schedule

SUFFIXES = (".keras", ".weights.h5", ".safetensors")  # of files of a whole model


class Trainer:
    """A Keras model under a plan, on TensorFlow. Every rank makes one, with the same arguments, and
    all ranks make the same calls.

    loss, optimizer  as `compile` takes them; without an optimizer the model can only predict
    learning_rate    of the update with this number, from 0; if left out, the optimizer's own
    sample, plan     as gems.keras.Session takes them, and the other options
    """

    def __init__(
        self,
        model: Any,
        loss: Any = None,
        optimizer: Any = None,
        sample: Any = None,
        plan: Plan | str | Path = "auto",
        *,
        learning_rate: Callable[[int], float] | None = None,
        **options: Any,
    ) -> None:
        self.model, self.learning_rate = model, learning_rate
        if optimizer is not None:
            model.compile(optimizer, loss)
        self.session = Session(model, None, sample, plan, **options)
        self.transport, self.rank = self.session.transport, self.session.rank
        self.stepping: Any = optimizer
        if optimizer is not None:
            self.session.add_optimizer(optimizer)
        self.whole = Whole(self)

    def step(self, inputs: Any, targets: Any) -> Step:
        """An update with the whole batch, given to every rank."""
        if self.stepping is None:
            raise GemsError("this trainer has no optimizer; it can only predict")
        self.stepping.learning_rate = self.rate
        return self.session.step(inputs, targets)

    def flush(self) -> None:
        """Nothing is in flight between steps."""

    def predict(self, inputs: Any) -> Any:
        return self.session.predict(inputs)

    @property
    def rate(self) -> float:
        """The learning rate of the next update."""
        if self.learning_rate is None:
            return float(self.stepping.learning_rate)
        return self.learning_rate(self.steps)

    # --- what the session has -------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan, written out: stages by name."""
        return self.session.plan

    @property
    def schedule(self) -> Schedule:
        """All actions of all ranks."""
        return self.session.schedule

    @property
    def steps(self) -> int:
        """Updates so far."""
        return self.session.steps

    @property
    def peak(self) -> int:
        """Most live bytes of this rank in the last step or prediction."""
        return self.session.peak

    def timeline(self) -> Timeline:
        """The last step as all ranks measured it. All ranks must call it."""
        return self.session.timeline()

    # --- files ----------------------------------------------------------------------------------

    def save(self, path: str | Path, *, extra: Any = None, keep: int = 0) -> Path:
        """Write a checkpoint, a folder that may be loaded under any plan, by rank 0, whole or not
        at all. `extra` is the caller's own, as JSON; of those that are numbered like it, `keep` (0:
        all) stay."""
        path = Path(path)
        state = self.session.state_dict()
        random = [state[path] for path in self._sampleless()]
        about = {
            "step": self.steps, "plan": parse_json(to_json(self.plan)), "extra": extra,
            "random": checkpoint.plain(random),
        }  # fmt: skip
        own = keras.Model.save_weights.__get__(self.model)

        def written(new: str) -> None:
            checkpoint.fill(Path(new), about, own)
            if (path / checkpoint.NAME).is_file():  # of the same step
                shutil.rmtree(path)

        self.whole.write(path, written, overwrite=True)
        if self.rank == 0:
            checkpoint.remove_old(path, keep)
        return path

    def load(self, path: str | Path) -> Any:
        """Go on from a checkpoint, written under any plan; gives its `extra`."""
        path, found = Path(path), {}
        on_all_ranks(self.transport, f"reading {path}", lambda: found.update(checkpoint.read(path)))
        self.load_weights(path / checkpoint.WEIGHTS)
        values = checkpoint.arrays(found["random"])
        if len(values) != len(paths := self._sampleless()):
            raise CheckpointError(
                f"{path} has {len(values)} seeds and counters, and this model {len(paths)}; give "
                "the model that it was written of"
            )
        for name, value in zip(paths, values, strict=True):
            if (variable := self.session.weights.variables.get(name)) is not None:
                variable.assign(value)
        self.session.steps = found["step"]
        return found.get("extra")

    def _sampleless(self) -> list[str]:
        """Seeds and counters, in order: their names are of the process, not of the model."""
        weights = {id(v) for v in self.model.weights}
        groups, named = self.session.part.owned.replica_groups, named_variables(self.model)
        return [path for path, v in named.items() if id(v) not in weights and path in groups]

    def load_weights(self, path: str | Path) -> None:
        """Weights alone, or with an optimizer's state, from one of the SUFFIXES."""
        if not str(path).endswith(SUFFIXES):
            raise CheckpointError(f"{path}: the ending must be one of {', '.join(SUFFIXES)}")
        self.whole.read_weights(path, keras.Model.load_weights.__get__(self.model), {})

    def export(self, path: str | Path) -> Path:
        """Write the whole model by one of the SUFFIXES; rank 0 writes, all call it."""
        path = Path(path)
        if path.suffix == ".keras":
            own = keras.Model.save.__get__(self.model)
            self.whole.write(path, lambda new: own(new), overwrite=True)
        else:
            own = keras.Model.save_weights.__get__(self.model)
            self.whole.write_weights(path, own, True, {})
        return path

    def close(self) -> None:
        """Leave the other ranks."""
        self.session.close()
