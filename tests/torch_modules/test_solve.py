"""Solves on a kept pattern: values, gradients of both orders, and transforms, against torch.linalg.solve."""

from __future__ import annotations

import gc
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as hs

import sparsebp as sb
import sparsebp.torch as st
from matrices import of_mask
from sparsebp.core.errors import DeviceError, DTypeError, OptionError, PatternError, PivotError, ShapeError, StaleError
from sparsebp.products import FactorPlan
from strategies import seeds, sizes

FORMS = [((), ()), ((), (3,)), ((3,), (3,)), ((3,), ()), ((1,), (1,)), ((1,), ()), ((), (1,))]
"""What follows nnz in the shape of the values, and n in that of the right-hand sides."""
EMPTY: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), (0,)), ((0,), (0,)), ((0,), ())]


def plan_of(n: int, seed: int = 0) -> FactorPlan:
    rng = np.random.default_rng(seed)
    return sb.plan_factor(of_mask((rng.random((n, n)) < 0.3) | np.eye(n, dtype=bool)))


def operands(plan: FactorPlan, of_values: Any, of_b: Any, dtype: Any = torch.float64) -> tuple[Any, Any]:
    """Random values with a dominant diagonal, and right-hand sides."""
    pattern = plan.pattern
    values = torch.randn(pattern.nnz, *of_values, dtype=dtype)
    values[torch.from_numpy(pattern.row_of_entry == pattern.indices)] += 4 * pattern.shape[0]
    return values, torch.randn(pattern.shape[0], *of_b, dtype=dtype)


def by_dense(plan: FactorPlan, values: Any, b: Any, transposed: bool) -> Any:
    """The same by dense matrices, one after the other."""
    if values.dim() == 2:
        columns = [by_dense(plan, v, b if b.dim() == 1 else b[:, s], transposed)
                   for s, v in enumerate(values.unbind(1))]  # fmt: skip
        return torch.stack(columns, 1) if columns else (values.sum() + b.sum()) * values.new_zeros(len(b), 0)
    rows, columns = (torch.from_numpy(i.astype(np.int64)) for i in (plan.pattern.row_of_entry, plan.pattern.indices))
    matrix = values.new_zeros(plan.pattern.shape).index_put((rows, columns), values)
    return torch.linalg.solve(matrix.T if transposed else matrix, b)


@given(n=sizes(0, 17), form=hs.sampled_from(FORMS + EMPTY), transposed=hs.booleans(),
       real=hs.sampled_from([torch.float32, torch.float64, torch.complex64, torch.complex128]), wide=hs.booleans(),
       needed=hs.sampled_from([(True, True), (True, False), (False, True)]), seed=seeds)  # fmt: skip
@settings(max_examples=60)
def test_solutions_and_gradients_are_those_of_dense_matrices(n, form, transposed, real, wide, needed, seed):
    torch.manual_seed(seed)
    plan = plan_of(n, seed)
    given_ = [v.requires_grad_(need) for v, need in zip(operands(plan, *form, real), needed, strict=True)]
    leaves = [v for v in given_ if v.requires_grad]
    apart = [torch.stack([v, v], -1)[..., 0] for v in given_] if wide else given_  # not contiguous
    found, expected = st.solve(plan, *apart, transposed), by_dense(plan, *given_, transposed)
    close = {"rtol": 1e-3, "atol": 1e-5} if real.to_real() == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **close)
    weights = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((x * weights).sum().real, leaves, allow_unused=True) for x in (found, expected))
    for mine, true, leaf in zip(ours, theirs, leaves, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(leaf) if true is None else true, **close)


