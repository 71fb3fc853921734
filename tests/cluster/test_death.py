"""A task that dies, stops or never comes ends the others with a message, within a minute."""

from __future__ import annotations

import signal
import socket
import textwrap
import time

import pytest

from tests.support.harness import run_script
from tests.support.harness import start_script
from tfdist.cluster import rendezvous

TRAIN = textwrap.dedent(
    """
    import tfdist
    strategy = tfdist.strategy()
    import keras
    import numpy as np
    import tensorflow as tf

    me = tfdist.detect().task.index
    x = np.ones((24, 3), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(12)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    class Talk(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2:
                print("in the middle of training", flush=True)
            if epoch == 4:
                hook()

    hook = lambda: None
    """
)
ENDLESS = TRAIN + "model.fit(data, epochs=1_000_000, verbose=0, callbacks=[Talk()])\n"


def _messages(job, task):
    return [line for line in job.lines(task) if "Expected every task of the cluster" in line]


@pytest.mark.parametrize("victim", ["worker 0", "worker 1"])
def test_kill_9_of_a_worker_ends_the_others_with_its_name(victim, tmp_path):
    with start_script(
        ENDLESS, workers=3, launcher_args=["--grace", "60"], tmp_path=tmp_path
    ) as job:
        job.wait_for_line("in the middle of training", 90)
        started = time.monotonic()
        job.kill(victim, signal.SIGKILL)
        run = job.wait(75)
    assert run.code == 128 + signal.SIGKILL, run.output
    assert time.monotonic() - started < 60
    for task in {"worker 0", "worker 1", "worker 2"} - {victim}:
        assert any(f"{victim} (127.0.0.1:" in line for line in _messages(run, task)), run.output


@pytest.mark.parametrize("silence", ["10", pytest.param(None, marks=pytest.mark.slow)])
def test_a_stopped_worker_is_noticed_although_its_connections_stay_open(silence, tmp_path):
    assert rendezvous.SILENCE_SECONDS < 40  # What goes without the variable; and a test may wait.
    with start_script(
        ENDLESS,
        workers=2,
        launcher_args=["--grace", "5"],
        env={"TFDIST_SILENCE_TIMEOUT": silence},
        tmp_path=tmp_path,
    ) as job:
        job.wait_for_line("in the middle of training", 90)
        started = time.monotonic()
        job.kill("worker 1", signal.SIGSTOP)
        run = job.wait(90)
    assert run.code == 1, run.output
    assert time.monotonic() - started < 75  # 60 s to notice, and the launcher's grace
    assert any("worker 1" in line and "said nothing" in line for line in _messages(run, "worker 0"))


def test_an_error_in_one_worker_is_told_to_the_others(tmp_path):
    source = TRAIN + textwrap.dedent(
        """
        def hook():
            if me == 1:
                raise ValueError("the disk is full, say")
        model.fit(data, epochs=1_000_000, verbose=0, callbacks=[Talk()])
        """
    )
    run = run_script(
        source, workers=2, timeout=120, launcher_args=["--grace", "60"], tmp_path=tmp_path
    )
    assert run.code == 1, run.output
    assert any("the disk is full, say" in line for line in _messages(run, "worker 0")), run.output


def test_a_worker_that_ends_early_is_named(tmp_path):
    source = TRAIN + textwrap.dedent(
        """
        model.fit(data, epochs=2, verbose=0)
        if me == 0:
            model.fit(data, epochs=2, verbose=0)
        """
    )
    run = run_script(
        source, workers=2, timeout=120, launcher_args=["--grace", "60"], tmp_path=tmp_path
    )
    assert run.code == 1, run.output
    assert any("worker 1 has ended" in line for line in run.lines("worker 0")), run.output


@pytest.fixture(scope="module")
def well(tmp_path_factory):
    """A job that ends well: with a model of each worker's own, a pool, and a late worker."""
    source = TRAIN + textwrap.dedent(
        """
        import multiprocessing
        import time
        def double(number):
            return 2 * number
        model.fit(data, epochs=2, verbose=0)
        own = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="my_own")
        own.compile("sgd", "mse")
        own.fit(data, verbose=0)
        own.fit(data, verbose=0)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(double, range(3)), flush=True)
        if me == 1:
            time.sleep(5)
            print("late but well", float(tf.reduce_sum(model.trainable_variables[0])), flush=True)
        """
    )
    run = run_script(source, workers=2, timeout=120, tmp_path=tmp_path_factory.mktemp("well"))
    assert run.code == 0, run.output
    return run


def test_the_chief_waits_at_the_end_for_those_who_are_busy(well):
    assert any("late but well" in line for line in well.lines("worker 1"))


def test_a_pool_of_processes_can_be_ended(well):
    assert "[0, 2, 4]" in well.lines("worker 0") and "[0, 2, 4]" in well.lines("worker 1")


