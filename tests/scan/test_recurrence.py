"""Linear recurrences and their gradients against a loop in double precision, differentiated by PyTorch."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.kernels.device import rnn
from strategies import seeds, sizes, tolerance
from thread_counts import assert_same_for_any_number_of_threads

DTYPES = [np.dtype(name) for name in ("float32", "float64", "complex64", "complex128")]


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    imaginary = 1j * rng.standard_normal(shape) if dtype.kind == "c" else 0
    return (rng.standard_normal(shape) + imaginary).astype(dtype)


def by_loop(
    a: np.ndarray, b: np.ndarray, h0: np.ndarray | None, grad_h: np.ndarray, reverse: bool, lengths: Any,
    reset: np.ndarray | None = None,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Return h and the gradients at a, b and h0."""
    wide = torch.complex128 if b.dtype.kind == "c" else torch.float64
    start = np.zeros(b.shape[1:]) if h0 is None else h0
    ta, tb, t0 = (torch.from_numpy(np.array(x)).to(wide).requires_grad_() for x in (a, b, start))
    cleared = torch.from_numpy(np.broadcast_to(False if reset is None else reset, b.shape).copy())
    factors, h = torch.where(cleared, 0, ta.expand(b.shape)), torch.zeros(b.shape, dtype=wide)
    for s, steps in enumerate([len(b)] * b.shape[1] if lengths is None else lengths):
        state = t0[s]
        for t in reversed(range(steps)) if reverse else range(steps):
            state = factors[t, s] * state + tb[t, s]
            h[t, s] = state
    grads = torch.autograd.grad(
        [h], (ta, tb, t0), [torch.from_numpy(np.array(grad_h)).to(wide)], allow_unused=True, materialize_grads=True
    ) if h.requires_grad else [torch.zeros_like(x) for x in (ta, tb, t0)]  # fmt: skip
    return h.detach().numpy(), *(grad.numpy() for grad in grads)


