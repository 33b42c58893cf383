"""Reads the machine code of the CUDA kernels and says, without a GPU, how many cycles a step of their loops takes.

For tests and for the documentation. With ``tests`` on the path, `python -m sass rnn.cu rnn_backward REAL=float
HIDDEN=20 RELU=0 --steps LDS.128:5` prints it for one kernel. The pieces, in the order in which a kernel passes them:

`nvrtc`
    Compiles a source with the options that CuPy passes, and disassembles it. Needs ``nvidia-cuda-nvrtc`` and
    ``nvidia-cuda-nvdisasm`` (both in the extra ``dev``), no GPU and no driver.
`decode`
    Instructions with their operands and control bits: stall count, scoreboards set and waited for.
`loops`
    The outermost loops of a kernel, and the instructions of one round in the order in which a warp runs them.
`machine`
    What is assumed of the hardware, with sources; runs one warp through the loop, in order, until it is steady.
`report`
    The figures of one loop: cycles, instructions, the longest chain, units taken.

What it is good for: comparing two versions of a kernel, and finding what a warp waits for. It knows stall counts
exactly, because they are in the code; latencies of memory and of special functions are published measurements of other
people, and bank conflicts, instruction fetch and other warps are left out. No figure of it has been held against a GPU.
"""
