"""Transposed convolutions against torch: outputs, all gradients, transposed Jacobians, weights both ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.core.errors import MemoryLimitError
from sparsebp.jacobians import conv_transpose_jacobian_t
from sparsebp.patterns import conv_pattern, conv_transpose_pattern
from strategies import seeds, tolerance
from torch_twins import assert_like_torch, loaded

LAYERS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
TWINS = {1: torch.nn.ConvTranspose1d, 2: torch.nn.ConvTranspose2d, 3: torch.nn.ConvTranspose3d}


@st.composite
def options(draw):
    """Return the input's lengths and torch's arguments of a transposed convolution that has an output."""
    ndim, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    axes = []
    for _ in range(ndim):
        size, kernel, stride, dilation = (draw(st.integers(1, high)) for high in (4, 3, 3, 3))
        extra = draw(st.integers(0, max(stride, dilation) - 1))
        whole = (size - 1) * stride + dilation * (kernel - 1) + 1 + extra
        axes.append((size, kernel, stride, draw(st.integers(0, min(2, (whole - 1) // 2))), extra, dilation))
    size, kernel, stride, padding, extra, dilation = zip(*axes, strict=True)
    channels = [groups * draw(st.integers(1, 2)) for _ in range(2)]
    return size, (*channels, kernel, stride, padding, extra, groups, draw(st.booleans()), dilation)


@given(options=options(), batch=st.integers(1, 3), strided=st.booleans(), single=st.booleans(), seed=seeds)
def test_against_torch(options, batch, strided, single, seed):
    size, arguments = options
    dtype = np.dtype(np.float32 if single else np.float64)
    close, rng = tolerance(dtype, 2), np.random.default_rng(seed)
    layer = LAYERS[len(size)](*arguments, dtype=dtype, rng=rng)
    twin = loaded(TWINS[len(size)](*arguments), layer)  # out
    x = rng.standard_normal((batch, arguments[0], *size)).astype(dtype)
    if strided:  # channels last in memory
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    assert assert_like_torch(layer, twin, x, rng, close).batch is None
    y = layer(x)
    assert y.flags.c_contiguous and y.shape[2:] == layer.output_size(size)
    other = LAYERS[len(size)](*arguments, dtype=dtype, rng=rng)
    other.load_state_dict(twin.state_dict())  # in
    np.testing.assert_array_equal(other(x), y)


@given(options=options(), seed=seeds)
def test_pattern_is_what_random_weights_fill_and_counts_channels_last_too(options, seed):
    size, (c_in, c_out, kernel, stride, padding, extra, groups, _, dilation) = options
    arguments = (size, stride, padding, extra, groups, dilation)
    weight = np.random.default_rng(seed).uniform(1, 2, (c_in, c_out // groups, *kernel))
    first = conv_transpose_jacobian_t(weight, *arguments)
    assert first.pattern.nnz == np.count_nonzero(first.to_dense())
    last = conv_transpose_jacobian_t(weight, *arguments, layout="hwc")
    structure = conv_transpose_pattern(c_in, c_out, size, kernel, stride, padding, extra, groups, dilation)
    assert structure.pattern is first.pattern and structure.weight_shape == weight.shape
    n_in, n_out = int(np.prod(size)), int(np.prod(structure.output_size))
    moved = first.to_dense().reshape(c_in, n_in, c_out, n_out).transpose(1, 0, 3, 2).reshape(first.shape)
    np.testing.assert_array_equal(last.to_dense(), moved)


def test_it_is_the_transpose_of_a_convolution():
    forward = conv_pattern(3, 4, (7, 6), 3, 2, 1, 1)
    backward = conv_transpose_pattern(4, 3, forward.output_size, 3, 2, 1, (0, 1))
    assert backward.output_size == (7, 6)
    assert backward.pattern == forward.pattern.T
    order = forward.pattern.transpose_permutation
    np.testing.assert_array_equal(backward.weight_index, forward.weight_index[order])


def test_the_memory_limit_is_what_the_arrays_take():
    exact = conv_transpose_pattern(2, 3, (7, 5), 3, stride=2)
    size = exact.pattern.indptr.nbytes + exact.pattern.indices.nbytes + exact.weight_index.nbytes
    assert conv_transpose_pattern(2, 3, (7, 5), 3, stride=2, memory_limit=size) is exact
    with pytest.raises(MemoryLimitError):
        conv_transpose_pattern(2, 3, (7, 5), 3, stride=2, memory_limit=size - 1)
