"""Calls of one step or a few: PyTorch's results, whatever the sizes, the mode, and what became of the weights."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st_  # noqa: E402
from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

import sparsebp.torch as st  # noqa: E402
from sparsebp.kernels.host.rnn import one_step as kernels  # noqa: E402
from sparsebp.torch import one_step  # noqa: E402
from sparsebp.torch.one_step import OneStep  # noqa: E402

KINDS = ["tanh", "relu", "GRU", "LSTM"]
SIZES = st_.sampled_from([1, 2, 3, 5, 8, 13, 17])


def make(kind: str, cell: bool, *sizes: int, **options: Any) -> Any:
    """Return a module of torch.nn."""
    named = {"nonlinearity": kind} if kind in ("tanh", "relu") else {}
    name = ("RNN" if named else kind) + ("Cell" if cell else "")
    return getattr(nn, name)(*sizes, **named, **options)


def flat(found: Any) -> list[Any]:
    """Return the tensors of a result."""
    return [found] if isinstance(found, torch.Tensor) else [tensor for part in found for tensor in flat(part)]


def assert_close(ours: Any, theirs: Any) -> None:
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        tolerance = 1e-5 if b.dtype is torch.float32 else 1e-12
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=tolerance)


def no_grad_call(module: Any, *args: Any) -> Any:
    """Return the result of a call that has to go this way."""
    with torch.no_grad():
        found = OneStep("Cell" in type(module).__name__)(module, *args)
    assert found is not None
    return found


# ---- results --------------------------------------------------------------------------------------------------------


@given(
    kind=st_.sampled_from(KINDS), cell=st_.booleans(), dtype=st_.sampled_from([torch.float32, torch.float64]),
    features=SIZES, hidden=st_.sampled_from([2, 3, 5, 8, 16, 19]), layers=st_.integers(1, 3), bias=st_.booleans(),
    batch_first=st_.booleans(), steps=st_.integers(1, one_step.MOST_STEPS), batch=st_.integers(0, 30),
    strided=st_.booleans(), with_state=st_.booleans(), seed=st_.integers(0, 99), data=st_.data(),
)  # fmt: skip
def test_values_and_gradients_are_those_of_pytorch(
    kind, cell, dtype, features, hidden, layers, bias, batch_first, steps, batch, strided, with_state, seed, data
):
    """`batch` 0 stands for input without a batch axis."""
    torch.manual_seed(seed)
    options = {"bias": bias, "dtype": dtype} | ({} if cell else {"num_layers": layers, "batch_first": batch_first})
    module = make(kind, cell, features, hidden, **options)
    samples = (batch,) if batch else ()
    lead = samples if cell else (*samples, steps) if batch_first and batch else (steps, *samples)
    x = torch.randn(*lead, 2 * features if strided else features, dtype=dtype)
    x = (x[..., ::2] if strided else x).detach().requires_grad_()
    shape = (*(() if cell else (layers,)), *samples, hidden)
    states = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2 if kind == "LSTM" else 1)]
    if strided and batch:
        states[-1] = torch.randn(*shape[:-2], 1, hidden, dtype=dtype).expand(shape).requires_grad_()
    hx = None if not with_state else tuple(states) if len(states) == 2 else states[0]
    theirs = flat(module(x, hx))
    assert_close(no_grad_call(module, x, hx), [y.detach() for y in theirs])
    ours = flat(OneStep(cell)(module, x, hx))
    assert_close(ours, theirs)
    inputs = [x, *(states if with_state else []), *module.parameters()]
    wanted = data.draw(st_.lists(st_.sampled_from(range(len(theirs))), min_size=1, unique=True))
    grads = [torch.randn_like(theirs[i]) for i in wanted]

    def gradients(outputs: list[Any], **named: Any) -> Any:
        return torch.autograd.grad([outputs[i] for i in wanted], inputs, grads, allow_unused=True, **named)

    expected = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients(theirs), inputs, strict=True)]
    assert_close(gradients(ours, retain_graph=True), expected)
    assert_close(gradients(ours, create_graph=True), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_second_order_forward_over_reverse_and_batched(kind: str) -> None:
    module = st.accelerate(make(kind, False, 3, 4, num_layers=2, dtype=torch.float64))
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    assert "few steps" in st.explain(module, x)[0].reason
    inputs = (x, *module.parameters())
    assert torch.autograd.gradgradcheck(lambda x, *_: module(x)[0].sin(), inputs, fast_mode=True)
    y, plain = module(x)[0], copy.deepcopy(st.restore(module))(x)[0]
    many = torch.eye(y.numel(), dtype=torch.float64).reshape(-1, *y.shape)
    rows = [torch.autograd.grad(out, x, many, is_grads_batched=True, retain_graph=True)[0] for out in (y, plain)]
    assert_close(rows[0], rows[1])
    with forward_ad.dual_level():
        g = forward_ad.make_dual(torch.ones_like(y), torch.randn_like(y))
        tangents = [forward_ad.unpack_dual(torch.autograd.grad(out, x, g)[0]).tangent for out in (y, plain)]
        assert_close(tangents[0], tangents[1])


def test_frozen_weights_and_single_gradients() -> None:
    for name in ("weight_ih_l0", "bias_hh_l0", None):
        theirs = nn.LSTM(3, 4)
        theirs.requires_grad_(False)
        if name:
            getattr(theirs, name).requires_grad_()
        ours, x = st.accelerate(copy.deepcopy(theirs)), torch.randn(1, 2, 3, requires_grad=name is None)
        for module in (ours, theirs):
            module(x)[0].sum().backward()
        if name:
            assert_close(getattr(ours, name).grad, getattr(theirs, name).grad)
        assert [p.grad is None for p in ours.parameters()] == [p.grad is None for p in theirs.parameters()]
    assert not ours(x.detach())[0].requires_grad


def test_results_are_memory_of_their_own() -> None:
    """Neither a caller that writes to them, nor the next call, changes anything else."""
    for kind in KINDS:
        module = make(kind, False, 3, 4)
        x, h = torch.randn(1, 2, 3), torch.randn(1, 2, 4)
        hx = (h, h) if kind == "LSTM" else h
        before = h.clone()
        first = flat(no_grad_call(module, x, hx))
        values = [tensor.clone() for tensor in first]
        no_grad_call(module, x, hx)
        assert len({tensor.untyped_storage().data_ptr() for tensor in (*first, h)}) == len(first) + 1
        assert_close(first, values)
        trained = flat(OneStep(False)(module, x, hx))
        for tensor in trained:
            tensor.detach().zero_()  # nothing saved for the backward
        grads = torch.autograd.grad(trained[0].sum(), list(module.parameters()))
        assert_close(grads, torch.autograd.grad(module(x, hx)[0].sum(), list(module.parameters())))
        torch.testing.assert_close(h, before, rtol=0, atol=0)


# ---- weights that change between calls ------------------------------------------------------------------------------


def _in_place(module: Any) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))


def _data(module: Any) -> None:
    for p in module.parameters():
        p.data = torch.randn_like(p)


def _optimizer(module: Any) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(torch.randn(1, 1, 4))[0].sum().backward()
    optimizer.step()


def _replaced(module: Any) -> None:
    module.weight_hh_l0 = nn.Parameter(torch.randn_like(module.weight_hh_l0))


def _transposed(module: Any) -> None:
    module.weight_hh_l0.data = module.weight_hh_l0.data.t()  # RNN: square; the same address


def _resized(module: Any) -> None:
    storage, values = module.weight_ih_l0.untyped_storage(), module.weight_ih_l0.detach().clone()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    module.weight_ih_l0.data.copy_(values + 1)


CHANGES = {
    "in place": _in_place, "data": _data, "optimizer": _optimizer, "replaced": _replaced, "transposed": _transposed,
    "resized": _resized, "loaded": lambda m: m.load_state_dict({n: v + 1 for n, v in m.state_dict().items()}),
    "half and back": lambda m: m.half().float(), "double": lambda m: m.double(), "half": lambda m: m.half(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("trains", [False, True])
def test_weights_are_never_stale(change: str, trains: bool) -> None:
    theirs = nn.RNN(4, 4)
    ours, x = st.accelerate(copy.deepcopy(theirs)), torch.randn(1, 3, 4)
    for _ in range(2):
        for module in (ours, theirs):
            with torch.set_grad_enabled(trains):
                module(x)
            torch.manual_seed(0)
            CHANGES[change](module)
        x = x.to(theirs.weight_ih_l0.dtype)
        with torch.set_grad_enabled(trains):
            assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["bias_ih", "bias_hh", "weight_ih", "weight_hh"])
@pytest.mark.parametrize("kind", KINDS)
def test_pruned_cells_and_parameters_in_another_order(kind: str, name: str) -> None:
    """Pruning takes a parameter away and puts another one behind all others, of the same shape."""
    cell, x = make(kind, True, 4, 4), torch.randn(2, 4)
    prune.l1_unstructured(cell, name, amount=3)
    expected = flat(cell(x))
    assert_close(flat(st.accelerate(cell)(x)), expected)
    cell = make(kind, True, 4, 4)
    first = cell.bias_ih
    del cell.bias_ih
    cell.bias_ih = first
    expected = flat(cell(x))
    assert_close(flat(st.accelerate(cell)(x)), expected)


def test_another_nonlinearity() -> None:
    for module, x in ((nn.RNNCell(3, 4), torch.randn(2, 3)), (nn.RNN(3, 4), torch.randn(1, 2, 3))):
        st.accelerate(module)
        before = flat(module(x))[0]
        for name, value in (("nonlinearity", "relu"), ("mode", "RNN_RELU")):
            if hasattr(module, name):
                setattr(module, name, value)
        expected = flat(st.restore(copy.deepcopy(module))(x))
        assert not torch.equal(expected[0], before)
        assert_close(flat(module(x)), expected)


def test_weights_that_move_between_forward_and_backward() -> None:
    theirs = nn.GRU(3, 4)
    ours, x = st.accelerate(copy.deepcopy(theirs)), torch.randn(1, 2, 3, requires_grad=True)
    grads = []
    for module in (ours, theirs):
        y = module(x)[0]
        for p in module.parameters():
            p.data = p.data.clone()
        grads.append(torch.autograd.grad(y.sum(), x)[0])
    assert_close(*grads)
    for module in (ours, theirs):
        y = module(x)[0]
        with torch.no_grad():
            module.weight_ih_l0.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_functional_call_and_a_model_that_is_deleted() -> None:
    theirs = nn.GRUCell(3, 4)
    ours, x = st.accelerate(copy.deepcopy(theirs)), torch.randn(2, 3)
    other = {name: (p + 1).requires_grad_() for name, p in theirs.state_dict().items()}
    ours(x)
    for module in (ours, theirs):
        y = torch.func.functional_call(module, other, (x,))
        assert_close(y, torch.func.functional_call(theirs, other, (x,)))
        assert all(g is not None for g in torch.autograd.grad(y.sum(), list(other.values())))
    made = {name: p * 2 for name, p in other.items()}  # of a graph, which must not be kept
    alive = weakref.ref(made["weight_ih"])
    torch.func.functional_call(ours, made, (x,))
    del made
    gc.collect()
    assert alive() is None


# ---- calls that are left to the other ways --------------------------------------------------------------------------


class Sub(torch.Tensor):
    """A subclass."""


def test_what_goes_another_way() -> None:
    gru, cell, x, h = nn.GRU(3, 4), nn.GRUCell(3, 4), torch.randn(1, 2, 3), torch.randn(1, 2, 4)
    find, negated = OneStep(False).find, torch.randn(1, 2, 3, dtype=torch.complex64).conj().imag
    assert find(gru, x, h)
    for bad in (
        (x.to_sparse(), h), (x, h.to_sparse()), (x.to_mkldnn(), h), (x, h.to_mkldnn()), (x.double(), h), (x.half(), h),
        (x, h.double()), (x.as_subclass(Sub), h), (x, h.as_subclass(Sub)), (x[0, 0], h), (x[None], h), (x[:, :0], None),
        (x[:0], None), (x, h[0]), (x, h[:, :1]), (x, (h, h)), (x[..., :2], h), (x.to("meta"), h), (negated, h), (1, h),
    ):  # fmt: skip
        assert find(gru, *bad) is None
    assert find(nn.GRU(3, 4, bidirectional=True), x) is None
    assert find(nn.LSTM(3, 4, proj_size=2), x) is None
    assert find(nn.LSTM(3, 4), x, h) is None
    dropping = nn.GRU(3, 4, 2, dropout=0.5)
    assert find(dropping, x) is None
    assert find(dropping.eval(), x)
    for block in (torch.autocast("cpu"), torch.overrides.BaseTorchFunctionMode(), forward_ad.dual_level()):
        with block:
            assert find(gru, x) is None
    assert find(nn.GRU(3, 4, dtype=torch.bfloat16), x) is None
    assert find(gru, x.expand(one_step.MOST_STEPS + 1, 2, 3)) is None
    assert find(gru, torch.randn(1, one_step.MOST_SAMPLES + 1, 3)) is None
    assert find(nn.utils.parametrizations.weight_norm(nn.GRU(3, 4), "bias_hh_l0", dim=None), x) is None
    assert OneStep(True).find(nn.utils.parametrizations.weight_norm(cell, "weight_hh"), x[0]) is None
    assert find(nn.utils.parametrizations.weight_norm(gru, "weight_hh_l0"), x) is None


def test_transforms_traces_and_graphs() -> None:
    theirs = nn.GRU(3, 4)
    ours, x = st.accelerate(copy.deepcopy(theirs)), torch.randn(1, 2, 3)
    many = torch.randn(5, 1, 2, 3)
    assert_close(torch.func.vmap(lambda x: ours(x)[0])(many), torch.stack([theirs(x)[0] for x in many]))
    assert_close(torch.func.jacrev(lambda x: ours(x)[0])(x), torch.func.jacrev(lambda x: theirs(x)[0])(x))
    assert_close(torch.jit.trace(ours, (x,))(2 * x), theirs(2 * x))
    compiled = torch.compile(lambda x: ours(2 * x)[0], backend="eager")
    assert_close(compiled(x), theirs(2 * x)[0])
    torch._dynamo.reset()
    with torch.inference_mode():
        y, h = ours(x)
        assert y.is_inference()
    assert_close(y, theirs(x)[0].detach())
    with torch.no_grad():
        assert not ours(x, h)[1].is_inference()


@pytest.mark.parametrize("cell", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_inference_mode_are_left_to_pytorch_where_there_are_gradients(kind, cell):
    """They cannot be saved for the backward; PyTorch's operations save fewer tensors, and run some of these calls."""
    theirs = make(kind, cell, 3, 4)
    x = torch.randn(*(() if cell else (1,)), 2, 3)
    with torch.inference_mode():
        made = st.accelerate(copy.deepcopy(theirs))
        inferred = x.clone()
        state = made(x) if cell else made(x)[1]
        assert OneStep(cell).find(made, x) is not None
    ours = st.accelerate(copy.deepcopy(theirs))
    for module, *call in ((made, x), (made, inferred), (ours, inferred), (ours, x, state)):
        assert OneStep(cell).find(module, *call) is None
        with torch.no_grad():
            assert OneStep(cell).find(module, *call) is not None
            assert_close(module(*call), theirs(*call))
    if kind in ("tanh", "relu") or cell:
        assert_close(made(x), theirs(x))


