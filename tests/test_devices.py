"""Which device each rank gets. No GPU is needed: torch.cuda is asked in one module, and that is
replaced here by nodes of any kind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gems.cli.main import main
from gems.distributed.launchers import Place
from gems.errors import GemsError
from gems.torch import cuda_device, launch
from gems.torch.device_choice import Asked, Choice, decide
from gems.torch.launch import connect, device_of
from gems.transport.threads import World

Patch = pytest.MonkeyPatch


def node(
    host: str, ranks: int, gpus: int, device: str = "auto", backend: str | None = None
) -> list[Asked]:
    """Ranks that all see all GPUs of their node."""
    seen = tuple(f"{host}-{i}" for i in range(gpus))
    return [Asked(host, device, backend, seen)] * ranks


def cuda(*indices: int) -> Choice:
    return Choice("nccl", tuple(f"cuda:{i}" for i in indices))


def on_cpu(ranks: int) -> Choice:
    return Choice("gloo", ("cpu",) * ranks)


# --- decided for all ranks ------------------------------------------------------------------------


def test_each_rank_gets_a_gpu_of_its_own() -> None:
    assert decide([*node("a", 4, 4), *node("b", 4, 4)]) == cuda(0, 1, 2, 3, 0, 1, 2, 3)
    assert decide(node("a", 2, 8)) == cuda(0, 1)


def test_ranks_that_see_only_their_own_gpu_are_on_cuda_0() -> None:
    """Slurm with --gpus-per-task: local rank 3 has only cuda:0."""
    assert decide([Asked("a", "auto", None, (f"a-{i}",)) for i in range(4)]) == cuda(0, 0, 0, 0)


def test_a_rank_leaves_the_gpu_to_one_that_sees_no_other() -> None:
    few = [Asked("a", "auto", None, gpus) for gpus in (("x", "y"), ("x",), ("y", "x", "z"))]
    assert decide(few) == cuda(1, 0, 2)


def test_without_gpus_ranks_are_on_cpus_over_gloo() -> None:
    assert decide(node("a", 4, 0)) == on_cpu(4)
    assert decide(node("a", 2, 2, "cpu")) == on_cpu(2)
    assert decide(node("a", 2, 2, backend="gloo")) == on_cpu(2)


def test_more_ranks_than_gpus_run_on_cpus_and_the_numbers_are_told() -> None:
    """Story: NCCL was chosen with two ranks on one GPU, and it crashed or hung."""
    found = decide([*node("a", 2, 2), *node("gpu03", 4, 2)])
    assert (found.backend, set(found.devices)) == ("gloo", {"cpu"})
    assert "gpu03 has 4 ranks, which see 2 GPUs there" in found.warning
    assert "Start at most 2 ranks per node" in found.warning
    assert "CUDA_VISIBLE_DEVICES" in found.warning


@pytest.mark.parametrize(
    ("device", "backend"), [("cuda", None), ("cuda", "nccl"), ("auto", "nccl")]
)
def test_where_gpus_are_demanded_too_few_are_an_error(device: str, backend: str | None) -> None:
    with pytest.raises(GemsError, match=r"a has 4 ranks, which see 2 GPUs there.*Start at most 2"):
        decide(node("a", 4, 2, device, backend))


def test_over_gloo_ranks_may_share_a_gpu() -> None:
    found = decide([*node("a", 3, 2, "cuda", "gloo"), *node("b", 1, 2, "cuda", "gloo")])
    assert found == Choice("gloo", ("cuda:0", "cuda:1", "cuda:0", "cuda:0"))
    with pytest.raises(GemsError, match="rank 1 on b sees no GPU"):
        decide([*node("a", 1, 1, "cuda", "gloo"), *node("b", 1, 0, "cuda", "gloo")])


def test_a_gpu_that_is_asked_for_by_number_is_given() -> None:
    both = [*node("a", 1, 4, "cuda"), *node("a", 1, 4, "cuda:0")]
    assert decide(both) == cuda(1, 0)


def test_two_ranks_on_one_gpu_under_nccl_are_rejected() -> None:
    with pytest.raises(GemsError, match=r"ranks 0, 1 are on GPU a-1 of a\n(.|\n)*set_device"):
        decide(node("a", 2, 4, "cuda:1"))


@pytest.mark.parametrize(
    ("one", "other", "complaint"),
    [
        ({"device": "cpu"}, {"device": "cuda"}, "device cpu and rank 1 cuda"),
        ({"backend": "gloo"}, {"backend": "nccl"}, "backend gloo and rank 1 nccl"),
    ],
)
def test_ranks_that_were_given_different_things_are_told(
    one: dict[str, str], other: dict[str, str], complaint: str
) -> None:
    with pytest.raises(GemsError, match=f"{complaint}; give all ranks the same"):
        decide([*node("a", 1, 2, **one), *node("a", 1, 2, **other)])


# --- one process ----------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: Patch) -> Callable[[int], list[int]]:
    """Makes torch.cuda see so many GPUs; gives the list of those made current."""

    def see(count: int) -> list[int]:
        made_current: list[int] = []
        monkeypatch.setattr(cuda_device, "count", lambda: count)
        monkeypatch.setattr(cuda_device, "current", lambda: made_current[-1] if made_current else 0)
        monkeypatch.setattr(cuda_device, "use", made_current.append)
        monkeypatch.setattr(
            cuda_device, "properties", lambda i: SimpleNamespace(uuid=f"GPU-{i}", name="A100")
        )
        return made_current

    return see


def test_a_lone_process_is_on_its_gpu(gpus: Callable[[int], list[int]]) -> None:
    """Story: it ran on the CPU, though a GPU was there, and nothing told so."""
    made_current = gpus(2)
    assert connect()[1] == torch.device("cuda:0")
    assert connect(device="cuda:1")[1] == torch.device("cuda:1")
    assert connect(device="cuda")[1] == torch.device("cuda:1")  # the current one, by now
    assert connect(device="cpu")[1] == torch.device("cpu")
    assert made_current == [0, 1, 1]
    gpus(0)
    assert connect(device="auto")[1] == torch.device("cpu")


@pytest.mark.parametrize(
    ("seen", "device", "backend", "complaint"),
    [
        (2, "cpu", "nccl", "backend nccl moves tensors of GPUs, and device is cpu"),
        (0, None, "nccl", "backend nccl needs GPUs, and torch sees none"),
        (0, "cuda", None, "device is cuda, and torch sees no GPU here; use device cpu"),
        (2, "cuda:2", None, "this process sees 2 GPUs, cuda:0 to cuda:1"),
        (2, "mps", None, "device is 'mps'; give auto, cpu, cuda or cuda:N"),
        (2, "gpu", None, "device is 'gpu'; give auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_cannot_be_had_is_rejected(
    seen: int,
    device: str | None,
    backend: str | None,
    complaint: str,
    gpus: Callable[[int], list[int]],
) -> None:
    gpus(seen)
    with pytest.raises(GemsError, match=complaint):
        connect(backend, device=device)


def test_the_command_line_rejects_contradictions(
    gpus: Callable[[int], list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(2)
    for options in (["--device", "cpu", "--backend", "nccl"], ["--device", "cuda:5"]):
        assert main(["train", *options]) == 1
    assert "this process sees 2 GPUs" in capsys.readouterr().err
    assert main(["verify", "--device", "cpu", "--backend", "nccl"]) == 1
    assert "device is cpu; leave out one" in capsys.readouterr().err


def test_over_a_transport_that_is_given_the_cpu_is_the_default(
    gpus: Callable[[int], list[int]],
) -> None:
    gpus(2)
    given = World(1).rank(0)
    assert device_of(given, None) == torch.device("cpu")
    assert device_of(given, "cuda:1") == torch.device("cuda:1")


# --- ranks that meet ------------------------------------------------------------------------------


def test_ranks_tell_each_other_what_they_ask_for(
    gpus: Callable[[int], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    gpus(1)
    store = dist.HashStore()
    found: list[Any] = [None, None]

    def ask(rank: int) -> None:
        at = Place(rank, 2, "127.0.0.1", 1, "torchrun")
        found[rank] = launch._chosen(store, at, launch.asked(None, None))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(2)]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [("gloo", torch.device("cpu"))] * 2
    (warning,) = caplog.messages  # rank 0's
    assert "has 2 ranks, which see 1 GPUs there" in warning


CONFIGS = {"": "cuda:nccl", "older": "cpu:gloo,cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}


@pytest.mark.parametrize(
    ("config", "device", "backend", "wanted"),
    [
        ("", None, None, ("nccl", "cuda:1")),
        ("older", None, None, ("nccl", "cuda:1")),
        ("older", None, "gloo", ("gloo", "cpu")),
        ("", "cpu", None, ("gloo", "cpu")),
        ("gloo", None, None, ("gloo", "cpu")),
        ("gloo", "cuda:0", None, ("gloo", "cuda:0")),
        ("gloo", "cuda:0", "nccl", ("nccl", "cuda:0")),
    ],
)
def test_a_group_that_exists_is_used_on_its_device(
    config: str,
    device: str | None,
    backend: str | None,
    wanted: tuple[str, str],
    gpus: Callable[[int], list[int]],
    monkeypatch: Patch,
) -> None:
    """`init_process_group()` without a backend has NCCL where GPUs are, and was taken for gloo."""
    gpus(2).append(1)  # torch.cuda.set_device(1)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: CONFIGS[config])
    found = launch._of_group(launch.asked(device, backend))
    assert found == (wanted[0], torch.device(wanted[1]))


def test_two_ranks_of_a_group_that_exists_on_one_gpu_are_rejected(
    gpus: Callable[[int], list[int]], monkeypatch: Patch
) -> None:
    gpus(2)

    class Transport:
        def __init__(self) -> None:
            self.failed: list[BaseException] = []
            self.closed = False

        def all_gather_object(self, mine: Any) -> Sequence[Any]:
            return [mine, mine]

        def fail(self, error: BaseException) -> None:
            self.failed.append(error)

        def close(self) -> None:
            self.closed = True

    made = Transport()
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(launch, "default_heartbeat", lambda timeout: None)
    monkeypatch.setattr(launch, "_transport", lambda *args, **more: made)
    with pytest.raises(GemsError, match="ranks 0, 1 are on GPU GPU-0 of"):
        launch._on_group(launch.asked(None, None), 60, 60)
    assert made.failed
    assert made.closed


def test_a_group_made_without_a_backend_is_gloo_here() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        transport, device = connect()
        assert (getattr(transport, "backend", ""), device) == ("gloo", torch.device("cpu"))
        transport.close()
    finally:
        dist.destroy_process_group()
