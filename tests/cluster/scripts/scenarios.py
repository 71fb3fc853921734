"""Runs many small trainings under whatever strategy this process has, and reports the numbers.

The same program runs on one device and on clusters; the test compares the reports.
Usage: scenarios.py [mirrored REPLICAS] -- NAME [NAME ...]
"""

from __future__ import annotations

import sys

import tfdist

where = sys.argv[1 : sys.argv.index("--")]
names = sys.argv[sys.argv.index("--") + 1 :]
strategy = tfdist.strategy(where[0], replicas=int(where[1])) if where else tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from report import report  # noqa: E402

# The graphs run a few times each; optimising them takes longer.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

BATCH = 12  # Divides by 1, 2 and 3 replicas.


def linear_data(rows: int = 48):
    r = np.random.RandomState(0)
    x = r.randn(rows, 3).astype("float32")
    w = np.array([[1.0], [-2.0], [3.0]], "float32")
    return x, (x @ w + 0.1 * r.randn(rows, 1)).astype("float32")


def linear_model(optimizer=None, **compile_args):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(optimizer or keras.optimizers.SGD(0.1), loss="mse", **compile_args)
    return model


def dataset(*arrays, batch=BATCH):
    data = arrays if len(arrays) > 1 else arrays[0]
    return tf.data.Dataset.from_tensor_slices(data).batch(batch)


def outcome(model, history=None, **more):
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "history": history.history if history is not None else None,
        "iterations": int(model.optimizer.iterations.numpy()) if model.optimizer else None,
        **more,
    }


class Seen(keras.metrics.Metric):
    """Counts how often each example (known by its id in column 0) was seen."""

    def __init__(self, rows, **kwargs):
        super().__init__(name="seen", **kwargs)
        self.counts = self.add_variable((rows,), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.counts.assign(
            self.counts.value
            + tf.cast(tf.math.bincount(ids, minlength=48, maxlength=48), "float32")
        )

    def result(self):
        return {"least": tf.reduce_min(self.counts), "most": tf.reduce_max(self.counts)}


def ids_model(**compile_args):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), loss="mse", metrics=[Seen(48)], **compile_args)
    return model


IDS = np.arange(48, dtype="float32")[:, None]


def sequential():
    model = linear_model(metrics=["mae"])
    history = model.fit(dataset(*linear_data()), epochs=3, validation_data=dataset(*linear_data()))
    return outcome(
        model,
        history,
        evaluate=model.evaluate(dataset(*linear_data()), return_dict=True),
        predict=model.predict(linear_data()[0][:14], batch_size=4).tolist(),
    )


def functional_dicts():
    x, y = linear_data()
    with strategy.scope():
        a, b = keras.Input((2,), name="a"), keras.Input((1,), name="b")
        both = keras.layers.Concatenate()([a, b])
        first = keras.layers.Dense(1, kernel_initializer="ones", name="first")(both)
        second = keras.layers.Dense(1, kernel_initializer="zeros", name="second")(both)
        model = keras.Model({"a": a, "b": b}, {"first": first, "second": second})
        model.compile(
            keras.optimizers.Adam(0.05),
            loss={"first": "mse", "second": "mae"},
            loss_weights={"first": 1.0, "second": 0.5},
            metrics={"first": ["mae"], "second": ["mse"]},
        )
    features = {"a": x[:, :2], "b": x[:, 2:]}
    targets = {"first": y, "second": 2 * y}
    weights = {"first": np.linspace(0.1, 2, 48), "second": np.linspace(2, 0.1, 48)}
    history = model.fit(dataset(features, targets, weights), epochs=2)
    predicted = model.predict(dataset(features))
    return outcome(model, history, predict={k: v.tolist() for k, v in predicted.items()})


class Unbuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="tanh", kernel_initializer="ones")
        self.out = keras.layers.Dense(3, activation="softmax", kernel_initializer="zeros")

    def call(self, inputs, training=False):
        return self.out(self.hidden(inputs))


def unbuilt_subclass():
    x, y = linear_data()
    labels = (np.digitize(y[:, 0], [-1, 1])).astype("int64")
    with strategy.scope():
        model = Unbuilt()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        dataset(x, labels), epochs=2, validation_data=dataset(x, labels), class_weight={0: 2, 2: 3}
    )
    return outcome(model, history, evaluate=model.evaluate(x, labels, batch_size=BATCH))


