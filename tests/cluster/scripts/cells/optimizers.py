"""Optimizers: every kind, and what one does beside a plain update."""

from __future__ import annotations

from cells.data import LAST1
from cells.data import STARVED
from cells.data import batches
from cells.data import regression
from cells.models import SGD
from cells.models import Adam
from cells.models import compiled
from cells.models import small_model
from cells.registry import cell
from cells.registry import fit
from cells.registry import train
from cells.world import keras
from cells.world import strategy


def optimizer_cell(name, make, sizes=LAST1, **kwargs):
    @cell(f"optimizer/{name}")
    def run():
        return train(small_model(make, loss="mse", metrics=("mae",)), sizes=sizes, **kwargs)


def multi(**k):
    return lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            SGD(0.1, momentum=0.9, **k), {".*hidden.*": Adam(0.02, epsilon=1e-3, **k)}
        )
    )


optimizer_cell("multi", multi(), STARVED)
optimizer_cell("multi_global_clip", multi(global_clipnorm=0.3))
optimizer_cell("multi_accumulation", multi(gradient_accumulation_steps=3))
optimizer_cell("ema", lambda: Adam(0.02, epsilon=1e-3, use_ema=True, ema_momentum=0.7))
optimizer_cell(
    "ema_overwrite",
    lambda: SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=4),
    STARVED,
)
optimizer_cell(
    "ema_accumulation",
    lambda: SGD(
        0.1,
        use_ema=True,
        ema_momentum=0.7,
        ema_overwrite_frequency=4,
        gradient_accumulation_steps=2,
        clipnorm=0.4,
    ),
    LAST1,
)
optimizer_cell("loss_scale_factor", lambda: SGD(0.1, loss_scale_factor=64.0, clipnorm=0.4))
optimizer_cell(
    "loss_scale_clip_accumulation",
    lambda: keras.optimizers.LossScaleOptimizer(
        SGD(0.1, global_clipnorm=0.5, gradient_accumulation_steps=2), dynamic_growth_steps=3
    ),
)
optimizer_cell("weight_decay_sgd", lambda: SGD(0.1, weight_decay=0.1, clipvalue=0.1), STARVED)
optimizer_cell("nesterov", lambda: SGD(0.05, momentum=0.9, nesterov=True), STARVED)
optimizer_cell("rmsprop", lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-3, centered=True))
optimizer_cell("adagrad", lambda: keras.optimizers.Adagrad(0.1))
optimizer_cell("adadelta", lambda: keras.optimizers.Adadelta(0.5))
optimizer_cell("ftrl", lambda: keras.optimizers.Ftrl(0.1, l2_regularization_strength=0.01))
optimizer_cell("nadam", lambda: keras.optimizers.Nadam(0.02, epsilon=1e-3))
optimizer_cell("amsgrad", lambda: Adam(0.02, epsilon=1e-3, amsgrad=True))
optimizer_cell("muon", lambda: keras.optimizers.Muon(0.02, epsilon=1e-3))
optimizer_cell("schedule_free", lambda: keras.optimizers.ScheduleFreeAdamW(0.02, epsilon=1e-3))
optimizer_cell(
    "schedule",
    lambda: SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5), momentum=0.9),
    epochs=2,
)
optimizer_cell(
    "accumulation_over_epochs", lambda: SGD(0.1, gradient_accumulation_steps=3), epochs=2
)


@cell("optimizer/accumulation_over_fits")
def accumulation_over_fits():
    model = small_model(
        lambda: Adam(0.02, epsilon=1e-3, gradient_accumulation_steps=3, clipnorm=0.3), loss="mse"
    )
    x, y = regression(20)
    fit(model, batches([12, 8], x, y))
    model.evaluate(batches([12, 8], x, y), verbose=0)
    return train(model, sizes=[12, 8])


def constrained(optimizer):
    return compiled(
        lambda: [
            keras.layers.Dense(
                8,
                activation="tanh",
                kernel_constraint=keras.constraints.MaxNorm(0.8),
                bias_constraint="non_neg",
            ),
            keras.layers.Dense(1, kernel_constraint="unit_norm"),
        ],
        optimizer,
        metrics=["mae"],
    )


@cell("optimizer/constraints")
def constraints():
    return train(constrained(SGD(0.1, momentum=0.9)), sizes=STARVED)


@cell("optimizer/constraints_accumulation")
def constraints_accumulation():
    return train(constrained(SGD(0.1, gradient_accumulation_steps=3)))


@cell("optimizer/frozen_layer")
def frozen_layer():
    model = small_model(lambda: SGD(0.1), loss="mse")
    model.layers[0].trainable = False
    with strategy.scope():
        model.compile(SGD(0.1, momentum=0.5, clipnorm=0.4), "mse")
    return train(model)
