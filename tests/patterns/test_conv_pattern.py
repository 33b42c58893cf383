"""The pattern of a convolution against dense Jacobians of torch, and the numbers of the BPPSA paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convolutions import configurations, torch_convolve
from sparsebp import SparsityPattern
from sparsebp.core.errors import MemoryLimitError, OptionError, ShapeError
from sparsebp.jacobians import conv_jacobian_t
from sparsebp.patterns import conv_pattern
from strategies import seeds

VGG_FIRST = {"input_size": (32, 32), "kernel_size": 3, "padding": 1}
MIB = 2**20


def pattern_of(c, **options):
    return conv_pattern(
        c.in_channels, c.out_channels, c.size, c.kernel, c.stride, c.padding, c.dilation, c.groups, **options
    )


def dense_jacobian_t(c, weight):
    """Torch's: a convolution is linear, so its outputs for every unit input are the rows."""
    inputs = c.in_channels * math.prod(c.size)
    units = torch.eye(inputs, dtype=torch.float64).reshape(inputs, c.in_channels, *c.size)
    return torch_convolve(c, units, torch.from_numpy(weight)).reshape(inputs, -1).numpy()


# ---- the paper's numbers -------------------------------------------------------------------------------------------


def test_bppsa_table_1_sparsity_of_vgg11s_first_convolution():
    pattern = conv_pattern(3, 64, **VGG_FIRST).pattern
    assert pattern.shape == (3 * 32 * 32, 64 * 32 * 32)
    assert pattern.nnz == 3 * 64 * 94 * 94 == 1_696_512
    assert round(pattern.sparsity, 5) == 0.99157


def test_bppsa_section_3_3_memory_of_vgg11s_first_convolution():
    weight = np.ones((64, 3, 3, 3), np.float32)
    jacobian = conv_jacobian_t(weight, (32, 32), padding=1)
    assert round(jacobian.data.nbytes / MIB, 1) == 6.5
    assert np.prod(jacobian.shape) * weight.itemsize == 768 * MIB


# ---- structure -----------------------------------------------------------------------------------------------------


@given(c=configurations(), seed=seeds)
def test_the_pattern_is_the_union_of_nonzeros(c, seed):
    rng = np.random.default_rng(seed)
    structure = pattern_of(c)
    pattern = structure.pattern
    assert SparsityPattern(pattern.indptr, pattern.indices, pattern.shape) == pattern  # canonical
    union = np.zeros(pattern.shape, bool)
    for _ in range(2):
        weight = rng.standard_normal(structure.weight_shape) * (rng.random(structure.weight_shape) < 0.9)
        dense = dense_jacobian_t(c, weight)
        union |= dense != 0
        held = np.zeros(pattern.shape)
        held[pattern.row_of_entry, pattern.indices] = weight.reshape(-1)[structure.weight_index]
        np.testing.assert_array_equal(held, dense)
    union |= dense_jacobian_t(c, np.ones(structure.weight_shape)) != 0
    marked = np.zeros(pattern.shape, bool)
    marked[pattern.row_of_entry, pattern.indices] = True
    np.testing.assert_array_equal(marked, union)


