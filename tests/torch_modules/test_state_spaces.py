"""`st.selective_scan` and `st.LRU` against NumPy's, with all their derivatives."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as hs
from torch import Tensor

import sparsebp as sb
import sparsebp.torch as st
from sparsebp import nn
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from strategies import seeds, sizes

F8 = {"dtype": torch.float64}


def case(steps: int, batch: int, channels: int, order: int, seed: int = 0) -> list[Tensor]:
    """Return x, dt, a, b, c, d and h0."""
    shapes = [(steps, batch, channels)] * 2 + [(channels, order)] + [(steps, batch, order)] * 2
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(s, generator=generator, **F8) for s in (*shapes, (channels,), (batch, channels, order))]
    drawn[1], drawn[2] = drawn[1].abs(), -drawn[2].abs()
    return [tensor.requires_grad_() for tensor in drawn]


@given(
    steps=sizes(0, 70), batch=sizes(0, 4), channels=sizes(1, 5), order=sizes(1, 4), reverse=hs.booleans(),
    with_lengths=hs.booleans(), with_h0=hs.booleans(), with_d=hs.booleans(), resets=hs.sampled_from([0, 1, 2]),
    seed=seeds,
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_selective_scan_is_numpys(steps, batch, channels, order, reverse, with_lengths, with_h0, with_d, resets, seed):
    """Each sample alone, of its length and turned around, by NumPy's kernel; and padding is not read."""
    inputs, rng = case(steps, batch, channels, order, seed), np.random.default_rng(seed)
    lengths = rng.integers(0, steps + 1, batch) if with_lengths else np.full(batch, steps)
    x, dt, a, b, c, *optional = inputs
    optional = [tensor if there else None for tensor, there in zip(optional, (with_d, with_h0), strict=True)]
    gy, gh = torch.randn(steps, batch, channels, **F8), torch.randn(batch, channels, order, **F8)
    with torch.no_grad():
        for tensor in (x, dt, b, c):
            tensor[torch.arange(steps)[:, None] >= torch.from_numpy(lengths)] = torch.nan
    reset = torch.from_numpy(rng.random((steps, batch)[:resets]) < 0.2) if resets else None  # of all, or of each sample
    flags = torch.zeros(steps, batch, dtype=torch.bool)
    if resets:
        flags |= reset if reset.ndim == 2 else reset[:, None]
    y, h_n = st.selective_scan(
        x, dt, a, b, c, *optional, reverse=reverse, lengths=lengths.tolist() if with_lengths else None, reset=reset
    )
    wanted = [tensor for tensor in (x, dt, a, b, c, *optional) if tensor is not None]
    grads = torch.autograd.grad((y * gy).sum() + (h_n * gh).sum(), wanted)
    for s, n in enumerate(lengths):

        def of_sample(tensor, s=s, n=n):
            return np.ascontiguousarray(tensor.detach().numpy()[:n, s : s + 1][:: -1 if reverse else 1])

        d, h0 = (None if tensor is None else tensor.detach().numpy() for tensor in optional)
        arrays = [*map(of_sample, (x, dt)), a.detach().numpy(), *map(of_sample, (b, c)), d]
        cleared = of_sample(flags)
        found = sb.selective_scan(*arrays, None if h0 is None else h0[s : s + 1], reset=cleared)
        back = sb.selective_scan_vjp(*arrays, found.states, of_sample(gy), gh.numpy()[s : s + 1], reset=cleared)
        np.testing.assert_allclose(of_sample(y), found.y, atol=1e-12)
        np.testing.assert_allclose(h_n.detach().numpy()[s : s + 1], found.h_n, atol=1e-12)
        for grad, want in zip((grads[0], grads[1], grads[3], grads[4]), (back.x, back.dt, back.b, back.c), strict=True):
            np.testing.assert_allclose(of_sample(grad), want, atol=1e-10)
            assert not grad[n:, s].any()
        if with_h0:
            np.testing.assert_allclose(grads[-1][s : s + 1], back.h0, atol=1e-10)


RESET = torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1]]) > 0


