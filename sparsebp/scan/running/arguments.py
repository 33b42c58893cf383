"""Checks of what a planned scan is called with, and the one shape that the runners work on: vectors (n, B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

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
    batch = g.shape[1:]  # () without one
    backend.check_array("g", g, dtype=dtype, shape=(patterns[0].shape[1], *batch))
    if batch == (0,):
        raise ShapeError("The batch is empty", expected="at least one sample", got=g.shape, remedy="Skip empty batches")
    values = _checked_stack(parts[0], patterns, batch, dtype) if stacked else parts
    if not stacked:
        _check_count("data", len(parts), len(patterns))
        for i, (d, p) in enumerate(zip(parts, patterns, strict=True)):
            shape = (p.nnz,) if d.ndim == 1 else (p.nnz, *batch)
            backend.check_array(f"data[{i}]", d, dtype=dtype, shape=shape)
    vectors = None if injections is None else _checked_injections(xp, injections, patterns, batch, dtype, stacked)
    return Arguments(xp, g.reshape(-1, prod(batch)), values, vectors, stacked, bool(batch))


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
