"""What ranks tell each other: it arrives as it was, and nothing that arrives can run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gems.distributed.agree import on_all_ranks
from gems.errors import CheckpointError, GemsError, PeerError, PlanError
from gems.plans.plan import Plan
from gems.predict.timeline import Event, Memory, Timeline
from gems.torch.checkpoint import dcp_files as storage  # registers DCP's classes
from gems.torch.checkpoint.json_values import same as same_plain
from gems.torch.state.sharded_optimizer import ShardSpec
from gems.torch.trainer import Trainer
from gems.transport import encoding
from gems.transport.encoding import Malformed, pack, unpack
from gems.transport.protocol import Transport
from gems.transport.threads import run
from gems.transport.torch_distributed import gathered
from tests.exact import batches
from tests.worlds import spawn

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64),
    *(torch.int32, torch.uint8, torch.bool),
]


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    found = torch.randn(shape, generator=seed).mul(3).to(draw(st.sampled_from(DTYPES)))
    return found.transpose(0, -1) if found.dim() > 1 else found


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)
KEYS = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.booleans()))
VALUES = st.recursive(
    st.one_of(PLAIN, tensors(), st.sampled_from([torch.float32, torch.strided, torch.Size((2,))])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.sampled_from(["$tensor", "$data", "$x"]), inner, max_size=2),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        equal = torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        return a.dtype == b.dtype and a.shape == b.shape and equal
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(x, b[key]) for key, x in a.items())
    return same_plain(a, b)


@given(VALUES)
def test_what_is_told_arrives_as_it_was(value: Any) -> None:
    assert same(unpack(pack(value)), value)


@given(VALUES, st.integers(0, 999))
def test_damaged_bytes_are_rejected_or_are_other_values_but_nothing_else(
    value: Any, seed: int
) -> None:
    draw, data = random.Random(seed), bytearray(pack(value))
    for _ in range(draw.randint(1, 4)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    with contextlib.suppress(Malformed, GemsError):
        unpack(bytes(data[: draw.randint(1, len(data))]))


def test_objects_of_registered_classes_are_made_again() -> None:
    line = Timeline(
        (Event(0, "0F0", 0.0, 1.5),), memory=(((0.5, Memory(1, 2)),),), max_in_flight=(1,)
    )
    value = {"lines": [line], 3: ShardSpec(torch.bfloat16), "count": Counter("aab")}
    assert unpack(pack(value)) == value
    assert unpack(pack(storage.WriteItemType.SHARD)) is storage.WriteItemType.SHARD
    array = np.arange(6).reshape(2, 3).T
    assert np.array_equal(unpack(pack(array)), array)
    assert unpack(pack(np.float32(0.5))) == 0.5


def framed(text: str, more: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + more


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04K\x01.",
        pickle.dumps(1),
        framed("{}")[:9],
        (1 << 60).to_bytes(8, "little") + b"1",
        framed("[" * 100_000),
        framed('{"$data":["os.system","true"]}'),
        framed('{"$data":["gems.torch.trainer.Trainer"]}'),
        framed('{"$data":["gems.predict.timeline.Event",1]}'),
        framed('{"$enum":["gems.predict.timeline.Event","x"]}'),
        framed('{"$torch":"load"}'),
        framed('{"$never":1}'),
        framed('{"$tensor":["load",[1],0]}'),
        framed('{"$tensor":["float32",[1],0]}', b"123"),
        framed('{"$tensor":["float32",[99999999999,99999999999],0]}', b"1234"),
        framed('{"$tensor":["float32",[-1],4]}', b"12345678"),
        framed('{"$tensor":["float32",[1],-4]}', b"12345678"),
        framed('{"$bytes":[3,9]}', b"1234"),
        framed('{"$pairs":[[[],1]]}'),
    ],
)
def test_forged_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(Malformed):
        unpack(data)


@pytest.mark.parametrize("tag", ["tensor", "bytes"])
def test_a_few_bytes_do_not_become_many_values(tag: str) -> None:
    """A thousand tensors of the same megabyte once took a gigabyte."""
    one = {"$tensor": ["uint8", [1 << 20], 0]} if tag == "tensor" else {"$bytes": [0, 1 << 20]}
    text = json.dumps([one] * 1000).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(1 << 20)
    with pytest.raises(Malformed, match="several values of the same bytes"):
        unpack(data)


class Trap:
    """An object whose pickle runs a command when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_what_cannot_be_told_raises_on_all_ranks_the_same() -> None:
    """None of them waits for the one that had it."""

    def work(transport: Transport) -> str:
        told = {"x": [1, Trap(Path("x"))]} if transport.rank == 1 else 0
        with pytest.raises(GemsError) as caught:
            transport.all_gather_object(told)
        assert transport.all_gather_object(transport.rank) == [0, 1, 2]  # and all may go on
        return str(caught.value)

    (message,) = set(run(3, work))
    assert "rank 1: it['x'][1] is a tests.test_encoding.Trap" in message
    assert "make it of numbers, texts, lists" in message


