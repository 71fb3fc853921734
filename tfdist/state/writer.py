"""Commits in the background, while training goes on.

    with AsyncWriter(store) as writer:
        writer.submit(Snapshot(step, facts, arrays))     # returns at once
    # Here all that was submitted is durable.

One thread writes. It takes a small share of a core (`pace.py`), at a low priority, and lets the
other threads run nearly all the time: they are asked to wait for it for microseconds, not for the
length of a write. Where somebody waits for a commit, it is written as fast as can be.

Arrays that are the memory of variables are copied first, at full speed, while training goes on: its
next update finds most of that memory free again, and writes in place. What it does not find free
it leaves alone, so the copy is right however late it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from types import TracebackType

import numpy as np

from tfdist.errors import StaleWriterError
from tfdist.state.commit import Commit
from tfdist.state.commit import Snapshot
from tfdist.state.pace import Pace
from tfdist.state.store import Store

log = logging.getLogger("absl")

#: 3 % of a core that others keep busy (Linux gives a thread 1024 / 1.25^n shares), all of an idle.
_NICENESS = 15
#: Seconds of rest after which the writer looks whether the program is about to end.
_NAP = 0.1

Work = Snapshot | Callable[[Store], Commit | None]


@dataclasses.dataclass(frozen=True)
class _Submitted:
    work: Work
    spent: float
    is_lent: bool


class AsyncWriter:
    """Writes commits one after the other in a thread of its own.

    At most one is being written and one waits. A newer one takes the place of the one that waits:
    on a slow disk there are fewer commits, and training does not wait. What is being written while
    another waits is completed without rest. `submit` copies nothing: arrays must stay as they are
    until the commit is complete. Those of `Training.capture` do.

    Args:
        store: Where to.
        on_commit: Called with each commit when it is complete, in the writing thread.

    Attributes:
        last: The newest commit that is complete, None before the first.
        skipped: How many gave way to newer ones.
    """

    def __init__(self, store: Store, *, on_commit: Callable[[Commit], None] | None = None):
        self.last: Commit | None = None
        self.skipped = 0
        self._told = 0
        self._store = store
        self._on_commit = on_commit
        self._changed = threading.Condition()
        self._waiting: _Submitted | None = None
        self._memory: dict[str, np.ndarray] = {}  # Of copies; fresh memory is dear.
        self._is_writing = False
        self._impatient = 0  # Threads that wait for all to be durable.
        self._error: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written and nothing waits."""
        with self._changed:
            return not self._is_writing and self._waiting is None

    def submit(self, work: Work, *, spent: float = 0.0, is_lent: bool = False) -> None:
        """Has `work` committed, and returns at once.

        Args:
            work: A snapshot; or what writes a commit with `store.open_commit`, called in the
                writing thread.
            spent: Seconds for which training has waited for the snapshot. The longer, the slower
                it is written, so that it takes the same share of the time.
            is_lent: Whether others want the memory of the arrays back; they are copied at once.

        Raises:
            Exception: What the write before this one failed with; `work` is then not taken, nor
                what waited. A stale writer fails for ever, others may submit again.
        """
        with self._changed:
            self._raise()
            if not self._is_writing:
                self._is_writing = True
                # A list, which can be emptied: a thread holds its arguments until it ends. Not a
                # daemon: a program that ends first completes what it has submitted.
                first = [_Submitted(work, spent, is_lent)]
                threading.Thread(target=self._write_all, args=[first], name="tfdist-commit").start()
                return
            self._skip()
            self._waiting = _Submitted(work, spent, is_lent)
            self._changed.notify_all()  # Who writes makes haste.

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all that was submitted is durable.

        Args:
            timeout: How long at most, in seconds.

        Returns:
            Whether it is.

        Raises:
            Exception: What a write failed with.
        """
        with self._changed:
            self._impatient += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: not self._is_writing, timeout):
                    return False
            finally:
                self._impatient -= 1
            self._raise()
            return True

    def close(self) -> None:
        """Waits until all that was submitted is durable.

        Raises:
            Exception: What a write failed with.
        """
        if self.skipped > max(1, self._told):
            self._told = self.skipped
            log.warning(
                "%d commits were skipped: those before them were still being written to %s; saving "
                "less often loses nothing",
                self.skipped,
                self._store.directory,
            )
        self.wait()

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # What ended the program is the cause to show.
        try:
            self.close()
        except Exception as late:
            log.error("the last commit failed: %s", late)

    def _write_all(self, queue: list[_Submitted]) -> None:
        while queue:
            error = self._write(queue)
            with self._changed:
                if error is not None:
                    self._error, self._waiting = error, None
                if self._waiting is not None:
                    queue.append(self._waiting)
                    self._waiting = None
                else:
                    self._is_writing = False
                    self._changed.notify_all()

    def _write(self, queue: list[_Submitted]) -> BaseException | None:
        try:
            taken = queue.pop()
            work, pace = taken.work, Pace(self._rest, taken.spent)
            if taken.is_lent and isinstance(work, Snapshot):
                work = dataclasses.replace(work, arrays=self._copied(work.arrays))
            del taken  # And with it what was lent.
            # Only now: nobody can take this back. Threads that this one starts inherit it.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            if isinstance(work, Snapshot):
                commit: Commit | None = self._store.write(work, pace=pace)
            else:
                commit = work(self._store)
            if commit is not None:
                self.last = commit
                if self._on_commit is not None:
                    self._on_commit(commit)
        except BaseException as error:
            return error
        return None

    def _copied(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Copies arrays into memory that is used again for the next commit."""
        copies = {}
        for name, array in arrays.items():
            old = self._memory.get(name)
            if old is not None and (old.shape, old.dtype) == (array.shape, array.dtype):
                np.copyto(old, array)
                copies[name] = old
            else:
                copies[name] = np.array(array, order="C")
        self._memory = copies
        return copies

    def _skip(self) -> None:
        """Gives up what waits, for something newer."""
        if self._waiting is None:
            return
        self.skipped += 1
        if self.skipped == 1:
            log.warning(
                "a commit was skipped: the one before is still being written to %s. More such are "
                "counted, and told of at the end",
                self._store.directory,
            )
        self._waiting = None

    def _rest(self, seconds: float) -> None:
        """Lets time pass, unless somebody waits for the commit."""
        end = time.monotonic() + seconds
        with self._changed:
            while (left := end - time.monotonic()) > 0 and not self._is_urgent():
                self._changed.wait(min(left, _NAP))

    def _is_urgent(self) -> bool:
        # The interpreter ends when this thread has.
        is_ending = not threading.main_thread().is_alive()
        return self._impatient > 0 or self._waiting is not None or is_ending

    def _raise(self) -> None:
        error = self._error
        if error is None:
            return
        if not isinstance(error, StaleWriterError):
            self._error = None
        raise error
