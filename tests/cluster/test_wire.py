"""How gradients travel changes nothing that is counted, and the weights no more than it says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.harness import run_script
from tests.support.harness import start_script
from tfdist.testing.differences import Tolerance
from tfdist.testing.differences import excessive

SCRIPT = Path(__file__).parent / "scripts" / "wire.py"
PROGRAMS = ("clipped", "weighted", "masks", "scaled")

EXACT = Tolerance(rtol=1e-5, atol=1e-7)
#: What a sum of rounded gradients may differ by.
ROUNDED = Tolerance(rtol=2e-2, atol=1e-7)


def _run(tmp_path_factory, workers, **env):
    names = {f"TFDIST_{name.upper()}": value for name, value in env.items()}
    run = run_script(
        SCRIPT, workers=workers, env=names, timeout=120, tmp_path=tmp_path_factory.mktemp("wire")
    )
    assert run.code == 0, run.output
    return run, [run.result(f"worker {index}") for index in range(workers)]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    _, [report] = _run(tmp_path_factory, 1)
    return report


@pytest.fixture(scope="module")
def uncompressed(tmp_path_factory):
    """In many pieces; the compressed ones are in one."""
    run, reports = _run(tmp_path_factory, 2, transport="tensorflow", bucket_bytes="64")
    assert "gradients travel through TensorFlow's ring:" in run.output
    return reports


@pytest.fixture(
    scope="module", params=[pytest.param("bfloat16", marks=pytest.mark.slow), "float16"]
)
def compressed(request, tmp_path_factory):
    run, reports = _run(tmp_path_factory, 2, transport="tensorflow", compression=request.param)
    assert f"gradients travel through TensorFlow's ring, as {request.param}:" in run.output
    return reports


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_compression_all_numbers_are_those_of_one_device(program, uncompressed, one_device):
    for report in uncompressed:
        for part in ("still", "trained", "weights", "slots", "counters"):
            _assert_close(one_device, report, program, part, EXACT)


@pytest.mark.parametrize("program", PROGRAMS)
def test_compression_touches_weights_alone(program, compressed, one_device):
    expected = one_device[program]
    for report in compressed:
        for part in ("weights", "trained"):
            _assert_close(one_device, report, program, part, ROUNDED)
        # Nothing moves: losses are their sums over their divisors, metrics what they counted.
        _assert_close(one_device, report, program, "still", EXACT)
        assert report[program]["trained"]["total"] == expected["trained"]["total"]
        assert report[program]["counters"] == expected["counters"]
        assert report[program] == compressed[0][program]


@pytest.mark.parametrize("program", PROGRAMS)
def test_compression_is_felt(program, compressed, uncompressed):
    assert compressed[0][program]["weights"] != uncompressed[0][program]["weights"]


@pytest.mark.slow  # Those in many pieces are right: they have been compared with one device.
def test_many_pieces_give_the_weights_of_one(uncompressed, tmp_path_factory):
    _, reports = _run(tmp_path_factory, 2, transport="tensorflow")
    assert reports == uncompressed


STUCK = """
    import time
    import tfdist
    strategy = tfdist.strategy(
        communication=tfdist.CommunicationOptions(transport="shared_memory", timeout_seconds=3)
    )
    import keras
    import numpy as np
    import tensorflow as tf

    class Stuck(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3 and tfdist.detect().task.index == 1:
                print("sleeps", flush=True)
                time.sleep(600)

    x = np.ones((24, 3), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4, drop_remainder=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(data, verbose=0, callbacks=[Stuck()])
"""


def test_a_sum_that_takes_too_long_ends_the_job_and_names_who_is_missing(tmp_path):
    with start_script(STUCK, workers=2, launcher_args=["--grace", "5"], tmp_path=tmp_path) as job:
        job.wait_for_line("sleeps", 60)
        began = time.monotonic()
        run = job.wait(40)
    assert run.code == 1, run.output
    assert time.monotonic() - began < 30
    [message] = [line for line in run.lines("worker 0") if "tfdist: error:" in line]
    assert "within 3 s" in message and "nothing from worker 1" in message


def _assert_close(expected, received, program, part, tolerance):
    found = excessive(
        _numbered(expected[program][part]), _numbered(received[program][part]), tolerance
    )
    assert not found, f"{part}: " + "\n".join(map(str, found))


def _numbered(values):
    return dict(enumerate(values)) if isinstance(values, list) else values
