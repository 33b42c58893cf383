"""Sparse Jacobians and Hessians of PyTorch functions: patterns from the ATen graph, values against autograd."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.sparse as sp

torch = pytest.importorskip("torch")

from scipy.optimize import least_squares  # noqa: E402

import sparsebp as sb  # noqa: E402
from sparsebp.core.errors import DTypeError, OptionError, PatternError, ShapeError, TracingError  # noqa: E402

N = 7
torch.manual_seed(0)
DENSE = torch.randn(5, N, dtype=torch.float64) * (torch.rand(5, N) < 0.5)
INDEX = torch.tensor([3, 0, 3, 6])
MASK = torch.tensor([True, False, True, True, False, False, True])
CONV = torch.nn.Conv2d(1, 2, 3, padding=1, stride=2).double().requires_grad_(False)
DECONV = torch.nn.ConvTranspose1d(1, 1, 3).double().requires_grad_(False)
MLP = torch.nn.Sequential(torch.nn.Linear(N, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double().requires_grad_(False)


def burgers(x):
    du = torch.zeros_like(x)
    du[1:-1] = 0.1 * (x[2:] - 2 * x[1:-1] + x[:-2]) - x[1:-1] * (x[2:] - x[:-2]) / 2
    du[0] += x[0] * x[1]
    du[INDEX[:2]] *= 2
    return du


F, EYE = torch.nn.functional, torch.eye(3, dtype=torch.float64)
MATRICES = torch.stack([torch.arange(9.0).reshape(3, 3).double().sin() + 4 * EYE, 5 * EYE])
FUNCTIONS = {
    "burgers": (burgers, N, True),
    "brusselator": (lambda x: (x.reshape(2, 3, 4).roll(1, 1) * x.reshape(2, 3, 4)).flatten(), 24, True),
    "rosenbrock chain": (lambda x: torch.cat([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]]), N, True),
    "indices": (lambda x: x[INDEX] * x[MASK] + x[[1, 2, 1, 2]] + x.index_select(0, INDEX), N, True),
    "gather": (lambda x: torch.gather(x[:6].reshape(2, 3), 1, torch.tensor([[0, 0], [2, 1]])).flatten(), N, True),
    "scatter": (lambda x: torch.zeros_like(x).index_add(0, INDEX, x[:4] ** 2).scatter_add(0, INDEX, x[3:]), N, True),
    "where": (lambda x: torch.where(MASK, x, x.flip(0)) + torch.where(x > 0, x, x[0]), N, False),
    "masked": (lambda x: x * MASK + x.masked_fill(MASK, 2.0), N, False),
    "pointwise": (lambda x: torch.sigmoid(x).atan2(x.exp()) + torch.nn.functional.gelu(x) + x.clamp(-1, 1), N, True),
    "broadcast": (lambda x: (x[:2, None] * x[None, 2:5] + x[5]).flatten(), N, True),
    "dense matrix": (lambda x: torch.tanh(DENSE @ x), N, True),
    "matrices": (lambda x: (x[:6].reshape(2, 3) @ DENSE[:3, :2]).flatten(), 6, True),
    "products": (lambda x: (x[:4].reshape(2, 2) @ x[3:].reshape(2, 2)).flatten(), N, True),
    "batches": (lambda x: torch.einsum("bij,bj->bi", x[:8].reshape(2, 2, 2), x[:4].reshape(2, 2)).flatten(), 8, True),
    "addmm": (lambda x: torch.addmm(x[:4].reshape(2, 2), DENSE[:2, :3], x[:6].reshape(3, 2)).flatten(), N, True),
    "sums": (lambda x: torch.cat([x.reshape(2, 2, 3).sum((0, 2)), x.reshape(3, 4).mean(1)]), 12, True),
    "extremes": (lambda x: x.reshape(2, 3).amax(0) + x.reshape(2, 3).max(0)[0] + x.min(), 6, False),
    "along an axis": (lambda x: x.cumsum(0) + x.cumprod(0), N, True),
    "softmax": (lambda x: torch.softmax(x.reshape(2, 3), 1).flatten(), 6, True),
    "sort": (lambda x: x.reshape(2, 3).sort(1)[0].flatten() + x.topk(6)[0], 6, False),
    "norms": (lambda x: torch.stack([x[:3].norm(), x[2:].var(), x[1:4].logsumexp(0), x[:2].prod()]), N, True),
    "pad, stack, split": (
        lambda x: torch.cat([torch.nn.functional.pad(x, (1, 2)), *torch.stack([x[:2], x[3:5]]).unbind(1), *x.split(4)]),
        N, True),
    "triangles": (lambda x: (x.reshape(3, 3).tril() + torch.diag(x[:3])).flatten(), 9, False),
    "convolution": (lambda x: CONV(x.reshape(2, 1, 4, 5)).flatten(), 40, True),
    "transposed convolution": (lambda x: DECONV(x.reshape(1, 1, N)).flatten() ** 2, N, True),
    "modules": (MLP, N, True),
    "two rows": (lambda x: torch.stack([x.sin().sum(), (x * x).sum()]), N, True),
    "decomposed": (lambda x: torch.nn.functional.mse_loss(x[:3], x[3:6], reduction="none"), N, True),
    "solves": (lambda x: torch.linalg.solve(MATRICES, x[:6].reshape(2, 3)).flatten() * x[6], N, False),
    "solves with x": (lambda x: torch.linalg.solve(MATRICES[0] + x[:3], x[4:]), N, False),
    "matrices of x": (lambda x: torch.linalg.inv(MATRICES + x[0]).flatten() * torch.det(MATRICES + x[1])[0], N, False),
    "factors": (lambda x: torch.cholesky_solve(x[:3, None], torch.linalg.cholesky(EYE * x[6].exp()))[:, 0], N, False),
    "triangular": (
        lambda x: torch.linalg.solve_triangular(MATRICES[0].triu(), x[:6].reshape(3, 2), upper=True).flatten(),
        N, False),
    "pooling": (
        lambda x: torch.cat([F.max_pool2d(x[None, None], (1, 2))[0, 0], F.avg_pool1d(x[None], 3, 2, 1)[0]]),
        N, False),
    "pools of planes": (lambda x: (F.adaptive_avg_pool2d(x.reshape(1, 2, 3, 4), 2) * F.max_pool2d(
        x.reshape(1, 2, 3, 4), 2, 1)[..., :2]).flatten(), 24, False),
    "layer norm": (lambda x: F.layer_norm(x[:6].reshape(2, 3), (3,), x[4:]).flatten(), N, True),
    "group norm": (lambda x: F.group_norm(x[:6].reshape(1, 2, 3), 2).flatten(), N, True),
    "constant": (lambda x: torch.ones(2, dtype=x.dtype), N, True),
    "steps": (lambda x: x.floor() + (x > 0) * 2.0 + x.sign(), N, False),
}  # fmt: skip
HESSIANS = {
    "rosenbrock": (lambda x: (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum(), N, True),
    "indices": (lambda x: (x[INDEX] ** 3).sum() + x[MASK].prod() * 0 + x.cumsum(0)[2] ** 2, N, False),
    "writes": (lambda x: (torch.zeros_like(x).index_add(0, INDEX, x[:4] ** 2) * x).sum(), N, True),
    "convolution": (lambda x: CONV(x.reshape(1, 1, 4, 5)).pow(2).sum(), 20, True),
    "softmax": (lambda x: torch.softmax(x[:3], 0)[0] + torch.log_softmax(x[3:], 0)[1], N, True),
    "products": (lambda x: (x[:4].reshape(2, 2) @ x[3:].reshape(2, 2)).trace(), N, False),
    "where": (lambda x: torch.where(x > 0, x**3, x.sin()).sum(), N, True),
    "solve": (lambda x: torch.linalg.solve(MATRICES[0] + x[:3], x[4:]).pow(2).sum(), N, False),
    "layers": (lambda x: F.avg_pool1d(F.layer_norm(x[:6].reshape(1, 6), (6,)), 2).pow(3).sum(), N, False),
    "pools": (lambda x: F.max_pool2d(x.pow(2).reshape(1, 1, 3, 4), 2).sum() ** 2, 12, False),
}


def same(found, expected, exact, seen):
    """Values agree; nonzeros are in the pattern, which, if exact, has no others."""
    np.testing.assert_allclose(found.toarray(), expected, rtol=1e-10, atol=1e-11)
    seen |= expected != 0
    allowed = sp.csr_array((np.ones(found.nnz), found.indices, found.indptr), found.shape).toarray() > 0
    assert not (seen & ~allowed).any()
    return allowed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jacobians(name):
    f, n, exact = FUNCTIONS[name]
    jac = sb.sparse_jacobian(f, torch.zeros(n, dtype=torch.float64))
    seen = np.zeros(jac.pattern.shape, bool)
    for seed in range(4):
        x = (torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1).requires_grad_()
        expected = torch.func.jacrev(f)(x).detach().numpy()
        found = jac(x, check=True)
        assert isinstance(found, sp.csr_array)
        allowed = same(found, expected, exact, seen)
        values = jac.values(x)
        assert isinstance(values, torch.Tensor) and not values.requires_grad
        np.testing.assert_array_equal(values.numpy(), found.data)
        rows = np.random.default_rng(seed).standard_normal((3, len(expected)))
        np.testing.assert_allclose(jac._function.reverse((x,), rows).numpy(), rows @ expected, rtol=1e-10, atol=1e-11)
    if exact:
        np.testing.assert_array_equal(allowed, seen)


@pytest.mark.parametrize("name", HESSIANS)
def test_hessians(name):
    g, n, exact = HESSIANS[name]
    hess = sb.sparse_hessian(g, torch.full((n,), 0.5, dtype=torch.float64))
    seen = np.zeros((n, n), bool)
    for seed in range(4):
        x = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
        found = hess(x, check=True)
        np.testing.assert_array_equal(found.toarray(), found.toarray().T)
        allowed = same(found, torch.func.hessian(g)(x).numpy(), exact, seen)
    if exact:
        np.testing.assert_array_equal(allowed, seen)


REFUSED = {
    "if": lambda x: x if x[0] > 0 else -x,
    "item": lambda x: x * x[0].item(),
    "mask by values": lambda x: x[x > 0],
    "index by values": lambda x: x[x.argsort()],
    "unlisted": lambda x: torch.linalg.eigvalsh(x[:4].reshape(2, 2)),
    "weights": lambda x: torch.nn.functional.conv1d(x[None, None], x[None, None, :3]).flatten(),
    "spectrum": lambda x: torch.fft.rfft(x).real,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name):
    with pytest.raises(TracingError):
        sb.sparse_jacobian(REFUSED[name], torch.linspace(0.1, 0.8, N))


COUNT = iter(range(1000))


def without_grad(x):
    with torch.no_grad():
        scale = x.sum()
    return x * scale


HIDDEN = {  # what a trace does not see: (the function, what the message says)
    "numpy": (lambda x: x * torch.from_numpy(x.detach().numpy()), "Tensor.numpy"),
    "array": (lambda x: x * torch.as_tensor(np.asarray(x.detach())), "__array__"),
    "tolist": (lambda x: x * torch.tensor(x.tolist(), dtype=x.dtype), "tolist"),
    "item": (lambda x: x * x[0].item(), "item"),
    "float": (lambda x: x * float(x[0]), "__float__"),
    "draws": (lambda x: x * torch.rand(N, dtype=x.dtype), "random"),
    "draws of NumPy": (lambda x: x * np.random.default_rng().random(), "random"),
    "dropout": (lambda x: torch.nn.functional.dropout(x.repeat(9)), "random"),
    "state": (lambda x: x * next(COUNT), "state"),
    "no_grad": (without_grad, "detach"),
    "float16": (lambda x: x.half(), "float32"),
    "sparse": (lambda x: x.to_sparse(), "dense"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_hidden_from_a_trace_is_refused(name):
    """Also with a pattern; the check of the first call finds it then."""
    f, message = HIDDEN[name]
    x = torch.linspace(0.1, 0.8, N, dtype=torch.float64)
    rows = 9 * N if name == "dropout" else N
    for options in ({}, {"pattern": sb.SparsityPattern.dense(rows, N)}):
        with pytest.raises((TracingError, DTypeError), match=message):
            sb.sparse_jacobian(f, x, **options)(x)


def test_a_draw_with_a_seed_needs_a_pattern():
    def f(x):
        torch.manual_seed(3)
        return x * torch.rand(N, dtype=x.dtype)

    x = torch.linspace(0.1, 0.8, N, dtype=torch.float64)
    with pytest.raises(TracingError, match="Random numbers"):
        sb.sparse_jacobian(f, x)
    found = sb.sparse_jacobian(f, x, pattern=sb.SparsityPattern.diagonal(N))(x, check=True).toarray()
    np.testing.assert_allclose(found, np.diag((f(x) / x).numpy()), rtol=1e-14)


class Square(torch.autograd.Function):
    """Without rules for transforms and for forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def test_a_function_without_rules_for_transforms_has_reverse_mode():
    x = torch.linspace(0.1, 0.8, N, dtype=torch.float64)
    jac = sb.sparse_jacobian(Square.apply, x, pattern=sb.SparsityPattern.diagonal(N))
    assert jac.mode == "reverse"
    np.testing.assert_allclose(jac(x, check=True).toarray(), np.diag(2 * x.numpy()))
    hess = sb.sparse_hessian(lambda x: (Square.apply(x) * x).sum(), x, pattern=sb.SparsityPattern.diagonal(N))
    np.testing.assert_allclose(hess(x, check=True).toarray(), np.diag(6 * x.numpy()))
    with pytest.raises(TracingError, match="pattern="):
        sb.sparse_jacobian(Square.apply, x)
    with pytest.raises(PatternError, match="Column 0"):
        sb.sparse_jacobian(lambda x: Square.apply(x) * x[0], x, pattern=sb.SparsityPattern.diagonal(N))(x, check=True)


