"""What the tasks print: whole lines, each under its task's name, on the console and in a log.

One thread (`Pump`) reads all pipes and is the only writer of the console, so lines of different
tasks never mix, and a console that does not read (a stopped pager) holds up the tasks but not the
supervision of them.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import os
import select
import selectors
import stat
import threading
import time
from collections.abc import Callable
from io import FileIO

from tfdist.cluster.topology import Task

STDOUT = 1
STDERR = 2
#: A line longer than this many bytes is cut, so that output without line ends needs no memory.
MAX_LINE = 256 * 1024
#: Lines that are kept to be shown again when the task fails, and bytes kept of each.
TAIL_LINES = 15
TAIL_LINE = 2000
#: A progress bar that never ends its line is shown every so many seconds.
REFRESH_SECONDS = 5.0

_READ = 64 * 1024
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class LineAssembler:
    r"""Cuts a stream of bytes into lines.

    A carriage return rewrites its line, as progress bars do: only what was written last is kept,
    and of a line that is rewritten for long the current state is given out every few seconds.

    Args:
        clock: Seconds, never going back.

    Example:
        >>> LineAssembler().feed(b"10%\r55%\r100%\ndone")
        [b'100%']
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._rest = bytearray()
        self._shown_at = clock()

    def feed(self, data: bytes) -> list[bytes]:
        """Adds `data` and returns the lines it completes, without their line ends."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest = bytearray(rest)
            if b"\r" in data or b"\r" in lines[0]:
                lines = [_last_state(line) for line in lines]
        else:
            self._rest += rest
        if b"\r" in rest:
            lines += self._refresh()
        while len(self._rest) > MAX_LINE:
            lines.append(bytes(self._rest[:MAX_LINE]))
            del self._rest[:MAX_LINE]
        if lines:
            self._shown_at = self._clock()
        return lines

    def finish(self) -> list[bytes]:
        """Returns the last line if it has no line end."""
        state = _last_state(bytes(self._rest))
        self._rest.clear()
        return [state] if state else []

    def _refresh(self) -> list[bytes]:
        # The carriage return at the very end stays: a line feed may follow.
        ended = self._rest.endswith(b"\r")
        state = _last_state(bytes(self._rest))
        self._rest = bytearray(state + b"\r" * ended)
        due = state and self._clock() - self._shown_at >= REFRESH_SECONDS
        return [state] if due else []


def _last_state(line: bytes) -> bytes:
    state = line.rstrip(b"\r").rpartition(b"\r")[2]
    # Spaces over the whole line are how a bar wipes itself out.
    return state if b"\r" not in line or state.strip() else b""


class TaskOutput:
    """The output of one task: how it is shown, where it is logged, how it ended.

    Args:
        task: The task.
        number: Position among all tasks of the job; chooses the colour.
        labelled: Whether lines carry the task's name. Without, bytes are shown as they come.
        log: Unbuffered file that gets every line, or None.
    """

    def __init__(self, task: Task, number: int, labelled: bool, log: FileIO | None):
        self.task = task
        self.labelled = labelled
        self._number = number
        self._log = log
        self._tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> list[str]:
        """The last lines, standard output and error together."""
        return [line.decode("utf-8", "replace") for line in list(self._tail)]

    def label(self, colour: bool) -> bytes:
        """What stands before each line."""
        if not self.labelled:
            return b""
        text = f"[{self.task}]"
        if colour:
            text = f"\x1b[{_COLOURS[self._number % len(_COLOURS)]}m{text}\x1b[0m"
        return f"{text} ".encode()

    def begin(self, number: int) -> None:
        """Notes in a log that has lines already that a new start of the job follows."""
        with contextlib.suppress(OSError):
            if self._log is not None and self._log.seek(0, os.SEEK_END) > 0:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                self._log.write(f"----- {self.task}, start {number}, {now} -----\n".encode())

    def record(self, lines: list[bytes]) -> str | None:
        """Keeps `lines` in log and tail; returns a sentence if the log cannot be written."""
        self._tail.extend(line[:TAIL_LINE] for line in lines[-TAIL_LINES:])
        if self._log is None:
            return None
        try:
            self._log.write(_utf8(b"".join(line + b"\n" for line in lines)))
        except OSError as error:
            self._log = None
            return f"the log of {self.task} ends here: {error}"
        return None


class _Stream:
    """One pipe of one task."""

    def __init__(self, read_end: int, sink: int, output: TaskOutput, label: bytes):
        self.read_end = read_end
        self.sink = sink
        self.output = output
        self._label = label
        self._lines = LineAssembler()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def receive(self, data: bytes) -> tuple[bytes, str | None]:
        """Takes what was read (nothing at the end); returns what to show, and a complaint."""
        lines = self._lines.feed(data) if data else self._lines.finish()
        complaint = self.output.record(lines) if lines else None
        if self.output.labelled:
            shown = _utf8(b"".join(b"%b%b\n" % (self._label, line) for line in lines))
        else:
            shown = self._decoder.decode(data, final=not data).encode()
        return shown, complaint


def _utf8(data: bytes) -> bytes:
    return data.decode("utf-8", "replace").encode()


class Pump:
    """Moves the output of all tasks to the console, in a thread of its own.

    Args:
        on_broken_console: Called once, in that thread, when nobody reads the console any more.
    """

    def __init__(self, on_broken_console: Callable[[], None]):
        self._on_broken_console = on_broken_console
        self._broken: set[int] = set()
        self._clean = {STDOUT: True, STDERR: True}  # whether the sink is at a line's start
        self._colour = {sink: _wants_colour(sink) for sink in (STDOUT, STDERR)}
        self._one_console = _same_file(STDOUT, STDERR)
        self._lock = threading.Lock()
        self._added: list[_Stream] = []
        self._said: list[str] = []
        self._abandon = False
        self._open = 0
        self._idle = threading.Event()
        self._idle.set()
        #: Bytes read so far; shows whether there is progress.
        self.received = 0
        #: Whether the thread is waiting for a console that does not read.
        self.writing = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tfdist-output", daemon=True)
        self._thread.start()

    def add(self, output: TaskOutput, stdout: int, stderr: int) -> None:
        """Takes over the reading ends of a task's pipes."""
        with self._lock:
            for read_end, sink in ((stdout, STDOUT), (stderr, STDERR)):
                os.set_blocking(read_end, False)
                label = output.label(self._colour[sink])
                self._added.append(_Stream(read_end, sink, output, label))
                self._open += 1
            self._idle.clear()
        self._wake()

    def say(self, text: str) -> None:
        """Shows a line of the launcher's own on standard error."""
        with self._lock:
            self._said.append(text)
            self._idle.clear()
        self._wake()

    def abandon(self) -> None:
        """Closes the pipes that are still open, whoever holds their other ends."""
        with self._lock:
            self._abandon = True
        self._wake()

    def wait(self, seconds: float) -> bool:
        """Waits until all is shown and all pipes have ended; returns whether that is so."""
        return self._idle.wait(seconds)

    def close(self) -> None:
        """Ends the thread, unless it hangs on a console that does not read."""
        self._closed = True
        self._wake()
        self._thread.join(0.1)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake_read, 4096)
                else:
                    self._read(key.data)
            # After the pipes: what a task printed before it ended comes before the news of its end.
            with self._lock:
                added, self._added = self._added, []
                said, self._said = self._said, []
                abandon, self._abandon = self._abandon, False
            for stream in added:
                self._selector.register(stream.read_end, selectors.EVENT_READ, stream)
            for text in said:
                self._show_own(text)
            if abandon:
                for key in list(self._selector.get_map().values()):
                    if key.data is not None:
                        self._finish(key.data)
            with self._lock:
                if not (self._open or self._added or self._said):
                    self._idle.set()
        self._selector.close()
        os.close(self._wake_read)

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.read_end, _READ)
        except BlockingIOError:
            return
        if not data:
            self._finish(stream)
            return
        self.received += len(data)
        self._show(stream, data)

    def _finish(self, stream: _Stream) -> None:
        self._selector.unregister(stream.read_end)
        os.close(stream.read_end)
        self._show(stream, b"")
        with self._lock:
            self._open -= 1

    def _show(self, stream: _Stream, data: bytes) -> None:
        shown, complaint = stream.receive(data)
        self._write(stream.sink, shown)
        if complaint is not None:
            self._show_own(complaint)

    def _show_own(self, text: str) -> None:
        clean = self._clean[STDERR] and (self._clean[STDOUT] or not self._one_console)
        start = "" if clean else "\n"
        self._write(STDERR, f"{start}{text}\n".encode("utf-8", "replace"))

    def _write(self, sink: int, data: bytes) -> None:
        if not data or sink in self._broken:
            return
        self._clean[sink] = data.endswith(b"\n")
        if self._one_console and self._clean[sink]:
            self._clean = {STDOUT: True, STDERR: True}
        rest = memoryview(data)
        self.writing = True
        while rest:
            try:
                rest = rest[os.write(sink, rest) :]
            except BlockingIOError:
                select.select([], [sink], [])
            except OSError:
                # The reader has gone (`| head`) or the terminal has. The logs go on.
                if not self._broken:
                    self._on_broken_console()
                self._broken.add(sink)
                break
        self.writing = False


def _wants_colour(sink: int) -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and os.isatty(sink)


def _same_file(one: int, other: int) -> bool:
    first, second = os.fstat(one), os.fstat(other)
    same = (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)
    return same and not stat.S_ISREG(first.st_mode)
