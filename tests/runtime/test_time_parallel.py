"""A sequence cut between ranks: one worker's gradients, one map per rank at any length, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsebp as sb
from benchmarks.ranks import Counted
from runtime.cut_sequences import KINDS, Problem
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError, ShapeError, StaleError
from sparsebp.nn.recurrent.layers import Recurrent
from sparsebp.runtime.time_parallel import Stretch, TimeParallel, stretch, stretch_way_steps
from strategies import seeds


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    return Problem.random(draw(st.integers(1, 4)), draw(seeds))


@given(problem=problems())
@settings(max_examples=80)
def test_gradients_are_those_of_one_worker(problem: Problem) -> None:
    run_ranks(problem.ranks, problem.check)


@given(problem=problems())
@settings(max_examples=10)
def test_gradients_are_those_of_one_worker_in_float32(problem: Problem) -> None:
    run_ranks(problem.ranks, replace(problem, dtype=np.float32).check)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("layers", [1, 2])
def test_a_rank_sends_one_map_a_layer_whatever_the_length(kind: str, layers: int) -> None:
    batch, hidden, ranks = 3, 7, 4

    def sent(steps: int) -> list[Counted]:
        def work(transport: Transport) -> Counted:
            counted = Counted(transport)
            model = TimeParallel(KINDS[kind](2, hidden, layers, rng=0), counted, "maps")
            share = stretch(steps, transport)
            y, back = model.vjp(np.ones((share.stop - share.start, batch, 2), np.float32))
            _ = back(np.ones_like(y)).weights
            return counted

        return run_ranks(ranks, work)

    size = hidden * len(KINDS[kind](2, hidden).cell.states)
    for short, long in zip(sent(8), sent(301), strict=True):
        assert short.values == long.values
        assert long.values["exscan"] == layers * batch * size * (size + 1)
        assert long.values["isend"] == layers * batch * size * (long.rank != 0)
        assert long.values["allreduce"] == sum(p.size for p in KINDS[kind](2, hidden, layers).params.values())
        assert (long.calls["exscan"], long.calls["allreduce"]) == (layers, 1)
        assert long.calls.total() == layers + 1 + layers * (long.rank != 0)


def test_vectors_send_no_map() -> None:
    def work(transport: Transport) -> Counted:
        counted = Counted(transport)
        y, back = TimeParallel(sb.nn.RNN(2, 5, rng=0), counted, "vectors").vjp(np.ones((3, 4, 2), np.float32))
        _ = back(np.ones_like(y)).input
        return counted

    for counted in run_ranks(3, work):
        states, gradients = counted.rank != 0, counted.rank != 2
        assert counted.values == {"isend": 20 * (states + gradients)}


@pytest.mark.parametrize("kind", ["mingru", "minlstm"])
@pytest.mark.parametrize("bias", [0.0, -4.0, -30.0])
def test_ranks_that_start_from_zero_meet_one_workers_run(kind: str, bias: float) -> None:
    """Gates that forget soon, slowly, and not at all; a rank sends a vector a layer each way, whatever the length."""
    layer, steps, batch, hidden = KINDS[kind](2, 5, 2, rng=0), 1500, 3, 5
    for name in ("bias_ih_l0", "bias_ih_l1"):
        layer.params[name][:hidden] += bias
    rng = np.random.default_rng(0)
    x, gy = (rng.standard_normal((steps, batch, size), dtype=np.float32) for size in (2, hidden))
    y, back = layer.vjp(x)
    expected = back(gy)

    def work(transport: Transport) -> tuple[Any, ...]:
        counted, share = Counted(transport), stretch(steps, transport)
        model = TimeParallel(layer, counted)
        found, ranks_back = model.vjp(x[share])
        g = ranks_back(gy[share])
        gx = g.input
        assert counted.values["isend"] == 2 * batch * hidden * ((counted.rank > 0) + (counted.rank < 2))
        return share, found, gx, g.weights

    for share, found, gx, weights in run_ranks(3, work):
        np.testing.assert_allclose(found, y[share], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gx, expected.input[share], rtol=1e-4, atol=1e-5)
        for name, grad in expected.weights.items():
            np.testing.assert_allclose(weights[name], grad, rtol=1e-3, atol=1e-4 * np.abs(grad).max())


@given(steps=st.integers(0, 50), ranks=st.integers(1, 7))
def test_stretches_are_equal_but_for_one_step_and_rank_0_has_the_end(steps: int, ranks: int) -> None:
    class Place:
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, ranks

    found = [stretch(steps, Place(rank)) for rank in range(ranks)]  # type: ignore[arg-type]
    assert [i for one in found[::-1] for i in range(one.start, one.stop)] == list(range(steps))
    lengths = [one.stop - one.start for one in found]
    assert max(lengths) - min(lengths) <= 1


def on_ranks(ranks: int, work: Callable[[Transport, TimeParallel], Any], **options: Any) -> list[Any]:
    return run_ranks(
        ranks, lambda transport: work(transport, TimeParallel(sb.nn.GRU(2, 3, 2, **options, rng=0), transport))
    )


X = np.ones((4, 2, 2), np.float32)
STATE = np.ones((2, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda t, m: m.forward(X, STATE if t.rank == 0 else None), "h0 on rank 1 alone"),
        (lambda t, m: m.forward(X, lengths=[1, 2]), "Lengths are not supported"),
        (lambda t, m: m.vjp(X)[1](None, grad_h_n=STATE), "grad_h_n on rank 0 alone"),
    ],
)
def test_what_belongs_to_another_rank_is_refused(work: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        on_ranks(2, work)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ShapeError, match="gy has the wrong shape"):
        on_ranks(2, lambda t, m: m.vjp(X)[1](np.ones((4, 2, 5), np.float32)))
    with pytest.raises(ShapeError, match="sequence is empty"):
        on_ranks(3, lambda t, m: m.forward(X[:0]))
    with pytest.raises(ShapeError, match="at least one sample"):
        on_ranks(1, lambda t, m: m.forward(X[:, :0]))
    with pytest.raises(OptionError, match=r"Ranks differ in batch\. Expected 2, as on rank 0\. Got 1 on rank 1"):
        on_ranks(2, lambda t, m: m.forward(X[:, : 2 - t.rank].copy()))
    with pytest.raises(OptionError, match="dropout=0"):
        on_ranks(2, lambda t, m: m.forward(X), dropout=0.5)
    with pytest.raises(OptionError, match="bidirectional=False"):
        on_ranks(2, lambda t, m: None, bidirectional=True)
    with pytest.raises(OptionError, match=r"Expected an RNN, GRU, LSTM, MinGRU or MinLSTM\. Got Linear"):
        run_ranks(1, lambda t: TimeParallel(sb.nn.Linear(2, 3), t))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="way"):
        run_ranks(1, lambda t: TimeParallel(sb.nn.RNN(2, 3), t, "best"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ([sb.nn.RNN(2, 3, rng=0), sb.nn.GRU(2, 3, rng=0)], "cell"),
        ([sb.nn.RNN(2, 3, rng=0), sb.nn.RNN(2, 4, rng=0)], "the parameter weight_ih_l0"),
        ([sb.nn.RNN(2, 3, rng=0), sb.nn.RNN(2, 3, rng=1)], "the parameter weight_ih_l0"),
        ([sb.nn.RNN(2, 3, rng=0), sb.nn.RNN(2, 3, nonlinearity="relu", rng=0)], "nonlinearity"),
    ],
)
def test_layers_that_differ_are_refused(layers: list[Recurrent], name: str) -> None:
    with pytest.raises(OptionError, match=f"Ranks differ in {name}. .* on rank 1"):
        run_ranks(2, lambda transport: TimeParallel(layers[transport.rank], transport))


def test_dropout_of_a_layer_in_eval_is_none() -> None:
    def work(transport: Transport, model: TimeParallel) -> Array:
        model.layer.eval()
        return model.forward(X)[0]

    assert len(on_ranks(2, work, dropout=0.5)) == 2


def test_gradients_after_an_update_are_refused() -> None:
    def work(transport: Transport, model: TimeParallel) -> None:
        y, back = model.vjp(X)
        g = back(np.ones_like(y))
        model.layer.params["weight_hh_l0"] += 1
        _ = g.input

    with pytest.raises(StaleError):
        on_ranks(2, work)


def test_the_caller_may_write_to_its_arrays_after_the_call() -> None:
    def work(transport: Transport, model: TimeParallel, spoil: bool) -> Array:
        x, h0 = X.copy(), STATE.copy() if transport.rank == 1 else None
        y, back = model.vjp(x, h0)
        gy = np.ones_like(y)
        g = back(gy)
        if spoil:
            x[...] = y[...] = gy[...] = np.nan
            if h0 is not None:
                h0[...] = np.nan
        return np.concatenate([grad.reshape(-1) for grad in g.weights.values()])

    kept, spoilt = (on_ranks(2, lambda t, m, s=s: work(t, m, s))[0] for s in (False, True))  # type: ignore[misc]
    np.testing.assert_array_equal(kept, spoilt)


def test_auto_takes_maps_where_ranks_outweigh_their_work() -> None:
    one = Stretch(1.0, 3.0)
    for ranks, layers, way in (
        (1, 1, "vectors"),
        (2, 1, "vectors"),
        (3, 1, "vectors"),
        (5, 1, "maps"),
        (5, 9, "vectors"),
    ):
        steps = stretch_way_steps([one] * ranks, layers)
        assert min(steps, key=lambda name: steps[name]) == way, (ranks, layers)  # type: ignore[index]
    assert stretch_way_steps([one])["vectors"] == 1
    assert stretch_way_steps([one] * 4, 2) == {"vectors": 5, "maps": 8}


def test_auto_counts_steps() -> None:
    """A map of 21 rows takes some four steps at B = 1, so it pays from six ranks on."""

    def work(transport: Transport) -> tuple[str, str]:
        saved = TimeParallel(sb.nn.RNN(2, 20, workers=1, rng=0), transport).forward(np.ones((3, 1, 2), np.float32))[1]
        return saved.way, saved.reason

    for ranks, way in ((4, "vectors"), (8, "maps")):
        assert {found[0] for found in run_ranks(ranks, work)} == {way}
    assert "sequential steps on 8 ranks" in run_ranks(8, work)[0][1]
