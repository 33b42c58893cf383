"""Derivatives of every order and mode, `torch.func`, and compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap  # noqa: E402
from torch.nn.utils.rnn import pack_sequence  # noqa: E402

import sparsebp.torch as st  # noqa: E402
from sparsebp.torch import ops  # noqa: E402
from torch_modules_reference import tensors  # noqa: E402

LAYERS = ["RNN", "GRU", "LSTM"]


def layer(pair: Any, name: str, **options: Any) -> tuple[Any, Any, Any]:
    theirs, ours = pair(name, 2, 3, bidirectional=True, **options)
    return theirs, ours, torch.randn(4, 2, 2, dtype=torch.float64)


def state(name: str, hx: Any) -> Any:
    """Return a first state that depends on hx: an LSTM's is a pair."""
    return (hx, hx.cos()) if name == "LSTM" else hx


@pytest.mark.parametrize("name", LAYERS)
def test_all_derivatives_of_the_smallest(pair: Any, name: str) -> None:
    """Every entry of the Jacobians, not only along a random direction."""
    _, ours = pair(name, 1, 2)
    names = [key for key, _ in ours.named_parameters()]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 2, 1), (1, 2, 2))]

    def function(x: Any, hx: Any, *weights: Any) -> Any:
        return tuple(tensors(functional_call(ours, dict(zip(names, weights, strict=True)), (x, state(name, hx)))))

    assert torch.autograd.gradcheck(function, (*inputs, *ours.parameters()))
    ours.requires_grad_(False)
    assert torch.autograd.gradgradcheck(lambda x, hx: tuple(tensors(ours(x, state(name, hx)))), inputs, fast_mode=True)


