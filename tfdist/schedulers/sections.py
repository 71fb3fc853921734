"""The sections `kubernetes:`, `slurm:` and `ray:` of a config: plain values without any rule.

Each is complete by itself; what it leaves out of roles and image is taken from `vertex:` where
the config has it (`tfdist.schedulers.plan`). The rules are in the module of each scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Literal

from tfdist.cluster.topology import ROLES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """The tasks of one role, one process each.

    Attributes:
        count: How many.
        cpus: Processors of each; None is that of the section.
        memory: Memory of each, for example "16Gi" (Kubernetes) or "16G" (Slurm); None is that of
            the section.
        gpus: GPUs of each; None is that of the section for tasks that train, else 0.
    """

    count: int = 1
    cpus: int | float | None = None
    memory: str | None = None
    gpus: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """The tasks of a job; a role that is not there is None.

    Attributes:
        chief: Writes what only one may write; under parameter servers it coordinates. Without it
            worker 0 is chief.
        worker: Tasks that train beside the chief.
        ps: Parameter servers.
        evaluator: Evaluates checkpoints beside the training.
    """

    chief: Role | None = None
    worker: Role | None = None
    ps: Role | None = None
    evaluator: Role | None = None

    def __iter__(self) -> Iterator[tuple[str, Role]]:
        """Yields name and role of those that are there."""
        for name in ROLES:
            role = getattr(self, name)
            if role is not None:
                yield name, role


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toleration:
    """A taint of nodes that pods put up with; fields as in Kubernetes."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Volume:
    """A persistent volume that all pods mount.

    Attributes:
        claim: Name of the PersistentVolumeClaim. Pods on several nodes need one of access mode
            ReadWriteMany.
        mount_path: Where it appears in the container.
        sub_path: Directory of the volume to mount instead of all of it.
        read_only: Whether it may not be written.
    """

    claim: str
    mount_path: str
    sub_path: str | None = None
    read_only: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """A job on Kubernetes.

    Attributes:
        name: Name of the job and its service; by default that of the config's file.
        kind: What is rendered where `--kind` does not say it.
        namespace: Or None for that of the context.
        image: Container image of every pod.
        image_pull_policy: Or None for the cluster's choice.
        image_pull_secrets: Names of secrets with registry credentials.
        service_account: Name of the service account of the pods.
        roles: Tasks and their resources; by default those of `vertex.pools`, else one chief.
        cpus: Processors that each pod asks for.
        memory: Memory of each pod, requested and at most, for example "16Gi".
        gpus: GPUs of each pod that trains.
        gpu_resource: Name of the resource that GPUs are.
        node_selector: Labels that nodes must have.
        tolerations: Taints of nodes that do not matter.
        volumes: Volumes that every pod mounts: results must outlive their pods.
        shared_memory: Size of /dev/shm, for example "2Gi", out of the pod's memory; None is the
            64 MiB of the container runtime.
        fs_group: Group that volumes belong to, so that an image with a user of its own can write.
        env: Environment variables of every pod.
        labels: Labels of the job and its pods.
        annotations: Annotations of the job and its pods.
        priority_class: Or None for the cluster's default.
        queue: Name of a queue of Kueue.
        command: What runs in the containers, whatever the image's entry point is.
        args: Its arguments; by default the config by value.
        max_restarts: Starts after a failure; after a preemption any number.
        grace_seconds: Time that a pod has from SIGTERM on, to save.
        timeout_seconds: Longest run, or None.
        keep_seconds: How long the ended job stays, or None for ever.
        port: Port on which tasks meet.
        start_seconds: How long tasks wait for each other: nodes may have to be started first.
        restart_policy: Of a TFJob: "ExitCode" starts only tasks again that end with 128 or more,
            "OnFailure" all that fail.
    """

    name: str = ""
    kind: Literal["jobset", "job", "tfjob"] = "jobset"
    namespace: str | None = None
    image: str | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: tuple[str, ...] = ()
    service_account: str | None = None
    roles: Roles | None = None
    cpus: int | float | None = None
    memory: str | None = None
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    volumes: tuple[Volume, ...] = ()
    shared_memory: str | None = None
    fs_group: int | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    priority_class: str | None = None
    queue: str | None = None
    command: tuple[str, ...] = ("python", "-m", "trainer.task")
    args: tuple[str, ...] = ()
    max_restarts: int = 3
    grace_seconds: int = 120
    timeout_seconds: int | None = None
    keep_seconds: int | None = None
    port: int = 2222
    start_seconds: int = 1800
    restart_policy: Literal["ExitCode", "OnFailure"] = "ExitCode"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm:
    """A batch job of Slurm.

    Attributes:
        name: Name of the job; by default that of the config's file.
        partition: Or None for the default one.
        account: Account that is charged.
        qos: Quality of service.
        constraint: Features that nodes must have.
        reservation: Name of a reservation.
        time_limit: For example "90m", "2h" or "7d", or as sbatch takes it ("2:00:00"). A text
            always: YAML reads 2:00:00 without quotes as the number 7200. None is the partition's.
        roles: Tasks and their resources; by default those of `vertex.pools`, else one chief.
        tasks_per_node: Tasks that share a node.
        cpus: Processors of each task.
        memory: Memory of each task, for example "16G".
        gpus: GPUs of each task that trains.
        exclusive: Whether nodes are shared with no other job.
        output: File that all tasks print to, with sbatch's patterns.
        working_directory: Directory that the job runs in, on a file system that all nodes share;
            None is the one that sbatch is called in.
        setup: Shell lines before the start, for example "module load cuda" or
            "source .venv/bin/activate".
        command: What each task runs.
        args: Its arguments; by default the config by value.
        env: Environment variables of every task.
        container_image: Image for srun's --container-image (plug-in pyxis), or None.
        container_mounts: More mounts for it, "source:target".
        max_restarts: How often the job is queued again after a failure; after a preemption any
            number of times.
        save_seconds: How long before the time limit tasks save and the job is queued again.
        stop_seconds: How long the others have to end once one task has failed.
        options: More options for sbatch, for example "--mail-type=END".
        srun_options: More options for srun.
    """

    name: str = ""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time_limit: str | None = None
    roles: Roles | None = None
    tasks_per_node: int = 1
    cpus: int | None = None
    memory: str | None = None
    gpus: int = 0
    exclusive: bool = False
    output: str = "%x-%j.log"
    working_directory: str | None = None
    setup: tuple[str, ...] = ()
    command: tuple[str, ...] = ("python", "-m", "trainer.task")
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    max_restarts: int = 3
    save_seconds: int = 120
    stop_seconds: int = 60
    options: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ray:
    """A run of Ray Train.

    Attributes:
        name: Name of the run; by default that of the config's file.
        address: Address of the Ray cluster, None for the one that the script finds or starts.
        roles: Tasks and their resources; by default those of `vertex.pools`, else one worker. Ray
            knows workers only: a chief is one of them.
        cpus: Processors of each worker.
        memory: Memory that each worker reserves, for example "16Gi".
        gpus: GPUs of each worker.
        resources: More resources of each worker, by Ray's names.
        placement: "PACK" puts workers onto few nodes, "SPREAD" onto many, the strict ones refuse
            otherwise.
        storage_path: Where Ray keeps its own records of the run: shared or remote.
        command: What each worker runs.
        args: Its arguments; by default the config by value.
        env: Environment variables of every worker.
        max_restarts: Starts after a failure.
        grace_seconds: Time that a worker's program has from SIGTERM on, to save.
    """

    name: str = ""
    address: str | None = None
    roles: Roles | None = None
    cpus: int | float | None = None
    memory: str | None = None
    gpus: int = 0
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    storage_path: str | None = None
    command: tuple[str, ...] = ("python", "-m", "trainer.task")
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    max_restarts: int = 3
    grace_seconds: int = 120
