"""NUMERIC: bare arrays in, bare arrays out. One interface, `spec`; `host` (Numba) and `device` (CUDA) work.

Nobody imports an implementation: ``k = kernels.get(xp)`` gives the kernels that belong to the arrays' namespace.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

from sparsebp.core import backend
from sparsebp.kernels.spec import Kernels


@cache
def get(xp: ModuleType) -> Kernels:
    """Return the kernels for ``numpy`` or ``cupy``; Numba, CuPy and NVRTC are imported at the first call."""
    if backend.is_host(xp):
        from sparsebp.kernels.host import HostKernels

        return Kernels(HostKernels())
    return Kernels(on_device(xp))


@cache
def on_device(xp: ModuleType) -> Any:
    """Return the launchers of CuPy's arrays without their checks, for kernels whose sources are emitted."""
    from sparsebp.kernels.device import DeviceKernels, RawModuleLoader

    return DeviceKernels(xp, RawModuleLoader(xp))


@cache
def dense(xp: ModuleType) -> ModuleType:
    """Return the module of dense products for ``numpy`` or ``cupy``; the host's are in pooled memory."""
    return importlib.import_module(f"sparsebp.kernels.{'host' if backend.is_host(xp) else 'device'}.dense")


@cache
def on_host() -> ModuleType:
    """Return `sparsebp.kernels.host`, for what a device lacks."""
    from sparsebp.kernels import host

    return host
