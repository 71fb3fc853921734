"""Documents for Kubernetes against the schemas of its API and of the operators that read them.

| document | checked by |
|---|---|
| Job, Service, pods | the JSON schemas of Kubernetes (package kubernetes-validate), strict |
| JobSet | the models of its API (package kubeflow-trainer-api): nothing may get lost |
| TFJob | `tfjob.schema.json`, written from the fields that its API documents |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

#: The oldest and the newest version of Kubernetes that documents are checked against.
VERSIONS = ("1.31", "1.37")
_TFJOB = json.loads((Path(__file__).parent / "tfjob.schema.json").read_text())


def check_document(document: dict[str, Any]) -> None:
    """Raises where a document is not valid."""
    if document["kind"] == "JobSet":
        _check_jobset(document)
    elif document["kind"] == "TFJob":
        jsonschema.validate(document, _TFJOB)
        for spec in document["spec"]["tfReplicaSpecs"].values():
            _check_template(spec["template"])
    else:
        _check(document)


def _check_jobset(document: dict[str, Any]) -> None:
    model = JobsetV1alpha2JobSet.from_dict(document)
    assert model is not None
    assert _kept(document, model.to_dict()) == document, "the API does not know all of it"
    names = [job["name"] for job in document["spec"]["replicatedJobs"]]
    for target in document["spec"]["successPolicy"]["targetReplicatedJobs"]:
        assert target in names
    for job in document["spec"]["replicatedJobs"]:
        _check(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": job["name"], **job["template"]["metadata"]},
                "spec": job["template"]["spec"],
            }
        )


def _kept(given: Any, read: Any) -> Any:
    """Returns what is left of `given` in `read`, which may have defaults beside it."""
    if isinstance(given, dict) and isinstance(read, dict):
        return {key: _kept(value, read[key]) for key, value in given.items() if key in read}
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [_kept(*pair) for pair in zip(given, read, strict=True)]
    return read


def _check_template(template: dict[str, Any]) -> None:
    meta = {"name": "template"}
    _check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": meta, "template": template})


def _check(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)
