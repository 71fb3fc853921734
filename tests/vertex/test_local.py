"""A custom job on this machine: real processes, the service's variables, its rules of life."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.harness import ROOT
from tfdist.cluster.detect import detect
from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError
from tfdist.vertex.local import Container
from tfdist.vertex.local import Host
from tfdist.vertex.local import JobState
from tfdist.vertex.local import LocalJob
from tfdist.vertex.local import Rules
from tfdist.vertex.local import bucket
from tfdist.vertex.local import read_job
from tfdist.vertex.local.lines import parse_line

DEADLINE = 60.0
PARENT = "projects/987654321/locations/europe-west4"
CLI = (sys.executable, "-m", "tfdist", "vertex", "local")

#: Writes its whole environment and its arguments to a file named after the replica.
PROBE = """
import json, os, sys
with open(os.path.join(os.environ["OUT"], os.environ["HOSTNAME"] + ".json"), "w") as file:
    json.dump({"environ": dict(os.environ), "argv": sys.argv[1:]}, file)
"""
WAIT = "import time; time.sleep(60)"


def pool(code: str, replicas: Any = 1, env: Mapping[str, str] | None = None, **spec: Any) -> Any:
    """Returns a worker pool that runs Python code."""
    return {
        "machineSpec": {"machineType": "n1-standard-4"},
        "replicaCount": replicas,
        "containerSpec": {
            "imageUri": "eu-docker.pkg.dev/p/r/image:1",
            "command": ["python", "-c", code],
            "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
            **spec,
        },
    }


def custom_job(*pools: Any, name: str = "", **spec: Any) -> dict[str, Any]:
    """Returns the body of a Create call."""
    job = {"displayName": "a job", "jobSpec": {"workerPoolSpecs": list(pools), **spec}}
    return {**job, "name": name} if name else job


class Started:
    """A job in this process, with what it says."""

    def __init__(self, directory: Path, body: Mapping[str, Any], **options: Any):
        self.news: list[str] = []
        self.lines: list[str] = []
        options = {"parent": PARENT, "grace": 5.0, **options}
        self.job = LocalJob(
            body,
            directory=directory,
            say=self.news.append,
            show=self.lines.append,
            **options,
        )
        self.job.start()

    def end(self) -> JobState:
        """Waits for the end."""
        state = self.job.wait(DEADLINE)
        if not state.is_final:
            self.job.cancel(hurry=True)
            pytest.fail("\n".join([f"still {state}", *self.news, *self.lines[-40:]]))
        return state

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Waits until `condition` gives something."""
        until = time.monotonic() + DEADLINE
        while not (found := condition()):
            if time.monotonic() > until or self.job.state.is_final:
                self.job.cancel(hurry=True)
                pytest.fail("\n".join(["waited in vain", *self.news, *self.lines[-40:]]))
            time.sleep(0.02)
        return found


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has taken note of yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Starts jobs, and ends those that a test has left."""
    started: list[Started] = []

    def start(body: Mapping[str, Any], **options: Any) -> Started:
        directory = tmp_path / f"job{len(started)}"
        started.append(Started(directory, body, **options))
        return started[-1]

    yield start
    for each in started:
        each.job.cancel(hurry=True)
        each.job.wait(10)


def probe(
    run: Any,
    out: Path,
    counts: Sequence[int],
    environ: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, dict[str, str]]:
    """Returns the environment of each replica, by the service's names."""
    out.mkdir(exist_ok=True)
    # The primary ends last: with its end the others are stopped.
    last = f"import os, time\nwhile len(os.listdir({str(out)!r})) < {sum(counts)}: time.sleep(.01)"
    pools = [
        pool(PROBE + (last if position == 0 else ""), count, {"OUT": str(out)}) if count else {}
        for position, count in enumerate(counts)
    ]
    started = run(custom_job(*pools, **spec), environ=environ or os.environ)
    assert started.end() is JobState.SUCCEEDED, started.news
    found = {}
    for path in out.iterdir():
        _, _, name, _, index = path.stem.split("-")
        found[f"{name}-{index}"] = json.loads(path.read_text())["environ"]
    return found


