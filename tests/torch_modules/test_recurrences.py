"""`st.linear_recurrence` against a loop in PyTorch, with all its derivatives; gated layers against those of `nn`."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as hs
from torch import Tensor

import sparsebp.torch as st
from sparsebp import nn
from sparsebp.core.errors import DeviceError, DTypeError, OptionError, ShapeError
from sparsebp.torch import gated
from strategies import seeds, sizes

F8 = {"dtype": torch.float64}


def loop(
    a: Tensor, b: Tensor, h0: Tensor | None, reverse: bool = False, lengths: list[int] | None = None,
    reset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return h step by step; a sample that has ended is zero."""
    cleared = torch.zeros(b.shape, dtype=torch.bool) if reset is None else reset.expand(b.shape)
    h = torch.zeros_like(b[0]) if h0 is None else h0
    a, found = a.expand(b.shape), {}
    for t in reversed(range(len(b))) if reverse else range(len(b)):
        on = torch.tensor([True if lengths is None else t < n for n in lengths or [1] * b.shape[1]])[:, None]
        past = torch.where(on & ~cleared[t], a[t], 0) * torch.where(cleared[t], 0, h)
        h = torch.where(on, past + torch.where(on, b[t], 0), h)
        found[t] = torch.where(on, h, 0)
    return torch.stack([found[t] for t in range(len(b))])


def case(shape, shared=(), dtype=torch.float64, seed=0):
    """Return a, b and h0, a of length 1 along the axes `shared`."""
    generator = torch.Generator().manual_seed(seed)
    of_a = [1 if axis in shared else n for axis, n in enumerate(shape)]
    return tuple(torch.randn(s, dtype=dtype, generator=generator).requires_grad_() for s in (of_a, shape, shape[1:]))


