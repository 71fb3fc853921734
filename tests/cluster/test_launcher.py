"""`tfdist run` with real processes: output, exit codes, stopping, restarting, cleaning up.

The scripts are plain Python: what is tested here needs no TensorFlow.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

from tests.support.harness import CLI
from tests.support.harness import ROOT
from tests.support.harness import eventually
from tests.support.harness import is_alive
from tests.support.harness import run_script
from tests.support.harness import start_script

pytestmark = pytest.mark.timeout(120)

ENV = {**os.environ, "PYTHONPATH": str(ROOT)}

#: Puts the name of the task and its index at the head of a script.
WHO = """\
import json, os, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
role, index = task["type"], task["index"]
"""


# Output.


def test_lines_of_three_busy_tasks_are_prefixed_and_never_mixed(tmp_path):
    source = f"""{WHO}
for number in range(33_334):
    print(f"{{role}} {{index}} line {{number}} " + "x" * (number % 50))
"""
    run = run_script(source, workers=3, tmp_path=tmp_path, timeout=100)
    assert run.code == 0
    for index in range(3):
        expected = [f"worker {index} line {n} " + "x" * (n % 50) for n in range(33_334)]
        assert run.lines(f"worker {index}") == expected
    assert not [
        line for line in run.output.splitlines() if not re.match(r"\[worker [012]\] |tfdist", line)
    ]


def test_lines_written_in_pieces_stay_whole(tmp_path):
    source = f"""{WHO}
for number in range(200):
    for piece in (str(index) * 10, str(index) * 10, "\\n"):
        sys.stdout.write(piece)
        sys.stderr.write(piece)
"""
    run = run_script(source, tmp_path=tmp_path)
    assert Counter(run.lines("worker 0")) == {"0" * 20: 400}
    assert Counter(run.lines("worker 1")) == {"1" * 20: 400}


def test_a_last_line_without_a_line_end_is_shown(tmp_path):
    run = run_script("print('all but', end='')", tmp_path=tmp_path)
    assert run.lines("worker 0") == run.lines("worker 1") == ["all but"]


def test_a_progress_bar_shows_its_last_state_and_not_every_step(tmp_path):
    source = "for n in range(1001):\n    print(f'\\r{n} of 1000', end='')\nprint('\\r\\nnext')"
    run = run_script(source, tmp_path=tmp_path)
    assert run.lines("worker 1") == ["1000 of 1000", "next"]


def test_a_progress_bar_that_never_ends_its_line_is_shown_every_few_seconds(tmp_path, clocks):
    clocks("output.REFRESH_SECONDS", 2)
    source = """\
import time
for n in range(60):
    print(f"\\rstep {n:3}", end="")
    time.sleep(0.05)
