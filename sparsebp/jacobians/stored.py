"""Patterns and colours in files, by the digest of the trace that they were found by.

A `Digests` level stands in for `Sets`: it follows a function in the same way, and in place of index sets it carries
digests of all that these depend on. Equal digests, equal patterns; a digest takes a fraction of the time of the sets.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core.errors import OptionError
from sparsebp.core.files import check_path, write_atomically
from sparsebp.jacobians.index_sets import Sets
from sparsebp.jacobians.tracing import Traced, numbered
from sparsebp.patterns.pattern import SparsityPattern

FORMAT = 1
"""Of files, and of the rules of tracing: a digest of other rules is another one."""


def digest_of(*parts: Any) -> bytes:
    """Return the digest of strings, arrays and digests."""
    found = hashlib.blake2b(digest_size=20)
    for part in parts:
        if isinstance(part, np.ndarray):
            content = np.ascontiguousarray(part, part.dtype.newbyteorder("<"))
            head, body = f"{content.dtype}{content.shape}".encode(), content.tobytes()
        else:
            head, body = b"", part if isinstance(part, bytes) else repr(part).encode()
        found.update(len(head).to_bytes(8, "little") + head + len(body).to_bytes(8, "little") + body)
    return found.digest()


class Digests(Sets):
    """The level of a digest; where `Sets` has a sparse matrix, it has bytes."""

    def input(self, x: np.ndarray) -> Traced:
        """Return the input."""
        return Traced(x, digest_of("input", x.shape), self)

    def nothing(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the digest of a constant."""
        return digest_of("nothing", shape)

    def elementwise(self, shape: tuple[int, ...], dtype: Any, terms: list[Any]) -> Any:
        """Return the digest of a union."""
        return digest_of("elementwise", shape, *(part for x, *_ in terms for part in (x.shape, x.carried)))

    def choose(self, operands: list[Traced], choice: Any, value: Any, view: Any = None) -> Any:
        """Return the digest of elements."""
        carried = (part for x in operands for part in (x.size, x.carried))
        return digest_of("choose", np.asarray(choice(*numbered(operands)), np.int64), *carried)

    def linear(self, x: Traced, shape: tuple[int, ...], dtype: Any, push: Any, pull: Any, structure: Any) -> Any:
        """Return the digest of a product with a matrix, whose nonzeros count."""
        matrix = structure()
        return digest_of("linear", matrix.shape, matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64),
                         x.carried)  # fmt: skip

    def contract(self, operands: list[Any], labels: list[str], out: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the digest of a contraction, for which nonzeros of constants count."""
        carried = (x.carried if isinstance(x, Traced) else np.asarray(x) != 0 for x in operands)
        return digest_of("contract", labels, out, [x.shape for x in operands], *carried)

    def digest(self, found: Any, symmetric: bool) -> str:
        """Return the digest of a pattern."""
        return digest_of(FORMAT, self.inputs, symmetric, found).hex()


class Plan(NamedTuple):
    """A pattern, and the colours of its rows and columns, -1 for none."""

    pattern: SparsityPattern
    rows: np.ndarray
    columns: np.ndarray


def read_plan(path: str | os.PathLike[str], digest: str) -> Plan | None:
    """Return the plan in a file, or None if there is none of this digest.

    Raises
    ------
    OptionError
        The file is something else.
    """
    path = check_path("stored", path)
    if not Path(path).exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            if str(file["digest"]) != digest:
                return None
            pattern = SparsityPattern(file["indptr"], file["indices"], (int(file["shape"][0]), int(file["shape"][1])))
            return Plan(pattern, file["rows"], file["columns"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise OptionError("The file does not hold a plan", expected="one that was stored, or none", got=str(path),
                          remedy="Remove it, or pass another") from error  # fmt: skip


def write_plan(path: str | os.PathLike[str], digest: str, plan: Plan) -> None:
    """Write a plan."""
    buffer, (pattern, rows, columns) = io.BytesIO(), plan
    np.savez(buffer, digest=digest, indptr=pattern.indptr, indices=pattern.indices, shape=pattern.shape, rows=rows,
             columns=columns)  # fmt: skip
    write_atomically(path, buffer.getvalue())