@given(
    shape=hs.tuples(sizes(1, 7), sizes(1, 5), sizes(1, 5)), shared=hs.sets(hs.integers(0, 2)), reverse=hs.booleans(),
    dtype=hs.sampled_from([torch.float64, torch.complex128]), with_lengths=hs.booleans(), with_h0=hs.booleans(),
    dim=hs.integers(-3, 2), of_reset=hs.none() | hs.sets(hs.integers(0, 2)), seed=hs.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_against_a_loop(shape, shared, reverse, dtype, with_lengths, with_h0, dim, of_reset, seed):
    a, b, h0 = case(shape, shared, dtype, seed)
    h0 = h0 if with_h0 else None
    lengths = reset = None
    if of_reset is not None:
        reset = torch.from_numpy(np.random.default_rng(seed).random(shape)) < 0.3
        reset = reset[tuple(slice(1) if axis in of_reset else slice(None) for axis in range(3))]
        if not shared and shape[0] > 2:  # what the other side of a reset has, nobody reads either
            with torch.no_grad():
                b[0], a[1], reset = 1 if dtype.is_complex else torch.inf, torch.nan, reset.expand(shape).clone()
                reset[1] = True
                reset[0] = reverse
    if with_lengths:
        lengths = np.random.default_rng(seed).integers(0, shape[0] + 1, shape[1]).tolist()
        padding = torch.arange(shape[0])[:, None] >= torch.tensor(lengths)
        with torch.no_grad():
            for tensor in (a, b):  # nobody reads it
                tensor[padding.expand(tensor.shape[:2]) if tensor.shape[:2] == shape[:2] else slice(0)] = torch.nan
    want, gh = loop(a, b, h0, reverse, lengths, reset), torch.randn(shape, dtype=dtype)
    inputs = (a, b) if h0 is None else (a, b, h0)
    turned, options = (x.movedim(0, dim) for x in (a, b)), {"dim": dim, "reverse": reverse, "lengths": lengths}
    found = st.linear_recurrence(*turned, h0, **options, reset=None if reset is None else reset.movedim(0, dim))
    found = found.movedim(dim, 0)
    torch.testing.assert_close(found, want)
    by_kernel, by_loop = (torch.autograd.grad(y, inputs, gh, retain_graph=True) for y in (found, want))
    again = torch.autograd.grad(found, inputs, gh, create_graph=True)  # another way: one that is differentiable
    for one, other, expected in zip(by_kernel, again, by_loop, strict=True):
        torch.testing.assert_close(one, expected)
        torch.testing.assert_close(other, expected)


@pytest.mark.parametrize(("dtype", "shared"), [
    *((torch.float64, shared) for shared in ((), (0,), (2,))), (torch.complex128, (0, 1)),
])  # fmt: skip
def test_derivatives_of_any_order(dtype, shared):
    inputs = case((3, 2, 2), shared, dtype)
    cut = torch.tensor([[[True, False]], [[False, False]], [[False, True]]])
    for reverse, lengths, reset in (
        (False, None, None), (True, None, cut), (False, [3, 0], cut), (True, [1, 2], cut[:1]),
    ):  # fmt: skip
        run = functools.partial(st.linear_recurrence, reverse=reverse, lengths=lengths, reset=reset)
        assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(
            run, inputs, check_fwd_over_rev=True, check_batched_grad=reverse, fast_mode=True
        )


@pytest.mark.parametrize("needed", [(1,), (2,), (0, 2)])
@pytest.mark.parametrize("lengths", [None, [4, 2]])
def test_gradients_only_where_needed(needed, lengths):
    """Without one at a, the states are not kept, and the way back is a recurrence."""
    for reverse, shared in ((False, ()), (True, ()), (False, (0,)), (True, (0,))):
        inputs = case((4, 2, 3), shared, torch.complex128)
        for n, x in enumerate(inputs):
            x.requires_grad_(n in needed)
        h, given = st.linear_recurrence(*inputs, reverse=reverse, lengths=lengths), [inputs[n] for n in needed]
        want = torch.autograd.grad((loop(*inputs, reverse, lengths) ** 2).abs().sum(), given)
        for one, other in zip(torch.autograd.grad((h**2).abs().sum(), given, retain_graph=True), want, strict=True):
            torch.testing.assert_close(one, other)
        kept = [tensor.data_ptr() for tensor in h.grad_fn.saved_tensors if tensor is not None]
        assert (h.data_ptr() in kept) == (0 in needed)


def test_any_axes_and_dtypes():
    """Numbers, one axis and two; a real factor with complex terms; half precision by float32."""
    a, b, h0 = (x.detach() for x in case((5, 2, 3)))
    whole = st.linear_recurrence(a, b, h0)
    for number in (0.5, -1, 0.5j, np.float32(0.5), np.complex64(0.5j)):
        want = loop(torch.full((1, 1, 1), complex(number), dtype=torch.complex128), b + 0j, h0 + 0j)
        got = st.linear_recurrence(number, b, h0)
        assert got.dtype == (torch.complex128 if np.iscomplex(number) else torch.float64)
        torch.testing.assert_close(got + 0j, want)
    torch.testing.assert_close(st.linear_recurrence(a[:, 0], b[:, 0], h0[0]), whole[:, 0])
    torch.testing.assert_close(st.linear_recurrence(a[:, 0, 1], b[:, 0, 1], h0[0, 1]), whole[:, 0, 1])
    torch.testing.assert_close(st.linear_recurrence(a[0, 0], b[:, 0]), loop(a[:1, :1], b[:, :1], None)[:, 0])
    rows = st.linear_recurrence(a[:, :, 1], b[:, :, 1], h0[:, 1], reverse=True, lengths=[3, 0])
    torch.testing.assert_close(rows, loop(a, b, h0, True, [3, 0])[:, :, 1])
    mixed = a.clone().requires_grad_(), (b + 1j * b.flip(0)).requires_grad_(), h0.clone().requires_grad_()
    assert torch.autograd.gradcheck(st.linear_recurrence, mixed)
    for dtype in (torch.float16, torch.bfloat16):
        half = [x.to(dtype).requires_grad_() for x in (a, b, h0)]
        h = st.linear_recurrence(*half)
        assert h.dtype == dtype
        torch.testing.assert_close(h, loop(*(x.float() for x in half)).to(dtype))
        assert all(grad.dtype == dtype for grad in torch.autograd.grad(h.sum(), half))


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (1, 1, 1)])
def test_empty(shape):
    inputs = case(shape)
    h = st.linear_recurrence(*inputs)
    assert h.shape == shape
    for create_graph in (False, True):
        for grad, x in zip(torch.autograd.grad(h.sum(), inputs, retain_graph=True, create_graph=create_graph), inputs,
                           strict=True):  # fmt: skip
            assert grad.shape == x.shape


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (None, 0, None), (0, None, None), (1, 2, 1), (None, 3, 0)])
@pytest.mark.parametrize("shared", [(), (0, 1)])
def test_vmap(in_dims, shared):
    plain = case((4, 2, 3), shared)
    mapped = [x if d is None else torch.stack([x, 2 * x, -x], d) for x, d in zip(plain, in_dims, strict=True)]
    want = torch.stack([
        loop(*(x if d is None else x.select(d, n) for x, d in zip(mapped, in_dims, strict=True))) for n in range(3)
    ])  # fmt: skip
    torch.testing.assert_close(torch.func.vmap(st.linear_recurrence, in_dims)(*mapped), want)

    def total(b, run):
        return run(plain[0], b, plain[2]).square().sum()

    many = torch.stack([plain[1], 2 * plain[1]])
    for derivative in (torch.func.grad, torch.func.hessian):
        found, expected = (torch.func.vmap(derivative(functools.partial(total, run=run)))(many)
                           for run in (st.linear_recurrence, loop))  # fmt: skip
        torch.testing.assert_close(found, expected)
    lengths, run = torch.tensor([[4, 0], [1, 3]]), functools.partial(st.linear_recurrence, reverse=True)
    cut = torch.tensor([[[True], [False]], [[False], [True]], [[False], [False]], [[True], [True]]])
    for reset in (cut, cut[:, :1]):
        found = torch.func.vmap(lambda b, n, r=reset: run(plain[0], b, plain[2], lengths=n, reset=r))(many, lengths)
        torch.testing.assert_close(found, torch.stack([loop(plain[0], b, plain[2], True, n.tolist(), reset)
                                                       for b, n in zip(many, lengths, strict=True)]))  # fmt: skip
    cuts = torch.stack([cut, ~cut], 1)
    found = torch.func.vmap(lambda b, r: run(plain[0], b, plain[2], reset=r), (0, 1))(many, cuts)
    torch.testing.assert_close(found, torch.stack([loop(plain[0], b, plain[2], True, None, cuts[:, n])
                                                   for n, b in enumerate(many)]))  # fmt: skip


