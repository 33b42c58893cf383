"""Products of batches of sparse matrices of one pattern, differentiable: planned once, then for any values."""

from __future__ import annotations

from typing import Any

import torch

from sparsebp import products
from sparsebp.core.errors import DeviceError, DTypeError, ShapeError
from sparsebp.patterns import SparsityPattern
from sparsebp.torch.sparse.structure import pattern_of
from sparsebp.torch.sparse.trilinear import evaluate, number_of


@torch.compiler.disable
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
        self._plan, self._number = plan, number_of(plan)
        self._entries = {"a_values": plan.a.nnz, "b_values": plan.b.nnz}
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

        Gradients go to both, of any order; `torch.func.vmap`, `grad`, `jvp` and what is made of them work, and a
        compiled graph has the call as one operator.

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
        a, b = (checked(name, values, nnz) for (name, nnz), values in
                zip(self._entries.items(), (a_values, b_values), strict=True))  # fmt: skip
        _check_alike(a, b)
        return evaluate(self._number, a, b)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProductPlan, (self._plan,)

    def __repr__(self) -> str:
        return f"ProductPlan({self._plan.a!r} @ {self._plan.b!r} -> {self.pattern!r}, {self._plan.strategy})"


def checked(name: str, values: Any, nnz: int) -> torch.Tensor:
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