"""
    lines = run_script(source, tmp_path=tmp_path).lines("worker 0")
    assert len(lines) == 2 and lines[-1] == "step  59"


def test_bytes_that_are_not_utf8_are_replaced(tmp_path):
    source = "import os\nos.write(1, b'caf\\xe9 \\xc3\\xa9\\n')"
    assert run_script(source, tmp_path=tmp_path).lines("worker 0") == ["caf\ufffd \u00e9"]


def test_a_huge_line_does_not_need_memory_in_the_launcher(tmp_path):
    source = "import os, time\nfor _ in range(1000):\n    os.write(1, b'x' * 50_000)\n"
    source += "print(flush=True)\nprint('written', flush=True)\ntime.sleep(60)"
    with start_script(source, tmp_path=tmp_path, workers=2) as job:
        job.wait_for_line("[worker 0] written")
        assert psutil.Process(job.pid).memory_info().rss < 150e6
        job.signal(signal.SIGTERM)
        longest = max(len(line) for line in job.wait(30).lines("worker 0"))
        assert longest <= 256 * 1024


def test_standard_output_and_error_stay_apart(tmp_path):
    path = tmp_path / "both.py"
    path.write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    done = _tfdist_run("--workers", "2", path)
    assert Counter(done.stdout.splitlines()) == {"[worker 0] out": 1, "[worker 1] out": 1}
    assert "[worker 0] err" in done.stderr and "[worker 0] out" not in done.stderr


def test_a_single_task_is_shown_as_it_is_and_reads_standard_input(tmp_path):
    path = tmp_path / "echo.py"
    path.write_text("print(input('name? '))\nprint('5%\\r100%', end='')")
    done = _tfdist_run(path, input=b"Ada\n", text=False)
    assert done.stdout == b"name? Ada\n5%\r100%"
    assert done.returncode == 0


def test_tasks_of_a_cluster_read_nothing_and_nobody_waits_for_input(tmp_path):
    path = tmp_path / "echo.py"
    path.write_text("import sys\nprint(repr(sys.stdin.read()))")
    done = _tfdist_run("--workers", "2", path, input="for nobody")
    assert sorted(done.stdout.splitlines()) == ["[worker 0] ''", "[worker 1] ''"]


def test_the_launcher_runs_with_its_standard_streams_closed(tmp_path):
    path = tmp_path / "ok.py"
    path.write_text(f"{WHO}open(f'{tmp_path}/ran-{{index}}', 'w').close()\nprint('x')")
    command = f"exec {sys.executable} -c '{CLI[2]}' run --workers 2 {path} 0<&- 1>&- 2>&-"
    done = subprocess.run(["bash", "-c", command], env=ENV, timeout=60, check=False)
    assert done.returncode == 0
    assert (tmp_path / "ran-0").exists() and (tmp_path / "ran-1").exists()


def test_colours_only_on_a_terminal_and_never_with_no_color(tmp_path):
    path = tmp_path / "hello.py"
    path.write_text("print('hello')")
    command = [*CLI, "run", "--workers", "2", str(path)]

    def on_terminal(**more):
        ours, theirs = pty.openpty()
        env = {k: v for k, v in ENV.items() if k != "NO_COLOR"} | {"TERM": "xterm"} | more
        with subprocess.Popen(command, env=env, stdout=theirs, stderr=theirs):
            os.close(theirs)
            text = b""
            try:
                while chunk := os.read(ours, 4096):
                    text += chunk
            except OSError:
                pass  # the terminal's other side is closed
        os.close(ours)
        return text

    assert b"\x1b[36m[worker 0]\x1b[0m hello" in on_terminal()
    assert b"\r\n[worker 0] hello" in on_terminal(NO_COLOR="1")
    assert "\x1b" not in run_script(path, tmp_path=tmp_path).output


def test_a_reader_that_goes_away_stops_the_job(tmp_path):
    path = tmp_path / "endless.py"
    path.write_text("import time\nwhile True:\n    print('tick')\n    time.sleep(0.01)")
    command = [*CLI, "run", "--workers", "2", "--grace", "5", str(path)]
    with subprocess.Popen(
        command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as popen:
        popen.stdout.readline()
        popen.stdout.close()
        assert popen.wait(20) == 128 + signal.SIGPIPE


def test_a_console_that_does_not_read_does_not_hold_up_the_end(tmp_path):
    path = tmp_path / "flood.py"
    path.write_text("while True:\n    print('x' * 1000)")
    command = [*CLI, "run", "--workers", "2", "--grace", "1", str(path)]
    with subprocess.Popen(
        command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as popen:
        popen.stdout.readline()
        time.sleep(1)
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(20) == 143


# Logs.


def test_log_dir_gets_one_file_per_task_and_is_created(tmp_path):
    logs = tmp_path / "a" / "b"
    source = f"{WHO}print(role, index)\nprint('err', file=sys.stderr)"
    options = ["--ps", "1", "--evaluator", "--log-dir", str(logs)]
    run = run_script(source, workers=2, launcher_args=options, tmp_path=tmp_path)
    assert run.code == 0
    names = ["chief-0.log", "evaluator-0.log", "ps-0.log", "worker-0.log", "worker-1.log"]
    assert sorted(path.name for path in logs.iterdir()) == names
    assert Counter((logs / "ps-0.log").read_text().splitlines()) == {"ps 0": 1, "err": 1}
    assert "[ps 0] ps 0" in run.output


def test_logs_are_continued_over_restarts_with_a_line_between(tmp_path):
    source = f"{WHO}print('start', os.environ['TFDIST_INCARNATION'])\n"
    source += "sys.exit(1 if os.environ['TFDIST_INCARNATION'] == '0' else 0)"
    options = ["--max-restarts", "1", "--log-dir", str(tmp_path / "logs")]
    run = run_script(source, launcher_args=options, tmp_path=tmp_path)
    assert run.code == 0
    first, between, second = (tmp_path / "logs" / "worker-1.log").read_text().splitlines()
    assert (first, second) == ("start 0", "start 1")
    assert between.startswith("----- worker 1, start 1, ")


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").symlink_to("/dev/full")
    options = ["--log-dir", str(tmp_path / "logs")]
    run = run_script("print(1)\nprint(2)", launcher_args=options, tmp_path=tmp_path)
    assert run.code == 0
    assert run.lines("worker 0") == ["1", "2"]
    assert run.output.count("the log of worker 0 ends here") == 1


# The contract with the child.


def test_every_task_gets_its_own_place_in_one_cluster(tmp_path):
    source = "import json, os\nfrom report import report\n"
    source += "report(config=json.loads(os.environ['TF_CONFIG']), job=os.environ['TFDIST_JOB_ID'])"
    options = ["--ps", "2", "--evaluator"]
    run = run_script(source, workers=2, launcher_args=options, tmp_path=tmp_path)
    assert run.code == 0
    tasks = ["chief 0", "worker 0", "worker 1", "ps 0", "ps 1", "evaluator 0"]
    assert run.tasks == tasks
    results = [run.result(task) for task in tasks]
    clusters = [result["config"]["cluster"] for result in results]
    assert all(cluster == clusters[0] for cluster in clusters)
    assert {role: len(addresses) for role, addresses in clusters[0].items()} == {
        "chief": 1,
        "worker": 2,
        "ps": 2,
    }
    addresses = [address for role in clusters[0].values() for address in role]
    assert len(set(addresses)) == 5
    own = [result["config"]["task"] for result in results]
    assert [f"{task['type']} {task['index']}" for task in own] == tasks
    assert len({result["job"] for result in results}) == 1
    for address in addresses:
        assert f" at {address}\n" in run.output


def test_workers_alone_have_no_chief_and_one_worker_has_a_config_too(tmp_path):
    source = (
        "import json, os\nfrom report import report\nreport(c=json.loads(os.environ['TF_CONFIG']))"
    )
    run = run_script(source, workers=None, tmp_path=tmp_path)
    config = run.result("worker 0")["c"]
    assert list(config["cluster"]) == ["worker"] and len(config["cluster"]["worker"]) == 1
    assert config["task"] == {"type": "worker", "index": 0}


def test_variables_of_another_cluster_are_removed_and_the_rest_is_inherited(tmp_path):
    source = "import os\nfrom report import report\nreport(**os.environ)"
    foreign = {
        "CLUSTER_SPEC": "{}",
        "SLURM_PROCID": "3",
        "TPU_NAME": "local",
        "TFDIST_CLUSTER": "{}",
        "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "ps", "index": 9}}',
    }
    env = {**foreign, "MINE": "kept", "TFDIST_COMPRESSION": "float16"}
    run = run_script(
        source, tmp_path=tmp_path, env=env, launcher_args=["--rendezvous-timeout", "7.5"]
    )
    seen = run.result("worker 1")
    assert not set(seen) & (set(foreign) - {"TF_CONFIG"})
    assert json.loads(seen["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    expected = {
        "MINE": "kept",
        "TFDIST_COMPRESSION": "float16",
        "TFDIST_LAUNCHED": "1",
        "TFDIST_INCARNATION": "0",
        "TFDIST_RENDEZVOUS_TIMEOUT": "7.5",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
    assert {name: seen.get(name) for name in expected} == expected
    assert re.fullmatch("[0-9a-f]{16,}", seen["TFDIST_JOB_ID"])


def test_tasks_reach_each_other_directly_where_a_proxy_is_set(tmp_path):
    # With a proxy and without no_proxy, TensorFlow 2.21 waits for ever for 127.0.0.1.
    source = "import os\nprint(os.environ.get('no_proxy'), os.environ.get('no_grpc_proxy'))"
    environments = [
        ({"http_proxy": "http://proxy:8"}, "127.0.0.1,localhost None"),
        ({"https_proxy": "p:8", "NO_PROXY": "a.b"}, "a.b,127.0.0.1,localhost None"),
        (
            {"grpc_proxy": "p:8", "no_proxy": "localhost, c", "no_grpc_proxy": "d"},
            "localhost,c,127.0.0.1 d,127.0.0.1,localhost",
        ),
        ({"http_proxy": ""}, "None None"),
    ]
    unset = dict.fromkeys(
        ("http_proxy", "https_proxy", "grpc_proxy", "no_proxy", "NO_PROXY", "no_grpc_proxy")
    )
    for env, expected in environments:
        run = run_script(source, workers=1, tmp_path=tmp_path, env={**unset, **env})
        assert run.lines("worker 0") == [expected]


def test_a_log_level_that_is_set_is_kept(tmp_path):
    source = "import os\nprint(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    run = run_script(source, tmp_path=tmp_path, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert run.lines("worker 0") == ["3"]


def test_everything_after_the_script_is_the_scripts_own(tmp_path):
    args = [
        "--workers",
        "9",
        "-m",
        "two words",
        "quo\"te's",
        "--",
        "--help",
        "",
        "--log-dir=x",
        "$HOME",
    ]
    source = "import sys\nfrom report import report\nreport(argv=sys.argv)"
    run = run_script(source, args=args, tmp_path=tmp_path)
    assert run.tasks == ["worker 0", "worker 1"]
    assert run.result("worker 1")["argv"] == [str(tmp_path / "script.py"), *args]


def test_everything_after_the_module_is_the_modules_own(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "train.py").write_text(
        "import sys\nfrom report import report\nfrom . import __name__ as parent\n"
        "report(argv=sys.argv, name=__name__, spec=__spec__.name, parent=parent, path=sys.path[0])"
    )
    args = ["-m", "pkg.train", "--workers", "9", "-m", "x", "--", "--ps=3"]
    run = run_script(None, args=args, tmp_path=tmp_path)
    assert run.code == 0, run.output
    assert run.result("worker 1") == {
        "argv": [str(tmp_path / "pkg" / "train.py"), *args[2:]],
        "name": "__main__",
        "spec": "pkg.train",
        "parent": "pkg",
        "path": str(tmp_path),
    }


def test_a_package_runs_its_main_module(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("print('imported')")
    (tmp_path / "pkg" / "__main__.py").write_text("print(__name__, __package__)")
    run = run_script(None, args=["-mpkg"], tmp_path=tmp_path)
    assert run.lines("worker 0") == ["imported", "__main__ pkg"]
    assert run.output.count("imported") == 2  # never in the launcher


def test_a_script_sees_what_it_sees_under_python(tmp_path):
    source = """\