# --- variables ------------------------------------------------------------------------------------


def test_a_lone_replica_gets_a_cluster_spec_and_no_tf_config(run, tmp_path):
    (environ,) = probe(run, tmp_path / "out", [1]).values()
    spec = json.loads(environ["CLUSTER_SPEC"])
    assert list(spec["cluster"]) == ["workerpool0"]
    assert len(spec["cluster"]["workerpool0"]) == 1
    assert spec["environment"] == "cloud"
    assert spec["task"] == {"type": "workerpool0", "index": 0, "trial": ""}
    assert spec["job"]["workerPoolSpecs"][0]["containerSpec"]["imageUri"].endswith("image:1")
    assert "TF_CONFIG" not in environ
    assert not [name for name in environ if name.startswith(("AIP_", "TFDIST_"))]
    assert environ["CLOUD_ML_PROJECT_ID"] == "987654321"
    assert environ["CLOUD_ML_REGION"] == "europe-west4"
    assert environ["CLOUD_ML_JOB_ID"].isdecimal()
    assert detect(environ).environment == "vertex"


def test_workers_get_both_descriptions_of_one_cluster(run, tmp_path):
    environs = probe(run, tmp_path / "out", [1, 2])
    assert sorted(environs) == ["workerpool0-0", "workerpool1-0", "workerpool1-1"]
    specs = [json.loads(environ["CLUSTER_SPEC"]) for environ in environs.values()]
    configs = [json.loads(environ["TF_CONFIG"]) for environ in environs.values()]
    (cluster,) = {json.dumps(spec["cluster"]) for spec in specs}
    pools = json.loads(cluster)
    assert {name: len(replicas) for name, replicas in pools.items()} == {
        "workerpool0": 1,
        "workerpool1": 2,
    }
    assert all(address.startswith("127.0.0.1:") for all_ in pools.values() for address in all_)
    assert {json.dumps(config["cluster"]) for config in configs} == {
        json.dumps({"chief": pools["workerpool0"], "worker": pools["workerpool1"]})
    }
    second = json.loads(environs["workerpool1-1"]["TF_CONFIG"])
    assert (second["task"]["type"], second["task"]["index"]) == ("worker", 1)
    assert second["environment"] == "cloud"
    assert second["job"] == specs[0]["job"]
    assert "trial" not in second["task"]
    found = detect(environs["workerpool1-1"])
    assert (str(found.task), found.num_workers) == ("worker 1", 3)
    assert len({environ["HOSTNAME"] for environ in environs.values()}) == 3


def test_parameter_servers_and_an_evaluator_behind_an_empty_pool(run, tmp_path):
    environs = probe(run, tmp_path / "a", [1, 2, 1, 1])
    assert list(json.loads(environs["workerpool2-0"]["CLUSTER_SPEC"])["cluster"]) == [
        *("workerpool0", "workerpool1", "workerpool2", "workerpool3")
    ]
    evaluator = json.loads(environs["workerpool3-0"]["TF_CONFIG"])
    assert sorted(evaluator["cluster"]) == ["chief", "ps", "worker"]
    assert evaluator["task"]["type"] == "evaluator"
    assert json.loads(environs["workerpool2-0"]["TF_CONFIG"])["task"]["type"] == "ps"
    assert detect(environs["workerpool3-0"]).is_evaluator
    assert detect(environs["workerpool0-0"]).roles == ("chief", "worker", "ps")

    environs = probe(run, tmp_path / "b", [1, 1, 0, 1])
    assert list(json.loads(environs["workerpool3-0"]["CLUSTER_SPEC"])["cluster"]) == [
        *("workerpool0", "workerpool1", "workerpool3")
    ]
    assert sorted(json.loads(environs["workerpool0-0"]["TF_CONFIG"])["cluster"]) == [
        *("chief", "worker")
    ]


