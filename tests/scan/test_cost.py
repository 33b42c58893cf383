"""The cost model: its order of preferences, not its figures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import SparsityPattern, plan_scan
from sparsebp.core.errors import OptionError
from sparsebp.core.machine import Machine, machine
from sparsebp.kernels.device import recurrent
from sparsebp.scan import choose_recurrent_backward
from sparsebp.scan.cost import Candidate, Sizes, candidates, profile_costs, seconds
from sparsebp.scan.recurrent import _best_chunks, _choose, _chunked, _gpu, _recursion

GPU = Machine("GPU", 528, 56e9, 0.5, 3.8e12, 0, 8e-6, 0.1e-6, True, "a data sheet")
SMALL_GPU = Machine("GPU", 80, 54e9, 1 / 64, 0.2e12, 0, 8e-6, 0.1e-6, True, "a data sheet")


@pytest.mark.parametrize("cell", ["rnn", "gru"])
@pytest.mark.parametrize("T", [10, 1000, 30_000])
@pytest.mark.parametrize("B", [1, 16, 64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_few_cores_run_the_recursion(cell, T, B, dtype):
    """A scan does about H times the work; two threads cannot make up for that."""
    choice = choose_recurrent_backward(cell, T, B, 20, dtype, np, workers=2)
    assert (choice.algorithm, choice.chunks) == ("bp", 1)
    assert "about 20 times the work" in choice.reason and f"T={T}" in choice.reason
    assert set(choice.estimates) == {"bp", "chunked"}
    assert choice.memory["bp"] == 0


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("H", [1, 2, 4, 20, 256])
@pytest.mark.parametrize("T", [1, 30_000, 1_500_000])
def test_a_host_runs_the_recursion(monkeypatch, cell, H, T):
    """The rule, without an estimate: a scan over stored Jacobians was taken for H = 1 and 2, ten times as slow."""
    asked = choose_recurrent_backward(cell, T, 1, H, np.float32, np, workers=1)
    assert "blelloch" not in asked.estimates
    monkeypatch.setattr("sparsebp.scan.recurrent._choose", None)  # nothing is estimated
    choice = choose_recurrent_backward(cell, T, 1, H)
    assert (choice.algorithm, choice.chunks) == ("bp", 1)
    assert choice.reason.startswith("On a host auto takes plain back-propagation")


def test_many_cores_and_one_sample_run_the_scan():
    choice = choose_recurrent_backward("rnn", 30_000, 1, 20, np.float32, np, workers=256)
    assert choice.algorithm == "chunked" and choice.chunks >= 3


@pytest.mark.parametrize("cell", ["rnn", "gru"])
def test_a_gpu_scans_long_sequences_of_few_samples(cell):
    """The paper's working point, T = 1000 and more at B = 16 and H = 20, is one where the scan pays; T = 10 is not."""
    long = _choose(cell, 3000, 16, 20, 4, GPU, None)
    assert long.algorithm == "chunked" and 3 <= long.chunks <= 3000
    assert _choose(cell, 10, 16, 20, 4, GPU, None).algorithm == "bp"
    assert _choose(cell, 3000, 256, 20, 4, GPU, None).algorithm == "bp"  # the batch fills it