@pytest.mark.parametrize("name", LAYERS)
def test_some_inputs_alone_and_undefined_gradients(pair: Any, name: str) -> None:
    """A loss of h_n alone, of y alone, and gradients of the weights alone or the input alone."""
    theirs, ours, x = layer(pair, name)
    for output in range(3 if name == "LSTM" else 2):
        for wanted in (["x"], ["weight_hh_l0", "bias_ih_l0_reverse"]):
            found = []
            for module in (theirs, ours):
                z = x.clone().requires_grad_("x" in wanted)
                module.requires_grad_("x" not in wanted)
                parameters = dict(module.named_parameters())
                loss = tensors(module(z))[output].sin().sum()
                found.append(torch.autograd.grad(loss, [z if key == "x" else parameters[key] for key in wanted]))
            torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-11)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "jacrev": lambda m, x: jacrev(lambda x: m(x)[0])(x),
    "jacfwd": lambda m, x: jacfwd(lambda x: m(x)[1])(x),
    "hessian": lambda m, x: hessian(lambda x: m(x)[0].sin().sum())(x),
    "forward in forward": lambda m, x: jacfwd(jacfwd(lambda x: m(x)[0].sin().sum()))(x),
    "forward in forward in reverse": lambda m, x: jacfwd(jacfwd(grad(lambda s: m(s * x)[0].sin().sum())))(
        torch.tensor(0.7).double()
    ),
    "third": lambda m, x: jacfwd(jacrev(grad(lambda s: m(s * x)[0].sin().sum())))(torch.tensor(0.7).double()),
    "jvp": lambda m, x: jvp(m, (x,), (torch.cos(x),))[1],
    "of weights": lambda m, x: jacfwd(grad(lambda w: functional_call(m, {"weight_hh_l0": w}, (x,))[0].sin().sum()))(
        m.weight_hh_l0.detach()
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_torch_func(pair: Any, name: str, function: str) -> None:
    theirs, ours, x = layer(pair, name)
    expected, got = FUNCTIONS[function](theirs, x), FUNCTIONS[function](ours, x)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", LAYERS)
def test_vmap_over_inputs_states_and_weights(pair: Any, name: str) -> None:
    """torch.nn's own layers cannot be mapped: one at a time is what it has to equal."""
    theirs, ours, _ = layer(pair, name)
    x, hx = torch.randn(3, 4, 2, 2, dtype=torch.float64), torch.randn(3, 2, 2, 3, dtype=torch.float64)
    weights = {key: torch.stack([p, -p, 2 * p]).detach() for key, p in theirs.named_parameters()}
    ones = {key: p.detach() for key, p in theirs.named_parameters()}

    def call(module: Any) -> Any:
        return lambda w, x, hx: tuple(tensors(functional_call(module, w, (x, state(name, hx)))))

    def gradient(module: Any) -> Any:
        return grad(lambda w, x, hx: call(module)(w, x, hx)[0].sin().sum())

    for make in (call, gradient):
        for dims in ((None, 0, None), (None, None, 0), (None, 0, 0), (0, None, None), (0, 0, 0)):
            arguments = tuple(a if d is None else b for a, b, d in zip((ones, x[0], hx[0]), (weights, x, hx), dims,
                                                                       strict=True))  # fmt: skip
            got = vmap(make(ours), in_dims=dims)(*arguments)
            expected = vmap_by_hand(make(theirs), dims, arguments)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    twice = vmap(vmap(lambda x: ours(x)[0]))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(twice[1, 2], theirs(2 * x[2])[0])


def vmap_by_hand(function: Any, dims: Any, arguments: Any) -> Any:
    def chosen(value: Any, dim: Any, number: int) -> Any:
        if dim is None:
            return value
        return {key: v[number] for key, v in value.items()} if isinstance(value, dict) else value[number]

    found = [
        function(*(chosen(value, dim, n) for value, dim in zip(arguments, dims, strict=True))) for n in range(3)
    ]  # fmt: skip
    if isinstance(found[0], dict):
        return {key: torch.stack([one[key] for one in found]) for key in found[0]}
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


def test_vmap_of_packed_sequences(pair: Any) -> None:
    theirs, ours, _ = layer(pair, "GRU")
    packed = pack_sequence([torch.randn(n, 2, dtype=torch.float64) for n in (2, 5, 1)], enforce_sorted=False)
    data = torch.stack([packed.data, 2 * packed.data])
    got = vmap(lambda d: ours(packed._replace(data=d))[0].data)(data)
    expected = torch.stack([theirs(packed._replace(data=d))[0].data for d in data])
    torch.testing.assert_close(got, expected)


# ---- compiled graphs ------------------------------------------------------------------------------------------------


def test_batched_gradients(pair: Any) -> None:
    """``is_grads_batched=True`` maps over the backward with PyTorch's older vmap, whose tensors look plain."""
    theirs, ours, x = layer(pair, "GRU")
    x.requires_grad_()
    (y, _), (wanted, _) = ours(x), theirs(x)
    seeds = torch.randn(3, *y.shape, dtype=y.dtype)
    options = {"is_grads_batched": True, "create_graph": True}
    found, expected = (torch.autograd.grad(out, x, seeds, **options)[0] for out in (y, wanted))
    torch.testing.assert_close(found, expected)
    second = (torch.autograd.grad(once.pow(2).sum(), x)[0] for once in (found, expected))
    torch.testing.assert_close(*second)


@pytest.mark.parametrize(
    "operation", [st.linear_recurrence, st.MinGRU(3, 3, dtype=torch.float64)], ids=["recurrence", "layer"]
)
def test_batched_gradients_of_second_order(operation: Any) -> None:
    """They are those of one after the other: the graph of the first ones is whole."""
    a = torch.rand(4, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(a: Any) -> Any:
        return operation(a, a) if operation is st.linear_recurrence else operation(a)[0]

    y = run(a)
    seeds = torch.randn(3, *y.shape, dtype=y.dtype)
    (found,) = torch.autograd.grad(y, a, seeds, is_grads_batched=True, create_graph=True)
    expected = torch.stack([torch.autograd.grad(y, a, seed, create_graph=True)[0] for seed in seeds])
    second = (torch.autograd.grad(once.pow(2).sum(), a, retain_graph=True)[0] for once in (found, expected))
    torch.testing.assert_close(*second)


def test_traces_hold_operators(pair: Any) -> None:
    _, ours, x = layer(pair, "GRU")
    traced = torch.jit.trace(ours, x)
    torch.testing.assert_close(traced(2 * x)[0], ours(2 * x)[0])
    a = torch.randn(4, 2, 3)
    torch.testing.assert_close(torch.jit.trace(st.linear_recurrence, (a, a))(-a, a), st.linear_recurrence(-a, a))


def test_the_operators_are_what_they_say() -> None:
    """PyTorch's own checks of schemas, shapes, autograd, and of graphs with free sizes."""
    x, h0, w_ih, w_hh, bias = (torch.randn(s, requires_grad=True) for s in ((6, 2), (2, 3), (9, 2), (9, 3), (9,)))
    torch.library.opcheck(ops.run_op, ("gru", True, None, x, h0, None, w_ih, w_hh, bias, bias))
    y, _, _, h, c, gates = (t.detach() for t in ops.run_op("gru", True, None, x, h0, None, w_ih, w_hh, bias, bias))
    arguments = (True, True, y, None, None, h, c, gates, "gru", True, None, x, h0, None, w_ih, w_hh, bias, bias)
    torch.library.opcheck(ops.run_back, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("kind", ["gru", "lstm", "rnn_tanh"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_reversed_run_gives_outputs_of_their_own(kind: str, steps: int) -> None:
    """One step reversed is itself, and must still not be the kept states that the gradient reads."""
    parts = {"gru": 3, "lstm": 4, "rnn_tanh": 1}[kind]
    w_ih, w_hh, bias = (torch.randn(s) for s in ((3 * parts, 2), (3 * parts, 3), (3 * parts,)))
    c0 = torch.zeros(2, 3) if kind == "lstm" else None
    for reverse in (False, True):
        x, h0 = torch.randn(2 * steps, 2), torch.zeros(2, 3)
        *outputs, h, _, _ = ops.run_op(kind, reverse, None, x, h0, c0, w_ih, w_hh, bias, bias)
        kept = h.clone()
        for output in outputs:
            if output is not None:
                output.fill_(7)
        torch.testing.assert_close(h, kept, rtol=0, atol=0)


def test_a_compiled_model_is_one_graph(pair: Any) -> None:
    _, ours = pair("GRU", 2, 3, 2, batch_first=True, bidirectional=True)
    _, cell = pair("RNNCell", 6, 3)

    def model(x: Any) -> Any:
        return cell(ours(x.sin())[0][:, -1]).cos()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    found = []
    for function in (model, compiled):
        for steps in (4, 5):
            torch.manual_seed(1)
            x = torch.randn(2, steps, 2, dtype=torch.float64, requires_grad=True)
            y = function(x)
            found.append((y, *torch.autograd.grad(y.sum(), [x, *ours.parameters(), *cell.parameters()])))
    torch.testing.assert_close(found[2:], found[:2])


def test_a_compiled_packed_sequence(pair: Any) -> None:
    _, ours = pair("GRU", 2, 3, bidirectional=True)
    packed = pack_sequence([torch.randn(n, 2, dtype=torch.float64) for n in (2, 5, 1)], enforce_sorted=False)
    compiled = torch.compile(lambda p: ours(p)[0].data, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(packed), ours(packed)[0].data)


def test_a_compiled_transform_loses_no_tangent(pair: Any) -> None:
    """The graph is broken there; what the operator would drop without a word is the derivative itself."""
    _, ours = pair("GRU", 2, 3)
    x = torch.randn(4, 2, 2, dtype=torch.float64)

    def function(x: Any) -> Any:
        return jvp(lambda x: ours(x)[0], (x,), (torch.cos(x),))[1]

    torch.testing.assert_close(torch.compile(function, backend="eager")(x), function(x))
    with pytest.raises(NotImplementedError):
        arguments = "gru", False, None, x.reshape(8, 2), torch.zeros(2, 3).double(), None
        weights = [p.detach() for p in ours.parameters()]
        jvp(lambda x: ops.run_op(*arguments[:3], x, *arguments[4:], *weights)[0], (arguments[3],), (arguments[3],))
