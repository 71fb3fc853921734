"""Runs a step of a model over batches: execution by execution, on all workers at once."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tfdist.engine.servers.dispatcher import Dispatcher
from tfdist.engine.servers.execution import Execution


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

    def over(self, batches: Iterable[Any], size: int, number: int) -> Works:
        """Yields executions over batches that are read here: number of steps, and the work.

        Args:
            batches: Structures of tensors.
            size: Steps of an execution.
            number: Number of the first step of all, for random numbers.
        """
        for steps, data in _grouped(batches, size):
            yield steps, self._work(number, steps, data)
            number += steps

    def _work(self, number: int, steps: int, data: list[Any]) -> Callable[[], Outcome]:
        # Both are made here, not in the threads of workers: a constant that is made on a worker's
        # device waits for that worker with the interpreter's lock held.
        graph = self.execution.graph(steps)
        first = number_of(number)
        rows = [_rows(data[0].shape[1:])] * steps

        def work() -> Outcome:
            # A tensor keeps the copy of it on a worker, and who lets go of the tensor waits until
            # the worker has let go, too: so it is this thread's own.
            with tf.device(first.device):
                own = [tf.identity(leaf) for leaf in (first, *data)]
            return _outcome(rows, graph, own[0], own[1:])

        return work

    def call_listed(self, first: Any, batches: list[list[Any]]) -> Outcome:
        """Runs steps on the worker of this thread, over batches that it has.

        Args:
            first: Number of the first step, as of `number_of`.
            batches: Components of one batch after the other.
        """
        steps = len(batches)
        data = [list(leaves) for leaves in zip(*batches, strict=True)]
        rows = [_rows(leaf.shape) for leaf in data[0]]
        return _outcome(rows, self.execution.graph(steps, listed=True), first, data)

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

    def _note(self, outcome: Outcome) -> None:
        metrics = self.execution.metrics
        for states in outcome.states:
            metrics.add(states)
        for observed in outcome.observed:
            metrics.observe(self.execution.observers, observed)


def _rows(shape: tf.TensorShape) -> int:
    # Of a ragged tensor these are its values: an estimate, for the mean of a step's own numbers.
    return int(shape[0]) if shape.rank else 1


def number_of(step: int) -> Any:
    """Returns the number of a step as graphs take it; to be called outside of workers' threads."""
    return tf.constant(step, tf.int64)


def _outcome(rows: list[int], graph: Any, first: Any, data: list[Any]) -> Outcome:
    states, outputs, observed = graph(first, *data)
    return Outcome(
        rows,
        [states.numpy()],
        [_arrays(output) for output in outputs],
        [_arrays(each) for each in observed],
    )


def _arrays(structure: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, structure
    )


def _grouped(batches: Iterable[Any], size: int) -> Iterator[tuple[int, list[Any]]]:
    """Yields a number of batches, `size` or 1 where they differ, and their stacked components."""
    group: list[list[Any]] = []

    def alike(a: list[Any], b: list[Any]) -> bool:
        return all(x.shape == y.shape for x, y in zip(a, b, strict=True))

    def alone() -> Iterator[tuple[int, list[Any]]]:
        for flat in group:
            yield 1, [tf.expand_dims(leaf, 0) for leaf in flat]

    for batch in batches:
        flat = tf.nest.flatten(batch, expand_composites=True)
        if group and not alike(group[0], flat):
            yield from alone()
            group = []
        group.append(flat)
        if len(group) == size:
            yield size, [tf.stack(leaves) for leaves in zip(*group, strict=True)]
            group = []
    yield from alone()
