"""Data that every worker reads for itself, from a dataset function of the user's."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import coordinator_context
from tensorflow.python.distribute.coordinator import values as per_worker

from tfdist.engine.servers.executor import Executor
from tfdist.engine.servers.executor import Outcome
from tfdist.engine.servers.executor import Works

#: A worker whose data has ended is asked again that often, until all have ended.
_ENDED_SECONDS = 0.05


def is_worker_data(x: Any) -> bool:
    """Whether `x` makes a dataset on each worker."""
    if isinstance(x, per_worker.PerWorkerDatasetFromDatasetFunction):
        return True
    is_compiled = isinstance(x, tf.types.experimental.PolymorphicFunction)
    return is_compiled or inspect.isfunction(x) or inspect.ismethod(x)


class WorkerData:
    """The batches that workers read for themselves, epoch after epoch.

    Args:
        coordinator: The ClusterCoordinator of the strategy.
        source: A function of a `tf.distribute.InputContext`, or of nothing, that returns a
            `tf.data.Dataset`; or what `create_per_worker_dataset` has returned. In the context,
            `num_input_pipelines` is the number of workers and `input_pipeline_id` that worker's
            number, as a tensor: `dataset.shard(context.num_input_pipelines,
            context.input_pipeline_id)` gives each worker its own part.
        workers: Number of workers.
        steps: Steps of an epoch over all workers; None: until all have read their data to the end.
    """

    policy = "given"
    num_batches: int | None

    def __init__(self, coordinator: Any, source: Any, workers: int, steps: int | None):
        self._workers = workers
        self.steps = self.num_batches = steps
        if callable(source) and not isinstance(
            source, per_worker.PerWorkerDatasetFromDatasetFunction
        ):
            source = coordinator.create_per_worker_dataset(_of_worker(source, workers))
        self._datasets = source
        self.spec = source.element_spec
        self._iterators: Any = None
        self._pulls: dict[int, Any] = {}

    def sample(self) -> None:
        """Returns None: there is no batch to look at on the coordinator."""

    def restart(self) -> None:
        """Makes the next epoch begin at the start of the data."""
        self._iterators = None

    def works(self, executor: Executor, size: int, number: int) -> Works:
        """Yields the executions of an epoch.

        Args:
            executor: Runs them.
            size: Steps of an execution.
            number: Number of the first step, for random numbers.
        """
        if self._iterators is None or self.steps is None:
            self._iterators = iter(self._datasets)
        executor.execution.graph(1, listed=True)
        ended = _Ended(self._workers)
        done = 0
        while not ended.everywhere and (self.steps is None or done < self.steps):
            steps = size if self.steps is None or self.steps - done >= size else 1
            pull = self._pull(steps)
            executor.execution.graph(steps, listed=True)
            yield steps, self._work(executor, number + done, steps, pull, ended)
            done += steps
        if ended.everywhere:
            self._iterators = None

    def _work(
        self, executor: Executor, number: int, steps: int, pull: Any, ended: _Ended
    ) -> Callable[[], Outcome]:
        iterators = self._iterators

        def work() -> Outcome:
            worker = coordinator_context.get_current_dispatch_context().worker_index
            iterator = coordinator_context.maybe_get_remote_value(iterators._values[worker])
            there, batches = pull(iterator)
            found = int(there.numpy())
            if found == steps:
                return executor.call_listed(number, batches)
            ended.note(worker)
            outcomes = [
                executor.call_listed(number + index, [batch])
                for index, batch in enumerate(batches[:found])
            ]
            if not outcomes and not ended.everywhere:
                time.sleep(_ENDED_SECONDS)
            return Outcome(
                [rows for each in outcomes for rows in each.rows],
                [states for each in outcomes for states in each.states],
                [output for each in outcomes for output in each.outputs],
                [seen for each in outcomes for seen in each.observed],
            )

        return work

    def _pull(self, steps: int) -> Any:
        """Returns a function that reads `steps` batches, on the worker, or as many as there are."""
        if steps in self._pulls:
            return self._pulls[steps]

        def pull(iterator: Any) -> Any:
            count, batches = tf.constant(0, tf.int64), []
            for _ in range(steps):
                optional = iterator.get_next_as_optional()
                is_there = optional.has_value()
                batch = tf.cond(
                    is_there,
                    lambda optional=optional: _leaves(optional.get_value()),
                    lambda: [_nothing(leaf) for leaf in _leaves(self.spec)],
                )
                count += tf.cast(is_there, tf.int64)
                batches.append(batch)
            return count, batches

        self._pulls[steps] = tf.function(pull, autograph=False)
        return self._pulls[steps]


class _Ended:
    """The workers whose data has ended."""

    def __init__(self, workers: int):
        self._workers = workers
        self._ended: set[int] = set()
        self._lock = threading.Lock()

    def note(self, worker: int) -> None:
        with self._lock:
            self._ended.add(worker)

    @property
    def everywhere(self) -> bool:
        return len(self._ended) == self._workers


def _of_worker(function: Callable[..., Any], workers: int) -> Callable[[], Any]:
    takes_context = bool(inspect.signature(function).parameters)

    def dataset() -> Any:
        if not takes_context:
            return function()
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        return function(tf.distribute.InputContext(workers, index, 1))

    return dataset


def _leaves(structure: Any) -> list[Any]:
    leaves: list[Any] = tf.nest.flatten(structure, expand_composites=True)
    return leaves


def _nothing(spec: Any) -> Any:
    """Returns a tensor of a spec, with no examples where their number is open."""
    return tf.zeros([size or 0 for size in spec.shape.as_list()], spec.dtype)
