"""Benchmarks on a GPU, each for one run of some minutes; every point is measured in a process of its own and saved.

``gpu-numbers``: single kernels, what `sparsebp.scan.planning` counts with; ``gpu-grid``: the paper's grid beside cuDNN;
``gpu-graphs``: whole steps, launched and captured.
"""
