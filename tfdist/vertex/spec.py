"""A custom job as we think of it: roles with machines, not pools with positions.

Frozen values without any rule of the service in them: `tfdist.vertex.checks` knows what the
service and its machines refuse, `tfdist.vertex.render` how a job is written for it. The `vertex:`
section of a config holds the fields of `JobSpec` by their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Literal

from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.cluster.topology import WORKER

REDUCTION_SERVER = "reduction_server"

#: Roles of a custom job in the order in which they are shown.
JOB_ROLES = (CHIEF, WORKER, PS, REDUCTION_SERVER, EVALUATOR)

#: Position of the worker pool of each role. Parameter servers and a Reduction Server share one.
POOL_INDEX: Mapping[str, int] = {CHIEF: 0, WORKER: 1, PS: 2, REDUCTION_SERVER: 2, EVALUATOR: 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Accelerators of one machine.

    Attributes:
        type: The service's name, for example "NVIDIA_L4".
        count: How many in each machine.
    """

    type: str
    count: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """The boot disk of one machine.

    Attributes:
        type: For example "pd-ssd" or "pd-standard"; None: what suits the machine.
        size_gb: Gigabytes.
    """

    type: str | None = None
    size_gb: int = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reservation:
    """Which reservation of Compute Engine the machines come from.

    Attributes:
        affinity: "any" of the project's, a "specific" one, or "none".
        name: `projects/P/zones/Z/reservations/R`, for "specific" alone.
    """

    affinity: Literal["any", "specific", "none"]
    name: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """The machines of one role.

    Attributes:
        machine_type: For example "n1-standard-8".
        replicas: Machines, one process each.
        accelerator: What each machine has, or None. Machine types that bring their own, such as
            "a2-highgpu-1g", still name it here, as the service asks.
        tpu_topology: For example "2x2", for TPU machines alone.
        disk: Boot disk.
        reservation: Or None for that of the job.
        image: An image of its own: for a Reduction Server alone, the vendor's by default.
    """

    #: Keys that people look for here, and where they are.
    ELSEWHERE = {
        "spot": "spot-per-job: Spot is for the whole job, scheduling.strategy: spot",
        "preemptible": "spot-per-job: Spot is for the whole job, scheduling.strategy: spot",
        "strategy": "scheduling.strategy is for the whole job",
        "scheduling": "spot-per-job: scheduling is for the whole job, vertex.scheduling",
        "command": "every pool runs the same program, vertex.command",
        "args": "every pool runs the same program, vertex.args",
        "env": "every pool has the same variables, vertex.env",
        "accelerator_type": "accelerator.type",
        "accelerator_count": "accelerator.count",
        "boot_disk_type": "disk.type",
        "boot_disk_size_gb": "disk.size_gb",
        "replica_count": "replicas",
    }

    machine_type: str
    replicas: int = 1
    accelerator: Accelerator | None = None
    tpu_topology: str | None = None
    disk: Disk = Disk()
    reservation: Reservation | None = None
    image: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pools:
    """The machines of all roles; a role that is not there is None.

    Attributes:
        chief: The primary, exactly one machine. Under parameter servers it coordinates.
        worker: Workers beside the chief.
        ps: Parameter servers.
        reduction_server: Machines that add up gradients of GPU workers.
        evaluator: Evaluates checkpoints beside the training.
    """

    chief: Pool
    worker: Pool | None = None
    ps: Pool | None = None
    reduction_server: Pool | None = None
    evaluator: Pool | None = None

    def __iter__(self) -> Iterator[tuple[str, Pool]]:
        """Yields role and pool of each role that is there."""
        for role in JOB_ROLES:
            pool = getattr(self, role)
            if pool is not None:
                yield role, pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduling:
    """How machines are got and what happens when one is lost.

    Attributes:
        strategy: "standard", "spot" (cheaper, taken back at any time) or "flex_start" (Dynamic
            Workload Scheduler: waits for all machines together).
        timeout: Longest run: seconds, or a text such as "36h" or "7d"; None is the service's 7
            days.
        max_wait: Longest wait for machines of "flex_start", like `timeout`; "0s" waits for ever.
        restart_job_on_worker_restart: Whether all replicas start again when one does; None
            follows the strategy: yes where workers train in step, no with parameter servers.
        disable_retries: Whether the service may not start a failed job again by itself.
    """

    strategy: Literal["standard", "spot", "flex_start"] = "standard"
    timeout: int | str | None = None
    max_wait: int | str | None = None
    restart_job_on_worker_restart: bool | None = None
    disable_retries: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One custom job.

    Attributes:
        project: Google Cloud project, its id.
        region: For example "us-central1".
        image: Container image of every pool but a Reduction Server's.
        pools: Machines per role.
        display_name: Name shown in the console, at most 128 characters.
        code: "image": the image holds the code. "package": the image is a prebuilt one and the
            code comes as a source distribution.
        package_uri: `gs://` address of that distribution once it is uploaded; None: `submit`
            builds and uploads it to `staging_bucket`.
        module: What a "package" runs: `python -m module`.
        command: Replaces the image's entry point; empty keeps it.
        args: Arguments of the program, each one word whatever it contains.
        env: Environment variables of every replica.
        labels: Labels of the job.
        strategy: Name of the strategy that the program asks for, or None where tfdist chooses
            from the pools.
        strategy_replicas: Replicas in one process that the program asks for, or None.
        staging_bucket: `gs://bucket`, for the client and the source distribution.
        base_output_directory: `gs://...`, below which the service sets `AIP_MODEL_DIR`,
            `AIP_CHECKPOINT_DIR` and `AIP_TENSORBOARD_LOG_DIR`.
        service_account: Email address the program runs as.
        tensorboard: `projects/P/locations/R/tensorboards/T`.
        network: `projects/NUMBER/global/networks/NAME`, peered.
        reserved_ip_ranges: Names of ranges in `network`.
        network_attachment: For a Private Service Connect interface instead of `network`.
        encryption_key: Customer-managed key.
        persistent_resource: Id of a persistent resource to run on.
        reservation: For all pools that name none.
        enable_web_access: Whether an interactive shell may be opened in replicas.
        scheduling: How machines are got, time limits, restarts.
    """

    project: str
    region: str
    image: str
    pools: Pools
    display_name: str = ""
    code: Literal["image", "package"] = "image"
    package_uri: str | None = None
    module: str = "trainer.task"
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    strategy: str | None = None
    strategy_replicas: int | None = None
    staging_bucket: str | None = None
    base_output_directory: str | None = None
    service_account: str | None = None
    tensorboard: str | None = None
    network: str | None = None
    reserved_ip_ranges: tuple[str, ...] = ()
    network_attachment: str | None = None
    encryption_key: str | None = None
    persistent_resource: str | None = None
    reservation: Reservation | None = None
    enable_web_access: bool = False
    scheduling: Scheduling = Scheduling()

    @property
    def parent(self) -> str:
        """Resource name under which the job is created."""
        return f"projects/{self.project}/locations/{self.region}"
