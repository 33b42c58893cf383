"""``sparsebp warm-up``: compile all kernels of the CPU now, so that nothing waits for it later."""

from __future__ import annotations

import time

from sparsebp.cli.commands.common import console


def warm_up() -> None:
    """Compile all kernels of the CPU, for float32 and float64; they are kept on disk.

    Otherwise each is compiled at its first use, once a machine: some
    seconds in which a first training step seems to stand still.

    \b
    Examples:
      sparsebp warm-up
    """
    from sparsebp.recipes import warm_up as work

    out, begin, jobs = console(), time.perf_counter(), list(work.jobs())
    for number, (name, job) in enumerate(jobs, 1):
        start = time.perf_counter()
        job()
        out.print(f"{number:>2} of {len(jobs)}: {name:<24} {time.perf_counter() - start:6.1f} s", markup=False)
    seconds = time.perf_counter() - begin
    out.print(f"All kernels are ready after {seconds:.1f} s, kept below {work.folder()}", markup=False)
