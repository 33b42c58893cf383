"""`accelerate`: which forwards it replaces and which it does not change."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import parametrizations, parametrize, prune, weight_norm  # noqa: E402

import sparsebp.torch as st  # noqa: E402
from sparsebp.core.errors import OptionError  # noqa: E402
from sparsebp.torch.dispatch import dispatch_of  # noqa: E402
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


def test_a_model_keeps_everything_but_the_forwards() -> None:
    model = Model().double()
    model.first.weight_hh_l0.requires_grad_(False)
    before, parameters, keys = copy.deepcopy(model), list(model.parameters()), list(model.state_dict())
    model.eval()
    assert quietly(model) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == keys
    recurrent = [model.first, model.inner["rnn"], model.last]
    assert [type(m) for m in recurrent] == [torch.nn.GRU, torch.nn.RNN, torch.nn.LSTM]
    assert all(dispatch_of(m) is not None for m in recurrent)
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
    assert type(layer) is torch.nn.GRU
    assert dispatch_of(layer) is not None
    assert repr(layer) == "GRU(3, 4)"
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
        quietly(ours)
    assert isinstance(ours, torch.nn.GRU)
    assert parametrize.is_parametrized(ours, "weight_hh_l0")
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    assert_same(theirs, ours, x)


class Louder(torch.nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:
        y, h = torch.nn.GRU.forward(self, input, hx)
        return 2 * y, h


def test_what_is_left_alone_and_why() -> None:
    model = torch.nn.Sequential()
    model.append(Louder(3, 4))
    model.append(torch.nn.GRU(3, 4, dtype=torch.float16))
    model.append(torch.nn.RNN(3, 4))
    model[2].forward = model[2].forward
    model.append(torch.nn.GRU(3, 4))
    model.append(torch.nn.GRUCell(3, 4))
    kinds = [type(m) for m in model]
    told = st.explain(model)
    with pytest.warns(UserWarning, match="accelerate does not change 0 .*; 2 .*") as caught:
        st.accelerate(model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [type(m) for m in model] == kinds
    assert [dispatch_of(m) is not None for m in model] == [False, True, False, True, True]
    assert [(o.name, o.module, o.replaced) for o in told] == [
        ("0", "Louder", False), ("1", "GRU", True), ("2", "RNN", False), ("3", "GRU", True), ("4", "GRUCell", True),
    ]  # fmt: skip
    assert st.explain(model) == told
    assert all(o.reason for o in told)
    with pytest.warns(UserWarning, match="accelerate does not change 0 .*; 2 .*"):
        st.accelerate(model, faster_only=False)
    assert [type(m) for m in model] == kinds
    assert [bool((d := dispatch_of(m)) and d.always) for m in model] == [False, True, False, True, True]
    assert type(st.accelerate(st.GRU(3, 4))) is st.GRU


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


def test_lengths_may_be_a_read_only_array() -> None:
    """PyTorch warns of those, once a process unless told to warn always."""
    lengths = np.array([4, 2])
    lengths.flags.writeable = False
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for layer in (st.GRU(3, 4), st.accelerate(torch.nn.GRU(3, 4)), st.MinGRU(3, 4)):
                y, _ = layer(torch.ones(4, 2, 3), lengths=lengths)
                assert not y[2:, 1].any()
    finally:
        torch.set_warn_always(before)


def test_public_names_alone_are_listed() -> None:
    assert dir(st) == sorted(st.__all__)


def test_the_import_is_light() -> None:
    """PyTorch's compiler alone took more than a second."""
    code = "import sys, torch, sparsebp.torch; print({'torch._dynamo', 'sympy', 'scipy', 'numba'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_a_missing_torch_names_the_extra() -> None:
    code = "import sys; sys.modules['torch'] = None; import sparsebp; import sparsebp.torch"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingDependencyError" in result.stderr
    assert "pip install 'sparsebp[torch]'" in result.stderr


@pytest.mark.parametrize("cell", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
@pytest.mark.parametrize("wrapped", [False, True])
def test_export_takes_an_accelerated_module(cell, wrapped):
    """As the model itself or inside one; torch.export reads the forward's ``__code__``."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = cell(3, 4)

        def forward(self, x):
            return self.layer(x)

    model, x = Model() if wrapped else cell(3, 4), torch.randn(5, 2, 3)
    expected = model(x)[0]
    program = torch.export.export(st.accelerate(model), (x,)).module()
    torch.testing.assert_close(program(x)[0], expected)
    with pytest.raises(Exception, match="restore"):
        torch.export.export(model, (x,), strict=True)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("steps", [1, 3, 30])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_results_are_no_views(kind: str, steps: int, layers: int, batch_first: bool) -> None:
    """Truncated back-propagation detaches the state in place; a frozen encoder's output is changed in place."""
    module = st.accelerate(getattr(torch.nn, kind)(3, 4, layers, batch_first=batch_first), faster_only=False)
    x = torch.randn(2, steps, 3) if batch_first else torch.randn(steps, 2, 3)
    y, hx = module(x)
    expected = [tensor.detach().clone() for tensor in (y, *(hx if kind == "LSTM" else (hx,)))]
    for tensor in (y, *(hx if kind == "LSTM" else (hx,))):
        assert not tensor._is_view()
        assert not tensor.detach_().requires_grad
    with torch.no_grad():
        y, hx = module(x)
    shift = torch.ones(4, requires_grad=True)
    for tensor, values in zip((y, *(hx if kind == "LSTM" else (hx,))), expected, strict=True):
        tensor.add_(shift)
        torch.testing.assert_close(tensor.detach(), values + 1)
    y.sum().backward()
    assert shift.grad is not None
