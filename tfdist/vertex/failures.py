"""What Google's services answer when they do not do what was asked, each with its fix.

`translate` turns an exception of the client libraries into an error of ours: one line with the
service's own words and what to do. `UnavailableError` alone is worth another try.
"""

from __future__ import annotations

import re

from tfdist.errors import ConfigError
from tfdist.errors import TfdistError

#: Answers after which the same request may succeed: overload, restarts, gateways.
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})

#: "GET https://host/path: " before the service's own words, as google-api-core writes it.
_REQUEST = re.compile(r"^[A-Z]+ https?://\S+: ")

#: "... and limit 'Requests per minute' ...": it passes by itself, unlike a limit of machines.
_RATE = re.compile(r"per (second|minute|user|100 seconds)|rate limit", re.IGNORECASE)

#: What is missing where the request names nothing else, and the fix.
MISSING = ("the project and the region to be there", "correct vertex.project or vertex.region")

_LOGIN = "run gcloud auth application-default login, or name a key file in "
_LOGIN += "GOOGLE_APPLICATION_CREDENTIALS"


class ServiceError(TfdistError):
    """A service did not do what was asked, for reasons that may pass. Exit code 1."""


class QuotaError(ServiceError):
    """The project may not have so many machines in this region now."""


class UnavailableError(ServiceError):
    """A service gives no answer, or none that can be used.

    Attributes:
        maybe_done: Whether the request may have been carried out all the same.
    """

    maybe_done = True


class RefusedError(ConfigError):
    """A service refuses the request for good. Exit code 2."""


class AccessError(RefusedError):
    """No credentials, or not the permission."""


class NotThereError(RefusedError):
    """No such job, bucket, project or region."""


def translate(
    error: Exception,
    doing: str,
    *,
    role: str = "roles/aiplatform.user",
    missing: tuple[str, str] = MISSING,
    for_machines: bool = False,
) -> TfdistError:
    """Returns our error for one of the client libraries.

    Args:
        error: What a call raised: an error of google-api-core, google-auth, requests or protobuf.
        doing: What was asked, a phrase that follows "Expected", for example "to create a job".
        role: The role that gives the permission.
        missing: What is not there if the service says so, a phrase that follows "Expected", and
            its fix.
        for_machines: Whether the request asks for machines, of which the project may have some.
    """
    import google.auth.exceptions
    import requests
    from google.api_core import exceptions
    from google.protobuf import json_format

    if isinstance(error, exceptions.GoogleAPICallError):
        status = int(error.code) if error.code is not None else 0
        text = _REQUEST.sub("", str(error.message or error))
        reason = str(getattr(error, "reason", None) or "")
        return from_status(
            status,
            text,
            doing,
            reason=reason,
            role=role,
            missing=missing,
            for_machines=for_machines,
        )
    if isinstance(error, google.auth.exceptions.DefaultCredentialsError):
        return AccessError(f"credentials {doing}", _words(error), _LOGIN)
    if isinstance(error, google.auth.exceptions.TransportError):
        return _unavailable(f"no way to get a token ({_words(error)})", doing, maybe_done=False)
    if isinstance(error, google.auth.exceptions.GoogleAuthError):
        return AccessError(f"valid credentials {doing}", _words(error), _LOGIN)
    # Google's own client stumbles over errors that have not the form of Google's.
    if isinstance(error, (json_format.ParseError, AttributeError, KeyError)):
        return _unavailable(f"an answer that is not of this service ({_words(error)})", doing)
    if isinstance(error, (requests.ConnectTimeout, requests.exceptions.ProxyError)):
        return _unavailable(_words(error), doing, maybe_done=False)
    if isinstance(error, requests.ConnectionError) and _never_arrived(error):
        return _unavailable("no connection", doing, maybe_done=False, detail=_words(error))
    if isinstance(error, (requests.RequestException, OSError)):
        return _unavailable(_connection_words(error), doing)
    raise error


def words(error: TfdistError) -> str:
    """Returns what the service said, to be part of a sentence."""
    return (error.received or str(error)).rstrip(".")


def from_status(
    status: int,
    text: str,
    doing: str,
    *,
    reason: str = "",
    role: str = "",
    missing: tuple[str, str] = MISSING,
    for_machines: bool = False,
) -> TfdistError:
    """Returns our error for an answer with an HTTP status.

    Args:
        status: 400 or more.
        text: The service's own words.
        doing: As for `translate`.
        reason: The service's code for the cause, for example "SERVICE_DISABLED".
        role: As for `translate`.
        missing: As for `translate`.
        for_machines: As for `translate`.
    """
    said = f"{status} {_one_line(text)}".strip()
    if status == 429 and for_machines and "quota" in text.lower() and not _RATE.search(text):
        return QuotaError(
            f"enough quota {doing}",
            said,
            "ask for fewer machines or another region, wait until other jobs end, or ask for more "
            "at https://console.cloud.google.com/iam-admin/quotas",
        )
    if status in TRANSIENT_STATUS:
        return _unavailable(said, doing, maybe_done=status != 429)
    if status == 401:
        return AccessError(f"credentials that the service knows {doing}", said, _LOGIN)
    if status == 403:
        return AccessError(f"the permission {doing}", said, _permission_fix(text, reason, role))
    if status == 404:
        expected, fix = missing
        return NotThereError(expected, said, fix)
    return RefusedError(
        f"a request that the service accepts {doing}", said, "change the config as it says"
    )


def _permission_fix(text: str, reason: str, role: str) -> str:
    if reason == "SERVICE_DISABLED" or "has not been used in project" in text:
        return "run gcloud services enable aiplatform.googleapis.com, and wait a minute"
    if "actAs" in text or "act as" in text.lower():
        return (
            "grant yourself roles/iam.serviceAccountUser on the service account of the job: gcloud "
            "iam service-accounts add-iam-policy-binding ACCOUNT --member=user:YOU "
            "--role=roles/iam.serviceAccountUser"
        )
    return (
        f"grant it: gcloud projects add-iam-policy-binding PROJECT --member=user:YOU --role={role};"
        " and check that the project is the right one"
    )


def _unavailable(
    received: str, doing: str, *, maybe_done: bool = True, detail: str = ""
) -> UnavailableError:
    error = UnavailableError(
        f"an answer to the request {doing}",
        f"{received} ({detail})" if detail else received,
        "try again in a few minutes; if it stays so, check the network and the endpoint",
    )
    error.maybe_done = maybe_done
    return error


def _never_arrived(error: Exception) -> bool:
    """Whether no connection came about, so that nothing can have been done."""
    import urllib3.exceptions

    cause = error.args[0] if error.args else None
    reason = getattr(cause, "reason", cause)
    return isinstance(reason, urllib3.exceptions.NewConnectionError)


def _connection_words(error: Exception) -> str:
    import requests

    if isinstance(error, requests.Timeout):
        return "no answer in time"
    return f"the connection broke ({_words(error)})"


def _words(error: BaseException) -> str:
    text = _one_line(str(error)) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
