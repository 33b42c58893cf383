"""Compiles the CUDA kernels as CuPy does, without a GPU, and keeps what ptxas says of them: registers and spills.

`compile` needs ``nvidia-cuda-nvrtc`` (in the extra ``dev``), no GPU and no driver. `sources` lists every source with
the defines of its launchers. `keep_usage` writes ``usage.json``.
"""
