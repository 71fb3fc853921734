"""What a loss is made of, read from the graph that computes it."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.engine import own_losses


def _terms(function, parts=()):
    """Returns (kind, weight) of each term of `function(x, v)`, for data x and a variable v."""
    found = []
    variable = tf.Variable([1.0, 2.0, 3.0])

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        known = []

        def part(value):
            known.append(value.name)
            return value

        loss = function(x, variable, part)
        terms = own_losses.terms_of(loss, set(known))
        found.extend((term.kind, term.weight) for term in terms)
        return [term.weight for term in terms]

    weights = step(tf.ones([4, 3]))
    return [
        (kind, pytest.approx(float(weight)))
        for (kind, _), weight in zip(found, weights, strict=True)
    ]


def test_the_mean_over_examples_is_a_mean():
    assert _terms(lambda x, v, part: tf.reduce_mean(x * v)) == [("mean", 1.0)]


def test_a_sum_over_a_constant_is_a_part_as_it_stands():
    assert _terms(lambda x, v, part: tf.reduce_sum(x * v) / 12.0) == [("sum", 1.0)]


def test_a_sum_over_the_number_of_its_own_examples_is_a_mean():
    def loss(x, v, part):
        return tf.reduce_sum(x * v) / tf.cast(tf.shape(x)[0], tf.float32)

    assert _terms(loss) == [("mean", 1.0)]


def test_the_mean_of_sums_over_features_is_a_mean_and_the_sum_of_means_a_sum():
    assert _terms(lambda x, v, p: tf.reduce_mean(tf.reduce_sum(x * v, -1))) == [("mean", 1.0)]
    assert _terms(lambda x, v, p: tf.reduce_sum(tf.reduce_mean(x * v, -1))) == [("sum", 1.0)]


def test_terms_of_different_kinds_are_told_apart_with_their_weights():
    def loss(x, v, part):
        return part(tf.reduce_sum(x)) - 0.5 * tf.reduce_mean(x * v) / 2.0

    assert _terms(loss) == [("part", 1.0), ("mean", -1.0)]


def test_a_regularizer_beside_a_sum_has_to_do_with_no_examples():
    def loss(x, v, part):
        return tf.reduce_sum(x * v) / 12.0 + 0.1 * tf.reduce_sum(tf.square(v))

    assert _terms(loss) == [("sum", 1.0), ("none", 1.0)]


def test_a_loss_scale_on_top_changes_nothing_but_the_weights():
    def loss(x, v, part):
        return 8.0 * (part(tf.reduce_sum(x)) + tf.reduce_mean(x * v))

    assert _terms(loss) == [("part", 8.0), ("mean", 8.0)]


def test_what_cannot_be_seen_is_a_guess():
    assert _terms(lambda x, v, part: tf.reduce_max(x * v)) == [("guess", 1.0)]


def test_parts_that_are_summed_up_as_a_list_are_parts():
    def loss(x, v, part):
        return tf.reduce_sum([part(tf.reduce_sum(x)), part(tf.reduce_mean(x))])

    assert _terms(loss) == [("part", 1.0)]