def test_compiled_graphs_have_no_break():
    a, b, h0 = case((6, 2, 3), (0,))

    def run(a, b, h0):
        return st.linear_recurrence(a.sigmoid(), b.tanh(), h0).sin()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b, h0), run(a, b, h0))
    for one, other in zip(*(torch.autograd.grad(f(a, b, h0).sum(), (a, b, h0)) for f in (compiled, run)), strict=True):
        torch.testing.assert_close(one, other)
    lengths = torch.tensor([5, 0])

    def with_lengths(a, b, lengths):
        return st.linear_recurrence(a, b, h0, lengths=lengths, reverse=True, reset=b > 1)

    compiled = torch.compile(with_lengths, fullgraph=True, backend="aot_eager")
    for one, other in zip(*(torch.autograd.grad(f(a, b, lengths).sum(), (a, b)) for f in (compiled, with_lengths)),
                          strict=True):  # fmt: skip
        torch.testing.assert_close(one, other)
    with pytest.raises(OptionError, match="A length is out of range"):
        compiled(a, b, lengths + 2)


@pytest.mark.parametrize("make", [st.MinGRU, st.MinLSTM])
def test_compiled_and_exported_layers(make):
    layer, lengths = make(3, 5, 2, bidirectional=True, **F8), torch.tensor([5, 7])
    x = torch.randn(7, 2, 3, **F8)
    for n in (None, lengths):
        y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, lengths=n)[0]
        torch.testing.assert_close(y, layer(x, lengths=n)[0])
    exported = torch.export.export(layer, (x,), {"lengths": lengths}).module()
    for n in (lengths, lengths - 5):
        for one, other in zip(exported(x, lengths=n), layer(x, lengths=n), strict=True):
            torch.testing.assert_close(one, other)


