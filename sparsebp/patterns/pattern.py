"""The sparsity pattern: where the guaranteed nonzeros of a matrix are, without their values; and its colours.

A pattern depends on the architecture and never on the input: possible zeros (a ReLU that is off) stay entries. So all
symbolic work is done once per pattern (BPPSA §3.3: "the sparsity patterns are deterministic").
"""

from __future__ import annotations

import hashlib
import zlib
from contextlib import AbstractContextManager
from operator import index
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core import backend, graphs
from sparsebp.core.check import Array, PatternKind
from sparsebp.core.errors import MemoryLimitError, PatternError, ShapeError, within_memory
from sparsebp.core.locks import cached_property

# Host arrays that kernels read: immutable, and copied to each device once.


def frozen(array: np.ndarray) -> np.ndarray:
    """Return a view that cannot be made writeable, of an array that nothing else writes to."""
    for owner in (array.base, array):  # a view can be made writeable while its base is
        if isinstance(owner, np.ndarray):
            owner.flags.writeable = False
    return array.view()


class DeviceCopies:
    """Immutable host arrays, and their copies on the devices that asked for them."""

    def __init__(self, *arrays: np.ndarray) -> None:
        self._host = arrays
        self._copies: dict[tuple[str, int], tuple[Array, ...]] = {}

    def on(self, xp: ModuleType) -> tuple[Array, ...]:
        """Return the arrays as arrays of `xp` on its current device, for use on any stream."""
        number = backend.device_number(xp)
        if number is None:
            return self._host
        key = (xp.__name__, number)
        found = self._copies.get(key)
        if found is None:  # two threads at once both get the first one's copies
            found = self._copies.setdefault(key, tuple(graphs.kept(xp, array) for array in self._host))
        return found


# Checks of canonical CSR index arrays.

_INT32_END, _INT64_END = 2**31, 2**63
_LAST = _INT64_END - 1


def index_dtype(nnz: int, shape: tuple[int, int]) -> np.dtype:
    """Return the index type of a pattern: int32 until the entries or a dimension reach 2**31, then int64."""
    return np.dtype(np.int64 if max(nnz, *shape) >= _INT32_END else np.int32)


def index_bytes(nnz: int, shape: tuple[int, int]) -> int:
    """Return the bytes of a pattern's two index arrays."""
    return (nnz + shape[0] + 1) * index_dtype(nnz, shape).itemsize


def checked_shape(shape: Any) -> tuple[int, int]:
    """Return `shape` as two Python integers."""
    try:
        rows, columns = map(index, shape)
    except (TypeError, ValueError):
        rows = columns = -1
    if not (0 <= rows < _INT64_END and 0 <= columns < _INT64_END):
        raise PatternError("The shape of a pattern is wrong", got=repr(shape),
                           expected="two integers (rows, columns), 0 or more and less than 2**63")  # fmt: skip
    return rows, columns


def checked_sizes(**sizes: Any) -> tuple[int, ...]:
    """Return sizes as Python integers."""
    try:
        found = tuple(map(index, sizes.values()))
    except TypeError:
        found = (-1,)
    if min(found) < 0:
        raise PatternError("A size is not an integer, or negative", expected="integers of 0 or more",
                           got=", ".join(f"{name}={size!r}" for name, size in sizes.items()))  # fmt: skip
    return found


