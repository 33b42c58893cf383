"""Numbers that papers state about their schedules, reproduced by simulation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebp.schedule import (
    Action,
    Costs,
    Link,
    Overlap,
    Schedule,
    Simulation,
    StageBytes,
    actions_of,
    depth,
    simulate,
)
from sparsebp.schedule.builders import (
    BUILDERS,
    conventional,
    dualpipe,
    dualpipe2018,
    dualpipe_v,
    fast_forward,
    gpipe,
    interleaved_one_f_one_b,
    modulo,
    one_f_one_b,
    pipedream,
    place_updates,
    v_half,
    v_min,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)


def makespan(schedule: Schedule, **durations: float) -> float:
    return simulate(schedule, Costs({"F": 1, "I": 1, "W": 1, "U": 0} | durations)).makespan


def longest_span(found: Simulation) -> float:
    """The longest time from a worker's first action to its last: the cost that Qi et al. count (§2.3)."""
    spans = []
    for worker in range(found.schedule.workers):
        own = [event for event in found.events if found.schedule.lanes[event.lane].worker == worker]
        spans.append(max(event.end for event in own) - min(event.start for event in own))
    return max(spans)


def test_ooo_fig_5():
    """8 layers, 2 devices: 23, 19 and 16 units."""
    shape = {"workers": 2, "stages": 8}
    assert makespan(gpipe(**shape, microbatches=1, input_gradient=False)) == 23
    assert makespan(fast_forward(**shape)) == 19
    assert makespan(modulo(**shape)) == 16


def test_ooo_fig_12():
    """16 layers, 4 devices, 4 micro-batches (§8.4.1): 1.22 and 1.62 times as fast as GPipe."""
    shape = {"workers": 4, "stages": 16, "microbatches": 4}
    assert makespan(gpipe(**shape, input_gradient=False)) == 83
    assert makespan(fast_forward(**shape)) == 68
    assert makespan(modulo(**shape)) == 51


def test_modulo_in_groups_lies_between():
    """§5.2.1: groups need fewer transfers and leave larger gaps."""
    shape = {"workers": 4, "stages": 16, "microbatches": 4}
    found = {group: simulate(modulo(**shape, group=group)) for group in (1, 2, 4)}
    assert [result.makespan for result in found.values()] == sorted(result.makespan for result in found.values())
    assert found[4].makespan == 68  # a group is all that a worker has
    assert len(found[1].transfers) > len(found[2].transfers) > len(found[4].transfers)


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_optimizer_fusion_depth(n):
    """Jiang et al. (2021), §3: 3n, and 2n + 1 for backward-fusion; a layer's backward is one unit."""
    costs = {"F": 1, "I": 0.5, "W": 0.5, "U": 1}
    baseline = conventional(stages=n, input_gradient=True)
    assert makespan(baseline, **costs) == 3 * n
    fused = place_updates(baseline, "backward", stream="update")
    assert makespan(fused, **costs) == 2 * n + 1
    assert makespan(place_updates(baseline, "forward"), **costs) == 3 * n  # Table 1: no parallelism
    assert depth(fused.graph) == 2 * n + 1


@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
def test_bubble_and_memory_with_a_flush(build, workers, microbatches):
    found = simulate(build(workers=workers, stages=workers, microbatches=microbatches))
    assert found.makespan == 3 * (microbatches + workers - 1)
    assert found.bubble == pytest.approx((workers - 1) / (microbatches + workers - 1))
    held = [microbatches if build is gpipe else min(microbatches, workers - k) for k in range(workers)]
    assert [max(curve.saved) for curve in found.memory] == held


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_interleaved_bubble(workers, chunks):
    """Narayanan et al. (2021), §2.2.2: the bubble time is (p - 1)(t_f + t_b) / v."""
    microbatches, stages = 2 * workers, 3 * 2 * workers  # of equal chunks for all of 1, 2, 3
    shape = {"workers": workers, "stages": stages, "microbatches": microbatches}
    found = simulate(interleaved_one_f_one_b(**shape, chunks=chunks), Costs({"F": 1, "I": 1, "W": 1}))
    work = 3 * microbatches * stages // workers
    assert found.makespan - work == (workers - 1) * 3 * (stages // workers) / chunks


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("build", "bubble", "held"), [
    (one_f_one_b, lambda p: (p - 1) * 3, lambda p: p),
    (zero_bubble_h1, lambda p: p - 1, lambda p: p),
    (zero_bubble_h2, lambda p: 0, lambda p: 2 * p - 1),
])  # fmt: skip
def test_zero_bubble_table_1(workers, build, bubble, held):
    """Qi et al. (2023), Table 1 with F = I = W: (p - 1) times F + I + W, F + I - W, F + I - 2W; memory p, p, 2p - 1."""
    for microbatches in (2 * workers - 1, 2 * workers, 5 * workers):
        found = simulate(build(workers=workers, stages=workers, microbatches=microbatches))
        assert longest_span(found) - 3 * microbatches == bubble(workers)
        assert max(max(curve.saved) for curve in found.memory) == held(workers)


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_zero_bubble_keeps_the_memory_of_1f1b_where_gradients_of_outputs_take_none(workers):
    """Qi et al. (2023), Table 1, assumes that I frees what the gradient takes that W waits with; the account does not.

    Beside the activations are the weights and their gradient (two units) and, counted as a unit each, these gradients.
    """
    builders = (one_f_one_b, zero_bubble_h1, zero_bubble_h2)
    for output, waiting in ((0, (0, 0, 0)), (1, (1, workers, 2 * workers - 1))):
        costs = Costs({"F": 1, "I": 1, "W": 1}, stages=StageBytes(output=output))
        for build, saved, gradients in zip(builders, (workers, workers, 2 * workers - 1), waiting, strict=True):
            found = simulate(build(workers=workers, stages=workers, microbatches=4 * workers), costs)
            there = [pair for c in found.memory for pair in zip(c.bytes, c.inputs, strict=True)]
            assert max(total - inputs for total, inputs in there) == saved + gradients + 2


