"""RNN, GRU and LSTM kernels on every backend: against NumPy and torch.nn, Jacobians, scan against sequential."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recurrent_reference as reference
from backends import Backend
from recurrent_reference import Case, cases, input_cases, project, projections, through_maps
from sparsebp import kernels
from sparsebp.core.errors import LayoutError, OptionError, ShapeError
from sparsebp.core.threads import most_threads
from sparsebp.kernels.device import rnn as device_rnn
from sparsebp.patterns import lstm_pattern
from strategies import reals, seeds, tolerance
from thread_counts import assert_same_for_any_number_of_threads

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Cell:
    """The kernels of one cell behind one interface.

    `gates` are the rows of the weights, and `columns` those of the gradients at the gates, in hidden sizes. `both` says
    for how many gates the input's projection holds both biases.
    """

    name: str
    gates: int
    columns: int
    both: int
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.name, *self.options))

    def inputs(self, case: Case) -> Arrays:
        """Return gx, w_hh, b_hn of a GRU, h0, and c0 of an LSTM."""
        gx = case.normal(case.steps, case.batch, self.gates * case.hidden)
        more = (case.normal(case.hidden),) if self.name == "gru" else ()
        w_hh = case.weights(self.gates)
        if "relu" in self.options:  # nothing bounds its states, nor the rounding of earlier steps in them
            w_hh /= max(np.linalg.norm(w_hh, 2), 1)
        return gx, w_hh, *more, *self.starts(case)

    def starts(self, case: Case) -> Arrays:
        h0 = case.normal(case.batch, case.hidden)
        return (h0, replace(case, seed=case.seed ^ 1).normal(*h0.shape)) if self.name == "lstm" else (h0,)

    def incoming(self, case: Case) -> tuple[Any, ...]:
        """Return the gradients at y and at the last states, None where the case has none (c's: an odd seed)."""
        at_c = replace(case, seed=case.seed + 3).normal(case.batch, case.hidden) if case.seed % 2 == 0 else None
        return (*case.incoming(), at_c) if self.name == "lstm" else case.incoming()

    def written(self, steps: int, batch: int, hidden: int) -> list[tuple[int, ...]]:
        """Return the shapes of what the forward writes: h, c of an LSTM, and the gates of both."""
        widths = {"rnn": (1,), "gru": (1, 4), "lstm": (1, 1, 4)}[self.name]
        return [(steps, batch, width * hidden) for width in widths]

    def state(self, inputs: Arrays, written: Any) -> Arrays:
        """Return what the backward takes: h, w_hh, or h (LSTM: c), its first value, gates and w_hh."""
        first = written[1] if self.name == "lstm" else written[0]
        return (first, inputs[1]) if self.name == "rnn" else (first, inputs[-1], written[-1], inputs[1])

    def saved(self, case: Case) -> Arrays:
        """Return the state of a case, from the reference and rounded to the case's dtype."""
        inputs = self.inputs(case)
        return self.state(inputs, [a.astype(case.dtype) for a in self.expected_forward(*inputs)])

    def expected_forward(self, *inputs: np.ndarray) -> Arrays:
        found = getattr(reference, f"{self.name}_forward")(*inputs, *self.options)
        return found if isinstance(found, tuple) else (found,)

    def expected_backward(self, state: Arrays, incoming: tuple[Any, ...]) -> Arrays:
        return getattr(reference, f"{self.name}_backward")(*state, *incoming, *self.options)

    def forward(
        self, backend: Backend, *inputs: np.ndarray, projection: tuple[Any, ...] = (), fresh: bool = False
    ) -> Arrays:
        """Return what the forward writes; `fresh`: behind it the initial state, which it writes as well."""
        outputs = [backend.empty(shape, inputs[0].dtype) for shape in self.written(len(inputs[0]), *inputs[-1].shape)]
        arrays = [backend.array(a) for a in inputs]
        projected = (None if array is None else backend.array(array) for array in projection or (None,) * 3)
        starts = [arrays.pop() for _ in range(2 if self.name == "lstm" else 1)][::-1]
        self.kernel(backend, "forward")(*arrays, *starts, *self.options, *outputs, *projected, fresh)
        return tuple(map(backend.numpy, (*outputs, *starts) if fresh else outputs))

    def backward(self, backend: Backend, state: Arrays, incoming: tuple[Any, ...], chunks: int = 1) -> Arrays:
        """Return the gradients at the gates and at the first states."""
        outputs = self.empty_gradients(backend, state)
        arrays = (None if array is None else backend.array(array) for array in (*state, *incoming))
        self.kernel(backend, "backward")(*arrays, *self.options, *outputs, chunks)
        return tuple(map(backend.numpy, outputs))

    def empty_gradients(self, backend: Backend, state: Arrays) -> list[Any]:
        steps, batch, hidden = state[0].shape
        starts = 2 if self.name == "lstm" else 1
        shapes = [(steps, batch, self.columns * hidden), *[(batch, hidden)] * starts]
        return [backend.empty(shape, state[0].dtype) for shape in shapes]

    def jacobians(self, backend: Backend, state: Arrays) -> np.ndarray:
        """Return the transposed Jacobians as dense matrices, (T, n, n, B)."""
        steps, batch, hidden = state[0].shape
        shape = (2 * hidden * (hidden + 1),) if self.name == "lstm" else (hidden, hidden)
        out = backend.empty((steps, *shape, batch), state[0].dtype)
        self.kernel(backend, "jacobians")(*map(backend.array, state), *self.options, out)
        if self.name != "lstm":
            return backend.numpy(out)
        pattern = lstm_pattern(hidden)
        dense = np.zeros((steps, *pattern.shape, batch), state[0].dtype)
        dense[:, pattern.row_of_entry, pattern.indices] = backend.numpy(out)
        return dense

    def kernel(self, backend: Backend, part: str) -> Any:
        return getattr(backend.kernels, f"{self.name}_{part}")

    def compiled(self, backend: Backend, case: Case) -> Case:
        """Return an LSTM's case of one of the parity test's sizes where each size is compiled for the CPU executor."""
        few = self.name == "lstm" and backend.emulated
        return replace(case, hidden={1: 5, 20: 20}.get(case.hidden, 37)) if few else case


RNN, RELU = Cell("rnn", 1, 1, 1, ("tanh",)), Cell("rnn", 1, 1, 1, ("relu",))
GRU, LSTM = Cell("gru", 3, 4, 2), Cell("lstm", 4, 4, 4)
CELLS = pytest.mark.parametrize("cell", [RNN, RELU, GRU, LSTM], ids=str)
ONE_OF_EACH = pytest.mark.parametrize("cell", [RNN, GRU, LSTM], ids=str)
HOST = Backend("host", np)


def assert_close(found: Arrays, expected: Arrays, dtype: Any, factor: float, message: str = "") -> None:
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, **tolerance(np.dtype(dtype), factor), err_msg=message)


