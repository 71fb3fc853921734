"""`tfdist vertex plan` and `render`, as a user and as a program meets them."""

from __future__ import annotations

import ast
import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from tests.support.specs import A100
from tests.support.specs import N1
from tests.support.specs import job
from tests.support.specs import pools
from tfdist.cli.main import main
from tfdist.vertex import JobError
from tfdist.vertex import Pool
from tfdist.vertex import Scheduling
from tfdist.vertex import plan
from tfdist.vertex.facts import facts

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = "configs/flights-vertex.yaml"
#: Runs the command line and says which heavy modules it imported.
LEAN = (
    "import sys; from tfdist.cli.main import main; code = main(sys.argv[1:]); "
    "names = ('tensorflow', 'keras', 'jax', 'google.cloud.aiplatform_v1', 'google.protobuf'); "
    "heavy = [name for name in names if name in sys.modules]; "
    "sys.exit(f'imported {heavy}' if heavy else code)"
)


def lean(*arguments):
    """Runs the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", LEAN, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def tfdist(capsys, monkeypatch):
    """Runs the command line here; returns exit code, standard output and error."""
    monkeypatch.chdir(ROOT)

    def run(*arguments):
        capsys.readouterr()
        code = main(arguments)
        return code, *capsys.readouterr()

    return run


def strategies(made):
    return {each.role: each.strategy for each in made.pools}


def test_each_role_is_planned_with_the_strategy_that_it_will_choose():
    made = plan(job(pools=pools(worker=N1, ps=N1, evaluator=N1)))
    assert strategies(made) == {
        "chief": "parameter_server",
        "worker": "parameter_server",
        "ps": "parameter_server",
        "evaluator": "default",
    }
    assert [each.position for each in made.pools] == [0, 1, 2, 3]
    four = dataclasses.replace(
        A100,
        machine_type="a2-highgpu-4g",
        accelerator=dataclasses.replace(A100.accelerator, count=4),
    )
    assert strategies(plan(job(pools=pools(four)))) == {"chief": "mirrored"}
    made = plan(job(pools=pools(four, worker=four, evaluator=four)))
    assert strategies(made) == {
        "chief": "multi_worker",
        "worker": "multi_worker",
        "evaluator": "mirrored",
    }
    assert "2 workers" in made.pools[0].reasons[0]
    tpu = Pool(machine_type="ct5lp-hightpu-4t", tpu_topology="2x2")
    assert strategies(plan(job(pools=pools(tpu)))) == {"chief": "tpu"}
    reduced = pools(
        A100, worker=A100, reduction_server=Pool(machine_type="n1-highcpu-16", replicas=2)
    )
    assert strategies(plan(job(pools=reduced))) == {
        "chief": "multi_worker",
        "worker": "multi_worker",
        "reduction_server": "",
    }


def test_the_environment_of_whoever_plans_does_not_matter(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "nonsense")
    monkeypatch.setenv("TFDIST_STRATEGY", "parameter_server")
    monkeypatch.setenv("TPU_NAME", "mine")
    assert strategies(plan(job())) == {"chief": "default"}


def test_what_is_billed_is_counted():
    made = plan(
        job(
            pools=pools(
                A100,
                worker=dataclasses.replace(A100, replicas=3),
                reduction_server=Pool(machine_type="n1-highcpu-16", replicas=3),
            )
        )
    )
    assert made.billed == {
        "a2-highgpu-1g": 4,
        "n1-highcpu-16": 3,
        "NVIDIA_TESLA_A100": 4,
        "GB of pd-ssd": 700,
    }
    assert plan(job(persistent_resource="mine")).billed == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pools": pools(worker=N1)}, "and all others with it"),
        ({"pools": pools(worker=N1, ps=N1)}, "while the others go on"),
        ({"scheduling": Scheduling(disable_retries=True)}, "ends the job"),
        ({"scheduling": Scheduling(strategy="spot")}, "up to 6 times"),
    ],
)
def test_restarts_are_told(given, said):
    assert said in plan(job(**given)).restarts


def test_scheduling_is_told():
    assert plan(job()).scheduling == "standard; at most 7 days, the service's own"
    flexible = Scheduling(strategy="flex_start", timeout="36h")
    made = plan(job(pools=pools(A100), scheduling=flexible))
    assert made.scheduling == ("flex_start; at most 1 day 12 hours; waits up to 1 day for machines")
    patient = dataclasses.replace(flexible, max_wait=0)
    assert "waits for ever" in plan(job(pools=pools(A100), scheduling=patient)).scheduling


def test_a_job_that_breaks_a_rule_has_no_plan():
    with pytest.raises(JobError, match="region"):
        plan(job(region="moon1"))


def test_plan_prints_machines_strategies_and_restarts_and_imports_nothing_heavy():
    done = lean("vertex", "plan", CONFIG)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "flights in projects/my-project/locations/europe-west4"
    rows = [line.split()[:4] for line in lines[3:8]]
    assert rows == [
        ["pool", "role", "replicas", "machine"],
        ["0", "chief", "1", "n1-standard-4"],
        ["1", "worker", "4", "n1-standard-8"],
        ["2", "ps", "2", "n1-highmem-8"],
        ["3", "evaluator", "1", "n1-standard-4"],
    ]
    assert "worker     parameter_server: The cluster has parameter servers: 2." in lines
    assert any(line.startswith("billed     2 x n1-standard-4, 4 x n1-standard-8") for line in lines)


def test_plan_prints_one_json_object(tfdist):
    code, out, _ = tfdist(
        "vertex", "plan", CONFIG, "--json", "--set", "vertex.pools.evaluator.replicas=2"
    )
    assert code == 0
    made = json.loads(out)
    assert [pool["strategy"] for pool in made["pools"]] == ["parameter_server"] * 3 + ["default"]
    assert [warning["rule"] for warning in made["warnings"]] == ["evaluators"]
    assert made["pools"][2]["reasons"]


@pytest.mark.parametrize("verb", ["plan", "render"])
def test_a_wrong_job_is_refused_with_every_rule_named_and_no_traceback(verb):
    wrong = ["--set", "vertex.pools.chief.replicas=2", "--set", "vertex.region=us-central1-a"]
    done = lean("vertex", verb, CONFIG, *wrong)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "one-primary: " in done.stderr
    assert "region: " in done.stderr
    assert "write the region us-central1" in done.stderr
    assert "Traceback" not in done.stderr


def test_render_writes_each_format_and_imports_nothing_heavy(tfdist):
    done = lean("vertex", "render", CONFIG)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert len(body["jobSpec"]["workerPoolSpecs"]) == 4
    assert yaml.safe_load(tfdist("vertex", "render", CONFIG, "--format", "yaml")[1]) == body
    cloud = tfdist("vertex", "render", CONFIG, "--format", "gcloud")[1]
    assert yaml.safe_load(cloud) == body["jobSpec"]
    code, out, err = tfdist("vertex", "render", CONFIG, "--format", "xml")
    assert (code, out) == (2, "")
    assert "json, yaml, gcloud" in err


def test_render_never_replaces_a_file_unasked(tfdist, tmp_path):
    path = tmp_path / "job.json"
    assert tfdist("vertex", "render", CONFIG, "--output", str(path))[:2] == (0, "")
    assert json.loads(path.read_text())["displayName"] == "flights"
    path.write_text("mine")
    code, _, err = tfdist("vertex", "render", CONFIG, "--output", str(path))
    assert code == 2
    assert "--force" in err
    assert path.read_text() == "mine"
    assert tfdist("vertex", "render", CONFIG, "--output", str(path), "--force")[0] == 0
    assert json.loads(path.read_text())["displayName"] == "flights"
    assert tfdist("vertex", "render", CONFIG, "--output", str(tmp_path / "no" / "job"))[0] == 2


def test_a_wrong_job_leaves_the_file_alone(tfdist, tmp_path):
    path = tmp_path / "job.json"
    path.write_text("mine")
    wrong = ("--set", "vertex.region=moon1", "--force")
    assert tfdist("vertex", "render", CONFIG, "--output", str(path), *wrong)[0] == 2
    assert path.read_text() == "mine"


def test_help_lists_every_verb_and_a_wrong_one_is_a_usage_error(tfdist):
    code, listed, _ = tfdist("vertex", "--help")
    assert code == 0
    for verb in ("plan", "render", "local", "submit", "wait", "logs"):
        assert f" {verb} " in listed
    assert tfdist("vertex", "rendr", CONFIG)[0] == 2
    code, _, err = tfdist("vertex", "plan", "configs/nowhere-vertex.yaml")
    assert code == 2
    assert "did you mean configs/" in err


# --- the facts --------------------------------------------------------------------------------


def test_every_fact_fits_the_others():
    known = facts()
    for machine in known.machines.values():
        names = [*machine.attach, *machine.egress_with]
        names += [machine.brings[0]] if machine.brings else []
        assert set(names) <= set(known.accelerators), machine.type
        if machine.own_fabric:
            assert machine.brings
    for generation in known.tpus.values():
        assert generation.accelerator is None or generation.accelerator in known.accelerators
    for image in known.prebuilt.values():
        assert image.support < image.available, image.name
    assert known.raw["limits"]["disk_gb"][0] < known.raw["limits"]["disk_gb"][1]
    for source in known.sources.values():
        assert source["url"].startswith("https://")


def test_accelerators_and_regions_are_those_of_the_client():
    client = pytest.importorskip("google.cloud.aiplatform_v1.types.accelerator_type")
    names = {kind.name for kind in client.AcceleratorType} - {"ACCELERATOR_TYPE_UNSPECIFIED"}
    assert set(facts().accelerators) == names
    # Read, not imported: the whole client takes seconds.
    above = pathlib.Path(client.__file__).parents[2]
    source = (above / "aiplatform" / "constants" / "base.py").read_text()
    listed = re.search(r"SUPPORTED_REGIONS = frozenset\(\s*(\{[^}]*\})", source)
    assert listed is not None
    assert set(facts().regions) == ast.literal_eval(listed[1]) - {"global"}


def test_the_facts_are_part_of_the_package():
    from setuptools import find_packages
    from setuptools.config.setupcfg import read_configuration

    data = read_configuration(ROOT / "setup.cfg")["options"]["package_data"]
    assert "vertex/facts.yaml" in data["tfdist"]
    assert "tfdist.vertex.checks" in find_packages(str(ROOT), include=["tfdist.*"])
