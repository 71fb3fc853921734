"""A job is followed to its end, whatever the end and however the service behaves meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

import tfdist.vertex as vertex
from tests.support.jobs import FakeJobService
from tests.support.jobs import Fault
from tests.support.submission import CONFIG
from tests.support.submission import ROOT
from tests.support.submission import Kept
from tests.support.submission import run
from tfdist.errors import ConfigError
from tfdist.vertex import failures
from tfdist.vertex.history import History
from tfdist.vertex.history import line
from tfdist.vertex.history import shown
from tfdist.vertex.jobs import JobStatus
from tfdist.vertex.jobs import parse_job
from tfdist.vertex.wait import Pace

QUICK = Pace(first=0.01, most=0.02, outage=5.0, settle=0.0)
NAME = "projects/p/locations/us-central1/customJobs/7"


@pytest.fixture
def service():
    with FakeJobService() as running:
        yield running


def follow(service, script, kept=None, pace=QUICK, **options):
    name = service.add(script)
    return vertex.wait(
        name, endpoint=service.endpoint, pace=pace, reporter=kept or Kept(), environ={}, **options
    )


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("SUCCEEDED", 0, "the job succeeded"),
        (("FAILED", "Replica workerpool1-0 exited with 3."), 1, "failed: Replica workerpool1-0"),
        (("FAILED", "The following quota metrics exceed quota limits: x"), 1, "IAM, Quotas"),
        ("CANCELLED", 1, "the job was cancelled"),
        (("EXPIRED", "Ran past 60s."), 1, "its timeout, before it was done: Ran past 60s."),
        ("PARTIALLY_SUCCEEDED", 1, "some results may be missing"),
        ("PAUSED", 1, "the job is paused: resume it"),
    ],
)
def test_every_end_has_an_exit_code_and_a_reason(service, end, code, reason):
    kept = Kept()
    result = follow(service, ("QUEUED", "PENDING", "RUNNING", "RUNNING", end), kept)
    assert result.exit_code == code
    assert reason in result.reason
    assert kept.states == ["QUEUED", "PENDING", "RUNNING", result.state]
    assert service.count("get") == 5


def test_a_paused_job_may_be_waited_for(service):
    script = ("RUNNING", "PAUSED", "PAUSED", "RUNNING", "UPDATING", "RUNNING", "SUCCEEDED")
    result = follow(service, script, paused="continue")
    assert result.exit_code == 0
    assert result.restarts == 0


def test_a_job_that_starts_again_is_followed_and_counted(service):
    result = follow(service, ("PENDING", "RUNNING", "PENDING", "RUNNING", "SUCCEEDED"))
    assert (result.exit_code, result.restarts) == (0, 1)


def test_a_state_of_a_later_service_is_waited_out(service):
    service.faults.append(Fault("get", 200))  # No state at all.
    result = follow(service, ("RUNNING", "SUCCEEDED"))
    assert result.exit_code == 0


@pytest.mark.parametrize("status", [503, 429, 500, None])
def test_an_outage_is_said_once_and_survived(service, status):
    kept = Kept()
    text = "Resource has been exhausted (e.g. check quota)." if status == 429 else "overloaded"
    service.faults.append(Fault("get", status, text, times=4))
    result = follow(service, ("RUNNING", "SUCCEEDED"), kept)
    assert result.exit_code == 0
    assert [text.split(":")[0] for text in kept.said] == [
        "no answer about the job",
        "the service answers again, after 0",
    ]


def test_answers_that_are_not_the_services_count_as_an_outage(service):
    kept = Kept()
    service.faults += [
        Fault("get", 502, raw="<html>Bad gateway</html>"),
        Fault("get", 503, raw="[]"),
    ]
    service.faults += [Fault("get", 200, raw="<html>Log in</html>")]
    assert follow(service, ("RUNNING", "SUCCEEDED"), kept).exit_code == 0
    assert len(kept.said) == 2
    assert "Bad gateway" in kept.said[0]


def test_an_outage_that_lasts_ends_the_waiting_and_says_how_to_go_on(service):
    class Breaks(Kept):
        def change(self, history, now):
            service.faults.append(Fault("get", 503, times=10_000))

    with pytest.raises(failures.UnavailableError) as caught:
        follow(service, ("RUNNING",), Breaks(), Pace(first=0.01, most=0.02, outage=0.3))
    assert caught.value.exit_code == 1
    assert f"tfdist vertex wait {service.job.name}" in str(caught.value)


def test_an_unknown_job_is_an_error_that_names_it(service):
    with pytest.raises(failures.NotThereError, match="job projects/p/.* to be there") as caught:
        vertex.wait(NAME, endpoint=service.endpoint, reporter=Kept())
    assert caught.value.exit_code == 2
    assert service.requests == ["get"]


def test_waiting_ends_in_time_and_the_job_goes_on(service):
    result = follow(service, ("RUNNING",), timeout=0.1)
    assert result.exit_code == 1
    assert "has not ended in time and goes on" in result.reason
    assert service.count("cancel") == 0


def test_losing_the_permission_meanwhile_says_that_the_job_goes_on(service):
    kept = Kept()
    service.faults.append(Fault("get", 200))
    service.faults.append(Fault("get", 403, "token has expired"))
    with pytest.raises(failures.AccessError):
        follow(service, ("RUNNING",), kept)
    assert "the job goes on" in kept.said[-1]


class Interrupts(Kept):
    """As if Ctrl-C came when the job runs, and again when it is said to be cancelled."""

    def __init__(self, again=False):
        super().__init__()
        self.again = again

    def change(self, history, now):
        super().change(history, now)
        if history.state == "RUNNING":
            raise KeyboardInterrupt

    def say(self, text):
        super().say(text)
        if self.again and "being cancelled" in text:
            raise KeyboardInterrupt


def test_an_interrupted_job_is_cancelled_and_followed_to_its_end(service):
    kept = Interrupts()
    result = follow(service, ("RUNNING",) * 9, kept, interrupted=lambda: "cancel")
    assert (result.state, result.exit_code) == ("CANCELLED", 1)
    assert kept.states == ["RUNNING", "CANCELLING", "CANCELLED"]
    assert service.count("cancel") == 1


def test_a_cancel_without_an_answer_is_tried_again(service):
    service.faults.append(Fault("cancel", 503, times=2))
    result = follow(service, ("RUNNING",) * 9, Interrupts(), interrupted=lambda: "cancel")
    assert result.state == "CANCELLED"
    assert service.count("cancel") == 3


def test_a_cancel_that_is_refused_is_said_and_the_job_followed(service):
    kept = Interrupts()
    service.faults.append(Fault("cancel", 403, "denied"))
    result = follow(service, ("RUNNING", "SUCCEEDED"), kept, interrupted=lambda: "cancel")
    assert result.exit_code == 0
    assert "not cancelled: 403 denied" in kept.said


def test_an_interrupted_job_may_be_left_running(service):
    result = follow(service, ("RUNNING",) * 9, Interrupts(), interrupted=lambda: "leave")
    assert result.exit_code == 130
    assert f"tfdist vertex wait {service.job.name}" in result.reason
    assert service.count("cancel") == 0


def test_a_second_interruption_leaves_the_job(service):
    result = follow(service, ("RUNNING",) * 9, Interrupts(True), interrupted=lambda: "cancel")
    assert result.exit_code == 130
    assert service.count("cancel") == 1


def test_an_interruption_after_the_end_asks_nothing(service):
    class Late(Kept):
        def change(self, history, now):
            if history.state == "SUCCEEDED":
                raise KeyboardInterrupt

    asked = []
    result = follow(service, ("RUNNING", "SUCCEEDED"), Late(), interrupted=lambda: asked.append(1))
    assert (result.exit_code, asked) == (0, [])


def test_the_log_is_shown_while_waiting_and_its_loss_does_not_end_it(service):
    name = service.add(("RUNNING", "RUNNING", "SUCCEEDED"))
    service.log(name, "workerpool1-0", "hello", time.time())
    kept = Kept()
    environ = {"TFDIST_LOGGING_ENDPOINT": service.endpoint}
    options = {"endpoint": service.endpoint, "pace": QUICK, "environ": environ}
    assert vertex.wait(name, reporter=kept, **options).exit_code == 0
    assert kept.lines == ["[worker 0] hello"]
    kept = Kept()
    service.faults.append(Fault("logs", 403, "no log for you"))
    assert vertex.wait(name, reporter=kept, **options).exit_code == 0
    assert kept.lines == []
    assert "roles/logging.viewer" in kept.said[0]


def status(state, **times):
    return JobStatus(name=NAME, state=state, **times)


def test_times_in_states_are_the_services_where_it_says_them():
    history = History()
    assert history.observe(status("PENDING", create_time=1000.0), 1002.0)
    assert not history.observe(status("PENDING", create_time=1000.0), 1050.0)
    assert history.observe(status("RUNNING", create_time=1000.0, start_time=1060.0), 1070.0)
    ended = status("SUCCEEDED", create_time=1000.0, start_time=1060.0, end_time=4660.0)
    assert line(history, 1071.0) == "RUNNING 0:11 (pending 1:00, total 1:11)"
    assert history.observe(ended, 4700.0)
    assert history.seconds(9999.0) == {"PENDING": 60.0, "RUNNING": 3600.0}
    assert history.total(9999.0) == 3660.0
    assert line(history, 9999.0) == "SUCCEEDED (pending 1:00, running 1:00:00, total 1:01:00)"


def test_a_job_that_is_looked_at_late_has_its_times_too():
    history = History()
    ended = status("FAILED", create_time=10.0, start_time=30.0, end_time=100.0)
    history.observe(ended, 5000.0)
    assert history.seconds(6000.0) == {"PENDING": 20.0, "RUNNING": 70.0}
    history = History()
    history.observe(status("EXPIRED", create_time=10.0, end_time=100.0), 5000.0)
    assert history.seconds(6000.0) == {"PENDING": 90.0}


def test_a_clock_that_is_behind_the_services_makes_no_negative_times():
    history = History()
    history.observe(status("PENDING", create_time=1000.0), 900.0)
    history.observe(status("RUNNING", create_time=1000.0, start_time=1060.0), 905.0)
    history.observe(status("PENDING", create_time=1000.0, start_time=1060.0), 904.0)
    assert min(history.seconds(903.0).values()) >= 0.0
    assert history.total(903.0) == 3.0
    assert history.restarts == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.9, "0:00"), (59, "0:59"), (60, "1:00"), (3723.4, "1:02:03")]
)
def test_times_are_shown_as_people_write_them(seconds, text):
    assert shown(seconds) == text


@pytest.mark.parametrize(
    "text",
    [
        NAME,
        f" {NAME}\n",
        "https://console.cloud.google.com/agent-platform/locations/us-central1/training/7?project=p",
        "7",
    ],
)
def test_a_job_is_named_in_three_ways(text):
    environ = {"GOOGLE_CLOUD_PROJECT": "p", "GOOGLE_CLOUD_REGION": "us-central1"}
    assert str(parse_job(text, environ=environ)) == NAME


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("7", "the project of job 7"),
        ("configs/x.yaml", "a job: projects/P/locations/R/customJobs/ID"),
        ("", "a job"),
        ("projects/p/locations/evil.example#/customJobs/7", "a region such as us-central1"),
    ],
)
def test_what_names_no_job_is_refused(text, part):
    with pytest.raises(ConfigError, match=part):
        parse_job(text, environ={})


def test_the_command_waits_for_an_id_of_a_config_and_prints_json(service):
    name = service.add(("RUNNING", ("FAILED", "Out of memory.")), project="my-project")
    done = run(service, "wait", name.rsplit("/", 1)[1], "--config", CONFIG, "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (told["name"], told["state"]) == (name, "FAILED")
    assert "the job failed: Out of memory." in done.stderr
    assert "\033" not in done.stderr


@contextlib.contextmanager
def waiting(service, name, *options, terminal):
    """Runs `tfdist vertex wait`; yields the process and the file descriptor it writes to."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TFDIST_VERTEX_POLL": "0.1", "TERM": "xterm"}
    env["TFDIST_VERTEX_ENDPOINT"] = service.endpoint
    command = [sys.executable, "-m", "tfdist", "vertex", "wait", name, *options]
    ours, theirs = pty.openpty() if terminal else os.pipe()
    stdin = theirs if terminal else subprocess.DEVNULL
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=stdin, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(descriptor, text, seconds=30.0):
    """Returns what is written up to `text`, or up to the end if it is None."""
    deadline, got = time.monotonic() + seconds, ""
    while text is None or text not in got:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, got
        try:
            data = os.read(descriptor, 4096)
        except OSError:  # The other side of a terminal is closed.
            data = b""
        if not data:
            assert text is None, got
            return got
        got += data.decode()
    return got


