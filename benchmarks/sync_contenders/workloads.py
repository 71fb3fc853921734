"""The models that are compared, as plain numbers, and random data for them."""

from __future__ import annotations

import dataclasses

import numpy as np

#: Distinct batches in memory; an epoch goes round and round over them.
DISTINCT_BATCHES = 8
LEARNING_RATE = 0.01


@dataclasses.dataclass(frozen=True)
class MLP:
    """Dense layers with relu; cross-entropy from logits over `classes`."""

    features: int
    hidden: tuple[int, ...]
    classes: int = 10


@dataclasses.dataclass(frozen=True)
class ResNet:
    """ResNet of He et al. for small pictures: 6 * `blocks` + 2 layers, BatchNormalization."""

    size: int = 32
    blocks: int = 3
    widths: tuple[int, ...] = (16, 32, 64)
    classes: int = 10


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Language model: causal attention, layer normalization first, logits at every position."""

    vocabulary: int = 1000
    length: int = 64
    layers: int = 2
    width: int = 128
    heads: int = 4
    hidden: int = 512


WORKLOADS: dict[str, MLP | ResNet | Transformer] = {
    "mlp_large": MLP(1024, (4096, 4096)),
    "mlp_small": MLP(1024, (512, 512)),
    "resnet": ResNet(),
    "transformer": Transformer(),
}
#: What the table and the ratios call them.
TITLES = {
    "mlp_large": "21 M MLP",
    "mlp_small": "0.8 M MLP",
    "resnet": "ResNet",
    "transformer": "transformer",
}


def data(name: str, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random inputs and labels, shaped (batches, batch, ...), channels last."""
    random = np.random.RandomState(0)
    model = WORKLOADS[name]
    lead = (DISTINCT_BATCHES, batch)
    if isinstance(model, Transformer):
        tokens = random.randint(0, model.vocabulary, (*lead, model.length + 1)).astype("int32")
        return tokens[..., :-1].copy(), tokens[..., 1:].copy()
    labels = random.randint(0, model.classes, lead).astype("int32")
    shape = (model.features,) if isinstance(model, MLP) else (model.size, model.size, 3)
    return random.standard_normal((*lead, *shape)).astype("float32"), labels
