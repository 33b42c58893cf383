"""Orders of pipelines against those of torch.distributed.pipelining, which it makes without a process group."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

from torch.distributed.pipelining import schedules as peer  # noqa: E402

from sparsebp.schedule.builders import (  # noqa: E402
    breadth_first,
    dualpipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)

SHAPES = [(2, 1, 4), (3, 2, 6), (4, 2, 8), (4, 3, 12), (4, 2, 3), (3, 2, 9), (4, 2, 10), (2, 4, 16)]


def orders(schedule) -> list[list[str]]:
    return [[str(cell) for cell in lane.cells] for lane in schedule.lanes]


def peer_orders(name: str, workers: int, chunks: int, microbatches: int) -> list[list[str]]:
    """The class's own orders, of an object without stages: they are all that its constructor needs a network for."""
    found = object.__new__(getattr(peer, name))
    rounds = max(1, microbatches // workers)
    vars(found).update(
        pp_group_size=workers, n_local_stages=chunks, _n_microbatches=microbatches, _num_stages=workers,
        num_stages=chunks * workers, number_of_rounds=rounds, microbatches_per_round=microbatches // rounds,
        _stages=[None] * chunks,
    )  # fmt: skip
    if hasattr(found, "_calculate_single_rank_operations"):
        rows = [found._calculate_single_rank_operations(rank) for rank in range(workers)]
    else:
        rows = list(found._get_pipeline_order().values())
    return [[str(action) for action in row if action is not None and "REDUCE" not in str(action)
             and (action.sub_actions or action.microbatch_index is not None)] for row in rows]  # fmt: skip


@pytest.mark.parametrize(("name", "build", "workers", "chunks", "microbatches"), [
    (name, build, *shape)
    for name, build in (
        ("ScheduleInterleaved1F1B", interleaved_one_f_one_b), ("ScheduleInterleavedZeroBubble", zero_bubble_h1),
        ("ScheduleLoopedBFS", breadth_first),
    )
    for shape in SHAPES
    if build is not interleaved_one_f_one_b or shape[1] > 1  # with one chunk PyTorch warms up further than 1F1B needs
])  # fmt: skip
def test_interleaved(name, build, workers, chunks, microbatches):
    own = build(workers=workers, stages=workers * chunks, microbatches=microbatches, chunks=chunks)
    assert orders(own) == peer_orders(name, workers, chunks, microbatches)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("name", "build"), [("ScheduleZBVZeroBubble", zero_bubble_v), ("ScheduleDualPipeV", dualpipe_v)]
)
def test_in_a_v(name, build, workers):
    """Action by action, with overlapped pairs; ZB-V with too few micro-batches to fill it too."""
    if not hasattr(peer, name):
        pytest.skip("this PyTorch does not have it")
    for microbatches in (1, workers, 2 * workers, 2 * workers + 1, 5 * workers):
        if build is zero_bubble_v or microbatches >= 2 * workers:
            own = build(workers=workers, stages=2 * workers, microbatches=microbatches)
            assert orders(own) == peer_orders(name, workers, 2, microbatches)


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 1), (2, 5), (4, 4), (4, 9)])
@pytest.mark.parametrize(("name", "build"), [("ScheduleGPipe", gpipe), ("Schedule1F1B", one_f_one_b)])
def test_single(name, build, workers, microbatches):
    if not hasattr(getattr(peer, name), "_get_pipeline_order"):
        pytest.skip("this PyTorch does not tell the order")
    own = orders(build(workers=workers, stages=workers, microbatches=microbatches))
    expected = peer_orders(name, workers, 1, microbatches)
    if name == "Schedule1F1B":  # PyTorch 2.13 lists the last rank's forwards from 1 on (it runs them from 0 on)
        own, expected = own[:-1], expected[:-1]
    assert own == expected