def unbuilt_predict_first():
    with strategy.scope():
        model = Unbuilt()
    return {"predict": model.predict(linear_data()[0], batch_size=BATCH).tolist()}


def string_features():
    x, y = linear_data()
    cities = np.array(["oslo", "rome", "kyiv", "lima"] * 12)
    hours = np.arange(48, dtype="int64") % 24
    with strategy.scope():
        city = keras.Input((1,), dtype="string", name="city")
        hour = keras.Input((1,), dtype="int64", name="hour")
        looked_up = keras.layers.StringLookup(vocabulary=["oslo", "rome", "kyiv"])(city)
        e1 = keras.layers.Embedding(5, 2, embeddings_initializer="ones")(looked_up)
        e2 = keras.layers.Embedding(24, 2, embeddings_initializer="ones")(hour)
        flat = keras.layers.Flatten()(keras.layers.Concatenate()([e1, e2]))
        model = keras.Model(
            {"city": city, "hour": hour}, keras.layers.Dense(1, kernel_initializer="ones")(flat)
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
    features = {"city": cities[:, None], "hour": hours[:, None]}
    history = model.fit(dataset(features, y), epochs=2)
    return outcome(model, history, predict=model.predict(dataset(features)).tolist())


class Custom(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")
        self.mean_loss = keras.metrics.Mean(name="mean_loss")

    def call(self, inputs):
        return self.dense(inputs)

    @property
    def metrics(self):
        return [self.mae, self.mean_loss]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.mae.update_state(y, predicted)
        self.mean_loss.update_state(tf.square(y - predicted))
        return {m.name: m.result() for m in self.metrics}


def custom_train_step():
    with strategy.scope():
        model = Custom()
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
    history = model.fit(dataset(*linear_data()), epochs=2)
    return outcome(model, history)


class Adversary(keras.Model):
    """Has no call(): its parts are trained in a train_step of its own."""

    def __init__(self):
        super().__init__()
        self.left = keras.layers.Dense(1, kernel_initializer="ones", name="left")
        self.right = keras.layers.Dense(1, kernel_initializer="zeros", name="right")
        self.tracker = keras.metrics.Mean(name="gap")

    def compile(self, left_optimizer, right_optimizer):
        super().compile()
        self.left_optimizer, self.right_optimizer = left_optimizer, right_optimizer

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        size = tf.cast(BATCH, "float32")
        for part, optimizer in (
            (self.left, self.left_optimizer),
            (self.right, self.right_optimizer),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(part(x) - y)) / size
            gradients = tape.gradient(loss, part.trainable_variables)
            optimizer.apply_gradients(zip(gradients, part.trainable_variables, strict=True))
        self.tracker.update_state(tf.square(self.left(x) - self.right(x)))
        return {"gap": self.tracker.result()}


def two_optimizers_no_call():
    with strategy.scope():
        model = Adversary()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9))
    history = model.fit(dataset(*linear_data()), epochs=2)
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "history": history.history,
        "iterations": int(model.left_optimizer.iterations.numpy()),
    }


def optimizer_outside_scope():
    optimizer = keras.optimizers.Adam(0.05)
    metric = keras.metrics.MeanAbsoluteError(name="mae")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
    model.compile(optimizer, "mse", metrics=[metric])
    history = model.fit(dataset(*linear_data()), epochs=2)
    return outcome(model, history, own=int(optimizer.iterations.numpy()))


def run_eagerly():
    model = linear_model(run_eagerly=True)
    return outcome(model, model.fit(dataset(*linear_data()), epochs=1))


def steps_per_execution():
    model = linear_model(steps_per_execution=3)
    return outcome(model, model.fit(dataset(*linear_data()), epochs=2))


def repeated_with_steps():
    model = linear_model()
    data = dataset(*linear_data()).repeat()
    return outcome(
        model,
        model.fit(data, epochs=3, steps_per_epoch=3, validation_data=data, validation_steps=2),
    )


def unknown_length():
    model = linear_model(
        keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
    )
    data = dataset(*linear_data()).filter(lambda x, y: True)
    return outcome(model, model.fit(data, epochs=3))


def arrays_in_order():
    model = linear_model()
    x, y = linear_data()
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        validation_split=0.25,
        sample_weight=np.linspace(0.5, 1.5, 48),
    )
    return outcome(model, history)


def shuffled_arrays_see_all():
    model = ids_model()
    history = model.fit(IDS, IDS, batch_size=BATCH, epochs=3)
    return {"history": {k: v for k, v in history.history.items() if k != "loss"}}


