"""Products of batches of sparse matrices of one pattern, differentiable: planned once, then for any values.

The product is linear in the values of A and in those of B, and so are its gradients: with C = A @ B, the gradient at A
is a sum over the same terms of C's gradient and B, that at B of A and C's gradient. So there is one form of three
operands, of which any two make the third, and the way back of each of the three is made of the other two, as often as
one likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from sparsebp import products
from sparsebp.core.errors import DeviceError, DTypeError, ShapeError
from sparsebp.core.types import Array
from sparsebp.patterns import SparsityPattern
from sparsebp.torch.arrays import on_its_stream, to_array, to_tensor
from sparsebp.torch.structure import pattern_of

Role = Literal["a", "b", "c"]
_OPERANDS: dict[Role, tuple[Role, Role]] = {"c": ("a", "b"), "a": ("c", "b"), "b": ("a", "c")}
"""Of what every one of the three is made."""


def plan_product(a: Any, b: Any) -> ProductPlan:
    """Do the symbolic work of C = A @ B once, for sparse matrices whose values come later, a batch of them or one.

    Parameters
    ----------
    a, b
        The structures, of shapes (m, k) and (k, n): `torch.sparse_csr` tensors (of a batch of matrices, the samples
        have one structure), SciPy's CSR matrices, `BatchedCSR`, `sparsebp.SparsityPattern` or
        `sparsebp.TransposedJacobian`. Stored zeros are entries; values are not looked at. Index arrays are copied: what
        becomes of them later is of no consequence.

    Returns
    -------
    ProductPlan
        Call it with the values.

    Raises
    ------
    PatternError
        An operand is nothing of that, its columns are not sorted, or the samples of a batch have different structures.
    ShapeError
        The shapes do not chain.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> A, B = (torch.eye(3).to_sparse_csr() for _ in range(2))
    >>> plan = st.plan_product(A, B)
    >>> plan(torch.full((5, 3), 2.0), torch.full((3,), 4.0)).shape
    torch.Size([5, 3])
    """
    return ProductPlan(products.plan_product(pattern_of("a", a), pattern_of("b", b)))


class ProductPlan:
    """How C = A @ B is computed for two structures, any number of times. Made by `plan_product`.

    Attributes
    ----------
    pattern
        C's structure, a `sparsebp.SparsityPattern`; the values that a call returns are in the order of its entries.
    """

    def __init__(self, plan: products.ProductPlan) -> None:
        self._plan = plan
        self.pattern: SparsityPattern = plan.pattern

    @property
    def shape(self) -> tuple[int, int]:
        """C's (m, n)."""
        return self.pattern.shape

    @property
    def nnz(self) -> int:
        """Number of C's entries."""
        return self.pattern.nnz

    def __call__(self, a_values: torch.Tensor, b_values: torch.Tensor) -> torch.Tensor:
        """Compute the values of C.

        Gradients go to both, of any order; `torch.func.vmap`, `grad`, `jvp` and what is made of them work.

        Parameters
        ----------
        a_values, b_values
            Values of A and B in the order of their entries: (nnz,), the same for every sample, or (B, nnz); float32 or
            float64, of one dtype, on one device (CPU, or CUDA with CuPy installed).

        Returns
        -------
        torch.Tensor
            (nnz of C,) if both are shared by the samples, else (B, nnz of C). Computed anew in every call.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            A tensor does not fit.

        Notes
        -----
        The kernels keep the batch last. So the result is a transposed view of (nnz, B), and values that are such a view
        (of another product, or made as ``torch.empty(nnz, B).T``) go in without a copy; others are copied once.
        """
        checked = (_checked("a_values", a_values, self._plan.a.nnz), _checked("b_values", b_values, self._plan.b.nnz))
        _check_alike(*checked)
        found: torch.Tensor = _Form.apply(self._plan, "c", *checked)
        return found

    def __repr__(self) -> str:
        return f"ProductPlan({self._plan.a!r} @ {self._plan.b!r} -> {self.pattern!r}, {self._plan.strategy})"


