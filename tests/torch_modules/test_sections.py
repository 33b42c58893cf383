"""`st.sosfilt` against SciPy and a loop in PyTorch, with all its derivatives."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as hs
from scipy import signal
from torch import Tensor

import sparsebp.torch as st
from sparsebp.core.errors import DeviceError, DTypeError, OptionError, ShapeError
from strategies import seeds, sizes

STABLE = torch.tensor([[1.0, 0.3, -0.2, 1, -0.5, 0.4], [0.7, 0.1, 0.9, 1, 0.2, -0.3]], dtype=torch.float64)


def loop(sos: Tensor, x: Tensor, dim: int, zi: Tensor) -> tuple[Tensor, Tensor]:
    """Return y and the last states, step by step."""
    found, states = [], [list(z.unbind(dim)) for z in zi]
    for now in x.unbind(dim):
        u = now.double()
        for c, state in zip(sos, states, strict=True):
            y = c[0] * u + state[0]
            state[:], u = (c[1] * u - c[4] * y + state[1], c[2] * u - c[5] * y), y
        found.append(u)
    return torch.stack(found, dim).to(x.dtype), torch.stack([torch.stack(state, dim) for state in states])


def case(shape, dim, sections=2, seed=0, dtype=torch.float64):
    """Return sections, a signal and states."""
    generator = torch.Generator().manual_seed(seed)
    of_state = (sections, *shape[:dim], 2, *shape[dim + 1 :])
    x, zi = (torch.randn(s, generator=generator, dtype=torch.float64) for s in (shape, of_state))
    return STABLE[:sections].clone().requires_grad_(), x.to(dtype).requires_grad_(), zi.requires_grad_()


@given(
    shape=hs.lists(sizes(1, 9), min_size=1, max_size=3).map(tuple), at=hs.integers(0, 2), sections=hs.integers(1, 2),
    single=hs.booleans(), turned=hs.booleans(), seed=seeds,
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_against_a_loop(shape, at, sections, single, turned, seed):
    dim = at % len(shape)
    sos, x, zi = case(shape, dim, sections, seed, torch.float32 if single else torch.float64)
    given_x = x.flip(dim).mT.contiguous().mT if turned and len(shape) > 1 else x
    y, zf = st.sosfilt(sos, given_x, dim - len(shape), zi)
    want = loop(sos, given_x, dim, zi)
    close = {"rtol": 1e-5, "atol": 1e-6} if single else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close((y, zf), want, **close)
    along = torch.randn_like(y), torch.randn_like(zf)
    found = torch.autograd.grad((y, zf), (sos, x, zi), along, retain_graph=True)
    again = torch.autograd.grad((y, zf), (sos, x, zi), along, create_graph=True)  # by sections that are differentiable
    for one, other, true in zip(found, again, torch.autograd.grad(want, (sos, x, zi), along), strict=True):
        torch.testing.assert_close(one, true, **close)
        torch.testing.assert_close(other, true, **close)
    of_scipy = signal.sosfilt(sos.detach(), given_x.detach(), dim, zi.detach())[0]
    np.testing.assert_allclose(y.detach(), of_scipy, **close)


@pytest.mark.parametrize(("shape", "dim"), [((4, 2), 0), ((1, 2), 0), ((2, 3), 1)])
def test_derivatives_of_any_order(shape, dim):
    sos, x, zi = case(shape, dim)

    def run(of_sos, x, zi):
        ones = torch.ones_like(of_sos[:, :1])
        return st.sosfilt(torch.cat([of_sos[:, :3], ones, of_sos[:, 3:]], 1), x, dim, zi)

    inputs = torch.cat([sos[:, :3], sos[:, 4:]], 1).detach().requires_grad_(), x, zi
    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, inputs, check_fwd_over_rev=True, fast_mode=True)
    assert not torch.autograd.grad(st.sosfilt(sos, x, dim, zi)[0].sum(), sos)[0][:, 3].any()


def test_transforms_and_compiled_graphs():
    sos, x, zi = (tensor.detach() for tensor in case((5, 3), 0))
    many, states = torch.stack([x, 2 * x, -x], 1), torch.stack([zi, zi, 0 * zi], -1)
    run = functools.partial(st.sosfilt, dim=0)
    for dims, tensors in (((None, 1, None), (sos, many, zi)), ((None, 1, 3), (sos, many, states)),
                        ((0, None, None), (torch.stack([sos, sos[[1, 0]]]), x, zi))):  # fmt: skip
        count = next(v.shape[d] for v, d in zip(tensors, dims, strict=True) if d is not None)
        each = [[v if d is None else v.select(d, n) for v, d in zip(tensors, dims, strict=True)] for n in range(count)]
        wanted = [loop(of_sos, of_x, 0, of_zi) for of_sos, of_x, of_zi in each]
        found = torch.func.vmap(lambda a, b, c: run(a, b, zi=c), dims)(*tensors)
        torch.testing.assert_close(found, tuple(torch.stack(part) for part in zip(*wanted, strict=True)))

    def total(x, f):
        return f(sos, x, 0, zi)[0].square().sum()

    for derivative in (torch.func.grad, torch.func.hessian):
        found, want = (torch.func.vmap(derivative(functools.partial(total, f=f)), 1)(many) for f in (st.sosfilt, loop))
        torch.testing.assert_close(found, want)

    def both(sos, x):
        y, zf = st.sosfilt(sos, x.sin(), 0)
        return y.cos(), zf

    compiled, leaves = torch.compile(both, fullgraph=True, backend="aot_eager"), case((5, 3), 0)[:2]
    torch.testing.assert_close(compiled(*leaves), both(*leaves))
    grads = [torch.autograd.grad(f(*leaves)[0].sum(), leaves) for f in (compiled, both)]
    torch.testing.assert_close(*grads)


def test_dtypes_and_empty_signals():
    sos, x, zi = case((7, 3), 0)
    half = x.detach().bfloat16().requires_grad_()
    y, zf = st.sosfilt(sos.float(), half, 0)
    assert (y.dtype, zf.dtype) == (torch.bfloat16, torch.float64)
    torch.testing.assert_close(y, st.sosfilt(sos.float(), half.float(), 0)[0].bfloat16())
    assert torch.autograd.grad(y.sum(), half)[0].dtype == torch.bfloat16
    first = st.sosfilt(sos, x[:4], 0, zi)
    torch.testing.assert_close(st.sosfilt(sos, x[4:], 0, first[1])[0], st.sosfilt(sos, x, 0, zi)[0][4:])
    for shape in ((0, 3), (4, 0)):
        inputs = case(shape, 0)
        y, zf = st.sosfilt(inputs[0], inputs[1], 0, inputs[2])
        for create_graph in (False, True):
            found = torch.autograd.grad((y.sum(), zf.sum()), inputs, retain_graph=True, create_graph=create_graph)
            assert [grad.shape for grad in found] == [tensor.shape for tensor in inputs]
            assert not found[0].any() and (shape[0] or found[2].eq(1).all())


X = torch.ones(3, 5)


@pytest.mark.parametrize(("error", "text", "call"), [
    (DTypeError, "x has the wrong dtype", lambda: st.sosfilt(STABLE, X.long())),
    (DTypeError, "sos has the wrong dtype", lambda: st.sosfilt(STABLE.numpy(), X)),
    (DeviceError, "x is elsewhere", lambda: st.sosfilt(STABLE, X.to("meta"))),
    (ShapeError, "sos has the wrong shape", lambda: st.sosfilt(STABLE[:, :5], X)),
    (ShapeError, "zi has the wrong shape", lambda: st.sosfilt(STABLE, X, zi=torch.ones(2, 2, 3))),
    (OptionError, "dim", lambda: st.sosfilt(STABLE, X, 2)),
    (OptionError, "a0 is not 1", lambda: st.sosfilt(2 * STABLE, X)),
])  # fmt: skip
def test_refusals(error, text, call):
    with pytest.raises(error, match=text):
        call()
