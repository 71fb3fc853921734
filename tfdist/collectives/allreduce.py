"""The all-reduce itself: buckets in the order submitted, by one thread or by the caller."""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
import weakref
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np

from tfdist.collectives.layout import ALIGNMENT
from tfdist.collectives.layout import ITEM_BYTES
from tfdist.collectives.layout import SLOTS
from tfdist.collectives.layout import Bucket
from tfdist.collectives.layout import lay_out
from tfdist.collectives.memory import AllGather
from tfdist.collectives.memory import Place
from tfdist.collectives.memory import share
from tfdist.collectives.signals import DRAINED
from tfdist.collectives.signals import FILLED
from tfdist.collectives.signals import REDUCED
from tfdist.collectives.signals import Patience
from tfdist.collectives.signals import Signals
from tfdist.collectives.summation import Array
from tfdist.collectives.summation import Summation
from tfdist.errors import ConfigError
from tfdist.errors import DisagreementError
from tfdist.errors import TfdistError


def connect(
    rank: int,
    names: Sequence[str],
    all_gather: AllGather,
    buckets: Sequence[Bucket],
    *,
    check: Callable[[], None] = lambda: None,
    timeout_seconds: float | None = None,
    what: str = "the sum of gradients",
    variable: str = "TFDIST_TIMEOUT_SECONDS",
) -> tuple[AllReduce | None, str]:
    """Prepares the all-reduce of `buckets`; every rank calls it at the same point.

    For other buckets call it again: each result has its own memory and may be used beside others.

    Args:
        rank: This rank.
        names: How to call each rank in messages; as many as there are ranks, at least 2.
        all_gather: Gathers a value that JSON can hold from every rank, in the order of ranks.
        buckets: What will be summed in one step, in the order of their keys 0, 1, ...
        check: Called while waiting for a peer, every 0.05 s; raises if waiting makes no sense.
        timeout_seconds: Longest wait for a peer; None waits as long as `check` does not raise.
        what: What is summed, in messages.
        variable: Name of the environment variable that sets `timeout_seconds`, for messages.

    Returns:
        The all-reduce and "", or None and the reason why these ranks cannot share memory. All
        ranks get the same answer.

    Raises:
        ConfigError: A type cannot be summed.
        DisagreementError: The ranks came with different buckets.
    """
    for name in [bucket.dtype for bucket in buckets]:
        if name not in ITEM_BYTES:
            raise ConfigError(f"{what} to be of a type in {sorted(ITEM_BYTES)}", name)
    layout = lay_out(buckets, len(names))
    memory, reason = share(rank, layout, all_gather, what)
    if memory is None:
        return None, reason
    place = Place(memory, layout, rank, names)
    return AllReduce(place, all_gather, Patience(what, check, timeout_seconds, variable)), ""


