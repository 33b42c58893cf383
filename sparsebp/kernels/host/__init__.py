"""The kernels on the host: Numba functions, parallel, cached between runs, bitwise the same for every thread count."""

from __future__ import annotations

from sparsebp.kernels.host.csr import CsrKernels
from sparsebp.kernels.host.dense import DenseKernels
from sparsebp.kernels.host.gru import GruKernels
from sparsebp.kernels.host.rnn import RnnKernels
from sparsebp.kernels.host.spgemm import SpgemmKernels
from sparsebp.kernels.host.training import TrainingKernels

__all__ = ["HostKernels"]


class HostKernels(CsrKernels, SpgemmKernels, DenseKernels, RnnKernels, GruKernels, TrainingKernels):
    """The protocol `sparsebp.kernels.protocol.Kernels` for NumPy arrays: one mixin per family of kernels."""