@CELLS
@given(data=st.data())
@settings(max_examples=25)
def test_forward(backend: Backend, cell: Cell, data: st.DataObject) -> None:
    case = cell.compiled(backend, data.draw(cases(backend)))
    inputs = cell.inputs(case)
    assert_close(cell.forward(backend, *inputs), cell.expected_forward(*inputs), case.dtype, 4)


@CELLS
@given(data=st.data())
@settings(max_examples=25)
def test_forward_of_the_input_itself(backend: Backend, cell: Cell, data: st.DataObject) -> None:
    """A few features, for lengths around the rounds in which a device reads them; so do its product and the biases.

    Where the state begins at zero, the array of the initial one is not read but written.
    """
    case = cell.compiled(backend, data.draw(input_cases(backend, streamed=130 if cell.name == "rnn" else 50)))
    few = cell.name == "lstm" and backend.emulated
    features = {5: (2, 3), 20: (1,), 37: (5, 8)}[case.hidden] if few else (1, 2, 4, 5, 8)
    x, *projection = projections(data, case, cell.gates, features)
    gx, (_, *rest) = project(x, *projection, both=cell.both * case.hidden), cell.inputs(case)
    product, fresh = project(x, projection[0], None, None, both=0), data.draw(st.booleans())
    starts = cell.starts(case) if fresh else ()
    given_rest = [*rest[: len(rest) - len(starts)], *(np.full_like(a, np.nan) for a in starts)]
    rest = [*rest[: len(rest) - len(starts)], *map(np.zeros_like, starts)]
    expected = (*cell.expected_forward(gx, *rest), *rest[len(rest) - len(starts) :])
    for values, more in ((x, projection), (product, [None, *projection[1:]]), (gx, [])):
        found = cell.forward(backend, values, *given_rest, projection=tuple(more), fresh=fresh)
        assert_close(found, expected, case.dtype, 8)


