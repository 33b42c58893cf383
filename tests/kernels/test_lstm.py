"""LSTM kernels on every backend: against NumPy and torch.nn, Jacobians, scan against sequential, bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recurrent_reference as reference
from backends import Backend
from recurrent_reference import (
    Case,
    assert_arguments_are_checked,
    cases,
    input_cases,
    project,
    projections,
    through_maps,
)
from sparsebp import kernels
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.threads import get_threads, most_threads, set_threads
from sparsebp.patterns import lstm_pattern
from strategies import tolerance


def compiled(backend: Backend, case: Case) -> Case:
    """Return a case of one of the parity test's sizes where each size is compiled for the CPU executor."""
    return replace(case, hidden={1: 5, 20: 20}.get(case.hidden, 37)) if backend.emulated else case


def inputs(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return gx, w_hh, h0 and c0 of a case."""
    starts = replace(case, seed=case.seed ^ 1).normal(case.batch, case.hidden)
    return (
        case.normal(case.steps, case.batch, 4 * case.hidden), case.weights(4), case.normal(case.batch, case.hidden),
        starts,
    )  # fmt: skip


def saved(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return c, c0, gates and w_hh of a case, from the reference and rounded to the case's dtype."""
    gx, w_hh, h0, c0 = inputs(case)
    _, c, gates = reference.lstm_forward(gx, w_hh, h0, c0)
    return c.astype(case.dtype), c0, gates.astype(case.dtype), w_hh


def incoming(case: Case) -> tuple[Any, Any, Any]:
    """Return gy, grad_h_n and grad_c_n, None where the case has none; c's is there where the seed is even."""
    gy, last = case.incoming()
    return gy, last, replace(case, seed=case.seed + 3).normal(case.batch, case.hidden) if case.seed % 2 == 0 else None


def forward(backend: Backend, *args: np.ndarray, projection: tuple[Any, ...] = ()) -> tuple[np.ndarray, ...]:
    """Return h, c and gates. `args` are x, w_hh, h0, c0."""
    steps, batch, hidden = *args[0].shape[:2], args[2].shape[1]
    h, c = (backend.empty((steps, batch, hidden), args[0].dtype) for _ in range(2))
    gates = backend.empty((steps, batch, 4 * hidden), args[0].dtype)
    projection = tuple(None if array is None else backend.array(array) for array in projection)
    backend.kernels.lstm_forward(*map(backend.array, args), h, c, gates, *projection)
    return backend.numpy(h), backend.numpy(c), backend.numpy(gates)


def backward(
    backend: Backend, state: tuple[np.ndarray, ...], arriving: tuple[Any, ...], chunks: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ga, gh0 and gc0. `state` is c, c0, gates, w_hh."""
    _, c0, gates, _ = state
    ga, gh0, gc0 = (backend.empty(a.shape, a.dtype) for a in (gates, c0, c0))
    arrays = [*map(backend.array, state), *(None if g is None else backend.array(g) for g in arriving)]
    backend.kernels.lstm_backward(*arrays, ga, gh0, gc0, chunks)
    return backend.numpy(ga), backend.numpy(gh0), backend.numpy(gc0)


def jacobians(backend: Backend, state: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return the transposed Jacobians as dense matrices, (T, 2H, 2H, B)."""
    steps, batch, hidden = state[0].shape
    out = backend.empty((steps, 2 * hidden * (hidden + 1), batch), state[0].dtype)
    backend.kernels.lstm_jacobians(*map(backend.array, state), out)
    pattern = lstm_pattern(hidden)
    dense = np.zeros((steps, *pattern.shape, batch), state[0].dtype)
    dense[:, pattern.row_of_entry, pattern.indices] = backend.numpy(out)
    return dense


@given(data=st.data())
@settings(max_examples=25)
def test_lstm_forward(backend: Backend, data: st.DataObject) -> None:
    case = compiled(backend, data.draw(cases(backend)))
    expected = reference.lstm_forward(*inputs(case))
    for got, want in zip(forward(backend, *inputs(case)), expected, strict=True):
        np.testing.assert_allclose(got, want, **tolerance(case.dtype, 4))


@given(data=st.data())
@settings(max_examples=20)
def test_lstm_forward_of_the_input_itself(backend: Backend, data: st.DataObject) -> None:
    """Of few features, for lengths around the rounds in which a device reads it; the projection gives the same."""
    case = compiled(backend, data.draw(input_cases(backend, streamed=50)))
    few = {5: (2, 3), 20: (1,), 37: (5, 8)}[case.hidden] if backend.emulated else (1, 2, 4, 5, 8)
    x, *projection = projections(data, case, 4, few)
    gx, (_, *rest) = project(x, *projection, both=4 * case.hidden), inputs(case)
    expected = reference.lstm_forward(gx, *rest)
    for found in (forward(backend, x, *rest, projection=tuple(projection)), forward(backend, gx, *rest)):
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, want, **tolerance(case.dtype, 8))


@given(data=st.data())
@settings(max_examples=40)
def test_lstm_backward_by_the_recursion_and_by_the_scan(backend: Backend, data: st.DataObject) -> None:
    case = compiled(backend, data.draw(cases(backend)))
    chunks = data.draw(st.one_of(st.sampled_from([1, case.steps]), st.integers(1, case.steps)))
    state = saved(case)
    expected = reference.lstm_backward(*state, *incoming(case))
    for got, want in zip(backward(backend, state, incoming(case), chunks), expected, strict=True):
        np.testing.assert_allclose(got, want, **tolerance(case.dtype, 8))


@given(data=st.data())
@settings(max_examples=20)
def test_lstm_maps_take_a_gradient_back_as_the_recursion_does(backend: Backend, data: st.DataObject) -> None:
    case = compiled(backend, data.draw(cases(backend)))
    state, (gy, at_h, at_c) = saved(case), incoming(case)
    chunks, size = data.draw(st.integers(1, case.steps)), 2 * case.hidden
    maps = backend.empty((chunks, case.batch, size + 1, size), case.dtype)
    arriving = None if gy is None else backend.array(gy)
    backend.kernels.lstm_maps(*map(backend.array, state), arriving, maps)
    zero = np.zeros((case.batch, case.hidden))
    last = np.concatenate([zero if g is None else g for g in (at_h, at_c)], axis=1)
    _, *expected = reference.lstm_backward(*state, gy, at_h, at_c)
    found = through_maps(backend.numpy(maps), last)
    np.testing.assert_allclose(found, np.concatenate(expected, axis=1), **tolerance(case.dtype, 4 * case.steps))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("hidden", [20, 37])
def test_lstm_backward_of_every_number_of_rounds(backend: Backend, hidden: int, chunks: int) -> None:
    """Device kernels load values in rounds of steps: whole rounds, and every rest."""
    for steps in (*range(4, 18), 27) if hidden == 20 else (7, 27):
        case = Case(steps, 2, hidden, np.dtype(np.float32), steps % 3 > 0, steps % 3 < 2, steps)
        state = saved(case)
        expected = reference.lstm_backward(*state, *incoming(case))
        for got, want in zip(backward(backend, state, incoming(case), chunks), expected, strict=True):
            np.testing.assert_allclose(got, want, **tolerance(case.dtype, 8), err_msg=f"{steps} steps")


SUMMED = [(5, 3, 41, 2), (16, 1, 23, 4), (20, 9, 6, 3)]
"""hidden, features, steps, chunks: summed inside where there is room, else by products."""


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("has_gy", [True, False])
@pytest.mark.parametrize("sizes", SUMMED)
def test_lstm_weight_sums(backend: Backend, sizes: tuple[int, int, int, int], has_gy: bool, dtype: Any) -> None:
    """Weight gradients with ga and without, with biases and without; bitwise the same every time."""
    hidden, features, steps, chunks = sizes
    case = Case(steps, 3, hidden, np.dtype(dtype), has_gy, True, 4)
    state, arriving = saved(case), incoming(case)
    x, before = case.normal(steps, 3, features), np.tanh(case.normal(steps, 3, hidden))
    expected_ga, *expected_initial = reference.lstm_backward(*state, *arriving)
    arrays = [*map(backend.array, state), *(None if g is None else backend.array(g) for g in arriving)]
    expected = reference.weight_sums(expected_ga, 4, x, before)

    def run(ga: Any, bias: bool = True) -> dict[str, np.ndarray]:
        sums = reference.empty_sums(backend, 4, x, before, bias)
        initial = [backend.empty((3, hidden), dtype) for _ in range(2)]
        backend.kernels.lstm_backward(*arrays, ga, *initial, chunks, sums)
        for got, want in zip(initial, expected_initial, strict=True):
            np.testing.assert_allclose(backend.numpy(got), want, **tolerance(case.dtype, 8))
        return {name: backend.numpy(a) for name, a in sums._asdict().items() if name in expected and a is not None}

    written = backend.empty((steps, 3, 4 * hidden), dtype)
    first, second, without_bias = run(None), run(written), run(None, bias=False)
    assert without_bias.keys() == {"weight_ih", "weight_hh"}
    for name, want in expected.items():
        np.testing.assert_allclose(first[name], want, **tolerance(case.dtype, 40), err_msg=name)
        np.testing.assert_array_equal(second[name], first[name], err_msg=name)
        np.testing.assert_array_equal(without_bias.get(name, first[name]), first[name], err_msg=name)
    np.testing.assert_allclose(backend.numpy(written), expected_ga, **tolerance(case.dtype, 8))


def test_lstm_ga_is_needed_without_sums(backend: Backend) -> None:
    args = {k: backend.array(v) if isinstance(v, np.ndarray) else v for k, v in arguments()["lstm_backward"].items()}
    with pytest.raises(OptionError, match="ga is missing"):
        backend.kernels.lstm_backward(**(args | {"ga": None}))


@given(data=st.data())
@settings(max_examples=15)
def test_lstm_jacobians_by_their_blocks(backend: Backend, data: st.DataObject) -> None:
    """From h: ``Wᵀ · diag`` of the gates; from c: diagonals."""
    case = compiled(backend, data.draw(cases(backend)))
    state = saved(case)
    got = jacobians(backend, state)
    c, c0, gates, w_hh = (a.astype(np.float64) for a in state)
    w = np.split(w_hh, 4)
    for t in range(case.steps):
        for b in range(case.batch):
            i, f, g, o = np.split(gates[t, b], 4)
            before, seen = c[t - 1, b] if t else c0[b], np.tanh(c[t, b])
            slopes = [g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)]
            to_c = sum(part.T @ np.diag(slope) for part, slope in zip(w, slopes, strict=False))
            through = np.diag(o * (1 - seen * seen))
            to_h = to_c @ through + w[3].T @ np.diag(seen * o * (1 - o))
            expected = np.block([[to_h, to_c], [np.diag(f) @ through, np.diag(f)]])
            np.testing.assert_allclose(got[t, :, :, b], expected, **tolerance(case.dtype, 2))


