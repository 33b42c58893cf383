"""Sparse Jacobians and Hessians of plain functions: the pattern found and coloured once, then values by colours.

Functions of NumPy are also compiled (`sparsebp.jacobians.tape`); what follows is the way of all others.

The function is traced with index sets for its pattern (`index_sets.Sets`; PyTorch: its ATen graph; JAX: by asdex).
Columns that share no row get one colour, and the derivative along a colour's sum of unit vectors holds all their
entries (Curtis, Powell, Reid, 1974); so do rows in reverse mode, and dense rows and columns by both. Derivatives
are exact, by dual numbers or a reverse sweep; nothing is differenced.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from sparsebp.core import backend
from sparsebp.core.backend import check_plain
from sparsebp.core.check import Array, check_flag, check_integer, shown
from sparsebp.core.errors import (
    DeviceError,
    DTypeError,
    NonFiniteError,
    OptionError,
    PatternError,
    ShapeError,
    TracingError,
)
from sparsebp.jacobians.stored import Plan, read_plan, write_plan
from sparsebp.jacobians.trees import FlatFunction, flattened, joined, replaced, unflattened
from sparsebp.patterns.bicoloring import color_both, sources
from sparsebp.patterns.pattern import (
    SparsityPattern,
    check_patterns,
    color_columns,
    color_symmetric,
    frozen,
    star_sources,
)

Mode = Literal["forward", "reverse"]
COST: dict[Mode, int] = {"forward": 1, "reverse": 3}
"""Time along one direction: rows are coloured if that takes fewer colours by this factor."""
COST_OF_BOTH = 2
"""Factor of directions of both modes, for which the function runs twice."""
KEPT_SEEDS = 1 << 24
"""Bytes of seeds, one for each colour and number, up to which they are kept, and compiled code may fix them."""


def sparse_jacobian(
    f: Callable[..., Any], *args: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False,
    pattern: SparsityPattern | None = None, chunk_size: int | None = None, compiled: bool = False,
    stored: str | os.PathLike[str] | None = None,
) -> SparseJacobian:  # fmt: skip
    """Prepare the sparse Jacobian of a function: find its pattern, and colour it.

    Parameters
    ----------
    f
        A function whose argument `argnums` is x, and which returns y, in NumPy, PyTorch or JAX. Both are vectors, (n,)
        and (m,), or trees: arrays of any shape in dictionaries, lists and tuples. NumPy functions are listed in the
        reference; others, and control flow that depends on values, are refused.
    *args
        Arguments to trace f at. x is made of arrays of NumPy or JAX or of tensors, float32 or float64; of a compiled
        function of NumPy, which then runs on their device, also of CuPy. Its values do not matter: the pattern holds
        for all x, and for all values of other floats and arrays of floats. Integers, and constants inside f, are part
        of the function: the zeros of a constant array that multiplies x are zeros of the Jacobian.
    argnums
        Place of x among the arguments: 1 for the right-hand side f(t, y) of an initial value problem. Several: x is
        the tuple of these arguments.
    has_aux
        Whether f returns a pair: y, and other data.
    pattern
        The pattern, (m, n), if you know it: f is not traced with index sets then, and may branch on values. Entries
        that are missing give wrong values; ``check=True`` finds them.
    chunk_size
        Most directions that are computed together: fewer take less memory.
    compiled
        Of a function of NumPy: record it now and compile its derivatives, which takes seconds and is kept on disk, or
        raise an error that says why that is impossible. As with `jax.jit`, f has to be a function of its arguments
        alone: what it finds outside of them is a part of the record. Many changes there are noticed, not all.
    stored
        A file to read pattern and colours from, or to write them to where it has none, or those of another function: f
        is traced in any case, but only as far as it takes to tell.

    Returns
    -------
    SparseJacobian
        Call it with the arguments of f.

    Raises
    ------
    TracingError
        f does something that cannot be followed.
    OptionError, ShapeError, DTypeError
        x does not consist of such arrays, or f does not return any.
    PatternError
        `pattern` does not fit.
    OutputError
        `stored` cannot be written.
    MemoryLimitError
        An array inside f depends on too much of x.
    MissingDependencyError
        f is a function of JAX, there is no `pattern`, and asdex is not installed.

    See Also
    --------
    sparsebp.sparse_hessian : of a scalar function.
    sparsebp.torch.sparse_jacobian : of a PyTorch module, for every sample of a batch, from its layers' patterns.

    Notes
    -----
    The columns of one colour share no row, so the derivative along the sum of their unit vectors holds each of their
    entries by itself: A. Curtis, M. Powell, J. Reid, "On the Estimation of Sparse Jacobian Matrices", 1974. With fewer
    colours for the rows, the same is done with the transposed Jacobian, by reverse sweeps, and with fewer colours for
    some of both, such as dense rows and columns, by both (see `sparsebp.patterns.color_both`).

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> jac = sb.sparse_jacobian(lambda x: x[1:] ** 2 - x[:-1], np.zeros(5))
    >>> jac
    SparseJacobian(4 x 5, nnz=8, 2 colors, forward)
    >>> jac(np.arange(5.0)).toarray()[3]
    array([ 0.,  0.,  0., -1.,  8.])
    """
    return SparseJacobian(f, args, argnums, has_aux, pattern, chunk_size, compiled, stored)


def sparse_hessian(
    g: Callable[..., Any], *args: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False,
    pattern: SparsityPattern | None = None, chunk_size: int | None = None, compiled: bool = False,
    stored: str | os.PathLike[str] | None = None,
) -> SparseHessian:  # fmt: skip
    """Prepare the sparse Hessian of a scalar function: find its pattern, and colour it.

    Parameters
    ----------
    g
        As f of `sparse_jacobian`, but with an output of shape ().
    *args, argnums, has_aux
        As for `sparse_jacobian`.
    pattern
        The pattern, (n, n) and symmetric, if you know it.
    chunk_size, compiled, stored
        As for `sparse_jacobian`.

    Returns
    -------
    SparseHessian
        Call it with the arguments of g. The matrix is symmetric to the last bit.

    Raises
    ------
    TracingError, OptionError, ShapeError, DTypeError, PatternError, MemoryLimitError
        As for `sparse_jacobian`.

    Notes
    -----
    Its pattern is the Jacobian's of the gradient, a reverse sweep, which is traced like any function. A star colouring
    tells the entries apart (T. Coleman, J. Moré, 1984; see `sparsebp.patterns.color_symmetric`).

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> hess = sb.sparse_hessian(lambda x: ((x[1:] - x[:-1] ** 2) ** 2).sum(), np.zeros(5))
    >>> hess(np.ones(5)).toarray()[1]
    array([-4., 10., -4.,  0.,  0.])
    """
    return SparseHessian(g, args, argnums, has_aux, pattern, chunk_size, compiled, stored)


class SparseJacobian:
    """The sparse Jacobian of a function, at any arguments. Made by `sparse_jacobian`.

    It can be passed as `jac` to `scipy.optimize.least_squares`, and with ``argnums=1`` to `scipy.integrate.solve_ivp`.
    `scipy.optimize.root` takes dense matrices: ``jac=lambda x: jac(x).toarray()``.

    Attributes
    ----------
    pattern
        Where entries may be, a `SparsityPattern` (m, n); values come in the order of its entries.
    colors
        Number of colours: unless it is compiled, a call costs about as much as this many derivatives along one
        direction. In NumPy such a derivative takes one or two operations more for each operation of f; f's own are done
        once for many directions.
    mode
        ``"forward"``: the columns are coloured; ``"reverse"``: the rows; ``"mixed"``: some of both.
    """

    pattern: SparsityPattern
    colors: int
    mode: Literal["forward", "reverse", "mixed"]

    def __init__(self, f: Any, args: tuple[Any, ...], argnums: Any, has_aux: bool, pattern: SparsityPattern | None,
                 chunk_size: int | None, compiled: bool, stored: Any) -> None:  # fmt: skip
        if not callable(f):
            raise OptionError("f is not a function", expected="a function of arrays", got=shown(f))
        for number, arg in enumerate(args):
            check_plain(arg, f"Argument {number}")
        if not args:
            raise OptionError("There is no x to trace f at", expected="sparse_jacobian(f, x0)", got="no argument")
        several = isinstance(argnums, (list, tuple))
        places = tuple(
            check_integer("argnums", place, 0, len(args) - 1) for place in (argnums if several else [argnums])
        )
        if len(set(places)) < max(len(places), 1):
            raise OptionError("argnums does not name arguments", expected="a place, or different ones", got=argnums)
        self._chunk = None if chunk_size is None else check_integer("chunk_size", chunk_size, 1)
        self._compiled = check_flag("compiled", compiled)
        _check_leaves([args[place] for place in places])
        there = args
        on_device = any(map(backend.is_on_device, (*args, *flattened([args[place] for place in places])[0])))
        if on_device:
            args = replaced(backend.from_device(args), places, (_from_device(args[place]) for place in places))
        self._flat = FlatFunction(f, places, args, check_flag("has_aux", has_aux), self._scalar)
        self._count, args = len(args), self._flat.flat(args)
        self._argnum = self._flat.argnum
        x = args[self._argnum]
        self._function: Differentiable = _kind_of(x)(self._flat, self._argnum, self._scalar)
        self._size = len(_checked(x))
        given = pattern is not None
        self._constants: list[Any] | None = None  # what pattern and program hold for; None: for everything
        if pattern is None or self._function.compiled:
            self._constants = [None if self._function.varies(i, arg) else _kept(arg) for i, arg in enumerate(args)]
        plan, digest = None, ""
        if pattern is None:
            self._function.compare(args)
            if stored is not None:
                digest = f"{type(self).__name__} {self._function.digest(args)}"
                plan = read_plan(stored, digest)
            pattern = self._function.pattern(args) if plan is None else plan.pattern
        elif stored is not None:
            raise OptionError("A pattern is given, and a stored one asked for", expected="pattern= or stored=",
                              got="both")  # fmt: skip
        else:
            check_patterns(pattern=pattern)
            if pattern.shape[1] != self._size:
                raise PatternError("pattern does not fit x", expected=f"{self._size} columns", got=pattern.shape)
        self._compared = False
        self.pattern = pattern
        if plan is None:
            plan = Plan(pattern, *self._colored(args))
            if stored is not None:
                write_plan(stored, digest, plan)
        self._sweeps = self._sweeps_of(plan.rows, plan.columns)
        self.colors = sum(sweeps.count for sweeps in self._sweeps)
        self.mode = self._sweeps[0].mode if len(self._sweeps) == 1 else "mixed"
        self._tape, self._interpreted = self._taped(self._checked_args(there) if on_device else args, given)
        self._places: np.ndarray | None = None  # of all entries, where one program gives them and nothing is constant
        one = len(self._sweeps) == 1 and 0 < self._sweeps[0].count <= self._step
        if one and self._function.compiled and self._flat.plain and not any(self._constants or ()):
            ((_, _, self._places, _),) = self._sweeps[0].blocks()

    def _taped(self, args: tuple[Any, ...], given: bool) -> tuple[Any, str]:
        """Return derivatives by a compiled tape, or None and why there are none."""
        if not self._compiled:
            return None, "compiled=False"
        if not self.pattern.nnz:
            return None, "it has no entries"
        tape = self._function.tape(self.pattern)
        if tape is None or given:
            why = "its pattern was given, so it may branch on values" if tape is not None else "it is not one of NumPy"
            raise OptionError("The function cannot be compiled", expected="a function of NumPy, traced", got=why)
        tape.plan(args)
        kind, dtype = np.generic if self._scalar else np.ndarray, args[self._argnum].dtype
        self._by_loops = (
            not self._flat.has_aux
            and tape.gives_values(args)
            and all(
                isinstance(leaf, kind) and leaf.dtype == dtype for leaf in flattened(self._function.outcome(args))[0]
            )
        )
        return tape, ""

    def describe(self) -> str:
        """Say whether values come from compiled code or from the interpreter, and why.

        Returns
        -------
        str
            One line.
        """
        return f"{self!r}: {self._tape.describe() if self._tape is not None else 'interpreted: ' + self._interpreted}"

    _scalar = False
    _by_loops = False
    """Whether f's values, too, come from the tape."""

    def _colored(self, args: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return colours of rows and columns along which directions take the least time: of one mode, or of both."""
        pattern, (m, n) = self.pattern, self.pattern.shape
        missing: Any = functools.cache(lambda mode: self._function.missing(mode, args, m))
        along: dict[Mode, SparsityPattern] = {"forward": pattern, "reverse": pattern.T}
        least = {mode: COST[mode] * int(np.diff(one.indptr).max(initial=1)) for mode, one in along.items()}
        best, found = math.inf, None
        for mode in sorted(along, key=lambda mode: least[mode]):
            if least[mode] < best and not missing(mode):
                colors = color_columns(along[mode])
                if COST[mode] * _number(colors) < best:
                    best = COST[mode] * _number(colors)
                    found = (np.full(m, -1), colors) if mode == "forward" else (colors, np.full(n, -1))
        if found is None:
            raise missing("forward")
        if best > COST_OF_BOTH * sum(COST.values()) and not any(map(missing, COST)):
            both = color_both(pattern, row_cost=COST["reverse"], column_cost=COST["forward"])
            rows, columns = map(_number, both)
            if rows and columns and COST_OF_BOTH * (COST["reverse"] * rows + COST["forward"] * columns) < best and (
                    rows + columns <= sum(map(_number, found))):  # fmt: skip
                found = both
        return found

    def _sweeps_of(self, rows: np.ndarray, columns: np.ndarray) -> list[Sweeps]:
        """Return directions along colours of rows and of columns."""
        pattern, i, j = self.pattern, self.pattern.row_of_entry.astype(np.int64), self.pattern.indices.astype(np.int64)
        by_column = sources(pattern, rows, columns) if (rows >= 0).any() else np.ones(pattern.nnz, bool)
        ways: list[tuple[Mode, Any, Any, Any, Any]]
        ways = [("forward", columns, j, i, by_column), ("reverse", rows, i, j, ~by_column)]
        found = []
        for mode, colors, along, across, mine in ways:
            if _number(colors) or (mode == "forward" and not (rows >= 0).any()):
                width, entries = pattern.shape[mode == "reverse"], np.flatnonzero(mine)
                seen = colors[along] >= 0
                reached = None if (seen == mine).all() else np.unique((colors[along] * width + across)[seen])
                places = colors[along[mine]] * width + across[mine]
                found.append(Sweeps(mode, colors, entries, places, reached, width, self._step))
        return found

    @property
    def _step(self) -> int:
        """How many directions are computed together."""
        fit = max(1, self._function.block_bytes // (8 * max(1, *self.pattern.shape)))
        return fit if self._chunk is None else min(fit, self._chunk)

    def values(self, *args: Any) -> Array:
        """Return the values at these arguments, in the order of the pattern's entries.

        Parameters
        ----------
        *args
            The arguments of f. x has the length of the first one; its values and dtype may differ.

        Returns
        -------
        Array
            Shape (nnz,), of the dtype of f's result; a tensor or an array of JAX or CuPy, where x is, if x is one. Also
            within `jax.jit`, `vmap` and `grad`; nothing can be raised there, so values are NaN in place of the error.

        Raises
        ------
        PatternError
            A derivative outside the pattern is not zero.
        ShapeError, DTypeError
            x, or the output of f, is not what it was.
        """
        found = None if self._places is None else self._function.direct(args, self._places, self._count, self._size)
        return self._at(self._checked_args(args)) if found is None else found

    def batch(self, *args: Any) -> Array:
        """Return the values for a batch of x.

        Parameters
        ----------
        *args
            The arguments of f, with x of shape (n, B), the batch last, or trees of such arrays. The others are shared.

        Returns
        -------
        Array
            Shape (nnz, B).
        """
        args = self._checked_args(args, batch=True)
        xs = args[self._argnum]
        if getattr(xs, "ndim", 0) != 2:
            raise ShapeError("x is not a batch", expected=f"({self._size}, B)", got=np.shape(xs))
        if not xs.shape[1]:
            return self._function.stacked([], (self.pattern.nnz, 0), xs)
        first = replaced(args, [self._argnum], [xs[:, 0]])

        def at(x: Any) -> Array:
            return self._at(replaced(args, [self._argnum], [x]))

        if self._tape is not None and xs.shape[1] > 2 and self._has_constants(args):
            self._prepare(first)
            found = self._tape.batch(first, xs, lambda: self._at(first))
            if found is not None:
                for sample in np.flatnonzero(np.isnan(backend.to_host(found[0]))).tolist():
                    found[:, sample] = at(xs[:, sample])
                return found
        values, rest = self._at(first), xs.T[1:]  # checks, and compiles
        if self._tape is None and len(rest):
            mapped = self._function.batch(self._swept, args, xs)
            if mapped is not None:
                return mapped
        return self._function.stacked(itertools.chain([values], map(at, rest)), (self.pattern.nnz, xs.shape[1]), xs)

    def value(self, *args: Any) -> Any:
        """Return what f returns, without the other data of ``has_aux=True``.

        Parameters
        ----------
        *args
            The arguments of f.

        Returns
        -------
        Array, or a tree of them
            Of compiled functions, by their loops where these take less time than NumPy's, and round differently.
        """
        value = self._value(self._checked_args(args))
        return value[0] if self._flat.has_aux else value

    def _value(self, args: tuple[Any, ...]) -> Any:
        """Return what f returns, with other data."""
        found: list[Any] = []

        def called(here: tuple[Any, ...]) -> np.ndarray:
            y = self._function.outcome(here)
            if here is args:  # rather than copies of arrays on a device
                found.append(y)
            return np.reshape(joined(flattened(y)[0]), -1)

        if not self._by_loops:
            return self._function.outcome(args)
        flat = self._by_tape("value", args, (), called)
        return found[0] if found else flat[0] if self._scalar else self._flat.y.tree(flat)

    def jvp(self, v: Any, *args: Any) -> Any:
        """Return the product with a vector, J v, without the matrix: one derivative along v.

        Parameters
        ----------
        v
            Of the shapes of x.
        *args
            The arguments of f.

        Returns
        -------
        Array, or a tree of them
            Of the shapes of y.
        """
        args = self._checked_args(args)
        return self._flat.rows.tree(self._product("forward", args, self._flat.x.vector("v", v)))

    def vjp(self, w: Any, *args: Any) -> Any:
        """Return the product with a vector from the left, wᵀJ, without the matrix: one reverse sweep.

        Parameters
        ----------
        w
            Of the shapes of y.
        *args
            The arguments of f.

        Returns
        -------
        Array, or a tree of them
            Of the shapes of x.
        """
        args = self._checked_args(args)
        return self._flat.x.tree(self._product("reverse", args, self._flat.rows.vector("w", w)))

    def _product(self, mode: Mode, args: tuple[Any, ...], v: Any) -> Any:
        along = self._function.forward if mode == "forward" else self._function.reverse
        return self._by_tape("jvp" if mode == "forward" else "vjp", args, (v,), lambda args, v: along(args, v[None])[0])

    def value_and_jacobian(self, *args: Any) -> tuple[Any, Any]:
        """Return what f returns, with the other data of ``has_aux=True``, and the Jacobian.

        Parameters
        ----------
        *args
            The arguments of f.

        Returns
        -------
        value : Any
            As f returns it.
        matrix : scipy.sparse.csr_array
            Shape (m, n).
        """
        args = self._checked_args(args)
        matrix = self._matrix(args)
        return self._value(args), matrix

    def blocks(self, matrix: Any) -> Any:
        """Split a matrix by the arrays of y and x.

        Parameters
        ----------
        matrix
            What a call returned, (m, n).

        Returns
        -------
        tree of scipy.sparse.csr_array
            In place of each array of y the tree of x, with the block of rows of the one and columns of the other.
        """
        return self._flat.rows.blocks(matrix, self._flat.x)

    def __call__(self, *args: Any, check: bool = False) -> Any:
        """Return the Jacobian at these arguments.

        Parameters
        ----------
        *args
            The arguments of f.
        check
            Compare with the derivative along a random direction, and raise a `PatternError` if an entry is missing, a
            `NonFiniteError` if an entry is NaN where the function is finite.

        Returns
        -------
        scipy.sparse.csr_array, or cupyx.scipy.sparse.csr_matrix for x of CuPy
            Shape (m, n), with every entry of the pattern, even if it is 0. Rows are the elements of y, columns those of
            x: one array of a tree behind the other, by the sorted keys of dictionaries, each in C order. With
            ``has_aux=True``, the pair of this and the other data.
        """
        if check_flag("check", check):
            self._compared = False
        args = self._checked_args(args)
        matrix = self._matrix(args)
        if check:
            self._check(matrix.get() if backend.is_on_device(matrix.data) else matrix, backend.from_device(args))
        return (matrix, self._value(args)[1]) if self._flat.has_aux else matrix

    def _matrix(self, args: tuple[Any, ...]) -> Any:
        values = self._at(args)
        if backend.is_on_device(values):
            return self.pattern.to_cupyx(values)
        return self.pattern.to_scipy(self._function.to_numpy(values), copy=True)

    def _checked_args(self, args: tuple[Any, ...], batch: bool = False) -> tuple[Any, ...]:
        """Check the arguments of f, and return those of the flat function."""
        if len(args) != self._count:
            raise OptionError("The function takes other arguments", expected=f"{self._count}", got=len(args))
        for number, arg in enumerate(args):
            check_plain(arg, f"Argument {number}")
        args = self._flat.flat(args, batch)
        x = args[self._argnum]
        if not isinstance(x, np.ndarray) and _kind_of(x) is not type(self._function):
            raise DTypeError("x is of another library than before", expected="an array as x0, or of NumPy",
                             got=type(x).__name__, remedy="Prepare another Jacobian with such an x0, or pass "
                             "numpy.asarray(x), of a tensor x.detach().numpy()")  # fmt: skip
        if any(map(backend.is_on_device, args)):
            args = self._on_one_device(args)
        for number, kept in enumerate(self._constants or ()):
            if kept is not None and not _unchanged(kept, args[number], exact=self._function.compiled):
                raise OptionError(f"Argument {number}, a constant of the pattern, has changed",
                                  expected=shown(kept[1]), got=shown(args[number]),
                                  remedy="Prepare the Jacobian again, or pass pattern=")  # fmt: skip
        return args

    def _on_one_device(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Check that x and other floats are on one device, and return them with all other arrays on the host."""
        if not self._compiled:
            raise DeviceError("x is on a device, and the function is not compiled", expected="compiled=True",
                              got="compiled=False", remedy="Prepare it with compiled=True, or pass NumPy arrays"
                              )  # fmt: skip
        floats = [self._function.varies(place, arg) for place, arg in enumerate(args)]
        arrays = [arg for arg, varies in zip(args, floats, strict=True) if varies and np.ndim(arg)]
        number = backend.device_number(backend.namespace(*arrays))
        for array in arrays:
            if array.data.device_id != number:
                raise DeviceError("An array is not on the current device", expected=f"device {number}",
                                  got=f"device {array.data.device_id}")  # fmt: skip
        here = backend.from_device(tuple(None if varies else arg for arg, varies in zip(args, floats, strict=True)))
        return tuple(arg if varies else own for arg, own, varies in zip(args, here, floats, strict=True))

    def _at(self, args: tuple[Any, ...]) -> Array:
        return self._by_tape("values", args, (), self._swept)

    def _by_tape(self, kind: Any, args: tuple[Any, ...], vectors: tuple[Any, ...], others: Callable[..., Any]) -> Any:
        """Return what the tape gives, or `others`, with which its first results of each kind are compared."""
        self._prepare(args)
        if any(map(backend.is_on_device, (args[self._argnum], *vectors))):
            backend.namespace(args[self._argnum], *vectors)
        if self._tape is None or not self._has_constants(args):
            return self._interpret(others, args, vectors)
        values, trusted = self._tape.run(kind, args, *vectors)
        if values is not None and trusted:
            return values
        expected = self._interpret(others, args, vectors)
        if values is not None:
            self._tape.compare(kind, args, values, expected)
        return expected

    def _interpret(self, others: Callable[..., Any], args: tuple[Any, ...], vectors: tuple[Any, ...]) -> Any:
        """Return a function of the arguments and vectors; of arrays on a device, by copies on the host."""
        x = args[self._argnum]
        if not backend.is_on_device(x):
            return others(args, *vectors)
        found = others(backend.from_device(args), *backend.from_device(vectors))
        return backend.as_namespace(found, backend.namespace(x))

    def _prepare(self, args: tuple[Any, ...]) -> None:
        """Check x, and compare the function with its trace, unless that was done."""
        x = _checked(args[self._argnum])
        if len(x) != self._size:
            raise ShapeError("x has another length than before", expected=f"({self._size},)", got=tuple(x.shape))
        if not self._compared:
            self._function.compare(args)
            self._compared = True

    def _has_constants(self, args: tuple[Any, ...]) -> bool:
        """Return whether constants among the arguments are those of the tape, also the values of sparse matrices."""
        return all(kept is None or _unchanged(kept, arg, exact=True)
                   for kept, arg in zip(self._constants or (), args, strict=False))  # fmt: skip

    def _swept(self, args: tuple[Any, ...]) -> Array:
        """Return the values by directions, one for each colour."""
        parts, entries = [], []
        for sweeps in self._sweeps:
            for seeds, whose, *where in sweeps.blocks():
                values, others = self._function.entries(sweeps.mode, args, seeds, sweeps.width, *where)
                if others is not None:
                    place, value = others
                    which = "row" if sweeps.mode == "forward" else "column"
                    raise PatternError(
                        f"A derivative outside the pattern is not zero, in {which} {place % sweeps.width}",
                        expected="0", got=value, remedy="Does f use constants that have changed? Prepare it again",
                    )  # fmt: skip
                parts.append(values)
                entries.append(whose)
        return self._function.joined(parts, entries, args[self._argnum])

    def _check(self, matrix: Any, args: tuple[Any, ...]) -> None:
        rng, f = np.random.default_rng(0), self._function
        which, matrix_by_line = "Row", matrix
        if self.mode == "reverse" and f.missing("forward", args, matrix.shape[0]):
            which, matrix_by_line = "Column", matrix.T.tocsr()
        v = rng.standard_normal(matrix_by_line.shape[1]).astype(matrix.dtype)
        along = f.forward if which == "Row" else f.reverse
        found, expected = matrix_by_line @ v, f.to_numpy(along(args, v[None]))[0]
        least = max(1e-6, np.sqrt(np.finfo(matrix.dtype).eps))  # f may compute in float32 inside
        sizes = abs(matrix_by_line) @ abs(v) + abs(expected)
        noise = 1e3 * np.finfo(matrix.dtype).eps * np.max(sizes, initial=0, where=np.isfinite(sizes))
        room = least * sizes + noise  # where larger derivatives cancel, rounding errors of theirs are left
        with np.errstate(invalid="ignore"):  # infinite entries leave nothing to compare
            wrong = abs(found - expected) > room
        if wrong.any():
            line = int(np.argmax(wrong))
            raise PatternError(f"{which} {line} of the pattern misses an entry", expected=f"{expected[line]}",
                               got=f"{found[line]} along a random direction")  # fmt: skip
        unknown = np.flatnonzero(np.isnan(matrix.data))
        if len(unknown):
            rows, columns = self.pattern.row_of_entry[unknown], self.pattern.indices[unknown]
            finite = np.flatnonzero(np.isfinite(np.broadcast_to(self._function.value(args), matrix.shape[0])[rows]))
            if len(finite):
                raise NonFiniteError(
                    f"The derivative in row {rows[finite[0]]}, column {columns[finite[0]]} is NaN, and the function is "
                    "finite there", expected="a number", got=f"{len(finite)} such entries",
                    remedy="x is where a function has no derivative, as arctan2 at (0, 0), or f multiplies 0 by "
                    "infinity there; move x, or replace the argument of that function by numpy.where",
                )  # fmt: skip

    def __repr__(self) -> str:
        m, n = self.pattern.shape
        return f"{type(self).__name__}({m} x {n}, nnz={self.pattern.nnz}, {self.colors} colors, {self.mode})"


class SparseHessian(SparseJacobian):
    """The sparse Hessian of a scalar function, at any arguments. Made by `sparse_hessian`.

    It is called like a `SparseJacobian`, and can be passed as `hess` to `scipy.optimize.minimize` with the method
    trust-constr. The methods Newton-CG, trust-ncg and trust-krylov take its product with a vector,
    ``hessp=lambda x, p: hess(x) @ p``; dogleg and trust-exact take dense matrices,
    ``hess=lambda x: hess(x).toarray()``.

    Attributes
    ----------
    pattern, colors
        As of `SparseJacobian`; the pattern is symmetric.
    mode
        ``"forward"``: along each colour, the derivative of the gradient. ``"reverse"`` if the function has no other.
    """

    _scalar = True

    def hvp(self, v: Any, *args: Any) -> Any:
        """Return the product with a vector, H v, without the matrix: one derivative of the gradient, along v.

        Parameters
        ----------
        v
            Of the shapes of x.
        *args
            The arguments of g.

        Returns
        -------
        Array, or a tree of them
            Of the shapes of x.
        """
        return self.jvp(v, *args)

    def value_and_hessian(self, *args: Any) -> tuple[Any, Any]:
        """Return what g returns, with the other data of ``has_aux=True``, and the Hessian.

        Parameters
        ----------
        *args
            The arguments of g.

        Returns
        -------
        value : Any
            As g returns it.
        matrix : scipy.sparse.csr_array
            Shape (n, n).
        """
        return self.value_and_jacobian(*args)

    def gradient(self, *args: Any) -> Any:
        """Return the gradient, by one reverse sweep.

        Parameters
        ----------
        *args
            The arguments of g.

        Returns
        -------
        Array, or a tree of them
            Of the shapes of x.
        """
        args = self._checked_args(args)
        one = _one(args[self._argnum]) if self._tape is not None else None
        return self._flat.x.tree(self._by_tape("vjp", args, (one,), lambda args, _: self._function.gradient(args)))

    def _product(self, mode: Mode, args: tuple[Any, ...], v: Any) -> Any:
        along = self._function.reverse if self.mode == "reverse" else self._function.forward
        one = _one(v) if self._tape is not None else None
        return self._by_tape("hvp", args, (v, one), lambda args, v, _: along(args, v[None])[0])

    def _colored(self, args: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Colour stars; products with the matrix and with its transpose are the same."""
        missing = self._function.missing("forward", args, self._size)
        if missing and self._function.missing("reverse", args, self._size):
            raise missing
        colors, none = color_symmetric(self.pattern), np.full(self._size, -1)
        return (colors, none) if missing else (none, colors)

    def _sweeps_of(self, rows: np.ndarray, columns: np.ndarray) -> list[Sweeps]:
        pattern, colors = self.pattern, np.maximum(rows, columns)
        mode: Mode = "reverse" if _number(rows) else "forward"
        rows, color = star_sources(pattern, colors)
        reached = np.sort(colors[pattern.indices] * self._size + pattern.row_of_entry)
        reached = reached[np.diff(reached, prepend=-1) > 0]
        entries = np.arange(pattern.nnz)
        return [Sweeps(mode, colors, entries, color * self._size + rows, reached, self._size, self._step)]


class Sweeps:
    """Directions, one for each colour, and where the entries that they hold stand among the derivatives along them.

    Parameters
    ----------
    mode
        Of the directions.
    colors
        The direction of each column, or row: -1 for none.
    entries, places
        Entries of the pattern, and the place of each among the derivatives, (directions, width).
    reached
        All places that may not be zero, if others are among them; each once.
    width, step
        Derivatives along a direction; directions that are computed together.
    """

    def __init__(self, mode: Mode, colors: np.ndarray, entries: np.ndarray, places: np.ndarray,
                 reached: np.ndarray | None, width: int, step: int) -> None:  # fmt: skip
        self.mode, self.width, self.count = mode, width, _number(colors)
        self._colors, self._step = colors, step

        blocks = max(1, -(-self.count // step))

        def by_block(places: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
            if blocks == 1:
                return [np.arange(len(places))], [places]
            block = (places // (step * max(width, 1))).astype(np.min_scalar_type(blocks))  # small ones sort faster
            order = np.argsort(block, kind="stable")  # in the order of entries within a block
            whose = np.split(order, np.cumsum(np.bincount(block, minlength=blocks))[:-1])
            return whose, [places[mine] % (step * max(width, 1)) for mine in whose]

        self._seeds: list[np.ndarray] | None = None
        if self.count * len(colors) <= KEPT_SEEDS:
            self._seeds = [frozen(self._seeds_from(first)) for first in range(0, self.count, step)]
        whose, self._places = by_block(places)
        self._entries = [entries[mine] for mine in whose]
        self._reached = self._places if reached is None else by_block(reached)[1]

    def _seeds_from(self, first: int) -> np.ndarray:
        """Return the directions of a block of colours, beginning with this one."""
        found: np.ndarray = self._colors == np.arange(first, min(first + self._step, self.count))[:, None]
        return found

    def blocks(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield seeds, the entries that they hold, their places, and all that is reached, block by block."""
        for number, first in enumerate(range(0, self.count, self._step)):
            seeds = self._seeds[number] if self._seeds is not None else self._seeds_from(first)
            yield seeds, self._entries[number], self._places[number], self._reached[number]


def _kept(arg: Any) -> tuple[Any, Any]:
    """Return an argument, and a copy to compare later ones with."""
    with contextlib.suppress(Exception):  # not everything can be copied
        return arg, copy.deepcopy(arg)
    return arg, arg


def _unchanged(kept: tuple[Any, Any], arg: Any, *, exact: bool) -> bool:
    """Return whether an argument is as it was; of a kind that cannot be compared, whether it is the same object.

    Unless `exact`, entries alone count of a sparse matrix, not their values.
    """
    first, before = kept
    if type(arg) is not type(before):
        return False
    same = functools.partial(_unchanged, exact=exact)
    try:
        if hasattr(arg, "indptr"):
            names = ("indptr", "indices", "data") if exact else ("indptr", "indices")
            return arg.shape == before.shape and all(
                np.array_equal(getattr(arg, name), getattr(before, name)) for name in names
            )
        if isinstance(arg, dict):
            return arg.keys() == before.keys() and all(same((first[key], before[key]), arg[key]) for key in arg)
        if isinstance(arg, (list, tuple)):
            return len(arg) == len(before) and all(map(same, zip(first, before, strict=True), arg))
        if hasattr(arg, "shape"):
            if arg.shape != before.shape or arg.dtype != before.dtype:
                return False
            missing = (arg != arg) & (before != before)  # NaN # noqa: PLR0124
            return bool(((arg == before) | missing).all())
        if type(arg).__eq__ is not object.__eq__:
            return bool(arg == before)
        return arg is first and same((vars(first), vars(before)), vars(arg))
    except Exception:  # whatever a comparison of these objects raises
        return arg is first


def _from_device(tree: Any) -> Any:
    """Return a tree with copies on the host in place of CuPy's arrays."""
    leaves, structure = flattened(tree)
    return unflattened(structure, iter(backend.from_device(tuple(leaves))))


def _one(like: Any) -> Array:
    """Return a vector of one 1, of the dtype of an array and where it is."""
    xp = backend.namespace(like) if backend.is_on_device(like) else np
    return xp.ones(1, getattr(like, "dtype", None))


def _number(colors: np.ndarray) -> int:
    return int(colors.max(initial=-1)) + 1


_FLOATS = frozenset(map(np.dtype, ("float32", "float64")))


def _check_leaves(tree: Any) -> None:
    """Check that a tree consists of arrays of floats, of one dtype."""
    leaves = flattened(tree)[0]
    if not leaves:
        raise ShapeError("x has no arrays", expected="a vector, or a tree of arrays", got=shown(tree))
    dtypes = {str(getattr(leaf, "dtype", type(leaf).__name__)).removeprefix("torch.") for leaf in leaves}
    if len(dtypes) > 1:
        raise DTypeError("The arrays of x have different dtypes", expected="one", got=", ".join(sorted(dtypes)))
    for leaf in leaves:
        _checked(leaf, dimensions=False)


def _checked(x: Any, dimensions: bool = True) -> Any:
    """Check that x is a vector of floats."""
    if getattr(x, "dtype", None) in _FLOATS and x.ndim == 1:  # the names of dtypes take a few microseconds
        return x
    dtype = str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
    if not hasattr(x, "shape") or dtype not in ("float32", "float64"):
        raise DTypeError("x is not an array of floats", expected="an array of NumPy or JAX or a tensor, float32 or "
                         "float64", got=dtype, remedy="Pass numpy.asarray(x, float)")  # fmt: skip
    if dimensions and x.ndim != 1:
        raise ShapeError("x is not a vector", expected="(n,)", got=tuple(x.shape),
                         remedy="Pass x.ravel(), and reshape inside the function")  # fmt: skip
    return x


class Differentiable(Protocol):
    """A function of one array library, of which derivatives are known."""

    block_bytes: int
    """Bytes of one block of directions, n or m numbers each, that are computed together."""
    compiled: bool
    """Whether arguments that do not vary are compiled into it."""

    def pattern(self, args: tuple[Any, ...]) -> SparsityPattern:
        """Find the pattern."""

    def digest(self, args: tuple[Any, ...]) -> str:
        """Return what tells whether a pattern is this function's."""

    def varies(self, place: int, arg: Any) -> bool:
        """Return whether the pattern holds for other values of this argument."""

    def compare(self, args: tuple[Any, ...]) -> None:
        """Raise if the function, when it is traced, is another one."""

    def tape(self, pattern: SparsityPattern) -> Any:
        """Return derivatives by a compiled tape, not planned yet, or None."""

    def value(self, args: tuple[Any, ...]) -> np.ndarray:
        """Return what f returns, not its gradient."""

    def missing(self, mode: Mode, args: tuple[Any, ...], length: int) -> TracingError | None:
        """Return why derivatives of this mode do not exist, if so; the function returns so many numbers."""

    def forward(self, args: tuple[Any, ...], seeds: np.ndarray) -> Any:
        """Return derivatives along directions (p, n), of 0 and 1 or floats: shape (p, m)."""

    def reverse(self, args: tuple[Any, ...], seeds: np.ndarray) -> Any:
        """Return products of vectors (p, m) with the Jacobian: shape (p, n)."""

    def entries(
        self, mode: Literal["forward", "reverse"], args: tuple[Any, ...], seeds: np.ndarray, width: int,
        places: np.ndarray, reached: np.ndarray,
    ) -> tuple[Any, tuple[int, float] | None]:  # fmt: skip
        """Return elements of the derivatives, (p, width), and one not `reached` that is not zero: its place, value."""

    def direct(self, args: tuple[Any, ...], places: np.ndarray, count: int, size: int) -> Any:
        """Return all values by one program, if there is one for these `places`; None for unusual arguments."""

    def joined(self, parts: list[Any], entries: list[np.ndarray], x: Any) -> Any:
        """Return the values of all blocks; `entries`: whose values each block has."""

    def outcome(self, args: tuple[Any, ...]) -> Any:
        """Return what f returns, with other data."""

    def gradient(self, args: tuple[Any, ...]) -> Any:
        """Return the gradient of a scalar function."""

    def batch(self, values: Callable[[tuple[Any, ...]], Any], args: tuple[Any, ...], xs: Any) -> Any:
        """Return the values at the columns of xs by one mapped call of a function of the arguments, or None."""

    def stacked(self, samples: Iterable[Any], shape: tuple[int, int], like: Any) -> Any:
        """Return samples as columns."""

    def to_numpy(self, values: Any) -> np.ndarray:
        """Return a host array."""


def _kind_of(x: Any) -> Callable[[Any, int, bool], Differentiable]:
    """Return the class of functions of such arrays."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(x, torch.Tensor):
        from sparsebp.jacobians.torch_functions import TorchFunction

        return TorchFunction
    if jax is not None and isinstance(x, jax.Array):
        from sparsebp.jacobians.jax_functions import JaxFunction

        return JaxFunction
    if not isinstance(x, np.ndarray) and not backend.is_on_device(x):
        raise DTypeError("x is not an array of floats", expected="an array of NumPy, CuPy or JAX or a tensor, float32 "
                         "or float64", got=type(x).__name__)  # fmt: skip
    from sparsebp.jacobians.numpy_functions import NumpyFunction

    return NumpyFunction
