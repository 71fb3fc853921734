"""What a run depends on besides its code: packages, machine, environment, without secrets.

Of the environment only variables count that are known to change a run. One whose name or value
looks like a secret is left out, and its name listed. A secret that looks like an ordinary word
under an ordinary name cannot be told.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

LEFT_OUT = "(left out)"

_PACKAGES = (
    *("tfdist", "tensorflow", "tensorflow-cpu", "keras", "numpy", "ml-dtypes", "h5py", "optree"),
    *("jax", "jaxlib", "tensorflow-datasets", "tensorflow-text", "tf-keras"),
)
_PREFIXES = (
    *("TF_", "TFDIST_", "KERAS_", "XLA_", "JAX_", "CUDA_", "NCCL_", "NVIDIA_", "TPU_", "AIP_"),
    *("SLURM_", "OMP_", "MKL_", "OPENBLAS_", "CLOUD_ML_", "JOB_COMPLETION_", "MALLOC_", "GRPC_"),
)
_NAMES = frozenset(
    {
        *("CLUSTER_SPEC", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONPATH"),
        *("SM_HOSTS", "SM_CURRENT_HOST", "HOSTNAME", "TZ", "LANG", "LC_ALL", "TFDS_DATA_DIR"),
        *("GIT_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA", "SOURCE_COMMIT", "IMAGE_NAME"),
    }
)
#: Cluster descriptions also carry the job with the arguments and variables of all containers.
_CLUSTERS = ("TF_CONFIG", "CLUSTER_SPEC")
_CLUSTER_KEYS = ("cluster", "task", "environment")

_SECRET_WORDS = re.compile(
    r"TOKEN|KEY|SECRET|PASS(WORD|WD|PHRASE)?(?![A-Z])|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|"
    r"(^|_)(PWD|SAS|DSN)(_|$)",
    re.IGNORECASE,
)
#: Parameters of training speak of tokens and keys too.
_SECRET_PARAMETER = re.compile(
    r"pass(word|wd|phrase)|secret|credential|(api|access|private|auth|signing|service)[_-]?key|"
    r"(auth|access|api|bearer|refresh|hf|hub|wandb|github|id)[_-]?token|^token$|^auth$|^pwd$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"-----BEGIN |\bA[KS]IA[0-9A-Z]{12}|\bAIza[\w-]{20}|\bya29\.|\bgh[opusr]_\w{16}|\bgithub_pat_|"
    r"\bglpat-|\bsk-[\w-]{16}|\bhf_[A-Za-z]{16}|\bxox[abprs]-|\beyJ[\w-]{8,}\.[\w-]+\.|"
    r"://[^/\s:@]+:[^/\s@]+@|\b(Bearer|Basic) [\w.~+/-]{8}|[?&](sig|signature|token|key|password)="
)
_RANDOM = re.compile(r"(?<![\w/+.-])[A-Za-z0-9+/_-]{32,}={0,2}(?![\w/+.-])")
_RANDOM_BITS = 4.0


def packages() -> dict[str, str]:
    """Returns the versions of the packages that training depends on, as far as installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    tensorflow = sys.modules.get("tensorflow")
    if "tensorflow" not in found and hasattr(tensorflow, "__version__"):
        found["tensorflow"] = str(getattr(tensorflow, "__version__"))  # noqa: B009
    return found


def machine() -> dict[str, Any]:
    """Returns what machine this is."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }


def environment(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns the variables that change a run, and the names of those left out as secrets."""
    told: dict[str, str] = {}
    left_out = []
    for name in sorted(environ):
        if name not in _NAMES and not name.startswith(_PREFIXES):
            continue
        value = environ[name]
        if name in _CLUSTERS:
            value = _cluster_only(value)
        if _SECRET_WORDS.search(name) or looks_secret(value):
            left_out.append(name)
        else:
            told[name] = value
    return told, left_out


def without_secrets(value: Any, name: str = "") -> Any:
    """Returns parameters with `LEFT_OUT` for what looks like a secret by its name or value."""
    if isinstance(value, Mapping):
        return {str(key): without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in value]
    is_text = isinstance(value, str) and value != ""
    if is_text and (_SECRET_PARAMETER.search(name) or looks_secret(value)):
        return LEFT_OUT
    return value


def command_line(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of the program with `LEFT_OUT` for what looks like a secret."""
    told: list[str] = []
    name = ""
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument.startswith("-") and equals:
            told.append(f"{key}={without_secrets(value, key.lstrip('-'))}")
            name = ""
            continue
        told.append(without_secrets(argument, "" if argument.startswith("-") else name))
        name = argument.lstrip("-") if argument.startswith("-") else ""
    return told


def looks_secret(text: str) -> bool:
    """Whether `text` holds what looks like a key: a known form, or long random letters."""
    if _SECRET_VALUE.search(text):
        return True
    return any(_looks_random(match[0]) for match in _RANDOM.finditer(text))


def _looks_random(word: str) -> bool:
    if word.startswith("/"):
        # A path: its parts count one by one.
        return any(len(part) >= 32 and _looks_random(part) for part in word.split("/"))
    kinds = (str.islower, str.isupper, str.isdigit)
    if not all(any(is_kind(letter) for letter in word) for is_kind in kinds):
        return False
    counts = Counter(word).values()
    bits = -sum(n / len(word) * math.log2(n / len(word)) for n in counts)
    return bits > _RANDOM_BITS


def _cluster_only(text: str) -> str:
    try:
        whole = json.loads(text)
    except ValueError:
        return text
    if not isinstance(whole, dict):
        return text
    return json.dumps({key: whole[key] for key in _CLUSTER_KEYS if key in whole})