@pytest.mark.parametrize("hidden", [20, 128])
def test_lstm_against_torch_nn(backend: Backend, hidden: int) -> None:
    torch = pytest.importorskip("torch")
    steps, batch = (3, 2) if backend.emulated else (11, 5)
    case = Case(steps, batch, hidden, np.dtype(np.float64), True, True, 2)
    x, (_, _, h0, c0), (gy, grad_h_n, grad_c_n) = case.normal(steps, batch, 3), inputs(case), incoming(case)
    model = torch.nn.LSTM(3, hidden, dtype=torch.float64)
    tx, th0, tc0 = (torch.tensor(a, requires_grad=True) for a in (x, h0[None], c0[None]))
    y, (h_n, c_n) = model(tx, (th0, tc0))
    torch.autograd.backward([y, h_n, c_n], [torch.tensor(g) for g in (gy, grad_h_n[None], grad_c_n[None])])
    w_ih, w_hh, b_ih, b_hh = (value.detach().numpy() for value in model.parameters())

    h, c, gates = forward(backend, x @ w_ih.T + b_ih + b_hh, w_hh, h0, c0)
    np.testing.assert_allclose(h, y.detach().numpy(), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(c[-1], c_n.detach().numpy()[0], rtol=1e-11, atol=1e-12)
    before = np.concatenate([h0[None], h[:-1]])
    for chunks in (1, 3):
        ga, gh0, gc0 = backward(backend, (c, c0, gates, w_hh), (gy, grad_h_n, grad_c_n), chunks)
        np.testing.assert_allclose(ga @ w_ih, tx.grad.numpy(), rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(gh0, th0.grad.numpy()[0], rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(gc0, tc0.grad.numpy()[0], rtol=1e-10, atol=1e-11)
        g_w = np.einsum("tbi,tbj->ij", ga, before)
        np.testing.assert_allclose(g_w, model.weight_hh_l0.grad.numpy(), rtol=1e-10, atol=1e-11)

    got = jacobians(backend, (c, c0, gates, w_hh))
    cell = torch.nn.LSTMCell(3, hidden, dtype=torch.float64)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in model.state_dict().items()})
    step = steps - 1

    def next_state(state: Any) -> Any:
        return torch.cat(cell(tx[step, 0].detach(), (state[:hidden], state[hidden:])))

    state = torch.tensor(np.concatenate([before[step, 0], c[step - 1, 0]]))
    jacobian = torch.autograd.functional.jacobian(next_state, state)
    np.testing.assert_allclose(got[step, :, :, 0], jacobian.numpy().T, rtol=1e-11, atol=1e-12)


def test_lstm_batch_of_zero(backend: Backend) -> None:
    empty, w_hh = np.zeros((4, 0, 5), np.float32), np.zeros((20, 5), np.float32)
    _, c, gates = forward(backend, np.zeros((4, 0, 20), np.float32), w_hh, empty[0], empty[0])
    for chunks in (1, 4):
        ga, gh0, gc0 = backward(backend, (c, empty[0], gates, w_hh), (empty, None, None), chunks)
        assert (ga.shape, gh0.shape, gc0.shape) == ((4, 0, 20), (0, 5), (0, 5))
    assert jacobians(backend, (c, empty[0], gates, w_hh)).shape == (4, 10, 10, 0)
    sums, initial = reference.empty_sums(backend, 4, empty, empty), [backend.empty((0, 5), np.float32) for _ in "hc"]
    arrays = [backend.array(a) for a in (c, empty[0], gates, w_hh)]
    backend.kernels.lstm_backward(*arrays, None, None, None, None, *initial, 2, sums)
    for array in sums[2:]:
        np.testing.assert_array_equal(backend.numpy(array), 0)


def test_lstm_nan_stays_in_its_sample(backend: Backend) -> None:
    gx, w_hh = np.ones((3, 5, 28), np.float32), np.full((28, 7), 0.1, np.float32)
    gx[1, 4, 2] = np.nan
    start = np.zeros((5, 7), np.float32)
    h, c, gates = forward(backend, gx, w_hh, start, start)
    assert np.isnan(h[1, 4, 2])
    assert np.isnan(h[2, 4]).all()
    assert np.isfinite(h[:, :4]).all()
    assert np.isfinite(c[:, :4]).all()
    assert np.isfinite(gates[0]).all()


def test_lstm_saturates_without_overflow(backend: Backend) -> None:
    gx, w_hh = np.full((2, 1, 12), 1e4, np.float32), np.zeros((12, 3), np.float32)
    gx[:, :, 3:6] = -1e4
    start = np.ones((1, 3), np.float32)
    _, c, gates = forward(backend, gx, w_hh, start, start)
    np.testing.assert_allclose(gates[0, 0], [1] * 3 + [0] * 3 + [1] * 6, atol=1e-37)
    np.testing.assert_array_equal(c, np.ones_like(c))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lstm_repeats_bitwise(backend: Backend, dtype: Any) -> None:
    case = Case(5, 3, 20, np.dtype(dtype), True, True, 2)
    for chunks in (1, 3):
        first, second = (backward(backend, saved(case), incoming(case), chunks) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(most_threads() < 2, reason="needs two threads")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lstm_is_bitwise_equal_for_every_number_of_threads(dtype: Any) -> None:
    backend = Backend("host", np)
    case = Case(29, 13, 33, np.dtype(dtype), True, True, 2)
    results, before = [], get_threads()
    try:
        for threads in (1, 2):
            set_threads(threads)
            found = list(forward(backend, *inputs(case)))
            state = (found[1], inputs(case)[3], found[2], inputs(case)[1])
            found += [jacobians(backend, state), *backward(backend, state, incoming(case))]
            results.append([*found, *backward(backend, state, incoming(case), 5)])
    finally:
        set_threads(before)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("hidden", [1, 20, 33])
def test_lstm_writes_its_outputs_and_nothing_beyond(hidden: int) -> None:
    case = Case(4, 3, hidden, np.dtype(np.float32), True, False, 5)
    guarded = []

    def output(*shape: int) -> np.ndarray:
        flat = np.full(int(np.prod(shape)) + 128, 7.0, np.float32)
        guarded.append(flat)
        flat[64:-64] = np.nan
        return flat[64:-64].reshape(shape)

    k = kernels.get(np)
    h, c, gates, ga = (output(4, 3, width * hidden) for width in (1, 1, 4, 4))
    gh0, gc0 = output(3, hidden), output(3, hidden)
    gx, w_hh, h0, c0 = inputs(case)
    k.lstm_forward(gx, w_hh, h0, c0, h, c, gates)
    for chunks in (1, 4):
        k.lstm_backward(c, c0, gates, w_hh, incoming(case)[0], None, None, ga, gh0, gc0, chunks)
    k.lstm_jacobians(c, c0, gates, w_hh, output(4, 2 * hidden * (hidden + 1), 3))
    k.lstm_maps(c, c0, gates, w_hh, None, output(3, 3, 2 * hidden + 1, 2 * hidden))
    for flat in guarded:
        assert np.isfinite(flat).all()
        assert (flat[:64] == 7).all()
        assert (flat[-64:] == 7).all()


def arguments() -> dict[str, dict[str, Any]]:
    """Return valid arguments of every LSTM kernel."""
    h, w_hh, start, gates = np.zeros((4, 2, 5)), np.zeros((20, 5)), np.zeros((2, 5)), np.zeros((4, 2, 20))
    state = {"c": h, "c0": start, "gates": gates, "w_hh": w_hh}
    last, initial = {"grad_h_n": start, "grad_c_n": start}, {"gh0": start.copy(), "gc0": start.copy()}
    first = {"x": gates.copy(), "w_hh": w_hh, "h0": start, "c0": start}
    return {
        "lstm_forward": {**first, "h": h, "c": h.copy(), "gates": gates},
        "lstm_backward": {**state, "gy": h, **last, "ga": gates.copy(), **initial, "chunks": 2},
        "lstm_jacobians": {**state, "out": np.zeros((4, 60, 2))},
        "lstm_maps": {**state, "gy": h, "maps": np.zeros((3, 2, 11, 10))},
    }


@pytest.mark.parametrize("name", list(arguments()))
def test_lstm_arguments_are_checked(backend: Backend, name: str) -> None:
    assert_arguments_are_checked(backend, name, arguments()[name])


def test_lstm_projections_are_checked(backend: Backend) -> None:
    projection = {"w_ih": np.zeros((20, 2)), "b_ih": np.zeros(20), "b_hh": np.zeros(20)}
    args = arguments()["lstm_forward"] | {"x": np.zeros((4, 2, 2))}
    assert_arguments_are_checked(backend, "lstm_forward", args | projection)
    with pytest.raises(OptionError, match="Expected w_ih with b_ih and b_hh"):
        backend.kernels.lstm_forward(**{k: backend.array(v) for k, v in (args | projection).items() if k != "w_ih"})


def test_lstm_chunks_are_checked(backend: Backend) -> None:
    args = {k: backend.array(v) if isinstance(v, np.ndarray) else v for k, v in arguments()["lstm_backward"].items()}
    for chunks in (0, -1, 5):
        with pytest.raises(OptionError, match=r"1 <= chunks <= T = 4"):
            backend.kernels.lstm_backward(**{**args, "chunks": chunks})


def test_lstm_empty_sequences_are_refused(backend: Backend) -> None:
    with pytest.raises(ShapeError, match="empty sequences are not allowed"):
        forward(backend, np.zeros((0, 2, 20)), np.zeros((20, 5)), np.zeros((2, 5)), np.zeros((2, 5)))
