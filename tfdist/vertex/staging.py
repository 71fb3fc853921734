"""What a job needs in Cloud Storage: its source distribution, and buckets that are near.

`google-cloud-storage` comes with google-cloud-aiplatform and obeys `STORAGE_EMULATOR_HOST`.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from tfdist.errors import ConfigError
from tfdist.vertex import client
from tfdist.vertex import failures
from tfdist.vertex.checks.finding import Finding
from tfdist.vertex.checks.finding import JobError
from tfdist.vertex.spec import JobSpec

EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"

_SECONDS = 60.0
_URI = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(.*))?")
_REGION = re.compile(r"[a-z]+(-[a-z]+)+[0-9]+")
#: How names of regions begin inside the multi-regions of Cloud Storage.
_MULTI_REGIONS = {"us": ("us-",), "eu": ("europe-",), "asia": ("asia-",)}


class Storage:
    """Buckets and objects.

    Args:
        project: Project that is asked for them.
        credentials: Of google-auth; an emulator gets none.
        environ: Where `STORAGE_EMULATOR_HOST` is looked up; by default the process's.
    """

    def __init__(self, project: str, credentials: Any, environ: Mapping[str, str] | None = None):
        client.require()
        from google.cloud import storage

        environ = os.environ if environ is None else environ
        emulated = bool(environ.get(EMULATOR_VARIABLE))
        self._client = storage.Client(
            project=project, credentials=client.anonymous() if emulated else credentials
        )

    def upload(self, data: bytes, uri: str) -> bool:
        """Writes an object once.

        Args:
            data: Its content.
            uri: `gs://bucket/path`, a name that belongs to this content alone.

        Returns:
            Whether it was written; False if it is there already.

        Raises:
            ConfigError: Something else is there under that name.
            TfdistError: As `failures` says.
        """
        from google.api_core import exceptions
        from google.cloud.storage.retry import DEFAULT_RETRY

        bucket, path = parts(uri)
        blob = self._client.bucket(bucket).blob(path)
        retry = DEFAULT_RETRY.with_timeout(_SECONDS)
        with client.translated(f"to upload to {uri}", "roles/storage.objectUser", _create(bucket)):
            try:
                # Generation 0: only if there is no such object.
                blob.upload_from_string(
                    data,
                    content_type="application/gzip",
                    if_generation_match=0,
                    timeout=_SECONDS,
                    retry=retry,
                )
                return True
            except exceptions.PreconditionFailed:
                blob.reload(timeout=_SECONDS, retry=retry)
        if blob.size != len(data) or blob.crc32c not in (None, _crc32c(data)):
            raise ConfigError(
                f"{uri} to hold the source distribution of that name",
                f"another content of {blob.size} bytes",
                "remove it, or use another staging bucket",
            )
        return False

    def location(self, bucket: str) -> tuple[str, tuple[str, ...]]:
        """Returns where a bucket is: region, multi-region or name of a pair, and the pair.

        Raises:
            TfdistError: As `failures` says.
        """
        from google.cloud.storage.retry import DEFAULT_RETRY

        with client.translated(
            f"to see gs://{bucket}", "roles/storage.bucketViewer", _create(bucket)
        ):
            found = self._client.get_bucket(
                bucket, timeout=_SECONDS, retry=DEFAULT_RETRY.with_timeout(_SECONDS)
            )
        pair = tuple(each.lower() for each in found.data_locations or ())
        return (found.location or "").lower(), pair


def parts(uri: str) -> tuple[str, str]:
    """Returns bucket and path of a `gs://` address.

    Raises:
        ConfigError: It is none.
    """
    match = _URI.fullmatch(uri.strip())
    if match is None:
        raise ConfigError("an address gs://bucket/path", repr(uri), "correct it")
    return match[1], match[2] or ""


def check_buckets(spec: JobSpec, storage: Storage, say: Callable[[str], None]) -> None:
    """Refuses buckets that are not there or in another region than the job.

    Args:
        spec: The job.
        storage: Where buckets are looked up.
        say: Told about buckets that may not be looked at.

    Raises:
        JobError: A bucket is in another region.
        NotThereError: There is no such bucket.
    """
    findings = []
    for key, uri in (
        ("staging_bucket", spec.staging_bucket),
        ("base_output_directory", spec.base_output_directory),
    ):
        if not uri:
            continue
        bucket, _ = parts(uri)
        try:
            location, pair = storage.location(bucket)
        except (failures.AccessError, failures.ServiceError) as error:
            say(f"the region of gs://{bucket} is not checked: {failures.words(error)}")
            continue
        if not is_near(spec.region, location, pair):
            findings.append(
                Finding(
                    "bucket-region",
                    f"vertex.{key} in {spec.region}, as the job",
                    f"gs://{bucket} in {location}",
                    f"use a bucket there: gcloud storage buckets create gs://NAME "
                    f"--location={spec.region}; or pass --no-check-buckets and pay for the "
                    "traffic between regions",
                )
            )
    if findings:
        raise JobError(findings)


def is_near(region: str, location: str, pair: tuple[str, ...] = ()) -> bool:
    """Tells whether a region has the data of a bucket.

    Args:
        region: Of the job.
        location: Of the bucket, in lower case.
        pair: Its two regions, where the user chose them.
    """
    if location in _MULTI_REGIONS:
        return region.startswith(_MULTI_REGIONS[location])
    if pair:
        return region in pair
    # Pairs that Google named, such as "nam4", are not looked into.
    return not _REGION.fullmatch(location) or location == region


def _create(bucket: str) -> tuple[str, str]:
    return (
        f"bucket gs://{bucket} to be there",
        f"correct the name, or: gcloud storage buckets create gs://{bucket} --location=REGION",
    )


def _crc32c(data: bytes) -> str:
    import google_crc32c

    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
