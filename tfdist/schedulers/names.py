"""What Kubernetes allows as names, labels and quantities; refused here instead of by its server.

Source: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and labels/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist.errors import ConfigError

#: Longest DNS label, name of a pod as host name, and value of a label.
LONGEST = 63
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_BYTES = re.compile(r"[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)")


def dns_form(name: str) -> str:
    """Returns the name of a file as a DNS label, as far as that is possible."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def check_label(value: str, where: str) -> None:
    """Raises ConfigError where `value` is no DNS label that begins with a letter."""
    if not _LABEL.fullmatch(value) or len(value) > LONGEST:
        raise ConfigError(
            f"{where} of at most {LONGEST} lower-case letters, digits and -, a letter first",
            repr(value),
            f"--set {where}=NAME",
        )


def check_subdomain(value: str | None, where: str) -> None:
    """Raises ConfigError where `value` is no name of an object."""
    if value is not None and (not _SUBDOMAIN.fullmatch(value) or len(value) > 253):
        raise ConfigError(
            f"{where} of lower-case letters, digits, - and .", repr(value), f"correct {where}"
        )


def check_labels(labels: Mapping[str, str], where: str, *, values: bool = True) -> None:
    """Raises ConfigError where keys, or the values of labels, are not allowed."""
    for key, value in labels.items():
        prefix, slash, name = key.rpartition("/")
        if slash:
            check_subdomain(prefix, f"the prefix of key {key!r} in {where}")
        if not _QUALIFIED.fullmatch(name) or len(name) > LONGEST:
            raise ConfigError(
                f"keys in {where} of at most {LONGEST} letters, digits, -, _ and .",
                repr(key),
                "correct the key",
            )
        if values and (not _VALUE.fullmatch(value) or len(value) > LONGEST):
            raise ConfigError(
                f"values in {where} of at most {LONGEST} letters, digits, -, _ and .",
                f"{key}={value!r}",
                "correct the value, or make it an annotation",
            )


def check_bytes(value: str | None, where: str) -> None:
    """Raises ConfigError where `value` is no quantity of bytes with a unit."""
    if value is not None and not _BYTES.fullmatch(value):
        raise ConfigError(
            f"{where} as a number with a unit such as Mi or Gi", repr(value), 'write "16Gi"'
        )