def test_output_directories_stand_below_the_base_directory(run, tmp_path):
    base = {"baseOutputDirectory": {"outputUriPrefix": "gs://my-bucket/run/1/"}}
    (environ,) = probe(run, tmp_path / "out", [1], **base).values()
    root = f"{tmp_path}/job0/gcs/my-bucket/run/1"
    assert environ["AIP_MODEL_DIR"] == f"{root}/model/"
    assert environ["AIP_CHECKPOINT_DIR"] == f"{root}/checkpoints/"
    assert environ["AIP_TENSORBOARD_LOG_DIR"] == f"{root}/logs/"


def test_real_buckets_keep_their_names_and_a_tensorboard_is_told(run, tmp_path):
    out, board = tmp_path / "out", "projects/5/locations/europe-west4/tensorboards/7"
    out.mkdir()
    body = custom_job(
        pool(PROBE, env={"OUT": str(out)}),
        baseOutputDirectory={"outputUriPrefix": "gs://b/run"},
        tensorboard=board,
    )
    assert run(body, buckets="real").end() is JobState.SUCCEEDED
    environ = json.loads(next(out.iterdir()).read_text())["environ"]
    assert environ["AIP_MODEL_DIR"] == "gs://b/run/model/"
    assert environ["AIP_TENSORBOARD_RESOURCE_NAME"] == board


def test_nothing_of_this_machines_own_cluster_reaches_a_replica(run, tmp_path):
    foreign = {
        "SLURM_PROCID": "3",
        "TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}',
        "TFDIST_NUM_WORKERS": "4",
        "AIP_MODEL_DIR": "gs://other/model/",
        "CLOUD_ML_TRIAL_ID": "1",
        "TPU_NAME": "local",
        "JOB_COMPLETION_INDEX": "2",
        "HOSTNAME": "laptop",
    }
    environ = {**os.environ, **foreign, "KEPT": "yes"}
    (seen,) = probe(run, tmp_path / "out", [1], environ=environ).values()
    assert not [name for name in foreign if name in seen and name != "HOSTNAME"]
    assert seen["HOSTNAME"].startswith("cmle-training-workerpool0-")
    assert seen["KEPT"] == "yes"


def test_variables_of_the_user_are_expanded_and_do_not_hide_the_services(run, tmp_path):
    env = {
        "OUT": str(tmp_path),
        "ONE": "in $(CLOUD_ML_REGION)",
        "TWO": "$(ONE), $$(ONE), $(NOBODY)",
        "CLUSTER_SPEC": "{}",
    }
    words = ["--text", "a \"b\" 'c' $HOME", ""]
    started = run(custom_job(pool(PROBE, env=env, args=words)))
    assert started.end() is JobState.SUCCEEDED
    seen = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert seen["environ"]["TWO"] == "in europe-west4, $(ONE), $(NOBODY)"
    assert "workerpool0" in seen["environ"]["CLUSTER_SPEC"]
    assert seen["argv"] == words


# --- rules of life --------------------------------------------------------------------------------


def counting(path: Path, then: str) -> str:
    """Returns code that adds a line to `path` at each start."""
    line = "os.environ['HOSTNAME'] + ' ' + os.environ['CLUSTER_SPEC'] + '\\n'"
    return f"import os, sys, time\nopen({str(path)!r}, 'a').write({line})\n{then}"


def starts(path: Path) -> list[str]:
    """Returns what was written at each start."""
    return path.read_text().splitlines() if path.exists() else []


def test_a_failing_primary_is_started_six_times_in_each_of_four_tries(run, tmp_path):
    count = tmp_path / "count"
    started = run(custom_job(pool(counting(count, "print('bye'); sys.exit(7)"))))
    assert started.end() is JobState.FAILED
    assert len(starts(count)) == 6 * 4
    assert len(set(starts(count))) == 1  # the same name and address each time
    assert started.job.error.message.startswith(
        "The replica workerpool0-0 exited with a non-zero status of 7. Termination reason: Error."
    )
    assert started.job.error.code == 3
    assert "  | bye" in started.news
    resource = json.loads((tmp_path / "job0" / "job.json").read_text())
    assert resource == started.job.resource()
    assert resource["state"] == "JOB_STATE_FAILED"
    assert resource["error"]["code"] == 3
    assert resource["createTime"] <= resource["startTime"] <= resource["endTime"]


