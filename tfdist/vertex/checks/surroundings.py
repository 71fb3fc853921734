"""Rules of what a job is connected to: accounts, networks, keys, TensorBoard."""

from __future__ import annotations

import re

from tfdist.vertex.checks.rules import Findings
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import doubt
from tfdist.vertex.checks.rules import problem
from tfdist.vertex.checks.rules import rule

_EMAIL = re.compile(r"[^@\s/:]+@[^@\s/:]+\.[a-z]+")
_TENSORBOARD = re.compile(r"projects/[^/]+/locations/([^/]+)/tensorboards/[^/]+")
_NETWORK = re.compile(r"projects/[0-9]+/global/networks/[a-z]([a-z0-9-]*[a-z0-9])?")
_ATTACHMENT = re.compile(r"(?:projects/[^/]+/regions/([^/]+)/networkAttachments/)?[a-z][a-z0-9-]*")
_KEY = re.compile(r"projects/[^/]+/locations/([^/]+)/keyRings/[^/]+/cryptoKeys/[^/]+")
_ACCOUNT_SUFFIX = "gserviceaccount.com"


@rule("service-account")
def service_account(job: Job) -> Findings:
    """The service account is its email address."""
    given = job.spec.service_account
    if given is None:
        return
    if not _EMAIL.fullmatch(given):
        yield problem(
            "the email address of a service account",
            f"service_account={given!r}",
            "write NAME@PROJECT.iam.gserviceaccount.com",
        )
    elif not given.endswith(_ACCOUNT_SUFFIX):
        yield doubt(
            "the address of a service account, not of a person",
            f"service_account={given!r}",
            "write NAME@PROJECT.iam.gserviceaccount.com",
        )


@rule("tensorboard")
def tensorboard(job: Job) -> Findings:
    """The TensorBoard is a resource in the region of the job."""
    given = job.spec.tensorboard
    if given is None:
        return
    match = _TENSORBOARD.fullmatch(given)
    if match is None:
        yield problem(
            "the resource name of a TensorBoard",
            f"tensorboard={given!r}",
            f"write projects/PROJECT/locations/{job.spec.region}/tensorboards/ID",
        )
    elif match[1] != job.spec.region:
        yield problem(
            f"a TensorBoard in {job.spec.region}, the region of the job",
            f"one in {match[1]}",
            "name one of that region, or move the job",
        )
    if not job.spec.base_output_directory:
        yield doubt(
            "base_output_directory with a TensorBoard: it shows what is written to its logs/",
            "no base_output_directory",
            "set vertex.base_output_directory to gs://BUCKET/PATH",
        )


@rule("tensorboard-service-account")
def tensorboard_service_account(job: Job) -> Findings:
    """A TensorBoard needs a service account of yours."""
    if job.spec.tensorboard and not job.spec.service_account:
        yield problem(
            "a service account with a TensorBoard, which writes to it",
            "tensorboard without service_account",
            "set vertex.service_account to an account with roles/storage.admin and "
            "roles/aiplatform.user",
        )


@rule("network")
def network(job: Job) -> Findings:
    """The network is its full name, with the number of the project."""
    spec = job.spec
    if spec.network is not None and not _NETWORK.fullmatch(spec.network):
        yield problem(
            "the full name of a network, with the number of its project",
            f"network={spec.network!r}",
            "write projects/NUMBER/global/networks/NAME",
        )
    if spec.reserved_ip_ranges and not spec.network:
        yield problem(
            "a network for reserved_ip_ranges",
            f"reserved_ip_ranges={list(spec.reserved_ip_ranges)}",
            "set vertex.network, or leave the ranges out",
        )


@rule("network-and-attachment")
def network_and_attachment(job: Job) -> Findings:
    """A job is peered with a network or attached to one."""
    if job.spec.network and job.spec.network_attachment:
        yield problem(
            "network for peering, or network_attachment for Private Service Connect",
            "both",
            "leave one of them out",
        )


@rule("network-attachment")
def network_attachment(job: Job) -> Findings:
    """The network attachment is in the region of the job."""
    given = job.spec.network_attachment
    if given is None:
        return
    match = _ATTACHMENT.fullmatch(given)
    if match is None:
        yield problem(
            "the name of a network attachment",
            f"network_attachment={given!r}",
            f"write projects/PROJECT/regions/{job.spec.region}/networkAttachments/NAME",
        )
    elif match[1] and match[1] != job.spec.region:
        yield problem(
            f"a network attachment in {job.spec.region}, the region of the job",
            f"one in {match[1]}",
            "name one of that region, or move the job",
        )


@rule("encryption-key")
def encryption_key(job: Job) -> Findings:
    """The encryption key is in the region of the job."""
    given = job.spec.encryption_key
    if given is None:
        return
    match = _KEY.fullmatch(given)
    if match is None:
        yield problem(
            "the resource name of a key",
            f"encryption_key={given!r}",
            f"write projects/PROJECT/locations/{job.spec.region}/keyRings/RING/cryptoKeys/KEY",
        )
    elif match[1] != job.spec.region:
        yield problem(
            f"a key in {job.spec.region}, the region of the job",
            f"one in {match[1]}",
            "name one of that region, or move the job",
        )