@pytest.mark.parametrize(("kind", "transposed", "dtype"), [
    ("cholesky", False, torch.float64),
    *((kind, transposed, torch.complex128) for kind in ("cholesky", "ldlt") for transposed in (False, True)),
])  # fmt: skip
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_derivatives_of_symmetric_and_hermitian_matrices(form, kind, transposed, dtype):
    """Those of a function of the entries on one side of the diagonal; both orders and modes."""
    mask = plan_of(5).pattern.to_scipy().toarray() != 0
    plan = sb.plan_factor(of_mask(mask | mask.T), kind=kind)
    mirror = torch.from_numpy(plan.pattern.transpose_permutation.astype(np.int64))
    values, b = operands(plan, *form, dtype)

    def run(values: Any, b: Any) -> Any:
        return st.solve(plan, values + values[mirror].conj(), b, transposed)

    given_ = [values.requires_grad_(), b.requires_grad_()]
    torch.testing.assert_close(run(*given_), by_dense(plan, values + values[mirror].conj(), b, transposed))
    assert torch.autograd.gradcheck(run, given_, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given_, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_derivatives_of_both_orders_and_modes(form, transposed, dtype):
    plan = plan_of(5)
    given_ = [v.requires_grad_() for v in operands(plan, *form, dtype)]
    options: dict[str, Any] = {"fast_mode": True, "check_batched_grad": True}

    def run(values: Any, b: Any) -> Any:
        return st.solve(plan, values, b, transposed)

    assert torch.autograd.gradcheck(run, given_, check_forward_ad=True, check_batched_forward_grad=True, **options)
    assert torch.autograd.gradgradcheck(run, given_, check_fwd_over_rev=True, **options)
    for number in range(2):  # one operand alone has a tangent
        fixed = [v.detach() for v in given_]
        fixed[number].requires_grad_()
        assert torch.autograd.gradcheck(run, fixed, check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0), (1, 1), (-1, None)], ids=str)
@pytest.mark.parametrize("form", [((), ()), ((), (3,)), ((), (0,)), ((2,), (2,)), ((2,), ())], ids=str)
def test_transforms(form, dims):
    """`vmap` gives what a loop gives, also around and within `grad`; so do two of them."""
    plan, count = plan_of(5), 4
    many = [operands(plan, *form) for _ in range(count)]
    mapped = [parts[0] if dim is None else torch.stack(parts, dim)
              for parts, dim in zip(zip(*many, strict=True), dims, strict=True)]  # fmt: skip

    def run(values: Any, b: Any) -> Any:
        return st.solve(plan, values, b)

    def loss(values: Any, b: Any) -> Any:
        return (run(values, b) ** 2).sum()

    def row(i: int, *tensors: Any) -> list[Any]:
        return [v if dim is None else v.select(dim, i) for v, dim in zip(tensors, dims, strict=True)]

    def looped(f: Any) -> Any:
        found = [f(*row(i, *mapped)) for i in range(count)]
        return tuple(map(torch.stack, zip(*found, strict=True))) if isinstance(found[0], tuple) else torch.stack(found)

    vmap, close = torch.func.vmap, torch.testing.assert_close
    within, hessian = torch.func.grad(loss, (0, 1)), torch.func.hessian(loss)
    for f in (run, within, hessian):
        close(vmap(f, dims)(*mapped), looped(f))
    around = torch.func.grad(lambda *v: vmap(loss, dims)(*v).sum(), (0, 1))(*mapped)
    summed = torch.func.grad(lambda *v: sum(loss(*row(i, *v)) for i in range(count)), (0, 1))(*mapped)
    close(around, summed)
    scaled = torch.stack([mapped[1], 2 * mapped[1]])
    close(vmap(vmap(run, dims), (None, 0))(mapped[0], scaled), torch.stack([looped(run), 2 * looped(run)]))
    if dims[0] is not None:
        scaled = torch.stack([mapped[0], 2 * mapped[0]])
        close(vmap(vmap(run, dims), (0, None))(scaled, mapped[1]), torch.stack([looped(run), looped(run) / 2]))
    rows = row(0, *mapped)
    tangents = tuple(torch.randn_like(v) for v in rows)
    jacobian = torch.func.jacrev(run, (0, 1))(*rows)
    expected = sum(torch.tensordot(j, t, t.dim()) for j, t in zip(jacobian, tangents, strict=True))
    close(torch.func.jvp(run, tuple(rows), tangents)[1], expected)


