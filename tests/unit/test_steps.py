"""What a compiled step is called with may change from one call to the next."""

from __future__ import annotations

from tests.support.harness import run_script

HEAD = """
import tfdist
strategy = tfdist.strategy("mirrored", replicas=2)
import keras
import numpy as np
import tensorflow as tf
from report import report
"""


def test_another_type_or_shape_of_data_gets_its_own_graph(tmp_path):
    source = (
        HEAD
        + """
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mae")
x = np.arange(24).reshape(8, 3)
y = np.zeros((8, 1), "float32")
losses = {
    name: model.fit(x.astype(name), y, batch_size=4, epochs=2, verbose=0).history["loss"]
    for name in ("float32", "int32", "float32", "float64")
}
report(losses=losses, mean=float(x.sum(axis=1).mean()))
"""
    )
    run = run_script(source, workers=1, timeout=120, tmp_path=tmp_path)
    assert run.code == 0, run.output
    result = run.result()
    assert result["losses"] == {name: [result["mean"]] * 2 for name in result["losses"]}


def test_ragged_batches_of_ever_new_lengths_keep_no_more_than_one_graph_each(tmp_path):
    source = (
        HEAD
        + """
r = np.random.RandomState(0)
rows = [list(r.randint(0, 9, r.randint(1, 30))) for _ in range(64)]
x = tf.ragged.constant(rows, dtype=tf.int64)
y = np.zeros((64, 1), "float32")
class Count(keras.layers.Layer):
    def call(self, x):
        return tf.cast(tf.reduce_sum(x, axis=1, keepdims=True), "float32")
with strategy.scope():
    model = keras.Sequential([Count(), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mae")
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
loss = model.fit(data, epochs=1, verbose=0).history["loss"][0]
report(loss=loss, expected=float(np.mean([sum(row) for row in rows])),
       kept=len(model.train_function._last))
"""
    )
    run = run_script(source, workers=1, timeout=120, tmp_path=tmp_path)
    assert run.code == 0, run.output
    result = run.result()
    assert abs(result["loss"] - result["expected"]) < 1e-3
    assert result["kept"] == 1
