"""Checks of what a planned scan is called with, and the one shape that the runners work on: vectors (n, B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sparsebp import backend
from sparsebp.core.arguments import check_sequence
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.planning.planned import PlannedScan


@dataclass(frozen=True)
class Arguments:
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
    """

    xp: ModuleType
    g: Array
    data: Any
    injections: Any
    stacked: bool
    batched: bool

    @property
    def shared(self) -> tuple[bool, ...]:
        """Of each Jacobian, whether the batch shares its values."""
        if self.stacked:
            return (self.data.shape[2] == 1,) * self.data.shape[0]
        return tuple(d.ndim == 1 for d in self.data)


def check_arguments(
    plan: PlannedScan, g: Array, data: Sequence[Array] | Array, injections: Sequence[Array | None] | Array | None
) -> Arguments:
    """Check the arguments of ``plan(g, data, injections)`` against the plan and against each other.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, DeviceError
        See the message.
    """
    patterns = plan.patterns
    stacked = hasattr(data, "ndim")
    parts = [data] if stacked else _listed("data", data, "arrays")
    added = {"injections": injections}
    if injections is not None and not getattr(injections, "ndim", 0):
        injections = _listed("injections", injections, "arrays or None")
        added = {f"injections[{i}]": injection for i, injection in enumerate(injections)}
    named = {f"data[{i}]": part for i, part in enumerate(parts)}
    xp = backend.namespace(g=g, **named, **backend.given(**added))
    dtype = backend.float_dtype(g.dtype)
    if g.ndim not in (1, 2):
        raise ShapeError("g has the wrong shape", expected="(n,) or (n, B)", got=g.shape, remedy="Put the batch last")
    batched = g.ndim == 2
    backend.check_array("g", g, dtype=dtype, shape=(patterns[0].shape[1], *g.shape[1:]))
    batch = g.shape[1] if batched else 1
    if batch == 0:
        raise ShapeError("The batch is empty", expected="at least one sample", got=g.shape, remedy="Skip empty batches")
    check = _check_stacked if stacked else _check_listed
    values, vectors = check(xp, patterns, parts, injections, batch, batched, dtype)
    return Arguments(xp, g.reshape(-1, batch), values, vectors, stacked, batched)


def _listed(name: str, value: Any, of: str) -> list[Any]:
    try:
        return check_sequence(name, value, of)
    except OptionError as error:
        raise ShapeError(error.problem, expected=error.expected, got=error.got, remedy=error.remedy) from error


def _check_listed(
    xp: ModuleType,
    patterns: Sequence[SparsityPattern],
    data: list[Array],
    injections: Sequence[Array | None] | Array | None,
    batch: int,
    batched: bool,
    dtype: object,
) -> tuple[list[Array], list[Array | None] | None]:
    _check_count("data", len(data), len(patterns))
    for i, (d, p) in enumerate(zip(data, patterns, strict=True)):
        shape = (p.nnz,) if d.ndim == 1 or not batched else (p.nnz, batch)
        backend.check_array(f"data[{i}]", d, dtype=dtype, shape=shape)
    if injections is None:
        return data, None
    _check_count("injections", len(injections), len(patterns))
    vectors: list[Array | None] = []
    for i, (v, p) in enumerate(zip(injections, patterns, strict=True)):
        if v is not None:
            shape = (p.shape[0], batch) if batched else (p.shape[0],)
            backend.check_array(f"injections[{i}]", v, dtype=dtype, shape=shape)
        vectors.append(None if v is None else v.reshape(-1, batch))
    return data, vectors if any(v is not None for v in vectors) else None


def _check_stacked(
    xp: ModuleType,
    patterns: Sequence[SparsityPattern],
    parts: list[Array],
    injections: Any,
    batch: int,
    batched: bool,
    dtype: object,
) -> tuple[Array, Array | None]:
    data, n, first = parts[0], len(patterns), patterns[0]
    if first.shape[0] != first.shape[1] or any(p is not first for p in patterns):
        raise ShapeError(
            "One stacked data array needs Jacobians that all have the same square pattern",
            expected="a list with one array a Jacobian",
            got=f"an array of shape {data.shape}",
            remedy="Pass a list of arrays, (nnz,) or (nnz, B)",
        )
    shared = data.ndim == 2
    backend.check_array(
        "data", data, dtype=dtype, shape=(n, first.nnz) if shared or not batched else (n, first.nnz, batch)
    )
    vectors = None
    size = first.shape[0]
    shape = (size, batch) if batched else (size,)
    if hasattr(injections, "ndim"):
        backend.check_array("injections", injections, dtype=dtype, shape=(n, *shape))
        vectors = injections.reshape(n, size, batch)
    elif injections is not None:
        _check_count("injections", len(injections), n)
        if any(v is not None for v in injections):
            vectors = xp.zeros((n, size, batch), dtype=dtype)
            for i, v in enumerate(injections):
                if v is not None:
                    backend.check_array(f"injections[{i}]", v, dtype=dtype, shape=shape)
                    vectors[i] = v.reshape(size, batch)
    return data.reshape(n, first.nnz, 1 if shared else batch), vectors


def _check_count(name: str, got: int, expected: int) -> None:
    if got != expected:
        raise ShapeError(
            f"{name} has the wrong length",
            expected=f"{expected} entries, one a Jacobian of the plan",
            got=got,
            remedy="Pass None for a step without injection" if name == "injections" else "Pass one array a Jacobian",
        )