def test_on_a_terminal_time_goes_on_in_one_line_and_ctrl_c_asks(service):
    name = service.add(("RUNNING",) * 1000)
    with waiting(service, name, terminal=True) as (process, screen):
        live = read_until(screen, "\r\033[KRUNNING 0:0")
        assert live.count("RUNNING") == 2  # The line of the change, and the live one.
        process.send_signal(signal.SIGINT)
        read_until(screen, "cancel the job? [y/N] ")
        assert service.count("cancel") == 0
        os.write(screen, b"y\n")
        said = read_until(screen, None)
        assert process.wait(20) == 1
    assert "the job was cancelled" in said
    assert service.count("cancel") == 1


def test_on_a_terminal_a_second_ctrl_c_leaves_the_job_running(service):
    name = service.add(("RUNNING",) * 1000)
    with waiting(service, name, terminal=True) as (process, screen):
        read_until(screen, "RUNNING")
        process.send_signal(signal.SIGINT)
        read_until(screen, "cancel the job? [y/N] ")
        process.send_signal(signal.SIGINT)
        said = read_until(screen, None)
        assert process.wait(20) == 130
    assert f"the job goes on; follow it with: tfdist vertex wait {name}" in said
    assert service.count("cancel") == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_a_terminal_an_interrupted_job_goes_on_unless_told_otherwise(service, number):
    name = service.add(("RUNNING",) * 1000)
    with waiting(service, name, terminal=False) as (process, output):
        read_until(output, "RUNNING")
        process.send_signal(number)
        assert "the job goes on" in read_until(output, None)
        assert process.wait(20) == 130
    assert service.count("cancel") == 0
    if number == signal.SIGTERM:
        with waiting(service, name, "--cancel-on-interrupt", terminal=False) as (process, output):
            read_until(output, "RUNNING")
            process.send_signal(number)
            assert "the job was cancelled" in read_until(output, None)
            assert process.wait(20) == 1
        assert service.count("cancel") == 1
