"""Rules of what a job has in Cloud Storage."""

from __future__ import annotations

import re

from tfdist.vertex.checks.rules import Findings
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import doubt
from tfdist.vertex.checks.rules import problem
from tfdist.vertex.checks.rules import rule

_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](?:/.*)?")
_REMOTE = re.compile(r"gs://|/gcs/")
_ARCHIVES = (".tar.gz", ".zip", ".whl")


@rule("staging-bucket")
def staging_bucket(job: Job) -> Findings:
    """The staging bucket is a gs:// address, and code as a package needs one."""
    spec = job.spec
    if spec.staging_bucket is not None:
        yield from _address("staging_bucket", spec.staging_bucket)
    elif spec.code == "package" and not spec.package_uri:
        yield problem(
            "a bucket to upload the source distribution to",
            "no staging_bucket and no package_uri",
            "set vertex.staging_bucket to gs://BUCKET, or vertex.package_uri to one that is there",
        )


@rule("output-directory")
def output_directory(job: Job) -> Findings:
    """Results go to a gs:// address that outlives the machines."""
    spec = job.spec
    if spec.base_output_directory is not None:
        yield from _address("base_output_directory", spec.base_output_directory)
        return
    words = [*spec.args, *spec.command, *spec.env.values()]
    if not any(_REMOTE.search(word) for word in words):
        yield doubt(
            "a place for results: what a job writes to its disk is lost when it ends, and a "
            "restarted job begins from its start",
            "no base_output_directory",
            "set vertex.base_output_directory to gs://BUCKET/PATH",
        )


@rule("package-uri")
def package_uri(job: Job) -> Findings:
    """A package that is there already is a gs:// address of an archive."""
    spec = job.spec
    if spec.package_uri is None:
        return
    if spec.code != "package":
        yield problem(
            "vertex.code: package for vertex.package_uri",
            f"code={spec.code!r}, package_uri={spec.package_uri!r}",
            "set vertex.code to package, or leave package_uri out",
        )
        return
    yield from _address("package_uri", spec.package_uri)
    if not spec.package_uri.endswith(_ARCHIVES):
        yield problem(
            f"an archive that pip installs ({', '.join(_ARCHIVES)})",
            f"package_uri={spec.package_uri!r}",
            "build one with python -m build --sdist, or leave package_uri out",
        )


def _address(field: str, given: str) -> Findings:
    if _BUCKET.fullmatch(given):
        return
    fix = f"write vertex.{field}: gs://BUCKET/PATH"
    if given.startswith("/gcs/"):
        fix = f"write gs://{given.removeprefix('/gcs/')}"
    elif re.fullmatch(r"[a-z0-9][a-z0-9._/-]+", given):
        fix = f"write gs://{given}"
    elif given.startswith("https://storage.googleapis.com/"):
        fix = f"write gs://{given.removeprefix('https://storage.googleapis.com/')}"
    yield problem("an address in Cloud Storage, gs://BUCKET/PATH", f"{field}={given!r}", fix)
