"""Models that several kinds of cells train."""

from __future__ import annotations

from cells.registry import fill
from cells.world import keras
from cells.world import strategy

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def ready(build, optimizer, loss="mse", metrics=(), filled=True, **compile_args):
    """Builds and compiles a model in the scope.

    Args:
        build: Called there; returns the model.
        optimizer: An optimizer, or a function that makes one in the scope.
        loss: As for `compile`.
        metrics: As for `compile`; "auc" makes a `keras.metrics.AUC` of that name.
        filled: Whether the weights are made to depend on nothing but their shapes.
        **compile_args: As for `compile`.
    """
    with strategy.scope():
        model = build()
        if filled:
            fill(model)
        if not isinstance(metrics, dict):
            metrics = [keras.metrics.AUC(name="auc") if m == "auc" else m for m in metrics]
        optimizer = optimizer() if callable(optimizer) else optimizer
        model.compile(optimizer, loss, metrics=metrics or None, **compile_args)
    return model


def compiled(
    layers, optimizer, loss="mse", metrics=(), inputs=(4,), dtype=None, filled=True, **compile_args
):
    """Returns a sequential model of what `layers()` returns in the scope; see `ready`."""

    def build():
        return keras.Sequential([keras.Input(inputs, dtype=dtype), *layers()])

    return ready(build, optimizer, loss, metrics, filled, **compile_args)


def small_model(optimizer, loss="binary_crossentropy", metrics=("mae", "auc"), **compile_args):
    last = "sigmoid" if loss == "binary_crossentropy" else None
    model = compiled(
        lambda: [
            keras.layers.Dense(8, activation="tanh", name="hidden"),
            keras.layers.Dense(1, activation=last, name="out"),
        ],
        optimizer,
        loss,
        metrics,
        **compile_args,
    )
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model


def classifier(loss="sparse_categorical_crossentropy", metrics=()):
    return compiled(
        lambda: [
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3, activation="softmax"),
        ],
        lambda: SGD(0.1, momentum=0.5),
        loss,
        metrics,
    )
