"""Runs of matrix–vector products in one compiled call on the host: all kinds of steps and arguments."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import needs_numba
from scan.chains import Chain, chains, make_chain
from sparsebp import SparsityPattern, kernels, plan_scan
from sparsebp.core import threads
from sparsebp.core.errors import DTypeError, LayoutError, SparseBPError
from sparsebp.patterns.pattern import NEIGHBOURS
from sparsebp.scan import run


@pytest.fixture(autouse=True)
def _numba() -> None:
    needs_numba("steps are compiled")


def random_chain(n: int, size: int, entries: float, seed: int = 0) -> list:
    """SciPy matrices of about as many entries a row, whose products neither grow nor vanish."""
    from scipy.sparse import csr_array

    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        mask = rng.random((size, size)) < entries / size
        found.append(csr_array(np.where(mask, rng.standard_normal(mask.shape), 0.0) / np.sqrt(entries)))
    return found


def by_scipy(matrices: list, g: np.ndarray) -> list[np.ndarray]:
    found, y = [], g
    for matrix in matrices:
        y = matrix @ y
        found.append(y)
    return found


def assert_all_close(y, expected, dtype) -> None:
    tolerance = 1e-10 if dtype == np.float64 else 1e-3
    for have, want in zip(y, expected, strict=True):
        assert have.shape == want.shape and have.dtype == dtype and have.flags.c_contiguous and have.flags.writeable
        np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance * max(1.0, np.abs(want).max(initial=0)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("batch", [None, 1, 3, 8, 16, 24, 37])
def test_a_loop_over_scipy(batch, dtype):
    for n, size in ((1, 7), (2, 1), (50, 61)):
        matrices = random_chain(n, size, min(size, 6))
        plan = plan_scan([SparsityPattern.from_scipy(m) for m in matrices], "linear")
        g = np.random.default_rng(1).standard_normal((size,) if batch is None else (size, batch)).astype(dtype)
        assert_all_close(plan(g, [m.data.astype(dtype) for m in matrices]), by_scipy(matrices, g), dtype)


@settings(max_examples=80)
@given(chain=chains(), batched=st.booleans(), single=st.booleans())
def test_kinds_sharing_and_injections(chain, batched, single):
    """A batch of one has kernels of its own, with a batch axis and without one."""
    if single or not batched:
        b = chain.injections
        injections = None if b is None else [None if v is None else v[:, :1].copy() for v in b]
        data = [d if d.ndim == 1 else d[:, :1].copy() for d in chain.data]
        chain = Chain(chain.patterns, data, chain.g[:, :1].copy(), injections)
    plan, expected = plan_scan(chain.patterns, "linear"), chain.expected()
    if batched:
        y = plan(chain.g, chain.data, chain.injections)
    else:
        b = chain.injections
        injections = None if b is None else [None if v is None else v[:, 0] for v in b]
        y = plan(chain.g[:, 0].copy(), [d.reshape(-1) for d in chain.data], injections)
        expected = [v[:, 0] for v in expected]
    assert_all_close(y, expected, np.float64)


def test_large_results_are_arrays_of_their_own():
    chain = make_chain(np.random.default_rng(3), 9, 4)
    plan = plan_scan(chain.patterns, "linear")
    together = plan(chain.g, chain.data, chain.injections)
    with mock.patch.object(run, "TOGETHER", 0):
        apart = plan(chain.g, chain.data, chain.injections)
    assert all(y.base is None for y in apart)
    assert all(np.array_equal(a, b) for a, b in zip(together, apart, strict=True))


@pytest.mark.parametrize("batch", [None, 16])
def test_bitwise_the_same_with_any_number_of_threads(batch):
    """Steps large enough to be split, and small ones between them; dense, diagonal and uneven rows."""
    rng = np.random.default_rng(4)
    counts = rng.integers(0, 60, 6000)
    counts[17] = 3000
    indices = np.concatenate([np.sort(rng.choice(6000, c, replace=False)) for c in counts])
    uneven = SparsityPattern(np.concatenate(([0], np.cumsum(counts))), indices, (6000, 6000))
    diagonal = SparsityPattern.diagonal(6000)
    patterns = [uneven, diagonal, SparsityPattern.dense(150, 6000), SparsityPattern.dense(6000, 150), diagonal, uneven]
    data = [rng.standard_normal(p.nnz).astype(np.float32) for p in patterns]
    g = rng.standard_normal((6000,) if batch is None else (6000, batch)).astype(np.float32)
    plan, before = plan_scan(patterns, "linear"), threads.get_threads()
    try:
        threads.set_threads(1)
        alone = plan(g, data)
        threads.set_threads(2)
        together = plan(g, data)
    finally:
        threads.set_threads(before)
    assert max(w.program.most_parts for w in plan.workspaces) > 1
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
    y = g
    for p, d, have in zip(patterns, data, alone, strict=True):
        y = p.to_scipy(d) @ y
        np.testing.assert_allclose(have, y, rtol=2e-3, atol=1e-3 * np.abs(y).max())


def test_short_steps_are_split_in_a_long_chain_alone():
    rng = np.random.default_rng(6)
    indices = np.sort(np.argsort(rng.random((1000, 1000)), axis=1)[:, :10])
    pattern = SparsityPattern(np.arange(0, 10_001, 10), indices.ravel(), (1000, 1000))
    data = (rng.standard_normal((50, pattern.nnz)) / np.sqrt(10)).astype(np.float32)
    g = rng.standard_normal(1000).astype(np.float32)
    long, short = plan_scan([pattern] * 50, "linear"), plan_scan([pattern] * 2, "linear")
    results, before = [], threads.get_threads()
    try:
        for count in (1, 2):
            threads.set_threads(count)
            results.append(long(g, list(data)))
            short(g, list(data[:2]))
    finally:
        threads.set_threads(before)
    assert all(w.program.most_parts > 1 for w in long.workspaces)
    assert all(w.program.most_parts == 1 for w in short.workspaces)
    y = g
    for d, alone, together in zip(data, *results, strict=True):
        assert np.array_equal(alone, together)
        y = pattern.to_scipy(d) @ y
        np.testing.assert_allclose(alone, y, rtol=1e-3, atol=1e-4 * np.abs(y).max())


def test_values_are_taken_in_every_form_that_passed_before():
    chain = make_chain(np.random.default_rng(5), 6, 2)
    plan, expected = plan_scan(chain.patterns, "linear"), chain.expected()
    read_only = [d.copy() for d in chain.data]
    for d in read_only:
        d.flags.writeable = False
    views = [np.stack([d, d])[1] for d in chain.data]
    subclass = type("Sub", (np.ndarray,), {})
    shifted = [np.frombuffer(b"." + d.tobytes(), np.uint8)[1:].view(d.dtype).reshape(d.shape) for d in chain.data]
    for data in (read_only, views, tuple(chain.data), [d.view(subclass) for d in chain.data], shifted):
        assert_all_close(plan(chain.g, data, chain.injections), expected, np.float64)


def test_wrong_values_are_refused_with_the_same_words_as_before():
    rng = np.random.default_rng(6)
    plan = plan_scan([SparsityPattern.dense(3, 3)] * 3, "linear")
    g, data = rng.standard_normal((3, 4)), [rng.standard_normal((9, 4)) for _ in range(3)]
    cases = [
        (data[1].astype(">f8"), DTypeError), (data[1].astype(np.float32), DTypeError),
        (data[1].astype(int), DTypeError), (None, SparseBPError), ([1.0], SparseBPError),
        (np.asfortranarray(data[1]), LayoutError), (data[1][::-1], LayoutError), (data[1][:8], SparseBPError),
        (data[1][:, :3].copy(), SparseBPError), (data[1][None], SparseBPError),
        (np.float64(3.0), SparseBPError), (np.ma.masked_array(data[1]), SparseBPError),
    ]  # fmt: skip
    for wrong, error in cases:
        with pytest.raises(error, match=r"data\[1\]"):
            plan(g, [data[0], wrong, data[2]])
    with pytest.raises(SparseBPError, match=r"injections\[2\]"):
        plan(g, data, [None, None, np.ones(3)])
    assert_all_close(plan(g, data), Chain([*plan.patterns], data, g, None).expected(), np.float64)


def test_not_a_number_stays_in_its_sample_and_passes_over_other_columns():
    p = SparsityPattern([0, 1, 3, 4, 6, 7], [0, 1, 2, 3, 0, 4, 4], (5, 5))
    g = np.array([1.0, np.nan, 2.0, np.inf, 3.0])
    y = plan_scan([p], "linear")(g, [np.ones(7)])[0]
    np.testing.assert_array_equal(y, [1.0, np.nan, np.inf, 4.0, 3.0])


def test_what_is_found_of_a_list():
    find, dtype = kernels.on_host().find, np.dtype(np.float32)
    arrays = [np.zeros(3, np.float32), np.zeros((3, 2), np.float32), None]
    rows, least = np.full(3, 3, np.int64), np.ones(3, np.int64)
    found = find(arrays, rows, least, 2, 2, dtype)
    assert found.places.tolist() == [arrays[0].ctypes.data, arrays[1].ctypes.data, 0]
    assert found.wide.tolist() == [False, True, False]
    assert find(arrays, rows, least, 1, 2, dtype) is None and find(arrays, rows, least, 2, 5, dtype) is None
    assert find(arrays, rows, least, 2, 2, np.dtype(np.float64)) is None
    assert (
        find(arrays[:2], rows, least, 2, 2, dtype) is None
        and find(["text", *arrays[1:]], rows, least, 2, 2, dtype) is None
    )


@settings(max_examples=40)
@given(rows=st.sampled_from([0, 1, 3, 4, 5, 127, 128, 131, 400]), seed=st.integers(0, 2**32 - 1))
def test_fours_hold_every_row_among_its_neighbours(rows, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, 9)) < rng.random()
    p = SparsityPattern(np.concatenate(([0], np.cumsum(mask.sum(axis=1)))), np.nonzero(mask)[1], mask.shape)
    lines, lengths = p.fours, np.diff(p.indptr)
    assert lines.shape == (-(-rows // 4), 12) and lines.dtype == np.int32
    numbers = lines[:, 5:9]
    np.testing.assert_array_equal(np.unique(numbers), np.arange(rows))
    np.testing.assert_array_equal(lines[:, 1:5], p.indptr[numbers])
    np.testing.assert_array_equal(np.column_stack((lines[:, 0], lines[:, 9:])), lengths[numbers])
    assert (np.diff(lengths[numbers], axis=1) >= 0).all()
    assert (numbers // NEIGHBOURS == numbers[:, :1] // NEIGHBOURS).all()


@pytest.mark.parametrize("algorithm", ["linear", "blelloch", "hybrid", "chunked"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))], ids=["deep", "pickle"]
)
def test_a_copy_of_a_used_plan_has_places_of_its_own(copied, algorithm):
    matrices = random_chain(6, 20, 3)
    plan = plan_scan([SparsityPattern.from_scipy(m) for m in matrices], algorithm)
    g = np.random.default_rng(1).standard_normal(20)
    plan(g, [m.data for m in matrices])
    made = copied(plan)
    assert made.workspaces == []
    for matrix in matrices:
        matrix.data *= -0.5
    assert_all_close(made(g, [m.data for m in matrices]), by_scipy(matrices, g), np.float64)
    assert_all_close(plan(g, [m.data for m in matrices]), by_scipy(matrices, g), np.float64)


def test_a_program_keeps_the_arrays_that_its_table_names():
    matrices = random_chain(3, 20, 3)
    plan = plan_scan([SparsityPattern.from_scipy(m) for m in matrices], "linear")
    g = np.ones(20)
    plan(g, [m.data for m in matrices])
    names = plan.workspaces[0].program.table[:, kernels.on_host().csr.INDEX]
    for pattern in plan.patterns:
        del pattern.__dict__["fours"]  # as when another thread made them at the same time
    kept = {array.ctypes.data for array in plan.workspaces[0].program.indices}
    assert set(names.tolist()) <= kept
    assert_all_close(plan(g, [m.data for m in matrices]), by_scipy(matrices, g), np.float64)