def test_without_retries_the_job_fails_with_the_sixth_failure(run, tmp_path):
    count = tmp_path / "count"
    body = custom_job(
        pool(WAIT),
        pool(counting(count, "sys.exit(1)")),
        scheduling={"disableRetries": True, "restartJobOnWorkerRestart": True},
    )
    started = run(body)
    assert started.end() is JobState.FAILED
    assert len(starts(count)) == 6
    # disableRetries switches restartJobOnWorkerRestart off.
    assert sum("chief is process" in line for line in started.news) == 1
    assert "workerpool1-0" in started.job.error.message


@pytest.mark.parametrize(
    ("scheduling", "retries", "restart_all"),
    [
        ({}, 3, False),
        ({"strategy": "SPOT"}, 6, False),
        ({"restartJobOnWorkerRestart": True}, 3, True),
        ({"restartJobOnWorkerRestart": True, "disableRetries": True}, 0, False),
    ],
)
def test_the_rules_follow_from_the_jobs_scheduling(scheduling, retries, restart_all):
    rules = Rules.of(read_job(custom_job(pool(WAIT), scheduling=scheduling)))
    assert rules == Rules(replica_restarts=5, job_retries=retries, restart_all=restart_all)


def test_a_killed_worker_comes_back_alone_under_its_name(run, tmp_path):
    count = tmp_path / "count"
    started = run(
        custom_job(pool(counting(count, WAIT)), pool(counting(count, WAIT), 2)), environ=os.environ
    )
    started.wait_for(lambda: len(starts(count)) == 3)
    before = started.job.pids
    os.kill(before["workerpool1-1"], signal.SIGKILL)
    started.wait_for(lambda: len(starts(count)) == 4)
    after = started.job.pids
    assert {name for name in before if before[name] != after[name]} == {"workerpool1-1"}
    assert starts(count)[3] in starts(count)[:3]
    assert "exit code 137 (killed by SIGKILL); restarting it, restart 1 of 5" in " ".join(
        started.news
    )


def test_all_replicas_start_again_when_the_job_asks_for_it(run, tmp_path):
    count = tmp_path / "count"
    body = custom_job(
        pool(counting(count, WAIT)),
        pool(counting(count, WAIT)),
        scheduling={"restartJobOnWorkerRestart": True},
    )
    started = run(body)
    started.wait_for(lambda: len(starts(count)) == 2)
    before = started.job.pids
    os.kill(before["workerpool1-0"], signal.SIGKILL)
    started.wait_for(lambda: len(starts(count)) == 4)
    assert all(started.job.pids[name] != pid for name, pid in before.items())
    assert sorted(starts(count)[:2]) == sorted(starts(count)[2:])
    assert started.job.state is JobState.RUNNING


def test_the_jobs_end_is_the_primarys_and_the_others_are_asked_to_end(run, tmp_path):
    heard = tmp_path / "heard"
    ready = tmp_path / "ready"
    note = f"lambda *_: (open({str(heard)!r}, 'w').close(), sys.exit(0))"
    deaf = (
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, {note})\nopen({str(ready)!r}, 'w').close()\n{WAIT}"
    )
    primary = f"import os, time\nwhile not os.path.exists({str(ready)!r}): time.sleep(.01)"
    body = custom_job(pool(primary), pool("pass"), {}, pool(deaf))
    started = run(body)
    assert started.end() is JobState.SUCCEEDED
    assert heard.exists()
    assert started.job.error is None
    assert started.job.pids == {}


def test_who_does_not_hear_is_killed_with_all_it_has_started(run, tmp_path):
    child = tmp_path / "child"
    detached = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "process = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"open({str(child)!r}, 'w').write(str(process.pid))\n{WAIT}"
    )
    started = run(custom_job(pool(detached)), grace=0.3)
    pid = int(started.wait_for(lambda: child.exists() and child.read_text()))
    began = time.monotonic()
    started.job.cancel()
    assert started.end() is JobState.CANCELLED
    assert 0.3 <= time.monotonic() - began < 5
    assert not lives(pid)
    assert started.job.resource()["error"] == {"code": 1, "message": "CANCELED"}


