"""A commit that is written late holds what variables were at its boundary."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.engine import position
from tfdist.engine.watcher import Watcher
from tfdist.state.store import Snapshot
from tfdist.state.store import Store
from tfdist.state.writer import AsyncWriter

AT, STEPS = 3, 12


@pytest.fixture(autouse=True, scope="module")
def engine():
    tfdist.activate()
    yield
    tfdist.deactivate()


class CommitsLate(Watcher):
    """Commits after `AT` steps what was captured there; nothing is written before the gate opens.

    Attributes:
        then: Copies of what was captured, made at the boundary.
        apart: The same, read from TensorFlow in another way.
    """

    def __init__(self, directory):
        super().__init__()
        self.store = Store(directory)
        self.gate = threading.Event()
        self.then: dict[str, np.ndarray] = {}
        self.apart: list[np.ndarray] = []
        self.writer = AsyncWriter(self.store)

    def at_boundary(self, training):
        if training.step != AT or self.then:
            return
        found = training.capture()
        self.then = {name: np.array(value) for name, value in found.arrays.items()}
        model = training.model
        self.apart = [v.numpy() for v in (*model.trainable_variables, *model.optimizer.variables)]
        weights = [value for name, value in found.arrays.items() if name.startswith("model/")]
        assert not weights[0].flags.writeable

        def late(store):
            assert self.gate.wait(120)
            return store.write(Snapshot(found.step, {}, found.arrays))

        self.writer.submit(late)


def check(watcher, model):
    """Opens the gate, and compares what is written then with what was copied at the boundary."""
    watcher.gate.set()
    watcher.writer.close()
    _, written = watcher.store.read_latest()
    assert list(written.arrays) == list(watcher.then)
    for name, value in watcher.then.items():
        assert value.tobytes() == written.arrays[name].tobytes(), name
    kept = {value.tobytes() for value in watcher.then.values()}
    assert all(value.tobytes() in kept for value in watcher.apart)
    now = [v.numpy() for v in model.trainable_variables]
    assert any(a.tobytes() != b.tobytes() for a, b in zip(now, watcher.apart, strict=False))


def dense(optimizer, jit=False, dtype="float32"):
    layers = [
        keras.layers.Dense(40, activation="tanh", dtype=dtype),
        keras.layers.BatchNormalization(dtype=dtype),
        keras.layers.Dropout(0.3, dtype=dtype),
        keras.layers.Dense(1, dtype=dtype),
    ]
    model = keras.Sequential([keras.Input((30,)), *layers])
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit)
    return model, np.random.default_rng(1).random((8 * STEPS, 30), "float32")


def table(layer, optimizer):
    model = keras.Sequential([keras.Input((4,), dtype="int32"), layer, keras.layers.Flatten()])
    model.add(keras.layers.Dense(1))
    model.compile(optimizer, "mse", jit_compile=False)
    return model, np.random.default_rng(1).integers(0, 50, (8 * STEPS, 4))


def ema():
    return keras.optimizers.SGD(0.1, 0.9, use_ema=True, ema_overwrite_frequency=2)


MODELS = {
    "sgd": lambda: dense(keras.optimizers.SGD(0.1)),
    "adam": lambda: dense(keras.optimizers.Adam(0.1)),
    "adam in XLA": lambda: dense(keras.optimizers.Adam(0.1), jit=True),
    "moving averages of weights": lambda: dense(ema()),
    "accumulation": lambda: dense(keras.optimizers.Adam(0.1, gradient_accumulation_steps=4)),
    "accumulation in XLA": lambda: dense(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), jit=True
    ),
    "scaled loss": lambda: dense(keras.optimizers.Adam(0.1), dtype="mixed_float16"),
    "bfloat16": lambda: dense(keras.optimizers.SGD(0.1, 0.9), dtype="bfloat16"),
    "table": lambda: table(keras.layers.Embedding(50, 8), keras.optimizers.Adagrad(0.1)),
    "table in shards": lambda: table(
        tfdist.layers.Embedding(50, 8, num_shards=3), keras.optimizers.Adam(0.1)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_commit_written_late_holds_the_values_of_its_boundary(name, tmp_path):
    keras.utils.set_random_seed(3)
    model, x = MODELS[name]()
    watcher = CommitsLate(tmp_path)
    try:
        data = tf.data.Dataset.from_tensor_slices((x, np.ones((len(x), 1), "float32"))).batch(8)
        model.fit(data, verbose=0, callbacks=[watcher])
    finally:
        watcher.gate.set()
    check(watcher, model)


@pytest.mark.parametrize("jit", [False, True])
def test_a_value_that_is_read_stays_whatever_operation_updates_the_variable(jit):
    """Optimizers of Keras assign; those that users write may call TensorFlow's own updates."""
    ops = tf.raw_ops
    row = tf.constant([1])

    def variable():
        return tf.Variable(np.arange(1, 4097, dtype="float32").reshape(64, 64))

    one, rate = tf.ones((64, 64)), tf.constant(0.1)
    moments = {"beta1_power": 0.9, "beta2_power": 0.9, "beta1": 0.9, "beta2": 0.9, "epsilon": 0.1}
    updates = {
        "assign": lambda v, _: v.assign(v + 1.0),
        "assign_add": lambda v, _: v.assign_add(one),
        "assign_sub": lambda v, _: v.assign_sub(one),
        "scatter_add": lambda v, _: v.scatter_add(tf.IndexedSlices(one[:1], row)),
        "scatter_nd_update": lambda v, _: v.scatter_nd_update(row[:, None], one[:1]),
        "slice": lambda v, _: v[1:2].assign(one[:1]),
        "ResourceApplyAdam": lambda v, more: ops.ResourceApplyAdam(
            var=v.handle, m=more[0].handle, v=more[1].handle, lr=rate, grad=one, **moments
        ),
    }
    if not jit:
        updates["ResourceSparseApplyAdagradV2"] = lambda v, more: ops.ResourceSparseApplyAdagradV2(
            var=v.handle, accum=more[0].handle, lr=rate, epsilon=0.1, grad=one[:1], indices=row
        )
        generator = tf.random.Generator.from_seed(1)
    for name, update in updates.items():
        variables = [variable() for _ in range(3)]

        def step(update=update, variables=variables):
            update(variables[0], variables[1:])

        compiled = tf.function(step, autograph=False, jit_compile=jit)
        began = variables[0].numpy()
        for number in range(3):  # The first update of rows puts TensorFlow into another mode.
            held = [position._read(each) for each in variables]
            copies = [each.copy() for each in held]
            compiled()
            compiled()
            assert all(map(np.array_equal, held, copies)), (name, number)
        assert not np.array_equal(began, variables[0].numpy()), name
    if not jit:
        held = position._read(generator.state)
        copy = held.copy()
        generator.normal((3,))
        assert np.array_equal(held, copy) and not np.array_equal(held, generator.state.numpy())


MIRRORED = textwrap.dedent(
    """
    import sys
    import tensorflow as tf
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    import tfdist
    tfdist.activate()
    import numpy as np
    import keras
    from tests.unit import test_held_values as held
    for number, (optimizer, jit) in enumerate([
        (keras.optimizers.Adam(0.1), False),
        (held.ema(), True),
        (keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), False),
    ]):
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model, x = held.dense(optimizer, jit)
        data = tf.data.Dataset.from_tensor_slices((x, np.ones((len(x), 1), "float32"))).batch(8)
        watcher = held.CommitsLate(f"{sys.argv[1]}/{number}")
        try:
            model.fit(data, verbose=0, callbacks=[watcher])
        finally:
            watcher.gate.set()
        held.check(watcher, model)
    """
)


def test_a_commit_of_mirrored_variables_written_late_holds_the_values_of_its_boundary(tmp_path):
    command = [sys.executable, "-c", MIRRORED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
