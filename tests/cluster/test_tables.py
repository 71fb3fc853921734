"""Tables on real parameter servers and replicas: where shards are, that they train and load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import run_script

SCRIPTS = Path(__file__).parent / "scripts"


def _result(script, workers, tmp_path):
    run = run_script(
        SCRIPTS / script,
        workers=workers,
        launcher_args=["--ps", "2"],
        args=[str(tmp_path)],
        timeout=150,
        tmp_path=tmp_path,
    )
    assert run.code == 0, run.output
    return run.result("chief 0")


def test_tables_on_two_servers_train_as_in_one_process_and_load_there(tmp_path):
    result = _result("tables.py", 1, tmp_path)
    for devices in result["shards"]:
        assert len(devices) == 2
        assert len(set(devices)) == 2
        assert all("/job:ps/" in device for device in devices)
    assert result["asked"] == [4, 3, 3]
    assert all(result["slots_beside"])
    assert result["iterations"] == 6
    assert result["moved"] == result["touched"]
    assert result["difference"] == pytest.approx(0, abs=1e-5)


def test_plain_keras_trains_under_a_strategy_that_cuts_variables(tmp_path, clocks):
    clocks("supervisor.SERVER_SECONDS", 1)
    results = _result("partitioned.py", 1, tmp_path)
    assert set(results) == {"min size", "fixed shards"}
    for name, parts in (("min size", [71, 70, 70]), ("fixed shards", [106, 105])):
        result = results[name]
        assert result["steps"] == 12 * 96 / 8
        assert result["steps after loading"] == 13 * 96 / 8
        assert result["loss"][-1] < 0.1 * result["loss"][0]
        # Keras's own variables stay whole, and our table is cut as the partitioner says.
        assert result["shapes"] == [
            [211, 8],
            *[[rows, 8] for rows in parts],
            *([32, 64], [64], [64, 1], [1]),
        ]
        assert result["devices"] == ["/job:ps"]
        assert result["tasks"] == ["task:0", "task:1"]
        assert result["off"] == pytest.approx([0.0, 0.0], abs=1e-5)
        assert result["evaluated"] == pytest.approx(result["alone"], rel=1e-5)


def test_replicas_update_rows_as_one_device_does(tmp_path):
    source = """
        import contextlib
        import tfdist
        strategy = tfdist.strategy("mirrored", replicas=2)
        import keras
        import numpy as np
        from report import report

        random = np.random.RandomState(0)
        # Of rows 0 to 8, and 20 to 28 in the other shard. The last batch is of one example.
        x, y = random.randint(0, 9, (21, 4)) + [0, 0, 20, 20], random.randn(21, 1)

        def weights(scope):
            keras.utils.set_random_seed(1)
            with scope:
                table = tfdist.layers.Embedding(40, 3, num_shards=2)
                layers = [table, keras.layers.Flatten(), keras.layers.Dense(1)]
                model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
                adam = keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.1)
                model.compile(tfdist.optimizers.RowSparse(adam), "mse")
            start = table.get_weights()[0]
            model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
            end = table.get_weights()[0]
            return end, (start != end).any(axis=1), model.layers[-1].get_weights()[0]

        one, two = weights(contextlib.nullcontext()), weights(strategy.scope())
        report(
            rows=[np.flatnonzero(w[1]).tolist() for w in (one, two)],
            table=float(np.abs(one[0] - two[0]).max()),
            kernel=float(np.abs(one[2] - two[2]).max()),
        )
    """
    run = run_script(source, workers=1, timeout=120, tmp_path=tmp_path)
    assert run.code == 0, run.output
    result = run.result()
    assert result["rows"] == [[*range(9), *range(20, 29)]] * 2
    assert result["table"] == pytest.approx(0, abs=1e-5)
    assert result["kernel"] == pytest.approx(0, abs=1e-5)
