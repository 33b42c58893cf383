"""The selective scan and its gradients against Mamba's reference in double precision, differentiated by PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp.core.errors import DTypeError, ShapeError
from strategies import normal, reals, seeds, sizes, tolerance
from thread_counts import assert_same_for_any_number_of_threads


def selective_scan_ref(u, delta, A, B, C, D, x, reset):
    """Mamba's `selective_scan_ref` (mamba_ssm/ops/selective_scan_interface.py), for B and C that depend on the input.

    u, delta: (B, D, L); A: (D, N); B, C: (B, N, L); D: (D,); x: the first state (B, D, N), there zeros; reset: (B, L),
    there none.
    """
    ys = []
    delta_a = torch.exp(torch.einsum("bdl,dn->bdln", delta, A))
    delta_b_u = torch.einsum("bdl,bnl,bdl->bdln", delta, B, u)
    for i in range(u.shape[2]):
        x = torch.where(reset[:, i, None, None], 0, delta_a[:, :, i] * x) + delta_b_u[:, :, i]
        ys.append(torch.einsum("bdn,bn->bd", x, C[:, :, i]))
    y = torch.stack(ys, dim=2) if ys else torch.zeros_like(u)
    return y + u * D[:, None], x


def arguments(seed, steps, batch, channels, order, dtype):
    """Return x, dt, a, b, c, d and a gradient at y, in ranges as Mamba's."""
    rng = np.random.default_rng(seed)
    x, b, c, d, grad_y = (
        normal(rng, shape, dtype)
        for shape in ((steps, batch, channels), *[(steps, batch, order)] * 2, (channels,), (steps, batch, channels))
    )
    dt = np.log1p(np.exp(rng.standard_normal((steps, batch, channels)))).astype(dtype)
    return x, dt, -np.exp(rng.standard_normal((channels, order))).astype(dtype), b, c, d, grad_y


@given(
    steps=sizes(0, 70), batch=sizes(0, 5), channels=sizes(0, 70), order=sizes(0, 17), with_d=st.booleans(),
    with_state=st.booleans(), resets=st.sampled_from([None, "of each sample", "of all"]), dtype=reals, seed=seeds,
)  # fmt: skip
def test_selective_scan_and_its_gradients(
    backend, steps, batch, channels, order, with_d, with_state, resets, dtype, seed
):  # fmt: skip
    *arrays, grad_y = arguments(seed, steps, batch, channels, order, dtype)
    for array in arrays:
        array.flags.writeable = False
    h0, grad_h = normal(np.random.default_rng(seed + 1), (2, batch, channels, order), dtype)
    flags = np.random.default_rng(seed + 2).random((steps, batch) if resets == "of each sample" else steps) < 0.1
    given_ones = [backend.array(array) for array in arrays[:5]] + [backend.array(arrays[5]) if with_d else None]
    with backend.in_use():
        reset = backend.array(flags) if resets else None
        found = sb.selective_scan(*given_ones, backend.array(h0) if with_state else None, reset=reset)
        y, states = found
        last = backend.array(grad_h) if with_state else None
        grads = sb.selective_scan_vjp(*given_ones, states, backend.array(grad_y), last, reset=reset)
    if not with_state:
        h0, grad_h = np.zeros_like(h0), np.zeros_like(grad_h)
    wide = [torch.from_numpy(np.array(array)).double().requires_grad_() for array in (*arrays, h0)]
    if not with_d:
        wide[5] = torch.zeros(channels, dtype=torch.float64, requires_grad=True)
    x, dt, a, b, c, d, start = wide
    turned = (v.permute(1, 2, 0) for v in (x, dt, b, c))
    flags = flags & bool(resets) & np.ones((batch, steps), bool) if flags.ndim == 1 else flags.T
    want, end = selective_scan_ref(next(turned), next(turned), a, *turned, d, start, torch.from_numpy(flags))
    loss = (want.permute(2, 0, 1) * torch.from_numpy(grad_y).double()).sum() + 0 * sum(v.sum() for v in wide)
    loss += (end * torch.from_numpy(grad_h)).sum()
    loss.backward()
    assert (grads.d is None) == (not with_d)
    wanted = (want.detach().permute(2, 0, 1), end.detach(), *(v.grad for v in wide))
    for array, expected in zip((y, found.h_n, *grads), wanted, strict=True):
        if array is not None:
            got = backend.numpy(array)
            assert got.dtype == dtype
            size = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
            limits = tolerance(dtype, 2)
            np.testing.assert_allclose(got, expected.numpy(), limits["rtol"], limits["atol"] * size)


