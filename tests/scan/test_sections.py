"""Second-order sections against SciPy and a loop in double precision, differentiated by PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import signal

import sparsebp as sb
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from strategies import reals, seeds, sizes, tolerance
from thread_counts import assert_same_for_any_number_of_threads


def drawn(rng: np.random.Generator, sections: int) -> np.ndarray:
    """Return sections with stable poles, real or a complex pair."""
    a2 = rng.uniform(-0.9, 0.9, sections)
    a1 = rng.uniform(-1, 1, sections) * (1 + a2)
    return np.column_stack([rng.standard_normal((sections, 3)), np.ones(sections), a1, a2])


def by_loop(sos: torch.Tensor, x: torch.Tensor, zi: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the last states, of x (T, chains) and zi (S, 2, chains)."""
    ys, states = [], [[*z] for z in zi]
    for now in x:
        u = now
        for c, state in zip(sos, states, strict=True):
            y = c[0] * u + state[0]
            state[:], u = (c[1] * u - c[4] * y + state[1], c[2] * u - c[5] * y), y
        ys.append(u)
    return torch.stack(ys) if ys else x, torch.stack([torch.stack(state) for state in states])


@given(
    steps=sizes(0, 140), before=st.lists(sizes(0, 11), max_size=2), behind=st.lists(sizes(0, 11), max_size=1),
    sections=st.integers(1, 3), dtype=reals, strided=st.booleans(), seed=seeds,
)  # fmt: skip
def test_sections_and_their_gradients(steps, before, behind, sections, dtype, strided, seed):
    rng, axis = np.random.default_rng(seed), len(before)
    shape, of_state = (*before, steps, *behind), (sections, *before, 2, *behind)
    sos, zi, grad_zf = drawn(rng, sections), rng.standard_normal(of_state), rng.standard_normal(of_state)
    x, grad_y = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    if strided:
        x, grad_y = (
            np.asfortranarray(x),
            np.repeat(grad_y, 2, axis=axis)[(slice(None),) * axis + (slice(None, None, 2),)],
        )
    y, zf, saved = sb.sosfilt(sos, x, axis, zi)
    grads = sb.sosfilt_vjp(sos, x, saved, grad_y, axis, grad_zf)
    assert y.dtype == grads.x.dtype == dtype

    wide = [torch.from_numpy(np.array(v, np.float64)).requires_grad_() for v in (sos, x, zi)]
    others = (*before, *behind)
    chains = math.prod(others)
    of_zi = wide[2].movedim(axis + 1, 1).reshape(sections, 2, chains)
    want = by_loop(wide[0], wide[1].movedim(axis, 0).reshape(steps, chains), of_zi)
    want_y, want_zf = want[0].reshape(steps, *others).movedim(0, axis), want[1].reshape(sections, 2, *others)
    want_zf = want_zf.movedim(1, axis + 1)
    sent = [torch.from_numpy(np.array(v, np.float64)) for v in (grad_y, grad_zf)]
    expected = torch.autograd.grad([want_y, want_zf], wide, sent, materialize_grads=True)
    limits, exact = tolerance(dtype, 4), tolerance(np.dtype(np.float64), 1e3)
    for got, true in zip((y, grads.x), (want_y, expected[1]), strict=True):
        np.testing.assert_allclose(got, true.detach(), **limits)
    for got, true in zip((zf, grads.sos[:, [0, 1, 2, 4, 5]], grads.zi),
                         (want_zf, expected[0][:, [0, 1, 2, 4, 5]], expected[2]), strict=True):  # fmt: skip
        np.testing.assert_allclose(got, true.detach(), **exact)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sections_are_those_of_scipy(axis):
    rng = np.random.default_rng(0)
    sos, x = signal.butter(6, 0.2, output="sos"), rng.standard_normal((70, 70, 70))
    zi = rng.standard_normal((3, *(2 if n == axis else 70 for n in range(3))))
    y, zf, _ = sb.sosfilt(sos, x, axis, zi)
    for got, want in zip((y, zf), signal.sosfilt(sos, x, axis, zi), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_any_number_of_threads_gives_the_same():
    rng = np.random.default_rng(0)
    sos, x = drawn(rng, 4), rng.standard_normal((37, 3001), dtype=np.float32)

    def run():
        y, _, saved = sb.sosfilt(sos, x)
        return [y, *sb.sosfilt_vjp(sos, x, saved, x)]

    assert_same_for_any_number_of_threads(run)


def test_wrong_arguments_are_refused():
    sos, x = np.array([[1.0, 0, 0, 1, 0, 0]]), np.ones((3, 5))
    for error, match, args in [
        (DTypeError, "x has", (sos, x.astype(int))), (DTypeError, "sos has", (sos.astype(np.float32), x)),
        (ShapeError, "sos has", (sos[:, :5], x)), (OptionError, "a0", (2 * sos, x)), (OptionError, "axis", (sos, x, 2)),
        (ShapeError, "zi has", (sos, x, 1, np.zeros((1, 2, 3)))), (ShapeError, "x has", (sos, np.ones(()))),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            sb.sosfilt(*args)
