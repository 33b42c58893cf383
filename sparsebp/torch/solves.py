"""Linear systems on a kept pattern in PyTorch, differentiable to any order.

With A x = b, the gradient at b solves Aᴴ gb = gx, and that at A's entry (i, j) is ``-gb[i] * conj(x[j])``; in forward
mode dx solves ``A dx = db - dA x``. So both modes need solves with the same factors, and the products that sum over A's
entries, which `sparsebp.torch.sparse` has. Each matrix is factorised once, in the forward. The factors are a tensor
that autograd keeps as it keeps an operand, so they belong to the values of that call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from sparsebp import kernels
from sparsebp.core.check import check_flag
from sparsebp.core.errors import DeviceError, DTypeError, OptionError, ShapeError, StaleError
from sparsebp.patterns.pattern import SparsityPattern, places_of
from sparsebp.products import FactorPlan
from sparsebp.products.factor import plans, solve_columns
from sparsebp.torch.ops import apply, below_autograd, primals, to_array, to_tensor
from sparsebp.torch.sparse import DTYPES, Form, ProductPlan

__all__ = ["solve"]


def solve(plan: FactorPlan, values: Tensor, b: Tensor, transposed: bool = False) -> Tensor:
    """Solve A x = b, or Aᵀ x = b, for matrices on the pattern of a plan.

    Differentiable at `values` and at `b`, to any order and in forward mode, also under `torch.func.vmap`, `grad` and
    `jvp`; a compiled graph holds it as two operators, also under `vmap` (but `torch.func.grad` has to be outside of the
    graph). A backward pass uses the factors of the forward.

    Parameters
    ----------
    plan
        From `sparsebp.plan_factor`.
    values
        Values on the plan's pattern: (nnz,), or (nnz, B) for B matrices; float32, float64, complex64 or complex128, on
        the CPU. Or a `torch.sparse_csr` tensor (n, n) or (B, n, n) on it, with columns in any order; missing entries
        are zeros. Of a plan of Cholesky or LDLᵀ factors with both triangles, those below the diagonal do not count,
        and their gradients are 0. Complex matrices of these are Hermitian.
    b
        Right-hand sides, of the dtype of `values`. For one matrix (n,), or (n, K). For B matrices (n, B), one for
        each, or (n,) for all.
    transposed
        Solve with Aᵀ.

    Returns
    -------
    torch.Tensor
        x: (n,) or (n, K) for one matrix, (n, B) for B.

    Raises
    ------
    PivotError
        A matrix is singular, not finite, or does not suit the pivots of the plan; `samples` names them.
    OptionError
        `plan` is not a FactorPlan, or one that regularises: its solutions are of other matrices.
    DTypeError, DeviceError, ShapeError
        A tensor does not fit.

    Examples
    --------
    >>> import torch, sparsebp as sb, sparsebp.torch as st
    >>> plan = sb.plan_factor(sb.SparsityPattern.dense(2, 2))
    >>> values = torch.tensor([2.0, 0.0, 1.0, 4.0], requires_grad=True)
    >>> x = st.solve(plan, values, torch.tensor([2.0, 9.0]))
    >>> x.tolist()
    [1.0, 2.0]
    >>> x.sum().backward()
    >>> values.grad.tolist()
    [-0.375, -0.75, -0.25, -0.5]
    """
    if not isinstance(plan, FactorPlan):
        raise OptionError("plan is not a plan of factors", expected="a FactorPlan, from sparsebp.plan_factor",
                          got=type(plan).__name__)  # fmt: skip
    if plan.regularize is not None:
        raise OptionError("The plan regularises matrices", expected="regularize=None", got=plan.regularize)
    if isinstance(values, Tensor) and values.layout is torch.sparse_csr:
        values = _values_on(plan.pattern, values)
        values = values.t() if values.dim() == 2 else values
        plan.check_symmetric(values.detach().numpy(force=True))
    _check(plan, values, b)
    transposed = check_flag("transposed", transposed)
    factors = factorise(plan.number, values.detach())
    if plan.kind != "lu":
        values = values[torch.from_numpy(plan.read)]
        if values.is_complex():
            across = torch.from_numpy(plan.across).reshape(-1, *[1] * (values.dim() - 1))
            values = torch.where(across, values.conj(), values)
    inputs = plan.number, values, factors, b, transposed
    found: Tensor = solve_op(*inputs) if torch.compiler.is_compiling() else apply(Solve, *inputs)
    return found


def _values_on(pattern: SparsityPattern, tensor: Tensor) -> Tensor:
    """Return a CSR tensor's values on a pattern, (nnz,) or (B, nnz): missing ones are zeros, duplicates are added."""
    if tuple(tensor.shape[-2:]) != pattern.shape:
        raise ShapeError("The tensor does not fit the pattern", expected=pattern.shape, got=tuple(tensor.shape))
    values, (m, nnz) = tensor.values(), (pattern.shape[0], tensor.values().shape[-1])
    samples = [part.cpu().numpy().reshape(-1, size)  # synchronize!
               for part, size in ((tensor.crow_indices(), m + 1), (tensor.col_indices(), nnz))]  # fmt: skip
    ours = pattern.indptr, pattern.indices
    if nnz == pattern.nnz and all((part == mine).all() for part, mine in zip(samples, ours, strict=True)):
        return values
    numbers = values.detach().cpu().numpy().reshape(-1, nnz)
    places = [places_of(pattern, np.repeat(np.arange(m), np.diff(indptr)), columns, row)
              for indptr, columns, row in zip(*samples, numbers, strict=True)]  # fmt: skip
    at = torch.from_numpy(np.array(places, np.int64) % (pattern.nnz + 1)).reshape(values.shape)  # outside: behind all
    zeros = values.new_zeros(*values.shape[:-1], pattern.nnz + 1)
    return zeros.scatter_add(-1, at.to(zeros.device), values)[..., :-1]


