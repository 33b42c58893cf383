"""Patterns of operators."""

import numpy as np
import pytest
from hypothesis import given

from matrices import dense
from sparsebp import SparsityPattern
from sparsebp.core.errors import PatternError
from sparsebp.patterns import (
    hidden_pattern,
    linear_pattern,
    lstm_pattern,
    pointwise_pattern,
    sequence_pattern,
    step_sum_pattern,
)
from strategies import sizes

small = sizes(0, 5)


def blocks(where, block):
    """A matrix that has `block` where `where` is 1 (`numpy.kron` refuses empty ones)."""
    return np.einsum("ij,kl->ikjl", where, block).reshape(len(where) * len(block), where.shape[1] * block.shape[1])


def validated(pattern):
    """The builders skip validation; here it is done."""
    assert SparsityPattern(pattern.indptr, pattern.indices, pattern.shape) == pattern
    return pattern


@given(n_in=small, n_out=small, positions=small)
def test_linear_is_a_block_diagonal(n_in, n_out, positions):
    pattern = validated(linear_pattern(n_in, n_out, positions))
    np.testing.assert_array_equal(dense(pattern), blocks(np.eye(positions), np.ones((n_in, n_out))))


@given(steps=small, features=small)
def test_a_sum_over_steps_has_an_entry_a_row(steps, features):
    pattern = validated(step_sum_pattern(steps, features))
    np.testing.assert_array_equal(dense(pattern), blocks(np.ones((steps, 1)), np.eye(features)))


@given(n=small)
def test_pointwise_is_diagonal_and_hidden_is_dense(n):
    np.testing.assert_array_equal(dense(pointwise_pattern(n)), np.eye(n))
    np.testing.assert_array_equal(dense(hidden_pattern(n)), np.ones((n, n)))


@given(n=small)
def test_an_lstm_has_two_dense_and_two_diagonal_blocks(n):
    every, own = np.ones((n, n)), np.eye(n)
    np.testing.assert_array_equal(dense(validated(lstm_pattern(n))), np.block([[every, every], [own, own]]))


@given(steps=small, n_in=small, hidden=small)
def test_an_input_reaches_what_comes_after_it(steps, n_in, hidden):
    triangle = np.triu(np.ones((steps, steps)))
    block = np.ones((n_in, hidden))
    forward = validated(sequence_pattern(steps, n_in, hidden))
    backward = validated(sequence_pattern(steps, n_in, hidden, reverse=True))
    both = validated(sequence_pattern(steps, n_in, hidden, bidirectional=True))
    np.testing.assert_array_equal(dense(forward), blocks(triangle, block))
    np.testing.assert_array_equal(dense(backward), blocks(triangle.T, block))
    of_step = [blocks(t, block).reshape(steps * n_in, steps, hidden) for t in (triangle, triangle.T)]
    np.testing.assert_array_equal(dense(both), np.stack(of_step, axis=2).reshape(both.shape))


@pytest.mark.parametrize(
    "build",
    [
        lambda: linear_pattern(2, -1),
        lambda: linear_pattern(2, -1, 3),
        lambda: pointwise_pattern(-1),
        lambda: lstm_pattern(-1),
        lambda: sequence_pattern(-1, 2, 3),
        lambda: step_sum_pattern(-1, 2),
    ],
)
def test_negative_sizes_are_refused(build):
    with pytest.raises(PatternError, match="Expected"):
        build()


def test_the_pattern_of_a_configuration_is_made_once():
    assert pointwise_pattern(7) is pointwise_pattern(7)
    assert linear_pattern(3, 5, 2) is linear_pattern(3, 5, 2)
    assert linear_pattern(3, 5, 2) != linear_pattern(3, 5, 1)
    assert step_sum_pattern(3, 5) is step_sum_pattern(3, 5)
    assert hidden_pattern(4) is hidden_pattern(4)
    assert lstm_pattern(4) is lstm_pattern(4)
    assert sequence_pattern(3, 1, 2) is sequence_pattern(3, 1, 2)
    assert sequence_pattern(3, 1, 2) is not sequence_pattern(3, 1, 2, reverse=True)