@pytest.mark.parametrize(
    ("reverse", "lengths", "reset"), [(False, None, None), (True, [3, 0], None), (True, [3, 2], RESET[:3])]
)
def test_derivatives_of_the_selective_scan(reverse, lengths, reset):
    run = functools.partial(st.selective_scan, reverse=reverse, lengths=lengths, reset=reset)
    inputs = case(3, 2, 2, 2)
    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_a_reset_of_the_selective_scan_lets_no_nan_pass():
    inputs, reset = case(5, 2, 3, 2), torch.arange(5) == 2
    with torch.no_grad():
        for k in (0, 1, 3, 4):
            inputs[k][:2] = torch.nan

    def of_end(start, twice):
        x, dt, a, b, c, *others = inputs
        parts = [tensor[start:] for tensor in (x, dt, b, c)]
        y, _ = st.selective_scan(*parts[:2], a, *parts[2:], *others, reset=reset[start:])
        grads = torch.autograd.grad(y[2 - start :].square().sum(), (x, dt, b, c), create_graph=twice)
        if twice:
            grads = torch.autograd.grad(sum(grad[2:].square().sum() for grad in grads), (x, dt, b, c))
        return [grad[2:] for grad in grads]

    for twice in (False, True):
        for one, other in zip(of_end(0, twice), of_end(2, twice), strict=True):
            torch.testing.assert_close(one, other)


def test_selective_scan_mapped_compiled_and_in_half_precision():
    x, *others = case(4, 2, 3, 2)
    many, lengths = torch.randn(3, *x.shape, **F8), torch.tensor([[4, 0], [1, 3], [2, 2]])
    resets = torch.stack([RESET, ~RESET, RESET.flip(0)])

    def run(x, n, a, reset=RESET):
        return st.selective_scan(x, others[0], a, *others[2:], reverse=True, lengths=n, reset=reset)

    for dims, rates in (((0, 0, None, 0), others[1]), ((0, 0, 0, 0), torch.stack([others[1]] * 3))):
        found = torch.func.vmap(run, dims)(many, lengths, rates, resets)
        want = map(run, many, lengths, [others[1]] * 3, resets)
        for one, other in zip(found, map(torch.stack, zip(*want, strict=True)), strict=True):
            torch.testing.assert_close(one, other)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    grads = (torch.autograd.grad(f(x, lengths[0], others[1])[0].sum(), (x, others[1])) for f in (compiled, run))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(OptionError, match="A length is out of range"):
        compiled(x, lengths[0] + 1, others[1])
    half = [tensor.detach().bfloat16() for tensor in (x, *others)]
    for found, want in zip(st.selective_scan(*half), st.selective_scan(*(h.float() for h in half)), strict=True):
        assert found.dtype == torch.bfloat16 and torch.equal(found, want.bfloat16())