@CELLS
@given(data=st.data())
@settings(max_examples=40)
def test_backward_by_the_recursion_and_by_the_scan(backend: Backend, cell: Cell, data: st.DataObject) -> None:
    case = cell.compiled(backend, data.draw(cases(backend)))
    chunks = data.draw(st.one_of(st.just(1), st.sampled_from([1, case.steps]), st.integers(1, case.steps)))
    state, incoming = cell.saved(case), cell.incoming(case)
    factor = 4 if chunks == 1 and cell is not LSTM else 8
    found, expected = cell.backward(backend, state, incoming, chunks), cell.expected_backward(state, incoming)
    assert_close(found, expected, case.dtype, factor)


@CELLS
@given(data=st.data())
@settings(max_examples=20)
def test_maps_take_a_gradient_back_as_the_recursion_does(backend: Backend, cell: Cell, data: st.DataObject) -> None:
    case = cell.compiled(backend, data.draw(cases(backend)))
    state, (gy, *last) = cell.saved(case), cell.incoming(case)
    chunks, size = data.draw(st.integers(1, case.steps)), len(last) * case.hidden
    maps = backend.empty((chunks, case.batch, size + 1, size), case.dtype)
    arriving = None if gy is None else backend.array(gy)
    cell.kernel(backend, "maps")(*map(backend.array, state), arriving, *cell.options, maps)
    zero = np.zeros((case.batch, case.hidden))
    found = through_maps(backend.numpy(maps), np.concatenate([zero if g is None else g for g in last], axis=1))
    _, *expected = cell.expected_backward(state, (gy, *last))
    assert_close((found,), (np.concatenate(expected, axis=1),), case.dtype, 4 * case.steps)


ROUNDS = [(RNN, hidden, 10) for hidden in (20, 33, 160)] + [(GRU, hidden, 4) for hidden in (20, 40, 50)]
ROUNDS += [(LSTM, hidden, 4) for hidden in (20, 37)]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("cell", "hidden", "least"), ROUNDS, ids=str)
def test_backward_of_every_number_of_rounds(backend: Backend, cell: Cell, hidden: int, least: int, chunks: int) -> None:
    """Device kernels load values in rounds of steps: whole rounds, and every rest."""
    few = (13, 41) if cell is RNN else (7, 27)
    for steps in (*range(least, least + (16 if cell is RNN else 14)), few[1]) if hidden == 20 else few:
        case = Case(steps, 2, hidden, np.dtype(np.float32), steps % 3 > 0, steps % 3 < 2, steps)
        state, incoming = cell.saved(case), cell.incoming(case)
        found, expected = cell.backward(backend, state, incoming, chunks), cell.expected_backward(state, incoming)
        assert_close(found, expected, case.dtype, 8, f"{steps} steps")


@pytest.mark.parametrize(("hidden", "dtype"), [(20, np.float64), (24, np.float32), (28, np.float32), (32, np.float64)])
def test_rnn_backward_of_many_chunks(backend: Backend, hidden: int, dtype: Any) -> None:
    """On a device, the maps of chunks come in rounds of as many as fit: several rounds, and a rest."""
    for chunks in (9, 12, 21):
        case = Case(21, 2, hidden, np.dtype(dtype), True, True, chunks)
        state, incoming = RNN.saved(case), RNN.incoming(case)
        found, expected = RNN.backward(backend, state, incoming, chunks), RNN.expected_backward(state, incoming)
        assert_close(found, expected, dtype, 8, f"{chunks} chunks")