import multiprocessing, os, pickle, sys, threading
import neighbour
class Thing: pass
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(neighbour.double, [21]))
    print(type(pickle.loads(pickle.dumps(Thing()))).__module__)
    print(__file__, __package__, __spec__, sys.path[0], sys.modules["__main__"].Thing is Thing)
    print(sorted(name for name in globals() if name.startswith("_")))
    threading.Timer(0.2, lambda: print("late", sys.modules["__main__"].Thing)).start()
"""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "neighbour.py").write_text("def double(x): return 2 * x")
    script = tmp_path / "src" / "real.py"
    script.write_text(source)
    link = tmp_path / "link.py"
    link.symlink_to(script)
    alone = subprocess.run(
        [sys.executable, "-u", str(link)], capture_output=True, text=True, check=True
    )
    run = run_script(link, tmp_path=tmp_path)
    assert run.lines("worker 0") == run.lines("worker 1") == alone.stdout.splitlines()


def test_files_in_the_current_directory_do_not_shadow_the_standard_library(tmp_path):
    (tmp_path / "ctypes.py").write_text("raise SystemExit(9)")
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "script.py"
    script.write_text("print('fine')")
    assert run_script(script, tmp_path=tmp_path).code == 0


# Exit codes.


def test_an_exception_is_shown_with_the_scripts_frames_only(tmp_path):
    source = "def inner():\n    raise ValueError('no such luck')\ninner()"
    run = run_script(source, tmp_path=tmp_path)
    assert run.code == 1
    lines = run.lines("worker 0")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: no such luck"
    assert "bootstrap" not in run.output


def test_a_syntax_error_points_at_the_script(tmp_path):
    run = run_script("x = = 1", tmp_path=tmp_path)
    assert run.code == 1
    assert "script.py" in run.output and "bootstrap" not in run.output


def test_our_own_errors_are_a_message_with_their_exit_code(tmp_path):
    source = "from tfdist.errors import ConfigError\nraise ConfigError('one', 'two', 'write one')"
    run = run_script(source, tmp_path=tmp_path)
    assert run.code == 2
    message = "tfdist: error: Expected one. Received: two. Fix: write one."
    assert run.lines("worker 0") == [message]


@pytest.mark.parametrize(("value", "code"), [("5", 5), ("None", 0), ("'text'", 1), ("143", 143)])
def test_sys_exit_is_preserved(tmp_path, value, code):
    run = run_script(f"import sys\nsys.exit({value})", workers=1, tmp_path=tmp_path)
    assert run.code == code


def test_the_first_failing_task_decides_and_its_last_lines_end_the_output(tmp_path):
    source = f"""{WHO}
