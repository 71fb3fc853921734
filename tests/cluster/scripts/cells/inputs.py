"""Sparse gradients of embeddings, ragged and sparse inputs."""

from __future__ import annotations

from cells.data import STARVED
from cells.models import SGD
from cells.models import Adam
from cells.models import compiled
from cells.models import ready
from cells.registry import cell
from cells.registry import fill
from cells.registry import fit
from cells.registry import outcome
from cells.registry import train
from cells.registry import train_arrays
from cells.world import keras
from cells.world import np
from cells.world import strategy
from cells.world import tf


def embedding_model(optimizer):
    return compiled(
        lambda: [keras.layers.Embedding(7, 4), keras.layers.Flatten(), keras.layers.Dense(1)],
        optimizer,
        metrics=["mae"],
        inputs=(3,),
        dtype="int32",
    )


def id_data(rows):
    r = np.random.RandomState(2)
    ids = r.randint(0, 5, (rows, 3)).astype("int32")  # rows 5 and 6 of the table are never used
    ids[:, 2] = ids[:, 0]
    return ids, np.tanh(ids.sum(1, keepdims=True) / 3.0 - 2.0).astype("float32")


SPARSE = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "adam": lambda: Adam(0.02, epsilon=1e-3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "sgd_clipnorm": lambda: SGD(0.1, clipnorm=0.1),
    "adam_global_clip": lambda: Adam(0.02, epsilon=1e-3, global_clipnorm=0.2),
    "sgd_clipvalue": lambda: SGD(0.1, clipvalue=0.05),
    "sgd_accumulation": lambda: SGD(0.1, gradient_accumulation_steps=3),
    "adam_accumulation_clip": lambda: Adam(
        0.02, epsilon=1e-3, gradient_accumulation_steps=3, clipnorm=0.1
    ),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1), dynamic_growth_steps=3),
}


def sparse_cell(name, make):
    @cell(f"sparse/embedding/{name}")
    def run():
        return train(embedding_model(make()), make=id_data, sizes=STARVED)


for name, make in SPARSE.items():
    sparse_cell(name, make)


class MeanOfWords(keras.Model):
    """Takes ragged ids."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(9, 4)
        self.out = keras.layers.Dense(1)

    def call(self, ids):
        words = tf.ragged.map_flat_values(self.table, ids)
        return self.out(tf.reduce_sum(words, 1) / 4.0)


def ragged_data(rows):
    r = np.random.RandomState(4)
    ids = [r.randint(0, 9, r.randint(1, 6)).tolist() for _ in range(rows)]
    y = np.array([[np.tanh(np.mean(row) - 4.0)] for row in ids], "float32")
    return tf.ragged.constant(ids, dtype="int32"), y


def train_ragged(x, y):
    with strategy.scope():
        model = MeanOfWords()
        model.compile(SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
        model(x[:2])
        fill(model)
    return train_arrays(model, [12, 12, 12, 4, 1], x, y, epochs=2)


@cell("inputs/ragged")
def ragged():
    return train_ragged(*ragged_data(41))


@cell("inputs/ragged_without_ids")
def ragged_without_ids():
    """The table has a gradient of no rows, on every replica (TensorFlow crashes on those)."""
    x, y = ragged_data(41)
    rows = [[] if 12 <= number < 24 else row for number, row in enumerate(x.to_list())]
    return train_ragged(tf.ragged.constant(rows, dtype="int32", ragged_rank=1), y)


@cell("inputs/ragged_unbuilt")
def ragged_unbuilt():
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = MeanOfWords()
        model.table.embeddings_initializer = keras.initializers.Constant(0.3)
        model.out.kernel_initializer = keras.initializers.Constant(0.5)
        model.compile(SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices(ragged_data(36))
    return outcome(model, fit(model, data.batch(12)))


class SparseDense(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(6, 4), name="kernel")

    def call(self, x):
        return tf.sparse.sparse_dense_matmul(x, self.kernel)


def sparse_batches(rows, size):
    r = np.random.RandomState(5)
    x = r.randn(rows, 6).astype("float32") * (r.rand(rows, 6) < 0.4)
    y = np.tanh(x.sum(1, keepdims=True)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x.astype("float32")), y))
    return data.batch(size)


@cell("inputs/sparse_dense")
def sparse_dense():
    def build():
        inputs = keras.Input((6,), sparse=True)
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(4)(inputs)))

    model = ready(build, lambda: SGD(0.1, momentum=0.5), metrics=["mae"])
    return outcome(model, fit(model, sparse_batches(37, 12), epochs=2))


@cell("inputs/sparse_custom")
def sparse_custom():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = SparseDense(), keras.layers.Dense(1)

        def call(self, x):
            return self.last(self.first(x))

    with strategy.scope():
        model = Own()
        model.compile(SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
        model.first.build((None, 6))
        model.last.build((None, 4))
        model.built = True
        fill(model)
    return outcome(model, fit(model, sparse_batches(37, 12), epochs=2))
