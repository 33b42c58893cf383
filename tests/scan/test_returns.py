"""`gae`, `vtrace`, `td_lambda` and `ewm` against their definitions, step by step, of arrays and of tensors."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as hs

import sparsebp as sb
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from strategies import seeds, sizes
from thread_counts import assert_same_for_any_number_of_threads

# The definitions, over (T, N); `ends` and `final` are numbers 0 and 1.


def gae(gamma, lmbda, v, after, r, ends, final):
    found, later = torch.zeros_like(v), 0
    for t in reversed(range(len(v))):
        delta = r[t] + gamma * torch.where(final[t] > 0, 0, after[t]) - v[t]
        later = found[t] = delta + torch.where(ends[t] > 0, 0, gamma * lmbda * later)
    return found, found + v


def td_lambda(gamma, lmbda, after, r, ends, final):
    after = torch.where(final > 0, 0, after)
    found, later = [None] * len(r), after[-1:].sum(0)
    for t in reversed(range(len(r))):
        later = torch.where(ends[t] > 0, after[t], later)
        later = found[t] = r[t] + gamma * ((1 - lmbda) * after[t] + lmbda * later)
    return torch.stack(found)


def vtrace(gamma, log_pi, log_mu, v, after, r, ends, final, most_rho, most_c):
    ratio, after_or_0 = (log_pi - log_mu).exp(), torch.where(final > 0, 0, after)
    rho, c = ratio.clamp_max(most_rho), ratio.clamp_max(most_c)
    targets, later = [None] * len(v), torch.zeros_like(v[0])
    for t in reversed(range(len(v))):
        later = rho[t] * (r[t] + gamma * after_or_0[t] - v[t]) + gamma * c[t] * torch.where(ends[t] > 0, 0, later)
        targets[t] = later + v[t]
    following = torch.stack([*targets[1:], after[-1]])
    following = torch.where(final > 0, 0, torch.where(ends > 0, after, following))
    return rho * (r + gamma * following - v), torch.stack(targets)


def ewm(x, alpha, min_periods, adjust, ignore_na):
    """Return the means of a series by pandas' documentation: each from its weights."""
    found = np.full(len(x), np.nan)
    for t in range(len(x)):
        there = [i for i in range(t + 1) if not np.isnan(x[i])]
        if len(there) < max(min_periods, 1):
            continue
        if adjust:
            ages = range(len(there))[::-1] if ignore_na else [there[-1] - i for i in there]
            weights = (1 - alpha) ** np.array([*ages], float)
            found[t] = weights @ x[there] / weights.sum()
        else:
            mean = x[there[0]]
            for i, j in itertools.pairwise(there):
                old = (1 - alpha) ** (1 if ignore_na else j - i)
                mean = (old * mean + alpha * x[j]) / (old + alpha)
            found[t] = mean
    return found


def both(run, arrays, gradients=()):
    """Call with arrays and with tensors, which give the same; return the results as tensors."""
    of_arrays = run(*(array.numpy() if isinstance(array, torch.Tensor) else array for array in arrays))
    leaves = [array.clone().requires_grad_(n in gradients) if isinstance(array, torch.Tensor) else array
              for n, array in enumerate(arrays)]  # fmt: skip
    of_tensors = run(*leaves)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (of_arrays, of_tensors)), strict=True):
        assert one.dtype == other.detach().numpy().dtype and one.shape == other.shape
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-12, atol=1e-12)
    return of_tensors, leaves


@given(
    shape=hs.tuples(sizes(1, 3), sizes(1, 9), sizes(1, 3)), dim=hs.integers(-3, 2), floats=hs.booleans(),
    truncated=hs.booleans(), name=hs.sampled_from(["gae", "td_lambda", "vtrace"]), seed=seeds,
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_returns(shape, dim, floats, truncated, name, seed):
    rng = np.random.default_rng(seed)
    v, after, r, log_pi, log_mu = (torch.from_numpy(array) for array in rng.standard_normal((5, *shape)))
    ends = torch.from_numpy(rng.random(shape) < 0.3)
    final = ends & torch.from_numpy(rng.random(shape) < 0.5) if truncated else None
    after[ends if final is None else final] = torch.nan  # is not read
    gamma, lmbda, most = 0.9, np.float64(0.7), (1.1, 0.9)
    flags = [ends.double() if floats else ends, final]
    given, options = {
        "gae": ([gamma, lmbda, v, after, r, *flags], ()), "td_lambda": ([gamma, lmbda, after, r, *flags], ()),
        "vtrace": ([gamma, log_pi, log_mu, v, after, r, *flags], most),
    }[name]  # fmt: skip
    moved = [
        n for n, x in enumerate(given) if isinstance(x, torch.Tensor) and x.dtype == torch.float64 and x is not flags[0]
    ]
    found, leaves = both(lambda *xs: getattr(sb, name)(*xs, *options, time_dim=dim), given, moved)
    steps_first = [x.movedim(dim, 0) if isinstance(x, torch.Tensor) else x for x in leaves]
    steps_first[-1] = steps_first[-2] if final is None else steps_first[-1]
    want = globals()[name](*steps_first, *options)
    found, want = (list(x) if isinstance(x, tuple) else [x] for x in (found, want))
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one.movedim(dim, 0), other)
    wanted = [leaves[n] for n in moved]
    for one, other in zip(*(torch.autograd.grad(sum(y.square().sum() for y in ys), wanted) for ys in (found, want)),
                          strict=True):  # fmt: skip
        torch.testing.assert_close(one, other)