@given(st.tuples(*3 * [st.integers(1, 9)]), st.integers(1, 5))
def test_zero_bubble_h1_saves_the_activations_of_as_many_micro_batches_as_workers(durations, workers):
    """On every worker, whatever F, I and W take: the order alone decides it. In 1F1B worker k saves N - k."""
    costs = Costs(dict(zip("FIW", durations, strict=True)))
    shape = {"workers": workers, "stages": workers, "microbatches": 3 * workers}
    ours, theirs = (simulate(build(**shape), costs).memory for build in (zero_bubble_h1, one_f_one_b))
    assert [max(curve.saved) for curve in ours] == workers * [workers]
    assert [max(curve.saved) for curve in theirs] == [workers - k for k in range(workers)]


@pytest.mark.parametrize(("build", "times"), [(zero_bubble_h1, 1), (zero_bubble_h2, 2)])
@settings(max_examples=25, deadline=None)
@given(st.tuples(*3 * [st.integers(1, 9)]))
def test_zero_bubble_for_other_durations(build, times, durations):
    """Qi et al. (2023), Table 1: (p - 1)(F + I - W) where W <= F, and (p - 1)(F + I - 2W) where also W <= I."""
    W, F, I = durations if times == 1 else sorted(durations)
    W, F = min(W, F), max(W, F)
    for workers in (2, 3, 5):
        found = simulate(
            build(workers=workers, stages=workers, microbatches=4 * workers), Costs({"F": F, "I": I, "W": W})
        )
        assert longest_span(found) - 4 * workers * (F + I + W) == (workers - 1) * (F + I - times * W)


@pytest.mark.parametrize(("name", "published"), [
    ("1f1b", 0.2431), ("zb-h1", 0.1585), ("zb-h2", 0.1083), ("zb-1p", 0.1585), ("zb-2p", 0.0433),
])  # fmt: skip
def test_zero_bubble_rates(name, published):
    """Qi et al. (2023), the 1.5B model with p = 8 and m = 24: bubble rates from the profiled times, and the bounds."""
    kept = 32 * 2304 / (34 * 2304 + 5 * 24 * 1024)  # the part of the activations that W reads
    costs = Costs({"F": 18.522, "I": 18.086, "W": 9.337}, StageBytes(saved_for_weights=kept), Link(0.601))
    schedule = BUILDERS[name](workers=8, stages=8, microbatches=24, **{"costs": costs} if name.endswith("p") else {})
    found = simulate(schedule, costs)
    assert round(found.span_bubble, 4) == published
    assert max(max(curve.saved) for curve in found.memory) <= (16 if name in ("zb-2p", "zb-h2") else 8) + 1e-9


