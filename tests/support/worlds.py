"""The worlds that one program is compared in, and what its tasks report from each.

    with side_by_side(run, tmp_path_factory) as reports:
        [expected] = reports("one device")

One device and two replicas take one process each: they run side by side, and what needs several
processes follows, with the machine for itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import run_script


@dataclasses.dataclass(frozen=True)
class World:
    """Where a program runs.

    Attributes:
        workers: Number of processes.
        replicas: Number of replicas in all of them.
    """

    workers: int
    replicas: int


ALONE = "one device"
WORLDS = {
    ALONE: World(1, 1),
    "two replicas": World(1, 2),
    "two workers": World(2, 2),
    "three workers": World(3, 3),
}
#: Those that must give the numbers of one device.
CLUSTERS = tuple(name for name in WORLDS if name != ALONE)


def reports_of(
    script: Path,
    name: str,
    args: Sequence[str],
    folder: Path,
    timeout: float,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Runs a script in a world and returns what each worker reported, `replicas` among it."""
    world = WORLDS[name]
    run = run_script(
        script, workers=world.workers, args=args, env=env, timeout=timeout, tmp_path=folder
    )
    assert run.code == 0, run.output
    reports = [run.result(f"worker {index}") for index in range(world.workers)]
    assert {report["replicas"] for report in reports} == {world.replicas}
    return reports


@contextlib.contextmanager
def side_by_side(
    run: Callable[[str, Path], Any], folders: pytest.TempPathFactory
) -> Iterator[Callable[[str], Any]]:
    """Starts what one process each runs; yields a function that returns a world's result.

    Args:
        run: Called once for each world that is asked for, with its name and an empty folder.
        folders: Makes the folders.
    """

    def started(name: str) -> concurrent.futures.Future[Any]:
        return pool.submit(run, name, folders.mktemp(name.replace(" ", "-")))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = {name: started(name) for name, world in WORLDS.items() if world.workers == 1}

        def result(name: str) -> Any:
            if name not in results:
                concurrent.futures.wait(results.values())
                results[name] = started(name)
            return results[name].result()

        yield result
