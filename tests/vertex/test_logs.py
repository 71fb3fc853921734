"""The log of a job: in order, each line once, with the role that printed it."""

from __future__ import annotations

import json
import time

import pytest

from tests.support.jobs import FakeJobService
from tests.support.jobs import Fault
from tests.support.submission import run
from tfdist.errors import ConfigError
from tfdist.vertex import client
from tfdist.vertex import failures
from tfdist.vertex import logs
from tfdist.vertex.jobs import parse_job
from tfdist.vertex.jobs import task_of


@pytest.fixture
def service():
    with FakeJobService() as running:
        yield running


@pytest.fixture
def name(service):
    return service.add(("RUNNING",))


def reader(service, name, **options):
    access = client.connect(service.endpoint)
    return logs.LogReader(parse_job(name), access, endpoint=service.endpoint, **options)


def shown(lines):
    return [str(line) for line in lines]


@pytest.mark.parametrize(
    ("replica", "servers", "summing"),
    [
        ("workerpool0-0", "chief 0", "chief 0"),
        ("workerpool1-11", "worker 11", "worker 11"),
        ("workerpool2-1", "ps 1", "reduction_server 1"),
        ("workerpool3-0", "evaluator 0", "evaluator 0"),
        ("service", "service", "service"),
    ],
)
def test_replicas_have_the_names_of_their_roles(replica, servers, summing):
    assert task_of(replica) == servers
    assert task_of(replica, has_reduction_server=True) == summing


def test_lines_are_in_order_of_time_whatever_order_they_came_in(service, name):
    now = time.time()
    service.log(name, "workerpool1-0", "third", now + 2)
    service.log(name, "workerpool0-0", "first", now)
    service.log(name, "workerpool1-1", "second", now + 1)
    service.log(name.replace("700", "800"), "workerpool0-0", "of another job", now)
    assert shown(reader(service, name).read()) == [
        "[chief 0] first",
        "[worker 1] second",
        "[worker 0] third",
    ]


def test_each_line_of_an_entry_has_the_role(service, name):
    service.log(name, "workerpool2-0", "a\n\nb\n", time.time())
    assert shown(reader(service, name).read()) == ["[ps 0] a\n[ps 0] \n[ps 0] b"]


def test_a_second_reading_brings_what_is_new_and_what_came_late(service, name):
    now = time.time()
    service.log(name, "workerpool0-0", "one", now)
    service.log(name, "workerpool0-0", "two", now)
    log = reader(service, name)
    assert shown(log.read()) == ["[chief 0] one", "[chief 0] two"]
    service.log(name, "workerpool1-0", "late", now - 30)
    service.log(name, "workerpool0-0", "two", now)  # The same words once more.
    assert shown(log.read()) == ["[worker 0] late", "[chief 0] two"]
    assert shown(log.read()) == []


def test_many_pages_are_read_as_one(service, name, monkeypatch):
    monkeypatch.setattr(logs, "_PAGE", 7)
    now = time.time()
    for number in range(40):
        service.log(name, "workerpool0-0", str(number), now + number * 1e-6)
    lines = shown(reader(service, name).read())
    assert lines == [f"[chief 0] {number}" for number in range(40)]
    assert service.count("logs") == 6


def test_a_page_that_fails_costs_no_line_and_doubles_none(service, name, monkeypatch):
    monkeypatch.setattr(logs, "_PAGE", 7)
    for number in range(40):
        service.log(name, "workerpool0-0", str(number), time.time())
    log, said, lines = reader(service, name), [], []
    for line in logs.read_all(log, said.append, pause=0.01):
        lines.append(str(line))
        if len(lines) == 10:
            service.faults += [Fault("logs", 503), Fault("logs", None)]
    assert lines == [f"[chief 0] {number}" for number in range(40)]
    assert len(said) == 2
    assert "503" in said[0]


def test_without_permission_it_says_which_role_gives_it(service, name):
    service.faults.append(Fault("logs", 403, "Permission denied for all log views"))
    with pytest.raises(failures.AccessError, match=r"log views.*roles/logging\.viewer") as caught:
        list(logs.read_all(reader(service, name), print))
    assert caught.value.exit_code == 2


def test_it_gives_up_after_a_while_without_an_answer(service, name):
    service.faults.append(Fault("logs", 503, times=1000))
    with pytest.raises(failures.UnavailableError):
        list(logs.read_all(reader(service, name), lambda text: None, outage=0.2, pause=0.05))


def test_an_emulator_without_a_log_is_refused_at_once(service, name):
    with pytest.raises(ConfigError, match="TFDIST_LOGGING_ENDPOINT"):
        logs.LogReader(parse_job(name), client.connect(service.endpoint), environ={})


def test_times_have_nine_digits():
    early, late = "2026-11-30T18:00:00.000000001Z", "2026-11-30T18:00:00.000000002Z"
    assert logs._nanoseconds(late) - logs._nanoseconds(early) == 1
    assert logs._nanoseconds("2026-11-30T18:00:01Z") - logs._nanoseconds(early) == 10**9 - 1


def test_the_command_prints_the_log_or_follows_it_to_the_end_of_the_job(service):
    name = service.add(("RUNNING", "RUNNING", "SUCCEEDED"))
    service.log(name, "workerpool0-0", "hello", time.time())
    done = run(service, "logs", name, "--json", TFDIST_LOGGING_ENDPOINT=service.endpoint)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["task"] == "chief 0"
    done = run(service, "logs", name, "--follow", TFDIST_LOGGING_ENDPOINT=service.endpoint)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[chief 0] hello\n"
    assert "SUCCEEDED" in done.stderr
