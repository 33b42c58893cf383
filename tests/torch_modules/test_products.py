"""Products of batches of sparse matrices: values, gradients of both orders, and transforms, against dense ones."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as hs

import sparsebp.torch as st
from sparsebp import SparsityPattern
from sparsebp.core.errors import DTypeError, OptionError, PatternError, ShapeError, StaleError
from sparsebp.products import plan_product
from sparsebp.torch.sparse import columns
from strategies import csr_patterns, seeds, sizes


def pattern(mask):
    return SparsityPattern.from_scipy(scipy.sparse.csr_array(np.asarray(mask, float)))


def dense(structure, values):
    return st.BatchedCSR(structure, values).to_dense()


@hs.composite
def pairs(draw):
    """Two patterns that chain, and how each one's values come: shared by the samples, or of each its own."""
    m, k, n = (draw(sizes(0, 9)) for _ in range(3))
    shapes = ((hs.just(m), hs.just(k)), (hs.just(k), hs.just(n)))
    a, b = (SparsityPattern(*draw(csr_patterns(*shape))) for shape in shapes)
    return a, b, draw(hs.sampled_from([(True, True), (True, False), (False, True), (False, False)]))


@given(
    pair=pairs(), batch=sizes(0, 5), real=hs.sampled_from([torch.float32, torch.float64, torch.complex128]), seed=seeds
)
@settings(max_examples=40)
def test_values_and_gradients_are_those_of_dense_products(pair, batch, real, seed):
    a, b, batched = pair
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn((batch, p.nnz) if own else (p.nnz,), generator=generator, dtype=real).requires_grad_()
              for p, own in zip((a, b), batched, strict=True)]  # fmt: skip
    plan = st.plan_product(a, b)
    found = plan(*values)
    assert found.shape == (*((batch,) if any(batched) else ()), plan.nnz) and found.dtype == real
    expected = dense(a, values[0]) @ dense(b, values[1])
    close = {"rtol": 1e-4, "atol": 1e-5} if real == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(dense(plan.pattern, found), expected, **close)
    weights = torch.randn(expected.shape, generator=generator, dtype=real)
    ours = torch.autograd.grad((dense(plan.pattern, found) * weights).sum().real, values)
    theirs = torch.autograd.grad((expected * weights).sum().real, values)
    for mine, true, given_ in zip(ours, theirs, values, strict=True):
        assert mine.shape == given_.shape
        torch.testing.assert_close(mine, true, **close)