def _check(plan: FactorPlan, values: Any, b: Any) -> None:
    for name, tensor in (("values", values), ("b", b)):
        if not isinstance(tensor, Tensor):
            raise DTypeError(f"{name} is not a tensor", expected="a torch.Tensor", got=type(tensor).__name__)
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            sparse = f"Pass {name}.to_dense()" if tensor is b else "Convert it with .to_sparse_csr()"
            raise DeviceError(f"{name} is elsewhere", expected="a dense tensor on the CPU, where factors are computed",
                              got=f"{tensor.layout} on {tensor.device}",
                              remedy=None if tensor.layout == torch.strided else sparse)  # fmt: skip
        if tensor.dtype not in DTYPES or tensor.dtype != values.dtype:
            expected = "a float or complex dtype" if tensor is values else f"{values.dtype}, as of values"
            raise DTypeError(f"{name} has the wrong dtype", expected=expected, got=tensor.dtype)
    nnz, n = plan.pattern.nnz, plan.pattern.shape[0]
    if values.dim() not in (1, 2) or values.shape[0] != nnz:
        raise ShapeError("values do not fit the plan", expected=f"({nnz},), or ({nnz}, B)", got=tuple(values.shape))
    fits = b.dim() in (1, 2) and b.shape[0] == n
    if not fits or (values.dim() == b.dim() == 2 and b.shape[1] != values.shape[1]):
        wanted = f"({n},), or ({n}, {'K' if values.dim() == 1 else values.shape[1]})"
        raise ShapeError("b does not fit the matrices", expected=wanted, got=tuple(b.shape))


# ---- the operators ---------------------------------------------------------------------------------------------------

torch.library.define("sparsebp::factorise", "(int plan, Tensor values) -> Tensor")
torch.library.define(
    "sparsebp::solve", "(int plan, Tensor values, Tensor factors, Tensor b, bool transposed) -> Tensor"
)
factorise = torch.ops.sparsebp.factorise.default
solve_op = torch.ops.sparsebp.solve.default


def _plan(number: int) -> FactorPlan:
    found = plans.get(number)
    if found is None:
        raise StaleError("The plan of a compiled solve is gone", expected="a plan that somebody keeps",
                         got="none of that number", remedy="Keep the object that plan_factor returned")  # fmt: skip
    return found


def _factorise(plan: int, values: Tensor) -> Tensor:
    """Return L and U, as `sparsebp.kernels.host.sparse.panels` lays them out."""
    return to_tensor(_plan(plan)(to_array(values))._data)


torch.library.impl("sparsebp::factorise", "cpu", _factorise)


def _solve(plan: int, values: Tensor, factors: Tensor, b: Tensor, transposed: bool) -> Tensor:
    """Solve with the factors of `values`, of which the shape alone is read here."""
    right = to_array(b)
    if b.dim() == 1:
        right = right[:, None] if values.dim() == 1 else np.repeat(right[:, None], values.shape[1], axis=1)
    x = solve_columns(_plan(plan), to_array(factors), right, "T" if transposed else "N")
    return to_tensor(x.reshape(_shape(values, b)))


torch.library.impl("sparsebp::solve", "cpu", _solve)


def _shape(values: Tensor, b: Tensor) -> tuple[int, ...]:
    """Return the shape of x."""
    return (*b.shape[:1], *(values if values.dim() == 2 else b).shape[1:])


