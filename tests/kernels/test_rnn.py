"""RNN kernels on every backend: against NumPy and torch.nn, scan against sequential, bitwise repeatable, bad input."""

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
from sparsebp.core.errors import LayoutError, OptionError, ShapeError
from sparsebp.core.threads import get_threads, most_threads, set_threads
from strategies import tolerance

NONLINEARITIES = st.sampled_from(["tanh", "relu"])


def forward(
    backend: Backend, x: np.ndarray, w_hh: np.ndarray, h0: np.ndarray, nonlinearity: str, *projection: Any
) -> np.ndarray:
    h = backend.empty((len(x), *h0.shape), x.dtype)
    projection = tuple(None if array is None else backend.array(array) for array in projection)
    backend.kernels.rnn_forward(*map(backend.array, (x, w_hh, h0)), nonlinearity, h, *projection)
    return backend.numpy(h)


def backward(
    backend: Backend, h: np.ndarray, w_hh: np.ndarray, incoming: tuple[Any, Any], nonlinearity: str, chunks: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return gz and gh0."""
    gz, gh0 = backend.empty(h.shape, h.dtype), backend.empty(h.shape[1:], h.dtype)
    arrays = [backend.array(h), backend.array(w_hh), *(None if g is None else backend.array(g) for g in incoming)]
    backend.kernels.rnn_backward(*arrays, nonlinearity, gz, gh0, chunks)
    return backend.numpy(gz), backend.numpy(gh0)


def sequence(case: Case, nonlinearity: str) -> tuple[np.ndarray, np.ndarray]:
    """Return h and w_hh of a case, h from the reference and rounded to the case's dtype."""
    gx, w_hh = case.normal(case.steps, case.batch, case.hidden), case.weights(1)
    h0 = case.normal(case.batch, case.hidden)
    return reference.rnn_forward(gx, w_hh, h0, nonlinearity).astype(case.dtype), w_hh


@given(data=st.data(), nonlinearity=NONLINEARITIES)
@settings(max_examples=40)
def test_rnn_forward(backend: Backend, data: st.DataObject, nonlinearity: str) -> None:
    case = data.draw(cases(backend))
    gx, w_hh = case.normal(case.steps, case.batch, case.hidden), case.weights(1)
    h0 = case.normal(case.batch, case.hidden)
    expected = reference.rnn_forward(gx, w_hh, h0, nonlinearity)
    np.testing.assert_allclose(forward(backend, gx, w_hh, h0, nonlinearity), expected, **tolerance(case.dtype, 4))


@given(data=st.data(), nonlinearity=NONLINEARITIES)
@settings(max_examples=40)
def test_rnn_forward_of_the_input_itself(backend: Backend, data: st.DataObject, nonlinearity: str) -> None:
    """Of few features, for lengths around the rounds in which a device reads it; the projection gives the same."""
    case = data.draw(input_cases(backend, streamed=130))
    x, *projection = projections(data, case, 1)
    gx, w_hh = project(x, *projection, both=case.hidden), case.weights(1)
    h0 = case.normal(case.batch, case.hidden)
    expected = reference.rnn_forward(gx, w_hh, h0, nonlinearity)
    for got in (
        forward(backend, x, w_hh, h0, nonlinearity, *projection), forward(backend, gx, w_hh, h0, nonlinearity),
    ):  # fmt: skip
        np.testing.assert_allclose(got, expected, **tolerance(case.dtype, 8))


@given(data=st.data(), nonlinearity=NONLINEARITIES)
@settings(max_examples=40)
def test_rnn_backward(backend: Backend, data: st.DataObject, nonlinearity: str) -> None:
    case = data.draw(cases(backend))
    h, w_hh = sequence(case, nonlinearity)
    expected = reference.rnn_backward(h, w_hh, *case.incoming(), nonlinearity)
    for got, want in zip(backward(backend, h, w_hh, case.incoming(), nonlinearity), expected, strict=True):
        np.testing.assert_allclose(got, want, **tolerance(case.dtype, 4))


@given(data=st.data(), nonlinearity=NONLINEARITIES)
@settings(max_examples=40)
def test_rnn_scan_backward_equals_sequential(backend: Backend, data: st.DataObject, nonlinearity: str) -> None:
    case = data.draw(cases(backend))
    chunks = data.draw(st.one_of(st.sampled_from([1, case.steps]), st.integers(1, case.steps)))
    h, w_hh = sequence(case, nonlinearity)
    expected = reference.rnn_backward(h, w_hh, *case.incoming(), nonlinearity)
    for got, want in zip(backward(backend, h, w_hh, case.incoming(), nonlinearity, chunks), expected, strict=True):
        np.testing.assert_allclose(got, want, **tolerance(case.dtype, 8))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("hidden", [20, 33, 160])
def test_rnn_backward_of_every_number_of_rounds(backend: Backend, hidden: int, chunks: int) -> None:
    """Device kernels load values in rounds of steps: whole rounds, and every rest."""
    for steps in (*range(10, 26), 41) if hidden == 20 else (13, 41):
        case = Case(steps, 2, hidden, np.dtype(np.float32), steps % 3 > 0, steps % 3 < 2, steps)
        h, w_hh = sequence(case, "tanh")
        expected = reference.rnn_backward(h, w_hh, *case.incoming(), "tanh")
        for got, want in zip(backward(backend, h, w_hh, case.incoming(), "tanh", chunks), expected, strict=True):
            np.testing.assert_allclose(got, want, **tolerance(case.dtype, 8), err_msg=f"{steps} steps")


@pytest.mark.parametrize(("hidden", "dtype"), [(20, np.float64), (24, np.float32), (28, np.float32), (32, np.float64)])
def test_rnn_backward_of_many_chunks(backend: Backend, hidden: int, dtype: Any) -> None:
    """On a device, the maps of chunks come in rounds of as many as fit: several rounds, and a rest."""
    for chunks in (9, 12, 21):
        case = Case(21, 2, hidden, np.dtype(dtype), True, True, chunks)
        h, w_hh = sequence(case, "tanh")
        expected = reference.rnn_backward(h, w_hh, *case.incoming(), "tanh")
        for got, want in zip(backward(backend, h, w_hh, case.incoming(), "tanh", chunks), expected, strict=True):
            np.testing.assert_allclose(got, want, **tolerance(case.dtype, 8), err_msg=f"{chunks} chunks")


SUMMED = [  # hidden, features, steps, chunks: summed inside where there is room, else by products
    (1, 1, 5, 1), (7, 3, 41, 2), (20, 1, 40, 1), (20, 8, 23, 4), (64, 4, 9, 3), (66, 2, 7, 2), (20, 9, 6, 3),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("has_gy", [True, False])
@pytest.mark.parametrize("sizes", SUMMED)
def test_rnn_weight_sums(backend: Backend, sizes: tuple[int, int, int, int], has_gy: bool, dtype: Any) -> None:
    """Weight gradients with gz and without, with biases and without; bitwise the same every time."""
    hidden, features, steps, chunks = sizes
    case = Case(steps, 3, hidden, np.dtype(dtype), has_gy, True, 4)
    h, w_hh = sequence(case, "tanh")
    x, before = case.normal(steps, 3, features), np.concatenate([case.normal(1, 3, hidden), h[:-1]])
    incoming = case.incoming()
    expected_gz, expected_gh0 = reference.rnn_backward(h, w_hh, *incoming, "tanh")
    arrays = [backend.array(h), backend.array(w_hh), *(None if g is None else backend.array(g) for g in incoming)]
    expected = reference.weight_sums(expected_gz, 1, x, before)

    def run(ga: Any, bias: bool = True) -> dict[str, np.ndarray]:
        sums, gh0 = reference.empty_sums(backend, 1, x, before, bias), backend.empty((3, hidden), dtype)
        backend.kernels.rnn_backward(*arrays, "tanh", ga, gh0, chunks, sums)
        np.testing.assert_allclose(backend.numpy(gh0), expected_gh0, **tolerance(case.dtype, 8))
        return {name: backend.numpy(a) for name, a in sums._asdict().items() if name in expected and a is not None}

    written = backend.empty(h.shape, dtype)
    first, second, without_bias = run(None), run(written), run(None, bias=False)
    assert without_bias.keys() == {"weight_ih", "weight_hh"}
    for name, want in expected.items():
        np.testing.assert_allclose(first[name], want, **tolerance(case.dtype, 40), err_msg=name)
        np.testing.assert_array_equal(second[name], first[name], err_msg=name)
        np.testing.assert_array_equal(without_bias.get(name, first[name]), first[name], err_msg=name)
    np.testing.assert_allclose(backend.numpy(written), expected_gz, **tolerance(case.dtype, 8))


def test_rnn_weight_sums_of_no_samples_are_zero(backend: Backend) -> None:
    x, before, w_hh = np.zeros((4, 0, 2), np.float32), np.zeros((4, 0, 5), np.float32), np.ones((5, 5), np.float32)
    sums, gh0 = reference.empty_sums(backend, 1, x, before), backend.empty((0, 5), np.float32)
    h, w_hh = backend.array(before), backend.array(w_hh)
    backend.kernels.rnn_backward(h, w_hh, h, None, "tanh", None, gh0, 2, sums)
    for array in sums[2:]:
        np.testing.assert_array_equal(backend.numpy(array), 0)


def test_rnn_gz_is_needed_without_sums(backend: Backend) -> None:
    args = {k: backend.array(v) if isinstance(v, np.ndarray) else v for k, v in arguments()["rnn_backward"].items()}
    with pytest.raises(OptionError, match="gz is missing"):
        backend.kernels.rnn_backward(**(args | {"gz": None}))


@given(data=st.data(), nonlinearity=NONLINEARITIES)
@settings(max_examples=20)
def test_rnn_jacobians(backend: Backend, data: st.DataObject, nonlinearity: str) -> None:
    case = data.draw(cases(backend))
    h, w_hh = sequence(case, nonlinearity)
    out = backend.empty((case.steps, case.hidden, case.hidden, case.batch), case.dtype)
    backend.kernels.rnn_jacobians(backend.array(h), backend.array(w_hh), nonlinearity, out)
    expected = np.einsum("ji,tbj->tijb", w_hh.astype(np.float64), reference.rnn_slopes(h, nonlinearity))
    np.testing.assert_allclose(backend.numpy(out), expected, **tolerance(case.dtype))


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [20, 128])
def test_rnn_against_torch_nn(backend: Backend, nonlinearity: str, hidden: int) -> None:
    torch = pytest.importorskip("torch")
    steps, batch = (3, 2) if backend.emulated else (11, 5)
    case = Case(steps, batch, hidden, np.dtype(np.float64), True, True, 3)
    x, h0, (gy, grad_h_n) = case.normal(steps, batch, 3), case.normal(batch, hidden), case.incoming()
    model = torch.nn.RNN(3, hidden, nonlinearity=nonlinearity, dtype=torch.float64)
    tx, th0 = torch.tensor(x, requires_grad=True), torch.tensor(h0[None], requires_grad=True)
    y, h_n = model(tx, th0)
    torch.autograd.backward([y, h_n], [torch.tensor(gy), torch.tensor(grad_h_n[None])])
    p = {name: value.detach().numpy() for name, value in model.named_parameters()}

    gx = x @ p["weight_ih_l0"].T + p["bias_ih_l0"] + p["bias_hh_l0"]
    h = forward(backend, gx, p["weight_hh_l0"], h0, nonlinearity)
    np.testing.assert_allclose(h, y.detach().numpy(), rtol=1e-11, atol=1e-12)
    for chunks in (1, 3):
        gz, gh0 = backward(backend, h, p["weight_hh_l0"], (gy, grad_h_n), nonlinearity, chunks)
        np.testing.assert_allclose(gz @ p["weight_ih_l0"], tx.grad.numpy(), rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(gh0, th0.grad.numpy()[0], rtol=1e-10, atol=1e-11)
        g_w = np.einsum("tbi,tbj->ij", gz, np.concatenate([h0[None], h[:-1]]))
        np.testing.assert_allclose(g_w, model.weight_hh_l0.grad.numpy(), rtol=1e-10, atol=1e-11)

    out = backend.empty((steps, hidden, hidden, batch), np.float64)
    backend.kernels.rnn_jacobians(backend.array(h), backend.array(p["weight_hh_l0"]), nonlinearity, out)
    cell = torch.nn.RNNCell(3, hidden, nonlinearity=nonlinearity, dtype=torch.float64)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in model.state_dict().items()})
    step, sample = steps - 1, batch - 1
    jacobian = torch.autograd.functional.jacobian(
        lambda before: cell(tx[step, sample].detach(), before), torch.tensor(h[step - 1, sample])
    )
    np.testing.assert_allclose(backend.numpy(out)[step, :, :, sample], jacobian.numpy().T, rtol=1e-11, atol=1e-12)


