"""The rendered job against the service's own protobufs, and what reaches the program."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
import yaml

from tests.support.specs import A100
from tests.support.specs import N1
from tests.support.specs import gpus
from tests.support.specs import job
from tests.support.specs import pools
from tfdist.vertex import Disk
from tfdist.vertex import JobError
from tfdist.vertex import Pool
from tfdist.vertex import Reservation
from tfdist.vertex import Scheduling
from tfdist.vertex import load
from tfdist.vertex import render
from tfdist.vertex.render import FORMATS
from tfdist.vertex.render import gcloud
from tfdist.vertex.render import text

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*-vertex.yaml"))

types = pytest.importorskip(
    "google.cloud.aiplatform_v1.types", reason="needs pip install 'tfdist[vertex]'"
)

WORDS = (
    "two words",
    "it's",
    'say "yes"',
    "a\nb\tc",
    "$HOME $(NAME) `ls` ${X}",
    "\\n \\\\",
    "",
    " ",
    "ünïcode 🙂",
    "yes",
    "0o17",
    "1e3",
    "null",
    "- a: b # c",
    '{"a": {"b": [1, 2.5, null, "c d"]}}',
    "--flag=a b",
)
REDUCERS = Pool(machine_type="n1-highcpu-16", replicas=2)
A100S = dataclasses.replace(A100, replicas=1)


def parsed(spec):
    """Returns the job as the service reads it; fields that it does not know are an error."""
    return types.CustomJob.from_json(json.dumps(render(spec)), ignore_unknown_fields=False)


def test_pools_have_the_positions_of_their_roles():
    spec = job(
        pools=pools(
            worker=dataclasses.replace(N1, replicas=3),
            ps=Pool(machine_type="n1-highmem-8", replicas=2),
            evaluator=Pool(machine_type="n1-standard-4"),
        )
    )
    made = parsed(spec).job_spec.worker_pool_specs
    assert [pool.replica_count for pool in made] == [1, 3, 2, 1]
    assert [pool.machine_spec.machine_type for pool in made] == [
        "n1-standard-8",
        "n1-standard-8",
        "n1-highmem-8",
        "n1-standard-4",
    ]
    assert {pool.container_spec.image_uri for pool in made} == {spec.image}
    assert {tuple(pool.container_spec.args) for pool in made} == {spec.args}
    assert {pool.disk_spec.boot_disk_type for pool in made} == {"pd-ssd"}
    assert {pool.disk_spec.boot_disk_size_gb for pool in made} == {100}


def test_pools_that_are_not_used_are_empty_up_to_the_last_that_is():
    assert len(render(job())["jobSpec"]["workerPoolSpecs"]) == 1
    made = render(job(pools=pools(evaluator=N1)))["jobSpec"]["workerPoolSpecs"]
    assert [bool(pool) for pool in made] == [True, False, False, True]
    assert made[1] == made[2] == {}
    read = parsed(job(pools=pools(evaluator=N1))).job_spec.worker_pool_specs
    assert [pool.replica_count for pool in read] == [1, 0, 0, 1]
    reduced = pools(A100, worker=A100S, reduction_server=REDUCERS)
    assert len(render(job(pools=reduced))["jobSpec"]["workerPoolSpecs"]) == 3


@pytest.mark.parametrize(
    ("given", "restarts"),
    [
        ({}, False),
        ({"pools": pools(worker=N1)}, True),
        ({"pools": pools(worker=N1, evaluator=N1)}, True),
        ({"pools": pools(evaluator=N1)}, False),
        ({"pools": pools(worker=N1, ps=N1)}, False),
        ({"pools": pools(A100, worker=A100S, reduction_server=REDUCERS)}, True),
        ({"scheduling": Scheduling(restart_job_on_worker_restart=True)}, True),
        (
            {
                "pools": pools(worker=N1),
                "scheduling": Scheduling(restart_job_on_worker_restart=False),
            },
            False,
        ),
        ({"pools": pools(worker=N1), "scheduling": Scheduling(disable_retries=True)}, False),
    ],
)
def test_the_job_restarts_with_a_worker_where_workers_train_in_step(given, restarts):
    assert parsed(job(**given)).job_spec.scheduling.restart_job_on_worker_restart is restarts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Scheduling(), {"strategy": "STANDARD"}),
        (Scheduling(timeout="7d"), {"strategy": "STANDARD", "timeout": "604800s"}),
        (Scheduling(timeout=90), {"strategy": "STANDARD", "timeout": "90s"}),
        (Scheduling(strategy="spot"), {"strategy": "SPOT"}),
        (
            Scheduling(strategy="flex_start", max_wait="0s", timeout="1d 12h"),
            {"strategy": "FLEX_START", "maxWaitDuration": "0s", "timeout": "129600s"},
        ),
        (
            Scheduling(disable_retries=True),
            {"strategy": "STANDARD", "disableRetries": True},
        ),
    ],
)
def test_scheduling_is_written_as_the_service_reads_it(given, expected):
    spec = job(pools=pools(A100), scheduling=given)
    assert render(spec)["jobSpec"]["scheduling"] == expected
    read = parsed(spec).job_spec.scheduling
    assert read.strategy.name == expected["strategy"]
    seconds = int(expected.get("timeout", "0s").rstrip("s"))
    assert read.timeout.total_seconds() == seconds if seconds else not read.timeout


def test_a_reduction_server_runs_the_vendors_program_alone():
    spec = job(
        region="europe-west4",
        pools=pools(A100, worker=A100S, reduction_server=REDUCERS),
        env={"NCCL_DEBUG": "INFO"},
        args=("--config", "{}"),
        command=("python", "-m", "trainer.task"),
    )
    chief, worker, reducers = parsed(spec).job_spec.worker_pool_specs
    assert reducers.container_spec.image_uri == (
        "europe-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
    )
    assert (reducers.container_spec.args, reducers.container_spec.env) == ([], [])
    assert reducers.container_spec.command == []
    assert reducers.machine_spec.accelerator_count == 0
    assert worker.container_spec == chief.container_spec
    assert chief.container_spec.command == ["python", "-m", "trainer.task"]
    assert chief.container_spec.env[0].name == "NCCL_DEBUG"
    assert (chief.machine_spec.accelerator_type.name, chief.machine_spec.accelerator_count) == (
        "NVIDIA_TESLA_A100",
        1,
    )


def test_a_package_is_run_by_its_module():
    spec = job(
        code="package",
        image="us-docker.pkg.dev/vertex-ai/training/ray-cpu.2-47.py311:latest",
        module="mine.task",
        package_uri="gs://my-bucket/mine-1.0.tar.gz",
        args=WORDS,
        pools=pools(worker=N1),
    )
    for pool in parsed(spec).job_spec.worker_pool_specs:
        assert not pool.container_spec.image_uri
        assert pool.python_package_spec.executor_image_uri == spec.image
        assert pool.python_package_spec.package_uris == ["gs://my-bucket/mine-1.0.tar.gz"]
        assert pool.python_package_spec.python_module == "mine.task"
        assert tuple(pool.python_package_spec.args) == WORDS


def test_everything_else_has_its_place():
    specific = Reservation(
        affinity="specific", name="projects/my-project/zones/us-central1-b/reservations/mine"
    )
    spec = job(
        labels={"team": "a"},
        env={"A": "b c", "D": ""},
        service_account="t@my-project.iam.gserviceaccount.com",
        tensorboard="projects/1/locations/us-central1/tensorboards/2",
        network="projects/12345/global/networks/vpc",
        reserved_ip_ranges=("one", "two"),
        encryption_key="projects/p/locations/us-central1/keyRings/r/cryptoKeys/k",
        enable_web_access=True,
        reservation=Reservation(affinity="any"),
        pools=pools(
            worker=dataclasses.replace(
                N1, disk=Disk(type="pd-standard", size_gb=500), reservation=specific
            )
        ),
    )
    read = parsed(spec)
    assert read.display_name == "digits"
    assert dict(read.labels) == {"team": "a"}
    assert read.encryption_spec.kms_key_name == spec.encryption_key
    inner = read.job_spec
    assert inner.service_account == spec.service_account
    assert inner.tensorboard == spec.tensorboard
    assert inner.network == spec.network
    assert list(inner.reserved_ip_ranges) == ["one", "two"]
    assert inner.base_output_directory.output_uri_prefix == "gs://my-bucket/runs"
    assert inner.enable_web_access is True
    chief, worker = inner.worker_pool_specs
    affinities = [pool.machine_spec.reservation_affinity for pool in (chief, worker)]
    assert [each.reservation_affinity_type.name for each in affinities] == [
        "ANY_RESERVATION",
        "SPECIFIC_RESERVATION",
    ]
    assert affinities[1].key == "compute.googleapis.com/reservation-name"
    assert list(affinities[1].values) == [specific.name]
    assert worker.disk_spec.boot_disk_type == "pd-standard"
    assert worker.disk_spec.boot_disk_size_gb == 500
    assert [(each.name, each.value) for each in worker.container_spec.env] == [
        ("A", "b c"),
        ("D", ""),
    ]
    attached = parsed(job(network_attachment="mine", persistent_resource="cluster-1"))
    assert attached.job_spec.psc_interface_config.network_attachment == "mine"
    assert attached.job_spec.persistent_resource_id == "cluster-1"
    tpu = Pool(machine_type="ct5lp-hightpu-4t", tpu_topology="2x2")
    assert parsed(job(pools=pools(tpu))).job_spec.worker_pool_specs[
        0
    ].machine_spec.tpu_topology == ("2x2")


def test_machines_that_cannot_have_the_usual_disk_get_their_own():
    spec = job(pools=pools(gpus("a3-ultragpu-8g", "NVIDIA_H200_141GB", 8)))
    assert parsed(spec).job_spec.worker_pool_specs[0].disk_spec.boot_disk_type == (
        "hyperdisk-balanced"
    )


@pytest.mark.parametrize("form", FORMATS)
def test_every_word_survives_every_format(form):
    spec = job(command=("program", *WORDS), args=WORDS, env={"WORDS": "\n".join(WORDS)})
    written = text(spec, form)
    read = json.loads(written) if form == "json" else yaml.safe_load(written)
    kind = types.CustomJobSpec if form == "gcloud" else types.CustomJob
    made = kind.from_json(json.dumps(read), ignore_unknown_fields=False)
    inner = made if form == "gcloud" else made.job_spec
    container = inner.worker_pool_specs[0].container_spec
    assert tuple(container.command) == ("program", *WORDS)
    assert tuple(container.args) == WORDS
    assert container.env[0].value == "\n".join(WORDS)
    assert read == (render(spec)["jobSpec"] if form == "gcloud" else render(spec))


def test_what_gcloud_takes_as_flags_is_in_the_first_line_of_its_file():
    spec = job(labels={"team": "a", "cost": "b"}, display_name="two words")
    assert text(spec, "gcloud").startswith(f"# {gcloud(spec)}\n")
    assert gcloud(spec, "job.yaml") == (
        "gcloud ai custom-jobs create --project=my-project --region=us-central1 "
        "'--display-name=two words' --config=job.yaml --labels=team=a,cost=b"
    )


def test_a_name_with_line_ends_stays_in_the_comment_of_gclouds_file():
    spec = job(display_name="two\nworkerPoolSpecs: []")
    assert yaml.safe_load(text(spec, "gcloud")) == render(spec)["jobSpec"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_example_is_a_job_that_the_protobufs_take(path):
    spec = load(str(path))
    read = parsed(spec)
    assert read.display_name == spec.display_name
    used = [pool.replica_count for pool in read.job_spec.worker_pool_specs if pool.replica_count]
    assert used == [pool.replicas for _, pool in spec.pools]


def test_a_job_that_breaks_a_rule_is_not_rendered():
    with pytest.raises(JobError, match="one-primary"):
        render(job(pools=pools(dataclasses.replace(N1, replicas=2))))


def test_the_names_of_functions_are_functions_after_their_modules_are_imported():
    import tfdist.vertex.plan
    import tfdist.vertex.render as module

    assert callable(tfdist.vertex.render)
    assert callable(tfdist.vertex.plan)
    assert tfdist.vertex.render is render
    assert callable(module)
