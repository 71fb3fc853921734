"""What a cell is, how its model starts, and the numbers it reports."""

from __future__ import annotations

import re

from cells.data import LAST1
from cells.data import batches
from cells.data import regression
from cells.world import np

CELLS = {}


def cell(name, **expected):
    """Registers a cell; `expected` are absolute values that every world must give."""

    def add(function):
        CELLS[name] = (function, expected)
        return function

    return add


def fill(model):
    """Gives the model weights that depend on nothing but their shapes."""
    r = np.random.RandomState(7)
    values = []
    for variable in model.weights:
        shape = tuple(variable.shape)
        value = r.uniform(-0.7, 0.7, shape).astype("float32")
        if "moving_variance" in variable.path or "gamma" in variable.path:
            value = np.ones(shape, "float32")
        if "seed" in variable.path:
            value = np.asarray(variable.value.numpy())
        values.append(value)
    model.set_weights(values)


def read(variable):
    return np.asarray(variable.value.numpy()).astype("float64").tolist()


def short(variable):
    # Counters depend on what ran before, and scopes on who builds an optimizer.
    return re.sub(r"_\d+(?=[_/]|$)", "", "/".join(variable.path.split("/")[-2:]))


def state(model):
    """Every variable of model and optimizer, in order, under a name that all worlds share."""
    found = {}
    for i, v in enumerate(model.weights):
        if "seed" not in v.path:
            found[f"weights/{i}:{short(v)}"] = read(v)
    if model.optimizer is not None:
        for i, v in enumerate(model.optimizer.variables):
            found[f"slots/{i}:{short(v)}"] = read(v)
    return found


def outcome(model, history=None, **more):
    values = state(model)
    if history is not None:
        for key, value in history.history.items():
            values[f"history/{key}"] = np.asarray(value, "float64").tolist()
    for key, value in more.items():
        values[key] = np.asarray(value, "float64").tolist()
    return values


def fit(model, data, **kwargs):
    return model.fit(data, verbose=0, **kwargs)


def train(model, sizes=LAST1, make=regression, **kwargs):
    return train_arrays(model, sizes, *make(sum(sizes)), **kwargs)


def train_arrays(model, sizes, *arrays, **kwargs):
    return outcome(model, fit(model, batches(sizes, *arrays), **kwargs))