for number in range(30):
    print(f"{{role}} {{index}} says {{number}}")
if index == 1:
    sys.exit(7)
time.sleep(2)
sys.exit(9)
"""
    run = run_script(source, workers=3, tmp_path=tmp_path)
    assert run.code == 7
    assert "tfdist run: worker 1 failed with exit code 7; the others (" in run.output
    assert "tfdist run: worker 0 ended with exit code 9" in run.output
    *_, summary = run.output.partition(
        "tfdist run: worker 1 failed first with exit code 7; its last lines:\n"
    )
    assert summary.splitlines() == [f"  | worker 1 says {number}" for number in range(15, 30)]


def test_a_task_that_dies_by_a_signal_counts_as_shells_count(tmp_path):
    with start_script("import time\ntime.sleep(60)", tmp_path=tmp_path) as job:
        job.wait_for_line("worker 1 is process")
        job.kill("worker 1", signal.SIGSEGV)
        job.wait_for_line("worker 1 failed with exit code 139")  # A core dump takes its time.
        job.kill("worker 0", signal.SIGTERM)
        run = job.wait(30)
    assert run.code == 139
    assert "worker 1 failed with exit code 139 (killed by SIGSEGV)" in run.output


def test_an_early_end_with_zero_is_no_failure(tmp_path):
    run = run_script(f"{WHO}time.sleep(1.5 * index)\nprint('done')", tmp_path=tmp_path)
    assert run.code == 0
    assert run.lines("worker 1") == ["done"]


# Stopping.

STUBBORN = f"""{WHO}
import signal
if index == 1:
    time.sleep(0.5)
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *unused: print("not me", flush=True))
while True:
    time.sleep(0.1)