def shuffled_dataset_sees_all():
    model = ids_model()
    data = tf.data.Dataset.from_tensor_slices((IDS, IDS)).shuffle(48).batch(BATCH)
    history = model.fit(data, epochs=3)
    return {"history": {k: v for k, v in history.history.items() if k != "loss"}}


def step_of_the_keras_guide():
    class Guide(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="zeros")

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=predicted)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(tf.reduce_mean(tf.square(y - predicted)))
                else:
                    metric.update_state(y, predicted)
            # "compile_metrics" has a dict for its result.
            return {m.name: m.result() for m in self.metrics}

    with strategy.scope():
        model = Guide()
        model.compile(keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    history = model.fit(dataset(*linear_data()), epochs=2)
    return outcome(model, history)


def few_rows():
    """Fewer examples than replicas: the numbers are those of one device or finite at least."""
    x, y = linear_data()
    model = linear_model()
    one = model.evaluate(x[:1], y[:1])
    history = model.fit(x[:1], y[:1], epochs=2)
    return {
        "evaluate": one,
        "finite": bool(np.isfinite([one, *history.history["loss"]]).all())
        and all(np.isfinite(w).all() for w in model.get_weights()),
        "on_batch": model.predict_on_batch(x[:5]).shape,
        "predict": model.predict(x[:1]).shape,
    }


def uneven(sizes):
    """Fits and validates on data of so many rows in batches of that size."""
    results = {}
    for rows, batch in sizes:
        x, y = linear_data(rows)
        model = linear_model(metrics=["mae"])
        history = model.fit(
            dataset(x, y, batch=batch), epochs=2, validation_data=dataset(x, y, batch=batch)
        )
        results[f"{rows}/{batch}"] = outcome(model, history)
    return results


def more_uneven_batches():
    return uneven([(13, 8), (11, 8)])


def uneven_batches():
    """Global batches that do not divide, smaller than the replicas, of changing size, weighted."""
    results = uneven([(9, 8), (16, 5), (7, 1)])
    x, y = linear_data(23)
    parts = [dataset(x[a:b], y[a:b], batch=b - a) for a, b in ((0, 3), (3, 10), (10, 11), (11, 23))]
    changing = parts[0].concatenate(parts[1]).concatenate(parts[2]).concatenate(parts[3])
    model = linear_model()
    results["changing"] = outcome(model, model.fit(changing, epochs=2))
    model = linear_model()
    results["repeated"] = outcome(
        model, model.fit(dataset(x, y, batch=7).repeat(), epochs=2, steps_per_epoch=6)
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(
                    4, kernel_initializer="ones", kernel_regularizer="l2", activation="tanh"
                ),
                keras.layers.Dense(1, kernel_initializer="ones", activity_regularizer="l1"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), keras.losses.MeanSquaredError(reduction="sum"))
    results["sum"] = outcome(model, model.fit(dataset(x, y, np.linspace(0.1, 2, 23), batch=8)))
    model = linear_model()
    results["arrays"] = outcome(
        model, model.fit(x, y, batch_size=8, shuffle=False, class_weight=None, epochs=2)
    )
    return results


def clipping():
    results = {}
    for name, value in (("clipnorm", 0.5), ("global_clipnorm", 0.5), ("clipvalue", 0.2)):
        model = linear_model(keras.optimizers.Adam(0.1, weight_decay=0.01, **{name: value}))
        results[name] = outcome(model, model.fit(dataset(*linear_data(23), batch=6), epochs=2))
        model = linear_model(keras.optimizers.SGD(0.1, **{name: value}))
        results[f"{name} sgd"] = outcome(model, model.fit(dataset(*linear_data()), epochs=1))
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(8, 3, embeddings_initializer="ones"),
                keras.layers.Flatten(),
                keras.layers.Dense(1, kernel_initializer="ones"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1, clipnorm=0.3), "mse")
    ids = (np.arange(48).reshape(24, 2) * 7) % 5
    results["sparse"] = outcome(model, model.fit(dataset(ids, ids.sum(1, keepdims=True) * 1.0)))
    return results


