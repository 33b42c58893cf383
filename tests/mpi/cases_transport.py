"""Every transport: messages, sums, prefixes, and errors when ranks disagree."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from mpi import on_ranks
from sparsebp.comm.transport import Transport
from sparsebp.core.check import Array
from sparsebp.core.errors import DTypeError, LayoutError, OptionError, ShapeError, TransportError

SIZES = (0, 1, 2, 7, 1000, 4099, 70001)
DTYPES = (np.float32, np.float64)


def values(rank: int, size: int | tuple[int, ...], dtype: type = np.float64, seed: int = 0) -> Array:
    return np.random.default_rng([seed, rank]).standard_normal(size).astype(dtype)


@on_ranks(2, 3, 4)
def messages_arrive_in_their_order(transport: Transport) -> None:
    for dtype in DTYPES:
        for size in SIZES:
            right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
            outs = [np.empty(size, dtype) for _ in range(3)]
            receives = [transport.irecv(out, left, tag=5) for out in outs]
            sends = [transport.isend(values(transport.rank, size, dtype, seed), right, tag=5) for seed in range(3)]
            for handle in receives + sends:
                handle.wait()
                assert handle.done()
                handle.wait()  # again: nothing happens
            for seed, out in enumerate(outs):
                np.testing.assert_array_equal(out, values(left, size, dtype, seed))


@on_ranks(2)
def tags_keep_messages_apart(transport: Transport) -> None:
    tags = [3, transport.largest_tag, 0]
    if transport.rank == 0:
        for handle in [transport.isend(np.full((2, 3), float(tag)), 1, tag) for tag in tags]:
            handle.wait()
    else:
        outs = {tag: np.empty((2, 3)) for tag in reversed(tags)}
        for handle in [transport.irecv(out, 0, tag) for tag, out in outs.items()]:
            handle.wait()
        for tag, out in outs.items():
            np.testing.assert_array_equal(out, float(tag))


@on_ranks(2)
def done_lets_a_message_arrive(transport: Transport) -> None:
    out = np.empty(300_001)
    handle = transport.irecv(out, 0, 1) if transport.rank else transport.isend(values(0, out.size), 1, 1)
    while not handle.done():
        pass
    handle.wait()
    if transport.rank:
        np.testing.assert_array_equal(out, values(0, out.size))


@on_ranks(1, 2, 3, 4)
def sums_are_made_in_the_order_of_ranks(transport: Transport) -> None:
    for dtype in DTYPES:
        for size in SIZES:
            array = values(transport.rank, size, dtype)
            transport.allreduce(array).wait()
            expected = values(0, size, dtype)
            for rank in range(1, transport.size):
                expected = expected + values(rank, size, dtype)
            np.testing.assert_array_equal(array, expected)


@on_ranks(1, 2, 3, 4)
def several_sums_are_under_way(transport: Transport) -> None:
    arrays = [values(transport.rank, size, seed=size) for size in (5000, 3, 70001, 0, 12345)]
    handles = [transport.allreduce(array) for array in arrays]
    for handle in reversed(handles):
        handle.wait()
    for array in arrays:
        expected = sum(values(rank, array.size, seed=array.size) for rank in range(transport.size))
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-14 * transport.size)


@on_ranks(2, in_process=False)
def more_calls_than_tags(transport: Transport) -> None:
    transport._made = transport._most_tag // 2  # type: ignore[attr-defined]
    several_sums_are_under_way(transport)


@on_ranks(1, 2, 3, 4)
def the_same_sum_twice_has_the_same_bits(transport: Transport) -> None:
    found = []
    for _ in range(3):
        array = values(transport.rank, (37, 211), np.float32)
        transport.allreduce(array).wait()
        found.append(array.tobytes())
    assert set(found) == {found[0]}
    assert len({bytes(one) for one in transport.share(found[0])}) == 1


@on_ranks(1, 2, 3, 4)
def parts_of_sums_and_all_parts(transport: Transport) -> None:
    for dtype in DTYPES:
        for part in (0, 1, 3, 5001):
            whole = [values(rank, transport.size * part, dtype) for rank in range(transport.size)]
            own, out = whole[transport.rank].copy(), np.empty(part, dtype)
            transport.reduce_scatter(own, out).wait()
            np.testing.assert_array_equal(own, whole[transport.rank])
            expected = whole[0]
            for one in whole[1:]:
                expected = expected + one
            np.testing.assert_array_equal(out, expected[transport.rank * part : (transport.rank + 1) * part])
            again = np.empty((transport.size, part), dtype)
            transport.allgather(out, again).wait()
            np.testing.assert_array_equal(again.reshape(-1), expected)


@on_ranks(1, 2, 3, 4)
def prefixes_are_of_the_ranks_before(transport: Transport) -> None:
    """Matrices do not commute; the vector must not be combined in pieces either."""
    for n in (0, 1, 2, 37):

        def combine(earlier: Array, later: Array, n: int = n) -> Array:
            assert earlier.shape == later.shape == (n * n,)
            return (later.reshape(n, n) @ earlier.reshape(n, n)).reshape(-1)

        maps = [values(rank, n * n) for rank in range(transport.size)]
        found = transport.exscan(maps[transport.rank].copy(), combine)
        if transport.rank == 0:
            assert found is None
            continue
        expected = maps[0]
        for one in maps[1 : transport.rank]:
            expected = combine(expected, one)
        assert found is not None
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-9)


@on_ranks(3)
def an_error_of_a_prefix_is_raised(transport: Transport) -> None:
    def combine(earlier: Array, later: Array) -> Array:
        raise ShapeError("No product")

    try:
        transport.exscan(np.ones(3), combine)
        raised = False
    except ShapeError as error:
        raised = error.problem == "No product"
    assert raised or transport.rank < 2  # the others need not combine anything
    transport.barrier()


@on_ranks(1, 2, 3, 4)
def objects_are_shared(transport: Transport) -> None:
    shared = transport.share({"rank": transport.rank, "more": "x" * (100_000 * transport.rank)})
    assert [one["rank"] for one in shared] == list(range(transport.size))
    assert [len(one["more"]) for one in shared] == [100_000 * rank for rank in range(transport.size)]
    assert transport.broadcast(("root", transport.rank), root=transport.size - 1) == ("root", transport.size - 1)
    transport.barrier()


@on_ranks(2)
def a_message_of_another_size_is_refused(transport: Transport) -> None:
    """Of another dtype too, of the same number of bytes: neither is read as numbers."""
    for sent, wanted in ((5, 6), (6, 5), (0, 1), (100_000, 99_999)):
        if transport.rank == 0:
            transport.isend(np.ones(sent), 1, 2).wait()
        else:
            handle = transport.irecv(np.empty(wanted), 0, 2)
            with pytest.raises(TransportError, match="Rank 1 expected other data of rank 0"):
                handle.wait()
    if transport.rank == 0:
        transport.isend(np.ones(8, np.float32), 1, 2)
    else:
        handle = transport.irecv(np.empty(4, np.float64), 0, 2)
        with pytest.raises(TransportError, match=r"Rank 1 expected other data of rank 0.*float64"):
            handle.wait()


@on_ranks(2, 3)
def calls_that_differ_are_refused(transport: Transport) -> None:
    with pytest.raises(TransportError, match=r"makes another collective call.*\d+ bytes|has failed|has ended"):
        transport.allreduce(np.ones(10 + transport.rank)).wait()


@on_ranks(2, 3)
def calls_of_other_kinds_are_refused(transport: Transport) -> None:
    with pytest.raises(TransportError, match=r"makes another collective call.*barrier|has failed|has ended"):
        if transport.rank == 0:
            transport.barrier()
        else:
            transport.allreduce(np.ones(10)).wait()


@on_ranks(1, 2)
def arguments_are_checked(transport: Transport) -> None:
    good, frozen = np.ones(4), np.ones(4)
    frozen.flags.writeable = False
    for wrong, peer, tag, error in (
        (good, transport.size, 0, OptionError), (good, -1, 0, OptionError), (good, 0, -1, OptionError),
        (good, 0, transport.largest_tag + 1, OptionError), (np.ones((4, 4))[:, 1], 0, 0, LayoutError),
        (np.ones(4, np.float16), 0, 0, DTypeError),
    ):  # fmt: skip
        with pytest.raises(error):
            transport.isend(wrong, peer, tag)
        with pytest.raises(error):
            transport.irecv(wrong, peer, tag)
    with pytest.raises(LayoutError):
        transport.irecv(frozen, 0, 0)
    with pytest.raises(LayoutError):
        transport.allreduce(frozen)
    with pytest.raises(ShapeError):
        transport.allgather(good, np.empty(4 * transport.size + 1))
    with pytest.raises(ShapeError):
        transport.reduce_scatter(np.ones(4 * transport.size + 1), good)
    with pytest.raises(DTypeError):
        transport.allgather(good, np.empty(4 * transport.size, np.float32))
    transport.barrier()


@on_ranks(2, 3, 4, fails="out of paper")
def a_rank_that_fails_ends_the_others(transport: Transport) -> None:
    last = transport.size - 1
    if transport.rank == last:
        raise ValueError("out of paper")
    with pytest.raises(TransportError, match=f"Rank {last} has failed.*ValueError: out of paper"):
        if transport.rank == 0:
            transport.irecv(np.empty(3), last, 0).wait()
        else:
            transport.allreduce(np.empty(3)).wait()


@on_ranks(2, 3, fails=r"Rank 1 has ended, and rank \d waits for it")
def a_rank_that_ends_early_is_not_waited_for(transport: Transport) -> None:
    if transport.rank == 0:
        transport.irecv(np.empty(3), 1, 0).wait()


@on_ranks(2, 3, fails=r"Rank 1 has ended, and rank \d waits for it")
def a_rank_that_ends_early_sums_nothing(transport: Transport) -> None:
    if transport.rank != 1:
        transport.allreduce(np.empty(3)).wait()


@on_ranks(2, in_process=False)
def a_thread_lets_sums_go_on(transport: Transport) -> None:
    """No call is made meanwhile; without the thread the sum would stay at its first exchange."""
    from sparsebp.comm.mpi import MPITransport

    progressing = MPITransport(progress=True)
    array = values(transport.rank, 100_001)
    handle = progressing.allreduce(array)
    limit = time.monotonic() + 20
    while not handle.ended and time.monotonic() < limit:  # type: ignore[attr-defined]
        time.sleep(1e-3)
    assert handle.ended  # type: ignore[attr-defined]
    np.testing.assert_array_equal(array, values(0, array.size) + values(1, array.size))
    out = np.empty(100_001)  # and messages beside it, waited for as ever
    other = 1 - transport.rank
    handles = [progressing.irecv(out, other, 1), progressing.isend(array, other, 1), progressing.allreduce(np.ones(9))]
    for one in reversed(handles):
        one.wait()
    np.testing.assert_array_equal(out, array)
    handle.wait()
    progressing.close()


def refuses_once_closed(transport: Transport, array: Callable[[int], Array]) -> None:
    """What a transport says when it is used after its end; `array` makes arrays that it carries."""
    transport.barrier()
    transport.close()
    transport.close()
    one, many = array(3), array(3 * transport.size)
    for call in (
        lambda: transport.isend(one, 0, 0), lambda: transport.irecv(one, 0, 0), lambda: transport.allreduce(one),
        lambda: transport.reduce_scatter(many, one), lambda: transport.allgather(one, many),
        lambda: transport.exscan(one, lambda a, b: a), lambda: transport.share(1), lambda: transport.broadcast(1),
        transport.barrier,
    ):  # fmt: skip
        with pytest.raises(TransportError, match=r"The transport is closed.*make another one"):
            call()


@on_ranks(1, 2)
def a_closed_transport_says_so(transport: Transport) -> None:
    refuses_once_closed(transport, np.ones)
