"""`run.json`: where a run comes from, and what its restarts cost.

    record = Provenance.start("model-dir", {"parameters": {"lr": 0.1}, "seeds": {"global": 1},
                                            "data": {"name": "mnist"}, "topology": {"workers": 2}})
    record.resumed(step=100)         # what the commit says that training goes on from
    record.progress(101)             # at every step: some microseconds
    record.saved(101)                # a state was captured, to be committed
    record.finish()

| section | says |
|---|---|
| `code`, `packages`, `command` | which code ran |
| `data`, `parameters`, `seeds` and what else was given | what it was told |
| `environment`, `machine` | where it ran; secrets are left out |
| `incarnations` | each start: when, where, topology, from which step to which, what it changed |
| `restarts`, `goodput` | steps and seconds lost; useful seconds by all seconds |

One process of a run writes it: the chief. Nothing here ever stops training: what goes wrong is
logged, and a file that cannot be read is kept beside the new one.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import TypeVar

from tfdist.state import facts as plain_facts
from tfdist.state import heartbeat
from tfdist.state import surroundings
from tfdist.state.code_version import code_version
from tfdist.state.filesystem import FileSystem
from tfdist.state.filesystem import file_system

log = logging.getLogger("absl")

RUN = "run.json"
_FORMAT = "tfdist-run"
_VERSION = 1
#: What may differ from one incarnation to the next, and is then said.
_COMPARED = ("code", "packages", "command", "data", "parameters", "seeds")

_Method = TypeVar("_Method", bound=Callable[..., None])


def _never_stops_training(method: _Method) -> _Method:
    @functools.wraps(method)
    def call(self: Provenance, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # A record of a run is not worth the run.
            self._say(error)

    return call  # type: ignore[return-value]


class Provenance:
    """The record of a run; made by `start`.

    Attributes:
        record: The contents of `run.json`, as far as this process knows.
    """

    def __init__(self, files: FileSystem, directory: str):
        self.record: dict[str, Any] = {}
        self._files = files
        self._directory = directory
        self._path = os.path.join(directory, RUN)
        self._heartbeat: heartbeat.Heartbeat | None = None
        self._has_said = False

    @classmethod
    def start(
        cls,
        directory: str | os.PathLike[str],
        facts: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        code_directory: str | None = None,
    ) -> Provenance:
        """Notes the start of an incarnation.

        Args:
            directory: Where `run.json` is or will be: a local path or a URL such as `gs://...`.
            facts: Sections of the caller's: `data`, `parameters`, `seeds`, `topology` and others.
                What looks like a secret is left out.
            environ: The environment; by default that of this process.
            code_directory: Where to ask git; by default where the script is.
        """
        path = os.fspath(directory)
        path = path.rstrip("/") if "://" in path else os.path.abspath(path)
        result = cls(file_system(path), path)
        variables = os.environ if environ is None else environ
        result._start(dict(facts or {}), variables, code_directory)
        return result

    @_never_stops_training
    def resumed(self, step: int, lost_steps: int | None = None) -> None:
        """Notes the step that training goes on from.

        Args:
            step: Number of steps that are done.
            lost_steps: How many steps the incarnation before had done beyond that; by default
                what its heartbeat says.
        """
        entry, before = self._entry, self._before
        entry["resumed_step"] = step
        if before is not None:
            last = before.get("last_step")
            if lost_steps is None and last is not None:
                lost_steps = max(0, last - step)
            before["steps_lost"] = lost_steps
            before["seconds_redone"] = _seconds_redone(before, step, lost_steps)
        self._write()

    def progress(self, step: int) -> None:
        """Notes that `step` steps are done."""
        pulse = self._heartbeat
        if pulse is None:
            return
        try:
            now = time.time()
            if pulse.beat.step < 0:
                pulse.beat.first_time = now
            pulse.beat.step, pulse.beat.step_time = step, now
            pulse.write()
        except OSError as error:
            self._say(error)

    @_never_stops_training
    def saved(self, step: int) -> None:
        """Notes that the state after `step` steps was captured, to be committed."""
        if self._heartbeat is not None:
            beat = self._heartbeat.beat
            beat.saved_step, beat.saved_time = step, time.time()
            beat.saved_number += 1
            self._heartbeat.write()

    @_never_stops_training
    def stop(self, reason: str) -> None:
        """Notes why this incarnation ends before the run does, for example "preempted"."""
        self._end(reason)

    @_never_stops_training
    def finish(self, facts: Mapping[str, Any] | None = None) -> None:
        """Notes that the run has ended.

        Args:
            facts: What to say about it, for example final metrics.
        """
        if facts:
            self.record["result"] = _given(facts)
        self.record["finished"] = _when(time.time())
        self._end("finished")

    @staticmethod
    def read(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
        """Returns the record of a run, up to the last heartbeat; None where there is none.

        Raises:
            ValueError: The file is damaged.
            OSError: It cannot be read.
        """
        path = os.fspath(directory).rstrip("/")
        files = file_system(path)
        try:
            data = files.read(os.path.join(path, RUN))
        except FileNotFoundError:
            return None
        record = _parse(data)
        entry = record["incarnations"][-1]
        if "ended" not in entry:
            beat = heartbeat.read(files, heartbeat.path_of(path, entry["number"]))
            _note_beat(entry, beat)
            _sum_up(record)
        return record

    @property
    def _entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = self.record["incarnations"][-1]
        return entry

    @property
    def _before(self) -> dict[str, Any] | None:
        """The incarnation before, where this one takes up its work."""
        entries = self.record["incarnations"]
        if len(entries) < 2 or entries[-2].get("ended") == "finished":
            return None
        before: dict[str, Any] = entries[-2]
        return before

    @_never_stops_training
    def _start(
        self, facts: dict[str, Any], environ: Mapping[str, str], code_directory: str | None
    ) -> None:
        told, left_out = surroundings.environment(environ)
        topology = facts.pop("topology", None)
        sections = {
            "code": code_version(code_directory),
            "packages": surroundings.packages(),
            "command": surroundings.command_line(sys.argv),
            **_given(facts),
            "environment": told,
            "environment_left_out": left_out,
            "machine": surroundings.machine(),
        }
        self._files.make_directory(self._directory)
        old = self._old()
        entries = old.get("incarnations", [])
        number = entries[-1]["number"] + 1 if entries else 1
        entry: dict[str, Any] = {
            "number": number,
            "started": _when(time.time()),
            "started_seconds": time.time(),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "topology": _given({"topology": topology})["topology"],
        }
        if entries:
            self._close_before(entries[-1])
            changes = {
                name: {"before": old.get(name), "now": sections.get(name)}
                for name in _COMPARED
                if old.get(name) != sections.get(name)
            }
            if changes:
                entry["changes"] = changes
        self.record = {
            "format": _FORMAT,
            "version": _VERSION,
            "run": old.get("run") or secrets.token_hex(8),
            "created": old.get("created") or entry["started"],
            **sections,
            "incarnations": [*entries, entry],
        }
        self._heartbeat = heartbeat.Heartbeat(self._files, self._directory, number)
        self._write()

    def _old(self) -> dict[str, Any]:
        """Returns the record of the incarnations before."""
        try:
            data = self._files.read(self._path)
        except FileNotFoundError:
            return {}
        try:
            return _parse(data)
        except ValueError as error:
            aside = f"{self._path}.damaged-{int(time.time())}"
            self._files.replace(aside, data)
            log.warning("%s is damaged and kept as %s: %s", self._path, aside, error)
            return {}

    def _close_before(self, before: dict[str, Any]) -> None:
        """Takes over what the heartbeat of the incarnation before says."""
        path = heartbeat.path_of(self._directory, before["number"])
        if "ended" not in before:
            _note_beat(before, heartbeat.read(self._files, path))
            before["ended"] = "without a word"
        heartbeat.remove(self._files, path)

    def _end(self, reason: str) -> None:
        entry = self._entry
        if self._heartbeat is not None:
            _note_beat(entry, self._heartbeat.beat)
        entry["ended"] = reason
        entry["ended_seconds"] = time.time()
        self._write()
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    def _write(self) -> None:
        if not self._is_newest():
            return
        if self._heartbeat is not None:
            _note_beat(self._entry, self._heartbeat.beat)
        _sum_up(self.record)
        text = json.dumps(plain_facts.without_nan(plain_facts.plain(self.record)), indent=1)
        self._files.replace(self._path, text.encode())

    def _is_newest(self) -> bool:
        """Whether no later incarnation writes the file: a process may wake up late."""
        try:
            entries = _parse(self._files.read(self._path))["incarnations"]
        except (FileNotFoundError, ValueError):
            return True
        number = self._entry["number"]
        return all(
            entry["number"] < number
            or (entry["number"] == number and entry["process"] == self._entry["process"])
            for entry in entries
        )

    def _say(self, error: Exception) -> None:
        if not self._has_said:
            self._has_said = True
            log.warning("%s is not kept up: %s: %s", self._path, type(error).__name__, error)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data)
        if record["format"] != _FORMAT:
            raise ValueError(f"it is not a {_FORMAT}")
        for entry in record["incarnations"]:
            if not isinstance(entry["number"], int) or "process" not in entry:
                raise ValueError("an incarnation has no number or no process")
        if not record["incarnations"]:
            raise ValueError("it has no incarnations")
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not a {_FORMAT}: {error!r}") from error
    return dict(record)


def _given(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the caller gave, without secrets and as JSON can say it."""
    told = surroundings.without_secrets(facts)
    return {name: _tolerant(value) for name, value in told.items()}


