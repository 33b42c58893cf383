"""The plan of a product on a fixed pattern: which kernel runs, and the arrays that it reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend, kernels
from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import DTypeError, LayoutError, ShapeError
from sparsebp.core.locks import cached_property
from sparsebp.core.types import Array
from sparsebp.patterns.copies import DeviceCopies, frozen
from sparsebp.patterns.sparsity import SparsityPattern
from sparsebp.products import estimate
from sparsebp.products.gradients import ProductGradients
from sparsebp.products.strategies import Identity, Strategy


@dataclass(frozen=True, eq=False)
class ProductPlan:
    """How C = A @ B is computed for two patterns, any number of times. Made by `plan_product`.

    Attributes
    ----------
    a, b, pattern : SparsityPattern
        Patterns of the operands and of the product.
    strategy : str
        ``identity`` (the other operand's values), ``scale_rows`` (A diagonal), ``scale_columns`` (B diagonal),
        ``scale_runs`` (B diagonal, rows of A that share few shapes made of runs of columns: a convolution),
        ``select_rows`` and ``select_columns`` (A or B a selection, at most one entry a row), ``dense`` (A and B full),
        ``filled`` (nearly full ones, written out as dense matrices),
        ``runs`` (rows of B consist of runs of neighbouring columns), ``blocks`` (A and B consist of small dense
        blocks), ``gather`` (every entry of C is one product), ``pairs`` (every entry of C is summed from the list of
        its products; where rows of B are short), ``positions`` (Gustavson's algorithm with each product's place in its
        row kept), or ``accumulate`` (the same through a dense row of sums, with nothing kept per product).
    products : int
        Multiplications a sample.
    how : type
        The strategy of that name, see `sparsebp.products.strategies`.
    arrays : dict of numpy.ndarray
        What the strategy's kernel reads beside the patterns, on the host; read-only.
    """

    a: SparsityPattern
    b: SparsityPattern
    pattern: SparsityPattern
    how: type[Strategy] = field(repr=False)
    products: int
    arrays: dict[str, np.ndarray] = field(repr=False)
    strategy: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", self.how.name)
        object.__setattr__(self, "arrays", {name: frozen(array) for name, array in self.arrays.items()})

    @property
    def flops(self) -> int:
        """Floating-point operations a sample: 2 per product (a multiplication and an addition)."""
        return 2 * self.products

    @property
    def index_bytes(self) -> int:
        """Bytes that the plan holds beside the operands' patterns: C's pattern and the kernel's arrays."""
        own = 0 if self.pattern in (self.a, self.b) else self.pattern.indptr.nbytes + self.pattern.indices.nbytes
        return own + sum(array.nbytes for array in self.arrays.values())

    def estimated_seconds(self, batch: int = 1, threads: int = 1, itemsize: int = 4) -> float:
        """Estimate one call's time on the host: the call, its bytes and its products, each at its price.

        The model is stated in `sparsebp.products.estimate`; nothing is measured at that.

        Parameters
        ----------
        batch
            Number of samples; every operand has values of its own for each.
        threads
            How many threads share the work.
        itemsize
            Bytes of a value, 4 or 8.

        Raises
        ------
        OptionError
            One of them is no integer, or too small.
        """
        batch, threads = check_integer("batch", batch, 0), check_integer("threads", threads, 1)
        itemsize = check_integer("itemsize", itemsize, 1)
        if self.how is Identity:
            return 0.0
        values = (self.a.nnz + self.b.nnz + self.pattern.nnz) * batch * itemsize
        columns = self.a.indices.nbytes if self.how.reads_columns or batch > 1 else 0
        patterns = columns + self.b.indptr.nbytes
        own = sum(array.nbytes for array in self.arrays.values())
        return estimate.seconds(self.strategy, self.products, values + patterns + own, batch, threads)

    def __call__(self, a_data: Array, b_data: Array, out: Array | None = None) -> Array:
        """Compute the values of C.

        Parameters
        ----------
        a_data, b_data
            Values on the patterns `a` and `b`: (nnz,) shared by the batch or (nnz, B) per sample, of one dtype
            (float32 or float64), C-contiguous, both of NumPy or both of CuPy.
        out
            Array for the result, else a new one is made. It must be writeable and not overlap the operands.

        Returns
        -------
        Array
            (nnz,) if both operands are shared, else (nnz, B).

        Raises
        ------
        ShapeError, DTypeError, LayoutError, DeviceError
            An array does not fit.
        """
        xp = backend.namespace(a_data=a_data, b_data=b_data, **backend.given(out=out))
        left, right = _values("a_data", a_data, self.a.nnz), _values("b_data", b_data, self.b.nnz)
        if a_data.dtype != b_data.dtype:
            raise DTypeError(
                "The operands have different dtypes",
                expected="one dtype for both",
                got=f"a_data {a_data.dtype}, b_data {b_data.dtype}",
                remedy="Convert one with .astype(...); nothing is converted silently",
            )
        shape = self._result_shape(a_data, b_data)
        if out is None:
            out = xp.empty(shape, dtype=a_data.dtype)
        else:
            backend.check_array("out", out, dtype=a_data.dtype, shape=shape, written=True)
            for name, array in (("a_data", a_data), ("b_data", b_data)):
                if xp.may_share_memory(out, array):
                    raise LayoutError(
                        f"out overlaps {name}",
                        expected="an array of its own",
                        got="shared memory",
                        remedy="Pass another",
                    )
        if out.size:
            self.how.run(kernels.get(xp), self.operands(xp), left, right, _as_columns(out))
        return out

    def _result_shape(self, a_data: Array, b_data: Array) -> tuple[int, ...]:
        batches = {array.shape[1] for array in (a_data, b_data) if array.ndim == 2}
        if len(batches) > 1:
            raise ShapeError(
                "The operands have different batch sizes",
                expected="one batch size, or shared values of shape (nnz,)",
                got=f"a_data {a_data.shape}, b_data {b_data.shape}",
                remedy="Pass values of the same samples",
            )
        return (self.pattern.nnz, *batches)

    @cached_property
    def gradients(self) -> ProductGradients:
        """The way back: gradients at A's and at B's values, with an index that is made when one is first asked for.

        Raises
        ------
        OptionError
            A or B is an identity, whose values the product passes over.
        """
        return ProductGradients(self.a, self.b, self.pattern, self.strategy)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies from what defines the plan: their arrays are read-only again, and no device's copies go along."""
        return ProductPlan, (self.a, self.b, self.pattern, self.how, self.products, self.arrays)

    def operands(self, xp: ModuleType) -> tuple[Any, ...]:
        """Return what the strategy's kernel reads beside values, as arrays of `xp`, copied to each device once."""
        key = (xp.__name__, backend.device_number(xp))
        found = self._operands.get(key)
        if found is None:
            a, b, c = (pattern.device_arrays(xp) for pattern in (self.a, self.b, self.pattern))
            names = ("a_indptr", "a_indices", "b_indptr", "b_indices", "c_indptr", "c_indices")
            own = dict(zip(self.arrays, DeviceCopies(*self.arrays.values()).on(xp), strict=True))
            arrays = dict(zip(names, (*a, *b, *c), strict=True)) | own  # it may have its own in place of the patterns'
            found = self._operands[key] = self.how.operands(self.a, self.b, arrays)
        return found

    @cached_property
    def _operands(self) -> dict[tuple[str, int | None], tuple[Any, ...]]:
        return {}


def _values(name: str, array: Array, nnz: int) -> Array:
    """Return checked values as (nnz, B*)."""
    backend.float_dtype(array.dtype)
    if array.ndim not in (1, 2) or array.shape[0] != nnz:
        raise ShapeError(
            f"{name} does not fit its pattern",
            expected=f"({nnz},) shared by the batch, or ({nnz}, B)",
            got=array.shape,
            remedy="Pass one value per entry of the pattern, the batch last",
        )
    backend.check_array(name, array)
    return _as_columns(array)


def _as_columns(array: Array) -> Array:
    return array[:, None] if array.ndim == 1 else array