@torch.library.register_fake("sparsebp::factorise")
def _shape_of_factors(plan: int, values: Tensor) -> Tensor:
    batch = values.shape[1] if values.dim() == 2 else 1
    lanes = kernels.on_host().panels.width(batch, str(values.dtype).removeprefix("torch."))
    return values.new_empty((-(-batch // lanes), _plan(plan).fill, lanes))


@torch.library.register_fake("sparsebp::solve")
def _shape_of_solution(plan: int, values: Tensor, factors: Tensor, b: Tensor, transposed: bool) -> Tensor:
    return b.new_empty(_shape(values, b))


# ---- derivatives -----------------------------------------------------------------------------------------------------

_forms: WeakKeyDictionary[FactorPlan, ProductPlan] = WeakKeyDictionary()


def _form(plan: FactorPlan, role: str, left: Tensor, right: Tensor) -> Tensor:
    """Return one of A, x and c = A x from the other two, batch last: ``"c"`` A x, ``"b"`` Aᵀ c, ``"a"`` c xᵀ on A."""
    found = _forms.get(plan)
    if found is None:
        found = _forms[plan] = ProductPlan(plan.times_vector)
    result: Tensor = apply(Form, found._number, role, left.t(), right.t())
    return result.t()


def _of_shape_of(operand: Tensor, gradient: Tensor) -> Tensor:
    """Sum the gradients of all samples where they share the operand."""
    return gradient.sum(1) if gradient.dim() > operand.dim() else gradient


def _conjugate(x: Tensor) -> Tensor:
    return x.conj().resolve_conj() if x.is_complex() else x


class Solve(torch.autograd.Function):
    """The operator with its derivatives; the factors are a function of `values` and count as constant."""

    operator, forward = solve_op, below_autograd(solve_op, _solve)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        number, values, factors, b, ctx.transposed = inputs
        ctx.plan, ctx.shared = _plan(number), b.dim() == 1  # keeps the plan alive for the backward
        ctx.save_for_backward(values, factors, output)
        ctx.save_for_forward(values, factors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        values, factors, x = ctx.saved_tensors
        gb = apply(Solve, ctx.plan.number, values, factors, _conjugate(grads[0]), not ctx.transposed)
        x, gb = _conjugate(x), _conjugate(gb)
        at_values = None
        if ctx.needs_input_grad[1]:
            outer = (x, gb) if ctx.transposed else (gb, x)
            at_values = _of_shape_of(values, -_form(ctx.plan, "a", *outer))
        at_b = gb.sum(1) if ctx.shared and gb.dim() == 2 else gb
        return None, at_values, None, at_b if ctx.needs_input_grad[3] else None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        _, d_values, _, db, _ = tangents
        with primals(ctx.saved_tensors) as (values, factors, x):
            right = db
            if d_values is not None:
                moved = _form(ctx.plan, "b" if ctx.transposed else "c", d_values, x)
                right = -moved if db is None else (db if db.dim() == moved.dim() else db[:, None]) - moved
            found: Tensor = Solve.apply(ctx.plan.number, values, factors, right, ctx.transposed)
            return found

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], number: int, values: Tensor, factors: Tensor, b: Tensor,
        transposed: bool,
    ) -> tuple[Tensor, int]:  # fmt: skip
        """Map as `_solve_mapped`, differentiably."""
        return _solve_mapped(Solve.apply, info, in_dims, number, values, factors, b, transposed)


def _solve_mapped(
    solve: Any, info: Any, in_dims: Sequence[int | None], number: int, values: Tensor, factors: Tensor, b: Tensor,
    transposed: bool,
) -> tuple[Tensor, int]:  # fmt: skip
    """Take the mapped axis, last here, as more matrices, or as more right-hand sides of one matrix."""
    _, at_values, _, at_b, _ = in_dims
    b = b[..., None] if at_b is None else b.movedim(at_b, -1)

    def run(values: Tensor, right: Tensor) -> Tensor:
        found: Tensor = solve(number, values, factors, right, transposed)
        return found

    if at_values is None and values.dim() == 1:
        return run(values, b.flatten(1)).reshape(b.shape), b.dim() - 1
    if at_values is None:  # several right-hand sides of each matrix
        return torch.stack([run(values, right) for right in b.unbind(-1)]), 0
    values = values.movedim(at_values, -1)
    if values.dim() < b.dim():  # likewise
        found = [run(values, right.expand(-1, info.batch_size)) for right in b.unbind(1)]
        return (torch.stack(found, 1) if found else b.expand(-1, -1, info.batch_size)), 2
    b = (b if b.dim() == values.dim() else b[:, None]).expand(-1, *values.shape[1:])
    return run(values.flatten(1), b.flatten(1)).reshape(b.shape), b.dim() - 1


def _factorise_mapped(info: Any, in_dims: Sequence[int | None], plan: int, values: Tensor) -> tuple[Tensor, None]:
    """Take the mapped axis as more matrices; their factors are one tensor, mapped over by nobody."""
    at = in_dims[1]
    return factorise(plan, values if at is None else values.movedim(at, -1).flatten(1)), None


torch.library.register_vmap("sparsebp::factorise", _factorise_mapped)
torch.library.register_vmap("sparsebp::solve", partial(_solve_mapped, solve_op))  # within compiled graphs

# As in `sparsebp.torch.ops`: with `torch.library.register_autograd` instead, tangents would silently be dropped.
_LIBRARY = torch.library.Library("sparsebp", "FRAGMENT")
_LIBRARY.impl("solve", Solve.apply, "Autograd")
