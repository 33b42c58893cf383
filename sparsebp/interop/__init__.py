"""Exchange with SciPy, CuPy's sparse matrices, DLPack and PyTorch. Each module imports its library when called."""

from __future__ import annotations

from sparsebp.interop import cupyx, dlpack, scipy, torch

__all__ = ["cupyx", "dlpack", "scipy", "torch"]


def __dir__() -> list[str]:
    return sorted(__all__)
