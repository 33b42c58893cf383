"""Patterns of pooling layers: every guaranteed nonzero and nothing else."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sparsebp import SparsityPattern
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.patterns import adaptive_pool_pattern, pool_pattern
from strategies import seeds


@st.composite
def configurations(draw, dims=None):
    """Size and arguments (kernel, stride, padding, dilation, ceil_mode) that are legal, or nearly so."""
    dims = draw(st.integers(1, 3)) if dims is None else dims
    axes = [[draw(st.integers(1, 9 if dims < 3 else 5)) for _ in range(dims)]]  # sizes
    for high in (4, 4, None, 3):
        axes.append([draw(st.integers(1, high)) if high else 0 for _ in range(dims)])
    size, kernel, stride, padding, dilation = axes
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    return tuple(size), (tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), draw(st.booleans()))


def built(channels, size, arguments, layout="chw"):
    try:
        return pool_pattern(channels, size, *arguments, layout=layout)
    except ShapeError:
        assume(False)


def by_loops(size, window):
    """Entries (input, output) -> offset of one channel, one window and one place at a time."""
    kernel, stride, padding, dilation, _ = window
    out_size = built(1, size, window).out_size
    entries = {}
    for o, out in enumerate(np.ndindex(*out_size)):
        for place, k in enumerate(np.ndindex(*kernel)):
            at = [a * s - p + b * d for a, s, p, b, d in zip(out, stride, padding, k, dilation, strict=True)]
            if all(0 <= i < n for i, n in zip(at, size, strict=True)):
                entries[int(np.ravel_multi_index(at, size)), o] = place
    return entries


@given(configuration=configurations())
def test_entries_and_offsets_equal_those_found_one_by_one(configuration):
    size, window = configuration
    pool = built(1, size, window)
    pattern = pool.pattern
    assert SparsityPattern(pattern.indptr, pattern.indices, pattern.shape) == pattern  # the builder skips validation
    found = zip(pattern.row_of_entry.tolist(), pattern.indices.tolist(), strict=True)
    assert dict(zip(found, pool.offset.tolist(), strict=True)) == by_loops(size, window)
    np.testing.assert_array_equal(pool.inputs, np.bincount(pattern.indices, minlength=pattern.shape[1]))


SMALL = [
    (size, kernel, stride, padding, dilation, ceil)
    for size, kernel, stride, dilation in itertools.product(range(1, 8), range(1, 5), range(1, 5), range(1, 3))
    for padding, ceil in itertools.product(range(kernel // 2 + 1), (False, True))
]


def test_small_windows_are_torchs_without_exception():
    """Every size, kernel, stride, padding, dilation and rounding of one axis: how many windows, and what is in them."""
    refused = 0
    for size, *window in SMALL:
        kernel, stride, padding, dilation, ceil = window
        x = torch.arange(size, dtype=torch.float64).reshape(1, 1, size)
        try:
            pool = pool_pattern(1, size, kernel, stride, padding, dilation, ceil)
        except ShapeError:
            refused += 1
            try:
                _, index = torch.nn.functional.max_pool1d(
                    x, kernel, stride, padding, dilation, ceil, return_indices=True
                )
            except RuntimeError:
                continue
            starts = np.arange(index.shape[2]) * stride - padding  # a window of padding alone, of which torch says 0
            taps = starts[:, None] + np.arange(kernel) * dilation
            assert (~((taps >= 0) & (taps < size)).any(axis=1)).any(), (size, window)
            continue
        last = torch.nn.functional.max_pool1d(x, kernel, stride, padding, dilation, ceil)
        first = -torch.nn.functional.max_pool1d(-x, kernel, stride, padding, dilation, ceil)
        assert pool.out_size == tuple(last.shape[2:]), (size, window)
        rows, columns = pool.pattern.row_of_entry, pool.pattern.indices
        found = by_loops((size,), (*tuple((n,) for n in window[:4]), ceil))
        assert dict(zip(zip(rows.tolist(), columns.tolist(), strict=True), pool.offset.tolist(), strict=True)) == found
        for window_number in range(pool.out_size[0]):
            inside = rows[columns == window_number]
            assert (inside.min(), inside.max()) == (first[0, 0, window_number], last[0, 0, window_number])
    assert 0 < refused < len(SMALL) / 2


@given(configuration=configurations(dims=2), channels=st.integers(1, 3), seed=seeds)
def test_the_pattern_is_the_union_of_observed_nonzeros(configuration, channels, seed):
    size, (kernel, stride, padding, dilation, ceil_mode) = configuration
    pool = built(channels, size, (kernel, stride, padding, dilation, ceil_mode))
    inputs, windows = size[0] * size[1], pool.out_size[0] * pool.out_size[1]
    x = torch.from_numpy(np.random.default_rng(seed).random((inputs, channels, *size)))
    x.view(inputs, channels, -1)[range(inputs), :, range(inputs)] = 2  # a peak at every input: there it wins
    y, index = torch.nn.functional.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
    assert tuple(y.shape[2:]) == pool.out_size
    rows = index.view(inputs, channels, -1).numpy() + np.arange(channels)[:, None] * inputs
    seen = {(row, window) for one in rows for window, row in enumerate(one.reshape(channels * windows).tolist())}
    assert seen == set(zip(pool.pattern.row_of_entry.tolist(), pool.pattern.indices.tolist(), strict=True))


@given(configuration=configurations(), channels=st.integers(1, 3))
def test_channels_last_is_a_permutation(configuration, channels):
    size, window = configuration
    pools = {layout: built(channels, size, window, layout) for layout in ("chw", "hwc")}
    dense = {}
    for layout, pool in pools.items():
        dense[layout] = np.full(pool.pattern.shape, -1)
        dense[layout][pool.pattern.row_of_entry, pool.pattern.indices] = pool.offset
    rows, columns = (
        np.arange(channels * n).reshape(channels, n).T.reshape(-1)
        for n in (np.prod(size), np.prod(pools["chw"].out_size))
    )
    np.testing.assert_array_equal(dense["hwc"], dense["chw"][rows][:, columns])
    last = pools["hwc"].pattern
    assert SparsityPattern(last.indptr, last.indices, last.shape) == last


@given(size=st.lists(st.integers(1, 9), min_size=1, max_size=3), data=st.data())
def test_adaptive_windows_begin_and_end_where_pytorch_has_them(size, data):
    out = tuple(data.draw(st.integers(1, 7)) for _ in size)
    pool = adaptive_pool_pattern(2, tuple(size), out)
    axes = []
    for n, m in zip(size, out, strict=True):
        axes.append(np.array([[i * n // m <= j < -(-(i + 1) * n // m) for i in range(m)] for j in range(n)]))
    want = np.eye(2)
    for axis in axes:
        want = np.kron(want, axis)
    have = np.zeros(pool.pattern.shape)
    have[pool.pattern.row_of_entry, pool.pattern.indices] = 1
    np.testing.assert_array_equal(have, want)
    np.testing.assert_array_equal(pool.extent, want.sum(axis=0))


def test_bppsa_table_1_max_pool():
    """2 x 2 max-pool on 64 x 32 x 32: sparsity 0.99994, and the table's formula 1 - h_f w_f / (c h w)."""
    pool = pool_pattern(64, (32, 32), 2)
    assert round(pool.pattern.sparsity, 5) == 0.99994
    assert pool.pattern.sparsity == pytest.approx(1 - 2 * 2 / (64 * 32 * 32), rel=1e-12)
    assert pool.pattern.kind == "selection" and pool.pattern.shape == (65536, 16384)