EYE, FULL = np.eye(3), np.ones((3, 3))
LOWER = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]])
PICK = np.array([[0, 1, 0], [0, 0, 0], [1, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("batched", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("masks", [(LOWER, LOWER.T), (EYE, LOWER), (LOWER, EYE), (PICK, LOWER), (LOWER, PICK),
                                   (FULL, FULL), (np.ones((2, 3)), PICK), (LOWER, LOWER.T, EYE)])  # fmt: skip
def test_gradients_of_both_orders(masks, batched, dtype):
    """By every strategy of products."""
    a, b, *mask = map(pattern, masks)
    plan = st.plan_product(a, b, mask=mask[0] if mask else None)
    values = [torch.randn((2, p.nnz) if own else (p.nnz,), dtype=dtype).requires_grad_()
              for p, own in zip((a, b), batched, strict=True)]  # fmt: skip
    assert torch.autograd.gradcheck(plan, values, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(plan, values, fast_mode=True)


def test_an_identity_has_values_of_its_own():
    values = torch.tensor([2.0, 3.0]).requires_grad_()
    found = st.plan_product(SparsityPattern.identity(2), pattern(np.ones((2, 1))))(values, torch.ones(2))
    torch.testing.assert_close(found, values)
    assert torch.autograd.grad(found.sum(), values)[0].tolist() == [1, 1]
    with pytest.raises(OptionError, match=r"SparsityPattern\.diagonal"):
        _ = plan_product(SparsityPattern.identity(2), pattern(LOWER[:2])).gradients


def test_transforms():
    a, b = pattern(LOWER), pattern(LOWER.T)
    plan = st.plan_product(a, b)
    x, y = torch.randn(4, 3, a.nnz, dtype=torch.float64), torch.randn(4, b.nnz, dtype=torch.float64)
    shared = torch.randn(b.nnz, dtype=torch.float64)
    for dims, operands in (((0, 0), (x, y)), ((0, None), (x, shared)), ((None, 0), (x[0], y)), ((0, 0), (x[:, 0], y)),
                           ((1, None), (x[:, 0].T, shared))):  # fmt: skip
        rows = [[v if dim is None else v.select(dim, i) for v, dim in zip(operands, dims, strict=True)]
                for i in range(4)]  # fmt: skip
        rows = rows if dims[0] != 1 else [[operands[0].select(1, i), shared] for i in range(operands[0].shape[1])]
        torch.testing.assert_close(torch.vmap(plan, dims)(*operands), torch.stack([plan(*row) for row in rows]))
    jacobian = torch.func.jacrev(plan)(x[0, 0], shared)
    torch.testing.assert_close(jacobian, torch.func.jacfwd(plan)(x[0, 0], shared))
    torch.testing.assert_close(jacobian @ x[0, 0], plan(x[0, 0], shared))  # it is linear
    hessian = torch.func.hessian(lambda v: (plan(v, shared) ** 2).sum())(x[0, 0])
    torch.testing.assert_close(hessian, 2 * jacobian.T @ jacobian)
    twice = torch.func.jacfwd(torch.func.jacfwd(lambda v: (plan(v, shared) ** 2).sum()))(x[0, 0])
    torch.testing.assert_close(twice, hessian)


def test_compiled_graphs_and_copies():
    plan = st.plan_product(pattern(LOWER), pattern(LOWER.T))
    values = [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((3, 5), (5,))]

    def loss(a, b):
        return (2 * plan(a, b)).sin().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*values), loss(*values))
    for mine, true in zip(*(torch.autograd.grad(f(*values), values) for f in (compiled, loss)), strict=True):
        torch.testing.assert_close(mine, true)
    torch.library.opcheck(torch.ops.sparsebp.product.default, (plan._number, "c", *values))
    matrix = st.BatchedCSR(pattern(LOWER), values[0])
    broken = torch.compile(lambda m, v: (m @ v.T).to_dense().sum(), backend="eager")
    assert broken(matrix, matrix) == (matrix @ matrix.T).to_dense().sum()
    for again in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        torch.testing.assert_close(again(*values), plan(*values))
    with pytest.raises(StaleError, match="Keep"):
        torch.ops.sparsebp.product(-1, "c", *values)


def test_nothing_is_stale():
    """Values are read at every call, by whatever name; structures are copied."""
    a = torch.tensor([[1.0, 0, 2], [0, 3, 0]]).to_sparse_csr()
    b = scipy.sparse.csr_array(np.array([[1.0, 1], [0, 1], [1, 0]]))
    plan = st.plan_product(a, b)
    values, other = a.values(), torch.from_numpy(b.data).float()
    before = plan(values, other)
    values *= 2
    torch.testing.assert_close(plan(values, other), 2 * before)
    matrix = st.BatchedCSR(a)
    doubled = (matrix @ st.BatchedCSR(b, other)).values
    matrix.values.zero_()
    assert not (matrix @ st.BatchedCSR(b, other)).values.any()
    torch.testing.assert_close(doubled, 2 * before)
    a.col_indices().zero_()
    b.indices[...] = 0
    torch.testing.assert_close(plan(torch.tensor([2.0, 4, 6]), other), 2 * before)
    w = torch.ones(3, requires_grad=True)
    found = plan(w, other)
    with torch.no_grad():
        w += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_a_products_values_go_in_without_a_copy():
    a = pattern(LOWER)
    plan = st.plan_product(a, a)
    found = plan(torch.randn(5, a.nnz), torch.randn(5, a.nnz))
    assert columns(found).ctypes.data == found.data_ptr()
    assert columns(found[:, :2].contiguous()).shape == (2, 5)


def test_what_pytorch_has_not():
    """pytorch#98675: a batch of CSR matrices times a dense one, here also from the other side of the structure."""
    a = torch.tensor([[[1.0, 0.0], [2.0, 1.0]], [[0.1, 0.0], [0.5, 2.0]]])
    matrix = st.BatchedCSR(a.to_sparse_csr())
    for other in (torch.randn(2, 2), torch.randn(2, 2, 3), torch.randn(2)):
        torch.testing.assert_close(matrix @ other, a @ other)
    torch.testing.assert_close(matrix.T.to_dense(), a.mT)
    torch.testing.assert_close((matrix @ matrix.T).to_dense(), a @ a.mT)
    again = matrix.to_sparse_csr()
    assert again.layout == torch.sparse_csr and matrix.shape == again.shape == (2, 2, 2)
    torch.testing.assert_close(again.to_dense(), a)
    single = st.BatchedCSR(a[0].to_sparse_csr())
    assert single.shape == (2, 2) and single.to_sparse_csr().dim() == 2
    torch.testing.assert_close(single @ torch.ones(2), a[0].sum(1))
    values = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: st.BatchedCSR(matrix, v).T @ torch.eye(2, dtype=v.dtype), values)
    assert "nnz=3" in repr(matrix) and "3" in repr(st.plan_product(matrix, matrix))


def test_refusals():
    a = pattern(LOWER)
    plan = st.plan_product(a, a)
    ones = torch.ones(2, a.nnz)
    empty = torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)
    wrong = [
        (PatternError, lambda: st.plan_product(torch.eye(2), a)),
        (PatternError, lambda: st.plan_product(a, np.eye(3))),
        (PatternError, lambda: st.plan_product(a, torch.eye(3).to_sparse_coo())),
        (
            PatternError,
            lambda: st.plan_product(a, torch.sparse_csr_tensor(*empty, size=(0, 3, 3), check_invariants=False)),
        ),
        (PatternError, lambda: st.BatchedCSR(torch.stack([torch.eye(2), torch.eye(2).flip(0)]).to_sparse_csr())),
        (PatternError, lambda: st.BatchedCSR(a)),
        (ShapeError, lambda: st.plan_product(a, pattern(np.ones((2, 2))))),
        (ShapeError, lambda: plan(ones[:, :-1], ones)),
        (ShapeError, lambda: plan(ones, ones[:1])),
        (ShapeError, lambda: plan(ones[None], ones)),
        (ShapeError, lambda: st.BatchedCSR(a, ones) @ torch.ones(2, 2, 3, 3)),
        (DTypeError, lambda: plan(ones, ones.double())),
        (DTypeError, lambda: plan(ones.half(), ones.half())),
        (DTypeError, lambda: plan(ones.numpy(), ones)),
        (DTypeError, lambda: plan(torch.eye(3).to_sparse_csr(), ones)),
    ]
    for error, call in wrong:
        with pytest.raises(error, match="Expected"):
            call()
