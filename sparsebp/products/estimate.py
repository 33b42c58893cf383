"""How long a planned product takes on the host: a model of two numbers, stated here and nothing measured at run time.

The time is the larger of two floors: the bytes that a call reads or writes, each counted once, at the rate at which a
thread copies; and the products at the strategy's rate. The rates are those of one thread of a 2020s x86 server with
vectors of 64 bytes; they rank strategies and sizes, and say the order of magnitude.
"""

from __future__ import annotations

COPY_RATE = 20e9
"""Bytes a second that one thread reads or writes."""

CALL = 5e-6
"""Seconds of any call: checks, and waking the threads."""

SINGLE = {
    "identity": 0.0,
    "scale_rows": 0.1e-9,
    "scale_columns": 0.5e-9,
    "select_rows": 0.1e-9,
    "select_columns": 1.0e-9,
    "gather": 0.7e-9,
    "dense": 0.05e-9,
    "runs": 0.06e-9,
    "positions": 0.65e-9,
    "accumulate": 1.0e-9,
}
"""Seconds of one product without a batch, where everything is in the cache, by strategy."""

VECTOR = 0.1e-9
"""Seconds at least of one product of one sample in a batch, where samples fill whole vectors."""


def seconds(strategy: str, products: int, moved: int, batch: int = 1, threads: int = 1) -> float:
    """Return the estimated seconds of one call on the host.

    Parameters
    ----------
    strategy
        A strategy of `ProductPlan`.
    products
        Multiplications a sample.
    moved
        Bytes that the call reads or writes.
    batch, threads
        Number of samples, and of threads that share the work.
    """
    each = SINGLE[strategy] if batch == 1 else min(SINGLE[strategy], VECTOR)
    return CALL + max(moved / COPY_RATE, products * batch * each) / threads
