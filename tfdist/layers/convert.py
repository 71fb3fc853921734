"""`shard_embeddings`: a model with Keras's embeddings made one with ours."""

from __future__ import annotations

from typing import Any

import keras
from keras import tree

from tfdist.errors import UnsupportedError
from tfdist.layers.embedding import Embedding


def shard_embeddings(model: Any, **options: Any) -> Any:
    """Returns the model with a `tfdist.layers.Embedding` for each `keras.layers.Embedding`.

    Names and weights stay. A Functional or Sequential model is cloned, with models inside of it;
    it is compiled if `model` was, with a new optimizer. Of other models and layers the attributes
    are replaced in place, and `model` itself is returned: do it before `compile`. Layers of a
    class derived from `keras.layers.Embedding` stay as they are.

    Call it in `strategy.scope()`: the new variables belong to the current strategy.

    Args:
        model: A `keras.Model`.
        **options: `num_shards`, `hash_ids` and `combiner` of the new layers.

    Raises:
        UnsupportedError: An embedding is where it cannot be replaced, is quantized or has LoRA, or
            `model` is changed in place and its optimizer has been built.

    Example:
    ```python
    with strategy.scope():
        model = tfdist.layers.shard_embeddings(keras.models.load_model("model.keras"))
    ```
    """
    made: dict[int, Any] = {}
    converted = _model(model, options, made)
    left = [layer.path for layer in converted._flatten_layers() if type(layer) is _KERAS]
    if left:
        raise UnsupportedError(
            "each keras.layers.Embedding in an attribute of its layer, or in a list, tuple or "
            "dict that is one",
            f"elsewhere: {left}",
            "use tfdist.layers.Embedding in the model's own code",
        )
    return converted


_KERAS = keras.layers.Embedding


def _model(model: Any, options: dict[str, Any], made: dict[int, Any]) -> Any:
    if not _is_graph(model):
        _replace_inside(model, options, made)
        return model

    def clone(layer: Any) -> Any:
        # A layer that is called twice comes twice.
        if id(layer) not in made:
            made[id(layer)] = _clone(layer, options, made)
        return made[id(layer)]

    # Left to itself, Keras forgets which inputs are sparse and which ragged.
    inputs = tree.map_structure(_like_input, model.input) if _has_inputs(model) else None
    new = keras.models.clone_model(model, input_tensors=inputs, clone_function=clone)
    if type(new) is not type(model):
        raise UnsupportedError(
            "a model whose class takes inputs and outputs, to clone it",
            f"{type(model).__name__}, whose clone would be a {type(new).__name__}",
            "use tfdist.layers.Embedding in the model's own code",
        )
    for layer in model.layers:
        if id(layer) in made:
            _copy_weights(layer, made[id(layer)])
    return new


def _is_graph(layer: Any) -> bool:
    """Whether Keras can clone a layer by the layers that it is made of."""
    return isinstance(layer, keras.Sequential) or (
        isinstance(layer, keras.Model) and isinstance(layer, keras.Function)
    )


def _has_inputs(model: Any) -> bool:
    return not isinstance(model, keras.Sequential) or bool(getattr(model, "inputs", None))


def _like_input(tensor: Any) -> Any:
    return keras.Input(
        batch_shape=tensor.shape,
        dtype=tensor.dtype,
        sparse=tensor.sparse,
        ragged=tensor.ragged,
        name=tensor.name,
    )


def _clone(layer: Any, options: dict[str, Any], made: dict[int, Any]) -> Any:
    if type(layer) is _KERAS:
        return _embedding(layer, options)
    if _is_graph(layer):
        return _model(layer, options, made)
    new = type(layer).from_config(layer.get_config())
    if isinstance(new, keras.layers.Layer):
        _replace_inside(new, options, {})
    return new


def _embedding(layer: Any, options: dict[str, Any]) -> Any:
    config = {**layer.get_config(), **options}
    new = Embedding.from_config(config)
    new.trainable = layer.trainable
    return new


def _replace_inside(layer: Any, options: dict[str, Any], made: dict[int, Any]) -> None:
    """Puts new embeddings into the attributes of a layer, and of those inside of it."""
    if not any(type(inner) is _KERAS for inner in layer._flatten_layers()):
        return
    optimizer = getattr(layer, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise UnsupportedError(
            "a model whose optimizer has not been built, to change it in place",
            f"{type(layer).__name__} {layer.name!r}, trained or loaded with its optimizer",
            "call shard_embeddings before compile",
        )

    def replaced(value: Any) -> Any:
        """Returns what takes the place of a value; itself where nothing does."""
        if type(value) is _KERAS:
            if id(value) not in made:
                made[id(value)] = _embedding(value, options)
                if value.built:
                    made[id(value)].build()
                    _copy_weights(value, made[id(value)])
            return made[id(value)]
        if _is_graph(value):
            if not any(type(inner) is _KERAS for inner in value._flatten_layers()):
                return value
            if id(value) not in made:
                made[id(value)] = _model(value, options, made)
            return made[id(value)]
        if isinstance(value, keras.layers.Layer):
            _replace_inside(value, options, made)
            return value
        if isinstance(value, dict):
            new = {key: replaced(item) for key, item in value.items()}
            return new if any(new[key] is not value[key] for key in new) else value
        if isinstance(value, (list, tuple)):
            items = [replaced(item) for item in value]
            changed = any(a is not b for a, b in zip(items, value, strict=True))
            return (tuple(items) if isinstance(value, tuple) else items) if changed else value
        return value

    for name, value in list(vars(layer).items()):
        # Keras's own lists of what is tracked follow from the attributes.
        if name in ("_layers", "_tracker", "_metrics") or name.startswith("_self_"):
            continue
        new = replaced(value)
        if new is not value:
            for old in tree.flatten(value):
                if id(old) in made:
                    layer._tracker.unlock()
                    layer._tracker.untrack(old)
            setattr(layer, name, new)


def _copy_weights(old: Any, new: Any) -> None:
    if not old.built or _is_graph(old):
        return  # Of models inside of a model the layers have been copied one by one.
    if isinstance(new, Embedding):
        new.build()
        new.set_weights(old.get_weights())
    elif any(isinstance(inner, Embedding) for inner in new._flatten_layers()):
        _copy_inside(old, new)
    elif old.weights:
        new.set_weights(old.get_weights())


def _copy_inside(old: Any, new: Any) -> None:
    """Copies a layer's weights where an embedding inside of it has been replaced."""
    store: dict[str, Any] = {}
    old.save_own_variables(store)
    if store:
        new.load_own_variables(store)
    for before, after in zip(old._layers, new._layers, strict=True):
        _copy_weights(before, after)
