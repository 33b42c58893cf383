"""BENCH: side-by-side benchmarks, ``sparsebp bench {recurrent,scan,spgemm,jacobian,gpu}``.

Each module has ``run(out=None, quick=False, threads=(1, 2), echo=print) -> dict``, which measures us and a peer in turn
in one run, writes JSON and a picture, and prints the table last. They are imported by name when asked for:
``from sparsebp.bench import recurrent``.
"""
