"""A real Slurm of several nodes on this machine, in a directory of its own.

    with SlurmCluster() as slurm:
        job = slurm.submit(script, tmp_path)
        assert slurm.wait(job, 60) == ("COMPLETED", 0)

munged, slurmctld and one slurmd for each node run as processes of the caller, with ports and files
of their own, and are gone at the end. Debian's packages are enough (apt-get install slurm-wlm).
The nodes are one machine: their names resolve nowhere, and their tasks must not share ports.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def missing() -> str:
    """Returns why no cluster can be started here, or ""."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurm-wlm"
    return "" if os.geteuid() == 0 else "slurmd starts tasks as root only"


class SlurmCluster:
    """Starts the daemons on entry, ends them and all they started on exit.

    Args:
        nodes: Number of nodes, named n1, n2, ...
        cpus: Processors that each node claims to have.
        gpus: GPUs that each node claims to have.
    """

    def __init__(self, nodes: int = 2, cpus: int = 4, gpus: int = 2):
        self._names = [f"n{number + 1}" for number in range(nodes)]
        self._cpus = cpus
        self._gpus = gpus
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.directory = Path()

    def __enter__(self) -> SlurmCluster:
        # A socket's path is short, and pytest's directories are not.
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        below = [child for daemon in self._daemons for child in _children(daemon.pid)]
        # Steps are started by slurmstepd, which lives on without its slurmd.
        steps = [p for p in psutil.process_iter() if _mentions(p, str(self.directory))]
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in [*below, *steps]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def environ(self) -> dict[str, str]:
        """Variables for the commands of Slurm, without those of another cluster."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        for name in ("TF_CONFIG", "CLUSTER_SPEC", "TFDIST_CLUSTER"):
            kept.pop(name, None)
        return {**kept, "PATH": _PATH, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def submit(self, script: str, directory: Path, env: Mapping[str, str] | None = None) -> int:
        """Submits a batch script in a directory and returns the number of the job."""
        path = directory / "job.sh"
        path.write_text(script, encoding="utf-8")
        told = self.run("sbatch", "--parsable", str(path), directory=directory, env=env)
        return int(told.strip())

    def run(
        self, *command: str, directory: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        """Runs a command of Slurm and returns what it prints."""
        done = subprocess.run(
            command,
            cwd=directory,
            env={**self.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def field(self, job: int, name: str) -> str:
        """Returns a field of `scontrol show job`, of the first component."""
        shown = self.run("scontrol", "show", "job", str(job), "-o")
        found = re.search(rf"\b{name}=(\S+)", shown)
        return found[1] if found else ""

    def wait(self, job: int, timeout: float) -> tuple[str, int]:
        """Returns state and exit code of a job that has ended.

        Raises:
            AssertionError: It has not ended after `timeout` seconds.
        """
        self.wait_for(job, _FINAL, timeout)
        return self.field(job, "JobState"), int(self.field(job, "ExitCode").partition(":")[0])

    def wait_for(self, job: int, states: tuple[str, ...], timeout: float) -> None:
        """Waits until a job is in one of some states."""
        deadline = time.monotonic() + timeout
        while (state := self.field(job, "JobState")) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """Returns the last lines of the daemons, for a failing test's message."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in sorted(self.directory.glob("*.log"))
        )

    def _start(self) -> None:
        place = self.directory
        place.chmod(0o755)
        key = place / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        sock = place / "munge.socket"
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--socket={sock}",
            f"--key-file={key}",
            f"--pid-file={place / 'munge.pid'}",
            f"--log-file={place / 'munge.log'}",
            f"--seed-file={place / 'munge.seed'}",
        )
        self._until(sock.exists, 10, "munged has made no socket")
        (place / "slurm.conf").write_text(self._configuration(sock), encoding="utf-8")
        devices = [place / f"gpu{number}" for number in range(self._gpus)]  # Nobody opens them.
        for device in devices:
            os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # As /dev/null.
        (place / "gres.conf").write_text(
            f"NodeName={','.join(self._names)} Name=gpu File={','.join(map(str, devices))}\n",
            encoding="utf-8",
        )
        (place / "state").mkdir()
        self._daemon("slurmctld", "-D", "-i")
        for name in self._names:
            (place / name).mkdir()
            self._daemon("slurmd", "-D", "-N", name)
        self._until(self._is_up, 30, "the nodes are not up")

    def _daemon(self, *command: str) -> None:
        with (self.directory / f"{command[0]}-{len(self._daemons)}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environ,
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            )

    def _until(self, condition: Callable[[], bool], timeout: float, failure: str) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"{failure}\n{self.logs()}"
            time.sleep(0.1)

    def _is_up(self) -> bool:
        ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
        assert not ended, f"{ended} has ended\n{self.logs()}"
        told = subprocess.run(
            ("sinfo", "-h", "-N", "-o", "%t"), env=self.environ, capture_output=True, text=True
        )
        return told.stdout.split() == ["idle"] * len(self._names)

    def _configuration(self, sock: Path) -> str:
        place = self.directory
        ports = _free_ports(1 + len(self._names))
        nodes = [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={self._cpus} RealMemory=4000 Gres=gpu:{self._gpus} State=UNKNOWN"
            for name, port in zip(self._names, ports[1:], strict=True)
        ]
        return "\n".join(
            [
                "ClusterName=tests",
                "SlurmctldHost=localhost",
                "SlurmUser=root",
                "SlurmdUser=root",
                "AuthType=auth/munge",
                "CryptoType=crypto/munge",
                # A job is not started again before its last credential has expired.
                f"AuthInfo=socket={sock},cred_expire=5",
                f"SlurmctldPort={ports[0]}",
                f"StateSaveLocation={place / 'state'}",
                f"SlurmdSpoolDir={place}/%n",
                f"SlurmctldPidFile={place / 'slurmctld.pid'}",
                f"SlurmdPidFile={place}/%n.pid",
                "ProctrackType=proctrack/linuxproc",
                "TaskPlugin=task/none",
                "SwitchType=switch/none",
                "MpiDefault=none",
                "GresTypes=gpu",
                "SelectType=select/cons_tres",
                "SelectTypeParameters=CR_Core",
                "SlurmdParameters=config_overrides",
                "JobAcctGatherType=jobacct_gather/none",
                "AccountingStorageType=accounting_storage/none",
                "JobCompType=jobcomp/none",
                "ReturnToService=2",
                "KillWait=30",
                "SchedulerType=sched/backfill",
                "SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0",
                *nodes,
                f"PartitionName=main Nodes={','.join(self._names)} Default=YES MaxTime=60 State=UP",
                "",
            ]
        )


def _end_with_parent() -> None:
    """Has a daemon get SIGTERM when the tests are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _mentions(process: psutil.Process, text: str) -> bool:
    try:
        return text in process.environ().get("SLURM_CONF", "")
    except psutil.Error:
        return False