def _tolerant(value: Any) -> Any:
    """Returns a value for JSON: other objects by their text."""
    if isinstance(value, Mapping):
        return {str(key): _tolerant(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tolerant(item) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return plain_facts.without_nan(value)
    return repr(value)


def _note_beat(entry: dict[str, Any], beat: heartbeat.Beat | None) -> None:
    if beat is None or beat.step < 0:
        return
    entry["last_step"] = beat.step
    entry["first_step_seconds"] = beat.first_time
    entry["last_step_seconds"] = beat.step_time
    if beat.saved_step >= 0:
        entry["saved_step"] = beat.saved_step
        entry["saved_number"] = beat.saved_number
        entry["saved_seconds"] = beat.saved_time


def _seconds_redone(before: dict[str, Any], step: int, lost_steps: int | None) -> float | None:
    """Returns how long the lost steps had taken."""
    if not lost_steps or "last_step" not in before:
        return 0.0 if lost_steps == 0 else None
    if before.get("saved_step") == step:
        return max(0.0, before["last_step_seconds"] - before["saved_seconds"])
    done = before["last_step"] - before.get("resumed_step", 0)
    spent = before["last_step_seconds"] - before["first_step_seconds"]
    return spent * min(1.0, lost_steps / max(1, done))


def _sum_up(record: dict[str, Any]) -> None:
    """Writes what all restarts together cost."""
    entries = record["incarnations"]
    count = steps = 0
    redone = down = worked = whole = 0.0
    for before, entry in zip([None, *entries[:-1]], entries, strict=True):
        first = entry.get("first_step_seconds", entry["started_seconds"])
        last = entry.get("last_step_seconds", first)
        worked += last - first
        if before is None or before.get("ended") == "finished":
            # Time between runs is nobody's; the start of a run is part of it.
            whole += last - entry["started_seconds"]
            continue
        alive = before.get("last_step_seconds", before["started_seconds"])
        entry["seconds_down"] = max(0.0, first - alive)
        count += 1
        down += entry["seconds_down"]
        whole += last - alive
        steps += before.get("steps_lost") or 0
        redone += before.get("seconds_redone") or 0.0
    useful = max(0.0, worked - redone)
    record["restarts"] = {
        "count": count,
        "steps_lost": steps,
        "seconds_lost": down + redone,
    }
    record["goodput"] = {
        "useful_seconds": useful,
        "all_seconds": whole,
        "goodput": useful / whole if whole > 0 else None,
    }


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