"""


def test_siblings_end_by_themselves_within_the_grace(tmp_path):
    source = (
        f"{WHO}print('hi')\ntime.sleep(3 * (1 - index))\nprint('missing worker 1')\nsys.exit(4)"
    )
    run = run_script(source, tmp_path=tmp_path, launcher_args=["--grace", "20"])
    assert run.code == 4
    assert run.lines("worker 0") == ["hi", "missing worker 1"]
    assert run.seconds < 15
    assert "SIGTERM" not in run.output


def test_a_sibling_that_ignores_sigterm_is_killed(tmp_path, clocks):
    clocks("supervisor.KILL_SECONDS", 2)
    run = run_script(STUBBORN, tmp_path=tmp_path, launcher_args=["--grace", "1"])
    assert run.code == 3
    assert "not me" in run.lines("worker 0")
    assert "tfdist run: stopping worker 0 (SIGTERM)" in run.output
    assert "tfdist run: worker 0 did not end; killing it (SIGKILL)" in run.output
    assert 3 < run.seconds < 15


def test_ctrl_c_reaches_every_task_and_ends_with_130(tmp_path):
    source = f"""{WHO}
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    print("cleaned up")
"""
    with start_script(source, tmp_path=tmp_path) as job:
        job.wait_for_line("[worker 0] ready")
        job.wait_for_line("[worker 1] ready")
        job.signal(signal.SIGINT)
        run = job.wait(20)
    assert run.code == 130
    assert run.lines("worker 0") == run.lines("worker 1") == ["ready", "cleaned up"]
    assert "failed" not in run.output and "Traceback" not in run.output


def test_a_second_ctrl_c_kills_at_once(tmp_path):
    source = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    source += "print('ready', flush=True)\ntime.sleep(100)"
    with start_script(source, tmp_path=tmp_path, launcher_args=["--grace", "90"]) as job:
        job.wait_for_line("[worker 0] ready")
        job.wait_for_line("[worker 1] ready")
        job.signal(signal.SIGINT)
        job.wait_for_line("stopping all tasks")
        time.sleep(0.5)
        job.signal(signal.SIGINT)
        assert job.wait(10).code == 130


def test_sigterm_gives_tasks_the_grace_to_save_and_ends_with_143(tmp_path):
    source = """
