"""What the job description inside `CLUSTER_SPEC` or `TF_CONFIG` says about worker pools.

Vertex AI puts the whole job under `job`, as an object or as JSON in a string, in snake or in camel
case, and sometimes with the part that describes worker pools one level down.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: The third pool holds parameter servers or, with Google's own image, a Reduction Server.
THIRD_POOL = 2

_REDUCTION_IMAGE = re.compile(r"reduction[-_]?server")
_MAX_DEPTH = 4


def is_reduction_server(job: Mapping[str, Any]) -> bool | None:
    """Tells whether the third pool runs the Reduction Server, or None where the job is silent."""
    pool = _pool(job, THIRD_POOL)
    container = _get(pool, "container_spec")
    image = _get(container, "image_uri")
    if isinstance(image, str) and image.strip():
        return bool(_REDUCTION_IMAGE.search(image.lower()))
    return False if pool else None


def accelerators(job: Mapping[str, Any], pool: int) -> int | None:
    """Returns how many accelerators the machines of `pool` have, or None where it is silent."""
    value = _get(_get(_pool(job, pool), "machine_spec"), "accelerator_count")
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def has_tpu(job: Mapping[str, Any], pool: int) -> bool:
    """Tells whether the machines of `pool` are TPU machines."""
    machine = _get(_pool(job, pool), "machine_spec")
    kind = str(_get(machine, "accelerator_type") or "").upper()
    name = str(_get(machine, "machine_type") or "").lower()
    return kind.startswith("TPU") or name.startswith("cloud-tpu") or "hightpu" in name


def _pool(job: Mapping[str, Any], index: int) -> object:
    pools = _find(job, "worker_pool_specs", _MAX_DEPTH)
    return pools[index] if isinstance(pools, list) and index < len(pools) else None


def _find(value: object, key: str, depth: int) -> object:
    """Searches objects inside objects, because the specs move with the API that made the job."""
    if not isinstance(value, Mapping) or not depth:
        return None
    found = _get(value, key)
    if found is not None:
        return found
    for inner in value.values():
        found = _find(inner, key, depth - 1)
        if found is not None:
            return found
    return None


def _get(value: object, key: str) -> Any:
    """Returns the field in snake case or camel case, None where it is absent."""
    if not isinstance(value, Mapping):
        return None
    first, *rest = key.split("_")
    camel = first + "".join(word.capitalize() for word in rest)
    found = value.get(key)
    return value.get(camel) if found is None else found
