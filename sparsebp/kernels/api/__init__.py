"""Every kernel's name, arguments, shapes, dtypes and checks, stated once; host or device do the work.

Conventions
-----------
- ``real`` is float32 or float64, the same for all real arguments of a call; ``index`` is int32 or int64.
- Every array is C-contiguous. The caller allocates ``out`` and every array that is said to be written; a kernel
  allocates scratch only. Outputs never alias inputs.
- The batch B is **last** in everything that belongs to a Jacobian, a product or a scan: data ``(nnz, B)``, vectors
  ``(n, B)``. Values shared by the batch have a last axis of length 1: ``(nnz, 1)``; wherever ``B*`` is written the
  length may be 1 or B, and ``out`` has B if any operand has.
- Recurrent layers are time-major as in torch.nn: ``(T, B, ...)``.
- A kernel writes its results and returns nothing. A method that returns something asks about sizes: it runs nothing.
- No atomics: the same input gives bitwise the same output on every run and for every number of threads.
- Sizes of zero are legal wherever they make sense (no rows, no nonzeros, no batch).
- A wrong dtype, shape or layout raises (see `sparsebp.backend.check_array`); nothing falls through.
"""

from __future__ import annotations

from sparsebp.kernels.api.dense import DenseKernels
from sparsebp.kernels.api.lstm import LstmKernels
from sparsebp.kernels.api.optimizers import OptimizerKernels
from sparsebp.kernels.api.pointwise import PointwiseKernels
from sparsebp.kernels.api.products import ProductKernels
from sparsebp.kernels.api.recurrent import RecurrentKernels
from sparsebp.kernels.api.sparse import SparseKernels
from sparsebp.kernels.api.windows import WindowKernels


class Kernels(
    SparseKernels,
    ProductKernels,
    DenseKernels,
    RecurrentKernels,
    LstmKernels,
    WindowKernels,
    PointwiseKernels,
    OptimizerKernels,
):
    """All kernels, over an implementation. `sparsebp.kernels.get` makes one for an array namespace."""
