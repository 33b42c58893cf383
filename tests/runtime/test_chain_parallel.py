"""Chains of Jacobians sharded over ranks: gradients of the linear scan, only vectors sent, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsebp as sb
from benchmarks.ranks import Counted
from scan.chains import Chain, dense, make_chain
from sparsebp import SparsityPattern
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError, PatternError, ShapeError, SparseBPError
from sparsebp.runtime.time_parallel import ChainParallel, Piece, chain_way_flops
from sparsebp.scan import plan_scan
from sparsebp.scan.plan import plan_reduction
from strategies import seeds, tolerance


def of_rank(values: Any, edges: list[int], rank: int) -> Any:
    return None if values is None else list(values[edges[rank] : edges[rank + 1]])


def run(chain: Chain, edges: list[int], way: str, batched: bool = True) -> list[list[Array]]:
    def work(transport: Transport) -> list[Array]:
        own = of_rank(chain.patterns, edges, transport.rank)
        scan = ChainParallel(own, transport, way, batch=chain.batch, dtype=chain.g.dtype)
        data, added = (of_rank(values, edges, transport.rank) for values in (chain.data, chain.injections))
        for _ in range(2):  # a second call finds everything planned
            y = scan(chain.g if transport.rank == 0 else None, data, added)
        return y

    return run_ranks(len(edges) - 1, work)


@given(seed=seeds, data=st.data())
@settings(max_examples=60)
def test_gradients_are_those_of_the_linear_scan(seed: int, data: st.DataObject) -> None:
    ranks, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 11))
    dtype = data.draw(st.sampled_from([np.float64, np.float64, np.float32]))
    chain = make_chain(np.random.default_rng(seed), n, data.draw(st.integers(1, 4)), dtype)
    cuts = data.draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1))
    edges = [0, *sorted(cuts), n]
    found = [y for own in run(chain, edges, data.draw(st.sampled_from(["auto", "products", "vectors"]))) for y in own]
    expected = plan_scan(chain.patterns, "linear")(chain.g, chain.data, chain.injections)
    limits = {"rtol": 1e-10, "atol": 1e-10} if dtype == np.float64 else tolerance(np.dtype(dtype), 20)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, **limits)


def test_vectors_without_a_batch() -> None:
    chain = make_chain(np.random.default_rng(3), 8, 1)
    plain = Chain(
        chain.patterns, [d.reshape(-1) for d in chain.data], chain.g[:, 0],
        None if chain.injections is None else [None if b is None else b[:, 0] for b in chain.injections],
    )  # fmt: skip
    expected = plan_scan(plain.patterns, "linear")(plain.g, plain.data, plain.injections)

    def work(transport: Transport) -> list[Array]:
        edges = [0, 2, 5, 8]
        scan = ChainParallel(of_rank(plain.patterns, edges, transport.rank), transport, "products")
        data, added = (of_rank(values, edges, transport.rank) for values in (plain.data, plain.injections))
        return scan(plain.g if transport.rank == 0 else None, data, added)

    found = [y for own in run_ranks(3, work) for y in own]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def test_layers_across_ranks() -> None:
    """The Jacobians of a convolutional network's layers, shared and per sample, on three ranks."""
    model = sb.nn.Sequential(
        sb.nn.Conv2d(2, 3, 3, padding=1, dtype=np.float64, rng=0), sb.nn.ReLU(), sb.nn.MaxPool2d(2),
        sb.nn.Conv2d(3, 4, 3, dtype=np.float64, rng=1), sb.nn.Tanh(), sb.nn.Flatten(),
        sb.nn.Linear(4 * 2 * 2, 3, dtype=np.float64, rng=2),
    )  # fmt: skip
    x, jacobians = np.random.default_rng(0).standard_normal((5, 2, 8, 8)), []
    gy, h = np.random.default_rng(1).standard_normal((5, 3)), x
    for _, layer in model.stages():
        jacobians.append(sb.jacobian_t(layer, h))
        h = layer(h)
    wanted = model.vjp(x)[1](gy).input
    chain = Chain([j.pattern for j in jacobians[::-1]], [j.data for j in jacobians[::-1]], gy.T.copy(), None)
    for way in ("products", "vectors"):
        found = run(chain, [0, 2, 5, 7], way)
        np.testing.assert_allclose(found[-1][-1].T.reshape(x.shape), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", ["products", "vectors"])
def test_a_rank_sends_one_vector(way: str) -> None:
    chain, edges = make_chain(np.random.default_rng(5), 12, 3), [0, 4, 8, 8, 12]

    def work(transport: Transport) -> Counted:
        counted = Counted(transport)
        scan = ChainParallel(of_rank(chain.patterns, edges, transport.rank), counted, way)
        data, added = (of_rank(values, edges, transport.rank) for values in (chain.data, chain.injections))
        scan(chain.g if transport.rank == 0 else None, data, added)
        return counted

    rows = [chain.patterns[end - 1].shape[0] for end in edges[1:]]
    for rank, counted in enumerate(run_ranks(4, work)):
        assert counted.values == ({} if rank == 3 else {"isend": 3 * rows[rank]})


@given(seed=seeds, n=st.integers(1, 9), batch=st.integers(1, 3))
@settings(max_examples=40)
def test_a_reduction_is_the_product_and_what_is_injected(seed: int, n: int, batch: int) -> None:
    chain = make_chain(np.random.default_rng(seed), n, batch)
    reduction = plan_reduction(chain.patterns, batch=batch, dtype=np.float64, shared=chain.shared)
    data, vector = reduction(chain.data, chain.injections, chain.g)
    for b in range(batch):
        found = dense(reduction.pattern, data, b) @ chain.g[:, b]
        found = found if vector is None else found + vector[:, b]
        np.testing.assert_allclose(found, chain.expected()[-1][:, b], rtol=1e-10, atol=1e-10)


P = SparsityPattern.dense(2, 3)
Q = SparsityPattern.dense(4, 2)


def built(*pieces: Any, **options: Any) -> list[ChainParallel]:
    return run_ranks(len(pieces), lambda transport: ChainParallel(pieces[transport.rank], transport, **options))


def test_pieces_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"Jacobians of rank 2 do not chain .* Expected 2 columns\. Got 3 columns"):
        built([P], [], [P])
    with pytest.raises(PatternError, match="at least one Jacobian"):
        built([], [])
    with pytest.raises(OptionError, match="way"):
        built([P], way="best")
    with pytest.raises(OptionError, match="Ranks differ in way"):
        run_ranks(2, lambda t: ChainParallel([P] if t.rank == 0 else [Q], t, ("products", "vectors")[t.rank]))