def test_x_is_not_written_to_and_nothing_warns():
    def f(x):
        x[0] = 3 * x[1]
        return x * x

    x = torch.linspace(0.1, 0.8, N, dtype=torch.float64)
    kept, warn_always = x.clone(), torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = sb.sparse_jacobian(f, x, pattern=sb.SparsityPattern.dense(N, N))(x).toarray()
            sb.sparse_jacobian(lambda x: x**2, x)(kept.numpy())
    finally:
        torch.set_warn_always(warn_always)
    assert torch.equal(x, kept) and found[0, 1] == 18 * x[1] and not found[:, 0].any()
    weight = torch.ones(N, dtype=torch.float64, requires_grad=True)
    assert isinstance(sb.sparse_jacobian(lambda x: weight * x, x).values(kept.numpy()), np.ndarray)


def test_bad_arguments():
    x = torch.zeros(4)
    for bad in (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.float16)):
        with pytest.raises(DTypeError):
            sb.sparse_jacobian(lambda x: x, bad)
    with pytest.raises(ShapeError, match="ravel"):
        sb.sparse_jacobian(lambda x: x.sum(), x)
    with pytest.raises(DTypeError, match="floats"):
        sb.sparse_jacobian(lambda x: "x", x)
    with pytest.raises(TracingError, match="scalar"):
        sb.sparse_hessian(lambda x: x, x)
    with pytest.raises(ShapeError, match="length"):
        sb.sparse_jacobian(lambda x: x, x)(torch.zeros(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 2, 13])
