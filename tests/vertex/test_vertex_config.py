"""Jobs from configs: what is read, what is refused, and what the container is given."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from tfdist.errors import ConfigError
from tfdist.vertex import Accelerator
from tfdist.vertex import Disk
from tfdist.vertex import JobSpec
from tfdist.vertex import Pool
from tfdist.vertex import Pools
from tfdist.vertex import Reservation
from tfdist.vertex import Scheduling
from tfdist.vertex import check
from tfdist.vertex import load
from trainer import config

ROOT = pathlib.Path(__file__).resolve().parents[2]
MINIMAL = """
experiment: {name: digits, options: {filters: 8}}
strategy: {name: null}
vertex:
  project: my-project
  region: us-central1
  image: us-docker.pkg.dev/p/r/i:1
  pools: {chief: {machine_type: n1-standard-8}}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def message(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_minimal_section_has_every_default(write):
    spec = load(write(MINIMAL))
    assert spec == JobSpec(
        project="my-project",
        region="us-central1",
        image="us-docker.pkg.dev/p/r/i:1",
        pools=Pools(chief=Pool(machine_type="n1-standard-8")),
        display_name="digits",
        args=("--config", spec.args[1]),
    )


def test_every_field_of_the_section_is_read(write):
    text = """
    experiment: {name: flights}
    strategy: {name: parameter_server, replicas: 1}
    vertex:
      project: p-project
      region: europe-west4
      image: i:1
      display_name: mine
      code: package
      package_uri: gs://b-b/p.tar.gz
      module: a.b
      command: [x, "y z"]
      args: ["--a", "1"]
      env: {A: "1", B: ""}
      labels: {team: t}
      staging_bucket: gs://b-b
      base_output_directory: gs://b-b/o
      service_account: s@p.iam.gserviceaccount.com
      tensorboard: t
      network: n
      reserved_ip_ranges: [r1, r2]
      network_attachment: na
      encryption_key: k
      persistent_resource: pr
      reservation: {affinity: none}
      enable_web_access: true
      scheduling:
        strategy: flex_start
        timeout: 36h
        max_wait: 0
        restart_job_on_worker_restart: false
        disable_retries: true
      pools:
        chief: {machine_type: a}
        worker:
          machine_type: b
          replicas: 3
          accelerator: {type: NVIDIA_L4, count: 2}
          tpu_topology: 2x2
          disk: {type: pd-standard, size_gb: 200}
          reservation: {affinity: specific, name: r}
        ps: {machine_type: c}
        reduction_server: {machine_type: d, image: e}
        evaluator: {machine_type: f}
    """
    spec = load(write(text))
    assert spec == JobSpec(
        project="p-project",
        region="europe-west4",
        image="i:1",
        display_name="mine",
        code="package",
        package_uri="gs://b-b/p.tar.gz",
        module="a.b",
        command=("x", "y z"),
        args=("--a", "1"),
        env={"A": "1", "B": ""},
        labels={"team": "t"},
        strategy="parameter_server",
        strategy_replicas=1,
        staging_bucket="gs://b-b",
        base_output_directory="gs://b-b/o",
        service_account="s@p.iam.gserviceaccount.com",
        tensorboard="t",
        network="n",
        reserved_ip_ranges=("r1", "r2"),
        network_attachment="na",
        encryption_key="k",
        persistent_resource="pr",
        reservation=Reservation(affinity="none"),
        enable_web_access=True,
        scheduling=Scheduling(
            strategy="flex_start",
            timeout="36h",
            max_wait=0,
            restart_job_on_worker_restart=False,
            disable_retries=True,
        ),
        pools=Pools(
            chief=Pool(machine_type="a"),
            worker=Pool(
                machine_type="b",
                replicas=3,
                accelerator=Accelerator(type="NVIDIA_L4", count=2),
                tpu_topology="2x2",
                disk=Disk(type="pd-standard", size_gb=200),
                reservation=Reservation(affinity="specific", name="r"),
            ),
            ps=Pool(machine_type="c"),
            reduction_server=Pool(machine_type="d", image="e"),
            evaluator=Pool(machine_type="f"),
        ),
    )
    known = {field.name for field in dataclasses.fields(JobSpec)}
    default = load(write(MINIMAL))
    same = {name for name in known if getattr(spec, name) == getattr(default, name)}
    assert not same, f"fields that this test leaves at their default: {same}"


def test_keys_whose_values_are_commented_out_have_their_defaults(write):
    text = MINIMAL + "  env:\n  args:\n  scheduling:\n    # strategy: spot\n  display_name:\n"
    assert load(write(text)) == load(write(MINIMAL))


def test_overrides_change_the_job_and_what_the_container_is_given(write):
    spec = load(
        write(MINIMAL),
        [
            "vertex.region=us-east1",
            "vertex.pools.worker.machine_type=n1-standard-4",
            "vertex.pools.worker.replicas=2",
            "vertex.scheduling={strategy: spot}",
            "training.epochs=7",
            "strategy.name=multi_worker",
        ],
    )
    assert spec.region == "us-east1"
    assert spec.pools.worker == Pool(machine_type="n1-standard-4", replicas=2)
    assert spec.scheduling.strategy == "spot"
    assert spec.strategy == "multi_worker"
    given = config.load(spec.args[1])
    assert given.training.epochs == 7
    assert given.strategy.name == "multi_worker"
    assert given.vertex is None


def test_the_container_is_given_the_config_by_value_without_the_section(write):
    path = write(
        MINIMAL
        + """
training: {learning_rate: 1e-3, seed: 12}
output: {directory: "gs://b/$(ME) 'a' \\"b\\" \\\\ ünï 🙂", backup: 60s}
"""
    )
    spec = load(path)
    flag, value = spec.args
    assert flag == "--config"
    assert "$" not in value and "\n" not in value and "vertex" not in value
    given, whole = config.load(value), config.load(path)
    assert given == whole.model_copy(update={"vertex": None})
    assert given.output.directory == "gs://b/$(ME) 'a' \"b\" \\ ünï 🙂"
    assert given.training.learning_rate == 0.001
    assert given.experiment.options.filters == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{experiment: {name: digits}, training: {epochs: 2}}", None),
        ('{"experiment": {"name": "digits"}}', None),
        ('  {"experiment": {"name": "digits"}}', None),
        ('{"experiment": {"name": "digit"}}', "did you mean digits?"),
        ('{"experiment": {"name": "digits"}, "trainig": {}}', "did you mean training?"),
        ('{"experiment": {"name": "digits"}', "the value of --config:1:"),
        ('{"a": 1, "a": 2}', "key 'a' given twice"),
    ],
)
def test_a_config_is_taken_by_value(text, said):
    if said is None:
        assert config.load(text).experiment.name == "digits"
    else:
        with pytest.raises(ConfigError) as caught:
            config.load(text)
        assert said in str(caught.value)
        assert "the value of --config" in str(caught.value)