import signal, sys, time
def save(*unused):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""
    options = ["--max-restarts", "3"]
    with start_script(source, tmp_path=tmp_path, launcher_args=options) as job:
        job.wait_for_line("[worker 0] ready")
        job.wait_for_line("[worker 1] ready")
        job.signal(signal.SIGTERM)
        run = job.wait(20)
    assert run.code == 143
    assert run.lines("worker 1") == ["ready", "saved"]
    assert "restart" not in run.output


def test_sigterm_leaves_a_task_the_processes_that_it_needs_to_save(tmp_path):
    source = """
import signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "100"])
def save(*unused):
    time.sleep(0.5)
    print("child", child.pid, child.poll(), flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""
    with start_script(source, workers=1, tmp_path=tmp_path) as job:
        job.wait_for_line("ready")
        job.signal(signal.SIGTERM)
        run = job.wait(20)
    assert run.code == 143
    _, child, ended = run.lines()[1].split()
    assert ended == "None" and not is_alive(int(child))


def test_tasks_that_ignore_sigterm_are_killed_after_the_grace(tmp_path):
    source = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    source += "print('ready', flush=True)\ntime.sleep(100)"
    with start_script(source, tmp_path=tmp_path, launcher_args=["--grace", "1"]) as job:
        job.wait_for_line("[worker 0] ready")
        job.wait_for_line("[worker 1] ready")
        pids = [job.task_pid("worker 0"), job.task_pid("worker 1")]
        job.signal(signal.SIGTERM)
        run = job.wait(15)
    assert run.code == 143
    assert not any(is_alive(pid) for pid in pids)


def test_servers_and_evaluator_that_outlive_the_training_are_no_failure(tmp_path, clocks):
    clocks("supervisor.SERVER_SECONDS", 1)
    clocks("supervisor.EVALUATOR_SECONDS", 2)
    source = f"{WHO}\nif role in ('ps', 'worker', 'evaluator'): time.sleep(100)"
    options = ["--ps", "1", "--evaluator"]
    run = run_script(source, workers=1, launcher_args=options, tmp_path=tmp_path, timeout=30)
    assert run.code == 0, run.output
    stopped = re.findall(r"stopping (\w+) 0 \(SIGTERM\)", run.output)
    assert sorted(stopped) == ["evaluator", "ps", "worker"]


def test_a_server_that_fails_fails_the_job(tmp_path):
    source = f"{WHO}\nif role == 'ps': sys.exit(6)\ntime.sleep(2)"
    run = run_script(source, workers=1, launcher_args=["--ps", "1"], tmp_path=tmp_path)
    assert run.code == 6


# Nothing is left behind.

FAMILY = f"""{WHO}
import subprocess
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
child = subprocess.Popen(sleep)
detached = subprocess.Popen(sleep, start_new_session=True)
anonymous = subprocess.Popen(sleep, env={{}})
print("family", os.getpid(), child.pid, detached.pid, anonymous.pid, flush=True)
"""


def _family(job):
    lines = [job.wait_for_line(f"[worker {index}] family") for index in (0, 1)]
    return [int(pid) for line in lines for pid in line.split()[3:]]


@pytest.mark.parametrize("stopped", [False, True])
def test_no_orphan_is_left_when_the_launcher_is_killed(tmp_path, stopped):
    with start_script(FAMILY + "time.sleep(300)", tmp_path=tmp_path) as job:
        pids = _family(job)
        assert len(pids) == 8 and all(is_alive(pid) for pid in pids)
        guards = [p.pid for p in psutil.Process(job.pid).children() if p.pid not in pids]
        if stopped:
            job.kill("worker 1", signal.SIGSTOP)
        job.signal(signal.SIGKILL)
        assert eventually(lambda: not any(is_alive(pid) for pid in pids), 2)
        assert len(guards) == 1 and eventually(lambda: not is_alive(guards[0]), 2)


def test_tasks_die_with_the_launcher_even_without_its_guard(tmp_path):
    with start_script("import time\ntime.sleep(300)", tmp_path=tmp_path) as job:
        job.wait_for_line("worker 1 is process")
        pids = [job.task_pid("worker 0"), job.task_pid("worker 1")]
        time.sleep(0.5)
        for process in psutil.Process(job.pid).children():
            if process.pid not in pids:
                process.kill()
        assert all(is_alive(pid) for pid in pids)
        job.signal(signal.SIGKILL)
        assert eventually(lambda: not any(is_alive(pid) for pid in pids), 2)


@pytest.mark.parametrize("last", ["sys.exit(0)", "sys.exit(1)", "os.kill(os.getpid(), 9)"])
def test_what_the_tasks_leave_behind_ends_with_the_job(tmp_path, last):
    with start_script(FAMILY + last, tmp_path=tmp_path) as job:
        pids = _family(job)
        job.wait(30)
        assert not any(is_alive(pid) for pid in pids)


def test_ctrl_c_in_a_terminal_leaves_nothing(tmp_path):
    with start_script(FAMILY + "time.sleep(300)", tmp_path=tmp_path) as job:
        pids = _family(job)
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(20).code == 130
        assert not any(is_alive(pid) for pid in pids)


def test_a_launcher_inside_a_task_cleans_up_when_the_outer_one_is_killed(tmp_path):
    inner = tmp_path / "inner.py"
    inner.write_text(FAMILY + "time.sleep(300)")
    source = (
        f"import subprocess\nsubprocess.run([*{CLI!r}, 'run', '--workers', '2', {str(inner)!r}])"
    )
    with start_script(source, workers=1, tmp_path=tmp_path) as job:
        lines = [job.wait_for_line(f"[worker {index}] family") for index in (0, 1)]
        pids = [int(pid) for line in lines for pid in line.split()[3:]]
        job.signal(signal.SIGKILL)
        assert eventually(lambda: not any(is_alive(pid) for pid in pids), 4)


# Restarts.


def test_the_whole_job_is_restarted_and_can_then_succeed(tmp_path):
    source = f"""{WHO}