@given(
    steps=sizes(1, 9), batch=sizes(1, 5), features=sizes(1, 5), states=sizes(1, 5), batch_first=hs.booleans(),
    with_h0=hs.booleans(), with_lengths=hs.booleans(), seed=seeds,
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_lru_is_that_without_pytorch(steps, batch, features, states, batch_first, with_h0, with_lengths, seed):
    rng = np.random.default_rng(seed)
    ours = nn.LRU(features, states, batch_first, rng=rng, dtype=np.float64)
    theirs = st.LRU(features, states, batch_first, **F8)
    assert [*theirs.state_dict()] == [*ours.state_dict()]
    theirs.load_state_dict({name: torch.from_numpy(array) for name, array in ours.state_dict().items()})
    x = rng.standard_normal((batch, steps, features) if batch_first else (steps, batch, features))
    h0 = rng.standard_normal((1, batch, states)) + 1j * rng.standard_normal((1, batch, states)) if with_h0 else None
    lengths = rng.integers(1, steps + 1, batch) if with_lengths else None
    y, saved = ours.forward(x, h0, lengths)
    gy, gh = rng.standard_normal(y.shape), rng.standard_normal((1, batch, states)) + 0j
    found = ours.gradients(gy, saved, gh)
    tensors = [None if array is None else torch.tensor(array, requires_grad=True) for array in (x, h0)]
    ty, th = theirs(*tensors, lengths=None if lengths is None else lengths.tolist())
    ((ty * torch.tensor(gy)).sum() + (th * torch.tensor(gh).conj()).real.sum()).backward()
    want = {"y": ty, "h_n": th, "x": tensors[0].grad, **{name: p.grad for name, p in theirs.named_parameters()}}
    for name, array in ({"y": y, "h_n": saved.h_n, "x": found.input} | found.weights).items():
        np.testing.assert_allclose(want[name].detach().numpy(), array, rtol=1e-8, atol=1e-10, err_msg=name)
    if h0 is not None:
        np.testing.assert_allclose(tensors[1].grad.numpy(), found.h0, rtol=1e-9, atol=1e-11)


def test_lru_drawn_shown_compiled_and_exported():
    layer = st.LRU(3, 400, r_min=0.9, r_max=0.99, max_phase=1.0)
    assert repr(layer) == "LRU(3, 400, r_min=0.9, r_max=0.99)"
    with torch.no_grad():
        modulus, phase = torch.exp(-layer.nu_log.exp()), layer.theta_log.exp()
        assert 0.9 <= modulus.min() < 0.91 and 0.98 < modulus.max() <= 0.99 and phase.max() <= 1
        torch.testing.assert_close(layer.gamma_log.exp(), (1 - modulus**2).sqrt(), rtol=1e-4, atol=0)
    layer, x, lengths = st.LRU(3, 4), torch.randn(7, 2, 3), torch.tensor([0, 5])
    x[5:] = torch.nan
    want, hx = layer(x, lengths=lengths), torch.randn(1, 2, 4, dtype=torch.complex64)
    assert torch.equal(layer(x, hx, lengths=lengths)[1][:, 0], hx[:, 0])
    exported = torch.export.export(layer, (x,), {"lengths": lengths}).module()
    for run in (torch.compile(layer, fullgraph=True, backend="aot_eager"), exported):
        for one, other in zip(run(x, lengths=lengths), want, strict=True):
            torch.testing.assert_close(one, other)
    want[0].sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())
    for one, other in zip(layer(x[:5, 1], hx[:, 1]), layer(x[:5, 1:], hx[:, 1:]), strict=True):
        torch.testing.assert_close(one, other.squeeze(1))


X, A, B = torch.ones(4, 2, 3), torch.ones(3, 5), torch.ones(4, 2, 5)


@pytest.mark.parametrize(("error", "text", "call"), [
    (DTypeError, "x has the wrong dtype", lambda: st.selective_scan(X + 0j, X, A, B, B)),
    (DTypeError, "a has the wrong dtype", lambda: st.selective_scan(X, X, A.double(), B, B)),
    (ShapeError, "x has the wrong shape", lambda: st.selective_scan(X[0], X, A, B, B)),
    (ShapeError, "a has the wrong shape", lambda: st.selective_scan(X, X, A.T, B, B)),
    (ShapeError, "c has the wrong shape", lambda: st.selective_scan(X, X, A, B, B[:3])),
    (OptionError, "A length is out of range", lambda: st.selective_scan(X, X, A, B, B, lengths=[5, 1])),
    (DTypeError, "reset has the wrong dtype", lambda: st.selective_scan(X, X, A, B, B, reset=X)),
    (ShapeError, "reset has the wrong shape", lambda: st.selective_scan(X, X, A, B, B, reset=X > 0)),
    (OptionError, "The ring of λ is empty", lambda: st.LRU(3, 5, r_min=1.0)),
    (ShapeError, "input has the wrong shape", lambda: st.LRU(2, 5)(X)),
    (ShapeError, "input is empty", lambda: st.LRU(3, 5)(X[:0])),
    (ShapeError, "hx has the wrong shape", lambda: st.LRU(3, 5)(X, torch.ones(1, 2, 4) + 0j)),
    (DTypeError, "hx has the wrong dtype", lambda: st.LRU(3, 5)(X, torch.ones(1, 2, 5))),
])  # fmt: skip
def test_refusals(error, text, call):
    with pytest.raises(error, match=text):
        call()
