"""Tests of your own training: does a cluster compute what one device computes?

    from tfdist.testing import assert_matches_single_device

    def test_my_model_trains_alike_on_two_workers():
        assert_matches_single_device(make_model, make_dataset, workers=2, epochs=1)

Importing it imports neither TensorFlow nor Keras; the trainings run in processes of their own.
"""

from __future__ import annotations

from tfdist.testing.equivalence import Report
from tfdist.testing.equivalence import assert_matches_single_device

__all__ = ["Report", "assert_matches_single_device"]