@pytest.mark.parametrize("form", [((), ()), ((), (3,)), ((16,), (16,)), ((16,), ())], ids=str)
def test_compiled_graphs(form):
    plan, other = plan_of(5), plan_of(5, seed=1)
    values, b = (v.requires_grad_() for v in operands(plan, *form))

    def loss(values: Any, b: Any, plan: FactorPlan = plan) -> Any:
        return st.solve(plan, 2 * values, b, transposed=True).sin().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(values, b), loss(values, b))
    ours, theirs = (torch.autograd.grad(f(values, b), (values, b)) for f in (compiled, loss))
    torch.testing.assert_close(ours, theirs)
    more = operands(other, *form)
    torch.testing.assert_close(compiled(*more, other), loss(*more, other))
    factors = torch.ops.sparsebp.factorise(plan.number, values.detach())
    torch.library.opcheck(torch.ops.sparsebp.factorise.default, (plan.number, values.detach()))
    torch.library.opcheck(torch.ops.sparsebp.solve.default, (plan.number, values, factors, b, False))


def test_a_matrix_is_factorised_once(monkeypatch):
    from sparsebp.kernels.host.sparse import factor

    calls = []
    whole = factor.factorise
    monkeypatch.setattr(factor, "factorise", lambda *args: (calls.append(1), whole(*args))[1])
    plan = plan_of(5)
    values, b = (v.requires_grad_() for v in operands(plan, (3,), (3,)))
    first = torch.autograd.grad((st.solve(plan, values, b) ** 2).sum(), (values, b), create_graph=True)
    torch.autograd.grad((first[0] ** 2).sum() + (first[1] ** 2).sum(), (values, b))
    assert len(calls) == 1
    st.solve(plan, values, b)  # nothing is kept between calls
    assert len(calls) == 2


def test_nothing_is_stale():
    """Values are read at every call; a graph refuses values that were changed after its forward, and hooks are run."""
    plan = plan_of(5)
    values, b = operands(plan, (), ())
    before = st.solve(plan, values, b)
    values *= 2
    torch.testing.assert_close(st.solve(plan, values, b), before / 2)
    leaf, seen = values.clone().requires_grad_(), []
    leaf.register_hook(lambda g: seen.append(g) or 3 * g)
    x = st.solve(plan, leaf, b)
    b.zero_()  # of no use to the backward
    x.sum().backward()
    torch.testing.assert_close(leaf.grad, 3 * seen[0])
    for changed in ("values", "x"):
        x = st.solve(plan, leaf, b + 1)
        with torch.no_grad():
            (leaf if changed == "values" else x).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            x.sum().backward()
    number = plan.number
    plan = None
    gc.collect()
    x = None
    gc.collect()
    with pytest.raises(StaleError, match="Keep"):
        torch.ops.sparsebp.factorise(number, values)


def test_an_identity_has_values_of_its_own():
    plan = sb.plan_factor(sb.SparsityPattern.identity(3))
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    x = st.solve(plan, values, torch.ones(3))
    assert x.tolist() == [1, 0.5, 0.25]
    assert torch.autograd.grad(x.sum(), values)[0].tolist() == [-1, -0.25, -0.0625]


