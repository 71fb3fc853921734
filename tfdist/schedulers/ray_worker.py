"""What a worker of Ray Train runs: the program in a process of its own, with Ray's `TF_CONFIG`.

Not in Ray's own process, for three reasons: Ray calls the training function in a thread, where no
handler of SIGTERM can be installed, so that nothing would be saved; it sets `TF_USE_LEGACY_KERAS`,
which makes `tf.keras` Keras 2; and a TensorFlow that aborts takes its process with it.

When the worker dies, however it does, its program gets SIGTERM (Linux), saves and ends.

    python -m tfdist.schedulers.ray_worker PARENT PROGRAM...      # what `run_program` starts
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

from tfdist.errors import EXIT_FAILED
from tfdist.errors import EXIT_USAGE

#: Set by Ray, or left from another cluster.
_UNWANTED = ("TF_USE_LEGACY_KERAS", "CLUSTER_SPEC", "TFDIST_CLUSTER")
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
_ENDED = "ended with exit code"


class ProgramFailedError(RuntimeError):
    """The program of a worker has failed; Ray starts all of them again."""


def run_program(config: Mapping[str, Any]) -> None:
    """Runs the program of one worker to its end.

    Args:
        config: "program": its words, "python" first for that of Ray; "environment": variables;
            "grace_seconds": how long it may take to save after SIGTERM.

    Raises:
        ProgramFailedError: It has ended with another code than 0.
    """
    program = list(config["program"])
    if program[0] == "python":
        program[0] = sys.executable
    environ = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    environ.update(config["environment"])
    environ["PYTHONUNBUFFERED"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdist.schedulers.ray_worker", str(os.getpid()), *program],
        env=environ,
        stdin=subprocess.DEVNULL,
    )
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(config["grace_seconds"])
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if code:
        code = 128 - code if code < 0 else code  # As a shell tells a signal.
        raise ProgramFailedError(f"{' '.join(program[:3])} {_ENDED} {code}")


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a run that has failed: that of a program where one is told."""
    told = []
    seen: BaseException | None = error
    while seen is not None:
        told.append(str(seen))
        seen = seen.__cause__ or seen.__context__
    codes = [int(code) for code in re.findall(rf"{_ENDED} (\d+)", "\n".join(told))]
    if EXIT_USAGE in codes:
        return EXIT_USAGE  # The others only missed the one with the mistake.
    return max(codes, default=EXIT_FAILED)


def _become(parent: int, program: Sequence[str]) -> NoReturn:
    """Becomes the program, which gets SIGTERM when the parent's thread ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(128 + signal.SIGTERM)  # It has died before.
    os.execvp(program[0], list(program))


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