def test_rnn_batch_of_zero(backend: Backend) -> None:
    empty, w_hh = np.zeros((4, 0, 5), np.float32), np.eye(5, dtype=np.float32)
    assert forward(backend, empty, w_hh, empty[0], "tanh").shape == (4, 0, 5)
    for chunks in (1, 4):
        gz, gh0 = backward(backend, empty, w_hh, (empty, None), "tanh", chunks)
        assert gz.shape == (4, 0, 5)
        assert gh0.shape == (0, 5)
    out = backend.empty((4, 5, 5, 0), np.float32)
    backend.kernels.rnn_jacobians(backend.array(empty), backend.array(w_hh), "tanh", out)


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_rnn_nan_stays_in_its_sample(backend: Backend, nonlinearity: str) -> None:
    gx, w_hh = np.ones((3, 5, 7), np.float32), np.full((7, 7), 0.1, np.float32)
    gx[1, 4, 2] = np.nan
    h = forward(backend, gx, w_hh, np.zeros((5, 7), np.float32), nonlinearity)
    assert np.isnan(h[1, 4, 2])
    assert np.isnan(h[2, 4]).all()
    assert np.isfinite(h[:, :4]).all()
    assert np.isfinite(h[0]).all()


@given(data=st.data(), nonlinearity=NONLINEARITIES)
@settings(max_examples=20)
def test_rnn_maps_take_a_gradient_back_as_the_recursion_does(
    backend: Backend, data: st.DataObject, nonlinearity: str
) -> None:
    case = data.draw(cases(backend))
    h, w_hh = sequence(case, nonlinearity)
    gy, last = case.incoming()
    chunks = data.draw(st.integers(1, case.steps))
    maps = backend.empty((chunks, case.batch, case.hidden + 1, case.hidden), case.dtype)
    arriving = None if gy is None else backend.array(gy)
    backend.kernels.rnn_maps(backend.array(h), backend.array(w_hh), arriving, nonlinearity, maps)
    _, expected = reference.rnn_backward(h, w_hh, gy, last, nonlinearity)
    found = through_maps(backend.numpy(maps), last)
    np.testing.assert_allclose(found, expected, **tolerance(case.dtype, 4 * case.steps))


