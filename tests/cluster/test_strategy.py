"""`tfdist.strategy()` builds what was chosen, in every role, or says why it cannot."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.harness import run_script


def test_replicas_can_be_asked_for_on_a_cpu(tmp_path):
    source = """
        import tfdist
        strategy = tfdist.strategy("mirrored", replicas=3)
        import tensorflow as tf
        from report import report
        total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(2.0)), axis=None)
        report(kind=type(strategy).__name__, replicas=strategy.num_replicas_in_sync, total=total)
    """
    run = run_script(source, workers=1, timeout=90, tmp_path=tmp_path)
    assert run.code == 0, run.output
    assert run.result() == {"kind": "MirroredStrategy", "replicas": 3, "total": 6.0}


def test_one_process_gets_the_default_strategy(tmp_path):
    source = """
        import tfdist
        strategy = tfdist.strategy()
        import tensorflow as tf
        from report import report
        default = strategy is tf.distribute.get_strategy()
        report(default=default, scoped=tf.distribute.has_strategy())
    """
    run = run_script(source, workers=1, timeout=90, tmp_path=tmp_path)
    assert run.code == 0, run.output
    assert run.result() == {"default": True, "scoped": False}
    assert "strategy default" in run.output


@pytest.mark.slow  # test_servers.py and test_tables.py have clusters of such scripts
def test_one_script_serves_every_role_of_a_parameter_server_cluster(tmp_path):
    source = """
        import tfdist
        strategy = tfdist.strategy()
        # From here on only the coordinator runs.
        import tensorflow as tf
        from report import report
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            total = tf.Variable(0.0)

        @tf.function
        def step():
            total.assign_add(1.0)

        for _ in range(20):
            coordinator.schedule(step)
        coordinator.join()
        report(total=total.numpy(), where=total.device)
    """
    run = run_script(source, workers=2, launcher_args=["--ps", "1"], timeout=150, tmp_path=tmp_path)
    assert run.code == 0, run.output
    result = run.result("chief 0")
    assert result["total"] == 20
    assert "/job:ps/" in result["where"]
    for task in ("worker 0", "worker 1", "ps 0"):
        assert f"tfdist run: {task}" in run.output
        assert not (tmp_path / "reports" / f"{task.replace(' ', '-')}.json").exists()


def test_a_failing_coordinator_ends_its_servers(tmp_path):
    source = """
        import tfdist
        strategy = tfdist.strategy()
        raise SystemExit(7)
    """
    run = run_script(source, workers=1, launcher_args=["--ps", "1"], timeout=150, tmp_path=tmp_path)
    assert run.code == 7, run.output


REFUSED = {
    "tpu": ('tfdist.strategy("tpu")', "TPU"),
    "unknown": ('tfdist.strategy("miror")', "mirrored"),
    "several workers in one": ('tfdist.strategy("mirrored", replicas=0)', "replicas"),
    "no servers": ('tfdist.strategy("parameter_server")', "parameter server"),
    "by variable": (
        'import os; os.environ["TFDIST_STRATEGY"] = "tpu"; tfdist.strategy()',
        "TPU",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_with_a_reason(case, tmp_path):
    source, words = REFUSED[case]
    run = run_script(f"import tfdist\n{source}\n", workers=1, timeout=60, tmp_path=tmp_path)
    assert run.code == 2, run.output
    [message] = [line for line in run.output.splitlines() if "tfdist: error:" in line]
    assert words in message and "Traceback" not in run.output


def test_a_strategy_that_comes_too_late_is_told_so(tmp_path):
    source = """
        import tensorflow as tf
        tf.constant(1) + 1
        tf.distribute.MultiWorkerMirroredStrategy()
    """
    run = run_script(source, workers=2, timeout=90, tmp_path=tmp_path)
    assert run.code == 2, run.output
    assert "before TensorFlow starts" in run.output and "Traceback" not in run.output


def test_a_plug_in_is_one_more_name(tmp_path):
    package = tmp_path / "plug"
    (package / "my_plugin-1.0.dist-info").mkdir(parents=True)
    (package / "my_plugin-1.0.dist-info" / "METADATA").write_text("Name: my_plugin\nVersion: 1.0\n")
    (package / "my_plugin-1.0.dist-info" / "entry_points.txt").write_text(
        "[tfdist.strategies]\nmine = my_plugin:build\n"
    )
    (package / "my_plugin.py").write_text(
        "def build(cluster, options):\n    return f'built for {cluster.task}'\n"
    )
    source = f"""
        import sys
        sys.path.insert(0, {str(package)!r})
        import tfdist
        from report import report
        report(built=tfdist.strategy("mine"))
    """
    run = run_script(textwrap.dedent(source), workers=1, timeout=60, tmp_path=tmp_path)
    assert run.code == 0, run.output
    assert run.result() == {"built": "built for worker 0"}


def test_a_collective_may_be_given_a_limit(tmp_path):
    source = """
        import time
        import tfdist
        strategy = tfdist.strategy(communication=tfdist.CommunicationOptions(timeout_seconds=5))
        import tensorflow as tf
        if tfdist.detect().task.index == 1:
            time.sleep(30)
        started = time.monotonic()
        try:
            strategy.reduce("SUM", tf.constant(1.0), axis=None)
        except tf.errors.OpError as error:
            print("gave up after", round(time.monotonic() - started), type(error).__name__)
            raise SystemExit(9)
    """
    run = run_script(
        source, workers=2, launcher_args=["--grace", "2"], timeout=90, tmp_path=tmp_path
    )
    assert run.code == 9, run.output
    assert "gave up after" in run.output