class AllReduce:
    """Sums of buckets over all ranks; every rank gets the same bits.

    All ranks must submit the same buckets in the same order. Results are read-only arrays in
    shared memory. They keep their values as long as anything refers to them: their memory is not
    used again before every rank has let go of it. When nothing refers to the `AllReduce` any more
    its thread ends; the memory goes with the last result.

    Args:
        place: The shared memory.
        all_gather: See `connect`.
        patience: What is summed, and how long to wait for a peer.

    Attributes:
        error: What went wrong, after which nothing works until `reset`; or None.
    """

    def __init__(self, place: Place, all_gather: AllGather, patience: Patience):
        self.error: BaseException | None = None
        self._names = place.names
        self._rank = place.rank
        self._all_gather = all_gather
        self._what = patience.what
        self._stopping = threading.Event()
        # Not a method of this object: in a cycle of references, the memory would stay for long.
        check = functools.partial(_check, self._stopping, patience.check)
        self._signals = Signals(place, dataclasses.replace(patience, check=check))
        self._works = [Summation(place, plan) for plan in place.layout.buckets]
        self._regions = [
            [work.result(g) for g in range(len(work.plan.results))] for work in self._works
        ]
        self._handed_out: list[list[weakref.ref[Array] | None]] = [
            [None] * len(regions) for regions in self._regions
        ]
        self._filled = 0  # Chunks so far, which all ranks number alike.
        self._drained = 0
        self._queue: _Queue = queue.SimpleQueue()
        self._tickets: dict[int, _Ticket] = {}
        self._turn = threading.Lock()
        self._state = threading.Condition()
        self._pending = 0
        self._thread: threading.Thread | None = None

    def submit(self, key: int, arrays: Sequence[Array]) -> None:
        """Hands over the arrays of bucket `key` and returns at once; they must not change.

        A result of the same bucket that nobody has waited for is dropped.

        Raises:
            TfdistError: The arrays do not fit the bucket, or an earlier bucket failed.
        """
        ticket = self._ticket(key, arrays)
        with self._state:
            self._pending += 1
            self._tickets[key] = ticket
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_serve, args=[self._queue], name="tfdist-all-reduce", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._queue.put, None).atexit = False
        self._queue.put((self, ticket))

    def wait(self, key: int) -> list[Array]:
        """Returns the sums of the arrays submitted last as bucket `key`.

        Raises:
            TfdistError: The bucket was not submitted, or failed.
        """
        with self._state:
            ticket = self._tickets.pop(key, None)
        if ticket is None:
            raise ConfigError(f"bucket {key} to be submitted before anyone waits for it")
        return ticket.result()

    def reduce(self, key: int, arrays: Sequence[Array]) -> list[Array]:
        """Does `submit` and `wait` in one; without the thread if nothing else is under way."""
        with self._state:
            idle = not self._pending
        if not idle:
            self.submit(key, arrays)
            return self.wait(key)
        ticket = self._ticket(key, arrays)
        self._do(ticket)
        return ticket.result()

    def reset(self) -> None:
        """Forgets every bucket under way and every error; every rank calls it at the same point.

        Results that were handed out keep their values.
        """
        self._stop()
        self._all_gather("reset")  # From here on no rank looks at the counters.
        self._signals.clear()
        self._filled = self._drained = 0
        self._tickets.clear()
        self._all_gather("start")
        self._stopping.clear()
        self.error = None

    def _stop(self) -> None:
        self._stopping.set()
        with self._turn:  # What is under way ends as soon as it has to wait.
            pass
        with self._state:
            self._state.wait_for(lambda: not self._pending)

    def _ticket(self, key: int, arrays: Sequence[Array]) -> _Ticket:
        if self.error is not None:
            raise self.error
        bucket = self._works[key].plan.bucket
        shapes = tuple(array.shape for array in arrays)
        dtypes = {array.dtype.name for array in arrays}
        if shapes != bucket.shapes or not dtypes <= {bucket.dtype}:
            raise ConfigError(
                f"arrays of {bucket.dtype} shaped {bucket.shapes} in bucket {key}",
                f"{sorted(dtypes)} shaped {shapes}",
            )
        return _Ticket(key, arrays)

    # What the thread does, or the caller of `reduce`.

    def _do(self, ticket: _Ticket) -> None:
        with self._turn:
            try:
                if self.error is not None:
                    raise self.error
                _check_stopping(self._stopping)
                with np.errstate(all="ignore"):  # Infinite gradients are the engine's business.
                    ticket.sums = self._sum(ticket.key, ticket.arrays)
            except BaseException as error:
                self.error = ticket.error = error
            finally:
                ticket.arrays = ()
                ticket.done.release()

    def _sum(self, key: int, arrays: Sequence[Array]) -> list[Array]:
        work, signals = self._works[key], self._signals
        plan, vectors = work.plan, work.flatten(arrays)
        if not plan.length:
            return [array.copy() for array in arrays]
        first, last = self._filled, self._filled + plan.chunks
        mask = self._used(key)
        region: int | None = None
        self._fill(work, key, 0, vectors, mask)
        for chunk in range(plan.chunks):
            if chunk + 1 < plan.chunks:
                self._fill(work, key, chunk + 1, vectors, mask)
            count = first + chunk + 1
            entry = (count - 1) % SLOTS
            signals.await_all(FILLED, count)
            used = self._compare(key, chunk, entry)
            if chunk == 0:
                region = _first_free(used, len(plan.results))
                out = (
                    _aligned(plan.length, work.type)
                    if region is None
                    else self._regions[key][region]
                )
            if region is not None or plan.small:
                work.sum(chunk, entry, vectors, out, 0)
                signals.raise_to(REDUCED, count)
            else:
                self._sum_privately(work, chunk, entry, vectors, out, count)
        if region is not None:
            signals.await_all(REDUCED, last)
            out = work.result(region)
            self._handed_out[key][region] = weakref.ref(out)
        out.flags.writeable = False
        return [
            out[at : at + array.size].reshape(array.shape)
            for at, array in zip(plan.starts, arrays, strict=True)
        ]

    def _fill(
        self, work: Summation, key: int, chunk: int, vectors: Sequence[Array], mask: int
    ) -> None:
        """Writes a chunk as soon as everybody has read what is in its slot."""
        self._signals.await_all(REDUCED, self._filled + 1 - SLOTS)
        entry = self._filled % SLOTS
        work.fill(chunk, entry, vectors)
        self._signals.note(entry, _tag(key, chunk), mask)
        self._filled += 1
        self._signals.raise_to(FILLED, self._filled)

    def _sum_privately(
        self,
        work: Summation,
        chunk: int,
        entry: int,
        vectors: Sequence[Array],
        out: Array,
        count: int,
    ) -> None:
        """Sums a chunk when every result region is in use: through the slots into `out`."""
        signals = self._signals
        work.sum(chunk, entry, vectors, *work.part_in_slot(self._rank, chunk, entry))
        signals.raise_to(REDUCED, count)
        signals.await_all(REDUCED, count)
        for owner in range(len(self._names)):
            sums, at = work.part_in_slot(owner, chunk, entry)
            np.copyto(out[at : at + sums.size], sums)
        # The counters of reduced chunks no longer tell that a slot may be written to.
        self._drained += 1
        signals.raise_to(DRAINED, self._drained)
        signals.await_all(DRAINED, self._drained)

    def _used(self, key: int) -> int:
        """Returns a bit for each result region of the bucket that this rank still uses."""
        mask = 0
        for region, reference in enumerate(self._handed_out[key]):
            if reference is not None and reference() is not None:
                mask |= 1 << region
        return mask

    def _compare(self, key: int, chunk: int, entry: int) -> int:
        """Returns the regions that any rank uses, if all ranks are at the same chunk."""
        notes = [self._signals.notes(rank, entry) for rank in range(len(self._names))]
        used = 0
        for name, (tag, mask) in zip(self._names, notes, strict=True):
            if tag != _tag(key, chunk):
                raise DisagreementError(
                    f"every worker to sum bucket {key} of {self._what}",
                    f"{name} sums bucket {(tag >> 32) - 1}",
                    "run the same steps in the same order on every worker",
                )
            used |= mask
        return used


