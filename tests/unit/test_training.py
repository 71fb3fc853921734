"""A training on one device is interrupted and goes on in another `fit`; what is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.callbacks.schedule import Schedule
from tfdist.engine import callback_states
from tfdist.engine import plain
from tfdist.engine import position
from tfdist.engine.inventory import inventory
from tfdist.engine.peers import Peers
from tfdist.engine.watcher import Watcher
from tfdist.errors import ConfigError
from tfdist.state.store import Store

ROWS, BATCH, EPOCHS, STEPS = 40, 8, 3, 5


@pytest.fixture(autouse=True, scope="module")
def engine():
    tfdist.activate()
    yield
    tfdist.deactivate()


class Interrupt(keras.callbacks.Callback):
    """Raises after a number of batches, and remembers of what it was told."""

    def __init__(self, after=None):
        super().__init__()
        self.after = after
        self.here = types.SimpleNamespace(batches=0)  # No plain value: begins anew.
        self.told = []

    def on_epoch_end(self, epoch, logs=None):
        self.told.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self.here.batches += 1
        self.told.append((batch, logs["loss"]))
        if self.here.batches == self.after:
            raise KeyboardInterrupt


def build(units=4, rate=0.05, loss="mse"):
    keras.utils.set_random_seed(3)
    inner = [keras.layers.Dense(units, activation="tanh"), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((3,)), *inner, keras.layers.Dense(1)])
    # Without XLA, which takes longer to compile a step than all steps take.
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["mae"], jit_compile=False)
    return model


def dataset(rows=ROWS):
    x = np.random.RandomState(0).randn(rows, 3).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(rows, seed=1).batch(BATCH)


def fit(directory, after=None, model=None, data=None, epochs=EPOCHS, callbacks=(), **options):
    model = model or build()
    interrupt = Interrupt(after)
    backup = tfdist.callbacks.BackupAndRestore(
        directory, **{"save_every": 2, "asynchronous": False, **options}
    )
    expected = pytest.raises(KeyboardInterrupt) if after else contextlib.nullcontext()
    history = None
    with expected:
        history = model.fit(
            dataset() if data is None else data,
            epochs=epochs,
            verbose=0,
            callbacks=[backup, interrupt, *callbacks],
        )
    return model, history, interrupt


def equal(model, other):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def undisturbed(engine, tmp_path_factory):
    return fit(tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture(scope="module")
def after_seven(engine, tmp_path_factory):
    """A directory that a fit has left that was interrupted in its second epoch."""
    directory = tmp_path_factory.mktemp("interrupted") / "run"
    fit(directory, 7)
    return directory


def test_one_device_trains_as_kerass_own_loop_does(undisturbed):
    model = build()
    history = model.fit(dataset(), epochs=EPOCHS, verbose=0)
    assert equal(model, undisturbed[0])
    assert history.history == undisturbed[1].history


@pytest.mark.parametrize("after", [(), (4, 3)])
def test_what_was_interrupted_ends_with_the_same_weights_and_history(
    after, tmp_path, after_seven, undisturbed
):
    directory = shutil.copytree(after_seven, tmp_path / "run")
    for each in after:
        fit(directory, each)
    model, history, interrupt = fit(directory)
    assert equal(model, undisturbed[0])
    assert history.history == undisturbed[1].history and history.epoch == [0, 1, 2]
    assert interrupt.told == undisturbed[2].told
    assert interrupt.here.batches < STEPS * EPOCHS


def test_a_callback_that_stops_is_where_it_was(tmp_path):
    def stops():
        return keras.callbacks.EarlyStopping("mae", patience=3, mode="max")

    fit(tmp_path, 8, callbacks=[stops()], epochs=9)
    _, history, _ = fit(tmp_path, callbacks=[stops()], epochs=9)
    expected = build().fit(dataset(), epochs=9, verbose=0, callbacks=[stops()])
    assert history.history == expected.history
    assert len(history.epoch) < 9


def unknown(rows=ROWS):
    """Batches whose number nobody knows before, in a new order of files and rows in every pass."""
    keras.utils.set_random_seed(3)
    x = np.random.RandomState(0).randn(rows, 3).astype("float32")
    parts = tf.data.Dataset.range(5).shuffle(5, seed=1)
    numbers = parts.interleave(
        lambda n: tf.data.Dataset.range(rows // 5).map(lambda row: n * (rows // 5) + row),
        cycle_length=2,
        num_parallel_calls=2,
    )
    chosen = numbers.filter(lambda row: row < rows - 4).shuffle(9, seed=2).batch(BATCH)
    return chosen.map(lambda row: (tf.gather(x, row), tf.gather(x[:, :1], row)))


@pytest.mark.parametrize("every", [1, "epoch"])
def test_data_of_unknown_length_goes_on_in_the_order_of_the_next_pass(every, tmp_path):
    _, whole, _ = fit(tmp_path / "whole", data=unknown())
    # The newest commit is that of the last batch of the first pass, or the one after it.
    fit(tmp_path / "run", STEPS + 1, data=unknown(), save_every=every)
    _, history, interrupt = fit(tmp_path / "run", data=unknown())
    assert interrupt.here.batches == STEPS * (EPOCHS - 1)
    assert history.history == whole.history


def test_validation_goes_on_in_its_order(tmp_path):
    def train(directory, after=None):
        seen = []

        class Order(keras.metrics.Metric):
            def update_state(self, y_true, y_pred, sample_weight=None):
                if tf.executing_eagerly() and tf.is_tensor(y_true) and hasattr(y_true, "numpy"):
                    seen.append(y_true.numpy().tolist())

            def result(self):
                return 0.0

        model = build()
        model.compile("adam", "mse", metrics=[Order()], run_eagerly=True)
        backup = tfdist.callbacks.BackupAndRestore(directory, asynchronous=False)
        interrupt = Interrupt(after)
        with pytest.raises(KeyboardInterrupt) if after else contextlib.nullcontext():
            model.fit(
                dataset(16),
                validation_data=dataset(24).skip(1),
                epochs=3,
                verbose=0,
                callbacks=[backup, interrupt],
            )
        return seen

    expected = train(tmp_path / "whole")
    train(tmp_path / "run", 5)  # Two batches an epoch to train on, and two to validate.
    assert train(tmp_path / "run") == expected[-4:]


@pytest.mark.parametrize("after", [4, 12])
def test_a_callback_takes_the_same_for_an_improvement(after, tmp_path):
    def watches():
        return [
            keras.callbacks.ReduceLROnPlateau("loss", patience=0, factor=0.5, min_delta=0.2),
            keras.callbacks.EarlyStopping("loss", patience=2, min_delta=0.2),
        ]

    _, whole, _ = fit(tmp_path / "whole", callbacks=watches(), epochs=6)
    fit(tmp_path / "run", after, callbacks=watches(), epochs=6)
    callbacks = watches()
    _, history, _ = fit(tmp_path / "run", callbacks=callbacks, epochs=6)
    assert history.history == whole.history
    assert len(set(history.history["learning_rate"])) > 1
    assert [callback.min_delta for callback in callbacks] == [-0.2, -0.2]


def test_what_begins_an_epoch_is_done_once_for_it(tmp_path):
    class Begins(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.is_first = False

        def on_epoch_begin(self, epoch, logs=None):
            self.is_first = True
            kernel = self.model.layers[0].kernel
            kernel.assign(kernel * 0.5)

        def on_train_batch_begin(self, batch, logs=None):
            if self.is_first:
                kernel = self.model.layers[0].kernel
                kernel.assign(kernel + 0.1)
            self.is_first = False

    expected, whole, _ = fit(tmp_path / "whole", callbacks=[Begins()])
    fit(tmp_path / "run", 8, callbacks=[Begins()])
    model, history, interrupt = fit(tmp_path / "run", callbacks=[Begins()])
    assert interrupt.here.batches == EPOCHS * STEPS - 6
    assert equal(model, expected) and history.history == whole.history


def test_an_ended_run_gives_callbacks_all_that_they_had(tmp_path):
    def early():
        return keras.callbacks.EarlyStopping("mae", patience=1, restore_best_weights=True)

    def state(callback):
        return {
            key: value
            for key, value in vars(callback).items()
            if isinstance(value, (int, float, str)) and key != "min_delta"
        }

    first, again = early(), early()
    fit(tmp_path, callbacks=[first])
    fit(tmp_path, callbacks=[again])
    assert state(again) == state(first) and "best_epoch" in state(first)
    assert all(map(np.array_equal, again.best_weights, first.best_weights))


def test_a_run_that_has_ended_gives_its_result_and_trains_nothing(tmp_path, undisturbed):
    fit(tmp_path, data=dataset())
    model, history, interrupt = fit(tmp_path)
    assert interrupt.here.batches == 0
    assert equal(model, undisturbed[0])
    assert history.history == undisturbed[1].history
    assert interrupt.told == undisturbed[2].told
    assert int(model.optimizer.iterations) == EPOCHS * STEPS


def test_a_run_that_has_ended_goes_further_if_it_is_asked_to(tmp_path, undisturbed):
    fit(tmp_path, epochs=2)
    model, history, interrupt = fit(tmp_path)
    assert interrupt.here.batches == STEPS
    assert equal(model, undisturbed[0]) and history.history == undisturbed[1].history


def test_commits_are_removed_when_it_has_ended_and_the_callback_may_be_used_again(tmp_path):
    backup = tfdist.callbacks.BackupAndRestore(tmp_path, save_every=2)
    model = build()
    for _ in range(2):
        history = model.fit(dataset(), epochs=1, verbose=0, callbacks=[backup])
        assert len(history.epoch) == 1
    assert Store(tmp_path).commits() == Store(tmp_path / "fit-2").commits() == []
    backup = tfdist.callbacks.BackupAndRestore(
        tmp_path / "kept", save_every=2, delete_checkpoint=False
    )
    model.fit(dataset(), epochs=1, verbose=0, callbacks=[backup])
    assert Store(tmp_path / "kept").commits()[0].step == 4
    assert int(model.optimizer.iterations) == 3 * STEPS


@pytest.mark.parametrize("after", [1, 4])
def test_a_program_that_trains_twice_goes_on_in_the_second_training(after, tmp_path):
    def program(directory, interrupt):
        model, data = build(), dataset()
        backup = tfdist.callbacks.BackupAndRestore(directory, save_every=2, asynchronous=False)
        model.fit(data, epochs=1, verbose=0, callbacks=[backup])
        history = model.fit(data, epochs=2, verbose=0, callbacks=[backup, Interrupt(interrupt)])
        return model, history.history

    with pytest.raises(KeyboardInterrupt):
        program(tmp_path / "run", after)
    model, history = program(tmp_path / "run", None)
    expected, whole = program(tmp_path / "whole", None)
    assert equal(model, expected) and history == whole


@pytest.mark.parametrize(
    ("change", "words", "part"),
    [
        ({"model": lambda: build(units=5)}, r"dense/kernel \(3, 5\)", "model"),
        ({"model": lambda: build(rate=0.01)}, "learning_rate 0.0099", "optimizer"),
        ({"data": lambda: dataset(50)}, "7 instead of 5", "data"),
    ],
)
def test_another_training_is_refused_by_name_unless_it_may_be(
    change, words, part, tmp_path, after_seven
):
    directory = shutil.copytree(after_seven, tmp_path / "run")
    with pytest.raises(ConfigError, match=words) as error:
        fit(directory, **{key: value() for key, value in change.items()})
    assert f"override=('{part}',)" in str(error.value)
    changed = {key: value() for key, value in change.items()}
    _, history, _ = fit(directory, override=part, **changed)
    assert history.epoch == [0, 1, 2]


def test_a_watcher_is_called_between_steps_after_all_callbacks_and_may_capture():
    seen = []

    class Looks(Watcher):
        def at_boundary(self, training):
            found = training.capture()
            seen.append((training.epoch, training.batch, len(later.told), found.step))

    later = Interrupt()
    build().fit(dataset(), epochs=2, verbose=0, callbacks=[Looks(), later])
    assert seen[:5] == [(0, batch, batch, batch) for batch in range(1, 6)]
    assert seen[5] == (1, 0, 6, 5) and seen[-1] == (2, 0, 12, 10)


def test_arrays_of_a_position_are_not_changed_by_later_steps():
    first = []

    class Looks(Watcher):
        def at_boundary(self, training):
            if not first:
                found = training.capture()
                first.extend([found, {k: v.copy() for k, v in found.arrays.items()}])

    build().fit(dataset(), epochs=1, verbose=0, callbacks=[Looks()])
    found, copies = first
    assert all(np.array_equal(found.arrays[name], copies[name]) for name in copies)
    assert any(name.startswith("optimizer/0.0/momentums/") for name in copies)
    json.dumps(found.facts)


def test_names_of_variables_do_not_depend_on_the_models_made_before():
    def names():
        model = build()
        model.fit(dataset(), epochs=1, steps_per_epoch=1, verbose=0)
        return [entry.name for entry in inventory(model)]

    first = names()
    assert first == names() and len(set(first)) == len(first)
    assert "model/0/sequential/dense/kernel" in first


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (4, 1), (2, 2)])
def test_a_table_and_its_slots_go_on_in_another_number_of_shards(before, after):
    def train(shards):
        keras.utils.set_random_seed(shards)
        ids = keras.Input((2,), dtype="int64")
        table = tfdist.layers.Embedding(11, 3, num_shards=shards)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
        model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        for variable in model.optimizer.variables[2:]:
            variable.assign(np.random.RandomState(shards).rand(*variable.shape))
        return model, table

    (old, table), (new, other) = train(before), train(after)
    assert (len(table._shards), len(other._shards)) == (before, after)
    peers = Peers(tf.distribute.get_strategy(), "fit")
    records, _, arrays = position.take(inventory(old), peers, {})
    assert [r["name"] for r in records] == [entry.name for entry in inventory(new)]
    position.put(inventory(new), records, arrays, peers, True)
    assert np.array_equal(table.get_weights()[0], other.get_weights()[0])
    slots = [
        np.concatenate([v.numpy() for v in model.optimizer.variables if v.shape[1:] == (3,)])
        for model in (old, new)
    ]
    assert slots[0].shape == (22, 3)
    assert sorted(map(tuple, slots[0].tolist())) == sorted(map(tuple, slots[1].tolist()))


class BuildsItself(keras.Model):
    """Has no `call`: parts and optimizers make their variables in the first step."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(4), keras.layers.Dense(1)
        self.adam, self.sgd = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, 0.9)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self.last(self.first(x)) - y))
        for optimizer, layer in ((self.adam, self.first), (self.sgd, self.last)):
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def builds_itself():
    keras.utils.set_random_seed(3)
    model = BuildsItself()
    model.compile(jit_compile=False)
    return model