def test_tensors_of_a_transform_that_has_ended() -> None:
    left: list[Any] = []
    gru, x = st.accelerate(nn.GRU(3, 4)), torch.randn(1, 2, 3)
    torch.func.grad(lambda x: left.append(2 * x) or x.sum())(x)
    assert_close(gru(left[0])[0], st.restore(copy.deepcopy(gru))(2 * x)[0])
    with torch.no_grad():
        assert_close(gru(left[0])[0], st.restore(copy.deepcopy(gru))(2 * x)[0])


def test_hooks_on_saved_tensors() -> None:
    theirs = nn.GRU(3, 4)
    ours, x = st.accelerate(copy.deepcopy(theirs)), torch.randn(1, 2, 3, requires_grad=True)
    for back in (lambda t: t.clone(), lambda t: t.double().float(), lambda t: torch.stack([t, t], -1)[..., 0]):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, back):
            y = ours(x)[0]
        assert_close(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(theirs(x)[0].sum(), x)[0])
    y = torch.utils.checkpoint.checkpoint(lambda x: ours(x)[0], x, use_reentrant=False)
    assert_close(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(theirs(x)[0].sum(), x)[0])


def test_two_threads_call_one_module() -> None:
    module = st.accelerate(nn.LSTM(5, 7))
    xs = [torch.randn(1, batch, 5) for batch in (1, 2, 9)]
    with torch.no_grad():
        expected = [st.restore(copy.deepcopy(module))(x) for x in xs]
    failed: list[Any] = []

    def work(shift: int) -> None:
        try:
            with torch.no_grad():
                for turn in range(200):
                    at = (turn + shift) % 3
                    assert_close(module(xs[at]), expected[at])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_explain_says_which_way_cells_go() -> None:
    model, x = nn.GRUCell(3, 4), torch.randn(2, 3)
    told = st.explain(model, x)
    assert told[0].replaced
    assert told[0].reason == f"the kernels: float32 GRUCell, few steps, T = 1 ≤ {one_step.MOST_STEPS}"
    (left,) = st.explain(nn.RNNCell(3, 4), torch.randn(one_step.MOST_SAMPLES + 1, 3))
    assert not left.replaced
    assert f"a cell with B > {one_step.MOST_SAMPLES}" in left.reason
    assert_close(st.accelerate(copy.deepcopy(model))(x), model(x))


