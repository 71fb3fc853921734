"""Row-sparse updates equal the dense ones on the rows of the batch, and touch no others."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError
from tfdist.optimizers import RowSparse
from tfdist.optimizers import row_sparse

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.05),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "muon": lambda: keras.optimizers.Muon(0.1, exclude_layers=["table"]),
}
# Not in OPTIMIZERS: ScheduleFreeAdamW, which on TensorFlow takes for a moment's old value what it
# has just assigned (`momentum_old = momentum.value` is the variable). By rows it is the old value.


def _random(*shape, seed=0):
    return np.random.RandomState(seed).randn(*shape).astype("float32")


def _built(name, value):
    variable = keras.Variable(value, name="table")
    optimizer = OPTIMIZERS[name]()
    optimizer.build([variable])
    return variable, optimizer


def _dense_step(variable, optimizer, gradient):
    optimizer.apply([tf.constant(gradient)], [variable])


def _row_step(variable, optimizer, values, ids):
    slices = tf.IndexedSlices(tf.constant(values), tf.constant(ids))
    if isinstance(optimizer, keras.optimizers.Nadam):  # Kept up once a step, for all variables.
        power = 0.96 ** (float(optimizer.iterations.numpy()) + 1)
        product = optimizer._u_product
        product.assign(product * optimizer.beta_1 * (1 - 0.5 * power))
    row_sparse.apply_rows(optimizer, variable, slices, optimizer.learning_rate)
    optimizer.iterations.assign_add(1)


def _state(variable, optimizer):
    return {"table": variable.numpy(), **{v.path: v.numpy() for v in optimizer.variables}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_a_gradient_for_every_row_it_is_the_dense_update(name):
    start = _random(6, 4)
    dense, dense_optimizer = _built(name, start)
    sparse, sparse_optimizer = _built(name, start)
    for step in range(3):
        gradient = _random(6, 4, seed=step + 1)
        _dense_step(dense, dense_optimizer, gradient)
        # Row 5 comes twice, first and last.
        values = np.concatenate([gradient[5:] * 0.25, gradient[:5], gradient[5:] * 0.75])
        _row_step(sparse, sparse_optimizer, values, [5, 0, 1, 2, 3, 4, 5])
    assert np.abs(dense.numpy() - start).max() > 1e-4
    expected = list(_state(dense, dense_optimizer).values())
    got = list(_state(sparse, sparse_optimizer).values())
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_without_a_gradient_stay_and_the_others_are_a_small_variable(name):
    start = _random(9, 4)
    ids = [7, 2, 4]
    table, optimizer = _built(name, start)
    small, small_optimizer = _built(name, start[ids])
    for step in range(3):
        before = _state(table, optimizer)
        gradient = _random(3, 4, seed=step + 1)
        _row_step(table, optimizer, gradient, ids)
        _dense_step(small, small_optimizer, gradient)
        after = _state(table, optimizer)
        others = [row for row in range(9) if row not in ids]
        for key, value in after.items():
            if value.shape[:1] == (9,):
                np.testing.assert_array_equal(value[others], before[key][others])
    for (key, value), small_value in zip(
        after.items(), _state(small, small_optimizer).values(), strict=True
    ):
        value = value[ids] if value.shape[:1] == (9,) else value
        np.testing.assert_allclose(value, small_value, rtol=2e-5, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_in_the_graph_is_as_large_as_the_table(name):
    rows = 1_000_003
    table, optimizer = _built(name, np.zeros((rows, 2), "float32"))

    @tf.function
    def step(values, ids):
        slices = tf.IndexedSlices(values, ids)
        row_sparse.apply_rows(optimizer, table, slices, optimizer.learning_rate)

    graph = step.get_concrete_function(
        tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int64)
    ).graph
    functions = [f.graph for f in graph._functions.values() if hasattr(f, "graph")]
    large = [
        output
        for g in [graph, *functions]
        for op in g.get_operations()
        for output in op.outputs
        if output.shape.rank and output.shape[0] == rows
    ]
    assert not large
    types = {op.type for op in graph.get_operations()}
    assert "ResourceGather" in types
    assert types & {"ResourceScatterAdd", "ResourceScatterUpdate"}


def test_no_rows_change_nothing_also_not_what_all_rows_share():
    table, optimizer = _built("adafactor", _random(5, 3))
    _row_step(table, optimizer, _random(2, 3), [0, 3])
    before = _state(table, optimizer)
    _row_step(table, optimizer, np.zeros((0, 3), "float32"), np.zeros(0, "int64"))
    after = _state(table, optimizer)
    for key, value in before.items():
        if not key.endswith("iteration"):
            np.testing.assert_array_equal(after[key], value)


def test_a_square_table_is_refused_where_rows_and_columns_cannot_be_told_apart():
    table, optimizer = _built("adafactor", _random(4, 4))
    with pytest.raises(UnsupportedError, match="another number of rows"):
        _row_step(table, optimizer, _random(1, 4), [0])
    table, optimizer = _built("adam", _random(4, 4))
    _row_step(table, optimizer, _random(1, 4), [0])


def test_muon_is_refused_for_a_table_that_it_would_make_orthogonal():
    table = keras.Variable(_random(4, 3), name="table")
    optimizer = keras.optimizers.Muon(0.1)
    optimizer.build([table])
    with pytest.raises(UnsupportedError, match="exclude_layers"):
        _row_step(table, optimizer, _random(1, 3), [0])


def test_an_optimizer_that_has_not_been_built_is_an_error():
    slices = tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0]))
    with pytest.raises(ConfigError, match="has been built"):
        row_sparse.update_rows(keras.optimizers.Adam(), keras.Variable([[1.0, 2.0]]), slices, 0.1)


def test_a_constraint_holds_for_the_rows_of_the_batch():
    table = keras.Variable(np.full((4, 2), -1.0, "float32"), name="table")
    table.constraint = keras.constraints.NonNeg()
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([table])
    _row_step(table, optimizer, np.array([[1.0, -4.0]], "float32"), [2])
    np.testing.assert_allclose(table.numpy(), [[-1, -1], [-1, -1], [0, 1], [-1, -1]])
    table.constraint = keras.constraints.MaxNorm(axis=0)
    with pytest.raises(UnsupportedError, match="axis=1"):
        _row_step(table, optimizer, np.array([[1.0, -4.0]], "float32"), [2])


def test_what_an_optimizer_reads_after_it_has_assigned_is_new():
    class Twice(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            self.assign(variable, variable * 2.0)
            self.assign_add(variable, variable + 1.0)

    table = keras.Variable(np.arange(6.0, dtype="float32").reshape(3, 2), name="table")
    optimizer = Twice(0.1)
    optimizer.build([table])
    _row_step(table, optimizer, np.zeros((1, 2), "float32"), [1])
    np.testing.assert_array_equal(table.numpy(), [[0, 1], [9, 13], [4, 5]])


def test_what_another_worker_has_added_meanwhile_is_not_lost():
    class Interrupted(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            table.value.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [1]))
            super().update_step(gradient, variable, learning_rate)

    table = keras.Variable(np.zeros((3, 2), "float32"), name="table")
    optimizer = Interrupted(0.5)
    optimizer.build([table])
    _row_step(table, optimizer, np.array([[2.0, 4.0]], "float32"), [1])
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [0, -1], [0, 0]])


def test_threads_do_not_meet_in_one_optimizer():
    start = _random(8, 2)
    tables = [keras.Variable(start, name=f"table_{k}") for k in range(4)]
    optimizer = keras.optimizers.Adagrad(0.1)
    optimizer.build(tables)

    def work(k):
        for n in range(20):
            slices = tf.IndexedSlices(tf.fill([2, 2], float(k + 1)), tf.constant([k, (k + n) % 8]))
            tf.function(lambda s=slices: row_sparse.update_rows(optimizer, tables[k], s, 0.1))()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, table in enumerate(tables):
        alone = keras.Variable(start, name="alone")
        other = keras.optimizers.Adagrad(0.1)
        other.build([alone])
        for n in range(20):
            gradient = np.zeros((8, 2), "float32")
            for row in (k, (k + n) % 8):
                gradient[row] += k + 1
            _dense_step(alone, other, gradient)
        np.testing.assert_allclose(table.numpy(), alone.numpy(), rtol=1e-5)


class Matrix(keras.layers.Embedding):
    """Multiplies, so that its gradient is dense.

    With a gradient by rows Keras's own optimizers take each mention of a row by itself: Adam
    squares two halves of a gradient instead of the whole.
    """

    def call(self, ids):
        return keras.ops.matmul(keras.ops.one_hot(ids, self.input_dim), self.embeddings)


def _model(optimizer, embedding=keras.layers.Embedding, **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            embedding(12, 3, **options),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    return model


CLIPS = ({}, {"clipnorm": 0.1}, {"clipvalue": 0.02})


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        *(("Adam", clip) for clip in CLIPS),
        *((name, {}) for name in ("Nadam", "SGD")),
        # Gradients are clipped before any optimizer sees them.
        *(
            pytest.param(name, c, marks=pytest.mark.slow)
            for name in ("Nadam", "SGD")
            for c in CLIPS[1:]
        ),
    ],
)
def test_fit_is_that_of_the_dense_optimizer_where_every_batch_has_every_row(name, clip):
    # Each id twice in every batch, so that clipping one mention by itself would be wrong.
    x = np.stack([np.random.RandomState(i).permutation(24) % 12 for i in range(3)])
    x = x.reshape(-1, 4)
    y = _random(18, 1)
    make = getattr(keras.optimizers, name)
    weights = []
    for embedding, optimizer in (
        (Matrix, make(0.01, **clip)),
        (keras.layers.Embedding, RowSparse(make(0.01, **clip))),
        (tfdist.layers.Embedding, RowSparse(make(0.01, **clip))),
    ):
        model = _model(optimizer, embedding)
        model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
        assert int(model.optimizer.iterations.numpy()) == 6
    for other in weights[1:]:
        for a, b in zip(weights[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_global_norm_is_that_of_the_dense_gradients_and_they_stay_sparse():

    table = keras.Variable(np.zeros((5, 2), "float32"), name="table")
    bias = keras.Variable(np.zeros(2, "float32"), name="bias")
    optimizer = RowSparse(keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0], [2.0, 2.0]]), tf.constant([3, 3]))
    optimizer.apply([slices, tf.constant([12.0, 0.0])], [table, bias])
    # The row's gradient is (3, 4), the norm of all 13.
    np.testing.assert_allclose(table.numpy()[3], [-3 / 13, -4 / 13], rtol=1e-6)
    np.testing.assert_allclose(bias.numpy(), [-12 / 13, 0], rtol=1e-6)
    clipped = optimizer._clip_gradients([slices])
    assert isinstance(clipped[0], tf.IndexedSlices)


def test_only_rows_of_the_batch_decay():
    model = _model(RowSparse(keras.optimizers.AdamW(0.01, weight_decay=0.5)))
    before = model.get_weights()
    x = np.array([[1, 2, 3, 4]] * 4)
    model.fit(x, np.zeros((4, 1)), batch_size=4, verbose=0)
    after = model.get_weights()
    changed = (before[0] != after[0]).any(axis=1)
    assert list(np.flatnonzero(changed)) == [1, 2, 3, 4]
    # Adam's first step is of size 0.01, whatever the gradient.
    step = np.abs(after[1] - before[1] * (1 - 0.5 * 0.01))
    np.testing.assert_allclose(step[np.abs(step) > 1e-6], 0.01, rtol=1e-2)


def test_it_is_an_optimizer_of_the_same_class_with_the_same_settings():
    adam = keras.optimizers.Adam(0.02, beta_1=0.8)
    wrapped = tfdist.optimizers.RowSparse(adam)
    assert isinstance(wrapped, keras.optimizers.Adam) and isinstance(wrapped, RowSparse)
    assert not isinstance(adam, RowSparse)
    assert wrapped.beta_1 == 0.8
    wrapped.learning_rate = 0.5
    assert float(wrapped.learning_rate.numpy()) == 0.5
    assert RowSparse(wrapped) is wrapped
    assert isinstance(RowSparse("ftrl"), keras.optimizers.Ftrl)


def test_a_model_that_was_saved_goes_on_where_it_was(tmp_path):
    x = np.random.RandomState(0).randint(0, 12, (32, 4))
    y = _random(32, 1)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9)
    model = _model(RowSparse(keras.optimizers.Adam(schedule)))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.optimizer, RowSparse)
    assert isinstance(again.optimizer, keras.optimizers.Adam)
    for m in (model, again):
        m.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_loss_scaling_goes_around_it():
    optimizer = keras.optimizers.LossScaleOptimizer(
        RowSparse(keras.optimizers.SGD(0.1)), initial_scale=8.0
    )
    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    x = np.arange(24).reshape(6, 4) % 12
    weights = []
    for one in (optimizer, plain):
        model = _model(one)
        model.fit(x, np.ones((6, 1)), batch_size=6, verbose=0)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    with pytest.raises(ConfigError, match=r"LossScaleOptimizer\(RowSparse"):
        RowSparse(plain)


def test_accumulation_is_refused():
    with pytest.raises(ConfigError, match="accumulation"):
        RowSparse(keras.optimizers.Adam(gradient_accumulation_steps=2))


def test_callbacks_set_its_learning_rate():
    model = _model(RowSparse("sgd"))
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.25)
    model.fit(np.zeros((4, 4)), np.zeros((4, 1)), verbose=0, callbacks=[scheduler])
    assert float(model.optimizer.learning_rate.numpy()) == 0.25
