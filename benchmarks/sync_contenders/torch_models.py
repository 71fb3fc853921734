"""The models in PyTorch, with the parameters of those in `keras_models`."""

from __future__ import annotations

import torch
from torch import nn
from workloads import MLP
from workloads import WORKLOADS
from workloads import ResNet
from workloads import Transformer


def build(name: str) -> nn.Module:
    """Returns the model of that name of `workloads.WORKLOADS`."""
    model = WORKLOADS[name]
    if isinstance(model, MLP):
        return _mlp(model)
    return _ResNet(model) if isinstance(model, ResNet) else _Transformer(model)


def _mlp(model: MLP) -> nn.Module:
    sizes = [model.features, *model.hidden]
    layers: list[nn.Module] = []
    for width, units in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(width, units), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], model.classes))


def _convolve(width: int, units: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, units, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(units, momentum=0.01),  # Keras's momentum is 0.99 of the old value.
    )


class _Block(nn.Module):
    def __init__(self, width: int, units: int, stride: int):
        super().__init__()
        self.first = _convolve(width, units, 3, stride)
        self.second = _convolve(units, units, 3, 1)
        self.short = _convolve(width, units, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the block."""
        y = self.second(torch.relu_(self.first(x)))
        return torch.relu_(y.add_(self.short(x)))


class _ResNet(nn.Module):
    def __init__(self, model: ResNet):
        super().__init__()
        width = model.widths[0]
        self.stem = _convolve(3, width, 3, 1)
        blocks = []
        for stage, units in enumerate(model.widths):
            for block in range(model.blocks):
                blocks.append(_Block(width, units, 2 if stage and not block else 1))
                width = units
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, model.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits."""
        x = self.blocks(torch.relu_(self.stem(x)))
        return self.head(x.mean((2, 3)))


class _Transformer(nn.Module):
    def __init__(self, model: Transformer):
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        self.positions = nn.Parameter(torch.rand(model.length, model.width) / 10 - 0.05)
        layer = nn.TransformerEncoderLayer(
            model.width, model.heads, model.hidden, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, model.layers, nn.LayerNorm(model.width), enable_nested_tensor=False
        )
        self.head = nn.Linear(model.width, model.vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(model.length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits for every position, classes last."""
        x = self.embedding(tokens) + self.positions
        return self.head(self.layers(x, self.mask, is_causal=True))