# ---- the kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize(("batch", "hidden"), [(1, 5), (2, 16), (3, 7), (9, 4), (17, 3)])
def test_the_kernels_write_nothing_beyond_their_arrays(kind: str, batch: int, hidden: int) -> None:
    steps, features, rows = 2, 3, kernels.GATES[kind] * hidden
    sizes = {
        "x": steps * batch * features, "h": batch * hidden, "c": batch * hidden, "w_ih": rows * features,
        "w_hh": rows * hidden, "b_ih": rows, "b_hh": rows,
    }  # fmt: skip
    rng = np.random.default_rng(0)

    def room(size: int) -> np.ndarray:
        return np.concatenate((rng.normal(size=size), np.full(16, 7.0))).astype(np.float32)

    given = {name: room(size) for name, size in sizes.items()}
    at = {name: array.ctypes.data for name, array in given.items()}
    table = kernels.table_of(kind, steps, batch, features, hidden, [at[n] for n in ("w_ih", "w_hh", "b_ih", "b_hh")])
    outputs = [room(steps * batch * hidden), room(batch * hidden), room(batch * hidden),
               room(kernels.saved_of(kind, steps, batch, hidden))]  # fmt: skip
    kernels.forward(given["x"], table, at["x"], at["h"], at["c"], *(out.ctypes.data for out in outputs))
    arriving = [room(steps * batch * hidden), room(batch * hidden), room(batch * hidden)]
    grads = [room(size) for size in sizes.values()]
    kernels.backward(given["x"], table, at["x"], outputs[3].ctypes.data, *(g.ctypes.data for g in (*arriving, *grads)))
    for array in (*given.values(), *outputs, *arriving, *grads):
        assert (array[-16:] == 7).all()
        assert np.isfinite(array).all()