class _Ticket:
    """A bucket on its way."""

    def __init__(self, key: int, arrays: Sequence[Array]):
        self.key = key
        self.arrays = arrays
        self.sums: list[Array] = []
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def result(self) -> list[Array]:
        with self.done:
            if self.error is not None:
                raise self.error
            return self.sums


_Queue = queue.SimpleQueue[tuple[AllReduce, _Ticket] | None]


def _serve(work: _Queue) -> None:
    """Does what is queued until there is None; while it waits for more it refers to nothing.

    A result must not outlive its user here, nor the `AllReduce` all others that refer to it.
    """
    while (item := work.get()) is not None:
        reduce, ticket = item
        del item
        reduce._do(ticket)
        del ticket
        with reduce._state:
            reduce._pending -= 1
            reduce._state.notify_all()
        del reduce


def _check(stopping: threading.Event, check: Callable[[], None]) -> None:
    _check_stopping(stopping)
    check()


def _check_stopping(stopping: threading.Event) -> None:
    if stopping.is_set():
        raise TfdistError("this step to run to its end", "a reset")


def _tag(key: int, chunk: int) -> int:
    return (key + 1) << 32 | chunk


def _first_free(used: int, regions: int) -> int | None:
    return next((region for region in range(regions) if not used >> region & 1), None)


def _aligned(size: int, dtype: np.dtype[np.generic]) -> Array:
    """Returns a new array that TensorFlow can adopt."""
    raw = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size * dtype.itemsize].view(dtype)
