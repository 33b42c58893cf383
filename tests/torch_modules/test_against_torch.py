"""Layers and cells next to torch.nn's: every layout and argument, outputs and all gradients."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence  # noqa: E402

import sparsebp.torch as sparsebp_torch  # noqa: E402
from sparsebp.core.errors import DTypeError, OptionError, ShapeError, SparseBPError  # noqa: E402
from torch_modules_reference import assert_same  # noqa: E402

LAYERS = ["RNN", "GRU", "LSTM"]
CELLS = ["RNNCell", "GRUCell", "LSTMCell"]


def state(name: str, *shape: int, dtype: Any = torch.float64) -> Any:
    """Return a first state that needs a gradient: an LSTM's is a pair."""
    parts = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(1 + name.startswith("LSTM"))]
    return parts[0] if len(parts) == 1 else tuple(parts)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False, "num_layers": 3}, {"bidirectional": True, "num_layers": 2, "batch_first": True}],
    ids="-".join,
)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (7, 5, 3, 2), (6, 9, 11, 13)])
def test_layers(pair: Any, name: str, options: dict[str, Any], sizes: tuple[int, ...]) -> None:
    steps, batch, features, hidden = sizes
    theirs, ours = pair(name, features, hidden, **options)
    shape = (batch, steps, features) if options.get("batch_first") else (steps, batch, features)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    runs = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    assert_same(theirs, ours, x)
    assert_same(theirs, ours, x, state(name, runs, batch, hidden))
    unbatched = torch.randn(steps, features, dtype=torch.float64, requires_grad=True)
    assert_same(theirs, ours, unbatched, state(name, runs, hidden))


@pytest.mark.parametrize("name", LAYERS)
def test_float32_relu_and_views(pair: Any, name: str) -> None:
    options = {"nonlinearity": "relu"} if name == "RNN" else {}
    theirs, ours = pair(name, 4, 6, dtype=torch.float32, **options)
    x = torch.randn(5, 8, 9).permute(2, 0, 1)[:, :, ::2].requires_grad_()  # strided, transposed
    assert not x.is_contiguous()
    assert_same(theirs, ours, x, tolerance=2e-5)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("bias", [True, False])
def test_cells(pair: Any, name: str, bias: bool) -> None:
    theirs, ours = pair(name, 5, 7, bias)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert_same(theirs, ours, x)
    assert_same(theirs, ours, x, state(name, 3, 7))
    assert_same(theirs, ours, x[0].detach().requires_grad_(), state(name, 7))


