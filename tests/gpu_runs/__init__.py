"""Runs on a GPU, each of which fits into nine minutes: ``python3 tests/gpu_runs check``, and three more.

``python3 tests/gpu_runs first`` does the stages of all four within one budget, in four calls (`first`).

A run is a few stages, each a process of its own under a time limit (`stages`), so that whatever a stage does, the next
one comes, and what was done is told: `runs` says which. See ``docs/how-to/run-on-a-gpu.md``.
"""
