"""A job is submitted once, or refused with the fix: through the real client, to a service here."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from google.cloud.aiplatform_v1.types import CustomJob

import tfdist.vertex as vertex
from tests.support.jobs import FakeJobService
from tests.support.jobs import Fault
from tests.support.submission import CONFIG
from tests.support.submission import ROOT
from tests.support.submission import run
from tests.support.submission import spec
from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError
from tfdist.vertex import client
from tfdist.vertex import failures
from tfdist.vertex import submit as submit_function
from tfdist.vertex.create import SUBMISSION_LABEL
from tfdist.vertex.create import create_once

PARENT = "projects/demo/locations/us-central1"
QUOTA = "The following quota metrics exceed quota limits: aiplatform.googleapis.com/custom_cpus"


@pytest.fixture
def service():
    with FakeJobService() as running:
        yield running


def send(service, job, said=None, **options):
    say = (lambda text: None) if said is None else said.append
    return submit_function(job, endpoint=service.endpoint, environ={}, say=say, **options)


def send_quickly(service, said, seconds=5.0):
    body = {**vertex.render(spec()), "labels": {SUBMISSION_LABEL: "s1"}}
    jobs = client.JobService("us-central1", client.connect(service.endpoint))
    return create_once(jobs, PARENT, body, say=said.append, seconds=seconds, pause=0.05)


def refusal(service, job, *faults):
    service.faults[:] = faults
    with pytest.raises(failures.TfdistError) as caught:
        send(service, job)
    assert "\n" not in str(caught.value)
    assert "Fix: " in str(caught.value)
    return caught.value


def test_what_is_sent_is_what_render_shows_with_a_label_of_the_submission(service):
    chief = vertex.Pool(
        machine_type="n1-standard-8",
        accelerator=vertex.Accelerator(type="NVIDIA_TESLA_T4", count=2),
    )
    job = spec(
        pools=vertex.Pools(chief=chief, worker=dataclasses.replace(chief, replicas=3)),
        labels={"team": "a"},
        env={"EMPTY": "", "MANY": "a=b c"},
    )
    made = send(service, job)
    expected = vertex.render(job)
    expected["labels"] = {"team": "a", SUBMISSION_LABEL: made.submission}
    (received,) = service.created
    assert CustomJob.from_json(json.dumps(received)) == CustomJob.from_json(json.dumps(expected))
    assert received["jobSpec"]["workerPoolSpecs"][1]["replicaCount"] == "3"
    assert received["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"][1:] == [
        "two words",
        "it's",
    ]
    assert service.requests == ["create"]
    assert made.name == service.job.name
    assert made.console_url.endswith(
        f"/locations/us-central1/training/{made.name.rsplit('/')[-1]}?project=demo"
    )


def test_each_submission_is_a_job_of_its_own(service):
    first, second = send(service, spec()), send(service, spec())
    assert first.name != second.name
    assert first.submission != second.submission


def test_a_job_that_breaks_a_rule_is_refused_before_any_request(service):
    two = vertex.Pools(chief=vertex.Pool(machine_type="n1-standard-4", replicas=2))
    with pytest.raises(vertex.JobError) as caught:
        send(service, spec(pools=two))
    assert caught.value.rules == ("one-primary",)
    many = {f"k{number}": "v" for number in range(64)}
    with pytest.raises(vertex.JobError, match="tfdist_submission"):
        send(service, spec(labels=many))
    assert service.requests == []


def test_a_region_that_is_none_is_refused_before_any_request(service):
    with pytest.raises(ConfigError):
        send(service, spec(region="evil.example/x"))
    assert service.requests == []


@pytest.mark.parametrize("status", [503, 500, 502, 504])
def test_a_create_that_was_not_carried_out_is_tried_again(service, status):
    service.faults.append(Fault("create", status))
    said = []
    made = send_quickly(service, said)
    assert [job["labels"][SUBMISSION_LABEL] for job in service.created] == ["s1"]
    assert service.requests == ["create", "list", "create", "list"]
    assert made.name == service.job.name
    assert str(status) in said[0]


@pytest.mark.parametrize("status", [503, None])
def test_a_create_whose_answer_is_lost_makes_one_job(service, status):
    service.faults.append(Fault("create", status, done=True))
    said = []
    made = send_quickly(service, said)
    assert service.requests == ["create", "list"]
    assert made.name == service.job.name
    assert "created all the same" in said[-1]


def test_a_search_without_an_answer_is_repeated_before_anything_is_created(service):
    service.faults += [Fault("create", 503, done=True), Fault("list", 503, times=2)]
    made = send_quickly(service, [])
    assert service.requests == ["create", "list", "list", "list"]
    assert made.name == service.job.name


def test_a_request_that_comes_late_leaves_one_job_that_runs(service):
    # The first is carried out, but the list does not show it yet.
    service.faults += [Fault("create", 503, done=True), Fault("list", 200)]
    said = []
    made = send_quickly(service, said)
    first, second = service.jobs.values()
    assert made.name == first.name
    assert first.states[-1] == "SUCCEEDED"
    assert second.states == ["CANCELLING", "CANCELLED"]
    assert second.name in said[-1]


def test_a_job_that_took_its_own_quota_is_found(service):
    service.faults += [Fault("create", 503, done=True), Fault("list", 200)]
    service.faults.append(Fault("create", 429, QUOTA))
    made = send_quickly(service, [])
    assert made.name == service.job.name
    assert service.requests == ["create", "list", "create", "list"]


def test_without_an_answer_for_long_it_says_how_to_look_for_the_job(service):
    service.faults.append(Fault("create", 503, times=1000))
    with pytest.raises(failures.UnavailableError) as caught:
        send_quickly(service, [], seconds=0.6)
    assert caught.value.exit_code == 1
    assert f"--filter=labels.{SUBMISSION_LABEL}=s1" in str(caught.value)
    assert 2 <= service.count("create") <= 5
    assert service.jobs == {}


def test_a_service_that_is_not_there_is_not_asked_for_lists(service):
    with FakeJobService() as gone:
        pass
    jobs = client.JobService("us-central1", client.connect(gone.endpoint))
    body = {**vertex.render(spec()), "labels": {SUBMISSION_LABEL: "s1"}}
    said = []
    with pytest.raises(failures.UnavailableError) as caught:
        create_once(jobs, PARENT, body, say=said.append, seconds=0.3, pause=0.05)
    assert not caught.value.maybe_done
    assert "no connection" in str(caught.value)


def test_requests_that_come_too_often_are_made_again_more_slowly(service):
    text = "Quota exceeded for quota metric 'Jobs' and limit 'Requests per minute'"
    service.faults.append(Fault("create", 429, text))
    send_quickly(service, [])
    assert service.requests == ["create", "create"]  # It was not carried out for sure.


@pytest.mark.parametrize(
    ("fault", "kind", "code", "parts"),
    [
        (
            Fault("create", 403, "Permission 'aiplatform.customJobs.create' denied on resource"),
            failures.AccessError,
            2,
            ("customJobs.create", "roles/aiplatform.user"),
        ),
        (
            Fault("create", 403, "Vertex AI API is disabled", reason="SERVICE_DISABLED"),
            failures.AccessError,
            2,
            ("gcloud services enable aiplatform.googleapis.com",),
        ),
        (
            Fault("create", 403, "You do not have permission to act as service account: a@b"),
            failures.AccessError,
            2,
            ("roles/iam.serviceAccountUser",),
        ),
        (
            Fault("create", 401, "Request had invalid authentication credentials."),
            failures.AccessError,
            2,
            ("gcloud auth application-default login",),
        ),
        (
            Fault("create", 429, QUOTA),
            failures.QuotaError,
            1,
            ("custom_cpus", "iam-admin/quotas", "fewer machines"),
        ),
        (
            Fault("create", 404, "Project demo is not there"),
            failures.NotThereError,
            2,
            ("Project demo is not there", "vertex.project"),
        ),
        (
            Fault("create", 400, "List of found errors:\t1.Field: job_spec; Message: Bad.\t"),
            failures.RefusedError,
            2,
            ("Message: Bad", "change the config"),
        ),
    ],
)
def test_a_refusal_has_the_words_of_the_service_and_its_fix(service, fault, kind, code, parts):
    error = refusal(service, spec(), fault)
    assert type(error) is kind
    assert error.exit_code == code
    for part in parts:
        assert part in str(error)
    assert service.requests == ["create"]


def test_credentials_that_are_not_there_are_named_with_the_way_to_get_some(monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/key.json")
    with pytest.raises(failures.AccessError, match=r"no/such/key\.json.*gcloud auth") as caught:
        submit_function(spec(), environ={}, say=print)
    assert caught.value.exit_code == 2


def test_a_value_that_the_client_does_not_know_asks_for_a_newer_one(service):
    jobs = client.JobService("us-central1", client.connect(service.endpoint))
    with pytest.raises(UnsupportedError, match="pip install --upgrade 'tfdist"):
        jobs.create(PARENT, {"displayName": "x", "jobSpec": {"newField": 1}})
    assert service.requests == []


def test_without_the_client_library_the_line_that_installs_it_is_shown(service, monkeypatch):
    name = "google.cloud.aiplatform_v1.services.job_service"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"pip install 'tfdist\[vertex\]'"):
        send(service, spec())


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://127.0.0.1:80/", "http://127.0.0.1:80"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("localhost:8080", "http://localhost:8080"),
        ("[::1]:8080", "http://[::1]:8080"),
        ("my-psc.p.googleapis.com", "https://my-psc.p.googleapis.com"),
    ],
)
def test_an_endpoint_without_a_scheme_is_plain_on_this_machine_alone(given, address):
    assert client.normalized(given, "x") == address


@pytest.mark.parametrize(
    "given", ["ftp://a", "http://", "http://a:b", "http://u:p@h", "http://a?x"]
)
def test_an_endpoint_that_is_none_is_refused(given):
    with pytest.raises(ConfigError, match="TFDIST_VERTEX_ENDPOINT"):
        client.connect(environ={"TFDIST_VERTEX_ENDPOINT": given})


def test_the_endpoint_of_the_environment_is_an_emulator_without_credentials(service):
    environ = {"TFDIST_VERTEX_ENDPOINT": service.endpoint.removeprefix("http://")}
    submit_function(spec(), environ=environ, say=lambda text: None)
    assert service.requests == ["create"]
    assert "Authorization" not in service.headers[0]


_INIT = """
import sys
from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform
aiplatform.init(project="demo", location="us-central1", staging_bucket="gs://stage",
                credentials=AnonymousCredentials(), api_endpoint=sys.argv[1], api_transport="rest")
