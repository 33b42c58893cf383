"""Patterns of pruned weights hold exactly the entries of the kept weights."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convolutions import configurations
from sparsebp import SparsityPattern
from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.jacobians import conv_jacobian_t, linear_jacobian_t
from sparsebp.patterns import conv_pattern, conv_transpose_pattern
from strategies import seeds

shares = st.sampled_from([0.0, 0.1, 0.5, 0.97])
layouts = st.sampled_from(["chw", "hwc"])


def check_kept(build, seed, share):
    """Compare the pattern with a mask of the weights with the kept entries of the one without."""
    whole = build()
    kept = np.random.default_rng(seed).random(whole.weight_shape) < share
    shrunk = build(mask=kept)
    pattern, chosen = shrunk.pattern, kept.reshape(-1)[whole.weight_index]
    assert SparsityPattern(pattern.indptr, pattern.indices, pattern.shape) == pattern  # canonical
    assert (pattern.shape, shrunk.output_size) == (whole.pattern.shape, whole.output_size)
    assert (pattern.indices.dtype, shrunk.weight_index.dtype) == (whole.pattern.indices.dtype, whole.weight_index.dtype)
    np.testing.assert_array_equal(shrunk.weight_index, whole.weight_index[chosen])
    np.testing.assert_array_equal(pattern.indices, whole.pattern.indices[chosen])
    np.testing.assert_array_equal(pattern.row_of_entry, whole.pattern.row_of_entry[chosen])


@given(c=configurations(), seed=seeds, share=shares, layout=layouts)
def test_the_kept_entries_of_a_convolution(c, seed, share, layout):
    arguments = c.in_channels, c.out_channels, c.size, c.kernel, c.stride, c.padding, c.dilation, c.groups
    check_kept(partial(conv_pattern, *arguments, layout=layout), seed, share)


@given(seed=seeds, share=shares, layout=layouts, stride=st.integers(1, 3), groups=st.integers(1, 2))
def test_the_kept_entries_of_a_transposed_convolution(seed, share, layout, stride, groups):
    arguments = 2 * groups, 3 * groups, (3, 4), (3, 2), stride, 1, stride - 1, groups
    check_kept(partial(conv_transpose_pattern, *arguments, layout=layout), seed, share)


@given(
    n_in=st.integers(1, 6), n_out=st.integers(1, 6), positions=st.integers(0, 3), seed=seeds, share=shares,
    dtype=st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_the_kept_entries_of_a_linear_layer(n_in, n_out, positions, seed, share, dtype):
    rng = np.random.default_rng(seed)
    weight, kept = rng.standard_normal((n_out, n_in)).astype(dtype), rng.random((n_out, n_in)) < share
    jacobian = linear_jacobian_t(weight, positions, mask=kept)
    assert jacobian.pattern.nnz == positions * kept.sum()
    assert jacobian.dtype == dtype
    np.testing.assert_array_equal(jacobian.to_dense(), np.kron(np.eye(positions), (weight * kept).T))


def test_masks_are_told_apart_by_content():
    weight = np.ones((2, 3, 3, 3))
    kept = np.random.default_rng(0).random(weight.shape) < 0.5
    one = conv_jacobian_t(weight, (5, 5), mask=kept).pattern
    assert conv_jacobian_t(weight, (5, 5), mask=kept.copy()).pattern is one
    assert conv_jacobian_t(weight, (5, 5), mask=~kept).pattern is not one
    full = np.ones(weight.shape, bool)
    assert conv_jacobian_t(weight, (5, 5), mask=full).pattern is conv_jacobian_t(weight, (5, 5)).pattern
    dense = linear_jacobian_t(np.ones((2, 3)), mask=np.ones((2, 3), bool)).pattern
    assert dense is linear_jacobian_t(np.ones((2, 3))).pattern


def test_nothing_kept_is_a_pattern_without_entries():
    first = conv_jacobian_t(np.ones((4, 3, 3, 3)), (6, 6), padding=1, mask=np.zeros((4, 3, 3, 3), bool))
    second = linear_jacobian_t(np.ones((5, 144)), mask=np.zeros((5, 144), bool))
    assert first.pattern.nnz == second.pattern.nnz == 0
    assert (first @ second).pattern.nnz == 0
    for jacobian in (first, first @ second):
        gradient = np.ones((jacobian.shape[1], 2))
        np.testing.assert_array_equal(jacobian @ gradient, np.zeros((jacobian.shape[0], 2)))


def test_bad_masks_are_refused():
    for mask in ([[[True, False], [True, True]]], True, "bool"):
        with pytest.raises(DTypeError, match="an array of bool"):
            conv_pattern(1, 2, 4, 2, mask=mask)
    with pytest.raises(DTypeError, match="bool"):
        conv_jacobian_t(np.ones((2, 3, 3)), 5, mask=np.ones((2, 3, 3)))
    with pytest.raises(ShapeError, match="another shape"):
        conv_jacobian_t(np.ones((2, 3, 3)), 5, mask=np.ones((2, 3, 2), bool))
    with pytest.raises(ShapeError, match="another shape"):
        linear_jacobian_t(np.ones((2, 3)), mask=np.ones((3, 2), bool))