@given(c=configurations(), seed=seeds)
def test_channels_last_is_a_permutation(c, seed):
    weight = np.random.default_rng(seed).standard_normal((c.out_channels, c.in_channels // c.groups, *c.kernel))
    options = (weight, c.size, c.stride, c.padding, c.dilation, c.groups)
    first, last = conv_jacobian_t(*options), conv_jacobian_t(*options, layout="hwc")
    pattern = last.pattern
    assert SparsityPattern(pattern.indptr, pattern.indices, pattern.shape) == pattern
    outputs = pattern_of(c).output_size

    def order(channels, lengths):
        return np.moveaxis(np.arange(channels * np.prod(lengths, dtype=int)).reshape(channels, *lengths), 0, -1).ravel()

    moved = first.to_dense()[np.ix_(order(c.in_channels, c.size), order(c.out_channels, outputs))]
    np.testing.assert_array_equal(last.to_dense(), moved)


def test_channels_last_has_contiguous_runs():
    pattern = conv_pattern(2, 8, (5, 5), 3, padding=1, layout="hwc").pattern
    runs = np.split(pattern.indices, np.flatnonzero(np.diff(pattern.indices) != 1) + 1)
    assert all(len(run) % 8 == 0 for run in runs)


def test_padding_by_name_is_torchs():
    assert conv_pattern(1, 1, 7, 3, padding="valid") is conv_pattern(1, 1, 7, 3)
    assert conv_pattern(1, 1, 7, 4, padding="same") is conv_pattern(1, 1, 7, 4, padding=((1, 2),))
    assert conv_pattern(1, 1, (7, 7), 3, padding="same").output_size == (7, 7)


@given(length=st.integers(1, 4))
def test_a_pattern_beyond_int32_has_int64_indices(length):
    far = 2**31
    structure = conv_pattern(1, 1, length, 1, padding=far)
    assert structure.pattern.indices.dtype == structure.pattern.indptr.dtype == np.int64
    assert structure.pattern.shape == (length, length + 2 * far)
    np.testing.assert_array_equal(structure.pattern.indices, far + np.arange(length))
    assert conv_pattern(1, 1, length, 1, padding=far // 4).pattern.indices.dtype == np.int32


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (ShapeError, "kernel is larger than the padded input", {"kernel_size": 6}),
        (ShapeError, "kernel is larger than the padded input", {"kernel_size": 3, "dilation": (1, 3), "padding": 0}),
        (OptionError, "groups do not divide", {"groups": 3}),
        (OptionError, "groups is too small", {"groups": 0}),
        (OptionError, "in_channels is too small", {"in_channels": 0}),
        (OptionError, "kernel_size does not fit 2 axes", {"kernel_size": 0}),
        (OptionError, "kernel_size does not fit 2 axes", {"kernel_size": (3, 3, 3)}),
        (OptionError, "stride does not fit 2 axes", {"stride": 1.5}),
        (OptionError, "dilation does not fit 2 axes", {"dilation": -1}),
        (OptionError, "padding does not fit 2 axes", {"padding": -1}),
        (OptionError, "pair of padding", {"padding": ((0, 1), (0, -1))}),
        (OptionError, "pair of padding", {"padding": ((0, 1), (0, 1, 2))}),
        (OptionError, "Unknown padding", {"padding": "full"}),
        (OptionError, "needs stride 1", {"padding": "same", "stride": 2}),
        (OptionError, "input_size does not fit", {"input_size": (3, -1)}),
        (OptionError, "Unknown layout", {"layout": "chwn"}),
        (MemoryLimitError, "at most 1000 bytes", {"memory_limit": 1000}),
    ],
)
def test_bad_options_are_refused(error, text, options):
    with pytest.raises(error, match=text) as caught:
        conv_pattern(**{"in_channels": 4, "out_channels": 2, "input_size": (5, 5), "kernel_size": 3, **options})
    assert caught.value.expected and caught.value.got


def test_a_pattern_too_large_is_refused_before_it_is_made():
    with pytest.raises(MemoryLimitError) as caught:
        conv_pattern(512, 512, (224, 224), 3, padding=1, memory_limit=2**30)
    entries = 512 * 512 * (3 * 224 - 2) ** 2
    needed = (entries + 512 * 224 * 224 + 1) * 8 + entries * 4  # int64 indices, int32 index of weights
    assert f"{needed} bytes for {entries} entries" in str(caught.value)


@pytest.mark.parametrize("mask", [None, np.arange(54).reshape(3, 2, 3, 3) % 5 == 0])
def test_the_memory_limit_is_what_the_arrays_take(mask):
    """Those of the kept entries, where weights are pruned."""
    exact = conv_pattern(2, 3, (7, 5), 3, stride=2, mask=mask)
    size = exact.pattern.indptr.nbytes + exact.pattern.indices.nbytes + exact.weight_index.nbytes
    assert conv_pattern(2, 3, (7, 5), 3, stride=2, mask=mask, memory_limit=size) is exact
    with pytest.raises(MemoryLimitError, match=f"for {exact.pattern.nnz} entries"):
        conv_pattern(2, 3, (7, 5), 3, stride=2, mask=mask, memory_limit=size - 1)


def test_one_axis_may_be_an_integer():
    weight = np.ones((2, 1, 3), np.float32)
    patterns = [conv_jacobian_t(weight, n).pattern for n in (5, np.int64(5), (5,), [5])]
    assert all(pattern is patterns[0] for pattern in patterns)


def test_a_weight_of_another_rank_is_refused():
    with pytest.raises(ShapeError, match="4 axes"):
        conv_jacobian_t(np.ones((2, 3, 3)), (5, 5))
