"""Code that is not in the image gets to the bucket once; buckets are near the job."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
import tarfile

import pytest

import tfdist.vertex as vertex
from tests.support.cloud_storage import CloudStorage
from tests.support.jobs import FakeJobService
from tests.support.submission import ROOT
from tests.support.submission import spec
from tfdist.errors import ConfigError
from tfdist.vertex import client
from tfdist.vertex import failures
from tfdist.vertex import package
from tfdist.vertex import staging
from tfdist.vertex.submit import submit


@pytest.fixture(scope="module")
def built():
    return package.build(ROOT)


@pytest.fixture(scope="module")
def storage():
    with CloudStorage() as running:
        yield running


@pytest.fixture
def emulator(storage, monkeypatch):
    """The variable with which google-cloud-storage finds the emulator."""
    address = f"http://{storage._emulator}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    return address


def project(folder, setup="[metadata]\nname=mine\nversion=1\n[options]\npackages=find:\n", **files):
    (folder / "setup.cfg").write_text(setup)
    for name, text in {"trainer/__init__.py": "", "trainer/task.py": "", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(made):
    with tarfile.open(fileobj=io.BytesIO(made.data)) as tar:
        return {name.split("/", 1)[1] for name in tar.getnames()}


def test_the_source_distribution_holds_trainer_and_tfdist_with_their_data(built):
    inside = names(built)
    assert {"trainer/task.py", "tfdist/__init__.py", "tfdist/vertex/facts.yaml"} <= inside
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in inside)


@pytest.mark.slow
def test_pip_takes_the_source_distribution(built, tmp_path):
    archive = tmp_path / built.name
    archive.write_bytes(built.data)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input"]
    pip += ["--no-build-isolation", "--no-index", "--target", str(tmp_path / "site")]
    done = subprocess.run([*pip, str(archive)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "trainer" / "task.py").read_bytes() == (
        ROOT / "trainer" / "task.py"
    ).read_bytes()


def test_the_same_content_makes_the_same_bytes_and_other_content_another_name(tmp_path):
    folder = project(tmp_path)
    first, again = package.build(folder), package.build(folder)
    assert first == again
    (folder / "trainer" / "task.py").write_text("print(1)\n")
    assert package.build(folder).name != first.name
    # Nothing is left where the user works.
    assert sorted(path.name for path in folder.iterdir()) == ["setup.cfg", "trainer"]


def test_a_directory_without_a_project_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"setup\.cfg.*vertex\.package_uri"):
        package.build(tmp_path)


def test_a_module_that_is_not_in_the_distribution_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the module mine\.train in the source distribution"):
        package.build(project(tmp_path), "mine.train")


def test_a_project_that_imports_tfdist_must_bring_it(tmp_path):
    folder = project(tmp_path, **{"trainer/task.py": "import tfdist\n"})
    with pytest.raises(ConfigError, match="install_requires"):
        package.build(folder)
    text = (folder / "setup.cfg").read_text() + "install_requires = tfdist\n"
    (folder / "setup.cfg").write_text(text)
    assert package.build(folder).name.startswith("mine-1-")


def test_a_project_that_does_not_build_shows_why(tmp_path):
    folder = project(tmp_path, setup="[metadata]\nname=mine\nversion=file: no\n[options]\nx=\n[o")
    with pytest.raises(ConfigError, match="a project that setuptools can build. Received: .+"):
        package.build(folder)


def test_code_is_uploaded_before_the_job_is_created_and_only_once(emulator, tmp_path):
    project(tmp_path)
    job = spec(code="package", args=(), staging_bucket="gs://bucket/some/")
    said = []
    with FakeJobService() as service:
        first = submit(job, endpoint=service.endpoint, directory=str(tmp_path), say=said.append)
        again = submit(job, endpoint=service.endpoint, directory=str(tmp_path), say=said.append)
    built = package.build(tmp_path)
    assert first.package_uri == again.package_uri == f"gs://bucket/some/tfdist/{built.name}"
    for received in service.created:
        pool = received["jobSpec"]["workerPoolSpecs"][0]
        assert pool["pythonPackageSpec"]["packageUris"] == [first.package_uri]
        assert pool["pythonPackageSpec"]["pythonModule"] == "trainer.task"
    assert [text.split()[0] for text in said if not text.startswith("warning")] == [
        "uploaded",
        "found",
    ]
    from google.cloud import storage

    blob = storage.Client(project="demo", credentials=client.anonymous()).bucket("bucket")
    found = blob.get_blob(f"some/tfdist/{built.name}")
    assert found.download_as_bytes() == built.data


def test_another_content_under_the_name_is_not_overwritten(emulator):
    bucket = staging.Storage("demo", None)
    assert bucket.upload(b"one", "gs://bucket/there")
    assert not bucket.upload(b"one", "gs://bucket/there")
    with pytest.raises(ConfigError, match="gs://bucket/there to hold"):
        bucket.upload(b"two", "gs://bucket/there")


def check_and_submit(service, job):
    return submit(job, endpoint=service.endpoint, say=print, check_buckets=True)


def test_a_bucket_that_is_not_there_is_named_before_the_job_is_created(emulator):
    with FakeJobService() as service:
        with pytest.raises(failures.NotThereError, match="bucket gs://nowhere to be there"):
            check_and_submit(service, spec(staging_bucket="gs://nowhere"))
        assert service.requests == []


def test_a_bucket_in_another_region_is_refused_before_the_job_is_created(emulator):
    # The emulator's buckets are in us-central1.
    far = spec(region="europe-west4", staging_bucket="gs://bucket")
    with FakeJobService() as service:
        with pytest.raises(vertex.JobError, match="gs://bucket in us-central1") as caught:
            check_and_submit(service, far)
        assert caught.value.rules == ("bucket-region",)
        assert service.requests == []
        near = dataclasses.replace(far, region="us-central1")
        check_and_submit(service, near)
        submit(far, endpoint=service.endpoint, say=print)  # An emulator has buckets anywhere.
        assert service.requests == ["create", "create"]


@pytest.mark.parametrize(
    ("region", "location", "pair", "near"),
    [
        ("us-central1", "us-central1", (), True),
        ("us-central1", "us-east1", (), False),
        ("us-east4", "us", (), True),
        ("europe-west4", "us", (), False),
        ("europe-west4", "eu", (), True),
        ("us-west1", "us", ("us-west1", "us-east1"), True),
        ("us-central1", "nam4", (), True),
        ("europe-north1", "eur4", ("europe-north1", "europe-west4"), True),
        ("europe-west1", "custom", ("europe-north1", "europe-west4"), False),
    ],
)
def test_regions_are_near_buckets_that_have_their_data_there(region, location, pair, near):
    assert staging.is_near(region, location, pair) is near


@pytest.mark.parametrize("uri", ["s3://a/b", "gs:/a", "gs://A/b", "bucket", "gs://"])
def test_what_is_no_address_of_a_bucket_is_refused(uri):
    with pytest.raises(ConfigError, match="gs://bucket/path"):
        staging.parts(uri)