@pytest.mark.parametrize(
    ("g", "data", "message"),
    [
        ([None, None], [[np.zeros(6)], [np.zeros(8)]], "g on rank 0, None on the others"),
        ([np.zeros(3), np.zeros(3)], [[np.zeros(6)], [np.zeros(8)]], "g on rank 0, None on the others"),
        ([np.zeros(4), None], [[np.zeros(6)], [np.zeros(8)]], "g has the wrong shape"),
        ([np.zeros(3), None], [[np.zeros(6)], []], "data has the wrong length"),
        ([np.zeros(3), None], [[np.zeros(6)], [np.zeros(7)]], r"data\[0\] has the wrong shape"),
        ([np.zeros(3), None], [[np.zeros(6)], [np.zeros(8, np.float32)]], "wrong dtype"),
        ([np.zeros((3, 2)), None], [[np.zeros(6)], [np.zeros((8, 3))]], "wrong shape"),
    ],
)
def test_bad_calls_are_refused(g: Any, data: Any, message: str) -> None:
    def work(transport: Transport) -> Any:
        scan = ChainParallel([P] if transport.rank == 0 else [Q], transport, dtype=np.float64)
        return scan(g[transport.rank], data[transport.rank])

    with pytest.raises(SparseBPError, match=message):
        run_ranks(2, work)


def test_an_empty_piece_has_no_data() -> None:
    with pytest.raises(ShapeError, match=r"data has the wrong length. Expected 0. Got 1"):
        run_ranks(2, lambda t: ChainParallel([P] if t.rank == 0 else [], t)(
            np.zeros(3, np.float32) if t.rank == 0 else None, [np.zeros(6, np.float32)]
        ))  # fmt: skip


def test_auto_takes_products_where_ranks_outweigh_their_work() -> None:
    def pieces(ranks: int, reduce: float) -> list[Piece]:
        return [Piece(3, 3, 1.0, reduce, 0.01)] * ranks

    assert chain_way_flops(pieces(2, 9.0)) == {"vectors": 2.0, "products": 2.0}
    for ranks, reduce, way in ((3, 3.0, "vectors"), (5, 3.0, "products"), (8, 20.0, "vectors")):
        flops = chain_way_flops(pieces(ranks, reduce))
        assert min(flops, key=lambda name: flops[name]) == way
