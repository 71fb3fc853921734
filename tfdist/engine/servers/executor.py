"""Runs a step of a model over batches: execution by execution, on all workers at once."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.engine.servers.dispatcher import Dispatcher
from tfdist.engine.servers.execution import Execution


class Done(NamedTuple):
    """An execution that has been done.

    Attributes:
        first: Number of its first step within the epoch.
        steps: Number of its steps.
        outputs: What each of its steps returned, as arrays.
    """

    first: int
    steps: int
    outputs: list[Any]


class Executor:
    """Runs executions in the order of the batches, and gives their results in that order.

    Args:
        model: A built Keras model under a ParameterServerStrategy.
        step: `model.train_step` or the like.
        spec: Structure of `tf.TypeSpec` of one batch.
        dispatcher: Where to run them.
    """

    def __init__(
        self, model: Any, step: Callable[[Any], Any], spec: Any, dispatcher: Dispatcher
    ):
        self.execution = Execution(model, step, spec)
        self._spec = spec
        self._dispatcher = dispatcher

    def run(
        self,
        batches: Iterable[Any],
        size: int,
        number: int,
        begin: Callable[[int], None] = lambda first: None,
    ) -> Iterator[Done]:
        """Yields each execution when it and all before it are done.

        Closing the generator ends the reading of batches; what is under way is waited for.

        Args:
            batches: Structures of tensors.
            size: Steps of an execution.
            number: Number of the first step of all, for random numbers.
            begin: Called with the number of an execution's first step before it is scheduled.
        """
        waiting: dict[int, tuple[int, int]] = {}
        ready: dict[int, Any] = {}
        states = self.execution.metrics

        def collect() -> Iterator[Done]:
            done, (vector, outputs) = self._dispatcher.result()
            states.add(vector)
            ready[done] = outputs
            while waiting and (first := next(iter(waiting))) in ready:
                yield Done(*waiting.pop(first), ready.pop(first))

        try:
            position = 0
            for steps, data in _grouped(batches, size):
                # Enough for every worker to find more to do while its last result travels.
                while self._dispatcher.open >= 2 * self._dispatcher.workers:
                    yield from collect()
                begin(position)
                key = self._dispatcher.submit(self._work(number + position, steps, data))
                waiting[key] = position, steps
                position += steps
            while waiting:
                yield from collect()
        except GeneratorExit:
            while self._dispatcher.open:
                _, (vector, _) = self._dispatcher.result()
                states.add(vector)
            raise
        except BaseException:
            self._dispatcher.forget()
            raise

    def _work(self, number: int, steps: int, data: list[Any]) -> Callable[[], Any]:
        graph = self.execution.graph(steps)
        first = tf.constant(number, tf.int64)

        def work() -> Any:
            vector, outputs = graph(first, *data)
            return vector.numpy(), tf.nest.map_structure(_array, outputs)

        return work


def _array(value: Any) -> Any:
    return value.numpy() if isinstance(value, tf.Tensor) else value


def _grouped(batches: Iterable[Any], size: int) -> Iterator[tuple[int, list[Any]]]:
    """Yields the number of batches and their components, stacked: `size`, or 1 where they differ."""
    group: list[list[Any]] = []

    def stacked(parts: list[list[Any]]) -> tuple[int, list[Any]]:
        return len(parts), [tf.stack(leaves) for leaves in zip(*parts, strict=True)]

    def alike(a: list[Any], b: list[Any]) -> bool:
        return all(x.shape == y.shape for x, y in zip(a, b, strict=True))

    for batch in batches:
        flat = tf.nest.flatten(batch, expand_composites=True)
        if group and not alike(group[0], flat):
            yield from (stacked([part]) for part in group)
            group = []
        group.append(flat)
        if len(group) == size:
            yield stacked(group)
            group = []
    yield from (stacked([part]) for part in group)


def batch_size(data: list[Any]) -> int:
    """Returns the number of examples of a batch."""
    return int(np.shape(data[0])[0])