def test_what_is_too_large_raises_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MOST", 1000)

    def work(transport: Transport) -> None:
        with pytest.raises(GemsError, match=r"rank 1: .* bytes; 1000 are the most"):
            transport.all_gather_object("x" * 2000 if transport.rank else "")

    run(2, work)


@pytest.mark.parametrize("kind", [PlanError, CheckpointError, GemsError])
def test_an_error_is_the_same_on_all_ranks(kind: type[GemsError]) -> None:
    def work(transport: Transport) -> None:
        def fail() -> None:
            if transport.rank == 1:
                raise kind("too bad")

        with pytest.raises(GemsError, match="too bad") as caught:
            on_all_ranks(transport, "trying", fail)
        assert type(caught.value) is kind

    run(2, work)


def test_an_error_of_a_class_that_others_may_not_know_arrives_as_its_base() -> None:
    class Special(PlanError):
        pass

    def work(transport: Transport) -> None:
        def fail() -> None:
            if transport.rank == 1:
                raise Special("too bad")

        with pytest.raises(PlanError) as caught:
            on_all_ranks(transport, "trying", fail)
        assert type(caught.value) is PlanError

    run(2, work)


# --- over real processes --------------------------------------------------------------------------


def attacked(transport: Any, folder: str) -> Any:
    """Rank 1 is not a rank of ours: it sends a pickle as torch's all_gather_object would."""
    trap = Path(folder) / f"ran-on-{transport.rank}"
    if transport.rank == 1:
        gathered(pickle.dumps(Trap(trap)), transport.world, transport.communicators.host)
        return None
    try:
        transport.all_gather_object("hello")
    except PeerError as error:
        return str(error), trap.exists()
    raise AssertionError("nothing was raised")


def test_a_pickle_that_arrives_is_not_opened(tmp_path: Path) -> None:
    said, ran = spawn(2, attacked, str(tmp_path))[0]
    assert "what rank 1 sent is not what a rank" in said
    assert not ran
    assert not list(tmp_path.iterdir())


class Counted(nn.Module):
    """Has an extra state, which one rank tells the others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())

    def get_extra_state(self) -> Any:
        return {"seen": (1, 2), "table": torch.arange(3)}

    def set_extra_state(self, state: Any) -> None:
        assert state["seen"] == (1, 2)


def life(transport: Transport, folder: str) -> Any:
    """Everything that makes ranks tell each other something, with no way to unpickle."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    kept = pickle.loads, pickle.load, pickle.Unpickler
    pickle.loads = pickle.load = never
    pickle.Unpickler = pickle._Unpickler = never  # type: ignore[assignment, attr-defined, misc]
    dist.distributed_c10d._tensor_to_object = never
    dist.distributed_c10d._object_to_tensor = never
    try:
        torch.manual_seed(0)
        plan = Plan(stages=2, micro_batches=2, data=2, zero=2)
        trainer = Trainer(
            Counted().double(),
            nn.functional.cross_entropy,
            lambda parameters: torch.optim.AdamW(parameters, 0.01),
            torch.empty(2, 6, dtype=torch.float64),
            plan,
            transport=transport,
            costs="measure",
        )
        for images, labels in batches((8, 6), 5, 2, torch.float64):
            trainer.step(images, labels)
        trainer.forecast()
        trainer.save(Path(folder) / "step-2", extra={"epoch": 1})
        assert trainer.load(Path(folder) / "step-2") == {"epoch": 1}
        state = trainer.state_dict()
        return len(trainer.timeline().events) > 8, state["_extra_state"]
    finally:
        pickle.loads, pickle.load, pickle.Unpickler = kept  # type: ignore[misc]


def test_training_saving_and_loading_unpickle_nothing(tmp_path: Path) -> None:
    for timeline, extra in spawn(4, life, str(tmp_path)):
        assert timeline
        assert extra["seen"] == (1, 2)
        assert torch.equal(extra["table"], torch.arange(3))


def test_the_package_has_no_call_that_unpickles() -> None:
    """`torch.load` only with weights_only, and CIFAR's files by a reader that makes arrays only."""
    package = Path(encoding.__file__).parent.parent
    words = [r"pickle\.load", r"Unpickler\(", "weights_only=False"]
    words += [r"(broadcast|scatter|send|recv)_object"]
    # A transport's all_gather_object is ours: it sends what encoding.py writes.
    ours = r"(?<!transport\.)(?<!self\.)(?<!to\.)(?<!def )"
    words += [rf"{ours}all_gather_object", r"(?<!all_)gather_object"]
    found = {
        (path.relative_to(package).as_posix(), match[0])
        for path in package.rglob("*.py")
        for word in words
        for match in re.finditer(word, path.read_text())
    }
    assert found <= {("data/cifar.py", "Unpickler(")}
    loads = [path for path in package.rglob("*.py") if "torch.load(" in path.read_text()]
    assert [path.name for path in loads] == ["weight_files.py"]
    assert 'torch.load(path, map_location="cpu", weights_only=True)' in loads[0].read_text()
