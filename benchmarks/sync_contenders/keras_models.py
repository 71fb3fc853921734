"""The models in Keras; the same code for Keras 3 on TensorFlow or JAX and for Keras 2."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from workloads import MLP
from workloads import WORKLOADS
from workloads import ResNet
from workloads import Transformer


def build(keras: ModuleType, name: str) -> Any:
    """Returns an uncompiled model.

    Args:
        keras: The module `keras` or `tf_keras`.
        name: A name of `workloads.WORKLOADS`.
    """
    model = WORKLOADS[name]
    if isinstance(model, MLP):
        return _mlp(keras, model)
    if isinstance(model, ResNet):
        return _resnet(keras, model)
    return _transformer(keras, model)


def _mlp(keras: Any, model: MLP) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((model.features,)),
            *[layers.Dense(units, "relu") for units in model.hidden],
            layers.Dense(model.classes),
        ]
    )


def _resnet(keras: Any, model: ResNet) -> Any:
    layers = keras.layers

    def convolve(x: Any, width: int, kernel: int, stride: int) -> Any:
        x = layers.Conv2D(width, kernel, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(epsilon=1e-5)(x)

    inputs = keras.Input((model.size, model.size, 3))
    x = layers.ReLU()(convolve(inputs, model.widths[0], 3, 1))
    for stage, width in enumerate(model.widths):
        for block in range(model.blocks):
            stride = 2 if stage and not block else 1
            y = layers.ReLU()(convolve(x, width, 3, stride))
            y = convolve(y, width, 3, 1)
            if stride > 1:
                x = convolve(x, width, 1, stride)
            x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(model.classes)(x))


def _transformer(keras: Any, model: Transformer) -> Any:
    layers = keras.layers

    class Positions(layers.Layer):  # type: ignore[misc]
        """Adds a learned vector for each position."""

        def build(self, shape: Any) -> None:
            """Makes the table."""
            self.table = self.add_weight(
                shape=(model.length, model.width), initializer="uniform", name="table"
            )

        def call(self, x: Any) -> Any:
            """Adds the table to every example."""
            return x + self.table

    inputs = keras.Input((model.length,), dtype="int32")
    x = Positions()(layers.Embedding(model.vocabulary, model.width)(inputs))
    for _ in range(model.layers):
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        attention = layers.MultiHeadAttention(model.heads, model.width // model.heads)
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        y = layers.Dense(model.width)(layers.Dense(model.hidden, "relu")(y))
        x = layers.Add()([x, y])
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    return keras.Model(inputs, layers.Dense(model.vocabulary)(x))