def with_scaled_loss():
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = build()
    keras.mixed_precision.set_global_policy("float32")
    return model


def accumulates():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    adam = keras.optimizers.Adam(0.05, gradient_accumulation_steps=3, use_ema=True)
    model.compile(adam, "mse", jit_compile=False, steps_per_execution=2)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [builds_itself, with_scaled_loss, accumulates])
def test_unusual_models_go_on_exactly(make, tmp_path):
    def rate():
        return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)

    callbacks = () if make is builds_itself else (rate,)
    expected, whole, _ = fit(tmp_path / "whole", model=make(), callbacks=[c() for c in callbacks])
    fit(tmp_path / "run", 4, model=make(), callbacks=[c() for c in callbacks])
    model, history, interrupt = fit(
        tmp_path / "run", model=make(), callbacks=[c() for c in callbacks]
    )
    assert interrupt.here.batches < EPOCHS * STEPS
    assert equal(model, expected) and history.history == whole.history


VALUES = [
    None,
    True,
    -3,
    0.1,
    float("inf"),
    "text",
    b"bytes",
    b"long" * 2000,
    [1, [2.5, "a"]],
    (1, (2,)),
    {1, 2},
    {"a": {"~": 1}},
    {1: "one", (2, 3): None},
    np.float32(0.1),
    np.arange(6).reshape(2, 3),
    tf.constant([1.5], tf.bfloat16),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("arrays", [None, {}], ids=["within", "apart"])
def test_plain_values_come_back_as_they_were(value, arrays):
    text = json.dumps(plain.encode(value, arrays, "here"))
    found = plain.decode(json.loads(text), arrays)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_what_is_no_plain_value_is_refused():
    for value in (object(), [print], np.array([None]), {"a": keras.layers.Dense(1)}):
        with pytest.raises(plain.NotPlainError):
            plain.encode(value)


def test_only_what_a_callback_has_changed_is_its_state():
    class Mine(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.patience, self.wait, self.best, self.handle = 3, 0, np.zeros(2), print

    mine, other = Mine(), Mine()
    states = callback_states.CallbackStates([mine])
    states.begin()
    mine.wait, mine.best[1] = 2, 7.0
    arrays = {}
    found = json.loads(json.dumps(states.capture(arrays)))
    assert list(found["Mine 1"]["attributes"]) == ["wait", "best"]
    other.patience = 5
    callback_states.CallbackStates([other]).restore(found, arrays, found)
    assert (other.patience, other.wait, other.best.tolist()) == (5, 2, [0.0, 7.0])


def test_rows_of_a_table_that_are_made_again_are_cut(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss\n0,3.0\n5,9.0\n0,2.0\n1,1.0\n2,0.")
    logger = keras.callbacks.CSVLogger(str(path))
    assert callback_states.reopen_tables([logger], 1) == [logger]
    assert path.read_text() == "epoch,loss\n0,3.0\n5,9.0\n0,2.0\n"
    assert logger.append


def test_a_schedule_counts_steps_seconds_or_epochs():
    now = [0.0]
    steps, seconds = Schedule(10), Schedule("2.5s", lambda: now[0])
    assert [steps.is_due(step, False) for step in (9, 10)] == [False, True]
    steps.begin(10)
    assert not steps.is_due(19, True)
    assert not seconds.is_due(1000, True)
    now[0] = 2.5
    assert seconds.is_due(0, False)
    assert [Schedule("epoch").is_due(7, between) for between in (False, True)] == [False, True]
    for wrong in (0, -1, True, "60", "s", "epochs", 1.5, None):
        with pytest.raises(ConfigError):
            Schedule(wrong)


@pytest.mark.parametrize(
    "arguments",
    [{"directory": ""}, {"directory": "d", "keep": 0}, {"directory": "d", "override": "x"}],
)
def test_wrong_arguments_are_refused_where_they_are_given(arguments):
    with pytest.raises(ConfigError):
        tfdist.callbacks.BackupAndRestore(**arguments)
