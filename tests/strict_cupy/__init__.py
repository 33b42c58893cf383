"""A stand-in for CuPy whose arrays live on the host, and which refuses what CuPy and CUDA refuse.

For tests only, and only where `install` puts it in CuPy's place: in a process of its own, through the pytest plugin
``strict_cupy.plugin``. Nothing here can be imported as ``cupy`` by accident. What it is for: the package's way to a GPU
is gone from end to end, with the real launchers, the real CUDA sources (run by `cuda_on_cpu`) and the real recorder of
CUDA graphs, on machines that have no GPU. The pieces:

`device`
    What a device does with work: streams, events, graphs and their capture. Work is kept until somebody waits for it,
    and then only what that needs is done, so that a missing wait between streams gives a wrong result here too.
`counts`
    How many launches, transfers and waits there were.
`memory`
    Pools, pointers, pinned memory. Fresh memory holds NaN, and freed memory is given to whoever asks next.
`arrays`, `functions`, `surface`
    ``cupy.ndarray``, CuPy's functions on top of NumPy's, and which arguments CuPy's have.
`kernels`, `cublas`, `cusparse`
    ``cupy.RawModule``; the entry points of cuBLAS that the package calls past CuPy, and of cuSPARSE that a benchmark
    does.
`tensors`
    PyTorch's CPU tensors, taken for tensors of the device.
`modules`
    The names, as CuPy has them.

Not like the real thing: time; random numbers; the last bits of a result; how many kernels one of CuPy's functions takes
(it counts as one); work that CuPy has compiled and we have not.

Examples
--------
>>> with counted() as counts:  # doctest: +SKIP
...     loss = model.forward(x)
>>> counts.ours, counts.theirs, counts.host_reads  # doctest: +SKIP
(3, 5, 1)
"""

from strict_cupy.counts import Counts, counted
from strict_cupy.modules import install, installed

__all__ = ["Counts", "counted", "install", "installed"]
