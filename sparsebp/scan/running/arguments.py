"""Checks of what a planned scan is called with, and the one shape that the runners work on: vectors (n, B)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend, kernels
from sparsebp.core.arguments import check_sequence
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.planning.planned import PlannedScan


class Arguments(NamedTuple):
    """Checked arguments of one call.

    Attributes
    ----------
    xp
        The module that all arrays belong to.
    g
        (n_out, B).
    data
        A list with one array a Jacobian, (nnz,) or (nnz, B); or, stacked, one array (n, nnz, B) or (n, nnz, 1).
    injections
        None, or a list with None or (rows, B) a Jacobian; stacked, None or one array (n, rows, B).
    stacked
        Whether data came as one array.
    batched
        Whether results keep their batch axis.
    shared
        Of each Jacobian, whether the batch shares its values: a byte that is 1 or 0.
    found
        On the host, where g, data and injections lie, if that is known: addresses, 0 for an injection that is None.
    """

    xp: ModuleType
    g: Array
    data: Any
    injections: Any
    stacked: bool
    batched: bool
    shared: bytes
    found: Array | None = None

    @property
    def arrays(self) -> list[Array]:
        """Values of every Jacobian, (nnz,) or (nnz, B) each."""
        if self.stacked:
            return [d[:, 0] if self.data.shape[2] == 1 else d for d in self.data]
        return list(self.data)

    @property
    def places(self) -> Array:
        """What `found` says, of arrays on the host."""
        if self.found is not None:
            return self.found
        injections = () if self.injections is None else self.injections
        arrays = (self.g, *self.arrays, *injections)
        return np.array([0 if array is None else array.ctypes.data for array in arrays], np.int64)


def check_arguments(
    plan: PlannedScan, g: Array, data: Sequence[Array] | Array, injections: Sequence[Array | None] | Array | None
) -> Arguments:
    """Check the arguments of ``plan(g, data, injections)`` against the plan and against each other.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, DeviceError
        See the message.
    """
    at_once = _checked_at_once(plan, g, data, injections)
    if at_once is not None:
        return at_once
    patterns = plan.patterns
    stacked = hasattr(data, "ndim")
    parts: list[Any] = [data] if stacked else _listed("data", data, "arrays")
    added = {"injections": injections}
    if injections is not None and not getattr(injections, "ndim", 0):
        injections = _listed("injections", injections, "arrays or None")
        added = {f"injections[{i}]": injection for i, injection in enumerate(injections)}
    named = {f"data[{i}]": part for i, part in enumerate(parts)}
    xp = backend.namespace(g=g, **named, **backend.given(**added))
    dtype = backend.float_dtype(g.dtype)
    if g.ndim not in (1, 2):
        raise ShapeError("g has the wrong shape", expected="(n,) or (n, B)", got=g.shape, remedy="Put the batch last")
    batch = g.shape[1:]  # () without one
    backend.check_array("g", g, dtype=dtype, shape=(patterns[0].shape[1], *batch))
    if batch == (0,):
        raise ShapeError("The batch is empty", expected="at least one sample", got=g.shape, remedy="Skip empty batches")
    values: Any = _checked_stack(parts[0], patterns, batch, dtype) if stacked else parts
    if not stacked:
        _check_count("data", len(parts), len(patterns))
        for i, (d, p) in enumerate(zip(parts, patterns, strict=True)):
            shape = (p.nnz,) if d.ndim == 1 else (p.nnz, *batch)
            backend.check_array(f"data[{i}]", d, dtype=dtype, shape=shape)
    vectors = None if injections is None else _checked_injections(xp, injections, patterns, batch, dtype, stacked)
    one_for_all: Any = [values.shape[2] == 1] * len(patterns) if stacked else [d.ndim == 1 for d in parts]
    shared = bytes(one_for_all)
    return Arguments(xp, g.reshape(-1, prod(batch)), values, vectors, stacked, bool(batch), shared)


_PLAIN, _PLAIN_OR_NONE = {np.ndarray}, {np.ndarray, type(None)}


def _checked_at_once(plan: PlannedScan, g: Any, data: Any, injections: Any) -> Arguments | None:
    """Check lists of plain arrays of the host in one compiled call; None where something is, or may be, wrong."""
    if type(g) is not np.ndarray or g.ndim not in (1, 2) or g.dtype not in backend.FLOAT_DTYPES or 0 in g.shape[1:]:
        return None
    n = len(plan.patterns)
    lists, batched = (data,) if injections is None else (data, injections), g.ndim == 2
    if not all(type(given) in (list, tuple) and len(given) == n for given in lists):
        return None
    arrays = [g, *data]
    if {*map(type, arrays)} != _PLAIN or not {*map(type, injections or ())} <= _PLAIN_OR_NONE:
        return None
    arrays += injections or ()
    count, batch = len(arrays), g.shape[1] if batched else 1
    found = kernels.on_host().find(arrays, plan.lengths[:count], plan.axes[:count], g.ndim, batch, g.dtype)
    if found is None:
        return None
    places, vectors = found.places, None
    if injections is not None:
        vectors = [None if v is None else v.reshape(-1, batch) for v in injections]
        if all(v is None for v in vectors):
            places, vectors = places[: 1 + n], None
    shared = (~found.wide[1 : 1 + n]).tobytes()
    return Arguments(np, g.reshape(-1, batch), arrays[1 : 1 + n], vectors, False, batched, shared, places)


def _listed(name: str, value: Any, of: str) -> list[Any]:
    try:
        return check_sequence(name, value, of)
    except OptionError as error:
        raise ShapeError(error.problem, expected=error.expected, got=error.got, remedy=error.remedy) from error


def _checked_stack(data: Array, patterns: Sequence[SparsityPattern], batch: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return one stacked array of data as (n, nnz, B), or (n, nnz, 1) where the batch shares it."""
    n, first = len(patterns), patterns[0]
    if first.shape[0] != first.shape[1] or any(p is not first for p in patterns):
        raise ShapeError(
            "One stacked data array needs Jacobians that all have the same square pattern",
            expected="a list with one array a Jacobian",
            got=f"an array of shape {data.shape}",
            remedy="Pass a list of arrays, (nnz,) or (nnz, B)",
        )
    shape = (n, first.nnz) if data.ndim == 2 else (n, first.nnz, *batch)
    backend.check_array("data", data, dtype=dtype, shape=shape)
    return data.reshape(n, first.nnz, 1 if data.ndim == 2 else prod(batch))


