"""What is known about the service, read from `facts.yaml`: dated, with sources, not in code.

    machine = facts().machine("a2-highgpu-8g")
    machine.brings                              # ("NVIDIA_TESLA_A100", 8)

The file is part of the package. What it does not know is None here, and never means "no".
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.resources
from collections.abc import Mapping
from typing import Any

GPU = "gpu"
TPU = "tpu"


@dataclasses.dataclass(frozen=True)
class AcceleratorType:
    """One type of accelerator.

    Attributes:
        name: The service's name.
        kind: `GPU` or `TPU`.
        flex_start: Whether flex-start has it.
        reservation_only: Whether only a reservation gives it.
        ends: Last day of support, or None.
    """

    name: str
    kind: str
    flex_start: bool = False
    reservation_only: bool = False
    ends: datetime.date | None = None


@dataclasses.dataclass(frozen=True)
class Machine:
    """One machine type.

    Attributes:
        type: For example "n1-standard-8".
        family: For example "n1".
        egress: Gigabits per second that leave it at most, or None where that is not known.
        brings: Accelerator that it comes with and how many, or None.
        attach: Accelerators that can be attached, with the numbers that are possible.
        egress_with: Accelerators to the egress with the most of them.
        own_fabric: The network that its accelerators have beside the machine's, or "".
        default_disk: What the service takes where no disk is named.
    """

    type: str
    family: str
    egress: float | None = None
    brings: tuple[str, int] | None = None
    attach: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    egress_with: Mapping[str, float] = dataclasses.field(default_factory=dict)
    own_fabric: str = ""
    default_disk: str = "pd-ssd"

    def egress_of(self, accelerator: str | None, count: int) -> float | None:
        """Returns the egress with accelerators, in Gbps."""
        most = max(self.attach.get(accelerator or "", (0,)))
        return (
            self.egress_with.get(accelerator or "", self.egress) if count == most else self.egress
        )


@dataclasses.dataclass(frozen=True)
class TpuGeneration:
    """One generation of TPUs.

    Attributes:
        name: For example "v5e".
        tensorflow: Whether the service runs TensorFlow on it.
        accelerator: The service's name of the accelerator, where it has one.
        types: Machine types.
        topologies: Machine type to topology to the number of machines that it spans.
    """

    name: str
    tensorflow: bool
    accelerator: str | None
    types: tuple[str, ...]
    topologies: Mapping[str, Mapping[str, int]]


@dataclasses.dataclass(frozen=True)
class PrebuiltImage:
    """One of the vendor's training images.

    Attributes:
        name: For example "tf-cpu.2-17.py310".
        python: Version, as "3.10".
        tensorflow: Version, or None.
        keras: Major version, or None.
        support: Last day of patches and support.
        available: Last day on which it can be had.
    """

    name: str
    python: str
    support: datetime.date
    available: datetime.date
    tensorflow: str | None = None
    keras: str | None = None


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything in `facts.yaml`.

    Attributes:
        as_of: The day on which it was read.
        sources: Short name to title and address.
        regions: Where jobs run.
        accelerators: By name.
        machines: By type.
        tpus: By name of the generation.
        prebuilt: Images by name.
        raw: The file as it is, for single values.
    """

    as_of: datetime.date
    sources: Mapping[str, Mapping[str, str]]
    regions: tuple[str, ...]
    accelerators: Mapping[str, AcceleratorType]
    machines: Mapping[str, Machine]
    tpus: Mapping[str, TpuGeneration]
    prebuilt: Mapping[str, PrebuiltImage]
    raw: Mapping[str, Any]

    def machine(self, machine_type: str) -> Machine | None:
        """Returns what is known of a machine type with processors or GPUs, or None."""
        return self.machines.get(machine_type)

    def tpu(self, machine_type: str, accelerator: str | None = None) -> TpuGeneration | None:
        """Returns the TPU generation of a machine, or None if it is none of a known one."""
        for generation in self.tpus.values():
            if machine_type in generation.topologies:
                return generation
            if machine_type in generation.types and accelerator == generation.accelerator:
                return generation
        return None

    def prebuilt_image(self, uri: str) -> tuple[str, PrebuiltImage | None] | None:
        """Returns name and facts of a prebuilt image, or None if `uri` is another one.

        The facts are None for an image that the file does not know.
        """
        rest = uri.partition("://")[2] or uri
        host, _, path = rest.partition("/")
        prefix = f"{self.raw['prebuilt']['path']}/"
        if host not in self.raw["prebuilt"]["repositories"] or not path.startswith(prefix):
            return None
        name = path.removeprefix(prefix).partition("@")[0].partition(":")[0]
        return name, self.prebuilt.get(name)

    @property
    def limits(self) -> Mapping[str, Any]:
        """Numbers that the service does not go beyond."""
        limits: Mapping[str, Any] = self.raw["limits"]
        return limits

    def reduction_server_image(self, region: str) -> str:
        """Returns the vendor's image from the multi-region next to `region`."""
        images: Mapping[str, str] = self.raw["reduction_server"]["images"]
        return images.get(region.partition("-")[0], images["us"])


@functools.cache
def facts() -> Facts:
    """Returns the facts, read once."""
    import yaml

    # The compiled reader takes a tenth of the time, where PyYAML was built with it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = importlib.resources.files("tfdist.vertex").joinpath("facts.yaml").read_text("utf-8")
    raw = yaml.load(text, Loader=loader)
    machines = {
        kind: _machine(name, family, kind)
        for name, family in raw["families"].items()
        for kind in family["types"]
    }
    images = {
        name: PrebuiltImage(name=name, **{key: row[key] for key in row if key != "names"})
        for row in raw["prebuilt"]["images"]
        for name in row["names"]
    }
    return Facts(
        as_of=raw["as_of"],
        sources=raw["sources"],
        regions=tuple(raw["regions"]),
        accelerators={
            name: AcceleratorType(name=name, **given) for name, given in raw["accelerators"].items()
        },
        machines=machines,
        tpus={
            name: TpuGeneration(
                name=name,
                tensorflow=given["tensorflow"],
                accelerator=given.get("accelerator"),
                types=tuple(given.get("types", ())),
                topologies=given.get("topologies", {}),
            )
            for name, given in raw["tpus"].items()
        },
        prebuilt=images,
        raw=raw,
    )


def _machine(name: str, family: Mapping[str, Any], kind: str) -> Machine:
    attach = {
        accelerator: tuple(types[kind])
        for accelerator, types in family.get("attach", {}).items()
        if kind in types
    }
    brings = family.get("brings", {}).get(kind)
    return Machine(
        type=kind,
        family=name,
        egress=family["types"][kind],
        brings=next(iter(brings.items())) if brings else None,
        attach=attach,
        egress_with={
            accelerator: types[kind]
            for accelerator, types in family.get("egress_with", {}).items()
            if kind in types
        },
        own_fabric=family.get("own_fabric", ""),
        default_disk=family.get("default_disk", "pd-ssd"),
    )