def test_sizes_and_dtypes(n, dtype):
    def f(x):
        return torch.cat([x**2, x[:1].sin() * x[-1:]])

    x = torch.linspace(0.2, 1, n, dtype=dtype) if n else torch.zeros(0, dtype=dtype)
    jac = sb.sparse_jacobian(f, x)
    found = jac(x)
    assert jac.values(x).dtype == dtype
    np.testing.assert_allclose(found.toarray(), torch.func.jacrev(f)(x).numpy().reshape(found.shape), rtol=1e-5)
    xs = torch.stack([x, 2 * x], 1)
    assert torch.equal(jac.batch(xs), torch.stack([jac.values(x), jac.values(2 * x)], 1))
    np.testing.assert_array_equal(jac.values(x.numpy()), found.data)
    assert isinstance(jac.values(x.numpy()), np.ndarray)
    assert sb.sparse_hessian(lambda x: (f(x) ** 2).sum(), x)(x).shape == (n, n)


def test_float32_inside_is_no_missing_entry():
    x = torch.linspace(0.1, 0.7, N, dtype=torch.float64)
    jac = sb.sparse_jacobian(lambda x: x[0] * torch.full((3,), 0.3) + x[:3] ** 2, x)
    expected = np.diag(2 * x.numpy())[:3]
    expected[:, 0] += 0.3
    np.testing.assert_allclose(jac(x, check=True).toarray(), expected, rtol=1e-6)