def test_the_trainer_takes_its_config_by_value():
    done = subprocess.run(
        [sys.executable, "-m", "trainer.task", "--config", '{"experiment": {"name": "digit"}}'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "did you mean digits?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("vertex.projekt=a", "vertex.projekt: unknown key (did you mean vertex.project?)"),
        ("vertex.timeout=1h", "(did you mean vertex.scheduling.timeout?)"),
        ("vertex.machine_type=a", "(did you mean vertex.pools.chief.machine_type?)"),
        ("vertex.pools.workers={}", "(did you mean vertex.pools.worker?)"),
        ("vertex.pools.chief.spot=true", "spot-per-job: Spot is for the whole job"),
        (
            "vertex.pools.chief.replica_count=1",
            "vertex.pools.chief.replica_count: unknown key (rep",
        ),
        ("vertex.pools.chief.replicas=two", "expected a valid integer, received 'two'"),
        ("vertex.pools.chief.replicas='2'", "expected a valid integer, received '2'"),
        ("vertex.pools.chief.replicas=true", "expected a valid integer, received True"),
        ("vertex.pools=[]", "vertex.pools: expected a mapping of keys to values, received []"),
        ("vertex.pools.worker=3", "vertex.pools.worker: expected a mapping"),
        ("vertex.args=--epochs 3", "vertex.args: expected a list, one word in each item"),
        ("vertex.args=[3]", "vertex.args.0: expected a valid string, received 3 (in quotes it is"),
        ("vertex.env={A: 1}", "vertex.env.A: expected a valid string, received 1"),
        ("vertex.env=[A=1]", "vertex.env: expected a"),
        ("vertex.code=zip", "vertex.code: expected 'image' or 'package', received 'zip'"),
        ("vertex.scheduling.strategy=preemptible", "expected 'standard', 'spot' or 'flex_start'"),
        (
            "vertex.scheduling.timeout=[1]",
            "vertex.scheduling.timeout: expected a valid integer or a valid string, received [1]",
        ),
        ("vertex.project=1234567", "(in quotes it is a text: '1234567')"),
        ("vertex.reservation={affinity: some}", "vertex.reservation.affinity: expected 'any'"),
        ("vertex=3", "vertex: expected a mapping of keys to values, received 3"),
        ("vertex.pools.chief={}", "vertex.pools.chief.machine_type: required, but not given"),
    ],
)
def test_mistakes_in_the_section_are_told_by_their_path(write, override, said):
    assert said in message(write(MINIMAL), override)


def test_all_mistakes_of_a_file_are_told_at_once(write):
    text = MINIMAL + "  regoin: x\n  env: {A: 1}\ntrainig: {}\ndata: {global_batch_size: 0}\n"
    said = message(write(text))
    for expected in (
        "vertex.regoin: unknown key (did you mean vertex.region?)",
        "vertex.env.A: expected a valid string",
        "trainig: unknown key (did you mean training?)",
        "data.global_batch_size: expected",
    ):
        assert expected in said


def test_a_config_without_the_section_is_no_job(write):
    said = message(write("experiment: {name: digits}\n"))
    assert "a section vertex:" in said
    assert "configs/digits-vertex.yaml" in said


@pytest.mark.parametrize(
    ("own", "args"),
    [
        ("command: [python, probe.py]", ()),
        ('args: ["--mine", "a b"]', ("--mine", "a b")),
        ("module: mine.task", ()),
        ('command: [python]\n  args: ["-c", "pass"]', ("-c", "pass")),
    ],
)
def test_a_program_of_ones_own_gets_its_own_arguments_and_needs_no_experiment(write, own, args):
    spec = load(write(f"{MINIMAL}  {own}\n"))
    assert spec.args == args
    assert spec.display_name == "digits"
    alone = MINIMAL.replace("experiment: {name: digits, options: {filters: 8}}\n", "")
    spec = load(write(f"{alone}  {own}\n", "probe.yaml"))
    assert spec.args == args
    assert spec.display_name == "probe"
    assert "experiment: required" in message(write(alone))


def test_the_trainer_reads_a_config_that_has_the_section(write):
    loaded = config.load(write(MINIMAL))
    assert isinstance(loaded.vertex, JobSpec)
    assert loaded.experiment.options.filters == 8


def test_the_default_job_breaks_no_rule(write):
    assert {finding.rule for finding in check(load(write(MINIMAL)))} == {"output-directory"}
