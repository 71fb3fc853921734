"""Accelerators counted from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdist.strategies.hardware import Hardware
from tfdist.strategies.hardware import detect_hardware


def machine(root: Path, installed: int, devices: int) -> dict[str, Path]:
    """Makes the files of a machine with so many GPUs in /proc and in /dev."""
    proc, dev = root / "proc", root / "dev"
    dev.mkdir()
    for name in ("null", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (dev / name).touch()
    for number in range(devices):
        (dev / f"nvidia{number}").touch()
    for number in range(installed):
        (proc / "driver" / "nvidia" / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    return {"proc": proc, "dev": dev}


@pytest.mark.parametrize(
    ("installed", "devices", "expected"),
    [(0, 0, 0), (4, 4, 4), (0, 2, 2), (8, 2, 2), (2, 0, 0), (12, 12, 12)],
)
def test_gpus_of_a_machine(tmp_path: Path, installed: int, devices: int, expected: int) -> None:
    found = detect_hardware({}, **machine(tmp_path, installed, devices))
    assert found == Hardware(expected, "gpu" if expected else "cpu")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 1),
        ("0,1", 2),
        (" 3 , 1 ", 2),
        ("", 0),
        ("-1", 0),
        ("none", 0),
        ("NoDevFiles", 0),
        ("0,-1,1", 1),
        ("0,9,1", 1),
        ("0,0", 0),
        ("0,00", 0),
        ("GPU-11111111-2222,GPU-33333333", 2),
        ("MIG-1,MIG-2", 1),
        ("MIG-GPU-1/1/0", 1),
        ("0,1,2,3", 4),
        ("\u0660", 0),
    ],
)
def test_visible_devices_follow_the_rules_of_cuda(
    tmp_path: Path, value: str, expected: int
) -> None:
    roots = machine(tmp_path, 4, 4)
    assert detect_hardware({"CUDA_VISIBLE_DEVICES": value}, **roots).accelerators == expected


def test_visible_devices_of_a_machine_without_gpus(tmp_path: Path) -> None:
    roots = machine(tmp_path, 0, 0)
    assert detect_hardware({"CUDA_VISIBLE_DEVICES": "0,1"}, **roots) == Hardware()
    assert detect_hardware({"CUDA_VISIBLE_DEVICES": "GPU-1"}, **roots) == Hardware()


def test_missing_folders_are_no_gpus(tmp_path: Path) -> None:
    found = detect_hardware({}, proc=tmp_path / "no", dev=tmp_path / "nothing")
    assert found == Hardware(0, "cpu")
