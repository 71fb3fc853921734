"""Brings variables that were made outside a strategy's scope into it.

Keras creates an optimizer's counter and learning rate, and a metric's totals, in the constructor.
Objects built outside `strategy.scope()` then mix with variables made inside, and training stops
with "Mixing different tf.distribute.Strategy objects" or goes on with wrong counters. Nothing but
the place of creation is wrong with them, so they are created again inside, with their values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.engine import replicas

log = logging.getLogger("absl")


def adopt(model: Any, strategy: Any) -> None:
    """Re-creates in the scope of `strategy` what `model` trains with and was made outside it.

    Args:
        model: A Keras model that was created inside the scope (or is to be used as if it was).
        strategy: Its `tf.distribute.Strategy`.
    """
    for optimizer in optimizers_of(model):
        for each in parts_of(optimizer):
            each._distribution_strategy = strategy
        _recreate(optimizer.variables, strategy, f"optimizer {optimizer.name!r}")
    if _recreate(model.variables, strategy, f"model {model.name!r}"):
        for optimizer in optimizers_of(model):
            _find_variables_again(optimizer)
    for metric in model.metrics:
        _recreate(metric.variables, strategy, f"metric {metric.name!r}")


def join_current(model: Any) -> None:
    """Lets a model that was made outside any scope train under the strategy whose scope is open."""
    if getattr(model, "_distribute_strategy", None) is None and tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
        if replicas.is_synchronous(strategy) or replicas.is_asynchronous(strategy):
            model._distribute_strategy = strategy


def optimizers_of(model: Any) -> list[Any]:
    """Returns the compiled optimizer and those that the model keeps as attributes."""
    found = [model.optimizer] if getattr(model, "optimizer", None) is not None else []
    found += [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]
    unique: list[Any] = []
    for optimizer in found:
        if isinstance(optimizer, keras.optimizers.Optimizer) and not any(
            optimizer is other for other in unique
        ):
            unique.append(optimizer)
    return unique


def variables_of(model: Any) -> list[Any]:
    """Returns the variables of `model` and of the optimizers that train it."""
    return [*model.variables, *(v for each in optimizers_of(model) for v in each.variables)]


def parts_of(optimizer: Any) -> Iterable[Any]:
    """Yields `optimizer` and the optimizers within it."""
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    for each in [inner] if inner is not None else getattr(optimizer, "optimizers", []):
        yield from parts_of(each)


def _find_variables_again(optimizer: Any) -> None:
    # A built optimizer finds the slots of a variable by the identity of its storage.
    for each in parts_of(optimizer):
        if each.built and getattr(each, "_trainable_variables", None):
            each._trainable_variables_indices = {
                each._var_key(variable): index
                for index, variable in enumerate(each._trainable_variables)
            }


def _recreate(variables: Iterable[Any], strategy: Any, owner: str) -> bool:
    outside = [v for v in variables if _is_outside(v, strategy)]
    if not outside:
        return False
    with tf.init_scope(), strategy.scope():
        for variable in outside:
            variable._initialize(variable.value.numpy())
    log.info("%s was built outside strategy.scope(); moved it in", owner)
    return True


def _is_outside(variable: Any, strategy: Any) -> bool:
    value = getattr(variable, "_value", None)
    if not isinstance(value, tf.Variable):
        return False
    return getattr(value, "_distribute_strategy", None) is not strategy


def is_without_strategy(model: Any) -> bool:
    """Whether `model` was built outside every strategy's scope, or is no model yet."""
    return getattr(model, "_distribute_strategy", None) is None
