"""`plan_product` and `ProductPlan`: symbolic work once, then values alone. Also sums, and gradients of products.

Plans raise `ShapeError`, `DTypeError`, `LayoutError` or `DeviceError` for values that do not fit, `PatternError` for a
sparse matrix with an entry outside the pattern.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, graphs
from sparsebp.core.check import Array, check_integer
from sparsebp.core.errors import DTypeError, LayoutError, MemoryLimitError, OptionError, ShapeError, within_memory
from sparsebp.core.locks import cached_property, forkable_lock
from sparsebp.kernels.operands import Terms
from sparsebp.patterns.builders import AssemblyPlan
from sparsebp.patterns.pattern import KEPT, DeviceCopies, SparsityPattern, frozen, index_dtype, structure_of, values_on
from sparsebp.products.strategies import OF_STRUCTURE, Dense, Masked, MaskedSums, Strategy, by_kinds
from sparsebp.products.symbolic import MaskedProduct, SymbolicProduct, parts_of_rows

# Sums on fixed patterns: where the entries of both operands lie in their union.


def plan_addition(a: Any, b: Any) -> AssemblyPlan:
    """Do the symbolic work of C = A + B once; entries that cancel stay entries.

    Parameters
    ----------
    a, b
        Patterns, or sparse matrices of SciPy or CuPy, of one shape.

    Returns
    -------
    AssemblyPlan
        Cached: equal patterns give the same object while it is among the most recently used.

    Raises
    ------
    PatternError, ShapeError
        An operand is neither, or the shapes differ.
    """
    a, b = structure_of("a", a), structure_of("b", b)
    if a.shape != b.shape:
        raise ShapeError("The shapes of a sum differ", expected=f"two matrices of shape {a.shape}", got=b.shape)
    return _addition_plan(a, b)


@lru_cache(maxsize=KEPT)
def _addition_plan(a: SparsityPattern, b: SparsityPattern) -> AssemblyPlan:
    from sparsebp.kernels.host.engine.threads import team
    from sparsebp.kernels.host.sparse import symbolic
    from sparsebp.products.symbolic import parts_for, row_cuts

    operands = (a.indptr, a.indices, b.indptr, b.indices)
    cuts = row_cuts(np.add(a.indptr, b.indptr, dtype=np.int64), parts_for(a.nnz + b.nnz))
    indptr = np.zeros(a.shape[0] + 1, np.int64)
    symbolic.count_union(team(), len(cuts) - 1, *operands, cuts, indptr[1:])
    np.cumsum(indptr, out=indptr)
    nnz = int(indptr[-1])
    columns = np.empty(nnz, index_dtype(nnz, a.shape))
    a_index, b_index = (np.empty(p.nnz, np.int64) for p in (a, b))  # the dtype that NumPy indexes with
    symbolic.write_union(team(), len(cuts) - 1, *operands, cuts, indptr, columns, a_index, b_index)
    return AssemblyPlan((a, b), SparsityPattern._unchecked(indptr, columns, a.shape), (a_index, b_index))


# Gradients of a product on a fixed pattern: the forward's terms, summed at A's entries or at B's.
#
# With C = A @ B, every term of the forward multiplies an entry a of A by an entry b of B and adds it to an entry c of
# C. The gradient at A's values sums ``gc[c] * b`` over the same terms, the gradient at B's values ``a * gc[c]``.
# Products of ``gc @ Bᵀ`` outside A's pattern, which a general product would compute too, are never formed.

Operand = Literal["a", "b"]
Role = Literal["a", "b", "c"]
OPERANDS: dict[Role, tuple[Role, Role]] = {"c": ("a", "b"), "a": ("c", "b"), "b": ("a", "c")}
"""The two that make each of the three: the values of A, of B, and of C or its gradient."""


class ProductGradients:
    """The backward pass of one product. Each operand's index is built at its first gradient.

    Gradients of complex values are PyTorch's: with C = A B, that at A is the gradient at C times Bᴴ.

    Parameters
    ----------
    a, b, c
        The patterns of C = A @ B.
    strategy
        The plan's strategy.

    Raises
    ------
    OptionError
        A or B is an identity: its values are ones by definition, and the product skips them.
    """

    def __init__(self, a: SparsityPattern, b: SparsityPattern, c: SparsityPattern, strategy: str) -> None:
        if "identity" in (a.kind, b.kind):
            raise OptionError("An identity has no gradient at its values", expected="patterns whose values count",
                              got=f"{a} @ {b}", remedy="Use SparsityPattern.diagonal(n) for values")  # fmt: skip
        self._a, self._b, self._c = a, b, c
        self._dense, self._masked = strategy == Dense.name, strategy in (Masked.name, MaskedSums.name)

    def at_a(self, c_data: Array, b_data: Array) -> Array:
        """Return the gradient at A's values, from the gradient at C's values and B's values.

        Parameters
        ----------
        c_data, b_data
            Values on the patterns of C and B: (nnz,) or (nnz, B) each, of one dtype, C-contiguous, of one library; or
            sparse matrices, as in a `ProductPlan`.

        Returns
        -------
        Array
            (nnz of A,) if neither has a batch, else (nnz of A, B): per sample, even where A's values are shared.
        """
        return self._checked("a", ("c_data", c_data, self._c), ("b_data", b_data, self._b))

    def at_b(self, a_data: Array, c_data: Array) -> Array:
        """Return the gradient at B's values, from A's values and the gradient at C's values; see `at_a`."""
        return self._checked("b", ("a_data", a_data, self._a), ("c_data", c_data, self._c))

    def _checked(
        self, operand: Operand, left: tuple[str, Any, SparsityPattern], right: tuple[str, Any, SparsityPattern]
    ) -> Array:
        (left_name, left_data, left_on), (right_name, right_data, right_on) = left, right
        left_data, right_data = values_on(left_on, left_data), values_on(right_on, right_data)
        backend.namespace(**{left_name: left_data, right_name: right_data})
        _check_values(left_name, left_data, left_on.nnz, backend.number_dtype)
        _check_values(right_name, right_data, right_on.nnz, backend.number_dtype)
        batches = {data.shape[1] for data in (left_data, right_data) if data.ndim == 2}
        if len(batches) > 1 or left_data.dtype != right_data.dtype:
            error = ShapeError if len(batches) > 1 else DTypeError
            got = f"{left_name} {left_data.shape} {left_data.dtype}, {right_name} {right_data.shape} {right_data.dtype}"
            raise error("The values do not go together", expected="one dtype and one batch size", got=got)
        if left_data.dtype.kind == "c":
            left_data, right_data = (data if name == "c_data" else data.conj()
                                     for name, data in ((left_name, left_data), (right_name, right_data)))  # fmt: skip
        return self.unchecked(operand, left_data, right_data)

    def unchecked(self, operand: Operand, left: Array, right: Array) -> Array:
        """Return what `at_a` or `at_b` returns; complex values as they are, none of them conjugated."""
        xp = backend.namespace(left, right)
        out = xp.empty(((self._a if operand == "a" else self._b).nnz, *(left.shape[1:] or right.shape[1:])), left.dtype)
        if out.size:
            wide = _as_columns(left), _as_columns(right), _as_columns(out)
            if out.dtype.kind == "c":
                _by_real_products(xp, lambda x, y: self.unchecked(operand, x, y), *wide)
            elif self._dense:
                self._multiply(xp, operand, *wide)
            else:
                terms = (self._terms_of_a if operand == "a" else self._terms_of_b).on(xp)
                kernels.get(xp).unchecked.spgemm_select_columns(Terms(*terms), *wide)
        return out

    def _multiply(self, xp: ModuleType, operand: Operand, left: Array, right: Array, out: Array) -> None:
        """Write ``gc @ Bᵀ`` or ``Aᵀ @ gc`` where everything is dense."""
        (m, k), n = self._a.shape, self._b.shape[1]
        if operand == "a":
            sizes, right = (m, n, k), _transposed(xp, self._b, right)
        else:
            sizes, left = (k, m, n), _transposed(xp, self._a, left)
        Dense.run(kernels.get(xp), (*self._block.on(xp), *sizes), left, right, out)

    @cached_property
    def _block(self) -> DeviceCopies:
        return DeviceCopies(frozen(np.zeros(1, np.int64)))  # the number of the only block

    # ---- the terms, listed by the rows of the operand at which they are summed ---------------------------------------

    @cached_property
    def _terms_of_a(self) -> DeviceCopies:
        """Entry c of C times entry b of B, in the order of the forward."""
        a, (counts, before) = self._a, self._counts
        a_of, _ = _spread(counts)
        return self._listed(a, before[a.indptr], self._c_of, self._b_of, a_of - a.indptr[a.row_of_entry[a_of]])

    @cached_property
    def _terms_of_b(self) -> DeviceCopies:
        """Entry a of A times entry c of C; row k of B contributes through the entries of A's column k."""
        a, b = self._a, self._b
        counts, before = self._counts
        by_column = a.transpose_permutation  # A's entries column by column: by the rows of B
        entry, within = _spread(counts[by_column])
        a_of = by_column[entry]
        ends, term = np.concatenate(([0], np.cumsum(counts[by_column]))), before[a_of] + within
        positions = self._b_of[term] - b.indptr[a.indices[a_of]]
        return self._listed(b, ends[a.T.indptr], a_of, self._c_of[term], positions)

    def _listed(
        self, target: SparsityPattern, product_ptr: np.ndarray, first: np.ndarray, second: np.ndarray,
        positions: np.ndarray,
    ) -> DeviceCopies:  # fmt: skip
        """Return the fields of `Terms`."""
        dtype = index_dtype(max(len(first), self._a.nnz, self._b.nnz, self._c.nnz), (0, 0))
        longest = int(np.diff(target.indptr).max(initial=0))
        narrow = np.uint16 if longest <= 2**16 else np.uint32
        arrays = (product_ptr.astype(dtype), first.astype(dtype), second.astype(dtype), target.indptr.astype(dtype),
                  positions.astype(narrow), parts_of_rows(product_ptr + target.indptr.astype(np.int64)))  # fmt: skip
        return DeviceCopies(*map(frozen, arrays))

    @cached_property
    def _counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of terms of every entry of A, and before each, (nnz of A + 1,)."""
        if self._masked:
            counts = np.bincount(self._in_mask[0], minlength=self._a.nnz)
        else:
            counts = np.diff(self._b.indptr).astype(np.int64)[self._a.indices]
        return counts, np.concatenate(([0], np.cumsum(counts)))

    @property
    def _b_of(self) -> np.ndarray:
        """The entry of B in each term, in the order of the forward."""
        if self._masked:
            return self._in_mask[1]
        a_of, within = _spread(self._counts[0])
        found: np.ndarray = self._b.indptr[self._a.indices[a_of]] + within
        return found

    @cached_property
    def _c_of(self) -> np.ndarray:
        """The entry of C to which each term is added, in the order of the forward."""
        if self._masked:
            return self._in_mask[2]
        product = SymbolicProduct(self._a, self._b)
        positions = product.positions(product.position_dtype)
        return np.repeat(self._c.indptr[:-1].astype(np.int64), np.diff(product.product_ptr)) + positions

    @cached_property
    def _in_mask(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The entries of A, B and C of every term."""
        product = MaskedProduct(self._a, self._b, self._c)
        a_of, b_of, positions = product.kept_terms(np.int64)
        return a_of, b_of, np.repeat(product.c_indptr[:-1], np.diff(product.kept_ptr)) + positions


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two numbers for each of the ``counts[i]`` terms of every i: i, and the term's number among them."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _transposed(xp: ModuleType, pattern: SparsityPattern, data: Array) -> Array:
    """Return values on `pattern` in the order of its transpose."""
    return data[graphs.constant(xp, pattern.transpose_permutation)]