def test_a_job_expires_with_its_timeout(run):
    started = run(custom_job(pool(WAIT), scheduling={"timeout": "0.5s"}))
    began = time.monotonic()
    assert started.end() is JobState.EXPIRED
    assert time.monotonic() - began < 5
    assert "timeout of 0.5 s" in started.job.error.message


def test_a_job_that_has_not_been_started_is_cancelled_at_once(tmp_path):
    job = LocalJob(custom_job(pool(WAIT)), directory=tmp_path, say=lambda _: None)
    assert job.state is JobState.QUEUED
    job.cancel()
    assert job.wait(0) is JobState.CANCELLED


def test_jobs_run_beside_each_other_in_one_process(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    # Each primary waits until the replicas of all three jobs have written.
    wait = f"import time\nwhile len(os.listdir({str(out)!r})) < 6: time.sleep(.01)"
    body = custom_job(pool(PROBE + wait, env={"OUT": str(out)}), pool(PROBE, env={"OUT": str(out)}))
    jobs = [run(body) for _ in range(3)]
    assert [each.end() for each in jobs] == [JobState.SUCCEEDED] * 3
    addresses = [
        address
        for path in out.iterdir()
        for pool_ in json.loads(json.loads(path.read_text())["environ"]["CLUSTER_SPEC"])[
            "cluster"
        ].values()
        for address in pool_
    ]
    assert len(set(addresses)) == 6
    assert len({each.job.name for each in jobs}) == 3


def test_a_reduction_server_is_listed_but_not_started(run, tmp_path):
    image = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
    reducers = {"replicaCount": "2", "containerSpec": {"imageUri": image}}
    env = {"OUT": str(tmp_path)}
    body = custom_job(pool(PROBE, env=env), pool(WAIT, env=env), reducers)
    started = run(body)
    assert started.end() is JobState.SUCCEEDED
    assert sum("is not started here" in line for line in started.news) == 2
    environ = json.loads(next(tmp_path.glob("*workerpool0*.json")).read_text())["environ"]
    assert len(json.loads(environ["CLUSTER_SPEC"])["cluster"]["workerpool2"]) == 2
    cluster = detect(environ)
    assert (cluster.roles, len(cluster.reduction_servers)) == (("chief", "worker"), 2)


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "jobSpec"),
        (custom_job(), "primary pool"),
        (custom_job({}), "one replica in the primary pool"),
        (custom_job(pool(WAIT, 2)), "one replica in the primary pool"),
        (custom_job(*[pool(WAIT)] * 5), "at most 4 worker pools"),
        (custom_job({"replicaCount": 1}), "containerSpec or a pythonPackageSpec"),
        (custom_job(pool(WAIT, "many")), "replicaCount to be a number"),
        (custom_job(pool(WAIT), scheduling={"timeout": "soon"}), "scheduling.timeout"),
        (custom_job(pool(WAIT, args="a b")), "args to be a list"),
    ],
)
def test_a_job_that_the_service_would_refuse_is_refused(body, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        LocalJob(body, directory=tmp_path)


def test_snake_case_and_a_bare_spec_are_read_alike():
    body = custom_job(
        pool(WAIT, "2", env={"A_B": "c_d"}, args=["x_y"]),
        scheduling={"timeout": "90s", "restartJobOnWorkerRestart": True},
    )
    body["jobSpec"]["workerPoolSpecs"].insert(0, pool(WAIT))
    snake = json.loads(
        json.dumps(body)
        .replace("jobSpec", "job_spec")
        .replace("workerPoolSpecs", "worker_pool_specs")
        .replace("containerSpec", "container_spec")
        .replace("replicaCount", "replica_count")
        .replace("restartJobOnWorkerRestart", "restart_job_on_worker_restart")
    )
    expected = read_job(body)
    assert read_job(snake) == expected
    assert read_job(body["jobSpec"]).replicas == expected.replicas
    assert [replica.name for replica in expected.replicas] == [
        *("workerpool0-0", "workerpool1-0", "workerpool1-1")
    ]
    assert expected.replicas[1].program.env == (("A_B", "c_d"),)
    assert expected.timeout == 90


def test_the_entry_point_stands_for_the_images(run, tmp_path):
    spec = {"replicaCount": 1, "containerSpec": {"imageUri": "x", "args": ["1", "2 3"]}}
    code = f"import sys; open({str(tmp_path / 'argv')!r}, 'w').write(repr(sys.argv[1:]))"
    started = run(custom_job(spec), runner=Host(entry_point=("python", "-c", code)))
    assert started.end() is JobState.SUCCEEDED
    assert (tmp_path / "argv").read_text() == "['1', '2 3']"


def test_a_package_runs_its_module(run, tmp_path):
    (tmp_path / "hello_there.py").write_text("import sys; print('module', sys.argv[1:])")
    spec = {"executorImageUri": "x", "pythonModule": "hello_there", "args": ["a b"]}
    body = custom_job({"replicaCount": 1, "pythonPackageSpec": spec})
    started = run(body, runner=Host(path=(str(tmp_path),)))
    assert started.end() is JobState.SUCCEEDED
    assert started.lines == ["[chief] module ['a b']"]


def test_a_distribution_of_the_job_is_installed_for_it(tmp_path):
    wheel = tmp_path / "run" / "gcs" / "stage" / "hello_there-1-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("hello_there.py", "import sys; print('packed', sys.argv[1:])")
        about = "hello_there-1.dist-info"
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: hello-there\nVersion: 1\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    spec = {
        "executorImageUri": "x",
        "pythonModule": "hello_there",
        "packageUris": [f"gs://stage/{wheel.name}"],
    }
    done = subprocess.run(
        command(custom_job({"replicaCount": 1, "pythonPackageSpec": spec}), tmp_path),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[chief] packed []\n"), done.stderr


def test_a_program_that_is_not_here_is_refused_before_anything_starts(tmp_path):
    body = custom_job(pool(WAIT, command=["/opt/program"]))
    job = LocalJob(body, directory=tmp_path, say=lambda _: None)
    with pytest.raises(ConfigError, match="'/opt/program', not found"):
        job.start()
    assert job.state is JobState.QUEUED


# --- lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "severity", "message", "payload"),
    [
        ("hello", "INFO", "hello", None),
        ('{"severity": "warning", "message": "m", "n": 1}', "WARNING", "m", {"n": 1}),
        ('{"message": "m"}', "INFO", "m", {}),
        ('{"severity": "LOUD", "message": "m"}', "INFO", "m", {}),
        ('{"severity": "ERROR"}', "INFO", '{"severity": "ERROR"}', None),
        ("{not json}", "INFO", "{not json}", None),
    ],
)
def test_a_line_of_json_is_an_entry_of_its_own(line, severity, message, payload):
    entry = parse_line(line)
    assert (entry.severity, entry.message, entry.payload) == (severity, message, payload)
    assert parse_line("hello", is_error=True).severity == "ERROR"


def test_lines_are_shown_under_names_and_kept_as_they_came(run):
    record = json.dumps({"severity": "CRITICAL", "message": "over", "step": 3})
    body = custom_job(
        pool(f"import sys; print({record!r}); print('low', file=sys.stderr); {WAIT}"),
        pool("print('from a worker')"),
    )
    started = run(body)
    started.wait_for(lambda: len(started.lines) == 3)
    assert sorted(started.lines) == [
        "[chief] CRITICAL over",
        "[chief] low",
        "[worker 0] from a worker",
    ]
    logs = started.job.log.parent
    assert sorted((logs / "workerpool0-0.log").read_text().splitlines()) == ["low", record]
    entries = [json.loads(line) for line in started.job.log.read_text().splitlines()]
    assert {(each["task"], each["severity"], each["message"]) for each in entries} == {
        ("workerpool0-0", "CRITICAL", "over"),
        ("workerpool0-0", "ERROR", "low"),
        ("workerpool1-0", "INFO", "from a worker"),
    }
    assert [each["step"] for each in entries if "step" in each] == [3]


def test_a_full_disk_ends_the_logs_and_not_the_job(run, tmp_path):
    logs = tmp_path / "job0" / "logs"
    logs.mkdir(parents=True)
    for name in ("workerpool0-0.log", "entries.jsonl"):
        (logs / name).symlink_to("/dev/full")
    started = run(custom_job(pool("print('still here')")))
    assert started.end() is JobState.SUCCEEDED
    assert started.lines == ["[chief] still here"]
    assert sum("No space left on device" in line for line in started.news) == 2


# --- buckets --------------------------------------------------------------------------------------

UPLOAD = """
import json, os, urllib.request
url = os.environ["STORAGE_EMULATOR_HOST"]
assert os.environ["AIP_MODEL_DIR"] == "gs://my-bucket/run/model/"
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
asked = direct.open(url + "/storage/v1/b/my-bucket/o/data%2Fx?alt=media").read()
name = "run/model/copy"
request = urllib.request.Request(
    url + "/upload/storage/v1/b/my-bucket/o?uploadType=media&name=" + name, data=asked * 2
)
direct.open(request)
request = urllib.request.Request(url + "/storage/v1/b/my-bucket/o/data%2Fold", method="DELETE")
direct.open(request)
"""


def test_buckets_of_the_emulator_are_folders_before_and_after(run, tmp_path):
    folder = tmp_path / "buckets"
    (folder / "my-bucket" / "data").mkdir(parents=True)
    (folder / "my-bucket" / "data" / "x").write_bytes(b"abc")
    (folder / "my-bucket" / "data" / "old").write_bytes(b"gone")
    body = custom_job(pool(UPLOAD), baseOutputDirectory={"outputUriPrefix": "gs://my-bucket/run"})
    started = run(body, buckets="emulator", bucket_directory=folder)
    assert started.end() is JobState.SUCCEEDED, started.lines
    assert (folder / "my-bucket" / "run" / "model" / "copy").read_bytes() == b"abcabc"
    assert (folder / "my-bucket" / "data" / "x").read_bytes() == b"abc"
    assert not (folder / "my-bucket" / "data" / "old").exists()


def test_without_its_packages_the_emulator_is_refused_with_the_line_to_install(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(bucket, "_PACKAGE", "no_such_emulator")
    job = LocalJob(
        custom_job(pool(WAIT)), directory=tmp_path, buckets="emulator", say=lambda _: None
    )
    with pytest.raises(UnsupportedError, match=r"pip install 'trustme>=1.2'"):
        job.start()


# --- containers -----------------------------------------------------------------------------------


@pytest.fixture
def container(tmp_path: Path) -> Any:
    """A working container with a shell as its entry point, and the buildah that knows it."""
    if shutil.which("buildah") is None or os.geteuid():
        pytest.skip("needs buildah and root")
    storage = [f"{option}={tmp_path / option[2:]}" for option in ("--root", "--runroot")]
    buildah = ["buildah", *storage, "--storage-driver=vfs"]

    def call(*words: str) -> str:
        return subprocess.run(
            [*buildah, *words], check=True, capture_output=True, text=True, timeout=DEADLINE
        ).stdout.strip()

    name = call("from", "scratch")
    tree = tmp_path / "tree"
    for program in ("dash", "env", "sleep"):
        found = shutil.which(program)
        assert found is not None
        linked = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        libraries = [word for word in linked.split() if word.startswith("/")]
        for source, target in [(found, f"/bin/{program}"), *((path, path) for path in libraries)]:
            (tree / target[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tree / target[1:])
    call("copy", name, str(tree), "/")
    call("config", "--entrypoint", '["/bin/dash", "-c"]', "--env", "BROUGHT=by the image", name)
    yield name, buildah
    call("rm", name)


def test_replicas_share_a_container_and_see_its_variables_and_the_services(
    run, container, tmp_path
):
    name, buildah = container
    out = tmp_path / "out"
    out.mkdir()
    write = f"env > {out}/$HOSTNAME; until test -e {out}/*pool0*-0 -a -e {out}/*pool1*-0; do"
    listen = f"trap 'echo heard; exit 0' TERM; env > {out}/$HOSTNAME; sleep 60 & wait"
    pools = [
        {"replicaCount": 1, "containerSpec": {"imageUri": "x", "args": [code]}}
        for code in (f"{write} sleep 0.1; done; sleep 0.3", listen)
    ]
    runner = Container(name, [str(out)], buildah)
    started = run(custom_job(*pools), runner=runner, environ={**os.environ, "MINE": "no"})
    assert started.end() is JobState.SUCCEEDED, started.lines
    assert "[worker 0] heard" in started.lines
    (first,) = out.glob("*workerpool0*")
    environ = dict(line.split("=", 1) for line in first.read_text().splitlines())
    assert environ["BROUGHT"] == "by the image"
    assert "MINE" not in environ
    assert json.loads(environ["TF_CONFIG"])["task"]["type"] == "chief"


# --- command line ---------------------------------------------------------------------------------


def command(body: Any, tmp_path: Path, *options: str) -> list[str]:
    """Returns a call of the command line for a job."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps(body))
    return [*CLI, str(path), "--dir", str(tmp_path / "run"), *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_command_line_shows_lines_under_names_and_ends_with_the_jobs_code(tmp_path):
    def call(body: Any, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(body, tmp_path, *options),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    good = call(
        custom_job(pool("print('one')")), "--project-number", "42", "--region", "asia-east1"
    )
    assert (good.returncode, good.stdout) == (0, "[chief] one\n")
    assert "JOB_STATE_SUCCEEDED; logs and output: " in good.stderr

    options = ("--replica-restarts", "1", "--job-retries", "0")
    bad = call(custom_job(pool("import sys; sys.exit('sorry')")), *options)
    assert bad.returncode == 1
    assert bad.stdout == "[chief] sorry\n" * 2
    assert "The replica workerpool0-0 exited with a non-zero status of 1." in bad.stderr

    wrong = call({"displayName": "x"})
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("tfdist: error: Expected a CustomJob with jobSpec.")


def test_a_console_that_is_slow_to_read_gets_every_line(tmp_path):
    body = custom_job(pool("for line in range(40_000): print('line', line)"))
    process = subprocess.Popen(
        command(body, tmp_path),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        assert process.stdout is not None
        time.sleep(4)  # longer than the job takes, and than pipes without a writer are waited for
        lines = process.stdout.read().decode().splitlines()
        assert process.wait(DEADLINE) == 0
    assert lines == [f"[chief] line {line}" for line in range(40_000)]


def test_an_interrupt_cancels_the_job(tmp_path):
    body = custom_job(pool(f"print('up', flush=True); {WAIT}"))
    process = subprocess.Popen(
        command(body, tmp_path), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"[chief] up\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 128 + signal.SIGINT
        assert b"JOB_STATE_CANCELLED" in process.stderr.read()


def test_nothing_outlives_a_command_line_that_is_killed(tmp_path):
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True, env=os.environ)\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} {{child.pid}}\\n'); {WAIT}"
    )
    process = subprocess.Popen(
        command(custom_job(pool(code), pool(code)), tmp_path),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + DEADLINE
    while len(starts(pids)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    left = [int(pid) for line in starts(pids) for pid in line.split()]
    process.kill()
    process.wait()
    assert len(left) == 4
    while any(map(lives, left)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in left if lives(pid)]


def test_states_may_be_read_and_jobs_cancelled_from_other_threads(run):
    started = run(custom_job(pool(WAIT)))
    seen: list[JobState] = []
    threads = [
        threading.Thread(target=lambda: seen.append(started.job.wait(DEADLINE))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    started.wait_for(lambda: started.job.pids)
    threading.Thread(target=started.job.cancel).start()
    for thread in threads:
        thread.join(DEADLINE)
    assert seen == [JobState.CANCELLED] * 4
