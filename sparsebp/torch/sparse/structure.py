"""The structure of a sparse matrix, of whatever library: a `SparsityPattern` whose values count."""

from __future__ import annotations

from typing import Any

import torch

from sparsebp.core.errors import PatternError
from sparsebp.patterns import SparsityPattern


def pattern_of(name: str, matrix: Any) -> SparsityPattern:
    """Return the structure of an argument.

    An identity becomes a diagonal: with values of its own it is none.

    Raises
    ------
    PatternError
        It is no sparse matrix, or one whose structure is not canonical.
    """
    if isinstance(matrix, torch.Tensor):
        return _pattern_of_tensor(name, matrix)
    found = matrix if isinstance(matrix, SparsityPattern) else getattr(matrix, "pattern", None)
    if isinstance(found, SparsityPattern):
        return SparsityPattern.diagonal(found.shape[0]) if found.kind == "identity" else found
    if getattr(matrix, "format", None) == "csr":
        return SparsityPattern.from_scipy(matrix)
    raise PatternError(
        f"{name} is no sparse matrix", expected="a torch.sparse_csr tensor, SciPy's CSR, a BatchedCSR or a "
        "SparsityPattern", got=type(matrix).__name__, remedy="Convert it with .to_sparse_csr() or .tocsr()",
    )  # fmt: skip


def _pattern_of_tensor(name: str, tensor: torch.Tensor) -> SparsityPattern:
    if tensor.layout is not torch.sparse_csr or tensor.dim() not in (2, 3):
        raise PatternError(f"{name} is no CSR tensor", expected="layout torch.sparse_csr, (m, n) or (B, m, n)",
                           got=f"layout {tensor.layout}, shape {tuple(tensor.shape)}",
                           remedy="Convert it with .to_sparse_csr()")  # fmt: skip
    parts = [tensor.crow_indices().cpu(), tensor.col_indices().cpu()]  # synchronize!
    if tensor.dim() == 3:
        if tensor.shape[0] == 0:
            raise PatternError(f"{name} is an empty batch", expected="at least one sample", got=tuple(tensor.shape),
                               remedy="Pass the structure itself, a SparsityPattern")  # fmt: skip
        if not all(bool((part == part[:1]).all()) for part in parts):
            raise PatternError(f"The samples of {name} have different structures", expected="one structure for all",
                               got="rows or columns that differ",
                               remedy="Build the batch on the union of the structures, with stored zeros")  # fmt: skip
        parts = [part[0] for part in parts]
    rows, columns = tensor.shape[-2:]
    return SparsityPattern(parts[0].numpy(), parts[1].numpy(), (rows, columns))