start = int(os.environ["TFDIST_INCARNATION"])
print("start", start, os.environ["TFDIST_JOB_ID"], flush=True)
if start < 2 and index == 1:
    sys.exit(5)
time.sleep(0.5 if start == 2 else 60)
"""
    options = ["--max-restarts", "3", "--grace", "0.5"]
    run = run_script(source, launcher_args=options, tmp_path=tmp_path)
    assert run.code == 0
    for task in ("worker 0", "worker 1"):
        starts = [line.split() for line in run.lines(task)]
        assert [start[1] for start in starts] == ["0", "1", "2"]
        assert len({start[2] for start in starts}) == 3
    assert "tfdist run: restart 1 of 3 after worker 1 failed with exit code 5\n" in run.output
    assert "tfdist run: restart 2 of 3 after worker 1 failed with exit code 5\n" in run.output
    assert "restart 3" not in run.output


def test_after_the_last_restart_the_failure_stands(tmp_path):
    run = run_script(
        "raise SystemExit(143)", launcher_args=["--max-restarts", "1"], tmp_path=tmp_path
    )
    assert run.code == 143
    assert run.output.count("tfdist run: restart") == 1


def test_a_usage_error_is_not_retried(tmp_path):
    run = run_script(
        "raise SystemExit(2)", launcher_args=["--max-restarts", "3"], tmp_path=tmp_path
    )
    assert run.code == 2
    assert "restart" not in run.output


def test_a_signal_during_the_pause_before_a_restart_ends_the_job(tmp_path):
    options = ["--max-restarts", "9"]
    with start_script("raise SystemExit(1)", launcher_args=options, tmp_path=tmp_path) as job:
        job.wait_for_line("restart 1 of 9")
        job.signal(signal.SIGTERM)
        run = job.wait(10)
    assert run.code == 143
    assert "restart 2" not in run.output


# Usage.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a script or -m module to run"),
        (["missing.py"], "'missing.py', not found"),
        (["."], "'.', which is a directory"),
        (["--workers", "0", "ok.py"], "--workers to be at least 1. Received: 0"),
        (["--workers", "-2", "ok.py"], "--workers to be at least 1. Received: -2"),
        (["--ps", "-1", "ok.py"], "--ps to be at least 0"),
        (["--workers", "two", "ok.py"], "--workers"),
        (["--max-restarts", "-1", "ok.py"], "--max-restarts to be at least 0"),
        (["--grace", "-1", "ok.py"], "--grace to be at least 0"),
        (["--grace", "nan", "ok.py"], "--grace to be at least 0"),
        (["--rendezvous-timeout", "0", "ok.py"], "--rendezvous-timeout to be a positive number"),
        (
            ["--log-dir", "/proc/nowhere", "ok.py"],
            "--log-dir to be a directory that can be written",
        ),
        (["--log-dir", "ok.py", "ok.py"], "--log-dir to be a directory that can be written"),
        (["-m", "no.such.module"], "-m no.such.module"),
        (["-m", "json"], "a package without __main__.py"),
        (["-m"], "-m"),
        (["--no-such-option", "ok.py"], "--no-such-option"),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2_and_starts_nothing(tmp_path, arguments, message):
    (tmp_path / "ok.py").write_text("open('started', 'w')")
    done = _tfdist_run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "is process" not in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "started").exists()


def test_the_launcher_imports_neither_tensorflow_nor_keras():
    check = "import sys, tfdist.cli.run, tfdist.launch; "
    check += "sys.exit(bool({'tensorflow', 'keras'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], env=ENV, check=False).returncode == 0


def _tfdist_run(*arguments, input="", text=True, cwd=None):
    return subprocess.run(
        [*CLI, "run", *map(str, arguments)],
        input=input,
        capture_output=True,
        text=text,
        timeout=60,
        cwd=cwd,
        env=ENV,
        check=False,
    )