def test_other_arguments_are_not_constants():
    def f(x, scale, count):
        return scale * x[:count]

    jac = sb.sparse_jacobian(f, torch.ones(3), torch.zeros(2), 2)
    assert jac.pattern.nnz == 2
    np.testing.assert_array_equal(jac(torch.ones(3), torch.tensor([5.0, 6.0]), 2).toarray(), [[5, 0, 0], [0, 6, 0]])


def test_with_scipy_and_a_pattern_by_hand():
    f = FUNCTIONS["rosenbrock chain"][0]
    jac = sb.sparse_jacobian(f, torch.zeros(N, dtype=torch.float64))
    found = least_squares(lambda x: f(torch.from_numpy(x)).numpy(), np.full(N, -0.5), jac=jac)
    np.testing.assert_allclose(found.x, 1, atol=1e-6)
    diagonal = sb.sparse_jacobian(lambda x: x * x[0], torch.ones(3), pattern=sb.SparsityPattern.diagonal(3))
    with pytest.raises(PatternError):
        diagonal(torch.ones(3), check=True)


def test_a_function_is_told_from_a_module():
    """`sparsebp.torch.sparse_jacobian` takes modules; of a function it says where to go."""
    import sparsebp.torch as st

    with pytest.raises(OptionError, match=r"sparsebp\.sparse_jacobian"):
        st.sparse_jacobian(torch.sin, torch.ones(2, 3))


