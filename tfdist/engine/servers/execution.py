"""The graph of an execution: a few steps in a row on one worker, the weights fetched anew for each.

In a step, Keras's own code and the user's run on a copy of the variables (`LocalValues`), fetched
from each server in one message. What they assign is sent back as what it adds, in one operation
that cannot lose another worker's (Keras writes counters and statistics by reading them first).
Metrics begin at nothing in every execution and come back to the coordinator with its result, so
that each execution counts exactly once, even if a worker dies on the way and another does it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfdist.engine.parcels import Parcels
from tfdist.engine.replicas import none_if_optional
from tfdist.engine.scope import optimizers_of
from tfdist.engine.scope import parts_of
from tfdist.engine.servers import server_step
from tfdist.engine.servers import updates
from tfdist.engine.servers.local_values import LocalValues
from tfdist.engine.servers.metric_states import MetricStates
from tfdist.engine.servers.packing import Packer
from tfdist.engine.servers.server_step import ServerStep
from tfdist.engine.servers.tables import is_table

log = logging.getLogger("absl")

_STRIDE = 0x632BE5AB  # Odd, so that no two steps meet; an arbitrary number of 31 bits.


class Fetch:
    """Reads the variables of a model from their servers, one message from each.

    Args:
        variables: Keras variables.

    Attributes:
        servers: Their devices.
        bytes: Size of all variables.
    """

    def __init__(self, variables: Sequence[Any]):
        self._servers: dict[str, list[Any]] = {}
        for variable in variables:
            self._servers.setdefault(variable._value.device, []).append(variable)
        self.servers = list(self._servers)
        self.bytes = sum(int(np.prod(v.shape)) * v._value.dtype.size for v in variables)
        self._packers = {
            device: Packer([v.shape for v in there], [v._value.dtype for v in there])
            for device, there in self._servers.items()
        }

    def __call__(self) -> list[tuple[Any, Any]]:
        """Returns pairs of variable and value."""
        values: list[tuple[Any, Any]] = []
        for device, variables in self._servers.items():
            with tf.device(device):
                vectors = self._packers[device].pack([v._value.read_value() for v in variables])
            here = self._packers[device].unpack([tf.identity(vector) for vector in vectors])
            values += zip(variables, here, strict=True)
        return values


class Execution:
    """Traces executions of one kind of step of a model.

    Args:
        model: A built Keras model under a ParameterServerStrategy.
        step: `model.train_step` or the like.
        spec: Structure of `tf.TypeSpec` of one batch.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any], spec: Any):
        self._strategy = model.distribute_strategy
        self._step = step
        self._returns_logs = step != model.predict_step
        self._spec = tree.map_structure(none_if_optional, spec)
        self.parcels = Parcels(spec)
        self.metrics = MetricStates(model)
        shared = [v for v in _read_by_steps(model) if v not in self.metrics and not is_table(v)]
        self._fetch = Fetch(shared)
        log.info(
            "a step fetches %.2f MB of dense weights from %d servers, and rows of %d tables",
            self._fetch.bytes / 1e6,
            len(self._fetch.servers),
            sum(map(is_table, model.variables)),
        )
        self._seeds = [v for v in shared if "seed_generator" in v.path]
        self._graphs: dict[tuple[int, bool], Any] = {}
        self._one: Any = None
        #: What a step returns, where that is a dict.
        self.log_names: list[str] | None = None
        #: The metrics that are no sums, in the order of what `observed` holds for them.
        self.observers: list[Any] = []

    def graph(self, steps: int, *, listed: bool = False) -> Any:
        """Returns the concrete function of `steps` steps.

        It takes what `parcels.join` returns. It returns the states of metrics as one vector, what
        each step returned, and what each step told the metrics that are no sums.

        Args:
            steps: Number of steps.
            listed: Whether it takes the number of the first step (int64 scalar) and each component
                of the data as a list of one tensor a step.
        """
        key = steps, listed
        if key not in self._graphs:
            with self._strategy.scope():
                # Else TensorFlow warns that a step runs on the coordinator.
                self._strategy.extended._being_scheduled = True
                self._graphs[key] = self._trace(steps, listed)
                self._strategy.extended._being_scheduled = False
        return self._graphs[key]

    def _trace(self, steps: int, listed: bool) -> Any:
        if self._one is None:
            # A function of its own, so that Python runs once, however many steps there are.
            self._one = tf.function(self._run_one, autograph=False)
        leaves = tf.nest.flatten(self._spec, expand_composites=True)

        def run(number: Any, batches: list[Any]) -> Any:
            states, outputs, observed = self.metrics.start(), [], []
            for index, batch in enumerate(batches):
                states, output, seen = self._one(number + index, states, batch)
                outputs.append(output)
                observed.append(seen)
            return self.metrics.pack(states), outputs, observed

        def run_parcel(data: Any, texts: Any = None) -> Any:
            return run(*self.parcels.open(data, texts, steps))

        def run_listed(number: Any, *data: Any) -> Any:
            return run(number, [[component[i] for component in data] for i in range(steps)])

        if not listed:
            function = tf.function(run_parcel, autograph=False)
            return function.get_concrete_function(*self.parcels.signature())
        arguments = [[tf.TensorSpec(leaf.shape, leaf.dtype)] * steps for leaf in leaves]
        function = tf.function(run_listed, autograph=False)
        return function.get_concrete_function(tf.TensorSpec([], tf.int64), *arguments)

    def _run_one(self, number: Any, states: list[Any], data: list[Any]) -> Any:
        return self._strategy.run(self._on_worker, args=(number, states, data))

    def _on_worker(self, number: Any, states: list[Any], data: list[Any]) -> Any:
        batch = tf.nest.pack_sequence_as(self._spec, data, expand_composites=True)
        fetched = self._fetch()
        values = LocalValues([*fetched, *self.metrics.pairs(states)])
        for state in self._seeds:
            values.state_mapping[id(state)] = _seed_of_step(state, values, number)
        before = {id(variable): value for variable, value in fetched}
        step = ServerStep(values)
        with server_step.tracing(step), values:
            output = tree.map_structure(_read, self._step(batch))
            if self._returns_logs and isinstance(output, dict):
                output = _flat(output)
                # Metrics come back as states; every further tensor would be one more message.
                self.log_names = list(output)
                known = self.metrics.told(values.assigned)
                output = {name: value for name, value in output.items() if name not in known}
        self._send(step, before)
        self.observers = [metric for metric, _ in step.observed]
        states = [values.state_mapping[id(v)] for v in self.metrics.variables]
        return states, output, [arguments for _, arguments in step.observed]

    def _send(self, step: ServerStep, before: dict[int, Any]) -> None:
        """Adds to the variables on the servers what the step has added to its copies."""
        updates.check_assigned(step)
        own = {id(v) for v in [*self._seeds, *self.metrics.variables]} | set(step.applied)
        servers: dict[str, list[tuple[Any, Any]]] = {}
        for key, variable in step.values.assigned.items():
            if key in own:
                continue
            value = step.values.state_mapping[key]
            if key not in before or value.dtype == tf.bool:
                variable._value.assign(value)
                continue
            pair = variable, value - before[key]
            servers.setdefault(variable._value.device, []).append(pair)
        for device, pairs in servers.items():
            packer = Packer([v.shape for v, _ in pairs], [value.dtype for _, value in pairs])
            vectors = packer.pack([value for _, value in pairs])
            with tf.device(device):
                there = packer.unpack([tf.identity(vector) for vector in vectors])
                for (variable, _), change in zip(pairs, there, strict=True):
                    variable._value.assign_add(change)


def _read_by_steps(model: Any) -> list[Any]:
    """Returns the variables that code of a step may read: all but the slots of optimizers."""
    found = list(model.variables)
    for optimizer in optimizers_of(model):
        for part in parts_of(optimizer):
            rate = getattr(part, "_learning_rate", None)
            found += [v for v in (part.iterations, rate) if isinstance(v, keras.Variable)]
    return list({id(v): v for v in found}.values())


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs without dicts inside, as Keras tells them: of `{m.name: m.result() ...}`."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def _read(value: Any) -> Any:
    return tf.convert_to_tensor(value.value) if isinstance(value, keras.Variable) else value


def _seed_of_step(state: Any, values: LocalValues, number: Any) -> Any:
    """Returns a state of a seed generator that no other step has, and every run from one seed."""
    value = values.state_mapping[id(state)]
    mixed = tf.cast(number * _STRIDE, value.dtype)
    return tf.bitwise.bitwise_xor(value, tf.stack([mixed, tf.zeros_like(mixed)]))
