"""Rules of what a job is called: project, region, display name, labels, environment variables."""

from __future__ import annotations

import difflib
import re

from tfdist.vertex.checks.rules import Findings
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import doubt
from tfdist.vertex.checks.rules import plural
from tfdist.vertex.checks.rules import problem
from tfdist.vertex.checks.rules import rule
from tfdist.vertex.roles import WHO_AM_I

#: An id, a number, or an id in the scope of a domain.
_PROJECT = re.compile(r"(?:[a-z0-9.-]+:)?[a-z](?:[a-z0-9-]{0,28}[a-z0-9])?|[0-9]+")
_SHORTEST_PROJECT = 6
_ZONE = re.compile(r"([a-z]+(?:-[a-z]+)+[0-9]+)-[a-z]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"(?<!\$)\$\(([A-Za-z_][A-Za-z0-9_]*)\)")

_OUTPUT = ("AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR")


@rule("project")
def project(job: Job) -> Findings:
    """The project is its id or its number."""
    given = job.spec.project
    if _PROJECT.fullmatch(given):
        if len(given) < _SHORTEST_PROJECT:
            yield doubt(
                f"the id of a project, which has at least {_SHORTEST_PROJECT} characters",
                f"project={given!r}",
                "check vertex.project",
            )
        return
    fix = "write the project's id, for example my-project, or its number"
    if given.startswith("projects/"):
        fix = f"write {given.removeprefix('projects/').partition('/')[0]}"
    yield problem("the id or number of a Google Cloud project", f"project={given!r}", fix)


@rule("region")
def region(job: Job) -> Findings:
    """The region is one that has custom jobs."""
    given = job.spec.region
    if given in job.facts.regions:
        return
    zone = _ZONE.fullmatch(given)
    close = difflib.get_close_matches(given.lower(), job.facts.regions, n=1, cutoff=0.5)
    if zone and zone[1] in job.facts.regions:
        fix = f"write the region {zone[1]} instead of its zone"
    elif given in ("global", "us", "eu", "asia"):
        fix = "name one region, for example us-central1: a custom job runs in a region"
    else:
        fix = f"did you mean {close[0]}" if close else "for example us-central1"
    yield problem("a region of Vertex AI", f"region={given!r}", fix)


@rule("display-name")
def display_name(job: Job) -> Findings:
    """The display name has at most 128 characters."""
    given, most = job.spec.display_name, job.facts.limits["display_name"]
    if not given.strip():
        yield problem("a display name", repr(given), "set vertex.display_name")
    elif len(given) > most:
        yield problem(
            f"a display name of at most {most} characters",
            f"{len(given)} characters",
            "shorten vertex.display_name",
        )


@rule("label-limit")
def label_limit(job: Job) -> Findings:
    """At most 64 labels; keys and values of at most 63 lower-case characters."""
    labels, limits = job.spec.labels, job.facts.limits
    if len(labels) > limits["labels"]:
        yield problem(
            f"at most {limits['labels']} labels", f"{len(labels)}", "remove some of vertex.labels"
        )
    most = limits["label_characters"]
    for key, value in labels.items():
        for what, text in (("key", key), ("value", value)):
            if len(text) > most or not all(map(_may_stand_in_label, text)):
                yield problem(
                    f"the {what} of a label to be at most {most} lower-case letters, digits, "
                    "underscores and dashes",
                    f"{key}: {value}" if len(text) <= most else f"{text[:20]}... ({len(text)})",
                    f"correct vertex.labels.{key[:20]}",
                )
        if not key or not key[0].isalpha():
            yield problem(
                "the key of a label to begin with a letter",
                repr(key),
                f"correct vertex.labels.{key[:20]}",
            )


def _may_stand_in_label(character: str) -> bool:
    return character in "_-" or (character.isalnum() and character == character.lower())


@rule("env-limit")
def env_limit(job: Job) -> Findings:
    """At most 100 environment variables."""
    most = job.facts.limits["env"]
    if len(job.spec.env) > most:
        yield problem(
            f"at most {most} environment variables",
            plural(len(job.spec.env), "variable"),
            "pass some of them as arguments, or in a file",
        )


@rule("env-name")
def env_name(job: Job) -> Findings:
    """Environment variables have names that programs can read."""
    for name, value in job.spec.env.items():
        if not _VARIABLE.fullmatch(name):
            yield problem(
                "the name of an environment variable to be letters, digits and underscores, and "
                "not to begin with a digit",
                repr(name),
                "rename it in vertex.env",
            )
        if "\0" in value:
            yield problem("no NUL in an environment variable", name, "correct vertex.env")
        for reference in _REFERENCE.findall(value):
            yield doubt(
                f"text in the variable {name}; the service replaces $({reference}) by that "
                "variable's value",
                repr(value),
                "write $$( if it shall stay as it is",
            )


@rule("env-reserved")
def env_reserved(job: Job) -> Findings:
    """The variables that the service sets are left to it."""
    for name in job.spec.env:
        if name in WHO_AM_I or name.startswith("CLOUD_ML_"):
            why = (
                "every replica would be the same task"
                if name in WHO_AM_I
                else "the service sets it"
            )
            yield problem(f"no {name} in vertex.env: {why}", name, f"remove {name} from vertex.env")
        elif name in _OUTPUT and job.spec.base_output_directory:
            yield problem(
                f"{name} from vertex.base_output_directory or from vertex.env",
                "both",
                "leave one of them out",
            )