@given(
    steps=sizes(0, 70), batch=sizes(0, 7), hidden=sizes(0, 70), dtype=st.sampled_from(DTYPES),
    shared=st.tuples(st.booleans(), st.booleans(), st.booleans()), with_h0=st.booleans(), reverse=st.booleans(),
    lengths=st.sampled_from([None, "drawn", "all", "none"]), least=st.sampled_from([1, 5, 64]), dim=st.integers(0, 2),
    of_reset=st.none() | st.tuples(st.booleans(), st.booleans(), st.booleans()), seed=seeds,
)  # fmt: skip
def test_recurrence_and_its_gradients(
    backend, steps, batch, hidden, dtype, shared, with_h0, reverse, lengths, least, dim, of_reset, seed
):  # fmt: skip
    """`least`: steps of a chunk on a device, for chunks of few steps; `of_reset`: the axes that share resets."""
    rng, shape = np.random.default_rng(seed), (steps, batch, hidden)
    a = 0.4 * normal(rng, tuple(1 if one else n for one, n in zip(shared, shape, strict=True)), dtype)
    b, grad_h = normal(rng, shape, dtype), normal(rng, shape, dtype)
    h0 = normal(rng, shape[1:], dtype) if with_h0 else None
    drawn = {"drawn": rng.integers(0, steps + 1, batch), "all": [steps] * batch, "none": [0] * batch}.get(lengths)
    reset = None
    if of_reset is not None:
        reset = rng.random(tuple(1 if one else n for one, n in zip(of_reset, shape, strict=True))) < 0.2
    for array in (a, b, grad_h):
        array.flags.writeable = False
    on_device = [None if x is None else backend.array(x if x is h0 else np.ascontiguousarray(np.moveaxis(x, 0, dim)))
                 for x in (a, b, grad_h, h0, reset)]  # fmt: skip
    options = {"reverse": reverse, "lengths": drawn, "dim": dim, "reset": on_device.pop()}
    with backend.in_use(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rnn, "_LEAST_STEPS", least)
        h = sb.linear_recurrence(*on_device[:2], on_device[3], **options)
        grads = sb.linear_recurrence_vjp(on_device[0], h, *on_device[2:], **options)
    want = by_loop(a, b, h0, grad_h, reverse, drawn, reset)
    assert (grads.h0 is None) == (h0 is None)
    for found, expected in zip((h, *grads), want, strict=True):
        if found is not None:
            got = backend.numpy(found)
            got = got if found is grads.h0 else np.moveaxis(got, dim, 0)
            assert got.shape == expected.shape
            assert got.dtype == dtype
            np.testing.assert_allclose(got, expected, **tolerance(np.dtype(dtype.char.lower()), 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", list(product([False, True], repeat=3)))
def test_any_layout_in_memory(shared, dtype):
    """Views with strides give what their copies give, also rows that do not begin at a multiple of a vector."""
    rng, shape = np.random.default_rng(0), (9, 3, 11)
    of_a = tuple(1 if one else n for one, n in zip(shared, shape, strict=True))
    arrays = [
        normal(rng, of_a, dtype) * 0.4,
        *(normal(rng, shape, dtype) for _ in range(2)),
        normal(rng, (3, 11), dtype),
    ]
    views = [np.asfortranarray(arrays[0]), arrays[1][::-1].copy()[::-1], np.repeat(arrays[2], 2, axis=2)[..., ::2]]
    odd = np.zeros(34, dtype)[1:].reshape(3, 11)
    odd[...] = arrays[3]
    h = sb.linear_recurrence(arrays[0], arrays[1], arrays[3])
    np.testing.assert_array_equal(sb.linear_recurrence(views[0], views[1], odd), h)
    grads = sb.linear_recurrence_vjp(arrays[0], h, arrays[2], arrays[3])
    for got, want in zip(sb.linear_recurrence_vjp(views[0], h, views[2], odd), grads, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["overflow", "infinite"])
def test_products_of_chunks_that_say_nothing(backend, case, dtype):
    """A chunk's factors may overflow where no state does, or vanish where an infinite one stays."""
    steps, real = 300, dtype.type(0).real.dtype
    a, b = np.zeros((steps, 1, 3), dtype), np.zeros((steps, 1, 3), dtype)
    if case == "overflow":
        a[...], b[290] = np.finfo(real).max ** 0.1, 1
    else:  # of a complex number, infinity times zero is NaN at the next step
        a[...], b[10] = np.finfo(real).tiny ** 0.1, np.inf if dtype.kind == "f" else 1
    state, want = np.zeros((1, 3), dtype), []
    for t in range(steps):
        state = a[t] * state + b[t]
        want.append(state)
    with backend.in_use():
        found = backend.numpy(sb.linear_recurrence(backend.array(a), backend.array(b)))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=np.finfo(real).tiny)  # below, numbers count as zero
    assert not np.isnan(want).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_nan_stays_in_its_sample_and_unit(backend, reverse, dtype):
    """A NaN reaches later states of its chain; as a gradient, or as a factor, earlier ones."""
    rng, shape, chain = np.random.default_rng(0), (7, 3, 37), (slice(None), 1, 36)
    a, b, grad_h = (normal(rng, shape, dtype) for _ in range(3))
    for spoiled in range(3):
        arrays = [array.copy() for array in (a, b, grad_h)]
        arrays[spoiled][3, 1, 36] = np.nan
        with backend.in_use():
            given = [backend.array(array) for array in arrays]
            h = sb.linear_recurrence(*given[:2], reverse=reverse)
            grads = sb.linear_recurrence_vjp(given[0], h, given[2], reverse=reverse)
        later = slice(0, 4) if reverse else slice(3, 7)
        for number, found in enumerate((h, grads.a, grads.b)):
            bad = np.isnan(backend.numpy(found))
            assert bad[chain].any() == (number in ((0, 1, 2), (0, 1), (1, 2))[spoiled])
            bad[chain] = False
            assert not bad.any()
        if spoiled < 2:
            bad = np.isnan(backend.numpy(h)[chain])
            assert bad[later].all()
            assert bad.sum() == 4


@pytest.mark.parametrize("reverse", [False, True])
def test_what_lies_beyond_a_sample_is_not_read(backend, reverse):
    rng, lengths = np.random.default_rng(0), [0, 3, 6]
    a, b, grad_h = (rng.random((6, 3, 5)) for _ in range(3))
    beyond = np.arange(6)[:, None] >= lengths
    for array in (a, b, grad_h):
        array[beyond] = np.nan
    with backend.in_use():
        given = [backend.array(array) for array in (a, b, grad_h)]
        h = sb.linear_recurrence(*given[:2], reverse=reverse, lengths=lengths)
        grads = sb.linear_recurrence_vjp(given[0], h, given[2], reverse=reverse, lengths=lengths)
    for found in map(backend.numpy, (h, grads.a, grads.b)):
        assert np.isfinite(found).all()
        assert not found[beyond].any()


@pytest.mark.parametrize("shared", list(product([False, True], repeat=3)))
def test_long_sums_lose_little(backend, shared):
    """The sum over steps, samples and units of equal gradients, in float32; one by one it would lose 1e-3."""
    steps, batch, hidden = (1 << 11, 2, 3) if backend.emulated else (1 << 17, 2, 3)
    shape = tuple(1 if one else n for one, n in zip(shared, (steps, batch, hidden), strict=True))
    h = np.full((steps, batch, hidden), 0.1, np.float32)
    with backend.in_use():
        args = (backend.array(x) for x in (np.zeros(shape, np.float32), h, np.ones_like(h)))
        grad = backend.numpy(sb.linear_recurrence_vjp(*args, backend.array(h[0])).a)
    np.testing.assert_allclose(grad, h[0, 0, 0].astype(float) * h.size / grad.size, rtol=3e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize(("shape", "of_a"), [
    ((103, 17, 501), (103, 17, 501)), ((103, 17, 501), (1, 1, 501)), ((97, 3001, 3), (97, 1, 3)),
    ((97, 1, 9001), (97, 1, 9001)), ((97, 31, 301), (97, 31, 1)),
])  # fmt: skip
@pytest.mark.parametrize("with_lengths", [False, True])
def test_any_number_of_threads_gives_the_same(shape, of_a, dtype, with_lengths):
    rng = np.random.default_rng(0)
    a, b, grad_h = (normal(rng, each, np.dtype(dtype)) * 0.5 for each in (of_a, shape, shape))
    lengths = rng.integers(0, shape[0] + 1, shape[1]) if with_lengths else None

    def run():
        h = sb.linear_recurrence(a, b, lengths=lengths)
        return [h, *sb.linear_recurrence_vjp(a, h, grad_h, b[0], lengths=lengths)]

    assert_same_for_any_number_of_threads(run)


def test_wrong_arguments_are_refused():
    a, b, h0 = np.ones((4, 2, 3)), np.ones((4, 2, 3)), np.ones((2, 3))
    for error, match, args, options in [
        (DTypeError, "a is not an array", ([1.0], b), {}),
        (DTypeError, "b has", (a, b.astype(np.float16)), {}),
        (DTypeError, "a has", (a, b.astype(complex)), {}),
        (DTypeError, "h0 has", (a, b, h0.astype(np.float32)), {}),
        (ShapeError, "b has", (a, b[None]), {}),
        (ShapeError, "a has", (a, b[0]), {}),
        (OptionError, "dim", (a, b), {"dim": 3}),
        (DTypeError, "reset has", (a, b), {"reset": a}),
        (ShapeError, "reset has", (a, b), {"reset": a[:2] > 0}),
        (ShapeError, "a has", (a[0], b), {}),
        (ShapeError, "a has", (a[:2], b), {}),
        (ShapeError, "h0 has", (a, b, h0[:1]), {}),
        (OptionError, "reverse", (a, b), {"reverse": 1}),
        (ShapeError, "lengths", (a, b), {"lengths": [1, 2, 3]}),
        (DTypeError, "lengths", (a, b), {"lengths": [1.0, 2.0]}),
        (DTypeError, "lengths", (a, b), {"lengths": np.array([True, False])}),
        (OptionError, "length", (a, b), {"lengths": [0, 5]}),
        (OptionError, "length", (a, b), {"lengths": [-1, 4]}),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            sb.linear_recurrence(*args, **options)
    for error, match, args in [
        (ShapeError, "grad_h has", (a, b, b[:3])),
        (DTypeError, "grad_h has", (a, b, b.astype(np.float32))),
        (ShapeError, "a has", (a[:, :0], b, b)),
    ]:
        with pytest.raises(error, match=match):
            sb.linear_recurrence_vjp(*args)


@pytest.mark.parametrize("hidden", [1, 3, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_few_states_are_summed_in_double_precision(hidden, dim):
    """One by one in float32, 10⁵ terms of 0.1 would lose 1e-4."""
    b = np.full((100_000, hidden) if dim == 0 else (hidden, 100_000), 0.1, np.float32)
    h = sb.linear_recurrence(np.ones((1, 1), np.float32), b, dim=dim)
    np.testing.assert_allclose(np.take(h, -1, dim), b.dtype.type(0.1).astype(float) * 100_000, rtol=1e-7)


@pytest.mark.parametrize("hidden", [1, 5, 40])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_reset_clears_nan_and_infinity(backend, reverse, hidden):
    """Also on the way back, where no gradient of the other side of a reset arrives."""
    rng, shape, cut = np.random.default_rng(0), (9, 2, hidden), np.zeros((9, 1, 1), bool)
    a, b, grad_h = (rng.standard_normal(shape) for _ in range(3))
    cut[5] = True
    b[7 if reverse else 2], grad_h[3 if reverse else 6], a[5] = np.inf, np.nan, np.nan
    with backend.in_use():
        given = [backend.array(array) for array in (a, b, grad_h, cut)]
        h = sb.linear_recurrence(given[0], given[1], reverse=reverse, reset=given[3])
        grads = sb.linear_recurrence_vjp(given[0], h, given[2], reverse=reverse, reset=given[3])
    own, other = (slice(0, 6), slice(6, 9)) if reverse else (slice(5, 9), slice(0, 5))
    assert np.isfinite(backend.numpy(h)[own]).all()
    assert np.isfinite(backend.numpy(grads.b)[other]).all()
    assert not backend.numpy(grads.a)[5].any()
    np.testing.assert_array_equal(backend.numpy(h)[5], b[5])