# The plan of a product on a fixed pattern: which kernel runs, and the arrays it reads.


@dataclass(frozen=True, eq=False)
class ProductPlan:
    """How C = A @ B is computed for two patterns, any number of times. Made by `plan_product`.

    Attributes
    ----------
    a, b, pattern : SparsityPattern
        Patterns of the operands and of the product.
    strategy : str
        ``identity`` (copies the other operand), ``scale_rows`` (A diagonal), ``scale_columns`` (B diagonal),
        ``scale_runs`` (B diagonal, rows of A share a few shapes made of runs of columns: a convolution),
        ``select_rows`` and ``select_columns`` (A or B a selection, at most one entry per row), ``dense`` (both full),
        ``filled`` (nearly full, written out as dense matrices), ``runs`` (rows of B consist of runs of neighbouring
        columns), ``blocks`` (A and B consist of small dense blocks), ``gather`` (every entry of C is one product),
        ``pairs`` (every entry of C sums a list of its products; short rows of B), ``positions`` (Gustavson's algorithm
        with each product's offset in its row kept), ``accumulate`` (the same through a dense row of sums, with
        nothing kept per product), ``masked`` (a list of the products in a mask), or ``masked_sums`` (as `accumulate`).
    products : int
        Multiplications per sample.
    how : type
        The strategy of that name, see `sparsebp.products.strategies`.
    arrays : dict of numpy.ndarray
        Kernel arguments other than the values and the patterns, on the host; read-only.
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
        """Floating-point operations per sample: a multiplication and an addition per product."""
        return 2 * self.products

    @cached_property
    def index_bytes(self) -> int:
        """Bytes that the plan adds to the operands' patterns and a mask: C's pattern and the kernel's arrays."""
        given = self.how in (Masked, MaskedSums) or self.pattern in (self.a, self.b)
        own = 0 if given else self.pattern.indptr.nbytes + self.pattern.indices.nbytes
        return own + sum(array.nbytes for array in self.arrays.values())

    def __call__(self, a_data: Any, b_data: Any, out: Array | None = None) -> Array:
        """Compute the values of C.

        Parameters
        ----------
        a_data, b_data
            Values on the patterns `a` and `b`: (nnz,) shared by the batch or (nnz, B) per sample, of one dtype
            (float32, float64, complex64 or complex128), C-contiguous, both of NumPy or both of CuPy. Or sparse matrices
            whose entries lie on the patterns, in any order: see `SparsityPattern.values_of`.
        out
            Array for the result, writeable and not overlapping the operands; None makes a new one.

        Returns
        -------
        Array
            (nnz,) if both operands are shared, else (nnz, B), in the order of `pattern`, whose ``to_scipy`` makes a
            matrix of them.
        """
        a_data, b_data = values_on(self.a, a_data), values_on(self.b, b_data)
        xp = backend.namespace(a_data=a_data, b_data=b_data, **backend.given(out=out))
        _check_values("a_data", a_data, self.a.nnz, backend.number_dtype)
        _check_values("b_data", b_data, self.b.nnz, backend.number_dtype)
        if a_data.dtype != b_data.dtype:
            raise DTypeError("The operands have different dtypes", expected="one dtype for both",
                             got=f"a_data {a_data.dtype}, b_data {b_data.dtype}",
                             remedy="Convert one with .astype(...); nothing is converted silently")  # fmt: skip
        batches = {array.shape[1] for array in (a_data, b_data) if array.ndim == 2}
        if len(batches) > 1:
            raise ShapeError("The operands have different batch sizes",
                             expected="one batch size, or shared values of shape (nnz,)",
                             got=f"a_data {a_data.shape}, b_data {b_data.shape}")  # fmt: skip
        shape = (self.pattern.nnz, *batches)
        if out is None:
            out = xp.empty(shape, dtype=a_data.dtype)
        else:
            backend.check_array("out", out, dtype=a_data.dtype, shape=shape, written=True)
            for name, array in (("a_data", a_data), ("b_data", b_data)):
                if xp.may_share_memory(out, array):
                    raise LayoutError(f"out overlaps {name}", expected="an array with its own memory",
                                      got="shared memory")  # fmt: skip
        return self._computed(xp, a_data, b_data, out)

    def _computed(self, xp: ModuleType, a_data: Array, b_data: Array, out: Array) -> Array:
        if out.size and out.dtype.kind == "c":
            self._compute_complex(xp, _as_columns(a_data), _as_columns(b_data), _as_columns(out))
        elif out.size:
            operands, values = self.operands(xp), (_as_columns(a_data), _as_columns(b_data))
            self.how.run(kernels.get(xp).unchecked, operands, *values, _as_columns(out))
        return out

    def _compute_complex(self, xp: ModuleType, a: Array, b: Array, out: Array) -> None:
        def multiply(a: Array, b: Array) -> Array:
            batch = max(a.shape[1], b.shape[1])
            return self._computed(xp, a, b, xp.empty((self.pattern.nnz, batch), a.dtype))

        if self.strategy == "identity":  # copies the other operand
            out.real, out.imag = (
                multiply(*map(xp.ascontiguousarray, parts)) for parts in ((a.real, b.real), (a.imag, b.imag))
            )
        else:
            _by_real_products(xp, multiply, a, b, out)

    def form(self, role: Role, x: Array, y: Array, out: Array | None = None) -> Array:
        """Return one of A, B and C, or the gradient there, from the other two in the order of `OPERANDS`; unchecked.

        `out`, of C alone: an array for it.
        """
        if role != "c":
            return self.gradients.unchecked(role, x, y)
        xp = backend.namespace(x, y)
        if out is None:
            out = xp.empty((self.pattern.nnz, *(x.shape[1:] or y.shape[1:])), x.dtype)
        return self._computed(xp, x, y, out)

    @cached_property
    def gradients(self) -> ProductGradients:
        """Gradients at A's and at B's values; each index is built when first used.

        Raises
        ------
        OptionError
            A or B is an identity, whose values the product skips.
        """
        return ProductGradients(self.a, self.b, self.pattern, self.strategy)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy by the constructor: arrays are read-only again, and device copies stay behind."""
        return ProductPlan, (self.a, self.b, self.pattern, self.how, self.products, self.arrays)

    def operands(self, xp: ModuleType) -> tuple[Any, ...]:
        """Return the kernel arguments other than the values, as arrays of `xp`, copied to each device once."""
        key = (xp.__name__, backend.device_number(xp))
        found = self._operands.get(key)
        if found is None:
            a, b, c = (pattern.device_arrays(xp) for pattern in (self.a, self.b, self.pattern))
            names = ("a_indptr", "a_indices", "b_indptr", "b_indices", "c_indptr", "c_indices")
            own = dict(zip(self.arrays, DeviceCopies(*self.arrays.values()).on(xp), strict=True))
            arrays = dict(zip(names, (*a, *b, *c), strict=True)) | own  # its own arrays may replace the patterns'
            found = self._operands[key] = self.how.operands(self.a, self.b, arrays)
        return found

    @cached_property
    def _operands(self) -> dict[tuple[str, int | None], tuple[Any, ...]]:
        return {}


def _by_real_products(
    xp: ModuleType, multiply: Callable[[Array, Array], Array], x: Array, y: Array, out: Array
) -> None:
    """Write a product of complex values (nnz, B*): four real ones, whose operands are samples of one batch."""
    batch = out.shape[1]
    x, y = (xp.broadcast_to(v, (len(v), batch)) for v in (x, y))
    left = xp.stack((x.real, x.imag, x.real, x.imag), axis=1).reshape(len(x), 4 * batch)
    right = xp.stack((y.real, y.imag, y.imag, y.real), axis=1).reshape(len(y), 4 * batch)
    found = multiply(left, right).reshape(len(out), 4, batch)
    out.real, out.imag = found[:, 0] - found[:, 1], found[:, 2] + found[:, 3]


def _check_values(
    name: str, array: Array, nnz: int, check_dtype: Callable[[Any], np.dtype] = backend.float_dtype
) -> None:
    """Check that an array holds values on a pattern of `nnz` entries."""
    check_dtype(array.dtype)
    if array.ndim not in (1, 2) or array.shape[0] != nnz:
        raise ShapeError(f"{name} does not fit its pattern", expected=f"({nnz},) shared by the batch, or ({nnz}, B)",
                         got=array.shape)  # fmt: skip
    backend.check_array(name, array)


def _as_columns(array: Array) -> Array:
    return array[:, None] if array.ndim == 1 else array


_CACHE_SIZE = 64


def plan_product(a: Any, b: Any, *, mask: Any = None, memory_limit: int | None = None) -> ProductPlan:
    """Do the symbolic work of C = A @ B once.

    Parameters
    ----------
    a, b
        Patterns of shapes (m, k) and (k, n), or sparse matrices of SciPy or CuPy, whose values do not count.
    mask
        The entries of C to compute, (m, n): a pattern or a sparse matrix, whose values do not count. C has this
        pattern; entries without a product are 0. None computes all that can differ from 0.
    memory_limit
        Most bytes of the plan's arrays, None for no limit. Where an index of the products does not fit, the plan keeps
        none and sums in a dense row; C's pattern must fit in any case.

    Returns
    -------
    ProductPlan
        Cached: equal patterns give the same object while it is among the last 64.

    Raises
    ------
    PatternError, ShapeError
        An operand is neither, the shapes do not chain, or the mask has another one than C.
    OptionError
        `memory_limit` is not an integer, or negative.
    MemoryLimitError
        The plan would still exceed `memory_limit` (found by counting, before anything is allocated), or the system has
        no memory for it.
    """
    a, b = structure_of("a", a), structure_of("b", b)
    if memory_limit is not None:
        memory_limit = check_integer("memory_limit", memory_limit, 0)
    if a.shape[1] != b.shape[0]:
        raise ShapeError("The shapes do not chain", expected=f"B with {a.shape[1]} rows, as many as A has columns",
                         got=f"A {a.shape}, B {b.shape}",
                         remedy="Swap the operands, or pass a transposed pattern (.T)")  # fmt: skip
    if mask is not None:
        mask = structure_of("mask", mask)
        if mask.shape != (shape := (a.shape[0], b.shape[1])):
            raise ShapeError("The mask does not fit the product", expected=shape, got=mask.shape)
    for limit in (None, memory_limit):  # a plan made without a limit also serves, if it fits
        key = (a, b, mask, limit)
        with _lock:
            plan = _cache.get(key)
            if plan is not None and (memory_limit is None or plan.index_bytes <= memory_limit):
                _cache.move_to_end(key)
                return plan
    with within_memory(
        f"The plan of a product of shapes {a.shape} and {b.shape} does not fit in memory",
        "Pass memory_limit=, which makes a plan that keeps less, or multiply smaller parts",
    ):
        plan = _make_plan(a, b, memory_limit, mask)
    with _lock:
        _cache[key] = plan
        while len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    return plan


_cache: OrderedDict[tuple[SparsityPattern, SparsityPattern, SparsityPattern | None, int | None], ProductPlan] = (
    OrderedDict()
)
_lock = forkable_lock(drop=_cache.clear)


def candidates(a: SparsityPattern, b: SparsityPattern, memory_limit: int | None) -> Iterator[Strategy]:
    """Yield the strategies to choose from, fastest first."""
    told = by_kinds(a, b)
    if told is not None:
        product = SymbolicProduct(a, b)
        yield from (found for found in (strategy(product) for strategy in told.quicker) if found.fits)
        yield told(product)
    else:
        yield from candidates_of_structure(a, b, memory_limit)


def candidates_of_structure(
    a: SparsityPattern, b: SparsityPattern, memory_limit: int | None = None
) -> Iterator[Strategy]:
    """Yield the strategies that fit the structure, whatever the kinds; the last keeps nothing per product."""
    product = SymbolicProduct(a, b, memory_limit)
    yield from (found for found in (strategy(product) for strategy in OF_STRUCTURE) if found.fits)


def candidates_in_mask(a: SparsityPattern, b: SparsityPattern, mask: SparsityPattern) -> Iterator[Strategy]:
    """Yield the strategies for a mask; the last keeps nothing per product."""
    product = MaskedProduct(a, b, mask)
    yield from (found for found in (Masked(product), MaskedSums(product)) if found.fits)


def plan_by(strategy: Strategy) -> ProductPlan:
    """Plan a product by this strategy and no other.

    Raises
    ------
    OptionError
        The strategy does not fit the product: its kernel would access memory past its arrays.
    """
    if not strategy.fits:
        a, b = strategy.product.a, strategy.product.b
        got = f"A {a.shape} of kind {a.kind} with {a.nnz} entries, B {b.shape} of kind {b.kind} with {b.nnz}"
        raise OptionError(f"The strategy {strategy.name!r} cannot compute this product", expected="one that fits",
                          got=got, remedy="Use plan_product, which chooses one that fits")  # fmt: skip
    return _plan(strategy)


def _plan(strategy: Strategy) -> ProductPlan:
    """Make C's pattern, the strategy's arrays, and the plan."""
    product, pattern = strategy.product, strategy.pattern
    return ProductPlan(product.a, product.b, pattern, type(strategy), strategy.products, strategy.arrays())


def _make_plan(
    a: SparsityPattern, b: SparsityPattern, memory_limit: int | None, mask: SparsityPattern | None = None
) -> ProductPlan:
    for strategy in candidates(a, b, memory_limit) if mask is None else candidates_in_mask(a, b, mask):
        needed = strategy.pattern_bytes
        if memory_limit is not None and needed > memory_limit:
            break
        needed += strategy.index_bytes
        if memory_limit is None or needed <= memory_limit:
            return _plan(strategy)
    raise MemoryLimitError(  # the last strategy takes least
        "The product's plan needs more memory than allowed", expected=f"at most {memory_limit} bytes",
        got=f"{needed} bytes or more for {strategy.products} products",
        remedy="Raise memory_limit, or run the chain with algorithm='linear', which multiplies no matrices",
    )  # fmt: skip
