"""The optimizer's update, run on the servers that hold the variables.

Gradients leave the worker in one message for each server, with the learning rate and the step's
number beside them, and the optimizer's own `update_step` runs over there. Gradients of tables are
rows: they travel as they are, and only their rows are updated.

Workers do not wait for each other: two updates of one variable may overlap, as in every
asynchronous training. Counters cannot lose a step, since they are added to by one operation.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.engine.servers.local_values import LocalValues
from tfdist.engine.servers.packing import Packer
from tfdist.engine.servers.server_step import ServerStep
from tfdist.errors import UnsupportedError
from tfdist.optimizers.row_sparse import apply_rows
from tfdist.optimizers.wrapper import RowSparse


def apply(optimizer: Any, gradients: list[Any], variables: list[Any], step: ServerStep) -> None:
    """Updates variables by their gradients, each on its server.

    Args:
        optimizer: A Keras optimizer.
        gradients: Tensor or `tf.IndexedSlices` for each variable.
        variables: Keras variables.
        step: The step that the gradients come from.

    Raises:
        UnsupportedError: The optimizer accumulates gradients.
    """
    if optimizer.gradient_accumulation_steps:
        raise UnsupportedError(
            "an optimizer without gradient_accumulation_steps under parameter servers, whose "
            "workers do not take steps together",
            f"{optimizer.gradient_accumulation_steps} steps",
            "use larger batches instead",
        )
    _send_assigned(variables, step)
    step.applied.update((id(variable), variable) for variable in variables)
    # Keras makes a dense gradient of the whole table to clip its rows.
    gradients = RowSparse(optimizer)._clip_gradients(gradients)
    # An optimizer's own part of the step (Nadam's running product) comes before the servers' part.
    optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)


def _send_assigned(variables: list[Any], step: ServerStep) -> None:
    """Adds on the servers what the step has added to weights before their update."""
    for variable in variables:
        key = id(variable)
        if key not in step.values.assigned:
            continue
        if key in step.applied or key not in step.before:
            continue  # Of no effect: refused in the end.
        del step.values.assigned[key]
        change = step.values.state_mapping[key] - step.before[key]
        with tf.device(variable._value.device):
            variable._value.assign_add(tf.identity(change))


def check_assigned(step: ServerStep) -> None:
    """Refuses what would be lost.

    Args:
        step: A step that is done.

    Raises:
        UnsupportedError: It has assigned to weights after their update. Keras itself does so for
            a constraint, which has run on the server.
    """
    for key, variable in step.applied.items():
        if key in step.values.assigned and variable.constraint is None:
            raise UnsupportedError(
                "a step that assigns to no weight after the optimizer's update of it, which a "
                "parameter server does",
                f"an assignment to {variable.path!r}",
                "give its layer a constraint, for example kernel_constraint, which runs there",
            )


def update_on_servers(
    optimizer: Any, gradients: list[Any], variables: list[Any], learning_rate: Any
) -> None:
    """Runs `optimizer.update_step` for each variable on its server.

    Args:
        optimizer: A Keras optimizer.
        gradients: As of `apply`, clipped.
        variables: As of `apply`.
        learning_rate: Scalar tensor on the worker.
    """
    number = tf.convert_to_tensor(optimizer.iterations.value)
    rate = tf.convert_to_tensor(learning_rate)
    servers: dict[str, list[tuple[Any, Any]]] = {}
    for gradient, variable in zip(gradients, variables, strict=True):
        servers.setdefault(variable._value.device, []).append((gradient, variable))
    for device, pairs in servers.items():
        dense = [(g, v) for g, v in pairs if not isinstance(g, tf.IndexedSlices)]
        rows = [(g, v) for g, v in pairs if isinstance(g, tf.IndexedSlices)]
        sent = [*(g for g, _ in dense), rate, number]
        shapes = [*(v.shape for _, v in dense), rate.shape, number.shape]
        packer = Packer(shapes, [tensor.dtype for tensor in sent])
        vectors = packer.pack(sent)
        with tf.device(device):
            *arrived, rate_there, number_there = packer.unpack(list(map(tf.identity, vectors)))
            with LocalValues([(optimizer.iterations, number_there)]):
                for gradient, (_, variable) in zip(arrived, dense, strict=True):
                    _update(optimizer, gradient, variable, rate_there)
                for slices, variable in rows:
                    if optimizer.use_ema:
                        raise _no_averages(variable)
                    there = tf.IndexedSlices(
                        tf.identity(slices.values), tf.identity(slices.indices), variable.shape
                    )
                    apply_rows(optimizer, variable, there, rate_there)


def _update(optimizer: Any, gradient: Any, variable: Any, rate: Any) -> None:
    storage = variable._value
    if optimizer.weight_decay is not None and optimizer._use_weight_decay(variable):
        decay = tf.cast(optimizer.weight_decay, storage.dtype) * tf.cast(rate, storage.dtype)
        storage.assign_sub(storage * decay)
    optimizer.update_step(gradient, storage, rate)
    if variable.constraint is not None:
        storage.assign(variable.constraint(storage.read_value()))
    if optimizer.use_ema:
        _average(optimizer, variable)


def _no_averages(table: Any) -> UnsupportedError:
    return UnsupportedError(
        "an optimizer without use_ema for tables, whose rows it would average one by one at "
        "different times",
        f"use_ema=True and the table {table.path!r}",
        "leave use_ema out",
    )


def _average(optimizer: Any, variable: Any) -> None:
    storage = variable._value
    index = optimizer._get_variable_index(variable)
    average = optimizer._model_variables_moving_average[index]._value
    number = tf.convert_to_tensor(optimizer.iterations.value)
    momentum = tf.cast(number != 0, average.dtype) * optimizer.ema_momentum
    average.assign(momentum * average + (1 - momentum) * tf.cast(storage, average.dtype))
    every = optimizer.ema_overwrite_frequency
    if every:
        value = tf.cast(average, storage.dtype)
        storage.assign(tf.where((number + 1) % every == 0, value, storage))