def test_a_model_that_the_others_have_no_part_in_is_warned_of(well):
    for task in ("worker 0", "worker 1"):
        warnings = [line for line in well.lines(task) if "'my_own' was built outside" in line]
        assert len(warnings) == 1


def test_a_worker_that_dies_while_models_are_built_does_not_leave_the_others_waiting(tmp_path):
    source = textwrap.dedent(
        """
        import os
        import tfdist
        strategy = tfdist.strategy()
        import keras
        if tfdist.detect().task.index == 0:
            os.kill(os.getpid(), 9)
        with strategy.scope():
            # Each variable waits for the chief's value.
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        """
    )
    started = time.monotonic()
    run = run_script(
        source, workers=2, timeout=100, launcher_args=["--grace", "60"], tmp_path=tmp_path
    )
    assert run.code == 128 + signal.SIGKILL, run.output
    assert time.monotonic() - started < 60
    assert any("worker 0 (127.0.0.1:" in line for line in _messages(run, "worker 1")), run.output


#: That a stopped worker is noticed, test_a_stopped_worker_... has, too.
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_loop_of_the_users_own_does_not_wait_for_the_dead(number, tmp_path):
    source = textwrap.dedent(
        """
        import tensorflow as tf
        strategy = tf.distribute.MultiWorkerMirroredStrategy()

        @tf.function
        def step():
            add = lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))
            return strategy.run(add)

        for number in range(1_000_000):
            step()
            if number == 10:
                print("in the middle of training", flush=True)
        """
    )
    with start_script(
        source,
        workers=2,
        launcher_args=["--grace", "2"],
        # So that the test need not sit through the full minute.
        env={"TFDIST_SILENCE_TIMEOUT": "10"},
        tmp_path=tmp_path,
    ) as job:
        job.wait_for_line("in the middle of training", 90)
        job.kill("worker 1", number)
        job.wait_for_line("worker 1 (127.0.0.1:", 40)
        run = job.wait(60)
    assert run.code == (137 if number == signal.SIGKILL else 1), run.output
    assert any("worker 1 (127.0.0.1:" in line for line in run.lines("worker 0")), run.output


def test_a_worker_that_gives_up_with_an_exit_code_is_told_of(tmp_path):
    source = TRAIN + textwrap.dedent(
        """
        import os, sys
        def hook():
            if me == 0:
                raise ValueError("the disk is full, say")
        try:
            model.fit(data, epochs=1_000_000, verbose=0, callbacks=[Talk()])
        except ValueError:
            sys.last_value = None  # As without the launcher.
            sys.exit(3)
        """
    )
    run = run_script(
        source, workers=2, timeout=100, launcher_args=["--grace", "60"], tmp_path=tmp_path
    )
    assert run.code == 3, run.output
    assert any("worker 0" in line for line in _messages(run, "worker 1")), run.output


def test_a_worker_that_never_comes_is_named_at_the_deadline(tmp_path):
    source = textwrap.dedent(
        """
        import time
        import tfdist
        if tfdist.detect().task.index == 1:
            time.sleep(60)
        started = time.monotonic()
        try:
            tfdist.strategy()
        finally:
            print("waited", time.monotonic() - started, flush=True)
        """
    )
    run = run_script(
        source,
        workers=3,
        timeout=100,
        launcher_args=["--rendezvous-timeout", "8", "--grace", "3"],
        tmp_path=tmp_path,
    )
    assert run.code == 1, run.output
    for task in ("worker 0", "worker 2"):
        [message] = [line for line in run.lines(task) if "tfdist: error:" in line]
        assert "still missing worker 1 (127.0.0.1:" in message
        assert "worker 2" not in message and "worker 0" not in message
        [waited] = [line.split()[1] for line in run.lines(task) if line.startswith("waited")]
        assert 7 < float(waited) < 12


def test_a_plain_script_has_the_barrier_too(tmp_path):
    source = textwrap.dedent(
        """
        import json, os, time
        import tensorflow as tf
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
            time.sleep(60)
        tf.distribute.MultiWorkerMirroredStrategy()
        """
    )
    run = run_script(
        source,
        workers=2,
        timeout=100,
        launcher_args=["--rendezvous-timeout", "8", "--grace", "3"],
        tmp_path=tmp_path,
    )
    assert run.code == 1, run.output
    assert any("still missing worker 0 (127.0.0.1:" in line for line in run.lines("worker 1"))


def test_a_port_in_use_is_named_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        source = textwrap.dedent(
            f"""
            import json, os
            os.environ["TF_CONFIG"] = json.dumps({{
                "cluster": {{"worker": ["127.0.0.1:{port}", "127.0.0.1:1"]}},
                "task": {{"type": "worker", "index": 0}},
            }})
            import tfdist
            tfdist.strategy()
            """
        )
        run = run_script(source, workers=1, timeout=60, tmp_path=tmp_path)
    assert run.code == 1, run.output
    assert f"port {port} of worker 0" in run.output and "in use" in run.output
