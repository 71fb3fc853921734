"""The numbers that callbacks are told of the executions of an epoch."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from keras.src.utils.python_utils import pythonify_logs

from tfdist.engine import callbacks as callback_rules
from tfdist.engine import plain
from tfdist.engine.servers.executor import Done
from tfdist.engine.servers.executor import Executor

#: A progress bar is drawn that often, so its numbers need not be newer.
_SECONDS = 0.1


class EpochLogs:
    """Logs of one pass over data.

    Metrics are over all executions that are done; of other numbers that a step returns it is their
    mean over the examples.

    Args:
        executor: Runs the executions.
        callbacks: Those who are told.

    Attributes:
        steps: Steps that are done.
    """

    def __init__(self, executor: Executor, callbacks: list[Any]):
        self._execution = executor.execution
        self._metrics = executor.execution.metrics
        self._newest = callback_rules.read_every_log(callbacks)
        self._logs: dict[str, Any] = {}
        self._at = float("-inf")
        self._sums: dict[str, Any] = {}
        self._rows = 0
        self.steps = 0

    def after(self, done: Done) -> dict[str, Any]:
        """Returns the logs after an execution; for a progress bar, some that are as good as new."""
        self.steps += len(done.rows)
        self._rows += sum(done.rows)
        for rows, output in zip(done.rows, done.outputs, strict=True):
            self._add(rows, output if isinstance(output, dict) else {"loss": output})
        now = time.monotonic()
        if self._newest or now - self._at > _SECONDS:
            self._logs, self._at = self._current(), now
        return self._logs

    def state(self) -> Any:
        """Returns what another process needs to go on, fit for JSON; metrics keep their own."""
        self._metrics.store()
        return plain.encode({"sums": self._sums, "rows": self._rows})

    def resume(self, state: Any) -> None:
        """Goes on from `state`, and from what the metrics have."""
        self._metrics.load()
        if state is not None:
            found = plain.decode(state)
            self._sums, self._rows = found["sums"], found["rows"]

    def final(self) -> dict[str, Any]:
        """Returns the logs of the whole epoch, and puts the states into the metrics."""
        self._metrics.store()
        return self._current()

    def _add(self, rows: int, output: dict[str, Any]) -> None:
        for name, value in output.items():
            if np.ndim(value) == 0:
                value = self._sums.get(name, 0.0) + rows * np.asarray(value)
            self._sums[name] = value

    def _current(self) -> dict[str, Any]:
        known = self._metrics.results()
        own = {
            name: total / max(1, self._rows) if np.ndim(total) == 0 else total
            for name, total in self._sums.items()
            if name not in known
        }
        names = self._execution.log_names or [*known]
        logs: dict[str, Any] = pythonify_logs({**own, **{n: known[n] for n in names if n in known}})
        return logs
