"""A fuzz test: random calls, most of them valid, compared with an oracle; the rest must be refused by our own errors.

A case is a function of (seed, number). `targets` holds one file a target, `harness` runs cases in child processes, so
that a crash or a hang is caught and belongs to its case, and ``python tests/fuzz/run.py`` runs as many as are wanted.
"""
