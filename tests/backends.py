"""The implementations of the kernel protocol that one test body runs on.

``host``
    Numba, on NumPy arrays.
``emulated-random``
    The device launchers and their CUDA sources, on NumPy arrays, executed by `cuda_on_cpu` with every check on, the
    threads of a block, and the blocks, in random order. With ``EVERY_ORDER=1``, once a release,
    ``emulated-forward`` and ``emulated-reverse`` as well.
``gpu``
    The same launchers and sources through CuPy; marked ``gpu`` and skipped where CuPy sees no device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cuda_on_cpu.memory import CheckedNumpy, uninitialised
from sparsebp import kernels
from sparsebp.core import backend as seam
from sparsebp.core.check import Array
from sparsebp.core.errors import DeviceError, MissingDependencyError
from sparsebp.kernels.spec import Kernels

ORDERS = ("forward", "reverse", "random") if os.environ.get("EVERY_ORDER") == "1" else ("random",)
BACKENDS: dict[str, Any] = {"host": (), **{f"emulated-{order}": () for order in ORDERS}, "gpu": pytest.mark.gpu}


class Backend:
    """One implementation of the kernels with the arrays that it takes. ``str(backend)`` is its name."""

    def __init__(self, name: str, xp: ModuleType) -> None:
        self.name, self.xp = name, xp

    def __repr__(self) -> str:
        return self.name

    @property
    def emulated(self) -> bool:
        """Whether kernels run on the CPU executor: slow, so tests choose small sizes."""
        return self.name.startswith("emulated")

    @cached_property
    def kernels(self) -> Kernels:
        """The object under test; compiled when first asked for."""
        if not self.emulated:
            return kernels.get(self.xp)
        from cuda_on_cpu.loader import ExecutorLoader
        from sparsebp.kernels.device import DeviceKernels

        found = Kernels(DeviceKernels(CheckedNumpy(), ExecutorLoader(order=self.name.split("-")[1])))
        found.xp = np  # of the arrays that layers make
        return found

    def array(self, values: Any, dtype: Any = None) -> Array:
        """Return a new C-contiguous array of this backend holding `values`."""
        return self.xp.asarray(np.array(values, dtype=dtype, order="C"))

    def numpy(self, array: Array) -> np.ndarray:
        """Return a copy of `array` on the host."""
        return np.array(seam.to_host(array))

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return an array to be written: NaN (integers: an unlikely value), which the executor knows as unwritten."""
        return self.xp.asarray(uninitialised(shape, dtype))

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return an array of zeros."""
        return self.xp.zeros(shape, dtype)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the library use these kernels for NumPy arrays too, where they are emulated."""
        with pytest.MonkeyPatch.context() as patch:
            if self.emulated:
                patch.setattr(kernels, "get", lambda _: self.kernels)
            yield


def make_backend(name: str) -> Backend:
    """Return the backend called `name`; skips the test if it is the GPU's and there is none."""
    if name != "gpu":
        return Backend(name, np)
    try:
        return Backend(name, seam.cupy())
    except (MissingDependencyError, DeviceError) as error:
        pytest.skip(f"no GPU: {error}")


def needs_numba(why: str) -> None:
    """Skip a test where Numba refuses this machine's NumPy; tests of a device need it only to compare or to plan."""
    pytest.importorskip("numba", exc_type=ImportError, reason=f"Numba cannot be imported, and {why}")