SUMMED = {  # hidden, features, steps, chunks: summed inside where there is room, else by products
    RNN: [(1, 1, 5, 1), (7, 3, 41, 2), (20, 1, 40, 1), (20, 8, 23, 4), (64, 4, 9, 3), (66, 2, 7, 2), (20, 9, 6, 3)],
    GRU: [(1, 1, 5, 1), (7, 3, 41, 2), (20, 1, 40, 1), (20, 8, 23, 4), (20, 4, 9, 3), (23, 2, 7, 2), (20, 9, 6, 3)],
    LSTM: [(5, 3, 41, 2), (16, 1, 23, 4), (20, 9, 6, 3)],
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("cell", "sizes"), [(cell, sizes) for cell in SUMMED for sizes in SUMMED[cell]], ids=str)
def test_weight_sums(backend: Backend, cell: Cell, sizes: tuple[int, ...], dtype: Any) -> None:
    """Weight gradients with and without the gates' gradients, with and without biases; bitwise the same every time.

    Each size has gradients at all outputs in one of the dtypes, and at the last states alone in the other.
    """
    hidden, features, steps, chunks = sizes
    has_gy = (sum(sizes) + (dtype is np.float64)) % 2 == 0
    case = Case(steps, 3, hidden, np.dtype(dtype), has_gy, True, 4)
    state, incoming = cell.saved(case), cell.incoming(case)
    x = case.normal(steps, 3, features)
    if cell is LSTM:
        before = np.tanh(case.normal(steps, 3, hidden))
    else:  # a kernel may read h where it sums
        first = state[1] if cell is GRU else case.normal(3, hidden)
        before = np.concatenate([first[None], state[0][:-1]])
    expected_ga, *expected_starts = cell.expected_backward(state, incoming)
    arrays = [None if array is None else backend.array(array) for array in (*state, *incoming)]
    expected = reference.weight_sums(expected_ga, cell.gates, x, before)

    def run(ga: Any, bias: bool = True) -> dict[str, np.ndarray]:
        sums = reference.empty_sums(backend, cell.gates, x, before, bias)
        _, *starts = cell.empty_gradients(backend, state)
        cell.kernel(backend, "backward")(*arrays, *cell.options, ga, *starts, chunks, sums)
        assert_close(tuple(map(backend.numpy, starts)), tuple(expected_starts), dtype, 8)
        return {name: backend.numpy(a) for name, a in sums._asdict().items() if name in expected and a is not None}

    written, *_ = cell.empty_gradients(backend, state)
    first, second, without_bias = run(None), run(written), run(None, bias=False)
    assert without_bias.keys() == {"weight_ih", "weight_hh"}
    for name, want in expected.items():
        np.testing.assert_allclose(first[name], want, **tolerance(case.dtype, 40), err_msg=name)
        np.testing.assert_array_equal(second[name], first[name], err_msg=name)
        np.testing.assert_array_equal(without_bias.get(name, first[name]), first[name], err_msg=name)
    assert_close((backend.numpy(written),), (expected_ga,), dtype, 8)


@ONE_OF_EACH
def test_a_fresh_state_is_written_to_an_array_that_may_be(cell: Cell) -> None:
    case = Case(3, 2, 5, np.float64, has_gy=False, has_grad_h_n=False, seed=0)
    inputs = cell.inputs(case)
    inputs[-1].flags.writeable = False
    outputs = [np.empty(shape) for shape in cell.written(3, 2, 5)]
    for fresh in (False, True):
        with pytest.raises(LayoutError, match="read-only") if fresh else contextlib.nullcontext():
            cell.kernel(HOST, "forward")(*inputs, *cell.options, *outputs, None, None, None, fresh)


@given(
    rows=st.sampled_from([0, 1, 63, 64, 65, 131]), gates=st.sampled_from([1, 3, 4]), hidden=st.sampled_from([1, 3, 20]),
    features=st.sampled_from([1, 7, 38]), which=st.sampled_from(["both", "ih", "hh", "none"]), dtype=reals, seed=seeds,
)  # fmt: skip
def test_sums_of_gates(
    backend: Backend, rows: int, gates: int, hidden: int, features: int, which: str, dtype: Any, seed: int
) -> None:
    """The biases' gradients in torch's order, and a product brought to it; bitwise the same every time."""
    rng, first = np.random.default_rng(seed), hidden if gates == 3 else 0
    ga = rng.standard_normal((rows, gates * hidden + first)).astype(dtype)
    product = rng.standard_normal((gates * hidden, features)).astype(dtype) if first else None

    def run() -> list[np.ndarray | None]:
        w_ih = None if product is None else backend.empty(product.shape, dtype)
        biases = [backend.empty(gates * hidden, dtype) if which in ("both", name) else None for name in ("ih", "hh")]
        given_product = None if product is None else backend.array(product)
        backend.kernels.sum_gates(backend.array(ga), first, given_product, w_ih, *biases)
        return [None if array is None else backend.numpy(array) for array in (w_ih, *biases)]

    sums = ga.astype(np.float64).sum(axis=0)
    ordered = None if product is None else np.roll(product, -first, axis=0)
    expected = ordered, np.roll(sums[: gates * hidden], -first), sums[first:]
    for found, again, want in zip(run(), run(), expected, strict=True):
        if found is not None:
            np.testing.assert_array_equal(again, found)
            np.testing.assert_allclose(found, want, **tolerance(np.dtype(dtype), 20))


