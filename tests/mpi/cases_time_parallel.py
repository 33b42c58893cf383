"""Sequences and chains of Jacobians cut between processes: the gradients of one worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpi import on_ranks
from runtime.cut_sequences import Problem
from scan.chains import make_chain
from sparsebp.comm.transport import Transport
from sparsebp.runtime.time_parallel import ChainParallel
from sparsebp.scan import plan_scan


@on_ranks(1, 2, 3, in_process=False)
def gradients_over_time_are_those_of_one_worker(transport: Transport) -> None:
    for seed in range(12):
        problem = Problem.random(transport.size, seed)
        replace(problem, way=("maps", "vectors")[seed % 4 == 3]).check(transport)
        if seed % 3 == 0:
            replace(problem, dtype=np.float32).check(transport)


@on_ranks(2, 3, in_process=False)
def a_long_sequence(transport: Transport) -> None:
    problem = Problem.random(transport.size, 3)
    cuts = tuple(5003 * (rank + 1) // transport.size for rank in range(transport.size - 1))
    options = problem.options | {"backward": "auto"}
    replace(problem, steps=5003, cuts=cuts, kind="tanh", sizes=(1, 20, 1), options=options).check(transport)


@on_ranks(1, 2, 3, in_process=False)
def gradients_of_a_chain_are_those_of_the_linear_scan(transport: Transport) -> None:
    for seed in range(12):
        rng = np.random.default_rng([seed, transport.size])
        chain = make_chain(rng, int(rng.integers(1, 10)), int(rng.integers(1, 4)))
        n = len(chain.patterns)
        edges = [0, *sorted(rng.integers(0, n + 1, transport.size - 1).tolist()), n]
        own = slice(edges[transport.rank], edges[transport.rank + 1])
        scan = ChainParallel(chain.patterns[own], transport, ("products", "vectors", "auto")[seed % 3])
        added = None if chain.injections is None else chain.injections[own]
        found = scan(chain.g if transport.rank == 0 else None, chain.data[own], added)
        expected = plan_scan(chain.patterns, "linear")(chain.g, chain.data, chain.injections)[own]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)
