"""Forward passes that keep nothing, and sequences that come a step at a time."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.core.errors import OptionError
from sparsebp.core.threads import serial_kernels
from sparsebp.kernels.host.engine import threads as teams
from sparsebp.kernels.host.engine.threads import ALONE
from sparsebp.kernels.host.rnn import inference
from strategies import tolerance
from thread_counts import assert_same_for_any_number_of_threads

KINDS: dict[str, Any] = {
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "gru": nn.GRU,
    "lstm": nn.LSTM,
}
LAYERS = KINDS | {"mingru": nn.MinGRU, "minlstm": nn.MinLSTM}


def data(layer: Any, steps: int, batch: int | None, seed: int = 0) -> np.ndarray:
    shape = (steps, layer.input_size) if batch is None else (steps, batch, layer.input_size)
    return np.random.default_rng(seed).standard_normal(shape).astype(layer.dtype)


def first_state(layer: Any, batch: int) -> Any:
    rng = np.random.default_rng(1)
    runs = layer.num_layers * layer.directions
    parts = [rng.standard_normal((runs, batch, layer.hidden_size)).astype(layer.dtype) for _ in layer.cell.states]
    return parts[0] if len(parts) == 1 else tuple(parts)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(LAYERS)), sizes=st.tuples(*[st.sampled_from([1, 2, 7, 8, 20, 33])] * 2),
    batch=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17]), steps=st.sampled_from([1, 3, 4, 17, 18]),
    layers=st.integers(1, 2), bidirectional=st.booleans(), bias=st.booleans(), with_state=st.booleans(),
    with_lengths=st.booleans(), batch_first=st.booleans(),
)  # fmt: skip
def test_calling_a_layer_returns_what_forward_does(
    kind: str, sizes: tuple[int, int], batch: int, steps: int, layers: int, bidirectional: bool, bias: bool,
    with_state: bool, with_lengths: bool, batch_first: bool,
) -> None:  # fmt: skip
    layer = LAYERS[kind](
        *sizes, layers, bias=bias, bidirectional=bidirectional, batch_first=batch_first, rng=0, dtype=np.float32
    )
    x = data(layer, steps, batch)
    x = x.transpose(1, 0, 2) if batch_first else x
    state = first_state(layer, batch) if with_state else None
    lengths = np.random.default_rng(2).integers(1, steps + 1, batch) if with_lengths else None
    expected, saved = layer.forward(x, state, lengths=lengths)
    with nn.inference_mode():
        y, last = layer.forward(x, state, lengths=lengths)
    near = tolerance(np.float32)
    np.testing.assert_allclose(y, expected, **near)
    np.testing.assert_allclose(last.h_n, saved.h_n, **near)
    if kind == "lstm":
        np.testing.assert_allclose(last.c_n, saved.c_n, **near)
    np.testing.assert_array_equal(layer(x, state, lengths=lengths), y)


def test_double_precision_and_any_number_of_threads() -> None:
    layer = nn.LSTM(3, 40, rng=0, dtype=np.float64)
    x = data(layer, 60, 19)
    assert_same_for_any_number_of_threads(lambda: [layer(x)])
    np.testing.assert_allclose(layer(x), layer.forward(x)[0], **tolerance(np.float64))


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)), sizes=st.tuples(*[st.sampled_from([1, 3, 16, 20, 37, 70])] * 2),
    batch=st.integers(1, 9), steps=st.sampled_from([1, 2, 5, 9, 18]), parts=st.integers(1, 9),
    dtype=st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_however_samples_are_shared_out_they_have_the_same_bits(
    kind: str, sizes: tuple[int, int], batch: int, steps: int, parts: int, dtype: Any
) -> None:
    layer = KINDS[kind](*sizes, rng=0, dtype=dtype)
    x = data(layer, steps, batch)
    expected = np.concatenate([layer(x[:, s : s + 1]) for s in range(batch)], axis=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "parts_of", lambda groups, work: (ALONE, min(groups, parts)))
        np.testing.assert_array_equal(layer(x), expected)
    np.testing.assert_array_equal(layer(x), expected)


@settings(max_examples=30, deadline=None)  # more threads than cores wait for each other
@given(
    kind=st.sampled_from(list(KINDS)), inputs=st.sampled_from([1, 3, 16, 37]), hidden=st.integers(9, 150),
    batch=st.integers(1, 4), steps=st.sampled_from([1, 2, 9, 17]), threads=st.sampled_from([2, 3, 5, 9]),
    bias=st.booleans(),
    dtype=st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_threads_that_share_the_units_of_a_state_give_the_same_bits(
    kind: str, inputs: int, hidden: int, batch: int, steps: int, threads: int, bias: bool, dtype: Any
) -> None:
    layer = KINDS[kind](inputs, hidden, bias=bias, rng=0, dtype=dtype)
    x, state = data(layer, steps, batch), first_state(layer, batch)
    with serial_kernels():
        expected = layer(x, state)
    team = crew_of(threads)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"UNITS_WORTH": 1, "WORTH_THREADS": 1, "thread_count": lambda: threads}.items():
            patch.setattr(inference, name, value)
        patch.setattr(inference, "team", lambda parts: team)
        np.testing.assert_array_equal(layer(x, state), expected)


@cache
def crew_of(threads: int) -> int:
    """Return the address of a team of its own, with more threads than there may be cores."""
    made = teams._Team(threads)
    made.hire(threads - 1)
    return made.address


def test_a_projection_has_the_same_bits_for_any_number_of_threads() -> None:
    layer = nn.LSTM(3, 129, proj_size=72, rng=0, dtype=np.float64)
    x, state = data(layer, 6, 7), (np.full((1, 7, 72), 0.3), np.full((1, 7, 129), 0.2))

    def run() -> list[np.ndarray]:
        y, saved = layer.forward(x, state)
        grads = layer.gradients(y, saved, saved.h_n)
        return [y, grads.input, grads.h0, *grads.weights.values()]

    assert_same_for_any_number_of_threads(run)


def test_an_unbatched_sequence_a_projection_and_models_around() -> None:
    gru, lstm = nn.GRU(3, 5, rng=0), nn.LSTM(3, 5, proj_size=2, rng=0)
    x = data(gru, 6, None)
    np.testing.assert_allclose(gru(x), gru.forward(x)[0], atol=1e-6)
    np.testing.assert_allclose(lstm(x), lstm.forward(x)[0], atol=1e-6)
    model = nn.SequenceClassifier(gru, nn.Linear(5, 4, rng=0))
    batch = data(gru, 6, 3)
    np.testing.assert_allclose(model(batch), model.forward(batch)[0], atol=1e-6)
    chain = nn.Sequential(nn.GRU(3, 5, rng=0), nn.Linear(5, 2, rng=0))
    np.testing.assert_allclose(chain(batch), chain.forward(batch)[0], atol=1e-6)


def test_what_was_not_kept_is_missed_in_words_and_other_threads_keep() -> None:
    gru = nn.GRU(3, 5, rng=0)
    x = data(gru, 4, 2)
    kept = []
    with nn.inference_mode():
        y, saved = gru.forward(x)
        thread = threading.Thread(target=lambda: kept.append(gru.forward(x)[1]))
        thread.start()
        thread.join()
        with pytest.raises(OptionError, match="saved nothing"):
            gru.explain(x)
    np.testing.assert_array_equal(copy.deepcopy(saved).h_n, saved.h_n)
    for use in (
        lambda: gru.weight_grad(y, saved),
        lambda: gru.gradients(y, saved).input,
        lambda: saved.runs[0],
        lambda: saved.shape,
        lambda: copy.deepcopy(saved).shape,
    ):
        with pytest.raises(OptionError, match="saved nothing"):
            use()
    assert gru.weight_grad(y, kept[0]).keys() == gru.params.keys()
    assert gru.weight_grad(y, gru.forward(x)[1]).keys() == gru.params.keys()


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(LAYERS)), sizes=st.tuples(*[st.sampled_from([1, 2, 7, 8, 20, 33])] * 2),
    batch=st.sampled_from([None, 1, 3, 5]), layers=st.integers(1, 3), bias=st.booleans(), with_state=st.booleans(),
)  # fmt: skip
def test_steps_of_a_stream_are_those_of_the_sequence(
    kind: str, sizes: tuple[int, int], batch: int | None, layers: int, bias: bool, with_state: bool
) -> None:
    layer = LAYERS[kind](*sizes, layers, bias=bias, rng=0, dtype=np.float32)
    x, state = data(layer, 5, batch), None
    if with_state:
        state = first_state(layer, batch or 1)
        if batch is None:
            state = state[:, 0] if kind != "lstm" else tuple(part[:, 0] for part in state)
    stream = layer.stream(batch, state)
    y = np.array([layer.step(x_t, stream).copy() for x_t in x])
    expected, saved = layer.forward(x, state)
    np.testing.assert_allclose(y, expected, **tolerance(np.float32))
    np.testing.assert_allclose(stream.h, saved.h_n, **tolerance(np.float32))
    if kind == "lstm":
        np.testing.assert_allclose(stream.c, saved.c_n, **tolerance(np.float32))


@pytest.mark.parametrize(("cell", "layer"), [(nn.RNNCell, nn.RNN), (nn.GRUCell, nn.GRU), (nn.LSTMCell, nn.LSTM)])
def test_cells_have_streams(cell: Any, layer: Any) -> None:
    one, same = cell(3, 5, rng=0), layer(3, 5, rng=0)
    for name, array in one.params.items():
        same.params[f"{name}_l0"][...] = array
    x = data(same, 4, 2)
    stream = one.stream(2)
    y = [stream.step(x_t).copy() for x_t in x]
    np.testing.assert_allclose(y, same.forward(x)[0], **tolerance(np.float32))
    assert stream.h.shape == (2, 5)


def test_weights_that_change_count_from_the_next_step_on() -> None:
    layer, other = nn.GRU(3, 5, rng=0), nn.GRU(3, 5, rng=1)
    x = data(layer, 3, None)
    stream = layer.stream()
    stream.step(x[0])
    for name, array in other.params.items():
        layer.params[name][...] = array
    h = stream.h.copy()
    np.testing.assert_allclose(stream.step(x[1]), other.forward(x[1:2], h)[0][0], atol=1e-6)
    h = stream.h.copy()
    layer.params["weight_hh_l0"] = np.zeros_like(layer.params["weight_hh_l0"])  # another array in its place
    np.testing.assert_allclose(stream.step(x[2]), layer.forward(x[2:], h)[0][0], atol=1e-6)
    h = stream.h.copy()
    layer.params = {name: 2 * array for name, array in layer.params.items()}  # all of them
    np.testing.assert_allclose(stream.step(x[2]), layer.forward(x[2:], h)[0][0], atol=1e-6)
    layer.to(dtype=np.float64)
    with pytest.raises(OptionError, match="converted"):
        stream.step(x[0])


def test_a_stream_is_read_written_reset_and_copied() -> None:
    layer = nn.LSTM(5, 5, rng=0)
    stream = layer.stream(2)
    x = data(layer, 4, 2)
    y = stream.step(x[0])
    with pytest.raises(ValueError, match="read-only"):
        y[...] = 0
    copies = [copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))]
    after = stream.step(x[1]).copy()
    for twin in copies:
        np.testing.assert_array_equal(twin.step(x[1]), after)
    stream.reset()
    np.testing.assert_array_equal(stream.step(x[0]), layer.stream(2).step(x[0]))
    assert stream.c is not None
    h, c = stream.h.copy(), stream.c.copy()
    stream.reset((stream.c, stream.h))  # each other's
    np.testing.assert_array_equal((stream.h, stream.c), (c, h))
    with pytest.raises(ValueError, match="resize"):
        stream.c.resize((1000, 1000))  # its memory would go where the next step writes
    fed = layer.stream(2, (stream.h, stream.c))
    expected = fed.step(stream.h[-1].copy()).copy()
    np.testing.assert_array_equal(stream.step(stream.h[-1]), expected)  # the state itself as the input
    strided = np.asfortranarray(x[2])
    strided.flags.writeable = False
    np.testing.assert_array_equal(stream.step(strided), fed.step(x[2].copy()))