@pytest.mark.parametrize("gpu", [GPU, SMALL_GPU])
@pytest.mark.parametrize("cell", ["rnn", "gru"])
@pytest.mark.parametrize("B", [1, 16, 64, 512])
@pytest.mark.parametrize("itemsize", [4, 8])
def test_chunks_on_a_gpu_have_no_better_neighbour(gpu, cell, B, itemsize):
    for T in (10, 100, 1000, 30_000, 100_000):
        for H in (1, 7, 20, 32, 33, 128, 256):
            chunks, least = _best_chunks(cell, T, B, H, itemsize, gpu)
            assert 3 <= chunks <= T
            for other in (chunks - 1, chunks + 1, chunks // 2, chunks * 2, chunks * 9 // 10, chunks * 11 // 10):
                if 3 <= other <= T:
                    seconds = _chunked(cell, T, B, H, itemsize, gpu, other)
                    assert least <= 1.1 * seconds, f"T={T}, H={H}: {chunks} chunks, but {other} are faster"


@pytest.mark.parametrize(("T", "around"), [(1000, 64), (30_000, 258)])
def test_a_gpu_gets_as_many_chunks_as_have_a_warp_scheduler_each(T, around):
    """B + (C - 2) * groups warps in the first phase: one more on any scheduler doubles its time."""
    layer, gpu = recurrent.Layer("rnn", 16, 20, 4), _gpu(GPU)
    chunks = _choose("rnn", T, 16, 20, 4, GPU, None).chunks
    assert around * 0.9 <= chunks <= around * 1.1
    rows = recurrent.rows_a_lane(layer, chunks - 2, gpu)
    groups = -(-16 // (32 // -(-20 // rows)))
    assert 16 + (chunks - 2) * groups <= 4 * gpu.multiprocessors


@given(T=st.integers(3, 100_000), B=st.integers(1, 512), H=st.integers(1, 300), itemsize=st.sampled_from([4, 8]))
def test_a_larger_problem_never_takes_less_on_a_gpu(T, B, H, itemsize):
    for cell in ("rnn", "gru"):
        time = _recursion(cell, T, B, H, itemsize, GPU)
        assert time <= _recursion(cell, T + 1, B, H, itemsize, GPU)
        assert time <= _recursion(cell, T, B + 1, H, itemsize, GPU)
        assert time <= _recursion(cell, T, B, H, itemsize, SMALL_GPU)
        layer = recurrent.Layer(cell, B, H, itemsize)
        counts = recurrent.chunk_counts(layer, T, _gpu(GPU))
        assert counts == sorted(set(counts)) and counts[0] >= 3 and counts[-1] <= T
        assert [-(-T // c) for c in counts] == sorted({-(-T // c) for c in counts}, reverse=True)


def test_larger_hidden_sizes_turn_to_the_recursion():
    assert _choose("rnn", 1000, 16, 20, 4, GPU, None).algorithm == "chunked"
    assert _choose("rnn", 1000, 16, 128, 4, GPU, None).algorithm == "bp"


def test_memory_limit_of_a_recurrent_backward():
    free = _choose("rnn", 30_000, 16, 20, 4, GPU, None)
    assert free.memory["chunked"] == free.chunks * 16 * 20 * 28 * 4  # a row of 20 and its constant, padded to 28
    assert free.memory["blelloch"] >= 15 * free.memory["chunked"]
    assert free.memory["blelloch"] <= 30_000 * 16 * (2 * 20 * 20 + 20) * 4  # two matrices and a vector a step
    tight = _choose("rnn", 30_000, 16, 20, 4, GPU, 1000)
    assert tight.algorithm == "bp"
    assert "beyond the memory limit" in tight.reason and "chunked" not in tight.estimates


@given(T=st.integers(1, 5000), B=st.integers(1, 300), H=st.integers(1, 128), gpu=st.booleans())
def test_every_shape_has_a_choice(T, B, H, gpu):
    m = GPU if gpu else machine(np, 4)
    choice = _choose("gru", T, B, H, 8, m, None)
    assert choice.algorithm in ("bp", "chunked", "blelloch")
    assert 1 <= choice.chunks <= T
    assert all(t > 0 for t in choice.estimates.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mgu", 5, 5, 5), "Unknown recurrent cell"),
        (("rnn", 0, 5, 5), "T is too small"),
        (("rnn", 5, 0, 5), "B is too small"),
        (("gru", 5, 5, 0), "H is too small"),
    ],
)
def test_bad_recurrent_shapes(arguments, message):
    with pytest.raises(OptionError, match=message):
        choose_recurrent_backward(*arguments)
    with pytest.raises(OptionError, match="workers is too small"):
        choose_recurrent_backward("rnn", 5, 5, 5, workers=0)


def test_profile_and_steps_cost_the_same_flops():
    n, size, sizes = 37, 4, Sizes(3, np.dtype(np.float32), (False,) * 37)
    for option in candidates(n, [5]):
        options = {"up_levels": option.up_levels} if option.algorithm == "hybrid" else {"chunks": option.chunks}
        plan = plan_scan([SparsityPattern.dense(size, size)] * n, option.algorithm, **options, batch=3)
        assert sum(c.flops for c in profile_costs(option, n, size, sizes)) == plan.flops


def test_more_workers_never_take_longer():
    costs = profile_costs(Candidate("blelloch"), 500, 8, Sizes(4, np.dtype(np.float32), (False,) * 500))
    times = [seconds(costs, machine(np, w), 4, 4) for w in (1, 2, 8, 64, 1024)]
    assert times == sorted(times, reverse=True)


def test_rates():
    host = machine(np)
    assert host.workers >= 1 and not host.is_device and host.source
    assert host.rate(8) == host.rate(4) * host.double
    assert (host.lanes(4), host.lanes(8), GPU.lanes(4)) == (16, 8, 1)
    assert machine(np, 2 * host.workers).bandwidth == pytest.approx(2 * host.bandwidth)


def test_candidates():
    names = [str(c) for c in candidates(21, [2, 3, 30])]
    assert names == ["linear", "chunked (chunks=3)", *(f"hybrid (up_levels={k})" for k in (1, 2, 3)), "blelloch"]
    assert [str(c) for c in candidates(1, [3])] == ["linear"]
    assert Candidate("hybrid", up_levels=2).arguments == "algorithm='hybrid', up_levels=2"