class _Form(torch.autograd.Function):
    """One of A, B and C (`role`), by the values of the other two in the order of `_OPERANDS`."""

    @staticmethod
    def forward(plan: products.ProductPlan, role: Role, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with on_its_stream(x):
            left, right = _columns(x), _columns(y)
            if role == "c":
                found = plan(left, right)
            else:
                found = (plan.gradients.at_a if role == "a" else plan.gradients.at_b)(left, right)
            return to_tensor(found).t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.plan, ctx.role, x, y = inputs
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        names = _OPERANDS[ctx.role]
        values = {**dict(zip(names, ctx.saved_tensors, strict=True)), ctx.role: grad}
        found: list[torch.Tensor | None] = []
        for name, operand, needed in zip(names, ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True):
            if not needed:
                found.append(None)
                continue
            gradient = _Form.apply(ctx.plan, name, *(values[other] for other in _OPERANDS[name]))
            found.append(gradient.sum(0) if gradient.dim() > operand.dim() else gradient)
        return None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        x, y = ctx.saved_tensors
        _, _, dx, dy = tangents
        terms = [(tangent, y) for tangent in (dx,) if tangent is not None]
        terms += [(x, tangent) for tangent in (dy,) if tangent is not None]
        parts = [_Form.apply(ctx.plan, ctx.role, *term) for term in terms]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], plan: products.ProductPlan, role: Role, x: torch.Tensor,
        y: torch.Tensor,
    ) -> tuple[torch.Tensor, int]:  # fmt: skip
        """Take what is mapped over for samples, beside those that are there."""
        size = info.batch_size
        operands = [v if dim is None else v.movedim(dim, 0) for v, dim in zip((x, y), in_dims[2:], strict=True)]
        ranks = [v.dim() - (dim is not None) for v, dim in zip(operands, in_dims[2:], strict=True)]
        if max(ranks) == 1:
            return _Form.apply(plan, role, *operands), 0
        batch = next(v.shape[-2] for v, rank in zip(operands, ranks, strict=True) if rank == 2)
        flat = []
        for v, rank, dim in zip(operands, ranks, in_dims[2:], strict=True):
            if dim is None and rank == 1:
                flat.append(v)  # shared by all
                continue
            wide = v[:, None] if rank == 1 else v
            flat.append(wide.expand(size, batch, v.shape[-1]).reshape(size * batch, v.shape[-1]))
        found = _Form.apply(plan, role, *flat)
        return found.reshape(size, batch, found.shape[-1]), 0


def _columns(values: torch.Tensor) -> Array:
    """Return values (nnz,) or (B, nnz) as an array (nnz,) or (nnz, B), the batch last; a copy if they lie otherwise."""
    return to_array(values.t())


def _checked(name: str, values: Any, nnz: int) -> torch.Tensor:
    """Return values of a structure with so many entries."""
    if not isinstance(values, torch.Tensor) or values.layout is not torch.strided:
        got = type(values).__name__ if not isinstance(values, torch.Tensor) else f"a tensor of layout {values.layout}"
        raise DTypeError(f"{name} is no dense tensor", expected="a tensor of values, such as A.values()", got=got,
                         remedy="Pass the values alone; the plan knows the structure")  # fmt: skip
    if values.dtype not in (torch.float32, torch.float64):
        raise DTypeError(f"{name} has an unsupported dtype", expected="torch.float32 or torch.float64",
                         got=values.dtype, remedy="Convert it with .float() or .double()")  # fmt: skip
    if values.dim() not in (1, 2) or values.shape[-1] != nnz:
        raise ShapeError(f"{name} does not fit its structure", expected=f"({nnz},) or (B, {nnz})",
                         got=tuple(values.shape), remedy="Pass one value per entry, the batch first")  # fmt: skip
    if values.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"{name} is on an unsupported device", expected="cpu or cuda", got=values.device,
                          remedy="Move it first")  # fmt: skip
    return values


def _check_alike(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.device != b.device:
        raise DeviceError("The values are on different devices", expected="one device", got=f"{a.device}, {b.device}",
                          remedy="Move one with .to(device)")  # fmt: skip
    if a.dtype != b.dtype:
        raise DTypeError("The values have different dtypes", expected="one dtype", got=f"{a.dtype}, {b.dtype}",
                         remedy="Convert one; nothing is converted silently")  # fmt: skip
    if a.dim() == b.dim() == 2 and len(a) != len(b):
        raise ShapeError("The values have different batch sizes", expected="one batch size, or (nnz,) for all",
                         got=f"{(*a.shape,)}, {(*b.shape,)}", remedy="Pass values of the same samples")  # fmt: skip
