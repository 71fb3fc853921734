"""The cells of `equivalence.py`; they register themselves when their module is imported."""
