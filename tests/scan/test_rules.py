"""The rules of `auto`: measured on a host, counted for a number of workers, reasoned for a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import SparsityPattern, plan_scan
from sparsebp.core.errors import OptionError
from sparsebp.core.machine import Machine, machine
from sparsebp.scan import choose_recurrent_backward
from sparsebp.scan.cost import Chain
from sparsebp.scan.rules import (
    LAUNCH,
    START,
    Candidate,
    _choose,
    candidates,
    chunked_steps,
    chunks_for,
    layers_time,
    phases,
    stack_time,
)

GPU = Machine("GPU", 528, 80 << 30, True)
SMALL_GPU = Machine("GPU", 80, 8 << 30, True)
CELLS = st.sampled_from(["rnn", "gru", "lstm"])


def test_the_rule_for_a_host_is_what_was_measured():
    """Plain back-propagation is the fastest in every row of the committed benchmark."""
    table = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "scan.json"
    rows = json.loads(table.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 16 and {row["best"] for row in rows} == {"bp"}
    for row in rows:
        least = min(row[f"time_{name}"]["median"] for name in ("chunked", "hybrid", "blelloch"))
        assert row["time_bp"]["median"] < least


@pytest.mark.parametrize("cell", ["rnn", "gru"])
@pytest.mark.parametrize("T", [10, 1000, 30_000])
@pytest.mark.parametrize("B", [1, 16, 64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_few_cores_run_the_recursion(cell, T, B, dtype):
    """A scan does about H times the work; two threads cannot make up for that."""
    choice = choose_recurrent_backward(cell, T, B, 20, dtype, np, workers=2)
    assert (choice.algorithm, choice.chunks) == ("bp", 1)
    assert "maps of 21 rows" in choice.reason and f"T={T}" in choice.reason
    assert choice.memory["bp"] == 0


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("H", [1, 2, 4, 20, 256])
@pytest.mark.parametrize("T", [1, 30_000, 1_500_000])
def test_a_host_runs_the_recursion(monkeypatch, cell, H, T):
    monkeypatch.setattr("sparsebp.scan.rules._choose", None)  # nothing is counted
    choice = choose_recurrent_backward(cell, T, 1, H)
    assert (choice.algorithm, choice.chunks) == ("bp", 1)
    assert choice.reason.startswith("On a host auto takes plain back-propagation")


def test_many_cores_and_one_sample_run_the_scan():
    choice = choose_recurrent_backward("rnn", 30_000, 1, 20, np.float32, np, workers=256)
    assert choice.algorithm == "chunked" and choice.chunks >= 3


def test_a_gpu_scans_long_sequences_of_few_samples():
    """The paper's working point, T = 1000 and more at B = 16 and H = 20, is one where the scan pays; T = 10 is not."""
    long = _choose("rnn", 3000, 16, 20, 4, GPU, None)
    assert long.algorithm == "chunked" and 3 <= long.chunks <= 3000
    assert _choose("rnn", 10, 16, 20, 4, GPU, None).algorithm == "bp"
    assert _choose("rnn", 3000, 256, 20, 4, GPU, None).algorithm == "bp"  # the batch fills it


@pytest.mark.parametrize(("T", "chunks"), [(1000, 64), (30_000, 258)])
def test_a_gpu_gets_as_many_chunks_as_have_a_warp_scheduler_each(T, chunks):
    assert _choose("rnn", T, 16, 20, 4, GPU, None).chunks == chunks
    assert GPU.workers >= 16 + (258 - 2) * 2  # the last chunk's samples, and two groups of eight a map


@pytest.mark.parametrize(
    ("cell", "T", "B", "H", "chunks", "microseconds"),
    [
        ("gru", 1000, 16, 64, 64, 1940),
        ("rnn", 1000, 16, 64, 64, 910),
        ("rnn", 1406, 34, 120, 76, 15_000),
        ("gru", 1000, 64, 64, 60, 7100),
        ("lstm", 3047, 6, 40, 112, 2700),
        ("gru", 1000, 1, 64, 64, 220),
        ("lstm", 1000, 1, 64, 64, 480),
        ("lstm", 1000, 16, 64, 1, 470),
        ("gru", 1000, 16, 128, 1, 850),
        ("lstm", 1000, 16, 128, 1, 1250),
        ("rnn", 1000, 16, 128, 1, 260),
    ],
)
def test_a_gpu_takes_what_was_faster(cell, T, B, H, chunks, microseconds):
    """The counted steps are an H100's time of the backward (gpu-peers); the recursion is taken where it is faster."""
    step = (40 + 4 * {"rnn": 1, "gru": 3, "lstm": 4}[cell] * H) / 1980  # µs
    counted = step * chunked_steps(phases(cell, B, H, 4, GPU), T, B, GPU, chunks)
    assert counted == pytest.approx(microseconds, rel=0.25)
    choice = _choose(cell, T, B, H, 4, GPU, None)
    assert choice.algorithm == ("chunked" if (cell, B) == ("gru", 1) else "bp")
    assert chunks == 1 or choice.chunks in (1, chunks)  # the chunks that were measured


