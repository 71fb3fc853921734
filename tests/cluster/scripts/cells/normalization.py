"""Batch normalisation over replicas, even, uneven and with few rows."""

from __future__ import annotations

from cells.data import STARVED
from cells.models import SGD
from cells.models import compiled
from cells.registry import cell
from cells.registry import train
from cells.world import keras
from cells.world import np


def normalized(synchronized=True, optimizer=None, **kwargs):
    return compiled(
        lambda: [
            keras.layers.Dense(6, use_bias=False),  # A bias here has no gradient but rounding.
            keras.layers.BatchNormalization(momentum=0.8, synchronized=synchronized, **kwargs),
            keras.layers.Activation("tanh"),
            keras.layers.Dense(1),
        ],
        optimizer or (lambda: SGD(0.05, momentum=0.5)),
        metrics=["mae"],
    )


@cell("batch_norm/synchronized_even")
def normalized_even():
    return train(normalized(), sizes=[12] * 6, epochs=2)


@cell("batch_norm/synchronized_uneven")
def normalized_uneven():
    return train(normalized(), sizes=[12, 11, 7, 5, 12, 4])


@cell("batch_norm/synchronized_few_rows")
def normalized_few():
    return train(normalized(epsilon=0.01), sizes=[12, 3, 12, 2, 5])


@cell("batch_norm/synchronized_clip_accumulation")
def normalized_accumulation():
    return train(
        normalized(optimizer=SGD(0.05, clipnorm=0.2, gradient_accumulation_steps=2)),
        sizes=[12, 11, 7, 5, 12],
    )


@cell("batch_norm/unsynchronized_finite", finite=1)
def normalized_apart():
    model = normalized(synchronized=False)
    values = train(model, sizes=STARVED)
    return {"finite": int(all(np.isfinite(v).all() for v in values.values()))}
