"""Which code runs: the commit of the repository, and what was changed since.

Asked of `git` itself, a few seconds at most. A machine without git, or code outside of a
repository, gives a reason instead, and the checksum of the script in any case.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from typing import Any

_SECONDS = 5.0
_MOST_FILES = 100
_CHUNK = 1 << 20
_GIT = (
    "git",
    # What a repository may have configured to run is not run.
    *("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.pager=cat"),
)


def code_version(directory: str | None = None, seconds: float = _SECONDS) -> dict[str, Any]:
    """Returns what is known of the code that runs.

    Args:
        directory: Where the code is; by default that of the script.
        seconds: How long git may take in all.

    Returns:
        `script` and `script_sha256`, where a script runs. `commit`, `branch`, `dirty` (whether
        tracked files differ from the commit or new ones are not ignored), `changed` (their names)
        and `diff_sha256` (of the difference in tracked files); or `reason`.
    """
    script = os.path.abspath(getattr(sys.modules.get("__main__"), "__file__", "") or "")
    facts: dict[str, Any] = {}
    if os.path.isfile(script):
        facts["script"] = script
        with open(script, "rb") as file:
            facts["script_sha256"] = hashlib.sha256(file.read()).hexdigest()
    where = directory or os.path.dirname(facts.get("script", "")) or os.getcwd()
    deadline = time.monotonic() + seconds
    try:
        commit = _git(where, deadline, "rev-parse", "HEAD").decode().strip()
        branch = _git(where, deadline, "rev-parse", "--abbrev-ref", "HEAD").decode().strip()
        listed = _git(where, deadline, "status", "--porcelain=v1", "-z", "--no-renames")
        changed = [os.fsdecode(entry[3:]) for entry in listed.split(b"\0") if entry]
        facts |= {"commit": commit, "branch": branch, "dirty": bool(changed)}
        if changed:
            facts["changed"] = changed[:_MOST_FILES]
            facts["diff_sha256"] = _diff(where, deadline)
    except FileNotFoundError:
        facts["reason"] = "git is not installed"
    except subprocess.TimeoutExpired:
        facts["reason"] = f"git took more than {seconds:g} s"
    except subprocess.CalledProcessError as error:
        said = os.fsdecode(error.stderr or b"").strip().splitlines()
        facts["reason"] = said[0] if said else f"git ended with {error.returncode}"
    except OSError as error:
        facts["reason"] = f"git could not be run: {error}"
    return facts


def _environ() -> dict[str, str]:
    return {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def _git(where: str, deadline: float, *arguments: str) -> bytes:
    return subprocess.run(
        [*_GIT, "-C", where, *arguments],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=_environ(),
        timeout=max(0.1, deadline - time.monotonic()),
    ).stdout


def _diff(where: str, deadline: float) -> str:
    """Returns the checksum of the difference, which may be long, without keeping it."""
    command = [*_GIT, "-C", where, "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD"]
    checksum = hashlib.sha256()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=_environ(),
    ) as process:
        assert process.stdout is not None
        while piece := process.stdout.read(_CHUNK):
            checksum.update(piece)
            if time.monotonic() > deadline:
                process.kill()
                raise subprocess.TimeoutExpired(command, _SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return checksum.hexdigest()
