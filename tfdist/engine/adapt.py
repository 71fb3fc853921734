"""Preprocessing layers that are fitted once (`layer.adapt(data)`), the same on every worker.

What such a layer has learned is no weight: a vocabulary, boundaries, or a constant made of weights.
Nothing of Keras makes it the same in several processes, and nothing that is done to weights later
reaches it. So every worker adapts to all of the data, at the same time, and the results are
compared: one that was given other data than the others is refused. (One worker that reads for all
would read as long; the others would wait for it.) Numbers that differ in their last digits only, of
a pipeline without a fixed order or on another kind of processor, become the chief's.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.layers.preprocessing.index_lookup import IndexLookup

from tfdist.cluster import current
from tfdist.cluster import rendezvous
from tfdist.cluster.group import Group
from tfdist.data.sharded import Sharded
from tfdist.data.world import workers_here
from tfdist.errors import ConfigError
from tfdist.errors import DisagreementError

log = logging.getLogger("absl")

Adapt = Callable[..., None]

#: Numbers that differ by less come from the same examples, added up in another order.
_ROUNDING = 1e-5

_calls = itertools.count(1)
_seen: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def make(original: Adapt) -> Adapt:
    """Returns `original(layer, data, ...)` that takes `Sharded` and gives all workers the same."""

    @functools.wraps(original)
    def adapt(self: Any, data: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(data, Sharded):
            data = _inputs(self, data)
        group = _group()
        if group is None:
            original(self, data, *args, **kwargs)
        else:
            _together(group, self, functools.partial(original, self, data, *args, **kwargs))

    return adapt


def facts(model: Any) -> list[str]:
    """Returns what the layers of `model` have learned by `adapt`, or were given in its place."""
    return [_described(layer) for layer in model._flatten_layers() if _is_adapted(layer)]


def _group() -> Group | None:
    """Returns the workers that train the same model together, or None in a process alone."""
    group = current.group()
    return None if group is None or group.size == 1 or workers_here()[0] == 1 else group


def _inputs(layer: Any, data: Sharded) -> Iterator[Any]:
    """Yields the inputs of all examples of one pass, none left out, in the order of the source."""
    is_lookup = isinstance(layer, IndexLookup)
    for batch in data.in_order().whole().iterator(0):
        inputs = batch[0] if type(batch) is tuple else batch
        if isinstance(inputs, (dict, list, tuple)):
            raise ConfigError(
                f"inputs of one tensor for {layer.name!r} to adapt to",
                f"a {type(inputs).__name__} of several",
                'choose one: layer.adapt(data.mapped(lambda x, y: x["name"]))',
            )
        is_vector = tf.is_tensor(inputs) and inputs.shape.rank == 1
        if is_vector and isinstance(layer, keras.layers.Normalization) and layer.axis:
            # The places in a batch would be taken for features.
            raise ConfigError(
                f"examples with an axis {layer.axis[0]} for {layer.name!r} to adapt to",
                "single numbers",
                "Normalization(axis=None), or examples of the shape [1]",
            )
        # A vector would be taken for one document.
        yield tf.expand_dims(inputs, -1) if is_lookup and is_vector else inputs


def _together(group: Group, layer: Any, adapt: Callable[[], None]) -> None:
    what = f"adapt #{next(_calls)} of a {type(layer).__name__}"
    patience = rendezvous.patience_from(os.environ)
    problem: Exception | None = None
    try:
        adapt()
    except Exception as error:  # All must be told, or they would wait for this worker.
        problem = error
    told = {"problem": None if problem is None else f"{type(problem).__name__}: {problem}"[:500]}
    if problem is None:
        exact, floats = _learned(layer)
        told |= {"exact": _digest(exact), "size": _size(layer), "floats": _digest(floats)}
    # Reading may take long, and longer on some: there is no limit while they live.
    everyone = group.all_gather(what, told)
    if problem is not None:
        raise problem
    listed = list(zip(group.tasks, everyone, strict=True))
    failed = [f"{each['problem']} on {task}" for task, each in listed if each["problem"]]
    if failed:
        raise ConfigError(f"data that a {type(layer).__name__} can adapt to", "; ".join(failed))
    same = len({each["exact"] for each in everyone}) == 1
    if same and len({each["floats"] for each in everyone}) == 1:
        return
    if same:
        values = group.all_gather(f"{what}: numbers", [f.tolist() for f in floats], patience)
        chief = [np.asarray(each, np.float64) for each in values[group.chief_rank]]
        if all(_is_close(each, chief) for each in values):
            log.info("%s: the last digits differ between workers; all take the chief's", what)
            _take(layer, chief)
            return
    sizes = ", ".join(f"{each['size']} ({each['exact'][:8]}) on {task}" for task, each in listed)
    raise DisagreementError(
        f"the same result of {what} on every worker",
        f"other data on some: {sizes}",
        "give adapt all of the data on every worker, not this worker's part, or what "
        "tfdist.data.shard has returned; seed what is drawn at random",
    )


def _is_adapted(layer: Any) -> bool:
    kinds = (IndexLookup, keras.layers.Normalization, keras.layers.Discretization)
    return isinstance(layer, (*kinds, keras.layers.TextVectorization))


def _learned(layer: Any) -> tuple[list[Any], list[np.ndarray]]:
    """Returns what a layer has learned: what must be the same, and numbers that are computed."""
    layer = getattr(layer, "_lookup_layer", layer)
    if isinstance(layer, IndexLookup):
        tokens = _tokens(layer)
        weights = getattr(layer, "idf_weights", None)
        floats = [] if weights is None else [np.asarray(weights.numpy())]
        return [len(tokens), tokens.tolist()], floats
    if isinstance(layer, keras.layers.Discretization):
        boundaries = np.asarray(layer.bin_boundaries or [], np.float64)
        return [len(boundaries)], [boundaries]
    if layer.input_mean is not None:
        return [], [np.asarray(layer.input_mean), np.asarray(layer.input_variance)]
    if not layer.built:
        return [], []
    mean, variance = (each.value.numpy() for each in (layer.adapt_mean, layer.adapt_variance))
    return [list(mean.shape)], [mean, variance]


def _tokens(layer: Any) -> np.ndarray:
    if int(layer.lookup_table.size()) == 0:
        return np.zeros([0])
    keys, values = (each.numpy() for each in layer.lookup_table.export())
    tokens, places = (values, keys) if layer.invert else (keys, values)
    in_order: np.ndarray = tokens[np.argsort(places)]
    return in_order


def _size(layer: Any) -> str:
    layer = getattr(layer, "_lookup_layer", layer)
    if isinstance(layer, IndexLookup):
        return f"{layer.vocabulary_size()} tokens"
    if isinstance(layer, keras.layers.Discretization):
        boundaries = [float(f"{each:.4g}") for each in layer.bin_boundaries or []]
        return f"the boundaries {boundaries[:4]}"
    means = _learned(layer)[1][:1]
    return f"the means {[float(f'{each:.6g}') for each in np.ravel(means)[:4]]}"


def _described(layer: Any) -> str:
    inner = getattr(layer, "_lookup_layer", layer)
    # Vocabularies are large, and a new one is a new table.
    table = getattr(inner, "lookup_table", None)
    if table is not None and inner in _seen and _seen[inner][0] is table:
        return _seen[inner][1]
    exact, floats = _learned(inner)
    text = f"a {type(layer).__name__} with {_size(inner)} ({_digest([exact, *floats])[:8]})"
    if table is not None:
        _seen[inner] = table, text
    return text


def _digest(values: list[Any]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for each in values:
        raw = each.tobytes() if isinstance(each, np.ndarray) else repr(each).encode()
        found.update(f"{len(raw)} ".encode() + raw)
    return found.hexdigest()


def _is_close(values: list[Any], chief: list[np.ndarray]) -> bool:
    pairs = [
        (np.asarray(mine, np.float64), theirs) for mine, theirs in zip(values, chief, strict=False)
    ]
    if len(values) != len(chief) or any(mine.shape != theirs.shape for mine, theirs in pairs):
        return False
    return all(
        np.allclose(mine, theirs, _ROUNDING, _ROUNDING * _scale(chief), equal_nan=True)
        for mine, theirs in pairs
    )


def _scale(values: list[np.ndarray]) -> float:
    """Returns how large the numbers are, for those among them that are nearly 0."""
    sizes = [float(np.max(np.abs(each))) for each in values if each.size]
    return min([1.0, *sizes])


def _take(layer: Any, floats: list[np.ndarray]) -> None:
    layer = getattr(layer, "_lookup_layer", layer)
    if isinstance(layer, IndexLookup):
        layer.idf_weights.assign(floats[0].astype(layer.idf_weights.dtype.as_numpy_dtype))
        layer.idf_weights_const = layer.idf_weights.value()
    elif isinstance(layer, keras.layers.Discretization):
        layer.bin_boundaries = floats[0].tolist()
    else:
        layer.adapt_mean.assign(floats[0])
        layer.adapt_variance.assign(floats[1])
        layer.finalize_state()