from tests.support.submission import spec
import tfdist.vertex
job = tfdist.vertex.submit(spec(staging_bucket=None))
result = tfdist.vertex.wait(job, pace=tfdist.vertex.Pace(first=0.05, most=0.1))
try:
    tfdist.vertex.wait("77")
except tfdist.vertex.failures.NotThereError as error:
    print(result.state, tfdist.vertex.submit.__module__, error.expected.split()[1])
"""


def test_what_was_given_to_aiplatform_init_is_used(service):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("TFDIST_VERTEX_ENDPOINT", None)
    done = subprocess.run(
        [sys.executable, "-c", _INIT, service.endpoint],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "SUCCEEDED",
        "tfdist.vertex.submit",
        "projects/demo/locations/us-central1/customJobs/77",
    ]
    assert service.requests[0] == "create"


def test_the_command_prints_name_and_page_or_json(service):
    done = run(service, "submit", CONFIG, "--set", "vertex.display_name=mine")
    assert done.returncode == 0, done.stderr
    name, page = done.stdout.splitlines()
    assert name == service.job.name
    assert page.startswith("https://console.cloud.google.com/")
    assert f"tfdist vertex wait {name}" in done.stderr
    assert service.created[0]["displayName"] == "mine"


def test_the_command_follows_the_job_and_exits_as_it_did(service):
    service.script = ["PENDING", "RUNNING", ("FAILED", "Replica workerpool0-0 exited with 3.")]
    done = run(service, "submit", CONFIG, "--wait", "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["name"] == service.job.name
    assert told["state"] == "FAILED"
    assert told["reason"] == "the job failed: Replica workerpool0-0 exited with 3."
    assert "PENDING" in done.stderr


def test_a_dry_run_prints_what_would_be_sent_and_sends_nothing(service):
    done = run(service, "submit", CONFIG, "--dry-run")
    assert done.returncode == 0, done.stderr
    job = CustomJob.from_json(done.stdout)
    assert job.job_spec.worker_pool_specs[0].replica_count == 1
    assert service.requests == []


def test_the_command_shows_a_refusal_in_one_line_with_exit_code_2(service):
    service.faults.append(Fault("create", 403, "denied"))
    done = run(service, "submit", CONFIG)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("tfdist: error: Expected the permission to create a job.")
    assert done.stderr.count("\n") == 1