@pytest.mark.parametrize("workers", [2, 3, 4, 6, 8, 9])
@pytest.mark.parametrize(("build", "held", "bubble"), [
    (v_half, lambda p: (p + 2) // 2, 0.0705), (v_min, lambda p: (p + 4) // 3, 1 / 12),
])  # fmt: skip
def test_placements_in_a_v_with_less_memory(build, held, bubble, workers):
    """Qi et al. (2024): activations of (p + 2) // 2 and (p + 4) // 3 micro-batches on a worker, of two chunks each."""
    found = simulate(build(workers=workers, stages=2 * workers, microbatches=8 * workers))
    assert max(max(curve.saved) for curve in found.memory) == 2 * held(workers)
    assert found.makespan / (6 * 8 * workers) - 1 <= bubble


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_zb_v_has_no_bubble_and_the_memory_of_1f1b(workers):
    """Qi et al. (2023), §6: with F = I = W no worker waits after its first action, and each saves as much as 1F1B's.

    1F1B has the same stages, two a worker; all of its workers but the first save less.
    """
    for microbatches in (2 * workers - 1, 2 * workers, 5 * workers):
        shape = {"workers": workers, "stages": 2 * workers, "microbatches": microbatches}
        ours, theirs = simulate(zero_bubble_v(**shape)), simulate(one_f_one_b(**shape))
        assert longest_span(ours) == 2 * 3 * microbatches
        assert ours.makespan == 2 * 3 * microbatches + workers - 1  # its last worker starts last
        assert [max(curve.saved) for curve in ours.memory] == workers * [2 * workers]
        assert [max(curve.saved) for curve in theirs.memory] == [2 * (workers - k) for k in range(workers)]


@pytest.mark.parametrize("slowdown", [1, 1.25, 2])
@pytest.mark.parametrize(("F", "W"), [(1, 1), (2, 1), (3, 2), (5, 4)])
@pytest.mark.parametrize("stages", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("build", [dualpipe, dualpipe_v])
def test_dualpipe_bubble_and_memory(build, stages, F, W, slowdown):
    """DeepSeek-V3 report, Table 2: bubble (PP/2 - 1)(F&B + B - 3W), parameters twice, activations PP + 1.

    DualPipe has PP workers and as many stages, DualPipeV half the workers, as in the table of deepseek-ai/DualPipe. I
    takes as long as F, as the figure draws it; an overlapped pair takes from max(F, B) to F + B, by the slowdown. The
    bubble is that of the worker that waits longest: those in the middle (where the V turns) run one pair in sequence,
    for which the others wait less.
    """
    ways = 2 if build is dualpipe else 1
    workers, costs = ways * stages // 2, Costs({"F": F, "I": F, "W": W}, slowdown=slowdown)
    for microbatches in (stages, stages + 1, 3 * stages):
        found = simulate(build(workers=workers, stages=stages, microbatches=ways * microbatches), costs)
        pair = costs.overlapped(Overlap(Action(0, "F", 1), Action(stages - 1, "B", 0)), found.schedule.graph)
        busy = [sum(event.end - event.start for event in found.events if event.lane == k) for k in range(workers)]
        assert found.makespan - min(busy) == pytest.approx((stages / 2 - 1) * (pair + F + W - 3 * W))
        assert [max(curve.saved) for curve in found.memory] == workers * [stages + 1]
        assert [max(curve.weights) for curve in found.memory] == workers * [2]


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 4), (4, 8), (8, 20), (6, 14)])
def test_dualpipe_is_symmetric_and_each_half_is_dualpipe_v(workers, microbatches):
    """DeepSeek-V3 report, Fig. 5: the micro-batches of the reverse direction mirror the others.

    Without them, and with both halves of the workers laid upon each other, it is DualPipeV.
    """
    both = dualpipe(workers=workers, stages=workers, microbatches=microbatches)
    half = dualpipe_v(workers=workers // 2, stages=workers, microbatches=microbatches // 2)
    for worker, lane in enumerate(half.lanes):
        for own in (worker, workers - 1 - worker):
            cells = [[(a.stage, a.kind, a.microbatch % (microbatches // 2)) for a in actions_of(cell)]
                     for cell in both.lanes[own].cells]  # fmt: skip
            assert cells == [[tuple(a) for a in actions_of(cell)] for cell in lane.cells]
            for action in (action for cell in both.lanes[own].cells for action in actions_of(cell)):
                assert (action.microbatch < microbatches // 2) == (action.stage == own)


@pytest.mark.parametrize("N", range(2, 9))
def test_dualpipe_2018_version_differences(N):
    """Chen et al. (2018), Eq. 5 and 6: s = 2N - k - 2 forward, s = k backward, in the steady state.

    All time units are equally long, and the last worker runs forward and backward of a batch in sequence in its unit.
    """

    def duration(action: Action) -> float:
        return 0 if action.kind == "U" else 0.5 if action.stage == N - 1 else 1

    found = simulate(dualpipe2018(workers=N, stages=N, microbatches=5 * N), Costs(duration))
    for m in range(2 * N, 3 * N + 1):
        assert [found.version_difference(Action(k, "F", m)) for k in range(N)] == [2 * N - k - 2 for k in range(N)]
        assert [found.version_difference(Action(k, "B", m)) for k in range(N)] == list(range(N))
        assert [found.start(Action(k, "F", m)) for k in range(N)] == [m + k for k in range(N)]
        backward = [found.start(Action(k, "B", m)) for k in range(N - 1)]
        assert backward == [m + 2 * N - 2 - k for k in range(N - 1)]  # Fig. 6b and 8b


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_pipedream_stashes_weights(workers):
    """Narayanan et al. (2019), §3.3: forward and backward read one version, N - k - 1 updates old on worker k."""
    found = simulate(pipedream(workers=workers, stages=workers, microbatches=4 * workers))
    for k in range(workers):
        for m in range(workers - k - 1, 4 * workers):
            assert found.version(Action(k, "F", m)) == found.version(Action(k, "B", m))
            assert found.staleness(Action(k, "F", m)) == found.staleness(Action(k, "B", m)) == workers - k - 1
    assert [max(curve.weights) for curve in found.memory] == [workers - k for k in range(workers)]
