"""`tfdist doctor` as its users meet it: processes of their own, alone and in clusters of three."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfdist.launch import ports

ROOT = Path(__file__).parents[2]
CHECKS = ["cluster", "names", "port", "peers", "versions", "output", "shm", "proxy", "keras"]

pytestmark = pytest.mark.timeout(120)


def tf_config(addresses: list[str], index: int) -> str:
    return json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    )


def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Starts the command with nothing but `environ` in its environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "tfdist.cli.main", "doctor", *arguments],
        env=environ,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def doctor(*arguments: str, **environ: str) -> tuple[int, str, str]:
    with start(*arguments, **environ) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@contextlib.contextmanager
def doctors(
    count: int, *arguments: str, indices: range | None = None, **last: str
) -> Iterator[tuple[list[str], list[subprocess.Popen[str]]]]:
    """Starts one doctor in each task; `last` is more environment for the last one."""
    with ports.reserve(count) as held, contextlib.ExitStack() as stack:
        addresses = list(held.addresses)
        tasks = list(range(count) if indices is None else indices)
        processes = []
        for index in tasks:
            more = last if index == tasks[-1] else {}
            process = start("--json", *arguments, TF_CONFIG=tf_config(addresses, index), **more)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield addresses, processes


def reports(processes: list[subprocess.Popen[str]]) -> list[dict]:
    """Waits for all of them; returns their reports by check, with the exit code as "code"."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert out, err
        report = json.loads(out)
        by_name = {check["name"]: check for check in report["checks"]}
        found.append({**by_name, "code": process.returncode, "stderr": err, "ok": report["ok"]})
    return found


# One task.


def test_json_has_the_keys_that_programs_rely_on():
    with ports.reserve(2) as held:
        code, out, err = doctor("--json", TF_CONFIG=tf_config(list(held.addresses), 1))
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert list(report) == ["ok", "environment", "task", "checks"]
    assert report["ok"] is True
    assert report["environment"] == "tf_config"
    assert report["task"] == {"type": "worker", "index": 1}
    assert [check["name"] for check in report["checks"]] == CHECKS
    for check in report["checks"]:
        assert list(check) == ["name", "status", "detail", "fix"]
        assert check["status"] in ("ok", "warning", "failed", "skipped")
        assert all(isinstance(value, str) for value in check.values())


def test_text_has_one_line_for_each_check_and_one_at_the_end(tmp_path):
    code, out, err = doctor("--output-dir", str(tmp_path))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    names = [*CHECKS[:6], "space", *CHECKS[6:]]
    assert [line.split()[1] for line in lines[:-1]] == names
    assert lines[-1] == "7 ok, 3 skipped"
    assert "\x1b" not in out


def test_a_failed_check_is_code_1_and_says_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    code, out, err = doctor("--output-dir", str(tmp_path / "file"), AIP_MODEL_DIR=str(tmp_path))
    assert (code, err) == (1, "")
    failed = [line for line in out.splitlines() if line.startswith("failed")]
    assert len(failed) == 1
    assert "Fix: choose another directory" in failed[0]
    assert f"{tmp_path} is writable" in out


def test_a_port_in_use_is_code_1():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tf_config([f"127.0.0.1:{port}", "127.0.0.1:1"], 0)
        code, out, _ = doctor("--rendezvous", "--timeout", "2", TF_CONFIG=config)
    assert code == 1
    assert f"127.0.0.1:{port}: it is in use" in out
    assert "its own port is not free" in out


@pytest.mark.parametrize(
    ("arguments", "environ", "word"),
    [
        ([], {"TF_CONFIG": '{"cluster": }'}, "JSON"),
        ([], {"TF_CONFIG": tf_config(["a:1"], 3)}, "worker"),
        (["--timeout", "0"], {}, "--timeout"),
        (["--timeout", "nan"], {}, "--timeout"),
        (["--timeout", "soon"], {}, "--timeout"),
        (["--output-dir", ""], {}, "--output-dir"),
        (["--wrong"], {}, "--wrong"),
        (["word"], {}, "word"),
    ],
    ids=str,
)
def test_wrong_usage_and_impossible_clusters_are_code_2(arguments, environ, word):
    code, out, err = doctor(*arguments, **environ)
    assert (code, out) == (2, "")
    assert word in err
    assert "Traceback" not in err


