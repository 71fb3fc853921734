"""The image itself: built without a Docker daemon, then trained in, in three shapes.

`pytest -m slow tests/trainer/test_image.py`. It needs root, `buildah` and `debootstrap`
(`apt-get install buildah debootstrap`), an index of Debian's packages and one of Python's. The
base is a Debian of the same release as `python:3.11-slim`; TFDIST_TEST_BASE keeps it in a
directory for the next time.
"""

from __future__ import annotations

import csv
import json
import os
import pathlib
import shutil
import subprocess

import pytest

import tfdist.vertex
from tfdist.vertex.local import Container
from tfdist.vertex.local import JobState
from tfdist.vertex.local import LocalJob

ROOT = pathlib.Path(__file__).resolve().parents[2]
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
#: Bytes. The image was 2.4 GB when this was written; more needs a reason.
MOST = 2.8e9

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def call(*command: str, **options) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=1800, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def make_base(folder: pathlib.Path) -> None:
    """Makes what stands for python:3.11-slim: a small Debian with Python and pip."""
    packages = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates"
    call(
        *("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(folder)),
        "http://deb.debian.org/debian",
    )
    # The index may be reached through this machine's own authorities.
    shutil.copyfile(CERTIFICATES, f"{folder}{CERTIFICATES}")
    (folder / "etc/pip.conf").write_text(f"[global]\ncert = {CERTIFICATES}\n")


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """Makes buildah keep all that it makes below a directory of ours."""
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install buildah debootstrap")
    if os.geteuid() != 0:
        pytest.skip("needs root, for chroot and mounts")
    folder = tmp_path_factory.mktemp("storage")
    config = folder / "storage.conf"
    config.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(config))
        yield folder
        call("buildah", "umount", "--all")
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def container(storage):
    """Builds the Dockerfile; returns the name of a container of its image."""
    kept = os.environ.get("TFDIST_TEST_BASE")
    base = pathlib.Path(kept) if kept else storage / "base"
    if not (base / "etc/pip.conf").exists():
        make_base(base)
    empty = call("buildah", "from", "scratch").strip()
    call("buildah", "add", "--quiet", empty, str(base), "/")
    call("buildah", "commit", "--quiet", empty, "localhost/base")
    call("buildah", "rm", empty)
    context = storage / "context"
    context.mkdir()
    files = call("git", "ls-files", cwd=ROOT).splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), files):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, context / name)
    call(
        *("buildah", "bud", "--isolation", "chroot", "--build-arg", "BASE_IMAGE=localhost/base"),
        *("--tag", "localhost/tfdist", str(context)),
    )
    return call("buildah", "from", "localhost/tfdist").strip()


def test_its_size_is_known(container):
    del container
    (image,) = json.loads(call("buildah", "images", "--json", "localhost/tfdist"))
    size = image["size"]
    print(f"size of the image: {size}")
    number, unit = size.split()
    assert float(number) * {"MB": 1e6, "GB": 1e9}[unit] < MOST


def run_job(container: str, config: str, folder: pathlib.Path, *overrides: str) -> pathlib.Path:
    """Runs a config's job in the container; returns where its results are."""
    folder.chmod(0o777)  # The image's user is not root.
    spec = tfdist.vertex.load(str(ROOT / "configs" / f"{config}.yaml"), overrides)
    lines: list[str] = []
    job = LocalJob(
        tfdist.vertex.render(spec),
        directory=folder,
        runner=Container(container, mounts=[str(folder)]),
        say=lines.append,
    )
    job.start()
    try:
        assert job.wait(900) is JobState.SUCCEEDED, "\n".join(lines[-60:])
    finally:
        job.cancel(hurry=True)
    output = spec.base_output_directory
    assert output is not None
    return folder / "gcs" / output.removeprefix("gs://")


def history(results: pathlib.Path) -> list[dict[str, float]]:
    with (results / "logs" / "history.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def test_one_image_trains_alone_and_as_two_pools_to_the_same_numbers(container, tmp_path):
    epochs = "training.epochs=2"
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = run_job(container, "digits-vertex", tmp_path / "one", epochs)
    both = run_job(container, "digits-workers-vertex", tmp_path / "two", epochs)
    report = json.loads((both / "model" / "metrics.json").read_text())
    assert report["replicas"] == 2
    assert json.loads((alone / "model" / "metrics.json").read_text())["replicas"] == 1
    assert len(history(alone)) == 2
    for one, two in zip(history(alone), history(both), strict=True):
        for name, value in one.items():
            assert two[name] == pytest.approx(value, rel=1e-3), name


def test_the_same_image_serves_parameter_servers_and_an_evaluator(container, tmp_path):
    results = run_job(
        container,
        "flights-vertex",
        tmp_path,
        *("training.epochs=1", "experiment.options.max_rows=60000"),
        *("vertex.pools.worker.replicas=2", "vertex.pools.ps.replicas=1"),
    )
    report = json.loads((results / "model" / "metrics.json").read_text())
    assert report["test"]["auc"] > 0.6
    assert (results / "model" / "model.keras").exists()
