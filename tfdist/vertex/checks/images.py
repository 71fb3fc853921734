"""Rules of container images, and of the vendor's prebuilt ones."""

from __future__ import annotations

import re

from tfdist.vertex.checks.rules import Findings
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import doubt
from tfdist.vertex.checks.rules import problem
from tfdist.vertex.checks.rules import rule
from tfdist.vertex.config import TRAINER
from tfdist.vertex.facts import PrebuiltImage

#: What the code of tfdist needs: the versions that its engine was tested with, in setup.cfg.
PYTHON = (3, 10)
KERAS = "3.15"
TENSORFLOW = "2.21"

_OWN_IMAGE = "build an image with the Dockerfile, and set vertex.code to image"
_NO_TRAINING = {
    "docker.pkg.dev/vertex-ai/prediction/": "one for serving",
    "training/reductionserver": "that of the Reduction Server",
}
_REFERENCE = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9._-]+(?:/[a-z0-9._-]+)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)


@rule("image")
def image(job: Job) -> Findings:
    """The image is the name of one in a registry."""
    given = job.spec.image
    for path, what in _NO_TRAINING.items():
        if path in given:
            yield problem(
                "an image for training",
                f"{what}, {given!r}",
                "name your own image, or a prebuilt one of .../vertex-ai/training/",
            )
    if _REFERENCE.fullmatch(given):
        return
    fix = "write REGION-docker.pkg.dev/PROJECT/REPOSITORY/IMAGE:TAG"
    if "://" in given:
        fix = f"write {given.partition('://')[2]}"
    elif given != given.lower() and _REFERENCE.fullmatch(given.lower()):
        fix = f"write {given.lower()}"
    yield problem("the name of a container image", f"image={given!r}", fix)


def _prebuilt(job: Job) -> PrebuiltImage | None:
    found = job.facts.prebuilt_image(job.spec.image)
    return found[1] if found else None


def _is_ours(job: Job) -> bool:
    """Whether the job runs code of tfdist's own trainer."""
    return not job.spec.command and job.spec.module == TRAINER


@rule("prebuilt-ended")
def prebuilt_ended(job: Job) -> Findings:
    """A prebuilt image is still to be had."""
    found = job.facts.prebuilt_image(job.spec.image)
    if found is None:
        return
    name, known = found
    if known is None:
        yield doubt(
            "a prebuilt image that is known here",
            f"{name}, about which facts.yaml of {job.facts.as_of} says nothing",
            "check that it exists and which versions it holds",
        )
    elif job.today > known.available:
        yield problem(
            "a prebuilt image that is still available",
            f"{name}, which ended on {known.available}",
            f"{_OWN_IMAGE}; no prebuilt image has TensorFlow {TENSORFLOW}",
        )
    elif job.today > known.support:
        yield doubt(
            "a prebuilt image that still gets security updates",
            f"{name}: updates ended on {known.support}, it is there until {known.available}",
            _OWN_IMAGE,
        )


@rule("prebuilt-tag")
def prebuilt_tag(job: Job) -> Findings:
    """A prebuilt image is named with the tag latest."""
    if job.facts.prebuilt_image(job.spec.image) and not job.spec.image.endswith(":latest"):
        yield problem(
            "the tag latest on a prebuilt image; the service takes no other",
            f"image={job.spec.image!r}",
            f"write {job.spec.image.partition('@')[0].partition(':')[0]}:latest",
        )


@rule("prebuilt-python")
def prebuilt_python(job: Job) -> Findings:
    """The Python of a prebuilt image runs the code."""
    known = _prebuilt(job)
    if known is None or tuple(map(int, known.python.split("."))) >= PYTHON:
        return
    needed = ".".join(map(str, PYTHON))
    if _is_ours(job):
        yield problem(
            f"Python {needed} or later, which tfdist needs",
            f"Python {known.python} in {known.name}",
            _OWN_IMAGE,
        )
    else:
        yield doubt(
            f"Python {needed} or later where the program uses tfdist",
            f"Python {known.python} in {known.name}",
            _OWN_IMAGE,
        )


@rule("prebuilt-keras")
def prebuilt_keras(job: Job) -> Findings:
    """TensorFlow and Keras of a prebuilt image are those of the code."""
    known = _prebuilt(job)
    if known is None:
        return
    needed = f"Keras {KERAS} on TensorFlow {TENSORFLOW}, which tfdist was tested with"
    if known.tensorflow is None:
        received = f"{known.name}, which has no TensorFlow"
    else:
        received = f"Keras {known.keras} of TensorFlow {known.tensorflow} in {known.name}"
        if known.keras == KERAS and known.tensorflow == TENSORFLOW:
            return
    if _is_ours(job) and known.tensorflow is not None:
        yield problem(needed, received, _OWN_IMAGE)
    else:
        yield doubt(
            f"{needed}, where the program uses tfdist",
            received,
            "let the source distribution require them, or use an image of your own",
        )


@rule("prebuilt-code")
def prebuilt_code(job: Job) -> Findings:
    """A prebuilt image gets its code as a package, or a command to run."""
    spec = job.spec
    if spec.code == "image" and not spec.command and job.facts.prebuilt_image(spec.image):
        yield problem(
            "an image that holds the code, because vertex.code is image",
            f"the prebuilt image {spec.image}",
            "set vertex.code to package, or use an image of your own",
        )


@rule("package-image")
def package_image(job: Job) -> Findings:
    """A package runs in a prebuilt image."""
    if job.spec.code == "package" and job.facts.prebuilt_image(job.spec.image) is None:
        yield doubt(
            "one of the service's prebuilt images for vertex.code: package",
            f"image={job.spec.image!r}",
            "set vertex.code to image if it holds the code",
        )


@rule("prebuilt-device")
def prebuilt_device(job: Job) -> Findings:
    """The image is for the devices of the machines."""
    found = job.facts.prebuilt_image(job.spec.image)
    if found is None:
        return
    name = found[0]
    for role, pool in job.spec.pools:
        accelerator = pool.accelerator
        known = job.facts.accelerators.get(accelerator.type) if accelerator else None
        if "-cpu." in name and known and known.kind == "gpu" and role != "reduction_server":
            yield doubt(
                f"an image with CUDA for the {known.name} of {role}",
                name,
                f"use {name.replace('-cpu.', '-gpu.')}, or leave the accelerator out",
            )
