"""GRU kernels on every backend: against NumPy and torch.nn, BPPSA Eq. 11, scan against sequential, bad input."""

from __future__ import annotations

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
from strategies import tolerance


def inputs(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return gx, w_hh, b_hn and h0 of a case."""
    gx = case.normal(case.steps, case.batch, 3 * case.hidden)
    return gx, case.weights(3), case.normal(case.hidden), case.normal(case.batch, case.hidden)


def saved(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return h, h0, gates and w_hh of a case, from the reference and rounded to the case's dtype."""
    gx, w_hh, b_hn, h0 = inputs(case)
    h, gates = reference.gru_forward(gx, w_hh, b_hn, h0)
    return h.astype(case.dtype), h0, gates.astype(case.dtype), w_hh


def forward(backend: Backend, *args: np.ndarray, projection: tuple[Any, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Return h and gates. `args` are x, w_hh, b_hn, h0."""
    steps, batch, hidden = *args[0].shape[:2], args[3].shape[1]
    h = backend.empty((steps, batch, hidden), args[0].dtype)
    gates = backend.empty((steps, batch, 4 * hidden), args[0].dtype)
    projection = tuple(None if array is None else backend.array(array) for array in projection)
    backend.kernels.gru_forward(*map(backend.array, args), h, gates, *projection)
    return backend.numpy(h), backend.numpy(gates)


def backward(
    backend: Backend, state: tuple[np.ndarray, ...], incoming: tuple[Any, Any], chunks: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return ga and gh0. `state` is h, h0, gates, w_hh."""
    h, h0, gates, _ = state
    ga, gh0 = backend.empty(gates.shape, h.dtype), backend.empty(h0.shape, h.dtype)
    arrays = [*map(backend.array, state), *(None if g is None else backend.array(g) for g in incoming)]
    backend.kernels.gru_backward(*arrays, ga, gh0, chunks)
    return backend.numpy(ga), backend.numpy(gh0)


def jacobians(backend: Backend, state: tuple[np.ndarray, ...]) -> np.ndarray:
    steps, batch, hidden = state[0].shape
    out = backend.empty((steps, hidden, hidden, batch), state[0].dtype)
    backend.kernels.gru_jacobians(*map(backend.array, state), out)
    return backend.numpy(out)


@given(data=st.data())
@settings(max_examples=40)
def test_gru_forward(backend: Backend, data: st.DataObject) -> None:
    case = data.draw(cases(backend))
    expected = reference.gru_forward(*inputs(case))
    for got, want in zip(forward(backend, *inputs(case)), expected, strict=True):
        np.testing.assert_allclose(got, want, **tolerance(case.dtype, 4))


@given(data=st.data())
@settings(max_examples=20)
def test_gru_maps_take_a_gradient_back_as_the_recursion_does(backend: Backend, data: st.DataObject) -> None:
    case = data.draw(cases(backend))
    state, (gy, last) = saved(case), case.incoming()
    chunks = data.draw(st.integers(1, case.steps))
    maps = backend.empty((chunks, case.batch, case.hidden + 1, case.hidden), case.dtype)
    arriving = None if gy is None else backend.array(gy)
    backend.kernels.gru_maps(*map(backend.array, state), arriving, maps)
    _, expected = reference.gru_backward(*state, gy, last)
    found = through_maps(backend.numpy(maps), last)
    np.testing.assert_allclose(found, expected, **tolerance(case.dtype, 4 * case.steps))


@given(data=st.data())
@settings(max_examples=40)
def test_gru_forward_of_the_input_itself(backend: Backend, data: st.DataObject) -> None:
    """Of few features, for lengths around the rounds in which a device reads it; the projection gives the same."""
    case = data.draw(input_cases(backend, streamed=50))
    x, *projection = projections(data, case, 3)
    gx, (_, *rest) = project(x, *projection, both=2 * case.hidden), inputs(case)
    expected = reference.gru_forward(gx, *rest)
    for found in (forward(backend, x, *rest, projection=tuple(projection)), forward(backend, gx, *rest)):
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, want, **tolerance(case.dtype, 8))


@given(data=st.data())
@settings(max_examples=40)
def test_gru_backward(backend: Backend, data: st.DataObject) -> None:
    case = data.draw(cases(backend))
    state = saved(case)
    expected = reference.gru_backward(*state, *case.incoming())
    for got, want in zip(backward(backend, state, case.incoming()), expected, strict=True):
        np.testing.assert_allclose(got, want, **tolerance(case.dtype, 4))


@given(data=st.data())
@settings(max_examples=40)
def test_gru_scan_backward_equals_sequential(backend: Backend, data: st.DataObject) -> None:
    case = data.draw(cases(backend))
    chunks = data.draw(st.one_of(st.sampled_from([1, case.steps]), st.integers(1, case.steps)))
    state = saved(case)
    expected = reference.gru_backward(*state, *case.incoming())
    for got, want in zip(backward(backend, state, case.incoming(), chunks), expected, strict=True):
        np.testing.assert_allclose(got, want, **tolerance(case.dtype, 8))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("hidden", [20, 40, 50])
def test_gru_backward_of_every_number_of_rounds(backend: Backend, hidden: int, chunks: int) -> None:
    """Device kernels load values in rounds of steps: whole rounds, and every rest."""
    for steps in (*range(4, 18), 27) if hidden == 20 else (7, 27):
        case = Case(steps, 2, hidden, np.dtype(np.float32), steps % 3 > 0, steps % 3 < 2, steps)
        state = saved(case)
        expected = reference.gru_backward(*state, *case.incoming())
        for got, want in zip(backward(backend, state, case.incoming(), chunks), expected, strict=True):
            np.testing.assert_allclose(got, want, **tolerance(case.dtype, 8), err_msg=f"{steps} steps")


SUMMED = [  # hidden, features, steps, chunks: summed inside where there is room, else by products
    (1, 1, 5, 1), (7, 3, 41, 2), (20, 1, 40, 1), (20, 8, 23, 4), (20, 4, 9, 3), (23, 2, 7, 2), (20, 9, 6, 3),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("has_gy", [True, False])
@pytest.mark.parametrize("sizes", SUMMED)
def test_gru_weight_sums(backend: Backend, sizes: tuple[int, int, int, int], has_gy: bool, dtype: Any) -> None:
    """Weight gradients with ga and without, with biases and without; bitwise the same every time."""
    hidden, features, steps, chunks = sizes
    case = Case(steps, 3, hidden, np.dtype(dtype), has_gy, True, 4)
    state = saved(case)
    h, h0 = state[:2]
    x, before = case.normal(steps, 3, features), np.concatenate([h0[None], h[:-1]])
    incoming = case.incoming()
    expected_ga, expected_gh0 = reference.gru_backward(*state, *incoming)
    arrays = [*map(backend.array, state), *(None if g is None else backend.array(g) for g in incoming)]
    expected = reference.weight_sums(expected_ga, 3, x, before)

    def run(ga: Any, bias: bool = True) -> dict[str, np.ndarray]:
        sums, gh0 = reference.empty_sums(backend, 3, x, before, bias), backend.empty((3, hidden), dtype)
        backend.kernels.gru_backward(*arrays, ga, gh0, chunks, sums)
        np.testing.assert_allclose(backend.numpy(gh0), expected_gh0, **tolerance(case.dtype, 8))
        return {name: backend.numpy(a) for name, a in sums._asdict().items() if name in expected and a is not None}

    written = backend.empty((steps, 3, 4 * hidden), dtype)
    first, second, without_bias = run(None), run(written), run(None, bias=False)
    assert without_bias.keys() == {"weight_ih", "weight_hh"}
    for name, want in expected.items():
        np.testing.assert_allclose(first[name], want, **tolerance(case.dtype, 40), err_msg=name)
        np.testing.assert_array_equal(second[name], first[name], err_msg=name)
        np.testing.assert_array_equal(without_bias.get(name, first[name]), first[name], err_msg=name)
    np.testing.assert_allclose(backend.numpy(written), expected_ga, **tolerance(case.dtype, 8))


def test_gru_weight_sums_of_no_samples_are_zero(backend: Backend) -> None:
    x, before, w_hh = np.zeros((4, 0, 2), np.float32), np.zeros((4, 0, 5), np.float32), np.ones((15, 5), np.float32)
    sums, gh0 = reference.empty_sums(backend, 3, x, before), backend.empty((0, 5), np.float32)
    h, w_hh = backend.array(before), backend.array(w_hh)
    backend.kernels.gru_backward(
        h, backend.array(before[0]), backend.array(np.zeros((4, 0, 20), np.float32)), w_hh, h, None, None, gh0, 2, sums
    )
    for array in sums[2:]:
        np.testing.assert_array_equal(backend.numpy(array), 0)


def test_gru_ga_is_needed_without_sums(backend: Backend) -> None:
    args = {k: backend.array(v) if isinstance(v, np.ndarray) else v for k, v in arguments()["gru_backward"].items()}
    with pytest.raises(OptionError, match="ga is missing"):
        backend.kernels.gru_backward(**(args | {"ga": None}))


@given(data=st.data())
@settings(max_examples=20)
def test_bppsa_eq_11_gru_transposed_jacobian(backend: Backend, data: st.DataObject) -> None:
    """``W_hnᵀ·diag(r j6 j7) + W_hrᵀ·diag(j2 j3 j6 j7) + W_hzᵀ·diag(j9 j10) + diag(z)``."""
    case = data.draw(cases(backend))
    state = saved(case)
    got = jacobians(backend, state)
    h, h0, gates, w_hh = (a.astype(np.float64) for a in state)
    w_hr, w_hz, w_hn = np.split(w_hh, 3)
    for t in range(case.steps):
        for b in range(case.batch):
            r, z, n, inner = np.split(gates[t, b], 4)
            j2, j3, j6, j7 = r * (1 - r), inner, 1 - n * n, 1 - z
            j9, j10 = z * (1 - z), (h[t - 1, b] if t else h0[b]) - n
            expected = (
                w_hn.T @ np.diag(r * j6 * j7)
                + w_hr.T @ np.diag(j2 * j3 * j6 * j7)
                + w_hz.T @ np.diag(j9 * j10)
                + np.diag(z)
            )
            np.testing.assert_allclose(got[t, :, :, b], expected, **tolerance(case.dtype))


@pytest.mark.parametrize("hidden", [20, 128])
def test_gru_against_torch_nn(backend: Backend, hidden: int) -> None:
    torch = pytest.importorskip("torch")
    steps, batch = (3, 2) if backend.emulated else (11, 5)
    case = Case(steps, batch, hidden, np.dtype(np.float64), True, True, 3)
    x, h0, (gy, grad_h_n) = case.normal(steps, batch, 3), case.normal(batch, hidden), case.incoming()
    model = torch.nn.GRU(3, hidden, dtype=torch.float64)
    tx, th0 = torch.tensor(x, requires_grad=True), torch.tensor(h0[None], requires_grad=True)
    y, h_n = model(tx, th0)
    torch.autograd.backward([y, h_n], [torch.tensor(gy), torch.tensor(grad_h_n[None])])
    w_ih, w_hh, b_ih, b_hh = (value.detach().numpy() for value in model.parameters())

    gx = x @ w_ih.T + b_ih
    gx[..., : 2 * hidden] += b_hh[: 2 * hidden]
    h, gates = forward(backend, gx, w_hh, b_hh[2 * hidden :], h0)
    np.testing.assert_allclose(h, y.detach().numpy(), rtol=1e-11, atol=1e-12)
    before = np.concatenate([h0[None], h[:-1]])
    for chunks in (1, 3):
        ga, gh0 = backward(backend, (h, h0, gates, w_hh), (gy, grad_h_n), chunks)
        at_x = np.roll(ga[..., : 3 * hidden], -hidden, axis=-1)  # n, r, z -> r, z, n
        np.testing.assert_allclose(at_x @ w_ih, tx.grad.numpy(), rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(gh0, th0.grad.numpy()[0], rtol=1e-10, atol=1e-11)
        g_w = np.einsum("tbi,tbj->ij", ga[..., hidden:], before)
        np.testing.assert_allclose(g_w, model.weight_hh_l0.grad.numpy(), rtol=1e-10, atol=1e-11)
        g_b = ga[..., hidden:].sum(axis=(0, 1))
        np.testing.assert_allclose(g_b, model.bias_hh_l0.grad.numpy(), rtol=1e-10, atol=1e-11)

    got = jacobians(backend, (h, h0, gates, w_hh))
    cell = torch.nn.GRUCell(3, hidden, dtype=torch.float64)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in model.state_dict().items()})
    for step in (0, steps - 1):
        jacobian = torch.autograd.functional.jacobian(
            lambda state, step=step: cell(tx[step, 0].detach(), state), torch.tensor(before[step, 0])
        )
        np.testing.assert_allclose(got[step, :, :, 0], jacobian.numpy().T, rtol=1e-11, atol=1e-12)


def test_gru_batch_of_zero(backend: Backend) -> None:
    empty, w_hh = np.zeros((4, 0, 5), np.float32), np.zeros((15, 5), np.float32)
    h, gates = forward(backend, np.zeros((4, 0, 15), np.float32), w_hh, np.zeros(5, np.float32), empty[0])
    for chunks in (1, 4):
        ga, gh0 = backward(backend, (h, empty[0], gates, w_hh), (empty, None), chunks)
        assert ga.shape == (4, 0, 20)
        assert gh0.shape == (0, 5)
    assert jacobians(backend, (h, empty[0], gates, w_hh)).shape == (4, 5, 5, 0)


def test_gru_nan_stays_in_its_sample(backend: Backend) -> None:
    gx, w_hh = np.ones((3, 5, 21), np.float32), np.full((21, 7), 0.1, np.float32)
    gx[1, 4, 2] = np.nan
    h, gates = forward(backend, gx, w_hh, np.zeros(7, np.float32), np.zeros((5, 7), np.float32))
    assert np.isnan(h[1, 4, 2])
    assert np.isnan(h[2, 4]).all()
    assert np.isfinite(h[:, :4]).all()
    assert np.isfinite(gates[0]).all()


def test_gru_saturates_without_overflow(backend: Backend) -> None:
    gx, w_hh = np.full((2, 1, 9), 1e4, np.float32), np.zeros((9, 3), np.float32)
    gx[:, :, 3:6] = -1e4
    h, gates = forward(backend, gx, w_hh, np.zeros(3, np.float32), np.zeros((1, 3), np.float32))
    np.testing.assert_allclose(gates[0, 0], [1] * 3 + [0] * 3 + [1] * 3 + [0] * 3, atol=1e-37)
    np.testing.assert_array_equal(h, np.ones_like(h))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gru_repeats_bitwise(backend: Backend, dtype: Any) -> None:
    case = Case(5, 3, 20, np.dtype(dtype), True, True, 1)
    for chunks in (1, 3):
        first, second = (backward(backend, saved(case), case.incoming(), chunks) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(most_threads() < 2, reason="needs two threads")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gru_is_bitwise_equal_for_every_number_of_threads(dtype: Any) -> None:
    backend = Backend("host", np)
    case = Case(29, 13, 33, np.dtype(dtype), True, True, 2)
    _, w_hh, _, h0 = inputs(case)
    results, before = [], get_threads()
    try:
        for threads in (1, 2):
            set_threads(threads)
            h, gates = forward(backend, *inputs(case))
            state = (h, h0, gates, w_hh)
            found = [h, gates, jacobians(backend, state), *backward(backend, state, case.incoming())]
            results.append([*found, *backward(backend, state, case.incoming(), 5)])
    finally:
        set_threads(before)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("hidden", [1, 20, 33])
def test_gru_writes_its_outputs_and_nothing_beyond(hidden: int) -> None:
    case = Case(4, 3, hidden, np.dtype(np.float32), True, False, 5)
    guarded = []

    def output(*shape: int) -> np.ndarray:
        flat = np.full(int(np.prod(shape)) + 128, 7.0, np.float32)
        guarded.append(flat)
        flat[64:-64] = np.nan
        return flat[64:-64].reshape(shape)

    k = kernels.get(np)
    h, gates, ga = output(4, 3, hidden), output(4, 3, 4 * hidden), output(4, 3, 4 * hidden)
    gh0, out = output(3, hidden), output(4, hidden, hidden, 3)
    gx, w_hh, b_hn, h0 = inputs(case)
    k.gru_forward(gx, w_hh, b_hn, h0, h, gates)
    for chunks in (1, 4):
        k.gru_backward(h, h0, gates, w_hh, case.incoming()[0], None, ga, gh0, chunks)
    k.gru_jacobians(h, h0, gates, w_hh, out)
    for flat in guarded:
        assert np.isfinite(flat).all()
        assert (flat[:64] == 7).all()
        assert (flat[-64:] == 7).all()


def arguments() -> dict[str, dict[str, Any]]:
    """Return valid arguments of every GRU kernel."""
    h, w_hh, h0, gates = np.zeros((4, 2, 5)), np.zeros((15, 5)), np.zeros((2, 5)), np.zeros((4, 2, 20))
    state = {"h": h, "h0": h0, "gates": gates, "w_hh": w_hh}
    back = {**state, "gy": h, "grad_h_n": h0, "ga": gates, "gh0": h0, "chunks": 2}
    gx = np.zeros((4, 2, 15))
    return {
        "gru_forward": {"x": gx, "w_hh": w_hh, "b_hn": np.zeros(5), "h0": h0, "h": h, "gates": gates},
        "gru_backward": back,
        "gru_jacobians": {**state, "out": np.zeros((4, 5, 5, 2))},
        "gru_maps": {**state, "gy": h, "maps": np.zeros((3, 2, 6, 5))},
    }


@pytest.mark.parametrize("name", list(arguments()))
def test_gru_arguments_are_checked(backend: Backend, name: str) -> None:
    assert_arguments_are_checked(backend, name, arguments()[name])


def test_gru_projections_are_checked(backend: Backend) -> None:
    projection = {"w_ih": np.zeros((15, 2)), "b_ih": np.zeros(15), "b_hh": np.zeros(15)}
    args = arguments()["gru_forward"] | {"x": np.zeros((4, 2, 2))}
    assert_arguments_are_checked(backend, "gru_forward", args | projection)
    with pytest.raises(OptionError, match="Expected w_ih with b_ih and b_hh"):
        backend.kernels.gru_forward(**{k: backend.array(v) for k, v in (args | projection).items() if k != "w_ih"})


def test_gru_chunks_are_checked(backend: Backend) -> None:
    args = {k: backend.array(v) if isinstance(v, np.ndarray) else v for k, v in arguments()["gru_backward"].items()}
    for chunks in (0, -1, 5):
        with pytest.raises(OptionError, match=r"1 <= chunks <= T = 4"):
            backend.kernels.gru_backward(**{**args, "chunks": chunks})


def test_gru_empty_sequences_are_refused(backend: Backend) -> None:
    with pytest.raises(ShapeError, match="empty sequences are not allowed"):
        forward(backend, np.zeros((0, 2, 15)), np.zeros((15, 5)), np.zeros(5), np.zeros((2, 5)))
