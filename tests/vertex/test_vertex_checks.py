"""The rules of custom jobs: what each refuses, what it doubts, and what it must let pass."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import re

import pytest

from tests.support.specs import A100
from tests.support.specs import N1
from tests.support.specs import gpus
from tests.support.specs import job
from tests.support.specs import pools
from tfdist.vertex import Accelerator
from tfdist.vertex import Disk
from tfdist.vertex import JobError
from tfdist.vertex import JobSpec
from tfdist.vertex import Pool
from tfdist.vertex import Reservation
from tfdist.vertex import Scheduling
from tfdist.vertex import check
from tfdist.vertex.checks import MODULES
from tfdist.vertex.checks import RULES
from tfdist.vertex.checks import images
from trainer.sections import keys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TODAY = datetime.date(2026, 11, 30)

V100 = gpus("n1-highmem-96", "NVIDIA_TESLA_V100", 8)
REDUCERS = Pool(machine_type="n1-highcpu-16", replicas=16)
#: The example of the documentation: 5 x 100 Gbps need 16 x 32 Gbps.
REDUCTION = pools(V100, worker=dataclasses.replace(V100, replicas=4), reduction_server=REDUCERS)
PS = pools(worker=N1, ps=N1)
V5E = Pool(machine_type="ct5lp-hightpu-4t", tpu_topology="2x2")
PREBUILT = "us-docker.pkg.dev/vertex-ai/training"
RESERVED = Reservation(
    affinity="specific", name="projects/my-project/zones/us-central1-a/reservations/mine"
)
BUCKET = "gs://my-bucket"


def times(pool, replicas):
    return dataclasses.replace(pool, replicas=replicas)


def rules(spec):
    """Returns the names of the rules that a job breaks."""
    try:
        check(spec, today=TODAY)
    except JobError as error:
        return set(error.rules)
    return set()


# --- jobs that break a rule: its name, and the job ---------------------------------------------

BROKEN = [
    ("one-primary", {"pools": pools(times(N1, 2))}),
    ("one-primary", {"pools": pools(times(N1, 3), worker=times(N1, 2))}),
    ("one-primary", {"pools": pools(times(N1, 0))}),
    ("one-primary", {"pools": pools(times(N1, -1))}),
    ("empty-pool-between", {"pools": pools(worker=times(N1, 0), evaluator=N1)}),
    ("empty-pool-between", {"pools": pools(worker=times(N1, 0), ps=N1)}),
    ("empty-pool-between", {"pools": pools(worker=N1, ps=times(N1, 0), evaluator=N1)}),
    ("empty-pool-between", {"pools": pools(ps=N1)}),
    ("empty-pool-between", {"pools": pools(ps=N1, evaluator=N1)}),
    ("pool-replicas", {"pools": pools(worker=times(N1, 0))}),
    ("pool-replicas", {"pools": pools(worker=N1, evaluator=times(N1, -2))}),
    ("pool-replicas", {"pools": pools(worker=times(N1, 10**12))}),
    (
        "ps-with-reduction-server",
        {"pools": pools(A100, worker=A100, ps=N1, reduction_server=REDUCERS)},
    ),
    ("one-image", {"pools": pools(worker=dataclasses.replace(N1, image="other:1"))}),
    ("strategy-pools", {"strategy": "mirrored", "pools": pools(worker=N1)}),
    ("strategy-pools", {"strategy": "default", "pools": PS}),
    ("strategy-pools", {"strategy": "multi_worker", "pools": PS}),
    ("strategy-pools", {"strategy": "MultiWorkerMirroredStrategy", "pools": PS}),
    ("strategy-pools", {"strategy": "parameter_server", "pools": pools(worker=N1)}),
    ("strategy-pools", {"strategy": "parameter_server"}),
    ("strategy-pools", {"strategy": "tpu"}),
    ("strategy-pools", {"strategy": "horovod"}),
    ("strategy-pools", {"strategy_replicas": 2, "pools": pools(worker=N1)}),
    ("strategy-pools", {"env": {"TFDIST_STRATEGY": "mirrored"}, "pools": pools(worker=N1)}),
    ("ps-restart", {"pools": PS, "scheduling": Scheduling(restart_job_on_worker_restart=True)}),
    ("same-accelerators", {"pools": pools(N1, worker=A100)}),
    (
        "same-accelerators",
        {"pools": pools(A100, worker=gpus("a2-highgpu-2g", "NVIDIA_TESLA_A100", 2))},
    ),
    ("project", {"project": "projects/my-project"}),
    ("project", {"project": "My Project"}),
    ("project", {"project": ""}),
    ("region", {"region": "us-central1-a"}),
    ("region", {"region": "us-centrall"}),
    ("region", {"region": "global"}),
    ("region", {"region": ""}),
    ("display-name", {"display_name": ""}),
    ("display-name", {"display_name": "x" * 129}),
    ("label-limit", {"labels": {f"key{n}": "" for n in range(65)}}),
    ("label-limit", {"labels": {"Team": "a"}}),
    ("label-limit", {"labels": {"team": "two words"}}),
    ("label-limit", {"labels": {"team": "x" * 64}}),
    ("label-limit", {"labels": {"1st": "a"}}),
    ("env-limit", {"env": {f"V{n}": "" for n in range(101)}}),
    ("env-name", {"env": {"MY-VARIABLE": "1"}}),
    ("env-name", {"env": {"1ST": "1"}}),
    ("env-reserved", {"env": {"TF_CONFIG": "{}"}}),
    ("env-reserved", {"env": {"CLUSTER_SPEC": "{}"}}),
    ("env-reserved", {"env": {"CLOUD_ML_PROJECT_ID": "1"}}),
    ("env-reserved", {"env": {"AIP_MODEL_DIR": "gs://b/m"}}),
    ("staging-bucket", {"staging_bucket": "my-bucket"}),
    ("staging-bucket", {"staging_bucket": "gs://My_Bucket!"}),
    ("staging-bucket", {"code": "package", "image": f"{PREBUILT}/ray-cpu.2-47.py311:latest"}),
    ("output-directory", {"base_output_directory": "/gcs/my-bucket/runs"}),
    ("output-directory", {"base_output_directory": "runs"}),
    ("package-uri", {"package_uri": "gs://my-bucket/trainer.tar.gz"}),
    ("package-uri", {"code": "package", "package_uri": "gs://my-bucket/trainer"}),
    ("service-account", {"service_account": "trainer"}),
    ("service-account", {"service_account": "serviceAccount:t@p.iam.gserviceaccount.com"}),
    (
        "tensorboard",
        {
            "tensorboard": "projects/p/locations/europe-west4/tensorboards/1",
            "service_account": "t@p.iam.gserviceaccount.com",
        },
    ),
    ("tensorboard", {"tensorboard": "1", "service_account": "t@p.iam.gserviceaccount.com"}),
    (
        "tensorboard-service-account",
        {"tensorboard": "projects/p/locations/us-central1/tensorboards/1"},
    ),
    ("network", {"network": "default"}),
    ("network", {"network": "projects/my-project/global/networks/default"}),
    ("network", {"reserved_ip_ranges": ("range",)}),
    (
        "network-and-attachment",
        {"network": "projects/12345/global/networks/vpc", "network_attachment": "mine"},
    ),
    (
        "network-attachment",
        {"network_attachment": "projects/p/regions/us-east1/networkAttachments/n"},
    ),
    ("network-attachment", {"network_attachment": "networkAttachments/n"}),
    ("encryption-key", {"encryption_key": "mine"}),
    (
        "encryption-key",
        {"encryption_key": "projects/p/locations/us-east1/keyRings/r/cryptoKeys/k"},
    ),
    ("image", {"image": ""}),
    ("image", {"image": "https://us-docker.pkg.dev/p/r/i:1"}),
    ("image", {"image": "us-docker.pkg.dev/p/r/My Image"}),
    ("image", {"image": "us-docker.pkg.dev/p/r/I:1"}),
    ("image", {"image": "us-docker.pkg.dev/vertex-ai/prediction/tf2-cpu.2-15:latest"}),
    (
        "prebuilt-ended",
        {
            "code": "package",
            "module": "mine.task",
            "image": f"{PREBUILT}/tf-cpu.2-17.py310:latest",
            "staging_bucket": BUCKET,
        },
    ),
    (
        "prebuilt-tag",
        {
            "code": "package",
            "image": f"{PREBUILT}/ray-cpu.2-47.py311",
            "staging_bucket": BUCKET,
        },
    ),
    ("prebuilt-code", {"image": f"{PREBUILT}/ray-cpu.2-47.py311:latest"}),
    ("arguments", {"args": ("a\0b",)}),
    ("arguments", {"args": ("x" * 131_072,)}),
    ("command", {"command": ("python -m trainer.task",)}),
    ("command", {"command": ("",)}),
    (
        "command",
        {
            "command": ("python",),
            "code": "package",
            "image": f"{PREBUILT}/ray-cpu.2-47.py311:latest",
            "staging_bucket": BUCKET,
        },
    ),
    ("module", {"module": "trainer/task.py"}),
    ("machine-type", {"pools": pools(Pool(machine_type="n1-standrad-8"))}),
    ("machine-type", {"pools": pools(Pool(machine_type="large"))}),
    ("machine-type", {"pools": pools(Pool(machine_type="n1 standard 8"))}),
    ("machine-type", {"pools": pools(Pool(machine_type=""))}),
    ("disk", {"pools": pools(dataclasses.replace(N1, disk=Disk(size_gb=50)))}),
    ("disk", {"pools": pools(dataclasses.replace(N1, disk=Disk(size_gb=64_001)))}),
    ("disk", {"pools": pools(dataclasses.replace(N1, disk=Disk(type="ssd")))}),
    ("accelerator", {"pools": pools(gpus("g2-standard-8", "L4", 1))}),
    ("accelerator", {"pools": pools(gpus("g2-standard-8", "nvidia-l4", 1))}),
    ("accelerator", {"pools": pools(gpus("g2-standard-8", "NVIDIA_L4", 0))}),
    ("accelerator", {"pools": pools(gpus("n5-standard-8", "NVIDIA_L4", 10**10))}),
    ("machine-accelerator", {"pools": pools(Pool(machine_type="a2-highgpu-1g"))}),
    ("machine-accelerator", {"pools": pools(gpus("a2-highgpu-1g", "NVIDIA_TESLA_A100", 2))}),
    ("machine-accelerator", {"pools": pools(gpus("a2-ultragpu-1g", "NVIDIA_TESLA_A100", 1))}),
    ("machine-accelerator", {"pools": pools(gpus("n1-standard-8", "NVIDIA_L4", 1))}),
    ("machine-accelerator", {"pools": pools(gpus("n1-standard-8", "NVIDIA_TESLA_T4", 3))}),
    ("machine-accelerator", {"pools": pools(gpus("n1-standard-32", "NVIDIA_TESLA_V100", 2))}),
    ("machine-accelerator", {"pools": pools(gpus("n2-standard-8", "NVIDIA_TESLA_T4", 1))}),
    ("machine-accelerator", {"pools": pools(gpus("g2-standard-24", "NVIDIA_L4", 1))}),
    ("machine-accelerator", {"pools": pools(gpus("a3-highgpu-8g", "NVIDIA_H100_MEGA_80GB", 8))}),
    ("machine-accelerator", {"pools": pools(gpus("n1-standard-8", "TPU_V3", 8))}),
    ("accelerator-ended", {"pools": pools(gpus("n1-standard-8", "NVIDIA_TESLA_P100", 1))}),
    ("accelerator-reservation", {"pools": pools(gpus("a4x-highgpu-4g", "NVIDIA_GB200", 4))}),
    ("tpu-one-pool", {"pools": pools(V5E, worker=V5E)}),
    ("tpu-one-pool", {"pools": pools(V5E, evaluator=N1)}),
    ("tpu-one-pool", {"pools": pools(worker=V5E)}),
    ("tpu-topology", {"pools": pools(Pool(machine_type="ct5lp-hightpu-4t"))}),
    ("tpu-topology", {"pools": pools(dataclasses.replace(V5E, tpu_topology="3x3"))}),
    ("tpu-topology", {"pools": pools(dataclasses.replace(N1, tpu_topology="2x2"))}),
    ("tpu-topology", {"pools": pools(Pool(machine_type="cloud-tpu"))}),
    ("tpu-topology", {"pools": pools(gpus("cloud-tpu", "TPU_V3", 16))}),
    ("tpu-topology", {"pools": pools(gpus("cloud-tpu", "TPU_V4_POD", 8))}),
    (
        "tpu-topology",
        {"pools": pools(gpus("ct5lp-hightpu-4t", "NVIDIA_L4", 1, tpu_topology="2x2"))},
    ),
    (
        "tpu-tensorflow",
        {"pools": pools(Pool(machine_type="ct6e-standard-4t", tpu_topology="2x2"))},
    ),
    (
        "tpu-tensorflow",
        {"pools": pools(Pool(machine_type="tpu7x-standard-4t", tpu_topology="2x2x1"))},
    ),
    ("reduction-server-needs-gpus", {"pools": pools(worker=N1, reduction_server=REDUCERS)}),
    (
        "reduction-server-needs-nccl",
        {
            "pools": REDUCTION,
            "image": f"{PREBUILT}/ray-cpu.2-47.py311:latest",
            "command": ("train",),
        },
    ),
    (
        "reduction-server-image",
        {
            "pools": dataclasses.replace(
                REDUCTION, reduction_server=dataclasses.replace(REDUCERS, image="mine:1")
            )
        },
    ),
    (
        "reduction-server-flex-start",
        {
            "pools": pools(A100, worker=A100, reduction_server=times(REDUCERS, 2)),
            "scheduling": Scheduling(strategy="flex_start"),
        },
    ),
    (
        "reduction-server-own-fabric",
        {
            "pools": pools(
                gpus("a3-megagpu-8g", "NVIDIA_H100_MEGA_80GB", 8),
                worker=gpus("a3-megagpu-8g", "NVIDIA_H100_MEGA_80GB", 8),
                reduction_server=times(REDUCERS, 113),
            )
        },
    ),
    (
        "reduction-server-gpus",
        {
            "pools": dataclasses.replace(
                REDUCTION,
                reduction_server=gpus("n1-highcpu-16", "NVIDIA_TESLA_T4", 1, replicas=16),
            )
        },
    ),
    (
        "reduction-server-size",
        {"pools": dataclasses.replace(REDUCTION, reduction_server=times(REDUCERS, 15))},
    ),
    ("empty-pool-between", {"pools": pools(V100, reduction_server=REDUCERS)}),
    ("timeout", {"scheduling": Scheduling(timeout=0)}),
    ("timeout", {"scheduling": Scheduling(timeout=-5)}),
    ("timeout", {"scheduling": Scheduling(timeout="a week")}),
    ("timeout", {"scheduling": Scheduling(timeout=10**12)}),
    ("max-wait", {"scheduling": Scheduling(max_wait="soon")}),
    ("flex-start-accelerator", {"scheduling": Scheduling(strategy="flex_start")}),
    (
        "flex-start-accelerator",
        {
            "pools": pools(gpus("n1-standard-8", "NVIDIA_TESLA_V100", 1)),
            "scheduling": Scheduling(strategy="flex_start"),
        },
    ),
    (
        "flex-start-accelerator",
        {"pools": pools(V5E), "scheduling": Scheduling(strategy="flex_start")},
    ),
    (
        "flex-start-one-machine",
        {
            "pools": pools(A100, evaluator=gpus("g2-standard-8", "NVIDIA_L4", 1)),
            "scheduling": Scheduling(strategy="flex_start"),
        },
    ),
    (
        "flex-start-days",
        {"pools": pools(A100), "scheduling": Scheduling(strategy="flex_start", timeout="8d")},
    ),
    (
        "spot-tpu-slice",
        {
            "pools": pools(dataclasses.replace(V5E, tpu_topology="4x4")),
            "scheduling": Scheduling(strategy="spot"),
            "env": {"TPU_NAME": "slice"},
        },
    ),
    ("reservation-name", {"reservation": Reservation(affinity="specific")}),
    ("reservation-name", {"reservation": Reservation(affinity="specific", name="mine")}),
    ("reservation-name", {"reservation": Reservation(affinity="any", name=RESERVED.name)}),
    ("reservation-name", {"reservation": RESERVED, "region": "us-east1"}),
    (
        "reservation-strategy",
        {
            "pools": pools(A100),
            "reservation": RESERVED,
            "scheduling": Scheduling(strategy="flex_start"),
        },
    ),
    (
        "reservation-strategy",
        {"reservation": RESERVED, "scheduling": Scheduling(strategy="spot")},
    ),
    (
        "reservation-strategy",
        {
            "pools": pools(dataclasses.replace(N1, reservation=RESERVED)),
            "persistent_resource": "mine",
        },
    ),
    ("persistent-resource", {"persistent_resource": "My Resource"}),
    (
        "persistent-resource",
        {"persistent_resource": "projects/p/locations/us-central1/persistentResources/mine"},
    ),
]


@pytest.mark.parametrize(("rule", "given"), BROKEN, ids=[rule for rule, _ in BROKEN])
def test_a_job_that_breaks_a_rule_is_refused_by_that_rule_alone(rule, given):
    assert rules(job(**given)) == {rule}


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("tf-cpu.2-17.py310", {"prebuilt-ended", "prebuilt-keras"}),
        ("tf-cpu.2-15.py310", {"prebuilt-ended", "prebuilt-keras"}),
        ("tf-cpu.2-11", {"prebuilt-ended", "prebuilt-keras", "prebuilt-python"}),
    ],
)
def test_the_trainer_is_refused_on_prebuilt_images_of_other_versions(image, expected):
    spec = job(code="package", image=f"{PREBUILT}/{image}:latest", staging_bucket=BUCKET)
    assert rules(spec) == expected


def test_two_replicas_of_a_tpu_are_refused_as_primaries_and_as_tpus():
    assert rules(job(pools=pools(times(V5E, 2)))) == {"one-primary", "tpu-one-pool"}


def test_a_prebuilt_image_is_good_until_its_last_day():
    spec = job(
        code="package",
        module="mine.task",
        image=f"{PREBUILT}/tf-cpu.2-17.py310:latest",
        staging_bucket=BUCKET,
    )
    assert "prebuilt-ended" in {
        finding.rule for finding in check(spec, today=datetime.date(2026, 7, 11))
    }
    with pytest.raises(JobError, match="ended on 2026-07-11"):
        check(spec, today=datetime.date(2026, 7, 12))


# --- jobs that pass with a doubt --------------------------------------------------------------

DOUBTED = [
    ("pool-replicas", {"pools": pools(worker=times(N1, 1001))}),
    ("evaluators", {"pools": pools(evaluator=times(N1, 2))}),
    (
        "step-restart",
        {
            "pools": pools(worker=N1),
            "scheduling": Scheduling(restart_job_on_worker_restart=False),
        },
    ),
    ("step-restart", {"pools": pools(worker=N1), "scheduling": Scheduling(disable_retries=True)}),
    ("same-accelerators", {"pools": pools(worker=Pool(machine_type="n1-standard-4"))}),
    (
        "idle-accelerators",
        {"pools": pools(worker=N1, ps=gpus("g2-standard-8", "NVIDIA_L4", 1))},
    ),
    ("project", {"project": "demo"}),
    ("env-name", {"env": {"WHERE": "$(AIP_MODEL_DIR)/x"}}),
    ("output-directory", {"base_output_directory": None}),
    ("service-account", {"service_account": "me@example.com"}),
    (
        "package-image",
        {"code": "package", "image": "us-docker.pkg.dev/p/r/i:1", "staging_bucket": BUCKET},
    ),
    ("arguments", {"args": ("--epochs 3",)}),
    ("arguments", {"args": ("--name", "'two words'")}),
    ("arguments", {"args": ("$HOME/data",)}),
    ("arguments", {"args": ("--out=$(AIP_MODEL_DIR)",)}),
    ("arguments", {"command": ("train", "&&", "evaluate")}),
    ("trainer-config", {"args": ("--set", "training.epochs=3")}),
    ("trainer-config", {"args": ("--log_dir=gs://my-bucket/logs",)}),
    ("module", {"module": "mine.task"}),
    ("machine-type", {"pools": pools(Pool(machine_type="n5-standard-8"))}),
    ("machine-type", {"pools": pools(Pool(machine_type="n1-standard-2"))}),
    ("machine-type", {"pools": pools(gpus("a5-hypergpu-8g", "NVIDIA_B200", 8))}),
    (
        "disk",
        {"pools": pools(gpus("a4-highgpu-8g", "NVIDIA_B200", 8, disk=Disk(type="pd-ssd")))},
    ),
    ("accelerator-ended", {"pools": pools(gpus("n1-standard-8", "NVIDIA_TESLA_T4", 1))}),
    ("tpu-slice", {"pools": pools(dataclasses.replace(V5E, tpu_topology="4x4"))}),
    (
        "tpu-tensorflow",
        {
            "pools": pools(Pool(machine_type="ct6e-standard-4t", tpu_topology="2x2")),
            "command": ("python", "with_jax.py"),
        },
    ),
    ("reduction-server-needs-nccl", {"pools": REDUCTION}),
    ("max-wait", {"scheduling": Scheduling(max_wait="2h")}),
    ("spot-progress", {"scheduling": Scheduling(strategy="spot"), "base_output_directory": None}),
    (
        "reservation-strategy",
        {
            "reservation": Reservation(affinity="any"),
            "scheduling": Scheduling(strategy="spot"),
        },
    ),
    (
        "persistent-resource-strategy",
        {"persistent_resource": "mine", "scheduling": Scheduling(strategy="spot")},
    ),
    (
        "reduction-server-size",
        {"pools": dataclasses.replace(REDUCTION, reduction_server=times(REDUCERS, 17))},
    ),
    (
        "reduction-server-size",
        {
            "pools": dataclasses.replace(
                REDUCTION, reduction_server=Pool(machine_type="n4-highcpu-16", replicas=9)
            )
        },
    ),
    (
        "prebuilt-device",
        {
            "pools": pools(A100),
            "image": f"{PREBUILT}/ray-cpu.2-47.py311:latest",
            "command": ("train",),
        },
    ),
    (
        "prebuilt-keras",
        {
            "code": "package",
            "image": f"{PREBUILT}/ray-cpu.2-47.py311:latest",
            "staging_bucket": BUCKET,
        },
    ),
    (
        "prebuilt-ended",
        {
            "image": f"{PREBUILT}/tf-cpu.3-1.py313:latest",
            "command": ("train",),
        },
    ),
]


@pytest.mark.parametrize(("rule", "given"), DOUBTED, ids=[rule for rule, _ in DOUBTED])
def test_a_job_that_may_be_right_passes_with_a_doubt(rule, given):
    assert rule in {finding.rule for finding in check(job(**given), today=TODAY)}


# --- jobs without any doubt -------------------------------------------------------------------

RIGHT = {
    "one machine": {},
    "workers": {"pools": pools(worker=times(N1, 3))},
    "an evaluator without workers": {"pools": pools(evaluator=N1)},
    "parameter servers": {"pools": PS},
    "parameter servers with an evaluator": {"pools": pools(worker=N1, ps=N1, evaluator=N1)},
    "one machine with four GPUs": {"pools": pools(gpus("g2-standard-48", "NVIDIA_L4", 4))},
    "GPU workers": {"pools": pools(A100, worker=times(A100, 7)), "strategy": "multi-worker"},
    "the strategy by name": {"pools": PS, "strategy": "parameter-server"},
    "mirrored on processors": {"strategy": "mirrored", "strategy_replicas": 2},
    "a strategy of the evaluator too": {
        "pools": pools(worker=N1, evaluator=N1),
        "strategy": "multi_worker",
    },
    "flex-start": {
        "pools": pools(A100, worker=A100),
        "scheduling": Scheduling(strategy="flex_start", timeout="7d", max_wait="0s"),
    },
    "spot": {"scheduling": Scheduling(strategy="spot", timeout=3600)},
    "a TPU": {"pools": pools(V5E), "strategy": "tpu"},
    "an older TPU": {"pools": pools(gpus("cloud-tpu", "TPU_V3", 8))},
    "a reservation": {"reservation": RESERVED},
    "what only a reservation has": {
        "pools": pools(gpus("a4x-highgpu-4g", "NVIDIA_GB200", 4)),
        "reservation": RESERVED,
    },
    "a persistent resource": {"persistent_resource": "my-resource-1"},
    "no reservation on a persistent resource": {
        "persistent_resource": "mine",
        "reservation": Reservation(affinity="none"),
    },
    "the number of a project": {"project": "123456789012"},
    "a project in a domain": {"project": "example.com:my-project"},
    "everything at its limit": {
        "display_name": "ä" * 128,
        "labels": {f"k{n}-{'x' * 50}": "1_a-ü" for n in range(64)},
        "env": {f"V_{n}": "two words 'and' \"quotes\"" for n in range(100)},
    },
    "connected": {
        "network": "projects/12345/global/networks/my-vpc",
        "reserved_ip_ranges": ("my-range",),
        "service_account": "t@my-project.iam.gserviceaccount.com",
        "tensorboard": "projects/123/locations/us-central1/tensorboards/456",
        "encryption_key": "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k",
        "enable_web_access": True,
    },
    "attached": {"network_attachment": "projects/p/regions/us-central1/networkAttachments/n"},
    "words with spaces and quotes": {
        "command": ("python", "-c", "print('a b', \"c\")"),
        "args": ("--name=two words", "--json", '{"a": "b c"}', "a 'b' c", "", "50%", "a=$5"),
    },
    "a shell that was asked for": {
        "command": ("bash", "-c", "train $HOME && evaluate | tee /gcs/my-bucket/log")
    },
    "an image by its digest": {"image": f"europe-docker.pkg.dev/p/r/i@sha256:{'0' * 64}"},
    "an image without a registry": {"image": "python"},
    "an image on a port": {"image": "localhost:5000/tfdist:1"},
    "old GPUs where they fit": {
        "pools": pools(gpus("n1-highcpu-64", "NVIDIA_TESLA_V100", 8)),
    },
    "H200 on its own disk": {"pools": pools(gpus("a3-ultragpu-8g", "NVIDIA_H200_141GB", 8))},
    "a large disk": {"pools": pools(dataclasses.replace(N1, disk=Disk(size_gb=64_000)))},
}


@pytest.mark.parametrize("given", RIGHT.values(), ids=RIGHT)
def test_a_right_job_passes_without_a_doubt(given):
    assert check(job(**given), today=TODAY) == ()


# --- what is said -----------------------------------------------------------------------------


def test_every_rule_is_tested_and_documented_with_what_it_demands():
    tested = {rule for rule, _ in [*BROKEN, *DOUBTED]} | {"prebuilt-python"}
    assert set(RULES) == tested
    text = (ROOT / "docs" / "vertex.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \|", text, re.MULTILINE))
    for name, rule in RULES.items():
        assert rule.summary.endswith("."), name
        assert rows.get(name) == rule.summary.rstrip("."), name


def test_the_versions_that_the_rules_ask_for_are_those_of_the_package():
    setup = (ROOT / "setup.cfg").read_text()
    assert f"keras>={images.KERAS}," in setup
    assert f"tensorflow[and-cuda]>={images.TENSORFLOW}," in setup
    assert f"python_requires = >={'.'.join(map(str, images.PYTHON))}\n" in setup


def test_every_key_of_the_section_is_documented():
    text = (ROOT / "docs" / "vertex.md").read_text()
    for path in keys(JobSpec):
        if path[0] == "pools":
            path = path[2:] if len(path) > 2 else path
            path = path[:1] if path[:1] == ("reservation",) else path
        assert f"`{'.'.join(path)}`" in text or path == ("reservation",) or path in _HOLDERS, path


#: Keys that only hold others.
_HOLDERS = {("pools",), ("scheduling",), ("accelerator",), ("disk",)}


def test_every_module_of_rules_is_asked():
    folder = ROOT / "tfdist" / "vertex" / "checks"
    modules = {path.stem for path in folder.glob("*.py") if "@rule(" in path.read_text()} - {
        "rules"
    }
    assert {module.__name__.rpartition(".")[2] for module in MODULES} == modules


def test_all_broken_rules_are_listed_at_once_each_with_its_fix():
    spec = job(
        region="us-central1-a",
        pools=pools(times(N1, 2), worker=gpus("n1-standard-8", "NVIDIA_L4", 1)),
        labels={"Team": "a"},
    )
    with pytest.raises(JobError) as caught:
        check(spec, today=TODAY)
    assert set(caught.value.rules) == {
        "region",
        "one-primary",
        "machine-accelerator",
        "same-accelerators",
        "label-limit",
    }
    said = str(caught.value)
    assert "write the region us-central1 instead of its zone" in said
    assert "set vertex.pools.chief.replicas to 1 and vertex.pools.worker.replicas to 2" in said
    assert said.count("Fix: ") == 1 + len(caught.value.findings)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"pools": pools(times(N1, 4))}, "vertex.pools.worker.replicas to 3"),
        ({"staging_bucket": "/gcs/my-bucket"}, "write gs://my-bucket"),
        ({"module": "trainer/task.py"}, "write trainer.task"),
        ({"command": ("python -m a.b",)}, "write command: ['python', '-m', 'a.b']"),
        ({"image": "docker://us-docker.pkg.dev/p/r/i:1"}, "write us-docker.pkg.dev/p/r/i:1"),
        ({"pools": pools(gpus("g2-standard-8", "l4", 1))}, "did you mean NVIDIA_L4"),
        ({"pools": pools(gpus("a2-highgpu-8g", "NVIDIA_L4", 8))}, "type: NVIDIA_TESLA_A100"),
        ({"pools": pools(Pool(machine_type="n1-standard-08"))}, ""),
        (
            {"pools": dataclasses.replace(REDUCTION, reduction_server=times(REDUCERS, 1))},
            "vertex.pools.reduction_server.replicas to 16",
        ),
        ({"strategy": "mirrored", "pools": pools(worker=N1)}, "strategy.name to multi_worker"),
        (
            {"persistent_resource": "projects/p/locations/r/persistentResources/mine"},
            "write mine",
        ),
    ],
)
def test_the_fix_is_what_to_write(given, fix):
    try:
        check(job(**given), today=TODAY)
    except JobError as error:
        assert fix in error.findings[0].fix
    else:
        assert not fix  # An unknown machine is only doubted.


@pytest.mark.parametrize(
    ("machine", "kind", "count", "workers", "needed"),
    [
        ("n1-highmem-96", "NVIDIA_TESLA_V100", 8, 4, 16),  # (1 + 4) * 100 / 32
        ("a2-megagpu-16g", "NVIDIA_TESLA_A100", 16, 7, 25),  # the vendor's example: 800 / 32
        ("a2-highgpu-1g", "NVIDIA_TESLA_A100", 1, 1, 2),  # 48 / 32
        ("n1-standard-8", "NVIDIA_TESLA_V100", 1, 1, 1),  # 32 / 32
        ("g2-standard-48", "NVIDIA_L4", 4, 2, 5),  # 150 / 32
    ],
)
def test_reducers_send_as_much_as_all_workers(machine, kind, count, workers, needed):
    trainer = gpus(machine, kind, count)
    made = pools(trainer, worker=times(trainer, workers), reduction_server=times(REDUCERS, needed))
    assert rules(job(pools=made)) == set()
    found = {finding.rule for finding in check(job(pools=made), today=TODAY)}
    assert found <= {"reduction-server-needs-nccl"}
    fewer = dataclasses.replace(made, reduction_server=times(REDUCERS, needed - 1))
    expected = "pool-replicas" if needed == 1 else "reduction-server-size"
    assert rules(job(pools=fewer)) == {expected}


def test_an_accelerator_is_compared_by_value():
    one = dataclasses.replace(N1, accelerator=Accelerator(type="NVIDIA_TESLA_V100", count=1))
    other = dataclasses.replace(N1, accelerator=Accelerator(type="NVIDIA_TESLA_V100"))
    assert rules(job(pools=pools(one, worker=other))) == set()
