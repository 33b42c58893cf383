"""Kernels on a GPU: CUDA C++ sources in ``cuda/``, and the launchers that choose grids.

`sparsebp.kernels.spec` has checked dtypes, shapes and layouts; a launch checks the device. It is on the current stream,
allocates scratch only, and never waits for the device.
"""

from __future__ import annotations

from sparsebp.kernels.device.conv import ConvolutionKernels
from sparsebp.kernels.device.dense import DenseKernels
from sparsebp.kernels.device.launch import Launcher, RawModuleLoader, emitted, options, source
from sparsebp.kernels.device.optim import OptimizerKernels, WindowKernels
from sparsebp.kernels.device.rnn import LinearRecurrenceKernels, RecurrentKernels, SelectiveScanKernels
from sparsebp.kernels.device.sparse import CsrKernels, SpgemmKernels, ValueKernels

__all__ = ["DeviceKernels", "Launcher", "RawModuleLoader", "emitted", "options", "source"]


class DeviceKernels(
    CsrKernels,
    SpgemmKernels,
    DenseKernels,
    RecurrentKernels,
    LinearRecurrenceKernels,
    SelectiveScanKernels,
    OptimizerKernels,
    ValueKernels,
    WindowKernels,
    ConvolutionKernels,
):
    """The device side of `sparsebp.kernels.spec.Kernels`.

    Parameters
    ----------
    xp
        The namespace of the arrays, `cupy`, or another whose arrays `loader`'s kernels take.
    loader
        Compiles the sources: `RawModuleLoader(cupy)` on a GPU.
    """

    unchecked = False  # a launch costs far more than the checks
