"""`torch.cuda` on simulated devices: fake tensors for memory, and a record of what is asked."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated_gpu.record import Record, Span

aten = torch.ops.aten
Tensor = torch.Tensor
HOME = 1  # the rank's device: not the one that a thread begins with
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
READS = {aten._local_scalar_dense, aten.equal}  # operators whose result the host waits for
NO_KERNEL = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
    *(aten.set_, aten.resize_, aten._unsafe_view, aten.lift_fresh, aten.alias, aten.detach),
}
PROPERTIES = SimpleNamespace(
    name="simulated", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132
)
_streams = itertools.count(16)
_events = itertools.count(1)
_own = threading.local()


class Device:
    """What is simulated: the record, and the library that knows each thread's device."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.record = Record(HOME)

    def restart(self) -> Record:
        self.record = Record(HOME)
        self.library.set_simulated_device(0)
        return self.record

    @property
    def current(self) -> int:
        return self.library.simulated_device()


device: Device  # set by `install`


def current_device() -> int:
    return device.current


def index_of(given: Any) -> int:
    """The index of a device that may be left out: then it is the thread's current one."""
    if given is None:
        return _sought("the current device")
    if isinstance(given, int):
        return given
    index = torch.device(given).index
    return _sought(f"{given}") if index is None else index


def _sought(what: str) -> int:
    device.record.expect_home(device.current, what)
    return device.current