def test_sums_of_many_rows_are_those_of_pieces(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device; whole pieces and a rest, down to a single row."""
    monkeypatch.setattr(device_rnn, "_ROWS_AT_ONCE", 70)
    monkeypatch.setattr(device_rnn, "_PIECE", 35)
    for rows in (70, 71, 105, 106, 173):
        ga = np.random.default_rng(rows).standard_normal((rows, 13))
        b_ih, b_hh = backend.empty(10, np.float64), backend.empty(10, np.float64)
        backend.kernels.sum_gates(backend.array(ga), 3, None, None, b_ih, b_hh)
        np.testing.assert_allclose(backend.numpy(b_ih), np.roll(ga[:, :10].sum(axis=0), -3), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(backend.numpy(b_hh), ga[:, 3:].sum(axis=0), rtol=1e-12, atol=1e-13)


WIDE = {  # hidden size and dtype; on a device: weights in shared memory too, two or four lanes a unit, streamed
    RNN: [(160, np.float32), (94, np.float64), (257, np.float32)],
    GRU: [(50, np.float32), (100, np.float32), (45, np.float64), (170, np.float32)],
    LSTM: [(37, np.float32), (66, np.float32), (40, np.float64), (145, np.float32)],
}


@pytest.mark.parametrize(("cell", "hidden", "dtype"), [(cell, *each) for cell, some in WIDE.items() for each in some])
def test_wide_layers(backend: Backend, cell: Cell, hidden: int, dtype: Any) -> None:
    """Sizes that are no multiple of what lanes load at once, for whole rounds of steps and a rest."""
    case = Case(13, 2, hidden, np.dtype(dtype), True, True, 0)
    x, projection = case.normal(13, 2, 3), (case.normal(cell.gates * hidden, 3), None, case.normal(cell.gates * hidden))
    gx, (_, *rest) = project(x, *projection, both=cell.both * hidden), cell.inputs(case)
    expected = cell.expected_forward(gx, *rest)
    product = project(x, projection[0], None, None, both=0)
    for values, weights in ((x, projection), (product, (None, *projection[1:]))):
        assert_close(cell.forward(backend, values, *rest, projection=weights), expected, dtype, 8)
    state, incoming = cell.saved(case), cell.incoming(case)
    gradients = cell.expected_backward(state, incoming)
    for chunks in (1, 2) if hidden < 64 else (1,):
        assert_close(cell.backward(backend, state, incoming, chunks), gradients, dtype, 8, f"{chunks} chunks")


@ONE_OF_EACH
def test_batch_of_zero(backend: Backend, cell: Cell) -> None:
    """Nothing to compute, and sums of weights that are zero."""
    case = Case(4, 0, 5, np.dtype(np.float32), True, False, 1)
    inputs = cell.inputs(case)
    written = cell.forward(backend, *inputs)
    assert [a.shape for a in written] == cell.written(4, 0, 5)
    state = cell.state(inputs, written)
    for chunks in (1, 4):
        ga, *starts = cell.backward(backend, state, cell.incoming(case), chunks)
        assert ga.shape == (4, 0, 5 * cell.columns)
        assert {a.shape for a in starts} == {(0, 5)}
    size = 5 * len(starts)
    assert cell.jacobians(backend, state).shape == (4, size, size, 0)
    sums = reference.empty_sums(backend, cell.gates, np.zeros((4, 0, 2), np.float32), written[0])
    arrays = [None if array is None else backend.array(array) for array in (*state, *cell.incoming(case))]
    _, *outputs = cell.empty_gradients(backend, state)
    cell.kernel(backend, "backward")(*arrays, *cell.options, None, *outputs, 2, sums)
    for array in sums[2:]:
        np.testing.assert_array_equal(backend.numpy(array), 0)
    with pytest.raises(OptionError, match=r"g[az] is missing"):
        cell.kernel(backend, "backward")(*arrays, *cell.options, None, *outputs, 2)


def _rnn_jacobian(case: Case, state: Arrays, nonlinearity: str) -> np.ndarray:
    return np.einsum("ji,tbj->tijb", state[1].astype(np.float64), reference.rnn_slopes(state[0], nonlinearity))


def _gru_jacobian(case: Case, state: Arrays) -> np.ndarray:
    """BPPSA, Eq. 11: ``W_hnᵀ·diag(r j6 j7) + W_hrᵀ·diag(j2 j3 j6 j7) + W_hzᵀ·diag(j9 j10) + diag(z)``."""
    h, h0, gates, w_hh = (a.astype(np.float64) for a in state)
    w_hr, w_hz, w_hn = np.split(w_hh, 3)
    found = np.empty((case.steps, case.hidden, case.hidden, case.batch))
    for t, b in np.ndindex(case.steps, case.batch):
        r, z, n, inner = np.split(gates[t, b], 4)
        j2, j3, j6, j7 = r * (1 - r), inner, 1 - n * n, 1 - z
        j9, j10 = z * (1 - z), (h[t - 1, b] if t else h0[b]) - n
        found[t, :, :, b] = w_hn.T * (r * j6 * j7) + w_hr.T * (j2 * j3 * j6 * j7) + w_hz.T * (j9 * j10) + np.diag(z)
    return found


def _lstm_jacobian(case: Case, state: Arrays) -> np.ndarray:
    """From h: ``Wᵀ · diag`` of the gates; from c: diagonals."""
    c, c0, gates, w_hh = (a.astype(np.float64) for a in state)
    w = np.split(w_hh, 4)
    found = np.empty((case.steps, 2 * case.hidden, 2 * case.hidden, case.batch))
    for t, b in np.ndindex(case.steps, case.batch):
        i, f, g, o = np.split(gates[t, b], 4)
        before, seen = c[t - 1, b] if t else c0[b], np.tanh(c[t, b])
        slopes = [g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)]
        to_c = sum(part.T * slope for part, slope in zip(w, slopes, strict=False))
        through = o * (1 - seen * seen)
        to_h = to_c * through + w[3].T * (seen * o * (1 - o))
        found[t, :, :, b] = np.block([[to_h, to_c], [np.diag(f * through), np.diag(f)]])
    return found


@CELLS
@given(data=st.data())
@settings(max_examples=15)
def test_transposed_jacobians(backend: Backend, cell: Cell, data: st.DataObject) -> None:
    case = cell.compiled(backend, data.draw(cases(backend)))
    state = cell.saved(case)
    expected = {"rnn": _rnn_jacobian, "gru": _gru_jacobian, "lstm": _lstm_jacobian}[cell.name]
    factor = 2 if cell is LSTM else 1
    assert_close((cell.jacobians(backend, state),), (expected(case, state, *cell.options),), case.dtype, factor)


@CELLS
@pytest.mark.parametrize("hidden", [20, 128])
def test_against_torch_nn(backend: Backend, cell: Cell, hidden: int) -> None:
    torch = pytest.importorskip("torch")
    steps, batch, hidden = (3, 2, min(hidden, 37)) if backend.emulated else (11, 5, hidden)  # wider: `test_wide_layers`
    case = Case(steps, batch, hidden, np.dtype(np.float64), True, True, 2)
    x, starts, incoming = case.normal(steps, batch, 3), cell.starts(case), cell.incoming(case)
    options = {"nonlinearity": cell.options[0]} if cell.options else {}
    model = getattr(torch.nn, cell.name.upper())(3, hidden, dtype=torch.float64, **options)
    tx, *first = (torch.tensor(a, requires_grad=True) for a in (x, *(a[None] for a in starts)))
    y, last = model(tx, tuple(first) if cell is LSTM else first[0])
    lasts = last if cell is LSTM else (last,)
    torch.autograd.backward([y, *lasts], [torch.tensor(g) for g in (incoming[0], *(g[None] for g in incoming[1:]))])
    w_ih, w_hh, b_ih, b_hh = (value.detach().numpy() for value in model.parameters())

    gx = project(x, w_ih, b_ih, b_hh, both=cell.both * hidden)
    inputs = (gx, w_hh, *((b_hh[2 * hidden :],) if cell is GRU else ()), *starts)
    written = cell.forward(backend, *inputs)
    np.testing.assert_allclose(written[0], y.detach().numpy(), rtol=1e-11, atol=1e-12)
    if cell is LSTM:
        np.testing.assert_allclose(written[1][-1], lasts[1].detach().numpy()[0], rtol=1e-11, atol=1e-12)
    state, close = cell.state(inputs, written), {"rtol": 1e-10, "atol": 1e-11}
    befores = [np.concatenate([a[None], b[:-1]]) for a, b in zip(starts, written[: len(starts)], strict=True)]
    for chunks in (1, 3):
        ga, *at_starts = cell.backward(backend, state, incoming, chunks)
        at_x = np.roll(ga[..., : 3 * hidden], -hidden, axis=-1) if cell is GRU else ga  # n, r, z -> r, z, n
        np.testing.assert_allclose(at_x @ w_ih, tx.grad.numpy(), **close)
        for found, array in zip(at_starts, first, strict=True):
            np.testing.assert_allclose(found, array.grad.numpy()[0], **close)
        for name, found in reference.weight_sums(ga, cell.gates, x, befores[0]).items():
            np.testing.assert_allclose(found, getattr(model, f"{name}_l0").grad.numpy(), **close)

    got = cell.jacobians(backend, state)
    one = getattr(torch.nn, f"{cell.name.upper()}Cell")(3, hidden, dtype=torch.float64, **options)
    one.load_state_dict({name.removesuffix("_l0"): value for name, value in model.state_dict().items()})
    for step in (0, steps - 1):

        def next_state(state: Any, step: int = step) -> Any:
            parts = tuple(state.split(hidden))
            following = one(tx[step, 0].detach(), parts if cell is LSTM else state)
            return torch.cat(following) if cell is LSTM else following

        at = torch.tensor(np.concatenate([before[step, 0] for before in befores]))
        jacobian = torch.autograd.functional.jacobian(next_state, at, vectorize=True)
        np.testing.assert_allclose(got[step, :, :, 0], jacobian.numpy().T, rtol=1e-11, atol=1e-12)


@CELLS
def test_nan_stays_in_its_sample(backend: Backend, cell: Cell) -> None:
    gx, w_hh = np.ones((3, 5, 7 * cell.gates), np.float32), np.full((7 * cell.gates, 7), 0.1, np.float32)
    gx[1, 4, 2] = np.nan
    more = (np.zeros(7, np.float32),) if cell is GRU else ()
    starts = [np.zeros((5, 7), np.float32)] * (2 if cell is LSTM else 1)
    h, *rest = cell.forward(backend, gx, w_hh, *more, *starts)
    assert np.isnan(h[1, 4, 2])
    assert np.isnan(h[2, 4]).all()
    for array in (h, *rest):
        assert np.isfinite(array[:, :4]).all()
        assert np.isfinite(array[0]).all()


@pytest.mark.parametrize("features", [1, 3, 8])
def test_rnn_nan_or_infinity_of_the_input_stays_in_its_sample(backend: Backend, features: int) -> None:
    x, w_ih = np.ones((11, 3, features), np.float32), np.full((7, features), 0.1, np.float32)
    x[9, 1, features - 1], x[9, 2, 0] = np.nan, np.inf
    w_hh, h0 = np.full((7, 7), 0.1, np.float32), np.zeros((3, 7), np.float32)
    (h,) = RNN.forward(backend, x, w_hh, h0, projection=(w_ih, None, None))
    assert np.isnan(h[9:, 1]).all()
    assert np.isfinite(h[:, [0, 2]]).all()
    assert np.isfinite(h[:9]).all()
    np.testing.assert_array_equal(h[9, 2], 1)


@pytest.mark.parametrize("cell", [GRU, LSTM], ids=str)
def test_gates_saturate_without_overflow(backend: Backend, cell: Cell) -> None:
    gx, w_hh = np.full((2, 1, 3 * cell.gates), 1e4, np.float32), np.zeros((3 * cell.gates, 3), np.float32)
    gx[:, :, 3:6] = -1e4
    zero, one = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)
    *states, gates = cell.forward(backend, gx, w_hh, *((zero[0], zero) if cell is GRU else (one, one)))
    np.testing.assert_allclose(gates[0, 0], np.repeat([1, 0, 1, cell is LSTM], 3), atol=1e-37)
    np.testing.assert_array_equal(states[-1], np.ones_like(states[-1]))


@ONE_OF_EACH
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_repeats_bitwise(backend: Backend, cell: Cell, dtype: Any) -> None:
    case = Case(5, 3, 20, np.dtype(dtype), True, True, 2)
    for chunks in (1, 3):
        first, second = (cell.backward(backend, cell.saved(case), cell.incoming(case), chunks) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(most_threads() < 2, reason="needs two threads")
@ONE_OF_EACH
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bitwise_equal_for_any_number_of_threads(cell: Cell, dtype: Any) -> None:
    case = Case(29, 35, 33, np.dtype(dtype), True, True, 2)

    def run() -> list[np.ndarray]:
        inputs = cell.inputs(case)
        written = cell.forward(HOST, *inputs)
        state = cell.state(inputs, written)
        backwards = (cell.backward(HOST, state, cell.incoming(case), chunks) for chunks in (1, 5))
        return [*written, cell.jacobians(HOST, state), *(array for arrays in backwards for array in arrays)]

    assert_same_for_any_number_of_threads(run)


@CELLS
@given(
    batch=st.sampled_from([1, 15, 16, 17, 31, 32, 33, 48]), hidden=st.sampled_from([1, 3, 9, 16, 17, 20, 38, 63]),
    steps=st.integers(1, 5), features=st.sampled_from([0, 1, 3, 17]), dtype=reals, has_gy=st.booleans(), seed=seeds,
)  # fmt: skip
@settings(max_examples=20)
def test_a_sample_has_the_same_bits_in_a_vector_of_samples_and_alone(
    cell: Cell, batch: int, hidden: int, steps: int, features: int, dtype: Any, has_gy: bool, seed: int
) -> None:
    """As many samples as a vector has lanes lie in them; of three samples, units do."""
    case = Case(steps, batch, hidden, dtype, has_gy, True, seed)
    (gx, *rest), incoming, rows = cell.inputs(case), cell.incoming(case), cell.gates * hidden
    weights, starts = rest[: -len(cell.starts(case))], rest[-len(cell.starts(case)) :]
    projection = (case.normal(rows, features), case.normal(rows), None) if features else ()
    x = case.normal(steps, batch, features) if features else gx

    def run(some: slice) -> list[np.ndarray]:
        def of(arrays: Any, axis: int = 0) -> list[Any]:
            return [a if a is None else np.ascontiguousarray(a[some] if axis == 0 else a[:, some]) for a in arrays]

        inputs = (*of([x], 1), *weights, *of(starts))
        written = cell.forward(HOST, *inputs, projection=projection)
        ga, *at_starts = cell.backward(HOST, cell.state(inputs, written), (*of(incoming[:1], 1), *of(incoming[1:])))
        return [*written, ga, *(a[None] for a in at_starts)]

    found = run(slice(None))
    for first in range(0, batch, 3):
        for together, alone in zip(found, run(slice(first, first + 3)), strict=True):
            np.testing.assert_array_equal(together[:, first : first + 3], alone)


@ONE_OF_EACH
@pytest.mark.parametrize("hidden", [1, 20, 33])
def test_outputs_are_written_and_nothing_beyond(cell: Cell, hidden: int) -> None:
    batch = 19
    case = Case(4, batch, hidden, np.dtype(np.float32), True, False, 5)
    guarded = []

    def output(*shape: int) -> np.ndarray:
        flat = np.full(int(np.prod(shape)) + 128, 7.0, np.float32)
        guarded.append(flat)
        flat[64:-64] = np.nan
        return flat[64:-64].reshape(shape)

    k, inputs = kernels.get(np), cell.inputs(case)
    written = [output(*shape) for shape in cell.written(4, batch, hidden)]
    getattr(k, f"{cell.name}_forward")(*inputs, *cell.options, *written)
    state = cell.state(inputs, written)
    gradients = [output(*array.shape) for array in cell.empty_gradients(HOST, state)]
    for chunks in (1, 4):
        getattr(k, f"{cell.name}_backward")(*state, *cell.incoming(case), *cell.options, *gradients, chunks)
    size = hidden * (len(gradients) - 1)
    jacobians = (2 * hidden * (hidden + 1),) if cell is LSTM else (hidden, hidden)
    getattr(k, f"{cell.name}_jacobians")(*state, *cell.options, output(4, *jacobians, batch))
    getattr(k, f"{cell.name}_maps")(*state, None, *cell.options, output(3, batch, size + 1, size))
    for flat in guarded:
        assert np.isfinite(flat).all()
        assert (flat[:64] == 7).all()
        assert (flat[-64:] == 7).all()


@ONE_OF_EACH
def test_projections_that_do_not_fit_are_refused(backend: Backend, cell: Cell) -> None:
    inputs = [backend.array(a) for a in cell.inputs(Case(4, 2, 5, np.dtype(np.float64), True, True, 0))]
    outputs = [backend.empty(shape, np.float64) for shape in cell.written(4, 2, 5)]
    forward, rows = cell.kernel(backend, "forward"), 5 * cell.gates
    inputs[0], bias = backend.array(np.zeros((4, 2, 2))), backend.array(np.zeros(rows))
    forward(*inputs, *cell.options, *outputs, backend.array(np.zeros((rows, 2))), bias, bias)
    for features in (0,) if backend.name == "host" else (0, 9):  # the host projects any number
        with pytest.raises(ShapeError, match=rf"Expected w_ih of shape \({rows}, 1 to \d+\)"):
            forward(*inputs, *cell.options, *outputs, backend.array(np.zeros((rows, features))), None, None)


@CELLS
def test_empty_sequences_and_states_are_refused(backend: Backend, cell: Cell) -> None:
    case = Case(1, 2, 5, np.dtype(np.float64), True, True, 0)
    gx, *rest = cell.inputs(case)
    with pytest.raises(ShapeError, match="empty sequences are not allowed"):
        cell.forward(backend, gx[:0], *rest)
    with pytest.raises(ShapeError, match="hidden size of zero"):
        cell.forward(
            backend, gx[..., :0], *(a[..., :0] if a.ndim == 1 else a[: len(a) * (len(a) == 2), :0] for a in rest)
        )
