"""The matrix: optimizers x clipping x accumulation x data."""

from __future__ import annotations

import itertools

from cells.data import SHAPES
from cells.data import binary
from cells.models import small_model
from cells.registry import CELLS
from cells.registry import train
from cells.world import keras
from cells.world import np

OPTIMIZERS = {
    "sgd": lambda **k: keras.optimizers.SGD(0.1, momentum=0.9, **k),
    "adam": lambda **k: keras.optimizers.Adam(0.02, epsilon=1e-3, **k),
    "adamw": lambda **k: keras.optimizers.AdamW(0.02, weight_decay=0.1, epsilon=1e-3, **k),
    "lamb": lambda **k: keras.optimizers.Lamb(0.02, epsilon=1e-3, **k),
    "adafactor": lambda **k: keras.optimizers.Adafactor(0.02, **k),
}
# In every cell some updates are clipped and others are not.
CLIPS = {
    "noclip": {},
    "clipvalue": {"clipvalue": 0.25},
    "clipnorm": {"clipnorm": 0.45},
    "global": {"global_clipnorm": 0.5},
}
ACCUMULATIONS = {"acc1": {}, "acc3": {"gradient_accumulation_steps": 3}}

_kept = {}  # One model for the three kinds of data: tracing is what takes the time.


def matrix_cell(optimizer, clip, accumulation, data):
    key = (optimizer, clip, accumulation)
    if key not in _kept:
        _kept.clear()
        make = OPTIMIZERS[optimizer]
        metrics = ("mae", "auc") if optimizer == "sgd" else ("mae",)  # AUC is slow to trace.
        model = small_model(
            lambda: make(**CLIPS[clip], **ACCUMULATIONS[accumulation]), metrics=metrics
        )
        fresh = [np.asarray(v.value.numpy()) for v in (*model.weights, *model.optimizer.variables)]
        _kept[key] = model, fresh
    model, fresh = _kept[key]
    for variable, value in zip((*model.weights, *model.optimizer.variables), fresh, strict=True):
        variable.assign(value)
    try:
        return train(model, sizes=SHAPES[data], make=binary)
    except BaseException:
        _kept.clear()
        raise


for args in itertools.product(OPTIMIZERS, CLIPS, ACCUMULATIONS, SHAPES):
    CELLS["/".join(args)] = (lambda args=args: matrix_cell(*args), {})
