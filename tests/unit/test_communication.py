"""Options of the all-reduce: fields, variables, and what is refused."""

from __future__ import annotations

import pytest

from tfdist.errors import ConfigError
from tfdist.strategies.communication import CommunicationOptions


def test_nothing_set_leaves_every_choice_to_the_transport():
    options = CommunicationOptions.from_environ({})
    assert options == CommunicationOptions(None, None, None, "auto")


def test_every_field_has_a_variable():
    options = CommunicationOptions.from_environ(
        {
            "TFDIST_COMPRESSION": " BFloat16 ",
            "TFDIST_BUCKET_BYTES": "1048576",
            "TFDIST_TIMEOUT_SECONDS": "2.5",
            "TFDIST_TRANSPORT": "tensorflow",
        }
    )
    assert options == CommunicationOptions("bfloat16", 1048576, 2.5, "tensorflow")


def test_none_is_a_word_for_no_compression():
    assert CommunicationOptions.from_environ({"TFDIST_COMPRESSION": "none"}).compression is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compression", "int8"),
        ("bucket_bytes", 0),
        ("bucket_bytes", -1),
        ("timeout_seconds", 0),
        ("timeout_seconds", float("nan")),
        ("transport", "pigeon"),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_value(field, value):
    with pytest.raises(ConfigError, match=field) as caught:
        CommunicationOptions(**{field: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("TFDIST_BUCKET_BYTES", "4MB"), ("TFDIST_TIMEOUT_SECONDS", "soon")],
)
def test_a_variable_that_is_no_number_is_named(variable, value):
    with pytest.raises(ConfigError, match=variable) as caught:
        CommunicationOptions.from_environ({variable: value})
    assert value in str(caught.value)
