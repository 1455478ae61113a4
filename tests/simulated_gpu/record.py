"""What a simulated GPU was asked to do in a step, and which of it is a mistake."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.cuda._sanitizer import StreamSynchronizations

BLOCK = 512  # bytes: what torch's CUDA allocator rounds up to


def rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def where() -> str:
    """The innermost line of gems, or of the model and its loss."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/gems/" in name or name.endswith("families.py"):
            short = name.rpartition("/gems/")[2].rpartition("/simulated_gpu/")[2]
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


@dataclass
class Counts:
    """Of one step. Synchronisations are by the line that caused them; `inside` are those between
    the first and the last action."""

    launches: Counter[str] = field(default_factory=Counter)  # kernels
    messages: Counter[str] = field(default_factory=Counter)  # NCCL launches, by kind
    copies: Counter[str] = field(default_factory=Counter)  # between host and device
    syncs: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)
    peak: int = 0  # bytes by the allocator's rules


@dataclass(frozen=True)
class Access:
    """Of bytes `start` to `stop` of a storage, by a launch on a stream."""

    start: int
    stop: int
    writes: bool
    stream: int
    number: int
    what: str


@dataclass(frozen=True)
class Span:
    """Bytes of a storage, which is known by its address."""

    storage: int
    start: int
    stop: int


@dataclass
class Block:
    """Device memory: the stream that it was allocated on, and those of `record_stream`."""

    size: int
    stream: int
    recorded: set[int] = field(default_factory=set)


class Record:
    """Everything since the simulation began; `counts` since the step began.

    A race is an access that is not ordered after an earlier one of the same bytes, of which one
    writes; or memory that is freed, hence reused by its own stream, while another stream may still
    use it. Orders between streams are those of torch's CUDA sanitizer.
    """

    def __init__(self, home: int) -> None:
        """`home` is the index of the only device that may be used."""
        self.lock = threading.RLock()
        self.home = home
        self.order = StreamSynchronizations()
        self.touched: dict[int, list[Access]] = {}
        self.blocks: dict[int, Block] = {}
        self.pinned: dict[int, int] = {}  # bytes that torch has pinned, by storage
        self.registered: dict[int, int] = {}  # bytes that CUDA has pinned, by address
        self.number = self.live = 0
        self.races: list[str] = []
        self.misplaced: list[str] = []  # what was on another device, or sought there
        self.acting = False
        self.counts = Counts()

    def begin_step(self) -> None:
        self.counts = Counts(peak=self.live)

    # --- what happens ---------------------------------------------------------------------------

    def launch(self, stream: int, what: str, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        """A kernel or a copy on a stream, which reads and writes bytes."""
        with self.lock:
            self.number += 1
            self.order.update_seq_num(stream, self.number)
            for span in reads:
                self._access(span, stream, what, writing=False)
            for span in writes:
                self._access(span, stream, what, writing=True)

    def _access(self, span: Span, stream: int, what: str, *, writing: bool) -> None:
        now = Access(span.start, span.stop, writing, stream, self.number, what)
        left = []
        for old in self.touched.get(span.storage, ()):
            apart = old.stop <= now.start or now.stop <= old.start
            ordered = self.order.is_ordered_after(stream, old.number, old.stream)
            if not apart and not ordered and (old.writes or writing):
                self.races.append(_race(now, old))
            covered = now.start <= old.start and old.stop <= now.stop and ordered
            if not covered or (old.writes and not writing):
                left.append(old)
        self.touched[span.storage] = [*left, now]

    def host(self, span: Span, *, writing: bool) -> None:
        """The host reads or writes memory that a copy may still be using."""
        with self.lock:
            for old in self.touched.get(span.storage, ()):
                apart = old.stop <= span.start or span.stop <= old.start
                done = old.number <= self.order.host_sync_state.get(old.stream, -1)
                if not apart and not done and (old.writes or writing):
                    what = "writes" if writing else "reads"
                    self.races.append(f"the host {what} what {old.what} uses, at {where()}")

    def sync(self, what: str, stream: int | None = None) -> None:
        """The host waits, for a stream or for all."""
        with self.lock:
            if stream is None:
                self.order.sync_all_streams()
            else:
                self.order.all_streams_wait_for_stream(stream)
            self.count_sync(what)

    def count_sync(self, what: str) -> None:
        at = f"{what} {where()}"
        self.counts.syncs[at] += 1
        if self.acting:
            self.counts.inside[at] += 1

    def expect_home(self, index: int, what: str) -> None:
        if index != self.home:
            self.misplaced.append(f"{what} on device {index} at {where()}")

    # --- memory ---------------------------------------------------------------------------------

    def allocate(self, storage: int, size: int, stream: int) -> None:
        with self.lock:
            self.blocks[storage] = Block(rounded(size), stream)
            self.live += rounded(size)
            self.counts.peak = max(self.counts.peak, self.live)

    def free(self, storage: int) -> None:
        """Device or host memory: the next one may have the same address."""
        with self.lock:
            self.pinned.pop(storage, None)
            accesses, block = self.touched.pop(storage, ()), self.blocks.pop(storage, None)
            if block is None:
                return
            self.live -= block.size
            for old in accesses:
                ordered = self.order.is_ordered_after(block.stream, old.number, old.stream)
                if not ordered and old.stream not in block.recorded:
                    self.races.append(f"memory is freed while {old.what} may use it, at {where()}")

    def keep_for(self, storage: int, stream: int) -> None:
        """`record_stream`."""
        if (block := self.blocks.get(storage)) is not None:
            block.recorded.add(stream)


def _race(now: Access, old: Access) -> str:
    does, did = ("writes" if access.writes else "reads" for access in (now, old))
    return (
        f"{now.what} (stream {now.stream}) {does} what {old.what} (stream {old.stream}) {did}, "
        f"at {where()}"
    )
