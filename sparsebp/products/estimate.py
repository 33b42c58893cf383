"""How long a planned product takes on the host, by the price list; nothing is measured at run time.

A call's price, the bytes that it reads or writes, each counted once, and its products, each at the strategy's price
(`sparsebp.backend.machine.prices`). Threads share bytes and products where the kernels let them.
"""

from __future__ import annotations

from sparsebp.backend.machine import prices


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
    p, work = prices(), products * batch
    return p.call + p.plan_call + p.moved(moved, threads) + work * p.product(strategy, batch) / threads