@pytest.mark.parametrize("features", [1, 3, 8])
def test_rnn_nan_or_infinity_of_the_input_stays_in_its_sample(backend: Backend, features: int) -> None:
    x, w_ih = np.ones((11, 3, features), np.float32), np.full((7, features), 0.1, np.float32)
    x[9, 1, features - 1], x[9, 2, 0] = np.nan, np.inf
    w_hh, h0 = np.full((7, 7), 0.1, np.float32), np.zeros((3, 7), np.float32)
    h = forward(backend, x, w_hh, h0, "tanh", w_ih, None, None)
    assert np.isnan(h[9:, 1]).all()
    assert np.isfinite(h[:, [0, 2]]).all()
    assert np.isfinite(h[:9]).all()
    np.testing.assert_array_equal(h[9, 2], 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rnn_repeats_bitwise(backend: Backend, dtype: Any) -> None:
    case = Case(5, 3, 20, np.dtype(dtype), True, True, 1)
    h, w_hh = sequence(case, "tanh")
    for chunks in (1, 3):
        first, second = (backward(backend, h, w_hh, case.incoming(), "tanh", chunks) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(most_threads() < 2, reason="needs two threads")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rnn_is_bitwise_equal_for_every_number_of_threads(dtype: Any) -> None:
    backend = Backend("host", np)
    case = Case(29, 13, 33, np.dtype(dtype), True, True, 2)
    gx, w_hh, h0 = case.normal(29, 13, 33), case.weights(1), case.normal(13, 33)
    results, before = [], get_threads()
    try:
        for threads in (1, 2):
            set_threads(threads)
            h = forward(backend, gx, w_hh, h0, "tanh")
            out = np.empty((29, 33, 33, 13), dtype)
            backend.kernels.rnn_jacobians(h, w_hh, "tanh", out)
            scanned = backward(backend, h, w_hh, case.incoming(), "tanh", 5)
            results.append([h, out, *backward(backend, h, w_hh, case.incoming(), "tanh"), *scanned])
    finally:
        set_threads(before)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("hidden", [1, 20, 33])
def test_rnn_writes_its_outputs_and_nothing_beyond(hidden: int) -> None:
    case = Case(4, 3, hidden, np.dtype(np.float32), True, False, 5)
    guarded = []

    def output(*shape: int) -> np.ndarray:
        flat = np.full(int(np.prod(shape)) + 128, 7.0, np.float32)
        guarded.append(flat)
        flat[64:-64] = np.nan
        return flat[64:-64].reshape(shape)

    k = kernels.get(np)
    h, gz, gh0, jacobians = output(4, 3, hidden), output(4, 3, hidden), output(3, hidden), output(4, hidden, hidden, 3)
    w_hh = case.weights(1)
    k.rnn_forward(case.normal(4, 3, hidden), w_hh, case.normal(3, hidden), "relu", h)
    for chunks in (1, 4):
        k.rnn_backward(h, w_hh, case.incoming()[0], None, "relu", gz, gh0, chunks)
    k.rnn_jacobians(h, w_hh, "relu", jacobians)
    for flat in guarded:
        assert np.isfinite(flat).all()
        assert (flat[:64] == 7).all()
        assert (flat[-64:] == 7).all()


def arguments() -> dict[str, dict[str, Any]]:
    """Return valid arguments of every RNN kernel."""
    h, w_hh, h0 = np.zeros((4, 2, 5)), np.zeros((5, 5)), np.zeros((2, 5))
    back = {"h": h, "w_hh": w_hh, "gy": h, "grad_h_n": h0, "nonlinearity": "tanh", "gz": h, "gh0": h0, "chunks": 2}
    return {
        "rnn_forward": {"x": h, "w_hh": w_hh, "h0": h0, "nonlinearity": "tanh", "h": h},
        "rnn_backward": back,
        "rnn_jacobians": {"h": h, "w_hh": w_hh, "nonlinearity": "relu", "out": np.zeros((4, 5, 5, 2))},
        "rnn_maps": {"h": h, "w_hh": w_hh, "gy": h, "nonlinearity": "tanh", "maps": np.zeros((3, 2, 6, 5))},
    }


@pytest.mark.parametrize("name", list(arguments()))
def test_rnn_arguments_are_checked(backend: Backend, name: str) -> None:
    assert_arguments_are_checked(backend, name, arguments()[name])


def test_rnn_projections_are_checked(backend: Backend) -> None:
    projection = {"w_ih": np.zeros((5, 2)), "b_ih": np.zeros(5), "b_hh": np.zeros(5)}
    args = arguments()["rnn_forward"] | {"x": np.zeros((4, 2, 2))}
    assert_arguments_are_checked(backend, "rnn_forward", args | projection)
    args = {k: backend.array(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    for features in (0,) if backend.name == "host" else (0, 9):  # the host projects any number
        with pytest.raises(ShapeError, match=r"Expected w_ih of shape \(5, 1 to \d+\)"):
            backend.kernels.rnn_forward(**args, w_ih=backend.array(np.zeros((5, features))))
    with pytest.raises(OptionError, match="without its weights"):
        backend.kernels.rnn_forward(**args, b_hh=backend.array(np.zeros(5)))


def test_rnn_options_are_checked(backend: Backend) -> None:
    args = {k: backend.array(v) if isinstance(v, np.ndarray) else v for k, v in arguments()["rnn_backward"].items()}
    for chunks in (0, -1, 5):
        with pytest.raises(OptionError, match=r"1 <= chunks <= T = 4"):
            backend.kernels.rnn_backward(**{**args, "chunks": chunks})
    with pytest.raises(OptionError, match="'tanh' or 'relu'"):
        backend.kernels.rnn_backward(**{**args, "nonlinearity": "gelu"})


def test_rnn_empty_sequences_are_refused(backend: Backend) -> None:
    empty, w_hh, h0 = np.zeros((0, 2, 5)), np.zeros((5, 5)), np.zeros((2, 5))
    with pytest.raises(ShapeError, match="empty sequences are not allowed"):
        forward(backend, empty, w_hh, h0, "tanh")
    with pytest.raises(ShapeError, match="hidden size of zero"):
        forward(backend, empty.reshape(5, 2, 0), w_hh[:0, :0], h0[:, :0], "tanh")


def test_rnn_read_only_output_is_refused() -> None:
    args = arguments()["rnn_forward"]
    args["h"].flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        kernels.get(np).rnn_forward(**{**args, "x": np.zeros((4, 2, 5))})
