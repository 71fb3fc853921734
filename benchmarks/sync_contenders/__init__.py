"""Contenders of `benchmarks/sync.py`."""
