"""How a model is run: eagerly, by XLA, several steps at once, a batch at a time."""

from __future__ import annotations

from cells.data import EVEN
from cells.data import LAST1
from cells.data import STARVED
from cells.data import batches
from cells.data import binary
from cells.data import regression
from cells.models import SGD
from cells.models import Adam
from cells.models import small_model
from cells.registry import cell
from cells.registry import fit
from cells.registry import outcome
from cells.registry import train
from cells.world import tf


@cell("run/eagerly")
def eagerly():
    model = small_model(lambda: SGD(0.1, momentum=0.5), run_eagerly=True)
    return train(model, make=binary, sizes=[12, 12, 1])


@cell("run/eagerly_accumulation_clip")
def eagerly_accumulation():
    model = small_model(
        lambda: SGD(0.1, gradient_accumulation_steps=2, global_clipnorm=0.2), run_eagerly=True
    )
    return train(model, make=binary, sizes=[12, 12, 1])


@cell("run/jit_compile")
def jit_compile():
    model = small_model(lambda: SGD(0.1, momentum=0.5), jit_compile=True, loss="mse")
    return train(model, sizes=LAST1)


@cell("run/jit_compile_clip_accumulation")
def jit_compile_clip():
    model = small_model(
        lambda: Adam(0.02, epsilon=1e-3, clipnorm=0.3, gradient_accumulation_steps=3),
        jit_compile=True,
        loss="mse",
        metrics=("mae",),
    )
    return train(model, sizes=EVEN)


@cell("run/steps_per_execution")
def steps_per_execution():
    model = small_model(lambda: SGD(0.1, momentum=0.5), steps_per_execution=3)
    return train(model, make=binary, sizes=LAST1, epochs=2)


@cell("run/steps_per_execution_accumulation")
def steps_per_execution_accumulation():
    model = small_model(
        lambda: SGD(0.1, gradient_accumulation_steps=4, clipnorm=0.15), steps_per_execution=3
    )
    return train(model, make=binary, sizes=LAST1, epochs=2)


@cell("run/train_on_batch")
def train_on_batch():
    # Each worker passes the batch, and every replica sees it whole.
    model = small_model(lambda: SGD(0.1, momentum=0.5, clipnorm=0.15))
    x, y = binary(24)
    logs = [
        model.train_on_batch(x[i : i + 12], y[i : i + 12], return_dict=True) for i in (0, 12, 0)
    ]
    tested = model.test_on_batch(x[:12], y[:12], return_dict=True)
    return outcome(
        model,
        losses=[float(each["loss"]) for each in logs],
        mae=[float(each["mae"]) for each in logs],
        tested=float(tested["loss"]),
    )


@cell("run/train_on_batch_accumulation")
def train_on_batch_accumulation():
    model = small_model(lambda: SGD(0.1, gradient_accumulation_steps=2), loss="mse", metrics=())
    x, y = regression(24)
    for i in (0, 12, 0):
        model.train_on_batch(x[i : i + 12], y[i : i + 12])
    return outcome(model)


@cell("run/evaluate_uneven")
def evaluate_uneven():
    model = small_model(lambda: SGD(0.1))
    x, y = binary(sum(STARVED))
    values = model.evaluate(batches(STARVED, x, y), verbose=0, return_dict=True)
    return {f"history/{k}": float(v) for k, v in values.items()}


def fixed_batches_of(optimizer):
    # Shapes are known: nothing is asked between workers.
    data = tf.data.Dataset.from_tensor_slices(binary(120)).batch(12, drop_remainder=True)
    model = small_model(optimizer)
    return outcome(model, fit(model, data))


@cell("run/fixed_batches")
def fixed_batches():
    return fixed_batches_of(lambda: Adam(0.02, epsilon=1e-3, global_clipnorm=0.2))


@cell("run/fixed_batches_accumulation")
def fixed_batches_accumulation():
    return fixed_batches_of(lambda: SGD(0.1, momentum=0.9, gradient_accumulation_steps=3))
