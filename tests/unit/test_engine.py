"""The engine goes in, comes out, and knows when upstream has changed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from tests.support.harness import LEAN
from tests.support.harness import ROOT
from tests.support.harness import run_script


def _python(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": f"{LEAN}{os.pathsep}{ROOT}"},
    )


def test_importing_tfdist_and_detecting_imports_no_tensorflow():
    result = _python(
        """
        import sys
        import tfdist
        tfdist.detect()
        heavy = {"tensorflow", "keras", "numpy", "absl"} & set(sys.modules)
        assert not heavy, heavy
        import tfdist.collectives
        tfdist.testing.assert_matches_single_device
        assert not {"tensorflow", "keras"} & set(sys.modules)
        assert len([name for name in tfdist.__all__ if name != "__version__"]) <= 12
        """
    )
    assert result.returncode == 0, result.stderr


def test_the_hooks_import_nothing_until_the_script_does():
    result = _python(
        """
        import sys
        from tfdist.engine import hooks
        hooks.install()
        assert not {"tensorflow", "keras"} & set(sys.modules)
        import tensorflow
        strategy = tensorflow.distribute.MultiWorkerMirroredStrategy
        assert hasattr(strategy.__init__, "_tfdist_original")
        import keras
        from tfdist.engine import activate
        assert activate.is_active()
        # What is looked up through the loader still works.
        assert "tfdist" not in type(keras.__spec__.loader).__module__
        assert "tfdist" not in type(tensorflow.__spec__.loader).__module__
        """
    )
    assert result.returncode == 0, result.stderr


def test_it_comes_out_without_a_trace_and_goes_in_once():
    result = _python(
        """
        import keras
        import tensorflow as tf
        from tensorflow.python.data.util import random_seed
        from tfdist.engine import activate
        from tfdist.engine import repairs

        def all_functions():
            found = [getattr(r.owner, r.name) for r in repairs.repairs()]
            strategy = tf.distribute.MultiWorkerMirroredStrategy
            return [*found, strategy.__init__, random_seed.get_seed]

        before = all_functions()
        activate.activate()
        once = all_functions()
        assert not any(a is b for a, b in zip(before, once))
        activate.activate()
        assert all(a is b for a, b in zip(once, all_functions()))
        assert activate.is_active()
        activate.deactivate()
        assert all(a is b for a, b in zip(before, all_functions()))
        assert not activate.is_active()
        """
    )
    assert result.returncode == 0, result.stderr


def test_every_probed_defect_is_in_the_installed_keras():
    """Fails on the day upstream changes one of them: then look at the repair again."""
    result = _python(
        """
        from tfdist.engine import activate
        from tfdist.engine import repairs
        probed = [r for r in repairs.repairs() if r.probe]
        assert len(probed) >= 5
        gone = [r.name for r in probed if not activate.defect_is_there(r)]
        assert not gone, gone
        """
    )
    assert result.returncode == 0, result.stderr


def test_another_keras_is_refused_with_the_line_that_fixes_it():
    result = _python(
        """
        import keras
        import tfdist
        keras.backend.backend, backend = lambda: "jax", keras.backend.backend
        try:
            tfdist.activate()
        except tfdist.TfdistError as error:
            print(error)
        keras.backend.backend = backend
        keras.__version__ = "3.99.0"
        try:
            tfdist.activate()
        except tfdist.TfdistError as error:
            print(error)
        """
    )
    assert result.returncode == 0, result.stderr
    backend, version = result.stdout.splitlines()
    assert "the jax backend" in backend and "Fix:" in backend
    assert "Keras 3.99.0" in version and "Fix:" in version


def test_a_model_without_a_strategy_runs_keras_alone():
    result = _python(
        """
        import numpy as np
        import keras
        import tfdist
        tfdist.activate()
        from tfdist.engine import loop
        def never(*args, **kwargs):
            raise AssertionError("the engine took a model that is not its own")
        loop.fit.__code__ = never.__code__
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        """
    )
    assert result.returncode == 0, result.stderr


STOCK = textwrap.dedent(
    """
    import sys
    import tensorflow as tf
    if sys.argv[1] == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import keras
    import numpy as np
    from report import report

    class Count(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="count")
            self.n = self.add_variable((), initializer="zeros", name="n")
        def update_state(self, y_true, y_pred, sample_weight=None):
            self.n.assign(self.n + tf.cast(tf.shape(y_true)[0], "float32"))
        def result(self):
            return self.n

    x = np.ones((64, 2), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Count()])
    data = ((x[i:i + 8], x[i:i + 8, :1]) for i in range(0, 64, 8))
    history = model.fit(data, verbose=0)
    report(seen=history.history["count"][0], iterations=model.optimizer.iterations)
    """
)


def test_stock_keras_still_crashes_with_several_workers(tmp_path):
    """When this fails, upstream has repaired keras issue 20585: look at the repairs again."""
    run = run_script(
        STOCK,
        workers=2,
        args=["multi"],
        env={"TFDIST_ENGINE": "0"},
        launcher_args=["--grace", "3"],
        timeout=120,
        tmp_path=tmp_path,
    )
    assert run.code == 1, run.output
    assert "PerReplica" in run.output


def test_stock_keras_still_loses_batches_of_a_generator(tmp_path):
    run = run_script(
        STOCK,
        workers=1,
        args=["mirrored"],
        env={"TFDIST_ENGINE": "0"},
        timeout=120,
        tmp_path=tmp_path,
    )
    assert run.code == 0, run.output
    assert run.result()["seen"] < 64


def test_the_engine_loses_none_and_counts_right(tmp_path):
    run = run_script(STOCK, workers=1, args=["mirrored"], timeout=120, tmp_path=tmp_path)
    assert run.code == 0, run.output
    assert run.result() == {"seen": 64.0, "iterations": 8}
