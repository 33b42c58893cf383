"""Who else multiplies sparse matrices on this machine: SciPy, and MKL and GraphBLAS where they are installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from benchmarks.spgemm import mkl
from benchmarks.tools import peers

Prepare: TypeAlias = Callable[[Any, Any], dict[str, Callable[[], object]]]
"""Takes two SciPy CSR arrays of float32 and returns what is timed, by the name of the side."""


def found(note: Callable[[str], None]) -> list[Prepare]:
    """Return the peers that are installed; tell `note` which are not.

    Their sides are ``scipy``; ``mkl`` (structure and values at every call) and ``mkl_numeric`` (values into a structure
    that is kept); ``graphblas``.
    """
    here: list[Prepare] = [lambda a, b: {"scipy": lambda: a @ b}]
    if mkl.load() is None:
        note("MKL: not compared, the package mkl is not installed")
    else:
        here.append(_in_mkl)
    if peers.optional("graphblas") is None:
        note("GraphBLAS: not compared, python-graphblas is not installed")
    else:
        here.append(_in_graphblas)
    return here


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """As `benchmarks.tools.peers.threads`, which sets MKL too, and for GraphBLAS."""
    graphblas: Any = peers.optional("graphblas")
    settings = graphblas.ss.config if graphblas else {}
    before = settings.get("nthreads")
    with peers.threads(count):
        settings["nthreads"] = count
        try:
            yield
        finally:
            settings["nthreads"] = before


def _in_mkl(a: Any, b: Any) -> dict[str, Callable[[], object]]:
    product = mkl.MklProduct(a, b)
    return {"mkl": product.fresh, "mkl_numeric": product.values}


def _in_graphblas(a: Any, b: Any) -> dict[str, Callable[[], object]]:
    graphblas: Any = peers.optional("graphblas")
    left, right = graphblas.io.from_scipy_sparse(a), graphblas.io.from_scipy_sparse(b)
    return {"graphblas": lambda: left.mxm(right).new().wait()}
