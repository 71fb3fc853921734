"""Runs a step of a model over batches: execution by execution, on all workers at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.engine.parcels import Packed
from tfdist.engine.servers.dispatcher import Dispatcher
from tfdist.engine.servers.execution import Execution

#: No more data than this travels at once.
_EXECUTION_BYTES = 2**28


class Outcome(NamedTuple):
    """What an execution returns from its worker.

    Attributes:
        rows: Number of examples of each of its steps.
        states: States of metrics, one vector for each call of the graph.
        outputs: What each of its steps returned.
        observed: What each step told the metrics that are no sums.
    """

    rows: list[int]
    states: list[Any]
    outputs: list[Any]
    observed: list[Any]


#: Executions: how many steps each is to do, and the work.
Works = Generator[tuple[int, Callable[[], Outcome]], None, None]


class Done(NamedTuple):
    """An execution that has been done.

    Attributes:
        first: Number of its first step within the epoch.
        rows: Number of examples of each of its steps.
        outputs: What each of its steps returned, as arrays.
    """

    first: int
    rows: list[int]
    outputs: list[Any]


class Executor:
    """Runs executions in the order of the batches, and gives their results in that order.

    Args:
        model: A built Keras model under a ParameterServerStrategy.
        step: `model.train_step` or the like.
        spec: Structure of `tf.TypeSpec` of one batch.
        dispatcher: Where to run them.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any], spec: Any, dispatcher: Dispatcher):
        self.execution = Execution(model, step, spec)
        self.spec = spec
        self._dispatcher = dispatcher
        self._here = tf.constant(0).device  # In threads of workers there is another default.

    def over(self, batches: Iterable[Packed], size: int, number: int) -> Works:
        """Yields executions over batches that are read here: number of steps, and the work.

        Args:
            batches: Packed batches.
            size: Steps of an execution.
            number: Number of the first step of all, for random numbers.
        """
        batches = iter(batches)
        first = next(batches, None)
        if first is None:
            return
        size = min(size, max(1, _EXECUTION_BYTES // max(1, first.data.nbytes)))
        for group in _grouped(itertools.chain([first], batches), size):
            yield len(group), self._work(number, group)
            number += len(group)

    def _work(self, number: int, batches: list[Packed]) -> Callable[[], Outcome]:
        graph = self.execution.graph(len(batches))
        arrays = [a for a in self.execution.parcels.join(number, batches) if a is not None]
        rows = [batch.rows for batch in batches]

        def work() -> Outcome:
            return self._outcome(rows, graph, [self._own(array) for array in arrays])

        return work

    def call_listed(self, number: int, batches: list[list[Any]]) -> Outcome:
        """Runs steps on the worker of this thread, over batches that it has.

        Args:
            number: Number of the first step.
            batches: Components of one batch after the other.
        """
        steps = len(batches)
        data = [list(leaves) for leaves in zip(*batches, strict=True)]
        rows = [_rows(leaf.shape) for leaf in data[0]]
        first = self._own(np.array(number, np.int64))
        return self._outcome(rows, self.execution.graph(steps, listed=True), [first, *data])

    def run(
        self,
        works: Works,
        begin: Callable[[int], None] = lambda first: None,
    ) -> Generator[Done, None, None]:
        """Yields each execution when it and all before it are done.

        Closing the generator ends the scheduling; what is under way is waited for.

        Args:
            works: Executions: number of steps, and the work.
            begin: Called with the number of an execution's first step before it is scheduled.
        """
        waiting: dict[int, None] = {}
        ready: dict[int, Outcome] = {}
        scheduled = position = 0

        def collect() -> list[Outcome]:
            key, outcome = self._dispatcher.result()
            ready[key] = outcome
            found = []
            while waiting and (first := next(iter(waiting))) in ready:
                del waiting[first]
                found.append(ready.pop(first))
                self._note(found[-1])
            return found

        try:
            for steps, work in works:
                # Enough for every worker to find more to do while its last result travels.
                while self._dispatcher.open >= 2 * self._dispatcher.workers:
                    for outcome in collect():
                        yield Done(position, outcome.rows, outcome.outputs)
                        position += len(outcome.rows)
                begin(scheduled)
                waiting[self._dispatcher.submit(work)] = None
                scheduled += steps
            while waiting:
                for outcome in collect():
                    yield Done(position, outcome.rows, outcome.outputs)
                    position += len(outcome.rows)
        except GeneratorExit:
            while waiting:
                collect()
            raise
        except BaseException:
            self._dispatcher.forget()
            raise
        finally:
            works.close()

    def _own(self, array: np.ndarray) -> Any:
        """Returns a tensor for this thread alone, which is a worker's.

        A tensor that was sent keeps its copy on the worker, and who lets go of it waits until the
        worker has let go, too: with a worker that is stopped, that must be the thread that waits
        for that worker anyway. It is made on the coordinator: made on a worker's device, a constant
        waits for that worker with the interpreter's lock held.
        """
        with tf.device(self._here):
            return tf.constant(array)

    def _outcome(self, rows: list[int], graph: Any, inputs: list[Any]) -> Outcome:
        states, outputs, observed = graph(*inputs)
        return Outcome(
            rows,
            [states.numpy()],
            [self._home(output) for output in outputs],
            [self._home(each) for each in observed],
        )

    def _home(self, structure: Any) -> Any:
        """Returns arrays of the tensors of a worker, and of ragged and sparse ones copies here."""

        def one(leaf: Any) -> Any:
            if isinstance(leaf, tf.Tensor):
                return leaf.numpy()
            if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
                return tf.nest.map_structure(
                    lambda part: self._own(part.numpy()), leaf, expand_composites=True
                )
            return leaf

        return tf.nest.map_structure(one, structure)

    def _note(self, outcome: Outcome) -> None:
        metrics = self.execution.metrics
        for states in outcome.states:
            metrics.add(states)
        for observed in outcome.observed:
            metrics.observe(self.execution.observers, observed)


def _rows(shape: tf.TensorShape) -> int:
    # Of a ragged tensor these are its values: an estimate, for the mean of a step's own numbers.
    return int(shape[0]) if shape.rank else 1


def _grouped(batches: Iterable[Packed], size: int) -> Iterator[list[Packed]]:
    """Yields groups of `size`; of what is left, each alone: another size is another graph."""
    group: list[Packed] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    for batch in group:
        yield [batch]
