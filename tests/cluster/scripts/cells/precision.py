"""Numeric types: mixed precision with and without overflow, and double precision."""

from __future__ import annotations

from cells.data import STARVED
from cells.data import regression
from cells.models import SGD
from cells.models import compiled
from cells.models import ready
from cells.registry import cell
from cells.registry import train
from cells.registry import train_arrays
from cells.world import keras


def hidden(dtype):
    return keras.layers.Dense(8, activation="tanh", dtype=dtype)


def typed_model(dtype, optimizer):
    return compiled(
        lambda: [hidden(dtype), keras.layers.Dense(1, dtype=dtype)], optimizer, metrics=["mae"]
    )


@cell("types/mixed_bfloat16")
def mixed_bfloat16():
    return train(typed_model("mixed_bfloat16", SGD(0.05, momentum=0.5)))


@cell("types/mixed_float16")
def mixed_float16():
    # compile() wraps the optimizer in a LossScaleOptimizer only for a model of that policy.
    optimizer = keras.optimizers.LossScaleOptimizer(
        SGD(0.05, momentum=0.5), initial_scale=2.0**8, dynamic_growth_steps=4
    )
    return train(typed_model("mixed_float16", optimizer))


@cell("types/mixed_float16_auto")
def mixed_float16_auto():
    def build():
        inputs = keras.Input((4,))
        outputs = keras.layers.Dense(1, dtype="mixed_float16")(hidden("mixed_float16")(inputs))
        model = keras.Model(inputs, outputs)
        model.dtype_policy = "mixed_float16"
        return model

    model = ready(build, lambda: SGD(0.05), metrics=["mae"])
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return train(model)


@cell("types/mixed_float16_overflow_on_one_replica")
def mixed_float16_overflow():
    x, y = regression(72)
    x[23], x[36], x[60] = 3e3, 3e3, 3e3
    y[23], y[36], y[60] = 3e4, 3e4, 3e4
    optimizer = keras.optimizers.LossScaleOptimizer(
        SGD(0.05, momentum=0.5), initial_scale=2.0**9, dynamic_growth_steps=2
    )
    return train_arrays(typed_model("mixed_float16", optimizer), [12] * 6, x, y)


@cell("types/float64")
def float64():
    return train(typed_model("float64", SGD(0.05, momentum=0.5, clipnorm=0.4)), sizes=STARVED)
