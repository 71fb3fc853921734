"""Callbacks for `fit`, under every strategy.

model.fit(data, epochs=3, callbacks=[tfdist.callbacks.BackupAndRestore("dir", save_every=100)])
"""

from __future__ import annotations

from tfdist.callbacks.backup import BackupAndRestore

__all__ = ["BackupAndRestore"]
