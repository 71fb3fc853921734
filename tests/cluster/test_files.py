"""What is written by a job of several workers: by the chief alone, whole or not at all."""

from __future__ import annotations

import csv
import json
import os
import textwrap
from pathlib import Path

from tests.support.harness import run_script

SOURCE = textwrap.dedent(
    """
    import os, sys
    import tensorflow as tf
    # A plain script: it builds its strategy itself and knows nothing of tfdist.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import keras
    import numpy as np
    from report import report

    me = strategy.cluster_resolver.task_id
    r = np.random.RandomState(0)
    x = r.randn(24, 3).astype("float32")
    y = (x @ np.array([[1.0], [-2.0], [3.0]], "float32")).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)

    def build():
        with strategy.scope():
            model = keras.Sequential([
                keras.Input((3,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return model

    class MyLogger(keras.callbacks.CSVLogger):
        # Enters a collective, so it must run everywhere; writes, so it must write once.
        def on_epoch_end(self, epoch, logs=None):
            self.model.evaluate(data, verbose=0)
            super().on_epoch_end(epoch, logs)

    model = build()
    history = model.fit(
        data,
        epochs=4,
        validation_data=data,
        callbacks=[
            keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True, verbose=1),
            keras.callbacks.ModelCheckpoint("each-{epoch}.weights.h5", save_weights_only=True),
            keras.callbacks.CSVLogger("log.csv"),
            MyLogger("mine.csv"),
            keras.callbacks.TensorBoard("board"),
            keras.callbacks.EarlyStopping(patience=100, verbose=1),
        ],
    )
    model.save("all.keras")
    # Whoever has saved may read, although the chief alone writes.
    loaded = keras.models.load_model("all.keras")
    assert all((a == b).all() for a, b in zip(loaded.get_weights(), model.get_weights()))
    with strategy.scope():
        # In an open scope Keras makes variables while it saves, which is a collective.
        model.save_weights("all.weights.h5")
    model.save_weights("sharded.weights.json", max_shard_size=1)
    keras.saving.save_model(model, "function.keras")
    model.export("exported", verbose=False)
    if me == 0:
        model.save("chief-only.keras")   # must not wait for the others
    # As in the official tutorial: other workers save to a directory of their own and delete it.
    directory = "tutorial" if me == 0 else f"workertemp_{me}"
    tf.io.gfile.makedirs(directory)
    model.save(os.path.join(directory, "model.keras"))
    if me != 0:
        tf.io.gfile.rmtree(directory)
    loaded = keras.models.load_model("tutorial/model.keras")
    assert all((a == b).all() for a, b in zip(loaded.get_weights(), model.get_weights()))
    report(
        history=history.history,
        weights=model.get_weights(),
        predict=model.predict(x, verbose=0),
        optimizer=[v.numpy() for v in model.optimizer.variables],
    )
    """
)


def test_every_worker_may_save_and_only_the_chief_writes_whole_files(tmp_path):
    run = run_script(SOURCE, workers=2, timeout=170, tmp_path=tmp_path)
    assert run.code == 0, run.output
    zero, one = run.result("worker 0"), run.result("worker 1")
    assert zero == one
    left = {
        p.name for p in tmp_path.iterdir() if p.name not in ("script.py", "reports", "__pycache__")
    }
    assert left == {
        "best.keras",
        *(f"each-{epoch}.weights.h5" for epoch in (1, 2, 3, 4)),
        "log.csv",
        "mine.csv",
        "board",
        "all.keras",
        "all.weights.h5",
        "sharded.weights.json",
        "sharded_00000.weights.h5",
        "function.keras",
        "exported",
        "chief-only.keras",
        "tutorial",
    }
    for name in ("log.csv", "mine.csv"):
        with open(tmp_path / name) as file:
            assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2", "3"]
    events = [f for _, _, files in os.walk(tmp_path / "board") for f in files if "tfevents" in f]
    assert len(events) == 2  # One writer each for train and validation.
    loaded = _load(tmp_path, "all.keras", "function.keras", "chief-only.keras")
    for weights in loaded.values():
        assert weights == zero["weights"]
    # The chief alone speaks.
    assert any("Epoch 4/4" in line for line in run.lines("worker 0"))
    assert not any("Epoch " in line for line in run.lines("worker 1"))


def test_a_reader_never_finds_half_a_checkpoint(tmp_path):
    source = textwrap.dedent(
        """
        import threading
        import zipfile
        import tfdist
        strategy = tfdist.strategy()
        import keras
        import numpy as np
        import tensorflow as tf
        from report import report

        me = tfdist.detect().task.index
        x = np.ones((8, 256), "float32")
        data = tf.data.Dataset.from_tensor_slices((x, x)).batch(4)
        with strategy.scope():
            model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(2048),
                                      keras.layers.Dense(256)])
            model.compile("sgd", "mse")
        read = broken = 0
        done = threading.Event()

        def look():
            global read, broken
            while not done.is_set():
                try:
                    with zipfile.ZipFile("point.keras") as archive:
                        assert archive.testzip() is None
                    read += 1
                except FileNotFoundError:
                    pass
                except Exception as error:
                    broken += 1
                    print("broken", repr(error))

        reader = threading.Thread(target=look)
        reader.start()
        model.fit(data, epochs=30, verbose=0,
                  callbacks=[keras.callbacks.ModelCheckpoint("point.keras")])
        done.set()
        reader.join()
        report(read=read, broken=broken)
        """
    )
    run = run_script(source, workers=2, timeout=120, tmp_path=tmp_path)
    assert run.code == 0, run.output
    for task in ("worker 0", "worker 1"):
        assert run.result(task)["broken"] == 0
        assert run.result(task)["read"] > 5


def test_stock_backup_and_restore_continues_on_all_workers(tmp_path):
    source = textwrap.dedent(
        """
        import os
        import tfdist
        strategy = tfdist.strategy()
        import keras
        import numpy as np
        import tensorflow as tf
        from report import report

        x = np.random.RandomState(0).randn(16, 3).astype("float32")
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")

        class Die(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 3 and os.environ["TFDIST_INCARNATION"] == "0":
                    raise SystemExit(7)

        history = model.fit(data, epochs=5, verbose=0,
                            callbacks=[keras.callbacks.BackupAndRestore("backup"), Die()])
        report(epochs=history.epoch, weights=model.get_weights(),
               iterations=model.optimizer.iterations)
        """
    )
    run = run_script(
        source, workers=2, launcher_args=["--max-restarts", "1"], timeout=150, tmp_path=tmp_path
    )
    assert run.code == 0, run.output
    zero, one = run.result("worker 0"), run.result("worker 1")
    assert zero == one
    assert zero["epochs"] == [3, 4]
    assert zero["iterations"] == 20


def _load(folder: Path, *names: str) -> dict[str, list]:
    """Loads saved models in a process of its own, without any strategy."""
    source = textwrap.dedent(
        f"""
        import keras
        from report import report
        report(**{{name: keras.models.load_model(name).get_weights() for name in {names!r}}})
        """
    )
    run = run_script(source, workers=1, timeout=60, tmp_path=folder)
    assert run.code == 0, run.output
    result: dict[str, list] = json.loads(json.dumps(run.result("worker 0")))
    return result