def test_made_once_and_not_writable():
    assert pool_pattern(2, (4, 4), 2) is pool_pattern(2, (4, 4), (2, 2), [2, 2])
    assert pool_pattern(2, (4, 4), 2) is not pool_pattern(2, (4, 4), 2, layout="hwc")
    assert adaptive_pool_pattern(2, 5, 3) is adaptive_pool_pattern(2, (5,), (3,))
    pool = pool_pattern(2, (4, 4), 2)
    for array in (pool.offset, pool.inputs, pool.extent):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize(
    ("error", "text", "build"),
    [
        (ShapeError, "larger than the padded input", lambda: pool_pattern(1, (4, 4), 5)),
        (ShapeError, "larger than the padded input", lambda: pool_pattern(1, 4, 3, 1, 0, 2)),
        (ShapeError, "steps over the whole input", lambda: pool_pattern(1, 2, 2, 1, 1, 3)),
        (OptionError, "more than half", lambda: pool_pattern(1, 9, 3, 1, 2)),
        (OptionError, "kernel_size does not fit", lambda: pool_pattern(1, 9, 0)),
        (OptionError, "kernel_size does not fit", lambda: pool_pattern(1, (9, 9), (2, 2, 2))),
        (OptionError, "kernel_size does not fit", lambda: pool_pattern(1, 9, 2.0)),
        (OptionError, "stride does not fit", lambda: pool_pattern(1, 9, 2, 0)),
        (OptionError, "padding does not fit", lambda: pool_pattern(1, 9, 2, 1, -1)),
        (OptionError, "dilation does not fit", lambda: pool_pattern(1, 9, 2, 1, 0, 0)),
        (OptionError, "channels does not fit", lambda: pool_pattern(0, 9, 2)),
        (OptionError, "size does not fit", lambda: pool_pattern(1, (9, 0), 2)),
        (OptionError, "Unknown layout", lambda: pool_pattern(1, 9, 2, layout="whc")),
        (OptionError, "output_size does not fit", lambda: adaptive_pool_pattern(1, 9, 0)),
    ],
)
def test_bad_arguments_are_refused(error, text, build):
    with pytest.raises(error, match=text) as caught:
        build()
    assert "Expected" in str(caught.value) and "Got" in str(caught.value)
