"""Runs the CUDA C++ sources of the device kernels on the CPU, one fiber per CUDA thread, and checks what they do.

For tests only. The pieces, in the order in which a launch passes through them:

`loader`
    `ExecutorLoader`: what ``DeviceKernels`` gets in place of CuPy's loader.
`compiler`
    Turns CUDA C++ into a shared library with g++, cached by content.
`executor`
    The stand-ins of ``cupy.RawModule`` and ``cupy.RawKernel``: argument checks, copies in and out, errors with lines.
`memory`
    Array placement and the bit pattern of memory that nobody has written.
``cuda_subset.h``
    What the kernels see of CUDA.
``runtime.cpp`` with ``fiber.h``, ``checker.cpp``
    Fibers, barriers and warps; races, bounds, alignment and uninitialised reads.

Stricter than a GPU: two writes of the same value are a race; lanes that gather for one warp operation must come to the
same line with the same mask; a shuffle must not read a lane that is absent.

Not seen: reads of uninitialised registers and local arrays; missing ``__threadfence`` (nothing may wait for another
block anyway); an endless loop that touches no memory. Arithmetic is the CPU's: no contraction to fused multiply-adds,
and another library's tanh and exp, so results agree to rounding and not to the bit.
"""