@given(
    name=st.sampled_from(LAYERS), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    ordered=st.booleans(), bidirectional=st.booleans(), layers=st.integers(1, 2), with_state=st.booleans(),
)  # fmt: skip
@settings(max_examples=25)
def test_packed(pair: Any, name: str, lengths: list[int], ordered: bool, bidirectional: bool, layers: int,
                with_state: bool) -> None:  # fmt: skip
    torch.manual_seed(len(lengths))
    projection = {"proj_size": 2} if name == "LSTM" and not with_state else {}
    theirs, ours = pair(name, 3, 5, layers, bidirectional=bidirectional, **projection)
    lengths = sorted(lengths, reverse=True) if ordered else lengths
    sequences = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    packed = pack_sequence(sequences, enforce_sorted=ordered)
    packed.data.requires_grad_()
    hx = [state(name, layers * (1 + bidirectional), len(lengths), 5)] if with_state else []
    assert_same(theirs, ours, packed, *hx)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_lengths_are_packing_and_padding(pair: Any, name: str, batch_first: bool) -> None:
    theirs, ours = pair(name, 3, 5, bidirectional=True, batch_first=batch_first)
    lengths = torch.tensor([4, 1, 6, 4])
    x = torch.randn((4, 7, 3) if batch_first else (7, 4, 3), dtype=torch.float64, requires_grad=True)

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = theirs

        def forward(self, x: Any, hx: Any) -> Any:
            packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
            y, last = theirs(packed, hx)
            return pad_packed_sequence(y, batch_first, total_length=7)[0], last

    assert_same(Packed(), ours, x, state(name, 2, 4, 5), lengths=lengths)
    with torch.no_grad():
        hole = x.detach().clone()
        (hole[1, 1:] if batch_first else hole[1:, 1])[:] = torch.nan
        assert ours(hole, lengths=[4, 1, 6, 4])[0].isfinite().all()


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_draws_what_torch_draws(pair: Any, name: str) -> None:
    theirs, ours = pair(name, 3, 5, 3, dropout=0.5)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    found = []
    for module in (theirs, ours):
        torch.manual_seed(3)
        found.append(module(x)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(theirs.eval()(x)[0], ours.eval()(x)[0], rtol=1e-12, atol=1e-12)
    assert not torch.equal(found[1], ours(x)[0])


@pytest.mark.parametrize("name", LAYERS + CELLS)
def test_an_empty_batch(pair: Any, name: str) -> None:
    theirs, ours = pair(name, 3, 5)
    x = torch.randn((0, 3) if name in CELLS else (4, 0, 3), dtype=torch.float64, requires_grad=True)
    assert_same(theirs, ours, x)


@pytest.mark.parametrize("name", LAYERS)
def test_who_writes_to_an_output_changes_no_gradient(pair: Any, name: str) -> None:
    theirs, ours = pair(name, 3, 5)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    for module in (theirs, ours):
        y, _ = module(x)
        y.mul_(2).sum().backward()
    torch.testing.assert_close(ours.weight_hh_l0.grad, theirs.weight_hh_l0.grad)


def test_who_writes_to_what_the_way_back_needs_is_told(pair: Any) -> None:
    _, ours = pair("GRU", 3, 5)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    for tensor in (x, ours.weight_hh_l0):
        y, _ = ours(x)
        with torch.no_grad():
            tensor.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_nothing_is_kept_without_gradients(pair: Any) -> None:
    _, ours = pair("GRU", 3, 5)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with torch.no_grad():
            assert ours(x)[0].grad_fn is None
        with torch.inference_mode():
            assert ours(x)[0].is_inference()
        assert not kept
        ours(x)
        assert kept


def test_memory_hooks_see_what_is_kept(pair: Any) -> None:
    """Kept tensors may be put elsewhere meanwhile: onto a disk, say."""
    theirs, ours = pair("GRU", 3, 5, bidirectional=True)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: pickle.dumps(t.detach()), pickle.loads):
        assert_same(theirs, ours, x)


@pytest.mark.parametrize("name", LAYERS + CELLS)
def test_autocast_computes_in_the_dtype_of_the_weights(pair: Any, name: str) -> None:
    _, ours = pair(name, 3, 5, dtype=torch.float32)
    x = torch.randn((2, 3) if name in CELLS else (4, 2, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ours(x.bfloat16())
    expected = ours(x.bfloat16().float())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (lambda m: (torch.zeros(4, 2, 3, dtype=torch.float16),), ValueError, "does not match weight dtype"),
        (lambda m: (torch.zeros(4, 2, 3, dtype=torch.complex64),), ValueError, "does not match weight dtype"),
        (lambda m: (torch.zeros(0, 2, 3),), RuntimeError, "larger than 0"),
        (lambda m: (torch.zeros(4, 2, 3, device="meta"),), SparseBPError, "elsewhere"),
        (lambda m: (torch.zeros(4, 2, 3), torch.zeros(1, 2, 5).double()), DTypeError, "another dtype"),
        (lambda m: (torch.zeros(4, 2, 3), torch.zeros(2, 2, 5)), RuntimeError, r"Expected hidden size \(1, 2, 5\)"),
        (lambda m: (torch.zeros(4, 2, 2),), RuntimeError, "input_size"),
        (lambda m: (torch.zeros(4),), ValueError, "2D or 3D"),
    ],
)
def test_what_is_refused(pair: Any, arguments: Any, error: type[Exception], words: str) -> None:
    _, ours = pair("GRU", 3, 5, dtype=torch.float32)
    with pytest.raises(error, match=words):
        ours(*arguments(ours))


