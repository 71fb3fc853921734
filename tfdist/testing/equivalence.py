"""`assert_matches_single_device`: a training in a cluster equals the one on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import ConfigError
from tfdist.testing import program
from tfdist.testing import records
from tfdist.testing import shipping
from tfdist.testing.differences import Difference
from tfdist.testing.differences import Tolerance
from tfdist.testing.differences import excessive
from tfdist.testing.differences import largest
from tfdist.testing.worlds import Trained
from tfdist.testing.worlds import World
from tfdist.testing.worlds import train

_SEED = 1
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Report:
    """What was compared, where both trainings match.

    Attributes:
        world: Where it was compared with one device, for example "2 workers".
        steps: Number of training steps.
        variables: Number of variables of model and optimizer.
        largest_variable_difference: The largest difference of any variable after training, relative
            to the largest magnitude in that variable.
        largest_history_difference: The same of losses and metrics.
        seconds: How long both trainings took, start of processes included.
    """

    world: str
    steps: int
    variables: int
    largest_variable_difference: float
    largest_history_difference: float
    seconds: float


def assert_matches_single_device(
    model_fn: Callable[[], Any],
    dataset_fn: Callable[[], Any],
    *,
    workers: int = 2,
    replicas: int | None = None,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    timeout: float = 300.0,
    **fit_arguments: Any,
) -> Report:
    """Asserts that a training in a real local cluster ends as the same training on one device.

    Trains twice, on the CPU, in processes of their own: by plain Keras, and by `workers` processes
    of `tfdist run`. Both start from the weights of the first. Compared are the variables of model
    and optimizer after training, and the History; with a difference, the first step after which a
    variable differs is looked for.

    What draws random numbers in a step (Dropout, augmentation) draws other ones on every replica,
    and BatchNormalization without `synchronized=True` normalises with the statistics of a replica:
    leave them out of the model that you compare.

    Args:
        model_fn: Returns a compiled Keras model, without arguments; called in the scope of the
            strategy. Any function, also a lambda or a closure.
        dataset_fn: Returns what `fit` takes as `x`, for example a `tf.data.Dataset` of global
            batches, or a tuple `(x, y)` or `(x, y, sample_weight)` of arrays. Called in every
            process; it must return the same data each time.
        workers: Number of worker processes, one replica each.
        replicas: Number of local replicas of one process, in place of workers.
        epochs: As for `fit`.
        steps_per_epoch: As for `fit`.
        rtol: Largest difference, relative to the largest magnitude in the variable.
        atol: Largest difference beside that.
        timeout: Seconds for everything.
        **fit_arguments: More arguments of `fit`, for example `validation_data`, or `batch_size`
            for arrays.

    Returns:
        How large the differences were.

    Raises:
        AssertionError: They differ: names the first step and variable. Or one of the trainings
            failed, or both were not done in time: shows the error or the last lines of output.
        ConfigError: An argument cannot be right, or the functions cannot be sent to a process.
        UnsupportedError: cloudpickle is not installed.

    Example:
        >>> def make_model():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     model.compile("adam", "mse")
        ...     return model
        >>> assert_matches_single_device(make_model, lambda: (x, y), workers=2, batch_size=8)
    """
    began = time.monotonic()
    world = _world(workers, replicas)
    tolerance = Tolerance(rtol, atol)
    arguments = {**fit_arguments, "epochs": epochs, "steps_per_epoch": steps_per_epoch}
    payload = shipping.dumps(
        {"model_fn": model_fn, "dataset_fn": dataset_fn, "fit_arguments": arguments},
        functions=(model_fn, dataset_fn, *map(type, arguments.get("callbacks") or ())),
    )
    with _folder() as directory:

        def train_both(name: str, after: int = 0, until: int | None = None) -> Any:
            folder = Path(directory, name)
            _write_job(folder, payload, after, until)
            [alone] = train(World("single"), folder, began + timeout)
            return alone, train(world, folder, began + timeout)

        alone, tasks = train_both("first")
        _assert_same_variables(alone, tasks, world)
        variables = [_apart(alone.variables, task.variables, tolerance) for task in tasks]
        histories = [excessive(_history(alone), _history(task), tolerance) for task in tasks]
        if not any(variables) and not any(histories):
            return Report(
                world=str(world),
                steps=alone.facts["steps"],
                variables=len(alone.variables),
                largest_variable_difference=max(
                    largest(alone.variables, _named_as(alone.variables, task.variables))
                    for task in tasks
                ),
                largest_history_difference=max(
                    largest(_history(alone), _history(task)) for task in tasks
                ),
                seconds=time.monotonic() - began,
            )
        first = _first_step(alone, tasks[0], tolerance)
        if first is not None and first.is_range:
            # The records of a long training have gaps: run it again and record what lies between,
            # if there is time; what was found says enough without.
            with contextlib.suppress(AssertionError):
                found = train_both("second", first.after, first.step)
                first = _first_step(found[0], found[1][0], tolerance, first.after) or first
    raise AssertionError(
        _message(world, alone, first, max(variables, key=len), max(histories, key=len))
    )


def _folder() -> Any:
    # Tasks that are being ended may still write.
    return tempfile.TemporaryDirectory(prefix="tfdist-testing-", ignore_cleanup_errors=True)


@dataclasses.dataclass(frozen=True)
class _FirstStep:
    """The first recorded step that differs, and the one recorded before it."""

    step: int
    after: int
    differences: list[Difference]

    @property
    def is_range(self) -> bool:
        return self.step > self.after + 1


def _world(workers: int, replicas: int | None) -> World:
    count = workers if replicas is None else replicas
    name = "workers" if replicas is None else "replicas"
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name} to be at least 1", repr(count), f"pass {name}=2, for example")
    return World(name, count)


def _write_job(folder: Path, payload: bytes, after: int, until: int | None) -> None:
    folder.mkdir()
    (folder / program.FUNCTIONS).write_bytes(payload)
    job = {
        "sys_path": [str(Path(path).resolve()) for path in sys.path],
        "seed": _SEED,
        "budget": records.BUDGET_BYTES,
        "after": after,
        "until": until,
    }
    (folder / program.JOB).write_text(json.dumps(job), encoding="utf-8")


def _history(task: Trained) -> dict[str, Any]:
    history: dict[str, Any] = task.facts["history"]
    return history


def _assert_same_variables(alone: Trained, tasks: list[Trained], world: World) -> None:
    expected = [np.shape(value) for value in alone.variables.values()]
    for task in tasks:
        received = [np.shape(value) for value in task.variables.values()]
        if expected != received:
            raise AssertionError(
                f"model_fn builds another model on {world} than on one device: variables of shapes "
                f"{received} instead of {expected}"
            )


def _apart(
    reference: dict[str, Any], values: dict[str, Any], tolerance: Tolerance
) -> list[Difference]:
    return excessive(reference, _named_as(reference, values), tolerance)


def _named_as(reference: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    # By position: the name of an optimizer's variable depends on the scope it was built in.
    return dict(zip(reference, values.values(), strict=True))


def _first_step(
    alone: Trained, task: Trained, tolerance: Tolerance, after: int = 0
) -> _FirstStep | None:
    recorded = [n for n in alone.steps.numbers() if n in set(task.steps.numbers())]
    for step in recorded:
        found = _apart(alone.steps.load(step), task.steps.load(step), tolerance)
        if found:
            return _FirstStep(step, after, found)
        after = step
    return None


def _message(
    world: World,
    alone: Trained,
    first: _FirstStep | None,
    variables: list[Difference],
    histories: list[Difference],
) -> str:
    total = alone.facts["steps"]
    lines = [f"{world} do not train as one device does."]
    if first is not None:
        where = (
            f"between step {first.after + 1} and step {first.step}"
            if first.is_range
            else f"in step {first.step}"
        )
        lines.append(f"The first difference is {where} of {total}, in {first.differences[0]}")
        lines += [f"  also {each}" for each in first.differences[1:_SHOWN]]
        more = len(first.differences) - _SHOWN
        if more > 0:
            lines.append(f"  and {more} more variables")
    elif variables:
        lines.append(
            f"In the steps that task 0 has recorded, of {total}, nothing differs; at the end "
            f"{variables[0]}"
        )
    else:
        lines.append(f"All variables are equal in each of {total} steps; the History is not.")
    for each in histories[:_SHOWN]:
        lines.append(f"History of {each}")
    if variables:
        worst = max(variables, key=lambda each: each.relative)
        lines.append(f"At the end {len(variables)} variables differ, most of all {worst}")
    if any(math.isinf(each.absolute) for each in [*variables, *histories]):
        lines.append("A value is not finite, or missing, on one side only.")
    return "\n".join([*lines, *_hints(alone, only_history=not variables)])


def _hints(alone: Trained, only_history: bool) -> list[str]:
    """Returns likely causes, from the kinds of layers in the model."""
    hints = []
    if random := alone.facts["random"]:
        hints.append(
            f"{', '.join(random[:_SHOWN])}: draws other random numbers on every replica; leave it "
            "out (rate 0) to compare"
        )
    if statistics := alone.facts["statistics"]:
        hints.append(
            f"{', '.join(statistics[:_SHOWN])}: BatchNormalization of a replica's own examples; "
            "pass synchronized=True"
        )
    if only_history:
        hints.append("a metric whose result is no sum or mean over examples, or that counts steps")
    elif not hints:
        hints += [
            "a layer, loss or train_step that takes a mean, a maximum or a sum over the batch it "
            "sees, which is one replica's part",
            "code that asks for the replica or the worker it runs on",
            "dataset_fn does not return the same data every time (an unseeded shuffle of its own)",
        ]
    return ["Likely causes:", *(f"  - {hint}" for hint in hints)]
