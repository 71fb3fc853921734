"""Hands work to whichever worker is free, and gets every result exactly once.

TensorFlow's ClusterCoordinator knows the workers: it runs what is scheduled on one of them, puts
back what a dying one was doing, and takes it on again when it comes back. What it cannot do is give
up on a worker that is there and does not answer; here another gets the same work then, and the
answer that comes first counts.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import queue
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.distribute.coordinator import coordinator_context

from tfdist.cluster import current
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Task
from tfdist.engine.servers import functions
from tfdist.errors import PeerLostError

log = logging.getLogger("absl")

#: Work that takes longer than this is given to another worker if its worker says nothing, neither.
PATIENCE_SECONDS = 15.0
#: As long, and ten times as long as usual, may work take on a worker that gives signs of life: what
#: two workers do is done twice. The first work on a worker includes the preparation of its graph.
_SLOW_SECONDS = 120.0
_POLL_SECONDS = 0.5


@dataclasses.dataclass
class _Task:
    number: int
    work: Callable[[], Any]
    started: float | None = None
    worker: int = 0
    is_done: bool = False
    tries: int = 1


def stop_recovery(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a coordinator's `WorkerPreemptionHandler.stop` that does not wait.

    The thread that waits for a lost worker holds the lock for as long: with a worker that is lost
    for good, a process that lets go of its coordinator would never end.
    """

    @functools.wraps(original)
    def stop(self: Any) -> None:
        self._should_preemption_thread_run = False
        self._cluster_due_for_update_or_finish.set()

    return stop


class Dispatcher:
    """Runs work on the workers of a ParameterServerStrategy.

    Args:
        strategy: The strategy.
        limit_seconds: Longest time without any result while there is work; None: no limit.

    Attributes:
        coordinator: TensorFlow's coordinator.
        workers: Number of workers.
    """

    def __init__(self, strategy: Any, limit_seconds: float | None = None):
        functions.begin()
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.workers = int(strategy.extended._num_workers)
        self._limit = limit_seconds
        self._tasks: dict[int, _Task] = {}
        self._done: queue.SimpleQueue[tuple[_Task, Any, BaseException | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0
        self._seconds: list[float] = []
        self._heard = time.monotonic()

    @property
    def open(self) -> int:
        """Work that has no result yet."""
        return len(self._tasks)

    def submit(self, work: Callable[[], Any]) -> int:
        """Schedules `work`, which is called in a thread with a worker's device.

        Returns:
            The number of the work.
        """
        task = _Task(self._count, work)
        self._count += 1
        if not self._tasks:
            self._heard = time.monotonic()
        self._tasks[task.number] = task
        self._schedule(task)
        return task.number

    def result(self) -> tuple[int, Any]:
        """Waits for the next result; returns the number of the work and what it returned.

        Raises:
            PeerLostError: No worker has answered for too long.
            tf.errors.OpError: A parameter server is lost.
            Exception: What the work raised, unless that was the end of a worker.
        """
        while True:
            try:
                task, value, error = self._done.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self._look_after()
                continue
            if task.number not in self._tasks:
                continue  # The second answer, or one from before an error.
            del self._tasks[task.number]
            self._heard = time.monotonic()
            if error is not None:
                raise error
            return task.number, value

    def forget(self) -> None:
        """Drops what is scheduled or under way; late answers are ignored."""
        for task in self._tasks.values():
            task.is_done = True
        self._tasks.clear()

    def _schedule(self, task: _Task) -> None:
        def run() -> None:
            if task.is_done:
                return
            task.worker = _this_worker()
            task.started = time.monotonic()
            try:
                value, error = task.work(), None
            except Exception as raised:
                if _is_of_a_lost_task(raised):
                    task.started = None
                    raise  # The coordinator knows what to do.
                value, error = None, raised
            with self._lock:
                if task.is_done:
                    return
                task.is_done = True
                self._seconds = [*self._seconds[-99:], time.monotonic() - task.started]
            self._done.put((task, value, error))

        # `schedule` itself takes only compiled functions, whose results it does not announce.
        self.coordinator._cluster.schedule(run, (), {})

    def _look_after(self) -> None:
        """Looks for errors of the coordinator and for work that a worker keeps to itself."""
        self.coordinator.done()
        now = time.monotonic()
        usual = statistics.median(self._seconds) if self._seconds else 0.0
        slow = max(_SLOW_SECONDS, 10 * usual)
        for task in list(self._tasks.values()):
            is_silent = _silent_for(task.worker) > PATIENCE_SECONDS / 2
            patience = PATIENCE_SECONDS if is_silent else slow
            late = task.started is not None and now - task.started > patience * task.tries
            if late and not task.is_done and task.tries < self.workers:
                task.tries += 1
                log.warning(
                    "a worker has not answered for %.0f s; another does its steps again",
                    now - (task.started or now),
                )
                self._schedule(task)
        if self._limit is not None and now - self._heard > self._limit:
            raise PeerLostError(
                f"an answer of any worker within {self._limit:.0f} s",
                f"none, with {self.open} executions under way",
                "look at the logs of the workers; TFDIST_AGREEMENT_TIMEOUT sets the limit",
            )


def _this_worker() -> int:
    """Returns the number of the worker that this thread is for."""
    index: int = coordinator_context.get_current_dispatch_context().worker_index
    return index


def _silent_for(worker: int) -> float:
    """Returns for how many seconds a worker has given no sign of life, as far as that is known."""
    group = current.group()
    return 0.0 if group is None else group.silent_for(Task(WORKER, worker))


def _is_of_a_lost_task(error: Exception) -> bool:
    if not isinstance(error, (tf.errors.OpError, cluster_coordinator.ClosureInputError)):
        return False
    return (
        cluster_coordinator._is_worker_failure(error)
        or cluster_coordinator._is_ps_failure(error)
        or isinstance(
            error,
            (
                cluster_coordinator.ClosureInputError,
                tf.errors.CancelledError,
                tf.errors.UnavailableError,
                tf.errors.AbortedError,
                tf.errors.DeadlineExceededError,
            ),
        )
    )