def test_a_state_of_another_kind(pair: Any) -> None:
    x, hx = torch.zeros(4, 2, 3, dtype=torch.float64), torch.zeros(1, 2, 5, dtype=torch.float64)
    with pytest.raises(OptionError, match=r"pair \(h_0, c_0\)"):
        pair("LSTM", 3, 5)[1](x, hx)
    with pytest.raises(OptionError, match="a tensor"):
        pair("GRU", 3, 5)[1](x, (hx, hx))


def test_dtypes_without_kernels_name_the_module_that_has_them(pair: Any) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        _, ours = pair("GRU", 3, 5, dtype=dtype)
        with pytest.raises(DTypeError, match=r"torch\.nn\.GRU"):
            ours(torch.zeros(4, 2, 3, dtype=dtype))


@pytest.mark.parametrize("sizes", [[2, 0], [1, 2], [2, 2], []])
def test_packed_sequences_that_are_none(pair: Any, sizes: list[int]) -> None:
    _, ours = pair("GRU", 3, 5)
    packed = torch.nn.utils.rnn.PackedSequence(torch.zeros(3, 3, dtype=torch.float64), torch.tensor(sizes).long())
    with pytest.raises(OptionError, match="packed sequence"):
        ours(packed)


@pytest.mark.parametrize(
    ("lengths", "error"),
    [
        ("ab", DTypeError),
        ([[1], [2, 3]], DTypeError),
        ([4, 0], OptionError),
        ([5, 1], OptionError),
        ([4], OptionError),
        ([1.0, 2.0], DTypeError),
    ],
)
def test_lengths_that_are_refused(pair: Any, lengths: list[Any], error: type[Exception]) -> None:
    _, ours = pair("GRU", 3, 5)
    with pytest.raises(error, match="lengths"):
        ours(torch.zeros(4, 2, 3, dtype=torch.float64), lengths=lengths)
    with pytest.raises(ShapeError, match="lengths"):
        ours(torch.zeros(4, 3, dtype=torch.float64), lengths=[4])


@pytest.mark.parametrize("hx", [torch.zeros(2, 4), (torch.zeros(2, 4),)], ids=["tensor", "one"])
def test_a_state_of_a_cell_that_is_no_pair(hx: Any) -> None:
    with pytest.raises(OptionError, match="pair"):
        sparsebp_torch.LSTMCell(3, 4)(torch.zeros(2, 3), hx)


NO_TENSORS = [
    ("not a tensor", np.zeros((2, 3))),
    ("not a tensor", "abc"),
    ("not a tensor", [1.0, 2.0]),
    ("sparse", torch.eye(3).to_sparse_csr()),
    ("sparse", torch.zeros(2, 3).to_sparse()),
]


@pytest.mark.parametrize(("words", "given"), NO_TENSORS, ids=["array", "text", "list", "csr", "coo"])
@pytest.mark.parametrize("name", LAYERS + CELLS)
def test_inputs_and_states_that_are_no_dense_tensors(name: str, words: str, given: Any) -> None:
    """An input, a state, and a state of a packed sequence; an LSTM's state is a pair of them."""
    module = getattr(sparsebp_torch, name)(3, 4)
    x = torch.zeros(2, 3)
    hx = (given, given) if name.startswith("LSTM") else given
    calls = [lambda: module(given), lambda: module(x, hx)]
    if name in LAYERS:
        packed = pack_sequence([torch.zeros(3, 3), torch.zeros(1, 3)])
        calls += [lambda: module(packed, hx), lambda: module(given, lengths=[2])]
    for call in calls:
        with pytest.raises(SparseBPError, match=rf"(input|hx) of st\.{name} is {words}.*Expected a"):
            call()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_modes_that_look_at_operators_see_them(name: str) -> None:
    """Plain calls go past PyTorch's dispatcher; a mode on it, and a trace, are told all the same."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    module, x = getattr(sparsebp_torch, name)(3, 4), torch.randn(5, 2, 3)
    with Seen():
        module(x)[0].sum().backward()
    assert "sparsebp.run.default" in names and "sparsebp.run_back.default" in names
    module.requires_grad_(False)
    traced, other = torch.jit.trace(lambda given: module(given)[0], x, check_trace=False), torch.randn(5, 2, 3)
    torch.testing.assert_close(traced(other), module(other)[0])
