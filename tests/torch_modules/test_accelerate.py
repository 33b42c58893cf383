"""accelerate: what it replaces, what stays as it was, and what it leaves alone."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import parametrizations, parametrize, prune, weight_norm  # noqa: E402

import sparsebp.torch as st  # noqa: E402
from sparsebp.core.errors import OptionError  # noqa: E402
from sparsebp.torch.choosing import ChoosingGRU, ChoosingLSTM, ChoosingRNN  # noqa: E402
from torch_modules_reference import assert_same  # noqa: E402


class Model(torch.nn.Module):
    """A shared layer, one in a container, one behind a plain list, and what is not recurrent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.GRU(3, 4, bidirectional=True)
        self.inner = torch.nn.ModuleDict({"rnn": torch.nn.RNN(8, 4), "again": self.first})
        self.last = torch.nn.LSTM(4, 5, proj_size=2)
        self.aliases = [self.first]
        self.head = torch.nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        y = self.inner["rnn"](self.first(x)[0])[0]
        return self.head(self.last(y)[0]), self.aliases[0](x)[1]


def quietly(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return st.accelerate(model)


def test_a_model_keeps_everything_but_the_classes() -> None:
    model = Model().double()
    model.first.weight_hh_l0.requires_grad_(False)
    before, parameters, keys = copy.deepcopy(model), list(model.parameters()), list(model.state_dict())
    model.eval()
    assert quietly(model) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == keys
    assert [type(m) for m in (model.first, model.inner["rnn"], model.last)] == [ChoosingGRU, ChoosingRNN, ChoosingLSTM]
    assert model.first is model.inner["again"] is model.aliases[0]
    assert not model.first.training
    assert not model.first.weight_hh_l0.requires_grad
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    model.train()
    model.requires_grad_(True)
    before.requires_grad_(True)
    assert_same(before, model, x)
    quietly(model)
    assert_same(before, pickle.loads(pickle.dumps(model)), x)


def test_a_layer_by_itself() -> None:
    layer = torch.nn.GRU(3, 4)
    assert quietly(layer) is layer
    assert type(layer) is ChoosingGRU
    assert repr(layer) == "GRU(3, 4)"
    assert quietly(torch.nn.Linear(1, 1))
    with pytest.raises(OptionError, match="nothing to accelerate"):
        st.accelerate([layer])  # type: ignore[type-var]


def test_hooks_stay_and_are_called() -> None:
    layer, called = torch.nn.GRU(3, 4), []
    layer.register_forward_pre_hook(lambda m, a: called.append("before"))
    layer.register_forward_hook(lambda m, a, y: called.append("behind"))
    layer.register_full_backward_hook(lambda m, gx, gy: called.append("back"))
    quietly(layer)(torch.randn(5, 2, 3, requires_grad=True))[0].sum().backward()
    assert called == ["before", "behind", "back"]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*weight_norm")
def test_weights_that_hooks_compute() -> None:
    """Pruning and the older weight_norm put a tensor in the parameter's place before every call."""
    for change in (
        lambda m: prune.random_unstructured(m, "weight_hh_l0", 0.5),
        lambda m: weight_norm(m, "weight_ih_l0"),
    ):
        theirs = torch.nn.GRU(3, 4, dtype=torch.float64)
        change(theirs)
        ours = copy.copy(theirs)  # the same parameters
        x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
        theirs(x)
        assert_same(theirs, quietly(ours), x)


@pytest.mark.parametrize("first", ["accelerated", "parametrized"])
def test_parametrizations(first: str) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.GRU(3, 4, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    if first == "accelerated":
        quietly(ours)
    for module in (theirs, ours):
        parametrizations.weight_norm(module, "weight_hh_l0")
    if first == "parametrized":
        with pytest.warns(UserWarning, match=r"the model \(ParametrizedGRU\): a class of its own"):
            st.accelerate(ours)
        assert st.explain(ours)[0].replaced is False
    else:
        assert isinstance(ours, st.GRU)
    assert parametrize.is_parametrized(ours, "weight_hh_l0")
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    assert_same(theirs, ours, x)


class Louder(torch.nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:
        y, h = super().forward(input, hx)
        return 2 * y, h


def test_what_is_left_alone_and_why() -> None:
    model = torch.nn.Sequential()
    model.append(Louder(3, 4))
    model.append(torch.nn.GRU(3, 4, dtype=torch.float16))
    model.append(torch.nn.RNN(3, 257))
    model.append(torch.nn.RNN(3, 4))
    model[3].forward = model[3].forward
    model.append(torch.nn.GRU(3, 4))
    model.append(torch.nn.GRUCell(3, 4))
    kinds = [type(m) for m in model]
    told = st.explain(model)
    with pytest.warns(UserWarning, match="accelerate leaves alone 0 .*; 1 .*; 2 .*257.*; 3 .*; 5 .*") as caught:
        st.accelerate(model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [type(m) for m in model] == [*kinds[:4], ChoosingGRU, torch.nn.GRUCell]
    assert [(o.name, o.module, o.replaced) for o in told] == [
        ("0", "Louder", False), ("1", "GRU", False), ("2", "RNN", False), ("3", "RNN", False), ("4", "GRU", True),
        ("5", "GRUCell", False),
    ]  # fmt: skip
    assert st.explain(model) == told
    assert all(bool(o.reason) != o.replaced for o in told)
    with pytest.warns(UserWarning, match="accelerate leaves alone 0 .*; 1 .*; 3 .*"):
        st.accelerate(model, faster_only=False)
    assert [type(m) for m in model] == [*kinds[:2], st.RNN, kinds[3], st.GRU, st.GRUCell]


def test_the_rule_of_size_knows_the_dtype() -> None:
    assert type(quietly(torch.nn.LSTM(3, 4).double())) is ChoosingLSTM
    layer = torch.nn.LSTM(3, 129)
    with pytest.warns(UserWarning, match="beyond 128"):
        st.accelerate(layer)
    assert type(layer) is torch.nn.LSTM
    st.accelerate(layer, faster_only=False)
    assert type(layer) is st.LSTM
    assert type(st.accelerate(st.GRU(3, 4))) is st.GRU


def packed(steps: int, dtype: Any) -> Any:
    return torch.nn.utils.rnn.pack_sequence([torch.randn(n, 3, dtype=dtype) for n in (steps, 2)])


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_calls_that_pytorch_is_faster_at_run_its_forward(
    kind: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = getattr(torch.nn, kind)
    theirs = plain(3, 4, num_layers=2, bidirectional=True, dtype=dtype)
    ours, called = quietly(copy.deepcopy(theirs)), []
    forward = plain.forward
    monkeypatch.setattr(plain, "forward", lambda module, *inputs: called.append(module) or forward(module, *inputs))

    def left(x: Any, **options: Any) -> bool:
        called.clear()
        found = ours(x, **options)[0]
        was_left = bool(called)
        want = theirs(x)[0]
        pairs = ((found.data, want.data) if isinstance(x, torch.nn.utils.rnn.PackedSequence) else (found, want),)
        for one, other in pairs:
            torch.testing.assert_close(one, other)
        return was_left

    long_is_left = kind == "LSTM" and dtype == torch.float32
    x = torch.randn(40, 2, 3, dtype=dtype)
    few = 7 if kind == "GRU" else 15
    assert left(x[:few]) and left(x[:3, 0]) and left(packed(15, dtype))
    if not long_is_left:
        assert not left(x[: few + 1])
        with torch.no_grad():
            assert left(x[:15]) and not left(x[:32])
    assert not left(torch.randn(256, 1, 3, dtype=dtype))
    assert left(x) is left(x[:, 0]) is long_is_left
    assert not left(packed(40, dtype))
    assert not left(x[:5], lengths=[5, 5])
    ours.batch_first = theirs.batch_first = True
    assert left(x) and left(x.transpose(0, 1)) is long_is_left
    called.clear()
    torch.func.vmap(lambda v: ours(v)[0])(torch.randn(2, 2, 5, 3, dtype=dtype))
    changed = {name: 2 * weight for name, weight in ours.named_parameters()}
    found = torch.func.functional_call(ours, changed, (x,))[0]
    with torch.autocast("cpu", enabled=dtype == torch.float32):
        assert ours(x)[0].dtype == dtype
    assert bool(called) is (dtype == torch.float64)  # the last call alone, without autocast
    torch.testing.assert_close(found, torch.func.functional_call(theirs, changed, (x,))[0])


def test_an_optimizer_made_before_trains_the_accelerated_model() -> None:
    found = []
    for change in (lambda m: m, st.accelerate):
        torch.manual_seed(0)
        model = torch.nn.GRU(3, 4, dtype=torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        change(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(5, 2, 3, dtype=torch.float64))[0].square().mean().backward()
            optimizer.step()
        found.append(list(model.parameters()))
    torch.testing.assert_close(found[1], found[0])


def test_a_missing_torch_names_the_extra() -> None:
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; import sparsebp; import sparsebp.torch"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingDependencyError" in result.stderr
    assert "pip install 'sparsebp[torch]'" in result.stderr
