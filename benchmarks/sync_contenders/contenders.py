"""The contenders: what each runs, with which settings, and what it needs installed."""

from __future__ import annotations

import dataclasses
from typing import Any

# TensorFlow leaves oneDNN's kernels off on CPUs without AVX-512 VNNI or the like. Eigen's, which it
# then runs, were compiled for AVX: no FMA.
ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "1"}

# What `tfdist.tuning.keep_pages` asks of malloc, for the others: large buffers stay with the
# process instead of going back to the system and being faulted in again at every step.
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        title: What the table calls it.
        stack: What runs it, and whose interpreter: keras, tfdist, tf_keras, torch or jax.
        processes: Workers.
        options: Settings for the script, whatever the model.
        by_model: Settings for one model, over `options`.
        environment: Variables for its processes.
    """

    title: str
    stack: str
    processes: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    by_model: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def script(self) -> str:
        """The file that each of its processes runs."""
        return "run_torch.py" if self.stack == "torch" else "run_keras.py"

    @property
    def needs(self) -> dict[str, str]:
        """Module to the line that installs it."""
        return _NEEDS[self.stack]

    def settings(self, model: str) -> dict[str, Any]:
        """Returns the settings for `model`."""
        return {"stack": self.stack, **self.options, **self.by_model.get(model, {})}

    def described(self, model: str) -> str:
        """Returns the settings for `model` as one line."""
        own = {k: v for k, v in self.settings(model).items() if k != "stack"}
        return ", ".join(f"{k}={v}" for k, v in {**own, **self.environment}.items()) or "defaults"


_KERAS = {"tensorflow": "pip install 'tensorflow>=2.21,<2.22'", "keras": "pip install keras"}
_NEEDS = {
    "keras": _KERAS,
    "tfdist": {**_KERAS, "typer": "pip install --editable ."},
    "tf_keras": {"tf_keras": "pip install 'tf_keras>=2.21,<2.22'"},
    "torch": {"torch": "pip install torch"},
    "jax": {**_KERAS, "jax": "pip install jax"},
}
# Channels last is the layout of TensorFlow, too, and PyTorch's faster one on CPU.
_TORCH = {"resnet": {"channels_last": True}}
_DDP = {"bucket_cap_mb": 25}
_RING = {"TFDIST_TRANSPORT": "tensorflow"}


CONTENDERS = {
    "one_device": Contender("TensorFlow, one process, as installed", "keras"),
    "one_device_best": Contender("TensorFlow, one process", "keras", environment=ONEDNN),
    "one_device_tuned": Contender(
        "TensorFlow, one process, memory kept", "keras", environment={**ONEDNN, **KEEP_MEMORY}
    ),
    "one_device_accumulate": Contender(
        "TensorFlow, one process, accumulation 4",
        "keras",
        options={"accumulate": 4},
        environment=ONEDNN,
    ),
    # It turns on oneDNN and keeps memory by itself.
    "tfdist": Contender("tfdist, 2 workers", "tfdist", 2),
    "tfdist_ring": Contender(
        "tfdist, 2 workers, TensorFlow's ring", "tfdist", 2, environment=_RING
    ),
    "tfdist_ring_bfloat16": Contender(
        "tfdist, 2 workers, TensorFlow's ring, bfloat16 on the wire",
        "tfdist",
        2,
        environment={**_RING, "TFDIST_COMPRESSION": "bfloat16"},
    ),
    "tfdist_accumulate": Contender(
        "tfdist, 2 workers, accumulation 4", "tfdist", 2, options={"accumulate": 4}
    ),
    "stock": Contender("MultiWorkerMirrored, Keras 2, as installed", "tf_keras", 2),
    "stock_best": Contender("MultiWorkerMirrored, Keras 2", "tf_keras", 2, environment=ONEDNN),
    "torch_one": Contender("PyTorch, one process", "torch", by_model=_TORCH),
    "torch": Contender("PyTorch DDP, 2 processes", "torch", 2, _DDP, _TORCH),
    "torch_tuned": Contender(
        "PyTorch DDP, 2 processes, memory kept", "torch", 2, _DDP, _TORCH, KEEP_MEMORY
    ),
    "torch_bfloat16": Contender(
        "PyTorch DDP, 2 processes, bfloat16 on the wire",
        "torch",
        2,
        options={**_DDP, "compress": True},
        by_model=_TORCH,
    ),
    "jax_one": Contender("Keras on JAX, one process", "jax"),
    "jax": Contender("Keras on JAX, 2 processes", "jax", 2),
}
