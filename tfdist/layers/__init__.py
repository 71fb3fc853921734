"""Layers that a strategy needs: embedding tables in parts.

tfdist.layers.Embedding(10_000_000, 32, combiner="mean", hash_ids=True)
model = tfdist.layers.shard_embeddings(model)
"""

from __future__ import annotations

from tfdist.layers.convert import shard_embeddings
from tfdist.layers.embedding import Embedding

__all__ = ["Embedding", "shard_embeddings"]