def batch_norm():
    """Statistics of a batch: of the global batch if synchronised, finite and shared if not."""
    results = {}
    x, y = linear_data(9)
    for synchronized in (True, False):
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((3,)),
                    keras.layers.Dense(4, kernel_initializer="ones"),
                    keras.layers.BatchNormalization(momentum=0.5, synchronized=synchronized),
                    keras.layers.Dense(1, kernel_initializer="ones"),
                ]
            )
            model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(dataset(x, y, batch=8), epochs=2)  # The last batch has one example.
        finite = all(np.isfinite(w).all() for w in model.get_weights())
        if synchronized:
            model.set_weights([np.ones_like(w) for w in model.get_weights()])
            history = model.fit(dataset(*linear_data(24)), epochs=2)
            results["synchronized"] = outcome(model, history, finite=finite)
        else:
            results["finite"] = finite and bool(np.isfinite(model.evaluate(x, y)))
    return results


class StopAtBeginning(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.stop_training = True


def numbers_of_numpy_and_stops():
    model = linear_model()
    data = dataset(*linear_data())
    history = model.fit(
        data,
        epochs=np.int64(4),
        initial_epoch=np.int32(0),
        steps_per_epoch=data.cardinality().numpy(),
        validation_data=data,
        validation_steps=np.int64(2),
        validation_freq=[1, 3],
        callbacks=[StopAtBeginning()],
    )
    return outcome(model, history, epochs=history.epoch)


def plain_numbers():
    model = linear_model(keras.optimizers.SGD(0.25))
    model.fit(dataset(*linear_data()))
    return {
        "rate": float(model.optimizer.learning_rate),
        "iterations": int(model.optimizer.iterations),
    }


def seeded_orders():
    x, y = linear_data()
    model = linear_model()
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(48, seed=3).batch(BATCH)
    first = model.fit(data, epochs=3, validation_data=data)
    keras.utils.set_random_seed(5)
    second = linear_model()
    history = second.fit(x, y, batch_size=BATCH, epochs=2)
    tf.random.set_seed(None)
    return outcome(model, first, second=outcome(second, history))


class Numbers(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = IDS[index * BATCH : (index + 1) * BATCH]
        return rows, rows


def py_dataset_sees_all():
    model = ids_model()
    history = model.fit(Numbers(workers=2), epochs=3)
    return {"history": {k: v for k, v in history.history.items() if k != "loss"}}


def generator_sees_all():
    def batches():
        for index in range(4):
            rows = IDS[index * BATCH : (index + 1) * BATCH]
            yield rows, rows

    model = ids_model()
    history = model.fit(batches())
    return {"history": {k: v for k, v in history.history.items() if k != "loss"}}


def on_batches():
    x, y = linear_data()
    model = linear_model(metrics=["mae"])
    logs = [model.train_on_batch(x[:BATCH], y[:BATCH], return_dict=True) for _ in range(2)]
    tested = model.test_on_batch(x[:BATCH], y[:BATCH], return_dict=True)
    return outcome(
        model,
        logs=[{k: float(v) for k, v in each.items()} for each in logs],
        tested={k: float(v) for k, v in tested.items()},
    )


def classification_metrics():
    x, y = linear_data()
    labels = (y > 0).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(1, activation="sigmoid", kernel_initializer="ones"),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.01),
            "binary_crossentropy",
            metrics=["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="p")],
        )
    history = model.fit(dataset(x, labels), epochs=2, validation_data=(x, labels))
    return outcome(model, history)


def schedules_and_stops():
    x, y = linear_data()
    model = linear_model(keras.optimizers.SGD(0.5, momentum=0.9))
    history = model.fit(
        dataset(x, y),
        epochs=12,
        validation_data=dataset(x, y),
        callbacks=[
            keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5),
        ],
    )
    return outcome(model, history)


def fit_twice_and_trainable():
    model = linear_model()
    model.fit(dataset(*linear_data()), epochs=1)
    history = model.fit(dataset(*linear_data()), epochs=3, initial_epoch=1)
    return outcome(model, history, epochs=history.epoch)


def lone_numbers_from_step():
    class Returns(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="zeros")

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                error = tf.reduce_mean(tf.square(self(x) - y))
                loss = error / strategy.num_replicas_in_sync
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"my_error": error}

    with strategy.scope():
        model = Returns()
        model.compile(keras.optimizers.SGD(0.1))
    history = model.fit(dataset(*linear_data()), epochs=2)
    return outcome(model, history)


ALL = {name: value for name, value in list(globals().items()) if callable(value)}
results = {}
for name in names:
    results[name] = ALL[name]()
report(results=results, replicas=strategy.num_replicas_in_sync)