def _checked_injections(
    xp: ModuleType, injections: Any, patterns: Sequence[SparsityPattern], batch: tuple[int, ...], dtype: np.dtype,
    stacked: bool,
) -> Any:  # fmt: skip
    """Return what is added, with a batch axis: a list, or stacked one array; None if nothing is."""
    n, width = len(patterns), prod(batch)
    if stacked and hasattr(injections, "ndim"):
        size = patterns[0].shape[0]
        backend.check_array("injections", injections, dtype=dtype, shape=(n, size, *batch))
        return injections.reshape(n, size, width)
    _check_count("injections", len(injections), n)
    for i, (v, p) in enumerate(zip(injections, patterns, strict=True)):
        if v is not None:
            backend.check_array(f"injections[{i}]", v, dtype=dtype, shape=(p.shape[0], *batch))
    vectors = [None if v is None else v.reshape(-1, width) for v in injections]
    if all(v is None for v in vectors):
        return None
    if not stacked:
        return vectors
    whole = xp.zeros((n, patterns[0].shape[0], width), dtype=dtype)
    for at, v in zip(whole, vectors, strict=True):
        if v is not None:
            at[...] = v
    return whole


def _check_count(name: str, got: int, expected: int) -> None:
    if got != expected:
        raise ShapeError(
            f"{name} has the wrong length",
            expected=f"{expected} entries, one a Jacobian of the plan",
            got=got,
            remedy="Pass None for a step without injection" if name == "injections" else "Pass one array a Jacobian",
        )