def test_autocast():
    layer, x = st.MinGRU(3, 5), torch.randn(7, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y, h_n = layer(x.bfloat16())
        assert y.dtype == h_n.dtype == torch.float32
        torch.testing.assert_close(y, layer(x.bfloat16().float())[0])
        half = torch.rand(4, 2, 3, dtype=torch.bfloat16)
        assert st.linear_recurrence(half, half).dtype == torch.float32
        assert st.linear_recurrence(half, half.float()).dtype == torch.float32
    with pytest.raises(DTypeError):
        st.linear_recurrence(half, half.float())


# ---- MinGRU --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MinGRU", "MinLSTM"])
@given(
    steps=sizes(1, 9), batch=sizes(1, 5), features=sizes(1, 5), hidden=sizes(1, 5), num_layers=hs.integers(1, 3),
    bidirectional=hs.booleans(), batch_first=hs.booleans(), bias=hs.booleans(), with_h0=hs.booleans(),
    with_lengths=hs.booleans(), nonlinearity=hs.sampled_from(["identity", "positive"]), seed=seeds,
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_layers_are_those_without_pytorch(
    name, steps, batch, features, hidden, num_layers, bidirectional, batch_first, bias, with_h0, with_lengths,
    nonlinearity, seed,
):  # fmt: skip
    rng, options = np.random.default_rng(seed), {
        "num_layers": num_layers, "bias": bias, "batch_first": batch_first, "bidirectional": bidirectional,
        "nonlinearity": nonlinearity,
    }  # fmt: skip
    ours = getattr(nn, name)(features, hidden, rng=rng, dtype=np.float64, **options)
    theirs = getattr(st, name)(features, hidden, **F8, **options)
    assert [*theirs.state_dict()] == [*ours.state_dict()]
    theirs.load_state_dict({key: torch.from_numpy(array) for key, array in ours.state_dict().items()})
    x = rng.standard_normal((batch, steps, features) if batch_first else (steps, batch, features))
    h0 = rng.standard_normal((num_layers * ours.directions, batch, hidden)) if with_h0 else None
    lengths = rng.integers(1, steps + 1, batch) if with_lengths else None
    y, saved = ours.forward(x, h0, lengths)
    gy, gh = rng.standard_normal(y.shape), rng.standard_normal(saved.h_n.shape)
    found = ours.gradients(gy, saved, gh)
    tensors = [None if array is None else torch.tensor(array, requires_grad=True) for array in (x, h0)]
    ty, th = theirs(*tensors, lengths=None if lengths is None else lengths.tolist())
    ((ty * torch.tensor(gy)).sum() + (th * torch.tensor(gh)).sum()).backward()
    want = {"y": ty, "h_n": th, "x": tensors[0].grad, **{key: p.grad for key, p in theirs.named_parameters()}}
    for key, array in ({"y": y, "h_n": saved.h_n, "x": found.input} | found.weights).items():
        np.testing.assert_allclose(want[key].detach().numpy(), array, rtol=1e-9, atol=1e-11, err_msg=key)
    if h0 is not None:
        np.testing.assert_allclose(tensors[1].grad.numpy(), found.h0, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("nonlinearity", "reverse", "gates"), [
    ("identity", False, 2), ("positive", True, 2), ("positive", False, 3), ("identity", True, 3),
])  # fmt: skip
def test_the_operator_of_gated_layers_has_all_derivatives(nonlinearity, reverse, gates):
    torch.manual_seed(0)
    p, h0 = torch.randn(3, 2, 2 * gates, requires_grad=True, **F8), torch.randn(2, 2, requires_grad=True, **F8)

    def run(p, h0):
        return gated.run_min_gru(p, h0, None, nonlinearity, reverse)

    z, rest, c, *_ = gated._gate_and_candidate(p, h0, nonlinearity)
    if gates == 3:
        i, f = p[..., :2].sigmoid(), p[..., 2:4].sigmoid()
        torch.testing.assert_close((z, rest), (i / (f + i), f / (f + i)))
    torch.testing.assert_close(run(p, h0), loop(rest, z * c, h0, reverse=reverse))
    assert torch.autograd.gradcheck(run, (p, h0), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, (p, h0), fast_mode=True)
    lengths = torch.tensor([2, 0])
    ended = functools.partial(gated.run_min_gru, lengths=lengths, nonlinearity=nonlinearity, reverse=reverse)
    torch.testing.assert_close(ended(p, h0), loop(rest, z * c, h0, reverse, lengths.tolist()))
    assert torch.autograd.gradcheck(ended, (p, h0), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ended, (p, h0), fast_mode=True)
    many = torch.randn(4, 3, 2, 2 * gates, **F8)
    for dims, tensors in (((0, None), (many, h0)), ((2, 1), (many.movedim(0, 2), h0.expand(4, 2, 2).movedim(0, 1)))):
        found = torch.func.vmap(run, in_dims=dims)(*tensors)
        torch.testing.assert_close(found, torch.stack([run(one, h0) for one in many]))
    want = torch.func.jacfwd(run)(p, h0)
    torch.testing.assert_close(torch.func.jacrev(run)(p, h0), want)
    torch.library.opcheck(gated.min_gru, (p.detach(), h0.detach(), None, nonlinearity, reverse))


def test_empty_samples_keep_their_state():
    layer, x, h0 = st.MinGRU(3, 5, bidirectional=True), torch.full((4, 2, 3), torch.nan), torch.randn(2, 2, 5)
    x[:, 1] = 1
    y, h_n = layer(x, h0, lengths=[0, 4])
    assert torch.equal(y[:, 0], torch.zeros(4, 10)) and torch.equal(h_n[:, 0], h0[:, 0])
    y.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())
    with pytest.raises(OptionError, match="A length is out of range"):
        layer(x, lengths=[5, 4])


def test_mingru_unbatched_copied_and_shown():
    layer = st.MinGRU(3, 5, 2, dropout=0.5, bidirectional=True, nonlinearity="positive")
    assert repr(layer) == "MinGRU(3, 5, num_layers=2, dropout=0.5, bidirectional=True, nonlinearity=positive)"
    x, h0 = torch.randn(7, 4, 3), torch.randn(4, 4, 5)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    y, h_n = layer.eval()(x, h0)
    for found, want in zip(layer(x[:, 1], h0[:, 1]), (y[:, 1], h_n[:, 1]), strict=True):
        torch.testing.assert_close(found, want)
    torch.testing.assert_close(copy.deepcopy(layer)(x, h0)[0], y)
    for name, parameter in layer.named_parameters():
        bound = (3 if "l0" in name else 10) ** -0.5
        assert 0.5 * bound < parameter.abs().max() <= bound


A, B = torch.ones(4, 2, 3), torch.ones(4, 2, 3)
LAYER = st.MinGRU(3, 5)


@pytest.mark.parametrize(("error", "text", "call"), [
    (DTypeError, "b is not a tensor", lambda: st.linear_recurrence(A, B.numpy())),
    (DTypeError, "a has the wrong dtype", lambda: st.linear_recurrence(A.double(), B)),
    (DTypeError, "b has the wrong dtype", lambda: st.linear_recurrence(A.long(), B.long())),
    (DeviceError, "a is elsewhere", lambda: st.linear_recurrence(A.to_sparse(), B)),
    (DeviceError, "h0 is elsewhere", lambda: st.linear_recurrence(A, B, B[0].to("meta"))),
    (ShapeError, "a has the wrong shape", lambda: st.linear_recurrence(A[:2], B)),
    (ShapeError, "a has the wrong shape", lambda: st.linear_recurrence(A, B[0])),
    (ShapeError, "b has the wrong shape", lambda: st.linear_recurrence(A, B[None])),
    (ShapeError, "lengths has the wrong shape", lambda: st.linear_recurrence(A, B, lengths=[4])),
    (ShapeError, "lengths has the wrong shape", lambda: st.linear_recurrence(0.5, B[:, 0, 0], lengths=[4])),
    (DTypeError, "lengths has the wrong dtype", lambda: st.linear_recurrence(A, B, lengths=[4.0, 1.0])),
    (ShapeError, "h0 has the wrong shape", lambda: st.linear_recurrence(A, B, B)),
    (OptionError, "A length is out of range", lambda: st.linear_recurrence(A, B, lengths=[5, 1])),
    (OptionError, "dim", lambda: st.linear_recurrence(A, B, dim=3)),
    (DTypeError, "reset has the wrong dtype", lambda: st.linear_recurrence(A, B, reset=A)),
    (ShapeError, "reset has the wrong shape", lambda: st.linear_recurrence(A, B, reset=A[:2] > 0)),
    (DeviceError, "reset is elsewhere", lambda: st.linear_recurrence(A, B, reset=(A > 0).to("meta"))),
    (OptionError, "hidden_size", lambda: st.MinGRU(3, 0)),
    (OptionError, "nonlinearity", lambda: st.MinGRU(3, 5, nonlinearity="tanh")),
    (ShapeError, "input has the wrong shape", lambda: LAYER(A[..., :2])),
    (ShapeError, "input has the wrong shape", lambda: LAYER(A[:, 0], lengths=[4])),
    (ShapeError, "input is empty", lambda: LAYER(A[:0])),
    (ShapeError, "hx has the wrong shape", lambda: LAYER(A, torch.ones(1, 2, 3))),
    (DTypeError, "input", lambda: LAYER(A.double())),
    (DTypeError, "hx", lambda: LAYER(A, torch.ones(1, 2, 5).double())),
])  # fmt: skip
def test_refusals(error, text, call):
    with pytest.raises(error, match=text):
        call()
