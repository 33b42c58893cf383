"""Puts `strict_cupy` in CuPy's place in every process that has this folder on its path, for the tests of the runs.

And what the runs ask of a GPU besides: PyTorch's device ``cuda``, which is the CPU here, and what can go wrong there:
``STANDIN_FAULT=sticky:name`` breaks the device for good at the launch of that kernel, as an illegal access does;
``STANDIN_FAULT=numba`` lets nobody import Numba.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import Any


def _add_to_cupy() -> None:
    from strict_cupy import install
    from strict_cupy.device import DEVICE
    from strict_cupy.kernels import RawKernel

    install()
    os.environ.pop("SPARSEBP_MACHINE_CODE", None)  # of a real GPU
    cuda = sys.modules["cupy"].cuda
    if "set_allocator" not in vars(cuda):
        cuda.set_allocator = lambda allocator=None: None
    for name in ("num_regs", "local_size_bytes"):
        setattr(RawKernel, name, 0)
    faults = dict(fault.partition(":")[::2] for fault in os.environ.get("STANDIN_FAULT", "").split(","))
    if "numba" in faults:
        import strict_cupy.without_numba  # noqa: F401
    launch = RawKernel.__call__

    def launch_or_fail(self: Any, *arguments: Any, **options: Any) -> None:
        if self.name == faults.get("sticky"):
            DEVICE.sticky = 700
        launch(self, *arguments, **options)

    RawKernel.__call__ = launch_or_fail


class _TorchOnTheCpu:
    """PyTorch, whose device ``cuda`` is the CPU."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def device(self, name: str) -> Any:
        """Return the CPU for either."""
        return self._torch.device("cpu")


class _Peers(importlib.abc.MetaPathFinder):
    """Gives benchmarks that PyTorch, once they ask for one."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Wrap what loads the benchmarks' peers."""
        if name != "benchmarks.harness":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            real = module.import_torch
            module.import_torch = lambda: _TorchOnTheCpu(real())

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_add_to_cupy()
sys.meta_path.insert(0, _Peers())
