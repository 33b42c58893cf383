"""How much of a sum over ranks the progress thread hides: ``mpiexec -n 2 python -m mpi.measure_progress``.

An all-reduce of 8 MB beside 30 ms in which the host sleeps, as it does beside a GPU, and beside a kernel that computes
on the ranks' cores without the interpreter's lock; without and with the thread. The least of 40 times each.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numba
import numpy as np

from sparsebp.comm.mpi import MPITransport

SECONDS = 0.03


@numba.njit(nogil=True)
def compute(values: np.ndarray, rounds: int) -> None:
    for _ in range(rounds):
        for i in range(values.size):
            values[i] = values[i] * 1.0000001 + 1e-9


def least(transport: MPITransport, run: Callable[[], None]) -> float:
    times = []
    for _ in range(40):
        transport.barrier()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    values, gradient = np.ones(4000), np.zeros(2_000_000, np.float32)
    gradient[:] = 0  # so that the memory is there
    compute(values, 1)
    with_clock = MPITransport()
    rate = 1000 / least(with_clock, lambda: compute(values, 1000))
    rounds = int(SECONDS * max(with_clock.share(rate)))
    with_clock.close()
    for progress in (False, True):
        transport = MPITransport(progress=progress)
        for name, work in (
            ("sleeps", lambda: time.sleep(SECONDS)), ("computes", lambda: compute(values, rounds)),
        ):  # fmt: skip

            def both(work: Callable[[], None] = work, transport: MPITransport = transport) -> None:
                handle = transport.allreduce(gradient)
                work()
                handle.wait()

            def alone(transport: MPITransport = transport) -> None:
                transport.allreduce(gradient).wait()

            both()
            found = [least(transport, run) for run in (work, alone, both)]
            for rank, (own, sums, together) in enumerate(transport.share(found)):
                if transport.rank == 0:
                    print(
                        f"{'thread' if progress else 'no thread'}, rank {rank} {name} {1e3 * own:.1f} ms, all-reduce "
                        f"{1e3 * sums:.1f} ms, both {1e3 * together:.1f} ms: {1 - (together - own) / sums:.0%} hidden"
                    )
        transport.close()


main()
