"""`tfdist.layers.Embedding` is Keras's layer in results and files, in any number of shards."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError
from tfdist.layers import Embedding
from tfdist.layers import shard_embeddings
from tfdist.layers import shards

ROWS, COLUMNS = 11, 3


def _table(seed=0):
    return np.random.RandomState(seed).randn(ROWS, COLUMNS).astype("float32")


def _layer(num_shards=4, **options):
    return Embedding(ROWS, COLUMNS, weights=_table(), num_shards=num_shards, **options)


@pytest.mark.parametrize("num_shards", [None, 1, 4, 100])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "uint32", "float32"])
def test_it_looks_up_what_keras_does(num_shards, dtype):
    ids = np.array([[0, 10, 3], [3, 5, 0]], dtype)
    layer = _layer(num_shards)
    expected = keras.layers.Embedding(ROWS, COLUMNS, weights=_table())(ids)
    np.testing.assert_array_equal(layer(ids), expected)
    assert len(layer.shards) == {None: 1, 1: 1, 4: 4, 100: ROWS}[num_shards]
    assert sum(shard.shape[0] for shard in layer.shards) == ROWS
    np.testing.assert_array_equal(layer.embeddings, _table())


@pytest.mark.parametrize("num_shards", [1, 4])
def test_the_gradient_is_of_each_row_of_the_batch_once(num_shards):
    layer = _layer(num_shards)
    ids = tf.constant([[9, 1], [9, 0], [1, 9]])

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.int32)])
    def gradients(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) * [1.0, 2.0, 3.0])
        return tape.gradient(loss, [shard.value for shard in layer.shards])

    total = np.zeros((ROWS, COLUMNS))
    first = 0
    for gradient, shard in zip(gradients(ids), layer.shards, strict=True):
        assert isinstance(gradient, tf.IndexedSlices)
        rows = gradient.indices.numpy()
        assert len(set(rows)) == len(rows)
        total[first + rows] += gradient.values.numpy()
        first += shard.shape[0]
    expected = np.zeros((ROWS, COLUMNS))
    for row, count in ((9, 3), (1, 2), (0, 1)):
        expected[row] = [count, 2 * count, 3 * count]
    np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("bad", [-1, ROWS])
def test_an_id_out_of_range_is_an_error_that_names_the_range(num_shards, bad):
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"\[0, {ROWS}\)"):
        _layer(num_shards)(tf.constant([1, bad, 2]))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_an_empty_batch_gives_no_vectors(num_shards):
    assert _layer(num_shards)(tf.zeros([0, 5], tf.int64)).shape == (0, 5, COLUMNS)


def _combined(rows, combiner, weights=None):
    """The same by hand, for a list of lists of ids."""
    out = []
    for i, row in enumerate(rows):
        w = np.ones(len(row)) if weights is None else np.array(weights[i], float)
        total = (_table()[row] * w[:, None]).sum(0) if row else np.zeros(COLUMNS)
        by = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
        out.append(total / by if by else np.zeros(COLUMNS))
    return np.array(out)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("kind", ["ragged", "sparse", "dense"])
def test_combiners(kind, combiner, with_weights):
    rows = [[1, 2, 2], [], [10], [4, 7]]
    weights = [[1.0, 0.5, 2.0], [], [3.0], [0.25, 4.0]] if with_weights else None
    layer = _layer(combiner=combiner, mask_zero=kind == "dense")
    ragged = tf.ragged.constant(rows, dtype=tf.int64)
    ids = {
        "ragged": lambda r: r,
        "sparse": lambda r: r.to_sparse(),
        "dense": lambda r: r.to_tensor(),
    }
    factors = ids[kind](tf.ragged.constant(weights)) if with_weights else None
    call = tf.function(lambda ids, weights: layer(ids, weights=weights))
    got = call(ids[kind](ragged), factors)
    np.testing.assert_allclose(got, _combined(rows, combiner, weights), rtol=1e-6)


def test_a_combiner_takes_the_last_of_many_axes():
    layer = _layer(combiner="sum")
    nested = tf.ragged.constant([[[1, 2], []], [[3]]])
    got = layer(nested)
    assert isinstance(got, tf.RaggedTensor)
    np.testing.assert_allclose(got.flat_values, _combined([[1, 2], [], [3]], "sum"), rtol=1e-6)
    inner = tf.ragged.constant([[[1, 2], [3, 4]], [[5, 6]]], ragged_rank=1)
    np.testing.assert_allclose(
        layer(inner).flat_values, _combined([[1, 2], [3, 4], [5, 6]], "sum"), rtol=1e-6
    )
    sparse = tf.SparseTensor([[1, 0, 1], [0, 1, 0], [1, 0, 0]], [7, 8, 9], [2, 2, 3])
    expected = _combined([[], [8], [9, 7], []], "sum").reshape(2, 2, COLUMNS)
    np.testing.assert_allclose(layer(sparse), expected, rtol=1e-6)


def test_without_a_combiner_ragged_stays_ragged_and_sparse_has_row_zero():
    ragged = tf.ragged.constant([[1, 2, 3], [], [4]])
    got = _layer()(ragged)
    assert isinstance(got, tf.RaggedTensor)
    np.testing.assert_array_equal(got.flat_values, _table()[[1, 2, 3, 4]])
    np.testing.assert_array_equal(got.row_splits, ragged.row_splits)
    sparse = ragged.to_sparse()
    expected = keras.layers.Embedding(ROWS, COLUMNS, weights=_table())(sparse)
    np.testing.assert_allclose(_layer()(sparse), expected)


def test_weights_need_a_combiner_and_a_combiner_an_axis():
    with pytest.raises(ConfigError, match="combiner='sum'"):
        _layer()(tf.constant([[1]]), weights=tf.constant([[1.0]]))
    with pytest.raises(ConfigError, match="add an axis"):
        _layer(combiner="sum")(tf.constant([1, 2]))
    with pytest.raises(ConfigError, match="sqrtn"):
        _layer(combiner="max")


@pytest.mark.parametrize("padded", [False, True])
def test_hashed_ids_have_the_rows_of_keras_hashing(padded):
    layer = _layer(hash_ids=True, mask_zero=padded)
    numbers = tf.constant([[0, 7, 2**40], [-5, 12, 0]], tf.int64)
    words = tf.where(numbers == 0, "", tf.strings.as_string(numbers))
    for ids, mask_value in ((numbers, 0), (words, "")):
        hashing = keras.layers.Hashing(ROWS, mask_value=mask_value if padded else None)
        rows = np.asarray(hashing(ids))
        np.testing.assert_array_equal(layer(ids), _table()[rows])
        assert (rows[0, 0] == 0) == padded or not padded
    with pytest.raises(ConfigError, match="cast them"):
        layer(tf.constant([[1.5]]))
    with pytest.raises(ConfigError, match="hash_ids=True"):
        _layer()(tf.constant([["a"]]))


def test_the_mask_is_that_of_keras():
    ids = tf.constant([[0, 3, 0], [1, 0, 2]])
    expected = keras.layers.Embedding(ROWS, COLUMNS, mask_zero=True).compute_mask(ids)
    np.testing.assert_array_equal(_layer(mask_zero=True).compute_mask(ids), expected)
    assert _layer(mask_zero=True, combiner="sum").compute_mask(ids) is None
    assert _layer().compute_mask(ids) is None
    words = tf.constant([["", "a"]])
    mask = _layer(mask_zero=True, hash_ids=True).compute_mask(words)
    np.testing.assert_array_equal(mask, [[False, True]])


def test_a_recurrent_layer_sees_the_mask():
    outputs = []
    for layer in (_layer(mask_zero=True), keras.layers.Embedding(ROWS, COLUMNS, mask_zero=True)):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,), dtype="int32")
        model = keras.Model(inputs, keras.layers.LSTM(2)(layer(inputs)))
        layer.set_weights([_table()])
        outputs.append(model(np.array([[1, 2, 0, 0], [3, 4, 5, 0]])))
    np.testing.assert_allclose(*outputs, rtol=1e-6)


def test_it_computes_in_the_dtype_of_its_policy():
    layer = _layer(dtype="mixed_bfloat16", combiner="mean")
    assert layer(tf.constant([[1, 2]])).dtype == tf.bfloat16
    assert layer.shards[0].dtype == "float32"
    assert layer.compute_output_spec(keras.KerasTensor((None, 2), "int32")).dtype == "bfloat16"


def test_functional_models_take_ragged_and_sparse_inputs():
    ragged = keras.Input((None,), dtype="string", ragged=True)
    sparse = keras.Input((5,), dtype="int64", sparse=True)
    outputs = [
        Embedding(ROWS, 2, combiner="mean", hash_ids=True, num_shards=2)(ragged),
        Embedding(ROWS, 2, combiner="sum")(sparse),
    ]
    assert [tuple(output.shape) for output in outputs] == [(None, 2), (None, 2)]
    model = keras.Model([ragged, sparse], keras.layers.Concatenate()(outputs))
    values = model([tf.ragged.constant([["a"], []]), tf.sparse.from_dense([[1, 0, 2, 0, 0]] * 2)])
    table = model.layers[2].embeddings
    row = int(tf.strings.to_hash_bucket_fast("a", ROWS))
    np.testing.assert_allclose(values[0, :2], table[row], rtol=1e-6)
    np.testing.assert_array_equal(values[1, :2], [0, 0])
    again = keras.Model.from_config(model.get_config())
    assert again.layers[2].get_config() == model.layers[2].get_config()


def _model(layer):
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [keras.Input((4,), dtype="int32"), layer, keras.layers.Flatten(), keras.layers.Dense(1)]
    )


@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_files_do_not_know_the_number_of_shards(tmp_path, suffix):
    ids = np.arange(12).reshape(3, 4) % ROWS
    made = {
        "keras": lambda: keras.layers.Embedding(ROWS, COLUMNS),
        "one": lambda: Embedding(ROWS, COLUMNS),
        "four": lambda: Embedding(ROWS, COLUMNS, num_shards=4),
    }
    if suffix == ".keras":
        model = _model(_layer(4))
        model.save(tmp_path / "m.keras")
        again = keras.models.load_model(tmp_path / "m.keras")
        assert len(again.layers[0].shards) == 4
        np.testing.assert_array_equal(model(ids), again(ids))
        return
    for source in made:
        model = _model(made[source]())
        path = tmp_path / f"{source}{suffix}"
        model.layers[0].set_weights([_table(5)])
        model.save_weights(path)
        for target in made:
            other = _model(made[target]())
            other.load_weights(path)
            np.testing.assert_array_equal(other(ids), model(ids), err_msg=f"{source} {target}")
    with pytest.raises(ValueError, match="Expected a table of shape"):
        _model(Embedding(ROWS, COLUMNS + 1)).load_weights(tmp_path / "one.weights.h5")


@pytest.mark.parametrize("num_shards", [1, 4])
def test_checkpoints_have_every_shard(tmp_path, num_shards):
    path = tf.train.Checkpoint(layer=_layer(num_shards)).save(tmp_path / "c")
    other = Embedding(ROWS, COLUMNS, num_shards=num_shards)
    other.build()
    tf.train.Checkpoint(layer=other).restore(path).assert_consumed()
    np.testing.assert_array_equal(other.embeddings, _table())
    if num_shards == 1:
        plain = keras.layers.Embedding(ROWS, COLUMNS)
        plain.build()
        tf.train.Checkpoint(layer=plain).restore(path).assert_existing_objects_matched()
        np.testing.assert_array_equal(plain.embeddings, _table())


@pytest.mark.parametrize("num_shards", [1, 4])
def test_training_is_that_of_keras(num_shards):
    ids = np.random.RandomState(0).randint(0, ROWS, (24, 4))
    y = np.random.RandomState(1).randn(24, 1)
    tables = []
    for layer in (
        Embedding(ROWS, COLUMNS, num_shards=num_shards, embeddings_regularizer="l2"),
        keras.layers.Embedding(ROWS, COLUMNS, embeddings_regularizer="l2"),
    ):
        model = _model(layer)
        layer.set_weights([_table()])
        model.compile("adam", "mse")
        history = model.fit(ids, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        tables.append([history.history["loss"], np.asarray(layer.embeddings)])
    for a, b in zip(*tables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.GlorotUniform(seed=1),
        keras.initializers.HeNormal(seed=1),
        keras.initializers.RandomNormal(stddev=0.3, seed=1),
        "uniform",
    ],
)
def test_shards_start_from_the_distribution_of_the_whole_and_differ(initializer):
    rows, columns = 4000, 8
    whole = np.asarray(keras.initializers.get(initializer)((rows, columns)))
    layer = Embedding(rows, columns, embeddings_initializer=initializer, num_shards=4)
    layer.build()
    parts = [shard.numpy() for shard in layer.shards]
    for part in parts:
        assert part.std() == pytest.approx(whole.std(), rel=0.05)
    assert not any((parts[0] == part).any() for part in parts[1:])


def test_an_initializer_that_knows_its_place_keeps_it():
    matrix = _table(7)
    for initializer in (
        lambda shape, dtype: tf.constant(matrix, dtype),
        keras.initializers.Constant(matrix),
    ):
        layer = Embedding(ROWS, COLUMNS, embeddings_initializer=initializer, num_shards=3)
        layer.build()
        np.testing.assert_array_equal(layer.embeddings, matrix)
    layer = Embedding(4, 4, embeddings_initializer="identity", num_shards=3)
    layer.build()
    np.testing.assert_array_equal(layer.embeddings, np.eye(4))
    layer = Embedding(4, 4, embeddings_initializer=keras.initializers.Constant(2.0), num_shards=3)
    layer.build()
    np.testing.assert_array_equal(layer.embeddings, np.full((4, 4), 2.0))


def test_rows_are_divided_as_tensorflow_divides_them():
    assert shards.starts(10, 4) == [0, 3, 6, 8, 10]
    assert shards.starts(3, 3) == [0, 1, 2, 3]


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="positive integer as input_dim"):
        Embedding(0, 3)
    with pytest.raises(UnsupportedError, match="lora_rank=2"):
        Embedding(4, 3, lora_rank=2)
    with pytest.raises(UnsupportedError, match="quantize"):
        _layer().quantize("int8")
    norm = keras.constraints.MaxNorm(axis=0)
    with pytest.raises(UnsupportedError, match="num_shards=1"):
        Embedding(4, 3, embeddings_constraint=norm, num_shards=2).build()
    Embedding(4, 3, embeddings_constraint=norm).build()
    orthogonal = keras.regularizers.OrthogonalRegularizer()
    with pytest.raises(UnsupportedError, match="L1 or L2"):
        Embedding(4, 3, embeddings_regularizer=orthogonal, num_shards=2).build()


def test_tables_are_marked_for_the_engine():
    assert all(shard._tfdist_table for shard in _layer(3).shards)


def test_a_scope_without_state_may_give_it_other_tables():
    layer = _layer(3)
    mapping = [(shard, tf.zeros_like(shard.value)) for shard in layer.shards]
    with keras.StatelessScope(mapping):
        np.testing.assert_array_equal(layer(tf.constant([1, 9])), np.zeros((2, COLUMNS)))


def test_functional_models_are_converted_with_models_inside_and_shared_layers():
    shared = keras.layers.Embedding(ROWS, COLUMNS, name="shared", mask_zero=True)
    inner_in = keras.Input((2,), dtype="int32")
    inner = keras.Model(inner_in, keras.layers.Embedding(ROWS, 2, name="deep")(inner_in), name="in")
    a, b = keras.Input((2,), dtype="int32", name="a"), keras.Input((2,), dtype="int32", name="b")
    joined = keras.layers.Concatenate()([shared(a), shared(b), inner(a)])
    model = keras.Model([a, b], keras.layers.Dense(1, name="top")(joined))
    new = shard_embeddings(model, num_shards=3)
    ids = [np.array([[1, 10]]), np.array([[5, 0]])]
    np.testing.assert_allclose(new(ids), model(ids), rtol=1e-6)
    assert type(new.get_layer("shared")) is Embedding and new.get_layer("shared").mask_zero
    assert len(new.get_layer("shared").shards) == 3
    assert type(new.get_layer("in").get_layer("deep")) is Embedding
    assert type(model.get_layer("shared")) is keras.layers.Embedding
    assert len([layer for layer in new._flatten_layers() if isinstance(layer, Embedding)]) == 2
    assert new.count_params() == model.count_params()


@keras.saving.register_keras_serializable("test")
class TwoTables(keras.Model):
    def __init__(self):
        super().__init__()
        self.one = keras.layers.Embedding(ROWS, COLUMNS, name="one")
        self.more = [keras.layers.Embedding(ROWS, COLUMNS, name="more"), keras.layers.Dense(2)]

    def call(self, ids):
        return self.more[1](self.one(ids) + self.more[0](ids))


def test_other_models_are_converted_in_place():
    ids = np.array([[1, 10], [4, 0]])
    model = TwoTables()
    expected = model(ids)
    count = model.count_params()
    new = shard_embeddings(model, num_shards=2)
    assert new is model
    np.testing.assert_allclose(new(ids), expected, rtol=1e-6)
    assert type(model.one) is Embedding and type(model.more[0]) is Embedding
    assert [len(model.one.shards), len(model.more[0].shards)] == [2, 2]
    assert model.count_params() == count
    fresh = shard_embeddings(TwoTables())
    fresh.compile("sgd", "mse")
    fresh.fit(ids, np.zeros((2, 2, 2)), verbose=0)
    with pytest.raises(UnsupportedError, match="before compile"):
        trained = TwoTables()
        trained.compile("sgd", "mse")
        trained.fit(ids, np.zeros((2, 2, 2)), verbose=0)
        shard_embeddings(trained)


def test_an_embedding_inside_of_a_wrapper_is_converted():
    inputs = keras.Input((2, 3), dtype="int32")
    wrapped = keras.layers.TimeDistributed(keras.layers.Embedding(ROWS, COLUMNS))(inputs)
    model = keras.Model(inputs, wrapped)
    ids = np.arange(6).reshape(1, 2, 3)
    new = shard_embeddings(model, num_shards=2)
    assert type(new.layers[1].layer) is Embedding
    np.testing.assert_allclose(new(ids), model(ids), rtol=1e-6)


def test_the_layers_are_public():
    assert tfdist.layers.Embedding is Embedding
    assert tfdist.layers.shard_embeddings is shard_embeddings