@pytest.mark.parametrize(("kind", "below"), [("cholesky", 1), ("ldlt", 1), ("ldlt", 0)])
def test_gradients_of_symmetric_factors(kind, below):
    """The values below the diagonal do not count, or do not exist; the others count twice."""
    plan = sb.plan_factor(of_mask(np.tri(5, k=1, dtype=bool) & ~np.tri(5, k=-below - 1, dtype=bool)), kind=kind)
    values, b = operands(plan, (2,), (2,))
    values.requires_grad_(), b.requires_grad_()

    def solve(values: Any, b: Any) -> Any:
        return st.solve(plan, values, b)

    assert torch.autograd.gradcheck(solve, (values, b), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(solve, (values, b), fast_mode=True)
    whole = sb.plan_factor(plan.whole, kind=kind)
    assert (solve(values, b) == st.solve(whole, values[torch.from_numpy(plan.read)], b)).all()


def test_a_plan_that_regularises_is_refused():
    plan = sb.plan_factor(sb.SparsityPattern.diagonal(3), kind="ldlt", regularize=1e-8)
    with pytest.raises(OptionError, match="regularises"):
        st.solve(plan, torch.ones(3), torch.ones(3))


def test_two_threads_at_once():
    plan = plan_of(17)
    tasks = [operands(plan, *form) for form in FORMS[:4]]
    expected = [torch.func.grad(lambda v, b: st.solve(plan, v, b).sum())(*task) for task in tasks]
    found: list[Any] = [None] * len(tasks)

    def work(number: int) -> None:
        for _ in range(20):
            found[number] = torch.func.grad(lambda v, b: st.solve(plan, v, b).sum())(*tasks[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=0)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_sparse_tensors_in_any_order(batch):
    """Unsorted columns, duplicates and missing entries; the gradient is that of the values."""
    plan = plan_of(6, 3)
    values, b = operands(plan, batch, ())
    values[int(np.flatnonzero(plan.pattern.row_of_entry != plan.pattern.indices)[0])] = 0
    expected = st.solve(plan, values, b)
    dense = values.new_zeros(*batch, 6, 6)
    dense[..., plan.pattern.row_of_entry, plan.pattern.indices] = values.t() if batch else values
    canonical = dense.to_sparse_csr()
    counts, columns = plan.pattern.indptr, torch.from_numpy(plan.pattern.indices.astype(np.int64))
    order = torch.cat([torch.arange(*ends).flip(0).repeat_interleave(2) for ends in pairwise(counts.tolist())])
    twice = (values.t() if batch else values)[..., order] / 2
    indptr = torch.from_numpy(2 * counts.astype(np.int64))
    indices = indptr.expand(*batch, -1), columns[order].expand(*batch, -1)
    mixed = torch.sparse_csr_tensor(*indices, twice, size=(*batch, 6, 6), check_invariants=False).requires_grad_()
    for tensor in (canonical, mixed):
        torch.testing.assert_close(st.solve(plan, tensor, b), expected)
    leaf = values.clone().requires_grad_()
    st.solve(plan, leaf, b).sum().backward()
    st.solve(plan, mixed, b).sum().backward()
    gradient = leaf.grad.t() if batch else leaf.grad
    torch.testing.assert_close(mixed.grad.values(), gradient[..., order])
    with pytest.raises(PatternError, match=r"outside the pattern.* in row"):
        st.solve(plan, torch.ones(*batch, 6, 6, dtype=b.dtype).to_sparse_csr(), b)
    with pytest.raises(ShapeError, match="does not fit the pattern"):
        st.solve(plan, torch.eye(5, dtype=b.dtype).to_sparse_csr(), b)


def test_refusals():
    plan = plan_of(3)
    values, b = operands(plan, (), ())
    two = torch.stack([values, torch.full_like(values, torch.nan)], 1)
    wrong = [
        (OptionError, lambda: st.solve(plan.pattern, values, b)),
        (OptionError, lambda: st.solve(plan, values, b, transposed=2)),
        (DTypeError, lambda: st.solve(plan, values.numpy(), b)),
        (DTypeError, lambda: st.solve(plan, values.half(), b.half())),
        (DTypeError, lambda: st.solve(plan, values, b.float())),
        (DeviceError, lambda: st.solve(plan, values.to("meta"), b)),
        (DeviceError, lambda: st.solve(plan, values, b.to_sparse())),
        (ShapeError, lambda: st.solve(plan, values[:-1], b)),
        (ShapeError, lambda: st.solve(plan, two[None], b)),
        (ShapeError, lambda: st.solve(plan, values, b[:2])),
        (ShapeError, lambda: st.solve(plan, two, torch.ones(3, 3, dtype=b.dtype))),
        (PivotError, lambda: st.solve(plan, 0 * values, b)),
    ]
    for error, call in wrong:
        with pytest.raises(error, match="Expected"):
            call()
    with pytest.raises(PivotError) as caught:
        st.solve(plan, two, b)
    assert caught.value.samples == (1,)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_mapped_solves_in_a_compiled_graph(backend):
    plan = sb.plan_factor(sb.SparsityPattern.dense(3, 3))
    values = torch.randn(21, 9, dtype=torch.float64) + 4 * torch.eye(3, dtype=torch.float64).ravel()
    b = torch.randn(21, 3, dtype=torch.float64)
    for call in (
        lambda values, b: torch.vmap(lambda v: st.solve(plan, v, b[0]))(values),
        torch.vmap(lambda v, b: 2 * st.solve(plan, v, b)),
        lambda values, b: torch.vmap(lambda b: st.solve(plan, values[0], b))(b),
    ):
        torch.testing.assert_close(torch.compile(call, backend=backend, fullgraph=True)(values, b), call(values, b))
