"""The executions of an epoch, with pauses in which none is under way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from typing import Any

from tfdist.engine.servers.epoch_logs import EpochLogs
from tfdist.engine.servers.executor import Done
from tfdist.engine.servers.executor import Executor
from tfdist.engine.servers.executor import Works
from tfdist.engine.servers.worker_data import WorkerData
from tfdist.engine.training import Training


class Flow:
    """Runs what is left of an epoch; where a watcher wants to act, what is scheduled is drained.

    Then the weights are those after a known number of batches, and the feed has given as many.

    Args:
        training: The training; it has entered the epoch.
        executor: Runs the executions.
        size: Steps of an execution.
        number: Number of the first step, for random numbers.
        logs: Numbers of the epoch.
    """

    def __init__(
        self, training: Training, executor: Executor, size: int, number: int, logs: EpochLogs
    ):
        self._training = training
        self._executor = executor
        self._logs = logs
        feed = training.feed
        # Where workers read for themselves, only they know how far they are.
        self._can_pause = training.is_watched and not isinstance(feed, WorkerData)
        self._read = self._scheduled = 0
        self._works: Works
        if isinstance(feed, WorkerData):
            self._works = feed.works(executor, size, number)
        else:
            self._works = executor.over(self._counted(training.batches()), size, number)
        self._run: Any = None
        self._pauses = False
        self._has_ended = False

    def executions(self, begin: Callable[[int], None]) -> Iterator[Done]:
        """Yields each execution when it and all before it are done.

        Args:
            begin: Called with the number of an execution's first step before it is scheduled.
        """
        try:
            while not self._has_ended:
                begins = functools.partial(_begin_after, begin, self._training.batch)
                self._run = self._executor.run(self._until_pause(), begins)
                yield from self._run
                if self._pauses and not self._has_ended:
                    self._pauses = False
                    self._act()
        finally:
            self._works.close()

    def pause_if_due(self) -> None:
        """Lets what is under way come to its end if a watcher wants to act."""
        if self._can_pause and not self._pauses:
            self._pauses = self._training.is_due

    def stop(self) -> None:
        """Ends the epoch; what is under way is waited for."""
        self._has_ended = True
        self._run.close()

    def _act(self) -> None:
        self._training.loop_state = self._logs.state()
        self._training.boundary()

    def _until_pause(self) -> Works:
        # Batches that were read to be grouped belong to this side of the pause.
        while not self._pauses or self._read != self._scheduled:
            item = next(self._works, None)
            if item is None:
                self._has_ended = True
                return
            self._scheduled += item[0]
            yield item

    def _counted(self, batches: Any) -> Generator[Any, None, None]:
        for batch in batches:
            self._read += 1
            yield batch


def _begin_after(begin: Callable[[int], None], done: int, batch: int) -> None:
    begin(done + batch)