class Stream:
    """In-order work of a device. `cuda_stream` tells streams apart."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.cuda_stream = next(_streams) if number is None else number

    def wait_event(self, event: Event) -> None:
        with device.record.lock:
            device.record.order.stream_wait_for_event(self.cuda_stream, event.number)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        order = device.record.order
        last = order.current_sync_states.get(self.cuda_stream, {}).get(self.cuda_stream, -1)
        return last <= order.host_sync_state.get(self.cuda_stream, -1)

    def synchronize(self) -> None:
        device.record.sync("stream.synchronize", self.cuda_stream)


class Event:
    """A point in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.number, self.timed = next(_events), enable_timing

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with device.record.lock:
            device.record.order.record_state(self.number, stream.cuda_stream)
            self.at = device.record.number
            self.waited = device.record.order.recorded_sync_states[self.number]

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        done = device.record.order.host_sync_state
        return all(number <= done.get(stream, -1) for stream, number in self.waited.items())

    def synchronize(self) -> None:
        with device.record.lock:
            device.record.order.all_streams_wait_for_event(self.number)
            device.record.count_sync("event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        """In launches. As in CUDA, both must have happened."""
        if not (self.query() and other.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(other.at - self.at)


def default_stream(given: Any = None) -> Stream:
    index = index_of(given)
    return Stream(index, number=index)


def current_stream(given: Any = None) -> Stream:
    index = index_of(given)
    return getattr(_own, "streams", {}).get(index) or Stream(index, number=index)


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    index, before = stream.device.index, dict(getattr(_own, "streams", {}))
    _own.streams = {**before, index: stream}
    device_before = device.current
    device.library.set_simulated_device(index)
    try:
        yield
    finally:
        _own.streams = before
        device.library.set_simulated_device(device_before)


@contextmanager
def on_device(given: Any) -> Iterator[None]:
    before = device.current
    device.library.set_simulated_device(index_of(given))
    try:
        yield
    finally:
        device.library.set_simulated_device(before)


def set_device(given: Any) -> None:
    device.library.set_simulated_device(index_of(given))


# --- tensors ------------------------------------------------------------------------------------


def is_gpu(x: Any) -> bool:
    return isinstance(x, FakeTensor) and x.device.type == "cuda"


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def span(x: Tensor) -> Span:
    """The bytes that a tensor reaches."""
    size, start = x.element_size(), int(x.storage_offset())
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return Span(x.untyped_storage()._cdata, start * size, (start + reach + 1) * size)


def spans(found: list[Tensor]) -> list[Span]:
    return [span(x) for x in found if x.layout is torch.strided and x.numel()]


def watch(x: Tensor, stream: Stream) -> None:
    """Know the memory of a new tensor on the device, until it is freed."""
    storage = x.untyped_storage()
    if storage._cdata not in device.record.blocks:
        device.record.allocate(storage._cdata, storage.nbytes(), stream.cuda_stream)
        weakref.finalize(storage, device.record.free, storage._cdata)


def pin(x: Tensor, size: int) -> Tensor:
    """Host memory that copies run beside the host from and to, of so many bytes in truth."""
    storage = x.untyped_storage()
    device.record.pinned[storage._cdata] = size
    weakref.finalize(storage, device.record.free, storage._cdata)
    return x


def is_pinned(x: Tensor) -> bool:
    if x.untyped_storage()._cdata in device.record.pinned:
        return True
    ranges, at = device.record.registered.items(), x.data_ptr()
    return any(start <= at < start + size for start, size in ranges)


def stream_of(index: int) -> Stream:
    """The current stream of a tensor's device."""
    device.record.expect_home(index, "a tensor")
    return getattr(_own, "streams", {}).get(index) or Stream(index, number=index)


class SimulatedCuda(TorchDispatchMode):
    """Every operator: on fake tensors of a device as a launch; on host tensors as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = tensors((args, kwargs))
        gpu = next(filter(is_gpu, given), None)
        kind = func.overloadpacket
        if gpu is not None and kind in READS:
            return self._read(kind, gpu)
        if gpu is not None and kind is aten._to_copy and _target(kwargs) == "cpu":
            into = torch.empty(gpu.shape, dtype=kwargs.get("dtype") or gpu.dtype)
            return self._to_host(into, gpu, blocking=not kwargs.get("non_blocking"))
        if gpu is not None and kind is aten.copy_ and not is_gpu(args[0]):
            return self._to_host(args[0], args[1], blocking=not _flag(args, kwargs, 2))
        pinned = kwargs.pop("pin_memory", False)
        if gpu is None and _target(kwargs) != "cuda":
            return self._on_host(func, args, kwargs, pinned)
        return self._on_device(func, args, kwargs)

    def _read(self, kind: Any, x: Tensor) -> Any:
        device.record.sync(str(kind).removeprefix("aten."), stream_of(x.device.index).cuda_stream)
        if kind is aten.equal or x.dtype == torch.bool:
            return True
        return 1.0 if x.dtype.is_floating_point else 1

    def _to_host(self, into: Tensor, source: Tensor, *, blocking: bool) -> Tensor:
        into.detach().zero_()  # there are no numbers, and memory that nobody wrote may hold any
        stream = stream_of(source.device.index)
        asynchronous = not blocking and is_pinned(into)
        writes = spans([into]) if asynchronous else []
        device.record.launch(stream.cuda_stream, "copy to host", spans([source]), writes)
        device.record.counts.copies["to host"] += 1
        if not asynchronous:  # also into pageable memory, whatever was asked for
            device.record.sync("copy to host", stream.cuda_stream)
        return into

    def _on_host(self, func: Any, args: Any, kwargs: Any, pinned: bool) -> Any:
        if not func.is_view:
            reads, writes = _accessed(func, args, kwargs)
            for found, writing in ((reads, False), (writes, True)):
                for x in found:
                    if type(x) is Tensor and x.layout is torch.strided and x.numel():
                        device.record.host(span(x), writing=writing)
        out = func(*args, **kwargs)
        # torch's allocator of pinned memory rounds up to a power of two.
        return pin(out, 1 << max(out.nbytes - 1, 0).bit_length()) if pinned else out

    def _on_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        def faked(x: Any) -> Any:
            real = isinstance(x, Tensor) and not isinstance(x, FakeTensor)
            return FAKE.from_tensor(x.detach()) if real else x

        if func.overloadpacket is aten.set_:  # FakeTensorMode would keep the storage for good
            with in_kernel_invocation_manager(FAKE):
                func(*args, **kwargs)
            out = args[0]
        else:
            fake_args, fake_kwargs = pytree.tree_map(faked, (args, kwargs))
            with FAKE:
                out = func(*fake_args, **fake_kwargs)
        found = [x for x in tensors(out) if is_gpu(x)]
        given = [x for x in tensors((args, kwargs)) if is_gpu(x)]
        if not (found or given) or func.namespace == "prim":
            return out
        stream = stream_of((found or given)[0].device.index)
        for x in (*found, *given):
            device.record.expect_home(x.device.index, str(func))
            if x.layout is torch.strided:
                watch(x, stream)
        if not func.is_view and func.overloadpacket not in NO_KERNEL:
            self._launch(func, args, kwargs, found, stream)
        return out

    def _launch(self, func: Any, args: Any, kwargs: Any, out: list[Tensor], stream: Stream) -> None:
        reads, writes = _accessed(func, args, kwargs)
        name = str(func.overloadpacket).removeprefix("aten.")
        hosts = [x for x in reads if not is_gpu(x) and x.device.type == "cpu" and x.dim()]
        blocking = False
        if hosts:
            device.record.counts.copies["to device"] += 1
            at = 2 if func.overloadpacket is aten.copy_ else 99
            blocking = not _flag(args, kwargs, at)
            # From pageable memory the driver copies what it needs before it returns.
            reads = [x for x in reads if is_gpu(x) or is_pinned(x)]
        else:
            device.record.counts.launches[name] += 1
            reads = [x for x in reads if is_gpu(x)]
        known = {x.untyped_storage()._cdata for x in (*reads, *writes) if _strided(x)}
        new = [x for x in out if _strided(x) and x.untyped_storage()._cdata not in known]
        device.record.launch(
            stream.cuda_stream, name, spans(reads), spans([*filter(is_gpu, writes), *new])
        )
        if blocking:
            device.record.sync("copy to device", stream.cuda_stream)


def _strided(x: Tensor) -> bool:
    return x.layout is torch.strided


def _target(kwargs: dict[str, Any]) -> str | None:
    given = kwargs.get("device")
    return None if given is None else torch.device(given).type


def _flag(args: Any, kwargs: Any, at: int) -> bool:
    return bool(kwargs.get("non_blocking", args[at] if len(args) > at else False))


def _accessed(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What an operator reads, and what it writes of its arguments."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    arguments = func._schema.arguments
    values = [*zip(arguments, args, strict=False)]
    values += [(a, kwargs[a.name]) for a in arguments if a.name in kwargs]
    for argument, value in values:
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(tensors(value))
    return reads, writes


# --- torch.cuda ---------------------------------------------------------------------------------


def _resize(original: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(storage: Any, size: int) -> Any:
        block = device.record.blocks.get(storage._cdata)
        if block is not None:
            device.record.free(storage._cdata)
        out = original(storage, size)
        if block is not None:
            stream = stream_of(HOME).cuda_stream
            device.record.allocate(storage._cdata, size, stream)
        return out

    return resize_


def _tolist(original: Callable[..., Any]) -> Callable[..., Any]:
    def tolist(x: Tensor) -> Any:
        if type(x) is Tensor and x.numel():
            device.record.host(span(x), writing=False)
        return original(x.cpu() if is_gpu(x) else x)

    return tolist


def _data_ptr(original: Callable[..., Any]) -> Callable[..., Any]:
    def data_ptr(x: Tensor) -> int:
        """Fake memory has no address: one that tells storages and offsets apart."""
        if not is_gpu(x):
            return original(x)
        return (x.untyped_storage()._cdata << 24) + int(x.storage_offset()) * x.element_size()

    return data_ptr


def _record_stream(x: Tensor, stream: Stream) -> None:
    device.record.keep_for(x.untyped_storage()._cdata, stream.cuda_stream)


def _register(address: int, size: int, flags: int) -> int:
    """cudaHostRegister, which pins so many bytes and no more."""
    device.record.registered[address] = size
    return 0


def _unregister(address: int) -> int:
    device.record.registered.pop(address, None)  # of another family, if it is not there
    return 0


def install(library: Path) -> Device:
    """Replace `torch.cuda` in this process, for good."""
    global device
    device = Device(library)
    changes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": current_device,
        "set_device": set_device,
        "device": on_device,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "stream": on_stream,
        "synchronize": lambda device_=None: device.record.sync("synchronize"),
        "default_generators": (torch.Generator(), torch.Generator()),
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_properties": lambda index=None: PROPERTIES,
        "mem_get_info": lambda index=None: (PROPERTIES.total_memory,) * 2,
        "reset_peak_memory_stats": lambda index=None: None,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=_register, cudaHostUnregister=_unregister
        ),
    }
    for name in ("memory_allocated", "memory_reserved"):
        changes[name] = lambda index=None: device.record.live
        changes[f"max_{name}"] = lambda index=None: device.record.counts.peak
    methods: dict[str, Any] = {
        "record_stream": _record_stream,
        "data_ptr": _data_ptr(Tensor.data_ptr),
        "tolist": _tolist(Tensor.tolist),
    }
    for owner, found in ((torch.cuda, changes), (Tensor, methods)):
        for name, value in found.items():
            setattr(owner, name, value)
    torch.UntypedStorage.resize_ = _resize(torch.UntypedStorage.resize_)
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # torch.tensor(..., device=) makes it on the host first
    # Fake tensors are of a class of their own; real ones on a GPU are stepped many at a time.
    _foreach_supported_types.append(FakeTensor)
    return device
