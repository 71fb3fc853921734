"""How data is split over workers, in words."""

from __future__ import annotations

from tfdist.data.parts import Place
from tfdist.data.parts import spread
from tfdist.data.policy import Policy
from tfdist.data.sharded import Sharded

_SHOWN = 16


def report(data: Sharded, workers: int) -> str:
    """Returns how `data` is split over a number of workers, and why: lines of text."""
    policy = data.policy_for(workers)
    counts = examples_of_workers(data, policy, workers)
    lines = [_size(data), f"split over {workers} worker{'s' * (workers > 1)}: by {policy.name}"]
    if policy.name == "given":
        lines[-1] = f"split over {workers} worker{'s' * (workers > 1)}: as given"
    lines += [f"  because {reason}" for reason in policy.reasons]
    for worker in range(min(workers, _SHOWN)):
        line = f"  worker {worker}: "
        line += "as many examples as it finds" if counts is None else f"{counts[worker]} examples"
        if policy.files is not None:
            line += f" of {len(policy.files[worker])} files"
        if counts is not None and not counts[worker]:
            line += " (it reads nothing: there are fewer examples than workers)"
        lines.append(line)
    if workers > _SHOWN:
        lines.append(f"  and {workers - _SHOWN} more workers")
    lines.append(_order(data, policy))
    seeks = data.facts.is_indexed and policy.name == "example"
    how = "goes to the next example at once" if seeks else "may have to read up to its place"
    lines.append(f"restart: {how}")
    if data.service is not None:
        why = data.why_no_service
        lines.append(f"made here: {why}" if why else f"made by the data service: {data.service}")
    return "\n".join(lines)


def examples_of_workers(data: Sharded, policy: Policy, workers: int) -> list[int] | None:
    """Returns the examples of a pass that each worker takes, or None where that is not known."""
    if policy.name != "example":
        if policy.examples is None:
            return None
        taken = list(policy.examples)
        sizes = [sum(each) for each in spread(data.global_batch_size, Place(workers))]
        if data.remainder == "drop":
            most = min(count // size for count, size in zip(taken, sizes, strict=True))
            taken = [most * size for size in sizes]
        return taken
    examples, batches = data.num_examples, data.num_batches
    if examples is None or batches is None:
        return None
    size, place = data.global_batch_size, Place(workers)
    whole = examples // size
    full, last = (
        [sum(each) for each in spread(rows, place)] for rows in (size, examples - whole * size)
    )
    if data.remainder == "drop":
        last = [0] * workers
    return [whole * a + b for a, b in zip(full, last, strict=True)]


def _size(data: Sharded) -> str:
    size, examples, batches = data.global_batch_size, data.num_examples, data.num_batches
    if examples is None or batches is None:
        return f"{data.facts.kind}: examples not counted, in global batches of {size}"
    text = f"{data.facts.kind}: {examples} examples in {batches} global batches of {size}"
    rest = examples % size
    if not rest:
        return text
    what = {
        "pad": f"the last holds {rest} and is padded where shapes must stay the same",
        "partial": f"the last holds {rest}",
        "drop": f"{rest} examples of every pass are left out",
    }
    return f"{text}; {what[data.remainder]}"


def _order(data: Sharded, policy: Policy) -> str:
    if not data.shuffle:
        return "order: as the source has it, in every pass"
    seed = "a seed drawn for the run" if data.seed is None else f"seed {data.seed}"
    if data.facts.is_indexed and policy.name == "example":
        return f"order: of all examples, new in every pass, from {seed}, for any number of workers"
    return f"order: from shuffle buffers, seeded anew in every pass, from {seed}"
