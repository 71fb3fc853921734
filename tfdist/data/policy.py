"""How a source is split over workers, and why: plain data from plain data.

>>> choose(Facts("arrays", examples=1003, is_indexed=True), workers=3).name
'example'
"""

from __future__ import annotations

import dataclasses

from tfdist.data.order import assign
from tfdist.errors import ConfigError

POLICIES = ("auto", "example", "file")
#: Files are even if the worker with most of them has at most that much more than the mean.
_UNEVEN = 0.05


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a source.

    Attributes:
        kind: "arrays", "sequence", "records", "dataset", "generator" or "dataset_fn".
        examples: Their number, or None where it is not known before the end.
        is_indexed: Whether any example can be read without those before it.
        counts: Examples of each file, or None where there are no files or it is not known.
        sizes: Bytes of each file, or None where there are no files.
        notes: What else was found out about the source, sentences.
    """

    kind: str
    examples: int | None = None
    is_indexed: bool = False
    counts: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a source is split over workers.

    Attributes:
        name: "example": of every global batch each worker takes its part. "file": each worker reads
            files of its own. "given": the user's dataset function gives each worker its part.
        reasons: Why, sentences.
        files: Numbers of the files of each worker, with "file".
        examples: Examples of a pass that each worker takes, where that is known.
    """

    name: str
    reasons: tuple[str, ...]
    files: tuple[tuple[int, ...], ...] | None = None
    examples: tuple[int, ...] | None = None


def choose(facts: Facts, workers: int, wanted: str = "auto") -> Policy:
    """Returns the policy for a source, without reading any of it.

    Args:
        facts: What is known of the source.
        workers: Number of workers.
        wanted: "auto", or the name of the policy to use.

    Raises:
        ConfigError: The source cannot be split as wanted.
    """
    if wanted not in POLICIES:
        raise ConfigError(f"a policy out of {', '.join(POLICIES)}", repr(wanted))
    if facts.kind == "dataset_fn":
        if wanted != "auto":
            raise ConfigError(
                "policy='auto' with a dataset function, which says itself what each worker reads",
                f"policy={wanted!r}",
            )
        reason = f"the function gives each of {workers} workers examples of its own"
        return Policy("given", (*facts.notes, reason))
    if wanted == "file":
        return _by_file(facts, workers, (*facts.notes, "policy='file' was asked for"))
    if wanted == "example":
        return _by_example(facts, (*facts.notes, "policy='example' was asked for"))
    if workers > 1 and facts.sizes is not None and not facts.is_indexed:
        why_not = _why_not_by_file(facts, workers)
        if why_not is None:
            known = "record counts" if facts.counts is not None else "sizes"
            count = sum(map(bool, facts.sizes))
            reason = f"{count} files of even {known} for {workers} workers"
            return _by_file(facts, workers, (*facts.notes, reason))
        return _by_example(facts, (*facts.notes, why_not))
    reasons = facts.notes
    if workers > 1 and facts.counts is not None and _why_not_by_file(facts, workers) is None:
        other = "files are even, but batches of whole files would depend on the number of workers"
        reasons = (*reasons, other)
    return _by_example(facts, reasons)


def _by_example(facts: Facts, reasons: tuple[str, ...]) -> Policy:
    if facts.is_indexed:
        why = "any example can be read without the others: a worker reads its own only"
    else:
        why = "the source is read in order: every worker reads all of it and keeps its part"
    return Policy("example", (*reasons, why))


def _by_file(facts: Facts, workers: int, reasons: tuple[str, ...]) -> Policy:
    if facts.sizes is None:
        raise ConfigError(
            "a source of files with policy='file'",
            f"a source of the kind {facts.kind!r}",
            "leave the policy at 'auto'",
        )
    loads = facts.counts or facts.sizes
    filled = [index for index, load in enumerate(loads) if load]
    if len(filled) < workers:
        raise ConfigError(
            f"with policy='file' at least one file that is not empty for each of {workers} workers",
            f"{len(filled)} of {len(loads)} files that are not empty",
            "leave the policy at 'auto': one file is then split by example",
        )
    parts = assign([loads[index] for index in filled], workers)
    files = tuple(tuple(filled[i] for i in each) for each in parts)
    counts = facts.counts
    examples = None if counts is None else tuple(sum(counts[i] for i in each) for each in files)
    return Policy("file", reasons, files, examples)


def _why_not_by_file(facts: Facts, workers: int) -> str | None:
    loads = facts.counts or facts.sizes or ()
    filled = [load for load in loads if load]
    if len(filled) < workers:
        return f"{len(filled)} files that are not empty are too few for {workers} workers"
    parts = [sum(filled[i] for i in each) for each in assign(filled, workers)]
    mean = sum(parts) / workers
    if max(parts) > (1 + _UNEVEN) * mean:
        unit = "records" if facts.counts is not None else "bytes"
        return f"files are uneven: a worker would have {max(parts)} {unit}, another {min(parts)}"
    return None