def test_help_fits_one_screen():
    code, out, _ = doctor("--help")
    assert code == 0
    assert "before the job" in out
    assert out.count("\n") <= 24


def test_a_name_that_does_not_resolve_ends_in_time():
    began = time.monotonic()
    config = tf_config(["127.0.0.1:1", "no-such-host.invalid:2"], 0)
    code, out, _ = doctor("--timeout", "3", TF_CONFIG=config)
    assert code == 1
    assert "no-such-host.invalid" in out
    assert time.monotonic() - began < 15


def test_doctor_imports_neither_tensorflow_nor_keras():
    code = (
        "import sys; from tfdist.cli.main import main; code = main(['doctor', '--json']); "
        "heavy = {'tensorflow', 'keras', 'numpy'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy or code else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# Three tasks at the barrier.


def test_three_tasks_meet_and_try_every_port():
    with doctors(3, "--rendezvous", "--timeout", "30") as (_, processes):
        found = reports(processes)
    for report in found:
        assert report["code"] == 0, report
        assert "Traceback" not in report["stderr"]
        assert report["peers"]["detail"] == "all 3 tasks reach each other"
        host = socket.gethostname()
        for part in (f"worker 0 on {host}", f"worker 2 on {host}", "tensorflow ", "keras "):
            assert part in report["rendezvous"]["detail"]


def test_a_task_with_another_keras_is_named(tmp_path):
    info = tmp_path / "keras-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keras\nVersion: 9.9.9\n")
    arguments = ("--rendezvous", "--timeout", "30")
    with doctors(3, *arguments, PYTHONPATH=str(tmp_path)) as (_, processes):
        found = reports(processes)
    assert "keras 9.9.9" in found[2]["versions"]["detail"]
    assert [report["versions"]["status"] for report in found] == ["ok", "ok", "warning"]
    for report in found:
        assert report["code"] == 1
        assert report["rendezvous"]["status"] == "failed"
        assert "worker 0, worker 1: keras 3." in report["rendezvous"]["detail"]
        assert "worker 2: keras 9.9.9" in report["rendezvous"]["detail"]
        assert "same image" in report["rendezvous"]["fix"]


@pytest.mark.parametrize("missing", [0, 2])
def test_a_task_that_does_not_come_is_named_at_the_deadline(missing):
    began = time.monotonic()
    indices = range(2) if missing else range(1, 3)
    arguments = ("--rendezvous", "--timeout", "3")
    with doctors(3, *arguments, indices=indices) as (addresses, processes):
        found = reports(processes)
    assert 3 <= time.monotonic() - began < 20
    for report in found:
        assert report["code"] == 1
        detail = report["rendezvous"]["detail"]
        assert f"still missing worker {missing} ({addresses[missing]})" in detail
        assert "in every task at once" in report["rendezvous"]["fix"]
        assert f"worker {missing} ({addresses[missing]})" in report["peers"]["detail"]


def test_the_barrier_of_a_real_job_is_not_opened_by_a_doctor():
    join = (
        "from tfdist.cluster.detect import detect; from tfdist.cluster.rendezvous import join; "
        "join(detect(), 30)"
    )
    with ports.reserve(2) as held:
        addresses = list(held.addresses)
        job = subprocess.Popen(
            [sys.executable, "-c", join],
            env={"TF_CONFIG": tf_config(addresses, 0)},
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )
        try:
            config = tf_config(addresses, 1)
            code, out, _ = doctor("--rendezvous", "--timeout", "10", TF_CONFIG=config)
            assert job.poll() is None  # it still waits for the real worker 1
        finally:
            job.kill()
            job.wait()
    assert code == 1
    assert "another job" in out


def test_ctrl_c_ends_a_doctor_that_waits():
    with doctors(2, "--rendezvous", "--timeout", "50", indices=range(1)) as (_, processes):
        time.sleep(2.0)
        began = time.monotonic()
        os.kill(processes[0].pid, 2)
        _, err = processes[0].communicate(timeout=30)
        assert time.monotonic() - began < 5
    assert processes[0].returncode == 130
    assert "Traceback" not in err