def check_allocatable(nnz: int, shape: tuple[int, int]) -> None:
    """Check that this process can allocate the index arrays of a pattern with `nnz` entries."""
    need = index_bytes(nnz, shape)
    try:
        np.empty(need, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than NumPy can count
        raise MemoryLimitError(f"A pattern of shape {shape} does not fit in memory", expected="memory for its indices",
                               got=f"{need} bytes for {nnz} entries") from error  # fmt: skip


def with_room(nnz: int, rows: int, columns: int) -> tuple[tuple[int, int], np.dtype]:
    """Return shape and index type of a pattern with `nnz` entries, for which there is memory."""
    shape = checked_shape((rows, columns))
    check_allocatable(nnz, shape)
    return shape, index_dtype(nnz, shape)


def checked_arrays(indptr: Array, indices: Array, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return both arrays as host integer arrays whose rows and columns exist; order and duplicates are not checked."""
    indptr, indices = _integers("indptr", indptr), _integers("indices", indices)
    rows, columns = shape
    if len(indptr) != rows + 1:
        expected = f"{rows + 1} entries, one more than the {rows} rows"
        raise PatternError("indptr has the wrong length", expected=expected, got=len(indptr))
    if indptr[0] != 0:
        raise PatternError("indptr does not start at 0", expected="indptr[0] == 0", got=indptr[0])
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        row = int(np.argmax(falls))
        raise PatternError("indptr is not monotone", expected="every row to end where it begins or later",
                           got=f"row {row} from {indptr[row]} to {indptr[row + 1]}")  # fmt: skip
    if indptr[-1] != len(indices):
        raise PatternError(
            "indptr and indices do not belong together", expected=f"indptr[-1] == len(indices) == {len(indices)}",
            got=indptr[-1], remedy="Of a SciPy matrix A, A.prune() removes spare elements at the end",
        )  # fmt: skip
    if len(indices) and not 0 <= indices.min() <= indices.max() < columns:
        at = int(np.argmax((indices < 0) | (indices >= columns)))
        raise PatternError(
            "A column index is out of range", expected=f"0 <= index < {columns}", got=f"{indices[at]} at position {at}"
        )
    return indptr, indices


def _first_fall(indptr: np.ndarray, indices: np.ndarray) -> int | None:
    """Return the first entry whose column is not less than the next one's in its row; None if there is none."""
    bad = np.empty(len(indices) + 1, bool)
    np.less_equal(indices[1:], indices[:-1], out=bad[1:-1])
    bad[indptr] = False  # the column may fall where a new row begins
    return int(np.argmax(bad)) - 1 if bad.any() else None


def check_canonical(indptr: np.ndarray, indices: np.ndarray) -> None:
    """Check that the columns of every row are strictly increasing."""
    at = _first_fall(indptr, indices)
    if at is None:
        return
    row = int(np.searchsorted(indptr, at, side="right")) - 1
    twice = indices[at] == indices[at + 1]
    raise PatternError(f"The columns of a row are {'duplicated' if twice else 'unsorted'}",
                       expected="strictly increasing columns in every row",
                       got=f"{indices[at]}, {indices[at + 1]} in row {row}", remedy="For a SciPy matrix A call "
                       "A.sum_duplicates() first, which sorts and merges its columns and its values; "
                       "SparsityPattern.canonical(...) does so for a structure that has no values yet")  # fmt: skip


def _integers(name: str, array: Array) -> np.ndarray:
    """Return a one-dimensional host array of int32 or int64."""
    if isinstance(array, (list, tuple, range)):
        try:
            array = np.asarray(array)
        except (ValueError, OverflowError):  # lists of different lengths
            array = np.asarray(None)
        if array.size == 0 and array.dtype == np.float64:  # NumPy's dtype for an empty list
            array = array.astype(np.int32)
    else:
        backend.namespace(**{name: array})
        array = backend.to_host(array)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.max(initial=0) > _LAST):
        raise PatternError(f"{name} is not an index array",
                           expected="a one-dimensional array of integers, less than 2**63",
                           got=f"shape {array.shape} of {array.dtype}",
                           remedy="Convert it with .astype(numpy.int32)")  # fmt: skip
    return array if array.dtype in backend.INDEX_DTYPES else array.astype(np.int64)


KEPT = 64
"""Patterns that each builder caches by its arguments: an operator's pattern is made once, its values many times."""
NEIGHBOURS = 128
"""Rows sorted by length together in `SparsityPattern.fours`; a multiple of four."""
_SAMPLED = 1024
"""Number of indices of either array that enter the hash individually."""


class SparsityPattern:
    """Where the entries of a sparse matrix are: an immutable, canonical CSR structure.

    Parameters
    ----------
    indptr
        Row r holds the entries ``indptr[r] … indptr[r + 1] - 1``. Integers, shape (n_rows + 1,).
    indices
        Columns of the entries, strictly increasing within a row. Integers, shape (nnz,).
    shape
        (n_rows, n_columns).

    Attributes
    ----------
    indptr, indices
        The pattern's own copies, read-only, int32 unless `nnz` or a dimension reaches 2**31, then int64.
    shape
        (n_rows, n_columns).
    nnz
        Number of entries.

    Raises
    ------
    PatternError
        The arrays do not describe such a structure.

    Notes
    -----
    Patterns are equal when their structures are. An identity differs from a diagonal of the same size: its values are
    ones by definition, and products skip it.
    """

    indptr: np.ndarray
    indices: np.ndarray
    shape: tuple[int, int]
    nnz: int
    _identity: bool

    def __init__(self, indptr: Array, indices: Array, shape: tuple[int, int]) -> None:
        shape = checked_shape(shape)
        indptr, indices = checked_arrays(indptr, indices, shape)
        check_canonical(indptr, indices)
        self._set(indptr, indices, shape)

    def _set(
        self, indptr: np.ndarray, indices: np.ndarray, shape: tuple[int, int], identity: bool = False, copy: bool = True
    ) -> None:
        dtype = index_dtype(len(indices), shape)
        fields: dict[str, Any] = {"shape": shape, "nnz": len(indices), "_identity": identity}
        for name, array in (("indptr", indptr), ("indices", indices)):
            fields[name] = frozen(np.array(array, dtype=dtype, copy=copy or None, order="C"))
        self.__dict__.update(fields)

    @classmethod
    def _unchecked(
        cls, indptr: np.ndarray, indices: np.ndarray, shape: tuple[int, int], identity: bool = False
    ) -> SparsityPattern:
        """Make a pattern from canonical arrays that nothing else writes to, without checks."""
        pattern = cls.__new__(cls)
        pattern._set(indptr, indices, shape, identity, copy=False)
        return pattern

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"SparsityPattern is immutable; make a new pattern instead of setting {name!r}")

    # ---- other constructors ----------------------------------------------------------------------------------------

    @classmethod
    def canonical(cls, indptr: Array, indices: Array, shape: tuple[int, int]) -> SparsityPattern:
        """Make a pattern from rows whose columns may be unsorted or repeated; they are sorted and merged.

        For structures without values yet: existing values would **not** be in the order of the pattern's entries. For
        a SciPy matrix, ``A.sum_duplicates()`` sorts and merges both.

        Raises
        ------
        PatternError
            The arrays are wrong in another way.
        """
        shape = checked_shape(shape)
        indptr, indices = checked_arrays(indptr, indices, shape)
        rows = np.repeat(np.arange(shape[0]), np.diff(indptr))
        order = np.lexsort((indices, rows))
        rows, columns = rows[order], indices[order]
        keep = np.ones(len(columns), bool)
        keep[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
        counts = np.bincount(rows[keep], minlength=shape[0])
        return cls._unchecked(np.concatenate(([0], np.cumsum(counts))), columns[keep], shape)

    @classmethod
    def from_scipy(cls, matrix: Any) -> SparsityPattern:
        """Copy the structure of a `csr_array` or `csr_matrix` of SciPy or CuPy; stored zeros are entries.

        Raises
        ------
        PatternError
            The matrix is not CSR, or not canonical: ``matrix.sum_duplicates()`` sorts and merges its columns.
        """
        if getattr(matrix, "format", None) != "csr":
            raise PatternError("The matrix is not CSR", expected="csr_array or csr_matrix",
                               got=f"{type(matrix).__name__} in format {getattr(matrix, 'format', None)!r}",
                               remedy="Convert it with scipy.sparse.csr_array(...)")  # fmt: skip
        return cls(matrix.indptr, matrix.indices, matrix.shape)

    def values_of(self, matrix: Any) -> Array:
        """Return the values of a sparse matrix in the order of this pattern's entries.

        Columns in any order are sorted, duplicates are added, and entries that the matrix lacks are zeros.

        Parameters
        ----------
        matrix
            A sparse matrix of SciPy in any format, or CuPy's CSR; of the pattern's shape.

        Returns
        -------
        Array
            (nnz,), of the matrix's dtype and library. The matrix's own `data` if its entries are those of the pattern,
            in order; else a copy.

        Raises
        ------
        PatternError
            The matrix has an entry other than zero outside the pattern, or is not a sparse matrix.
        ShapeError
            It has another shape.

        Examples
        --------
        >>> import scipy.sparse as sp, sparsebp as sb
        >>> pattern = sb.SparsityPattern([0, 2, 3], [0, 1, 1], (2, 2))
        >>> pattern.values_of(sp.csc_array([[1.0, 2.0], [0.0, 3.0]]))
        array([1., 2., 3.])
        """
        if not backend.is_sparse(matrix):
            raise PatternError("The matrix is not sparse", expected="a sparse matrix of SciPy or CuPy",
                               got=type(matrix).__name__)  # fmt: skip
        if tuple(matrix.shape) != self.shape:
            raise ShapeError("The matrix does not fit the pattern", expected=self.shape, got=tuple(matrix.shape))
        xp = backend.namespace_of_sparse(matrix)
        if matrix.format == "csr" and len(matrix.indices) == len(matrix.data) == self.nnz:
            ours = self.device_arrays(xp)
            if all(map(xp.array_equal, (matrix.indptr, matrix.indices), ours)):  # synchronize!
                return xp.ascontiguousarray(matrix.data)
        indptr, columns, values = _canonical(matrix)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(indptr))
        places = places_of(self, rows, columns, values)
        found = np.zeros(self.nnz, values.dtype)
        found[places[places >= 0]] = values[places >= 0]
        return backend.as_namespace(found, xp)

    def to_scipy(self, values: np.ndarray | None = None, *, copy: bool = False) -> Any:
        """Return a `scipy.sparse.csr_array` of this structure.

        Parameters
        ----------
        values
            (nnz,) values, shared unless `copy`. None means float32 ones, which keep the whole structure in SciPy's
            products: these drop sums that are exactly zero.
        copy
            Whether the result owns its arrays, so that they may be written to, also by SciPy's methods.

        Raises
        ------
        ShapeError
            `values` does not have one value per entry.
        """
        from scipy.sparse import csr_array

        if values is None:
            values = np.ones(self.nnz, np.float32)
        if values.shape != (self.nnz,):
            raise ShapeError("values do not fit the pattern", expected=f"({self.nnz},)", got=values.shape,
                             remedy="Pass the values of one sample, data[:, sample]")  # fmt: skip
        matrix = csr_array((values, self.indices, self.indptr), shape=self.shape, copy=copy)
        matrix.has_canonical_format = True  # saves SciPy the check
        return matrix

    def to_cupyx(self, values: Array) -> Any:
        """Return a `cupyx.scipy.sparse.csr_matrix` of this structure, with copies of its index arrays.

        Parameters
        ----------
        values
            (nnz,) values of CuPy, C-contiguous; shared.
        """
        from cupyx.scipy.sparse import csr_matrix

        indptr, indices = self.device_arrays(backend.namespace(values))
        return csr_matrix((values, indices.copy(), indptr.copy()), shape=self.shape)

    @classmethod
    def dense(cls, m: int, n: int) -> SparsityPattern:
        """Make the full pattern of m rows and n columns."""
        m, n = checked_shape((m, n))
        _, dtype = with_room(m * n, m, n)
        indptr = np.arange(m + 1, dtype=np.int64) * n
        return cls._unchecked(indptr, np.tile(np.arange(n if m else 0, dtype=dtype), m), (m, n))

    @classmethod
    def diagonal(cls, n: int) -> SparsityPattern:
        """Make the pattern of an n x n diagonal matrix."""
        return cls._diagonal(n, identity=False)

    @classmethod
    def identity(cls, n: int) -> SparsityPattern:
        """Make the pattern of the n x n identity: a diagonal whose values are ones by definition."""
        return cls._diagonal(n, identity=True)

    @classmethod
    def _diagonal(cls, n: int, identity: bool) -> SparsityPattern:
        n, _ = checked_shape((n, n))
        check_allocatable(n, (n, n))
        return cls._unchecked(np.arange(n + 1), np.arange(n), (n, n), identity)

    # ---- properties ------------------------------------------------------------------------------------------------

    @property
    def sparsity(self) -> float:
        """Fraction of elements that are guaranteed zeros (BPPSA Table 1); 0 for an empty matrix."""
        size = self.shape[0] * self.shape[1]
        return 1.0 - self.nnz / size if size else 0.0

    @cached_property
    def kind(self) -> PatternKind:
        """The structure that selects the kernels.

        ``"identity"`` (made by `identity`), else ``"dense"`` (full), ``"diagonal"`` (square, the diagonal full),
        ``"selection"`` (at most one entry per row), or ``"general"``. A 1 x 1 diagonal counts as dense.
        """
        m, n = self.shape
        if self._identity:
            return "identity"
        if self.nnz == m * n:
            return "dense"
        lengths = np.diff(self.indptr)
        if lengths.max(initial=0) > 1:
            return "general"
        if m == n == self.nnz and np.array_equal(self.indices, np.arange(n)):
            return "diagonal"
        return "selection"

    @cached_property
    def row_of_entry(self) -> np.ndarray:
        """Row of every entry, shape (nnz,), the index type of the pattern."""
        return frozen(np.repeat(np.arange(self.shape[0], dtype=self.indices.dtype), np.diff(self.indptr)))

    @cached_property
    def fours(self) -> np.ndarray:
        """Rows in groups of four of similar length, for kernels that sum four at a time: (ceil(rows / 4), 12) int32.

        A group holds the length of its shortest row, where the four rows begin, their numbers, and the lengths of the
        other three, ascending. Groups are made among `NEIGHBOURS` rows, whose entries are close in memory. The last row
        repeats in an incomplete group.
        """
        lengths, rows = np.diff(self.indptr), np.arange(self.shape[0])
        order = np.lexsort((lengths, rows // NEIGHBOURS))
        order = np.concatenate((order, np.repeat(order[-1:], -len(order) % 4))).reshape(-1, 4)
        lines = (lengths[order[:, :1]], self.indptr[order], order, lengths[order[:, 1:]])
        return frozen(np.concatenate(lines, axis=1).astype(np.int32))

    # ---- transpose -------------------------------------------------------------------------------------------------

    @cached_property
    def transpose_permutation(self) -> np.ndarray:
        """Order that transposes values: ``data[p.transpose_permutation]`` belongs to ``p.T``. Shape (nnz,)."""
        from scipy.sparse import csr_array

        with self._transposing():
            numbered = csr_array((np.arange(self.nnz, dtype=self.indices.dtype), self.indices, self.indptr), self.shape)
            return frozen(numbered.tocsc().data)

    @cached_property
    def T(self) -> SparsityPattern:
        """The transposed pattern.

        Raises
        ------
        MemoryLimitError
            There is no memory for one number per row.
        """
        if self.kind in ("identity", "diagonal"):
            return self
        with self._transposing():
            counts = np.bincount(self.indices, minlength=self.shape[1])
            indptr = np.concatenate(([0], np.cumsum(counts)))
            rows = self.row_of_entry[self.transpose_permutation]
            transposed = SparsityPattern._unchecked(indptr, rows, self.shape[::-1])
        transposed.__dict__["T"] = self
        return transposed

    def _transposing(self) -> AbstractContextManager[None]:
        return within_memory(f"The transpose of a pattern of shape {self.shape} does not fit in memory",
                             "Number only the columns that have entries, or do without the transpose")  # fmt: skip

    # ---- equality and transfer -------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """Hash of the content (BLAKE2b, 32 hexadecimal digits), equal in every process and on every machine."""
        content = hashlib.blake2b(digest_size=16)
        content.update(np.array([*self.shape, self._identity], dtype="<i8").tobytes())
        for array in (self.indptr, self.indices):
            content.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).data)
        return content.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparsityPattern):
            return NotImplemented
        if self is other:
            return True
        return (
            self.shape == other.shape
            and self.nnz == other.nnz
            and self._identity == other._identity
            and np.array_equal(self.indptr, other.indptr)
            and np.array_equal(self.indices, other.indices)
        )

    def __hash__(self) -> int:
        return self._checksum

    @cached_property
    def _checksum(self) -> int:
        """Hash for dictionaries, which also compare: many times faster than `digest`."""
        # The sum of all indices, and some of them individually.
        checksum = zlib.crc32(repr((self.shape, self._identity, self.nnz)).encode())
        for array in (self.indptr, self.indices):
            some = np.ascontiguousarray(array[:: 1 + len(array) // _SAMPLED])
            checksum = zlib.crc32(some.data, zlib.crc32(_sum(array), checksum))
        return checksum

    def device_arrays(self, xp: ModuleType) -> tuple[Array, Array]:
        """Return (indptr, indices) as arrays of `xp`, copied once per device.

        Raises
        ------
        DeviceError
            `xp` is neither ``numpy`` nor ``cupy``.
        """
        indptr, indices = self._copies.on(backend.check_module(xp))
        return indptr, indices

    @cached_property
    def _copies(self) -> DeviceCopies:
        return DeviceCopies(self.indptr, self.indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return SparsityPattern._unchecked, (self.indptr, self.indices, self.shape, self._identity)

    def __repr__(self) -> str:
        m, n = self.shape
        return f"SparsityPattern({m} x {n}, nnz={self.nnz}, {self.kind})"


def _sum(array: np.ndarray) -> bytes:
    """Return the sum of an index array, two 4-byte indices at a time."""
    even = len(array) * array.itemsize // 8 * 8
    words = array.view(np.uint8)[:even].view(np.uint64)
    return np.add.reduce(words, dtype=np.uint64).tobytes()


def _canonical(matrix: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return indptr, indices and values of a sparse matrix as canonical CSR on the host, shared where they are that."""
    from scipy.sparse import csr_array

    host = csr_array(matrix if backend.namespace_of_sparse(matrix) is np else matrix.get())  # synchronize!
    end = int(host.indptr[-1])  # a matrix may have spare elements behind its last row
    values = host.data[:end]
    indptr, indices = checked_arrays(host.indptr, host.indices[:end], host.shape)
    if _first_fall(indptr, indices) is not None:
        host = csr_array((values, indices, indptr), host.shape, copy=True)  # which knows no flags of the matrix
        host.sum_duplicates()
        indptr, indices, values = host.indptr, host.indices, host.data
    return indptr, indices, values


def places_of(pattern: SparsityPattern, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the entry at each row and column, int64, -1 outside the pattern, where only zeros may be."""
    lines, width = [columns.astype(np.int64), pattern.indices.astype(np.int64)], pattern.shape[1]
    if pattern.shape[0] * width >= _INT64_END:
        occurring = np.unique(np.concatenate(lines))
        lines, width = [np.searchsorted(occurring, line) for line in lines], len(occurring)
    wanted, numbers = rows * width + lines[0], pattern.row_of_entry.astype(np.int64) * width + lines[1]
    places = np.searchsorted(numbers, wanted)
    places = np.where(np.append(numbers, -1)[places] == wanted, places, -1)
    outside = np.flatnonzero((places < 0) & (values != 0))
    if len(outside):
        at = outside[0]
        raise PatternError(
            "The matrix has an entry outside the pattern", expected=f"entries of {pattern}",
            got=f"{values[at]} in row {rows[at]}, column {columns[at]}, {len(outside)} in all",
            remedy="Plan with a pattern that has this entry",
        )  # fmt: skip
    return places


def structure_of(name: str, given: Any) -> SparsityPattern:
    """Return a pattern, or the pattern of a sparse matrix of SciPy or CuPy, whose columns may be in any order."""
    if isinstance(given, SparsityPattern):
        return given
    if not backend.is_sparse(given):
        raise PatternError(f"{name} is not a pattern", expected="a SparsityPattern or a sparse matrix",
                           got=type(given).__name__, remedy="Pass scipy.sparse.csr_array(array)")  # fmt: skip
    if len(given.shape) != 2:
        raise ShapeError(f"{name} is not a matrix", expected="two dimensions", got=tuple(given.shape))
    indptr, indices, _ = _canonical(given)
    return SparsityPattern(indptr, indices, given.shape)


def values_on(pattern: SparsityPattern, given: Any) -> Any:
    """Return the values of a sparse matrix in the order of the pattern; anything else as it is, unchecked."""
    if type(given) is np.ndarray or not backend.is_sparse(given):
        return given
    values = pattern.values_of(given)
    if pattern.kind == "identity" and not (values == 1).all():
        raise PatternError("The values of an identity are ones by definition", expected="an identity matrix",
                           got="other values", remedy="Plan with SparsityPattern.diagonal(n)")  # fmt: skip
    return values


def not_finite(pattern: SparsityPattern, values: np.ndarray, which: str = "") -> str:
    """Return the first of (nnz,) values that is NaN or infinite and its place, as words; "" if all are finite."""
    wrong = np.flatnonzero(~np.isfinite(values))
    if not len(wrong):
        return ""
    at = wrong[0]
    return f"{values[at]}{which}, first in row {pattern.row_of_entry[at]}, column {pattern.indices[at]}"


def check_patterns(**patterns: object) -> None:
    """Check that the named arguments are patterns."""
    for name, pattern in patterns.items():
        if not isinstance(pattern, SparsityPattern):
            raise PatternError(
                f"{name} is not a pattern", expected="a SparsityPattern", got=type(pattern).__name__,
                remedy="Pass jacobian.pattern, conv_pattern(...).pattern, or SparsityPattern.from_scipy(matrix)"
            )  # fmt: skip


# Colours: groups of columns of a pattern that one product with a vector of ones tells apart.
#
# If no two columns of a colour share a row, the sum of a colour's columns holds each of their entries alone (Curtis,
# Powell, Reid, 1974). A symmetric matrix needs fewer: it is enough that an entry or its mirror image is alone (Coleman,
# Moré, 1984).


LONGEST_IN_ORDER = 64
"""Entries of the longest rows that smallest-last order follows: it takes the square of them."""


def color_columns(pattern: SparsityPattern) -> np.ndarray:
    """Colour the columns of a pattern so that columns of one colour share no row.

    Greedy, in the order of the columns, and in smallest-last order (D. Matula, L. Beck, 1983) where that may take
    fewer colours: few, not always the fewest. Columns without entries have one too. Rows may be dense.

    Parameters
    ----------
    pattern
        (m, n).

    Returns
    -------
    numpy.ndarray
        The colour of each column, 0, 1, …; int64, shape (n,), read-only. Two calls return the same colours.

    Raises
    ------
    PatternError
        `pattern` is no `SparsityPattern`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsebp as sb
    >>> band = sp.diags_array([1.0, 1.0, 1.0], offsets=[-1, 0, 1], shape=(6, 6)).tocsr()
    >>> sb.patterns.color_columns(sb.SparsityPattern.from_scipy(band)).max() + 1
    np.int64(3)
    """
    check_patterns(pattern=pattern)
    from sparsebp.kernels.host.sparse import coloring

    (m, n), lengths = pattern.shape, np.diff(pattern.indptr).astype(np.int64)
    groups = np.zeros(n, np.uint64)  # by the longest rows: where they need most of the colours
    for bit, row in enumerate(np.argsort(-lengths, kind="stable")[:64].tolist()):
        if lengths[row] > LONGEST_IN_ORDER and lengths[row] ** 2 >= pattern.nnz:
            groups[pattern.indices[pattern.indptr[row] : pattern.indptr[row + 1]]] |= np.uint64(1 << bit)

    def greedy(order: np.ndarray) -> tuple[int, np.ndarray]:
        colors, order = np.full(n, -1, np.int64), order[np.argsort(~groups[order], kind="stable")]
        columns = pattern.T.indptr, pattern.T.indices.copy()
        return coloring.color_columns(m, *columns, groups, order, colors), colors

    number, colors = greedy(np.arange(n))
    if number > lengths.max(initial=1):  # which no colouring has fewer than
        short = lengths <= LONGEST_IN_ORDER
        degrees, others = (
            np.bincount(pattern.indices, weights=((lengths - 1) * rows)[pattern.row_of_entry], minlength=n)
            for rows in (short, ~short)
        )
        degrees, order = (degrees + np.minimum(others, n)).astype(np.int64), np.empty(n, np.int64)
        arrays = (pattern.indptr, pattern.indices, pattern.T.indptr, pattern.T.indices)
        coloring.smallest_last(*arrays, LONGEST_IN_ORDER, degrees, order)
        number, colors = min((number, colors), greedy(order), key=lambda found: found[0])
    return frozen(colors)


def color_symmetric(pattern: SparsityPattern) -> np.ndarray:
    """Colour the rows and columns of a symmetric pattern so that any two colours form stars.

    Then entry (i, j) is the only one of its colour in row i, or entry (j, i) is in row j: `star_sources` says which.
    Columns may be dense.

    Parameters
    ----------
    pattern
        (n, n), symmetric, with a full diagonal or without.

    Returns
    -------
    numpy.ndarray
        The colour of each column, 0, 1, …; int64, shape (n,), read-only.

    Raises
    ------
    PatternError
        `pattern` is not symmetric.
    ShapeError
        `pattern` is not square.
    """
    check_patterns(pattern=pattern)
    if pattern.shape[0] != pattern.shape[1]:
        raise ShapeError("The pattern is not square", expected="(n, n)", got=pattern.shape)
    mirror = pattern.T
    if not (np.array_equal(mirror.indptr, pattern.indptr) and np.array_equal(mirror.indices, pattern.indices)):
        raise PatternError("The pattern is not symmetric", expected="an entry (j, i) for every (i, j)",
                           got=repr(pattern))  # fmt: skip
    import scipy.sparse

    from sparsebp.kernels.host.sparse import coloring

    lengths = np.diff(pattern.indptr)
    order = np.argsort(-lengths, kind="stable")
    # One way: the longest columns get colours of their own, and those of the others share no row outside them.
    alone, rows, columns = longest_alone(lengths), pattern.row_of_entry, pattern.indices
    others = part_of(pattern, ~(alone[rows] | alone[columns])).to_scipy()
    others = others + scipy.sparse.eye_array(len(order), dtype=others.dtype)  # neighbours have different colours
    simple = color_columns(SparsityPattern.from_scipy(others)).copy()
    simple[alone] = simple[~alone].max(initial=-1) + 1 + np.arange(np.count_nonzero(alone))
    # The other: stars, if they take fewer.
    colors, steps = np.full(len(order), -1, np.int64), STEPS_OF_STARS + 64 * pattern.nnz
    most = int(simple.max(initial=0)) + 1
    found = coloring.color_stars(
        pattern.indptr, pattern.indices, pattern.transpose_permutation, order, most, steps, colors
    )
    return frozen(simple if found < 0 else colors)


STEPS_OF_STARS = 1 << 28
"""Steps of a star colouring, besides those for each entry, after which a simple one does: about a second."""


def longest_alone(lengths: np.ndarray, alone: int = 1, others: int = 1) -> np.ndarray:
    """Return which lines to take alone: each costs `alone`, all others `others` for each entry of their longest."""
    order = np.argsort(-lengths, kind="stable")
    count = np.argmin(alone * np.arange(len(order) + 1) + others * np.append(lengths[order], 0))
    found = np.zeros(len(order), bool)
    found[order[:count]] = True
    return found


def part_of(pattern: SparsityPattern, entries: np.ndarray) -> SparsityPattern:
    """Return the pattern with some of its entries alone."""
    ends = np.append(0, np.cumsum(entries))[pattern.indptr]
    return SparsityPattern(ends, pattern.indices[entries], pattern.shape)


def alone_in_line(colors: np.ndarray, line: np.ndarray, lines: int) -> np.ndarray:
    """Return which entries have a colour, and are the only ones of it in their line, a row or a column."""
    place = colors.astype(np.int64) * lines + line
    order = np.argsort(place, kind="stable")
    repeats = np.diff(place[order], prepend=-1 - lines) == 0
    found = np.empty(len(place), bool)
    found[order] = ~(repeats | np.append(repeats[1:], False)[: len(place)])
    return found & (colors >= 0)


def star_sources(pattern: SparsityPattern, colors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each entry stands in the product with the colours: rows and colours, both int64, shape (nnz,).

    An entry and its mirror image have one source, so that the matrix is symmetric to the last bit.
    """
    rows, columns = pattern.row_of_entry.astype(np.int64), pattern.indices.astype(np.int64)
    alone, mirrored = alone_in_line(colors[columns], rows, len(colors)), pattern.transpose_permutation
    lower = rows >= columns
    direct = np.where(lower, alone, ~alone[mirrored])  # of (i, j) and (j, i), i > j, both read at (i, j) if it is alone
    if not (direct & alone | ~direct & alone[mirrored]).all():
        raise PatternError("The colours do not tell the entries apart", expected="a star colouring", got=repr(pattern))
    return np.where(direct, rows, columns), colors[np.where(direct, columns, rows)]
