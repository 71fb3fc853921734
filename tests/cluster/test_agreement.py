"""Workers that were given different things are made equal or refused, never left to diverge."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.harness import run_script

HEAD = textwrap.dedent(
    """
    import tfdist
    strategy = tfdist.strategy()
    import keras
    import numpy as np
    import tensorflow as tf
    from report import report

    me = tfdist.detect().task.index
    r = np.random.RandomState(0)
    x = r.randn(24, 3).astype("float32")
    y = (x @ np.array([[1.0], [-2.0], [3.0]], "float32")).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)

    def build(**kwargs):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **kwargs)
        return model
    """
)

REFUSED = {
    "steps_per_epoch": ("build().fit(data.repeat(), steps_per_epoch=3 + me)", "steps_per_epoch"),
    "epochs": ("build().fit(data, epochs=1 + me)", "epochs"),
    "validation on the chief only": (
        "build().fit(data, validation_data=data if me == 0 else None)",
        "validation_data",
    ),
    "validation of other length": (
        "build().fit(data, validation_data=data.take(1 + me))",
        "validation the number of batches",
    ),
    "data of other length": ("build().fit(data.take(1 + me))", "number of batches in the data"),
    "data of other structure": (
        "build().fit(data.map(lambda a, b: (a, b, b[:, 0])) if me else data)",
        "structure of the data",
    ),
    "other model": (
        "with strategy.scope():\n"
        "    layers = [keras.layers.Dense(2), keras.layers.Dense(1)][me:]\n"
        "    model = keras.Sequential(layers)\n"
        "    model.compile('sgd', 'mse')\n"
        "model.fit(data)",
        "the kinds of layers",
    ),
    "other optimizer": (
        "with strategy.scope():\n"
        "    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "    model.compile(keras.optimizers.SGD(0.1, momentum=0.5 * me), 'mse')\n"
        "model.fit(data)",
        "the optimizer",
    ),
    "endless data on one": (
        "build().fit(data.repeat() if me else data, steps_per_epoch=3)",
        "whether the data ends",
    ),
    "evaluate on the chief while the other trains": (
        "model = build(); model.fit(data)\nmodel.evaluate(data) if me == 0 else model.fit(data)",
        "same order",
    ),
}


MADE_EQUAL = textwrap.dedent(
    """
    from keras.callbacks import Callback

    class Stop(Callback):
        # Worker 1 alone wants to stop after two of four epochs.
        def on_epoch_end(self, epoch, logs=None):
            if me == 1 and epoch == 1:
                self.model.stop_training = True

    class StopInside(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if me == 1 and batch == 1:
                self.model.stop_training = True

    model = build()
    model.set_weights([w + me for w in model.get_weights()])
    start = model.get_weights()
    results = {"mine": start}
    history = model.fit(data, epochs=4, callbacks=[Stop()])
    results["stopped"] = [history.history["loss"], model.get_weights()]

    model = build()
    history = model.fit(data, epochs=4, callbacks=[StopInside()])
    results["stopped inside"] = [len(history.epoch), int(model.optimizer.iterations.numpy())]

    class Rate(Callback):
        # Worker 1 alone changes its learning rate: all go on with the chief's.
        def on_epoch_end(self, epoch, logs=None):
            if me == 1:
                self.model.optimizer.learning_rate = 0.0

    model = build()
    history = model.fit(data, epochs=3, callbacks=[Rate()])
    results["rate"] = [float(model.optimizer.learning_rate.numpy()), history.history["loss"]]
    results["slots"] = [v.numpy() for v in model.optimizer.variables]

    # Only one worker has a callback that looks at every batch.
    model = build()
    history = model.fit(data, callbacks=[StopInside()] if me == 1 else None)
    results["one sided"] = int(model.optimizer.iterations.numpy())

    # Only the chief restores an earlier epoch.
    model = build()
    history = model.fit(data, epochs=3, initial_epoch=1 if me == 0 else 0)
    results["epochs"] = history.epoch
    """
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One cluster in which all of MADE_EQUAL is made equal, then all of REFUSED is refused."""
    source = HEAD + MADE_EQUAL + "messages = {}\n"
    for case, (body, _) in REFUSED.items():
        source += f"try:\n{textwrap.indent(body, '    ')}\n"
        source += f"except tfdist.TfdistError as error:\n    messages[{case!r}] = str(error)\n"
    source += "report(results=results, messages=messages)\n"
    run = run_script(source, workers=2, timeout=180, tmp_path=tmp_path_factory.mktemp("agree"))
    assert run.code == 0, run.output
    return run


def test_different_arguments_are_refused_in_one_sentence_on_every_worker(run):
    messages = run.result("worker 0")["messages"]
    assert messages == run.result("worker 1")["messages"]
    assert set(messages) == set(REFUSED)
    for case, (_, words) in REFUSED.items():
        message = messages[case]
        assert words in message, message
        assert "worker 0" in message and "worker 1" in message and "Fix:" in message


def test_weights_stops_and_rates_are_made_equal_from_the_chief(run):
    zero, one = (run.result(task)["results"] for task in ("worker 0", "worker 1"))
    assert zero.pop("mine") != one.pop("mine")
    assert zero == one
    assert len(zero["stopped"][0]) == 2
    assert zero["stopped inside"] == [1, 2]
    assert zero["rate"][0] == pytest.approx(0.1)
    assert zero["one sided"] == 2
    assert zero["epochs"] == [1, 2]
    assert "go on with the chief's" in run.output


def test_files_of_their_own_are_read_to_the_end_and_too_few_are_refused(tmp_path):
    source = HEAD + textwrap.dedent(
        """
        import os
        # One file of 14 examples, one of 6: with the policy FILE each worker reads one of them.
        if me == 0:
            for name, rows in (("a", range(14)), ("b", range(14, 20))):
                with tf.io.TFRecordWriter(f"{name}.tfrecord") as writer:
                    for row in rows:
                        writer.write(str(row).encode())
        strategy.reduce("SUM", tf.constant(1.0), axis=None)

        def read(pattern, policy):
            files = tf.data.Dataset.list_files(pattern, shuffle=False)
            data = tf.data.TFRecordDataset(files).map(lambda r: tf.strings.to_number(r)[None])
            data = data.batch(4).map(lambda v: (v, v))
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = policy
            return data.with_options(options)

        class Sum(keras.metrics.Metric):
            def __init__(self):
                super().__init__(name="total")
                self.sum = self.add_variable((), initializer="zeros", name="sum")
            def update_state(self, y_true, y_pred, sample_weight=None):
                self.sum.assign(self.sum + tf.reduce_sum(y_true))
            def result(self):
                return self.sum

        def total(data):
            with strategy.scope():
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse", metrics=[Sum()])
            return model.fit(data, epochs=2, verbose=0).history["total"]

        policies = tf.data.experimental.AutoShardPolicy
        known = tf.data.experimental.assert_cardinality(5)
        results = {
            "file": total(read("[ab].tfrecord", policies.FILE)),
            "file of known length": total(read("[ab].tfrecord", policies.FILE).apply(known)),
            "one file": total(read("a.tfrecord", policies.AUTO)),
        }
        try:
            total(read("a.tfrecord", policies.FILE))
        except tfdist.TfdistError as error:
            results["refused"] = str(error)
        report(**results)
        os._exit(0)  # A worker that was refused has no more to say to the others.
        """
    )
    run = run_script(source, workers=2, timeout=120, tmp_path=tmp_path)
    for task in ("worker 0", "worker 1"):
        results = run.result(task)
        assert results["file"] == [190.0, 190.0], run.output
        assert results["file of known length"] == [190.0, 190.0], run.output
        assert results["one file"] == [91.0, 91.0]
        assert "at least one file for every worker" in results["refused"]


def test_a_resolver_of_the_users_own_meets_the_others_too(tmp_path):
    source = textwrap.dedent(
        """
        import tensorflow as tf
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
        import keras
        import numpy as np
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)
        from report import report
        from tfdist.cluster import current
        report(group=current.group().size, weights=model.get_weights())
        """
    )
    run = run_script(source, workers=2, timeout=90, tmp_path=tmp_path)
    assert run.code == 0, run.output
    assert run.result("worker 0") == run.result("worker 1")
    assert run.result("worker 0")["group"] == 2


def test_a_refusal_ends_the_job_without_a_traceback(tmp_path):
    body, words = REFUSED["epochs"]
    run = run_script(HEAD + body, workers=2, timeout=90, tmp_path=tmp_path)
    assert run.code == 1, run.output
    for task in ("worker 0", "worker 1"):
        [message] = [line for line in run.lines(task) if "tfdist: error:" in line]
        assert words in message
    assert "Traceback" not in run.output