@pytest.mark.parametrize(("cell", "chunked"), [("rnn", True), ("gru", True), ("lstm", False)])
def test_a_scan_of_twenty_units_pays_on_a_gpu_where_launches_are_outweighed(cell, chunked):
    assert (_choose(cell, 1000, 16, 20, 4, GPU, None).algorithm == "chunked") is chunked
    assert _choose(cell, 100, 16, 20, 4, GPU, None).algorithm == "bp"
    assert _choose(cell, 1000, 16, 20, 8, GPU, None).algorithm == "bp"  # float64


@given(
    cell=CELLS, T=st.integers(30, 100_000), B=st.integers(1, 64), H=st.integers(1, 200),
    m=st.sampled_from([GPU, SMALL_GPU]), chunks=st.integers(3, 300),
)  # fmt: skip
def test_samples_and_units_turn_to_the_recursion(cell, T, B, H, m, chunks):
    """On a GPU. So does float64; a longer sequence does not."""
    of = phases(cell, B, H, 4, m)
    steps = chunked_steps(of, T, B, m, chunks)
    assert steps <= chunked_steps(phases(cell, B + 1, H, 4, m), T, B + 1, m, chunks)
    assert steps <= chunked_steps(phases(cell, B, H, 8, m), T, B, m, chunks)
    assert of.shared <= phases(cell, B, H + 1, 4, m).shared
    if _choose(cell, T, B, H, 4, m, None).algorithm == "bp":
        wider = H + 20 if H >= 12 else H  # below, launches count more than the maps' rows
        for more in ((cell, T, 4 * B, H, 4), (cell, T, B, wider, 4), (cell, T, B, H, 8)):
            assert _choose(*more, m, None).algorithm == "bp"
    elif T >= 300:
        assert _choose(cell, 4 * T, B, H, 4, m, 1 << 60).algorithm == "chunked"


def test_a_row_of_a_map_on_a_host():
    of = phases("rnn", 16, 20, 4, machine(np, 2))
    assert of.alone == of.shared == 0.4 * 21 and (of.combine, of.start) == (1, 0)
    assert phases("gru", 1, 20, 8, machine(np, 2)).shared == 0.2 * 21


def test_memory_limit_of_a_recurrent_backward():
    free = _choose("rnn", 30_000, 16, 20, 4, GPU, None)
    assert free.memory["chunked"] == free.chunks * 16 * 20 * 21 * 4
    tight = _choose("rnn", 30_000, 16, 20, 4, GPU, free.memory["chunked"] - 1)
    assert tight.algorithm == "bp" and "beyond the memory limit" in tight.reason
    assert _choose("rnn", 30_000, 16, 20, 4, GPU, free.memory["chunked"]).algorithm == "chunked"


@given(
    cell=CELLS, T=st.integers(1, 100_000), B=st.integers(1, 300), H=st.integers(1, 256),
    m=st.sampled_from([GPU, SMALL_GPU, machine(np, 1), machine(np, 4), machine(np, 4096)]),
)  # fmt: skip
def test_every_shape_has_a_choice(cell, T, B, H, m):
    choice = _choose(cell, T, B, H, 8, m, None)
    assert choice.algorithm in ("bp", "chunked")
    assert 1 <= choice.chunks <= T and 1 <= chunks_for(T, B, 2 * H, m) <= T
    assert choice.algorithm == "bp" or choice.chunks >= 3


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
    with pytest.raises(OptionError, match="input_size is too small"):
        choose_recurrent_backward("rnn", 5, 5, 5, input_size=0)


def stack(n: int, size: int, batch: int, m: Machine) -> Chain:
    pattern = SparsityPattern.dense(size, size)
    return Chain((pattern,) * n, tuple(range(1, n + 1)), batch, np.dtype(np.float32), (False,) * n, m)


def test_one_worker_does_all_flops():
    chain = stack(37, 4, 3, machine(np, 1))
    for option in candidates(37, 5):
        options = {"up_levels": option.up_levels} if option.algorithm == "hybrid" else {"chunks": option.chunks}
        plan = plan_scan(chain.patterns, option.algorithm, **options, batch=3)
        assert stack_time(option, chain) == plan.flops


@pytest.mark.parametrize("name", ["linear", "blelloch"])
def test_more_workers_never_take_longer(name):
    waits = [stack_time(Candidate(name), stack(500, 8, 4, machine(np, w))) for w in (1, 2, 8, 64, 1024)]
    assert waits == sorted(waits, reverse=True)
    works = [(1000, 10, 1), (10, 1000, 2)]
    waits = [layers_time(works, machine(np, w)) for w in (1, 10, 100)]
    assert waits == [3 * START + 1010, 3 * START + 101, 3 * START + 100.1]
    assert layers_time(works, GPU) == 3 * LAUNCH + 100 + 0.01


def test_a_gpu_counts_the_start_of_kernels():
    long, short = stack(50_000, 20, 16, GPU), stack(100, 20, 16, GPU)
    assert stack_time(Candidate("linear"), short) < stack_time(Candidate("blelloch"), short)
    assert stack_time(Candidate("linear"), long) > stack_time(Candidate("blelloch"), long)


def test_candidates():
    names = [str(c) for c in candidates(21, 3)]
    assert names == ["linear", "chunked (chunks=3)", *(f"hybrid (up_levels={k})" for k in (1, 2, 3)), "blelloch"]
    assert [str(c) for c in candidates(1, 3)] == ["linear"]
    assert Candidate("hybrid", up_levels=2).arguments == "algorithm='hybrid', up_levels=2"