@given(
    steps=sizes(0, 12), columns=sizes(1, 3), alpha=hs.sampled_from([0.5, 0.3, 1.0, 1e-9]), adjust=hs.booleans(),
    ignore_na=hs.booleans(), min_periods=hs.integers(0, 4), gaps=hs.booleans(), dim=hs.booleans(), seed=seeds,
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_ewm(steps, columns, alpha, adjust, ignore_na, min_periods, gaps, dim, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((steps, columns))
    x[rng.random(x.shape) < 0.4 * gaps] = np.nan
    want = np.stack([ewm(column, alpha, min_periods, adjust, ignore_na) for column in x.T], 1)
    run = functools.partial(
        sb.ewm, alpha=alpha, min_periods=min_periods, adjust=adjust, ignore_na=ignore_na, dim=np.int8(-int(dim))
    )
    found, (leaf,) = both(run, [torch.from_numpy(np.ascontiguousarray(x.T if dim else x))], (0,))
    np.testing.assert_allclose((found.T if dim else found).detach().numpy(), want, rtol=1e-9, atol=1e-12)
    (grad,) = torch.autograd.grad(found.nansum(), leaf)
    assert torch.isfinite(grad).all() and not grad[leaf.isnan()].any()


def test_ewm_long_options_and_transforms():
    x = np.random.default_rng(0).standard_normal(50_000)
    for adjust in (True, False):
        exact = sb.ewm(x, span=2000, adjust=adjust)
        np.testing.assert_allclose(sb.ewm(x.astype(np.float32), span=2000, adjust=adjust), exact, atol=2e-5)
        gap = np.concatenate((x[:3], np.full(5000, np.nan), x[3:4]))  # weights of before are below all numbers
        assert np.isfinite(sb.ewm(gap, alpha=0.5, adjust=adjust)).all()
    for options in ({"com": 999.5}, {"halflife": np.log(2) / -np.log1p(-2 / 2001)}, {"alpha": 2 / 2001}):
        np.testing.assert_allclose(sb.ewm(x, **options), sb.ewm(x, span=2000), rtol=1e-9)
    tensor = torch.from_numpy(x[:60].reshape(20, 3))
    want = sb.ewm(tensor, alpha=0.3)
    run = functools.partial(sb.ewm, alpha=0.3, dim=0)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(tensor), want)
    torch.testing.assert_close(torch.func.vmap(run, 1, 1)(tensor), want)
    half = tensor.bfloat16()
    assert torch.equal(sb.ewm(half, alpha=0.01), sb.ewm(half.float(), alpha=0.01).bfloat16())
    assert sb.gae(0.99, 0.95, half, half, half, half > 1)[0].dtype == torch.bfloat16


def test_any_number_of_threads_gives_the_same():
    x = np.random.default_rng(0).standard_normal((501, 203))
    x[np.random.default_rng(1).random(x.shape) < 0.1] = np.nan
    assert_same_for_any_number_of_threads(lambda: [sb.ewm(x, span=20, dim=dim) for dim in (0, 1)])


V, DONE = np.zeros((4, 2)), np.zeros((4, 2), bool)


@pytest.mark.parametrize(("error", "text", "call"), [
    (DTypeError, "Not an array", lambda: sb.gae(0.9, 0.9, [0.0], V, V, DONE)),
    (DTypeError, "another library", lambda: sb.gae(0.9, 0.9, V, V, torch.zeros(4, 2), DONE)),
    (DTypeError, "reward has the wrong dtype", lambda: sb.gae(0.9, 0.9, V, V, V.astype(int), DONE)),
    (DTypeError, "reward has the wrong dtype", lambda: sb.td_lambda(0.9, 0.9, V, V.astype(np.float32), DONE)),
    (ShapeError, "done has the wrong shape", lambda: sb.gae(0.9, 0.9, V, V, V, DONE[:1])),
    (OptionError, "the steps' axis", lambda: sb.gae(0.9, 0.9, V, V, V, DONE, time_dim=2)),
    (OptionError, "the steps' axis", lambda: sb.gae(0.9, 0.9, V[0], V[0], V[0], DONE[0])),
    (OptionError, "the steps' axis", lambda: sb.ewm(V, alpha=0.5, dim=False)),
    (ShapeError, "no axis", lambda: sb.ewm(V[0, 0, ...], alpha=0.5)),
    (OptionError, "not given once", lambda: sb.ewm(V)),
    (OptionError, "not given once", lambda: sb.ewm(V, com=1, alpha=0.5)),
    (OptionError, "alpha is out of range", lambda: sb.ewm(V, alpha=1.5)),
    (OptionError, "alpha is out of range", lambda: sb.ewm(V, alpha=0)),
    (OptionError, "span is out of range", lambda: sb.ewm(V, span=0.5)),
    (OptionError, "halflife is out of range", lambda: sb.ewm(V, halflife=0)),
    (DTypeError, "x has the wrong dtype", lambda: sb.ewm(V.astype(int), alpha=0.5)),
])  # fmt: skip
def test_refusals(error, text, call):
    with pytest.raises(error, match=text):
        call()
