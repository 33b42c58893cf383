"""Accelerated modules behave as torch.nn's: who runs a call, its results, and PyTorch's transforms."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st_  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import sparsebp.torch as st  # noqa: E402
from sparsebp.core.errors import OptionError  # noqa: E402
from sparsebp.torch import rule  # noqa: E402
from sparsebp.torch.dispatch import ATTRIBUTES, dispatch_of  # noqa: E402
from sparsebp.torch.rule import way_of  # noqa: E402
from torch_modules_reference import assert_same, tensors  # noqa: E402

KINDS = ["RNN", "GRU", "LSTM"]
FEATURES, HIDDEN, LONG = 3, 4, 300
"""From `LONG` steps on the kernels run every call of so few units."""


class Model(nn.Module):
    """A recurrent layer of each kind, with a layer before and one behind."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.gru, self.lstm = nn.RNN(3, 4), nn.GRU(4, 5), nn.LSTM(5, 4)
        self.norm, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        y = self.lstm(self.gru(self.rnn(2 * x)[0])[0])[0]
        return self.head(self.drop(self.norm(y[-1])))


def pair(kind: str, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Return a module of torch.nn, and an accelerated copy."""
    theirs = getattr(nn, kind)(*args, **options)
    return theirs, st.accelerate(copy.deepcopy(theirs))


def runs_kernels(module: Any, x: Any) -> bool:
    """Say which way a call goes, by what explain says."""
    (outcome,) = st.explain(module, x)
    return outcome.replaced


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of PyTorch's own forwards."""
    found: list[str] = []

    def spy(kind: type[nn.Module]) -> Any:
        forward = kind.forward
        return lambda self, *args, **named: (found.append(kind.__name__), forward(self, *args, **named))[1]

    for kind in (nn.RNN, nn.GRU, nn.LSTM):
        monkeypatch.setattr(kind, "forward", spy(kind))
    yield found


WEIGHTS = 2 * 21 * (FEATURES + 7) + 2 * 21 * (2 * 7 + 7)
"""Weights of a GRU of two layers of seven units in two directions."""

# ---- which way ------------------------------------------------------------------------------------------------------


def sequences(steps: int, packed: bool, dtype: Any, uniform: bool = False) -> Any:
    if not packed:
        return torch.randn(steps, 2, FEATURES, dtype=dtype)
    return pack_sequence(
        [torch.randn(n, FEATURES, dtype=dtype) for n in (steps, steps if uniform else max(1, steps - 1))]
    )


@pytest.mark.parametrize("key", rule.COSTS)
def test_the_table_decides_and_explain_says_so(key: Any, called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call goes where it is predicted to take less time."""
    case = rule.Case(*key)
    dtype = torch.float64 if case.in_float64 else torch.float32
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 if case.threaded else 1)
    module = st.accelerate(getattr(nn, case.cell)(FEATURES, HIDDEN, dtype=dtype))
    for steps in (9, 40):
        x, sizes = sequences(steps, case.packed, dtype), rule.Sizes(FEATURES, HIDDEN, 2, steps, 2 * steps - case.packed)
        ours, theirs = rule.predicted(case, sizes)
        with torch.set_grad_enabled(case.trains):
            (told,) = st.explain(module, x)
            called.clear()
            module(x)
        assert told.replaced is not bool(called)
        assert told.replaced is (ours < theirs)
        assert f"{case}, {sizes}: about {ours * 1e3:.3g} ms by the kernels" in told.reason
        assert told.reason.startswith("the kernels: " if told.replaced else "PyTorch's forward: ")


def test_a_size_that_was_not_measured_is_left_to_pytorch() -> None:
    way = way_of(nn.GRU(FEATURES, rule.MOST + 1), torch.randn(LONG, 2, FEATURES))
    assert not way.ours
    assert f"H = {rule.MOST + 1} > {rule.MOST}" in way.why


def costs(place: int, each: float) -> tuple[float, ...]:
    return tuple(each if number == place else 0.0 for number in range(8))


@pytest.mark.parametrize(("place", "limit"), [
    (0, 4), (1, 4 * 5), (2, 4 * 30), (3, 4 * 30 * 3 * 7), (4, 30 * WEIGHTS), (5, 40 / 4 * WEIGHTS), (6, 5 * WEIGHTS),
    (7, WEIGHTS),
])  # fmt: skip
def test_the_sizes_of_a_call_come_to_the_rule(place: int, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers in two directions, over five steps of six samples: what each term counts."""
    rule._by_size.cache_clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    key = "GRU", False, False, True, False
    for batch_first in (False, True):
        module = nn.GRU(FEATURES, 7, 2, bidirectional=True, batch_first=batch_first)
        x = torch.randn((6, 5, FEATURES) if batch_first else (5, 6, FEATURES))
        for least, ours in ((limit * 0.999, True), (limit * 1.001, False)):
            # PyTorch pays 1 for each unit of the term; the kernels `least` for each call, of which there are four runs
            monkeypatch.setitem(rule.COSTS, key, (costs(0, least / 4), costs(place, 1.0)))
            rule._by_size.cache_clear()
            assert way_of(module, x).ours is ours
    rule._by_size.cache_clear()


def test_packed_sequences_are_counted_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for cell in ("GRU", "LSTM"):
        monkeypatch.setitem(rule.COSTS, (cell, False, True, True, False), (costs(0, 11.5), costs(2, 1.0)))
        monkeypatch.setitem(rule.COSTS, (cell, False, False, True, False), (costs(0, 0.0), costs(0, 0.0)))
        rule._by_size.cache_clear()
        module = getattr(nn, cell)(FEATURES, 7)
        assert not way_of(module, sequences(6, True, torch.float32)).ours  # 11 rows
        # PyTorch's float32 LSTM runs sequences of one length as padded ones
        assert way_of(module, sequences(6, True, torch.float32, uniform=True)).ours is (cell == "GRU")
    rule._by_size.cache_clear()


def test_the_decision_computes_nothing() -> None:
    """It is made before every call, of one step, too."""

    class Operations(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return function(*args, **(kwargs or {}))

    module = st.accelerate(nn.GRU(FEATURES, HIDDEN))
    for x in (torch.randn(1, 2, FEATURES), torch.randn(LONG, 2, FEATURES), sequences(3, True, torch.float32)):
        with Operations() as seen:
            way_of(module, x)
        assert seen.count == 0


def test_a_mode_of_the_dispatcher_sees_pytorchs_operations(called: list[str]) -> None:
    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    module = st.accelerate(nn.GRU(FEATURES, HIDDEN))
    with Nothing():
        module(torch.randn(LONG, 2, FEATURES))
    assert called == ["GRU"]


@pytest.mark.parametrize(("kind", "steps", "dtype"), [
    *((kind, steps, dtype) for kind in KINDS for steps, dtype in ((3, torch.bfloat16), (40, torch.float16))),
    ("RNN", LONG, torch.bfloat16),
])  # fmt: skip
def test_dtypes_without_kernels_run_pytorchs_forward(kind: str, steps: int, dtype: Any) -> None:
    theirs, ours = pair(kind, 6, 10)
    theirs.to(dtype), ours.to(dtype)
    x = torch.randn(steps, 2, 6).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    lengths = [steps, 2]
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
    want = pad_packed_sequence(theirs(packed)[0], total_length=steps)[0]
    torch.testing.assert_close(ours(x, lengths=lengths)[0], want, rtol=0, atol=0)
    assert str(dtype) in st.explain(ours, x)[0].reason
    assert runs_kernels(ours.float(), torch.randn(LONG, 2, 6))
    st.accelerate(ours, faster_only=False)
    torch.testing.assert_close(ours.to(dtype)(x), theirs(x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [3, LONG])
def test_autocast_is_pytorchs(kind: str, steps: int) -> None:
    theirs, ours = pair(kind, FEATURES, HIDDEN)
    x = torch.randn(steps, 2, FEATURES)
    if kind == "LSTM" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("PyTorch itself has no LSTM in bfloat16 on this processor")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
        assert not runs_kernels(ours, x)
    assert runs_kernels(ours, x)


def test_inputs_that_pytorch_refuses_are_refused_by_it() -> None:
    theirs, ours = pair("GRU", FEATURES, HIDDEN)
    for x in (torch.randn(2), torch.randn(2, 2, 2, 3), torch.randn(40, 2, 4), torch.randn(40, 2, 3).double(), [1.0]):
        with pytest.raises(Exception) as theirs_:
            theirs(x)
        with pytest.raises(theirs_.type):
            ours(x)


def test_what_pytorch_has_no_rule_for_is_run_by_the_kernels(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size; a gradient, for which it has one, by the size."""
    monkeypatch.setattr(rule, "predicted", lambda case, sizes: (2.0, 1.0))
    rule._by_size.cache_clear()
    for kind in KINDS:
        ours = st.accelerate(getattr(nn, kind)(FEATURES, HIDDEN))
        torch.func.vmap(lambda x, m=ours: m(x)[0])(torch.randn(5, 2, 3, FEATURES))
    assert not called
    x = torch.randn(2, 3, FEATURES)
    torch.func.jvp(lambda x: ours(x)[0], (x,), (x,))
    assert not called
    torch.func.grad(lambda x: ours(x)[0].sum())(x)
    assert called == ["LSTM"]
    rule._by_size.cache_clear()


def test_cells_are_run_on_demand() -> None:
    for kind in ("RNNCell", "GRUCell", "LSTMCell"):
        theirs = getattr(nn, kind)(FEATURES, HIDDEN, dtype=torch.float64)
        ours = st.accelerate(copy.deepcopy(theirs), faster_only=False)
        assert type(ours) is type(theirs)
        x = torch.randn(2, FEATURES, dtype=torch.float64)
        assert_same(theirs, ours, x)
        assert st.explain(ours, x)[0].replaced
        ours.bfloat16(), theirs.bfloat16()
        torch.testing.assert_close(ours(x.bfloat16()), theirs(x.bfloat16()), rtol=0, atol=0)
        assert ATTRIBUTES[0] not in vars(st.restore(ours))


# ---- the same results -----------------------------------------------------------------------------------------------


def _renewed(module: Any) -> None:
    module.weight_hh_l0 = nn.Parameter(module.weight_hh_l0.detach() * 0.5)


def _tied(module: Any) -> None:
    module.bias_ih_l0 = module.bias_hh_l0


def _in_float32(module: Any) -> None:
    module.float()


def _loaded(module: Any) -> None:
    module.load_state_dict({key: 0.5 * value for key, value in module.state_dict().items()})


CHANGES = [lambda module: None, _renewed, _tied, _in_float32, _loaded, lambda module: module.flatten_parameters(),
           lambda module: module.share_memory(), lambda module: module.eval(),
           lambda module: parametrizations.weight_norm(module, "weight_hh_l0")]  # fmt: skip
COPIES = [lambda module: module, copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]


@given(st_.data())
def test_any_module_any_call(data: Any) -> None:
    """Outputs and all gradients, whatever was done with the module since it was accelerated."""
    draw = data.draw
    torch.manual_seed(draw(st_.integers(0, 9)))
    kind, bias = draw(st_.sampled_from(KINDS)), draw(st_.booleans())
    options = {
        "num_layers": draw(st_.integers(1, 2)), "bidirectional": draw(st_.booleans()), "bias": bias,
        "batch_first": draw(st_.booleans()), "dtype": torch.float64,
    }  # fmt: skip
    if kind == "LSTM":
        options["proj_size"] = draw(st_.sampled_from([0, 2]))
    if kind == "RNN":
        options["nonlinearity"] = draw(st_.sampled_from(["tanh", "relu"]))
    theirs, ours = pair(kind, FEATURES, HIDDEN, **options)
    ours = draw(st_.sampled_from(COPIES))(ours)
    assert dispatch_of(ours).module is ours
    change = draw(st_.sampled_from(CHANGES if bias else [c for c in CHANGES if c is not _tied]))
    for module in (theirs, ours):
        change(module)
    if draw(st_.booleans()):  # the kernels or PyTorch's, whatever else
        st.accelerate(ours, faster_only=False)
    dtype = ours.weight_ih_l0.dtype
    steps, form = draw(st_.sampled_from([1, 3, 40])), draw(st_.sampled_from(["padded", "packed", "unbatched"]))
    if form == "packed":
        x = sequences(steps, True, dtype)
    else:
        shape = (steps, FEATURES) if form == "unbatched" else (steps, 2, FEATURES)
        x = torch.randn(shape, dtype=dtype)
        x = x.transpose(0, 1).contiguous() if ours.batch_first and form == "padded" else x
    if draw(st_.booleans()):
        with torch.no_grad():
            found, want = tensors(ours(x)), tensors(theirs(x))
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    elif dtype == torch.float64:
        assert_same(theirs, ours, x)
    else:
        torch.testing.assert_close(tensors(ours(x)), tensors(theirs(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [3, LONG])
def test_hooks_are_called_once(steps: int) -> None:
    module, calls = st.accelerate(nn.GRU(FEATURES, HIDDEN)), []
    module.register_forward_pre_hook(lambda m, a: calls.append("before"))
    module.register_forward_hook(lambda m, a, y: calls.append("behind"))
    module.register_full_backward_pre_hook(lambda m, gy: calls.append("back before"))
    module.register_full_backward_hook(lambda m, gx, gy: calls.append("back"))
    everywhere = nn.modules.module.register_module_forward_hook(lambda m, a, y: calls.append("everywhere"))
    try:
        module(torch.randn(steps, 2, FEATURES, requires_grad=True))[0].sum().backward()
    finally:
        everywhere.remove()
    assert calls == ["before", "everywhere", "behind", "back before", "back"]


@pytest.mark.parametrize("steps", [3, LONG])
def test_functional_call(steps: int) -> None:
    theirs, ours = pair("GRU", FEATURES, HIDDEN, dtype=torch.float64)
    x = torch.randn(steps, 2, FEATURES, dtype=torch.float64)
    changed = {name: 2 * weight for name, weight in ours.named_parameters()}
    for _ in range(2):
        found, want = (torch.func.functional_call(m, changed, (x,)) for m in (ours, theirs))
        torch.testing.assert_close(found, want)
    torch.testing.assert_close(ours(x), theirs(x))


# ---- torch.nn's classes ---------------------------------------------------------------------------------------------


def test_apply_and_exact_classes() -> None:
    model, seen = st.accelerate(Model()), []

    def init(module: nn.Module) -> None:
        if isinstance(module, (nn.RNN, nn.GRU, nn.LSTM)):
            seen.append(type(module))

    model.apply(init)
    assert seen == [nn.RNN, nn.GRU, nn.LSTM]
    assert repr(model) == repr(Model())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantization() -> None:
    plain = Model().eval()
    ours = st.accelerate(copy.deepcopy(plain))
    kinds = {nn.GRU, nn.LSTM, nn.Linear}
    x = torch.randn(40, 2, 3)
    engine = torch.backends.quantized.engine
    if engine == "none":
        pytest.skip("this PyTorch has no quantized kernels")
    found, want = (torch.ao.quantization.quantize_dynamic(m, kinds) for m in (ours, plain))
    assert type(found.gru) is torch.ao.nn.quantized.dynamic.GRU
    assert type(found.lstm) is torch.ao.nn.quantized.dynamic.LSTM
    assert type(ours.gru) is nn.GRU
    torch.testing.assert_close(found(x), want(x))


def test_restore_leaves_nothing() -> None:
    plain = Model()
    before = {name: dict(vars(module)) for name, module in plain.named_modules()}
    assert st.restore(st.accelerate(st.accelerate(plain), faster_only=False)) is plain
    for name, module in plain.named_modules():
        assert vars(module).keys() == before[name].keys(), name
        assert all(value is before[name][key] for key, value in vars(module).items())
    assert st.restore(st.restore(st.accelerate(nn.GRU(1, 1)))).forward.__func__ is nn.GRU.forward
    with pytest.raises(OptionError, match="nothing to restore"):
        st.restore(3)  # type: ignore[type-var]


def test_copies_are_accelerated_and_their_own() -> None:
    """A shallow copy, a replica of DataParallel: with options of its own, and its own forward."""
    ours = st.accelerate(nn.GRU(FEATURES, FEATURES, batch_first=False))
    x = torch.randn(40, 2, FEATURES)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    copies = [make(ours) for make in COPIES[1:]] + [torch.load(file, weights_only=False)]
    copies.append(copies[0].__copy__() if hasattr(copies[0], "__copy__") else copy.copy(copies[0]))
    for other in copies:
        assert dispatch_of(other).module is other
        other.batch_first = True
        torch.testing.assert_close(other(x.transpose(0, 1))[1], ours(x)[1])
        st.restore(other)
        assert dispatch_of(ours) is not None
    replica = ours._replicate_for_data_parallel()
    assert dispatch_of(replica).module is replica
    weighted = parametrizations.weight_norm(st.accelerate(nn.GRU(FEATURES, HIDDEN)), "weight_hh_l0")
    other = copy.deepcopy(weighted)
    assert dispatch_of(other).module is other
    torch.testing.assert_close(other(x), weighted(x))


def test_other_modules_are_pickled_as_ever() -> None:
    written = pickle.dumps(nn.GRU(2, 3))
    assert b"sparsebp" not in written
    assert type(pickle.loads(written)) is nn.GRU
    assert ATTRIBUTES[0] not in vars(copy.copy(nn.GRU(2, 3)))


def test_symbolic_trace_takes_it_as_a_leaf() -> None:
    plain = Model().eval()
    ours = st.accelerate(copy.deepcopy(plain))
    traced = torch.fx.symbolic_trace(ours)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"][:3] == ["rnn", "gru", "lstm"]
    x = torch.randn(40, 2, 3)
    torch.testing.assert_close(traced(x), plain(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript() -> None:
    """A trace holds PyTorch's operations; a script, which is made of sources, is refused."""
    plain = nn.GRU(FEATURES, HIDDEN)
    ours, x = st.accelerate(copy.deepcopy(plain)), torch.randn(LONG, 2, FEATURES)
    traced = torch.jit.trace(ours, x)
    assert "aten::gru" in str(traced.graph)
    torch.testing.assert_close(traced(x), plain(x))
    holder = Holder(ours)
    with pytest.raises(OptionError, match=r"restore\(model\)"):
        torch.jit.script(holder)
    assert holder.rnn is ours
    assert dispatch_of(ours) is not None
    torch.testing.assert_close(torch.jit.script(st.restore(holder))(x), plain(x)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", [*KINDS, "RNNCell", "GRUCell", "LSTMCell"])
def test_a_trace_holds_pytorchs_operations_whatever_runs_other_calls(kind: str) -> None:
    plain = getattr(nn, kind)(FEATURES, HIDDEN)
    ours = st.accelerate(copy.deepcopy(plain), faster_only=False)
    x = torch.randn(2, FEATURES) if kind.endswith("Cell") else torch.randn(5, 2, FEATURES)
    traced = torch.jit.trace(ours, x)
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert "prim::PythonOp" not in kinds and {kind.partition("::")[0] for kind in kinds} <= {"aten", "prim"}
    for found, wanted in zip(traced(x), plain(x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_compiled_models_break_where_pytorchs_do() -> None:
    """The call is not cut into small graphs, which cost more than it does."""
    from torch._dynamo.utils import counters

    plain = nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 4))
    ours = st.accelerate(copy.deepcopy(plain))
    frames = []
    for model in (plain, ours):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(model, backend="eager")
        for steps in (4, LONG):
            x = torch.randn(steps, 2, 3)
            torch.testing.assert_close(compiled(x), plain(x))
        frames.append(dict(counters["frames"]))
    torch._dynamo.reset()
    assert frames[1] == frames[0]


@pytest.mark.parametrize("call", [lambda m: m, lambda m: m.forward, lambda m: lambda x: m(2 * x)])
def test_a_call_and_its_callees_are_not_compiled(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is set aside inside, and active again behind it."""
    seen: list[Any] = []

    def spy(*args: Any) -> Any:
        seen.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
        return way_of(*args)

    monkeypatch.setattr("sparsebp.torch.dispatch.way_of", spy)
    gru = st.accelerate(nn.GRU(FEATURES, HIDDEN))
    compiled = torch.compile(call(gru), backend="eager")
    for steps in (12, LONG):
        compiled(torch.randn(steps, 2, FEATURES))
    torch._dynamo.reset()
    assert seen == [None, None]

    with pytest.raises(Exception, match=r"restore\(model\)"):
        torch.compile(gru.forward, backend="eager", fullgraph=True)(torch.randn(LONG, 2, FEATURES))
    torch._dynamo.reset()


# ---- explain --------------------------------------------------------------------------------------------------------


def test_explain_of_a_model_says_what_each_call_does(called: list[str]) -> None:
    model = st.accelerate(Model())
    model.register_buffer("seen", torch.zeros(3))
    for steps in (3, 40, LONG):
        x = torch.randn(steps, 2, 3)
        before = copy.deepcopy(model.state_dict())
        noise = torch.get_rng_state()
        told = st.explain(model, x)
        assert torch.equal(torch.get_rng_state(), noise)
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key
        called.clear()
        model(x)
        assert [o.name for o in told] == ["rnn", "gru", "lstm"]
        assert [o.module for o in told if not o.replaced] == called
    (reason,) = {o.reason for o in st.explain(model, torch.randn(40, 2, 3)) if o.name == "lstm"}
    assert re.search(r"float32 LSTM, .*, I = \d+, H = \d+, B = \d+, T = 40: about .* ms by the kernels", reason)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_explain_of_a_plain_model_and_of_our_own() -> None:
    """What accelerate would do; a module that is called twice is told of twice."""
    plain = nn.GRU(FEATURES, FEATURES)
    assert runs_kernels(plain, torch.randn(LONG, 2, FEATURES))
    assert dispatch_of(plain) is None
    twice = nn.Sequential(plain, Firsts(), plain, Firsts(), nn.GRUCell(FEATURES, HIDDEN))
    told = st.explain(twice, torch.randn(LONG, FEATURES))
    assert [(o.name, o.replaced) for o in told] == [("0", True), ("0", True), ("4", False)]
    assert [o.replaced for o in st.explain(twice, torch.randn(2, FEATURES), faster_only=False)] == [True] * 3
    assert "sparsebp.torch.GRU" in st.explain(st.GRU(FEATURES, HIDDEN), torch.randn(2, 2, FEATURES))[0].reason
    x = torch.randn(40, 2, FEATURES)
    (told_,) = st.explain(st.accelerate(nn.LSTM(FEATURES, HIDDEN)), input=x, lengths=[40, 3])
    assert re.search("float32 LSTM, packed, .* T = 40", told_.reason)
    with pytest.raises(OptionError, match="nothing to explain"):
        st.explain(3)  # type: ignore[arg-type]


def test_explain_puts_back_buffers_of_every_kind() -> None:
    """Those that the call assigns, writes to, or reads alone, whether or not they can be written to."""

    class Streaming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(FEATURES, HIDDEN)
            self.register_buffer("last", None)
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("scale", torch.ones(FEATURES))
            self.register_buffer("expanded", torch.ones(1).expand(FEATURES))
            with torch.inference_mode():
                self.register_buffer("of_inference", torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, self.last = self.rnn(x * self.scale * self.expanded, self.last)
            self.calls += 1
            return y

    model = st.accelerate(Streaming())
    x = torch.randn(3, 2, FEATURES, requires_grad=True)
    y = model(x)
    calls, count = model.calls, int(model.calls)
    for before in (torch.ones(1, 2, HIDDEN), None):
        model.last = before
        st.explain(model, x)
        assert model.last is before
    assert model.calls is calls
    assert int(calls) == count
    y.sum().backward()  # what the graph holds was not written to
    assert x.grad is not None


class Holder(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Firsts(nn.Module):
    def forward(self, value: Any) -> Any:
        return value[0].data if isinstance(value[0], PackedSequence) else value[0]