def test_complex_tensors_are_refused_and_whole_numbers_are_moved():
    for f in (
        lambda x: torch.fft.fft(x).abs() + x,
        lambda x: torch.view_as_complex(x.reshape(2, 2)).abs().repeat(2) + x,
    ):
        with pytest.raises(TracingError, match="Complex numbers"):
            sb.sparse_jacobian(f, torch.zeros(4, dtype=torch.float64))

    def written(x):
        z = x.clone()
        z[:2] = torch.tensor([50, 60])
        return z**2

    x = torch.arange(1.0, 5, dtype=torch.float64)
    for f in (lambda x: torch.cat([x**2, torch.arange(300)]), written, torch.nn.Linear(4, 2).double()):
        expected = torch.func.jacrev(f)(x).detach()
        torch.testing.assert_close(torch.from_numpy(sb.sparse_jacobian(f, x)(x).toarray()), expected)


def test_a_number_among_the_arguments_of_a_function_of_tensors():
    zero, x = torch.zeros(3, dtype=torch.float64), torch.arange(1.0, 4, dtype=torch.float64)
    jac = sb.sparse_jacobian(lambda t, x: t * x.flip(0) + x, 0.0, zero, argnums=1)
    assert jac(2.0, x).toarray().tolist() == [[1, 0, 2], [0, 3, 0], [2, 0, 1]]
    with pytest.raises(TracingError):
        sb.sparse_jacobian(lambda t, x: x if t < 1 else x.flip(0), 0.0, zero, argnums=1)


def test_threads_take_turns_in_forward_mode():
    """PyTorch's forward mode is of the process, not of a thread."""
    xs = torch.linspace(0.1, 2.0, 12 * 24, dtype=torch.float64).reshape(12, 24)

    def derivatives(x):
        k = x[0].item()

        def f(x):
            return torch.sin(k * x[1:]) * x[:-1]

        return sb.sparse_jacobian(f, x)(x), [jac.values(y) for y in xs]

    jac = sb.sparse_jacobian(lambda x: torch.sin(x[1:]) * x[:-1], xs[0])
    alone = [derivatives(x) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(derivatives, xs), alone, strict=True):
            np.testing.assert_array_equal(found[0].data, expected[0].data)
            assert all(map(torch.equal, found[1], expected[1]))


def test_x_of_another_library_is_refused():
    jac, x = sb.sparse_jacobian(lambda x: x**2, np.ones(3)), torch.ones(3, dtype=torch.float64)
    for call in (jac, jac.values, lambda x: jac.batch(x[:, None])):
        for given in (x, x.clone().requires_grad_()):
            with pytest.raises(DTypeError, match=r"another library.*detach\(\)"):
                call(given)
    jac = sb.sparse_jacobian(lambda x: x**2, x)
    np.testing.assert_array_equal(jac(2 * x.numpy()).data, [4, 4, 4])