def test_states_are_those_before_every_32nd_step_and_the_last_one():
    *arrays, _ = arguments(0, 70, 2, 5, 3, np.dtype(np.float64))
    _, states = sb.selective_scan(*arrays)
    x, dt, a, b, *_ = arrays
    h = np.zeros((2, 3, 5))
    for t in range(70):
        if t % 32 == 0:
            np.testing.assert_allclose(states[t // 32], h, rtol=1e-12, atol=1e-14)
        h = np.exp(dt[t, :, None] * a.T) * h + b[t][..., None] * (dt[t] * x[t])[:, None]
    np.testing.assert_allclose(states[3], h, rtol=1e-12, atol=1e-14)


def test_nan_stays_in_its_sample_and_channel(backend):
    """A NaN in x reaches y of later steps of its channel; on the way back all of b and c of its sample."""
    *arrays, grad_y = arguments(0, 40, 2, 37, 3, np.dtype(np.float32))
    arrays[0][33, 1, 36] = np.nan
    with backend.in_use():
        given_ones = [backend.array(array) for array in arrays]
        y, states = sb.selective_scan(*given_ones)
        grads = sb.selective_scan_vjp(*given_ones, states, backend.array(grad_y))
    bad = np.isnan(backend.numpy(y))
    assert bad[33:, 1, 36].all()
    assert bad.sum() == 7
    for name, grad in zip(grads._fields, map(backend.numpy, grads), strict=True):
        bad = np.isnan(grad)
        if name in "bc":
            assert not bad[:, 0].any()
        else:
            assert not (bad[:36] if name == "a" else bad[:, :36] if name == "h0" else bad[..., :36]).any()


@pytest.mark.parametrize("place", [3, 4])
def test_infinite_weights_stay_in_their_place(backend, place):
    """Lanes of a warp without a channel have zeros, and add none of them times an infinite b or c."""
    *arrays, grad_y = arguments(0, 5, 1, 3, 2, np.dtype(np.float32))
    for array in arrays[3:5]:
        array[...] = np.abs(array)
    grad_y[...] = np.abs(grad_y)
    arrays[0][...] = np.abs(arrays[0])
    arrays[place][4, 0, 1] = np.inf
    with backend.in_use():
        given_ones = [backend.array(array) for array in arrays]
        _, states = sb.selective_scan(*given_ones)
        grads = sb.selective_scan_vjp(*given_ones, states, backend.array(grad_y))
    for grad in (grads.b, grads.c):
        assert not np.isnan(backend.numpy(grad)).any()


def test_a_reset_lets_nothing_pass(backend):
    """No NaN, neither on nor back, and no infinite factor: both sides of a reset are as if they were alone."""
    *arrays, grad_y = arguments(0, 70, 2, 37, 9, np.dtype(np.float32))
    arrays[1][41], arrays[2][:, 1] = 1000, 1  # exp(dt a) is infinite at the reset, and in the second states only there
    arrays[1][42:] = 0.01
    reset = np.arange(70) == 41

    def run(*steps, bad=slice(0), bad_grads=slice(0)):
        part = slice(*steps)
        x, dt, a, b, c, d = (array[part].copy() if n in (0, 1, 3, 4) else array for n, array in enumerate(arrays))
        gy = grad_y[part].copy()
        x[bad] = dt[bad] = b[bad] = gy[bad_grads] = np.nan
        h0 = np.full((2, 37, 9), np.nan if bad.stop else 0, np.float32)
        with backend.in_use():
            given_ones, flags = [backend.array(array) for array in (x, dt, a, b, c, d)], backend.array(reset[part])
            y, states = sb.selective_scan(*given_ones, backend.array(h0), reset=flags)
            grads = sb.selective_scan_vjp(*given_ones, states, backend.array(gy), reset=flags)
        return {"y": backend.numpy(y)} | {name: backend.numpy(grad) for name, grad in grads._asdict().items()}

    before, after = run(41), run(41, 70)
    of_bad, of_bad_grads = run(0, 70, bad=slice(0, 41)), run(0, 70, bad_grads=slice(41, 70))
    assert np.isfinite(after["y"]).all()
    assert not after["h0"].any()
    for name in ("y", "x", "dt", "b", "c"):
        np.testing.assert_allclose(of_bad[name][41:], after[name], rtol=1e-5, atol=1e-5)
        if name != "y":
            np.testing.assert_allclose(of_bad_grads[name][:41], before[name], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_bad_grads["h0"], before["h0"], rtol=1e-5, atol=1e-5)


def test_any_layout_and_any_number_of_threads():
    *arrays, grad_y = arguments(0, 97, 3, 401, 5, np.dtype(np.float32))
    views = [np.asfortranarray(array) for array in arrays[:5]] + [np.repeat(arrays[5], 2)[::2]]

    def run(x, dt, a, b, c, d):
        y, states = sb.selective_scan(x, dt, a, b, c, d)
        return [y, states, *sb.selective_scan_vjp(x, dt, a, b, c, d, states, grad_y)]

    assert_same_for_any_number_of_threads(lambda: run(*arrays))
    for got, want in zip(run(*views), run(*arrays), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("batch", "channels"), [(1, 601), (2, 257), (33, 130)])
def test_groups_of_channels_in_any_number_of_threads(batch, channels):
    *arrays, grad_y = arguments(1, 67, batch, channels, 16, np.dtype(np.float32))
    _, states = sb.selective_scan(*arrays)
    assert_same_for_any_number_of_threads(lambda: sb.selective_scan_vjp(*arrays, states, grad_y))


def test_wrong_arguments_are_refused():
    names = ("x", "dt", "a", "b", "c", "d", "states", "grad_y", "grad_h_n")
    *arrays, grad_y = arguments(0, 4, 2, 3, 5, np.dtype(np.float64))
    right = dict(zip(names, [*arrays, sb.selective_scan(*arrays).states, grad_y, np.ones((2, 3, 5))], strict=True))
    with pytest.raises(ShapeError, match="h0"):
        sb.selective_scan(*arrays, np.ones((2, 5, 3)))
    for name, array in right.items():
        for error, wrong in ((ShapeError, array[None]), (DTypeError, array.astype(np.float16)), (DTypeError, [1.0])):
            with pytest.raises(error):
                sb.selective_scan_vjp(**{**right, name: wrong})
    for error, wrong in (
        (ShapeError, np.zeros(2, bool)),
        (ShapeError, np.zeros((4, 1), bool)),
        (DTypeError, np.ones(4)),
    ):
        with pytest.raises(error, match="reset"):
            sb.selective_scan(*arrays, reset=wrong)
    for name, array in right.items():
        if name in names[:6]:
            with pytest.raises(ShapeError):
                sb.selective_scan(**{**dict(list(right.items())[:6]), name: np.concatenate([array, array[:1]])})
