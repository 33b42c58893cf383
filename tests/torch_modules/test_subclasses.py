"""Subclasses of torch.nn's recurrent modules are accelerated where they call PyTorch's forward."""

from __future__ import annotations

import abc
import copy
import io
import pickle
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st_  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, parametrize, prune  # noqa: E402
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence  # noqa: E402

import sparsebp.torch as st  # noqa: E402
from sparsebp.core.errors import OptionError  # noqa: E402
from sparsebp.torch import dispatch  # noqa: E402
from sparsebp.torch.dispatch import dispatch_of  # noqa: E402
from torch_modules_reference import assert_same  # noqa: E402

FEATURES, HIDDEN, LONG = 3, 4, 300


class Named(nn.GRU):
    """Its own constructor alone."""

    def __init__(self, name: str = "a", **options: Any) -> None:
        super().__init__(FEATURES, HIDDEN, **options)
        self.name = name


class Doubled(nn.LSTM):
    """Its own output."""

    def __init__(self, **options: Any) -> None:
        super().__init__(FEATURES, HIDDEN, **options)

    def forward(self, input: Any, hx: Any = None) -> Any:
        y, state = super().forward(input, hx)
        return 2 * y, state


class Again(Doubled):
    """A subclass of one, with ``super`` in another method."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        return self.inner(input, hx)

    def inner(self, input: Any, hx: Any) -> Any:
        return super().forward(-input, hx)


class Mixed:
    def forward(self, input: Any, hx: Any = None) -> Any:
        return super().forward(input, hx)  # type: ignore[misc]


class Behind(Mixed, nn.RNN):
    """Calls PyTorch's forward through another base, and has slots."""

    __slots__ = ("tag",)

    def __init__(self, **options: Any) -> None:
        super().__init__(FEATURES, HIDDEN, **options)


class Registered(type):
    """A metaclass and ``__init_subclass__`` that want an argument, and that keep all classes."""

    classes: ClassVar[list[type]] = []

    def __new__(cls, name: str, bases: Any, namespace: Any, number: int) -> Any:
        return super().__new__(cls, name, bases, namespace)

    def __init__(cls, name: str, bases: Any, namespace: Any, number: int) -> None:
        super().__init__(name, bases, namespace)
        Registered.classes.append(cls)


class Strict(Behind, metaclass=Registered, number=1):
    def __init_subclass__(cls, number: int) -> None:
        Registered.classes.append(cls)


class Abstract(abc.ABC):
    @abc.abstractmethod
    def forward(self, input: Any, hx: Any = None) -> Any: ...


class Concrete(Named, Abstract):
    """With the metaclass of abstract classes, and its own way of copying."""

    def __deepcopy__(self, memo: Any) -> Concrete:
        other = Concrete.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._parameters = copy.deepcopy(self._parameters, memo)
        return other

    def __reduce__(self) -> Any:
        return type(self), (self.name,), self.__getstate__()


class Padded(nn.GRU):
    """Takes other arguments than PyTorch's forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(FEATURES, HIDDEN, **options)

    def forward(self, batch: dict[str, Any]) -> Any:  # type: ignore[override]
        y, h = super().forward(pack_padded_sequence(batch["x"], batch["lengths"], enforce_sorted=False))
        return pad_packed_sequence(y)[0], h


CLASSES = [Named, Doubled, Again, Behind, Strict, Concrete]


def dumped(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.copy, copy.deepcopy, dumped, saved]


def quietly(model: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return st.accelerate(model, **options)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The modules of calls that the dispatch decided."""
    modules: list[Any] = []
    decide = dispatch.way_of
    monkeypatch.setattr(dispatch, "way_of", lambda *args: (modules.append(args[0]), decide(*args))[1])
    yield modules


@given(st_.data())
def test_the_results_are_pytorchs(data: Any) -> None:
    draw = data.draw
    cls, steps, always = draw(st_.sampled_from(CLASSES)), draw(st_.sampled_from([1, 40])), draw(st_.booleans())
    options = {} if cls is Concrete else {"bidirectional": draw(st_.booleans()), "num_layers": draw(st_.integers(1, 2))}
    theirs = cls(dtype=torch.float64, **options)
    ours = quietly(copy.deepcopy(theirs), faster_only=not always)
    if cls is not Concrete:
        ours = draw(st_.sampled_from(COPIES))(ours)
    if draw(st_.booleans()) and cls not in (Strict, Concrete):  # whose metaclass or copies PyTorch cannot parametrize
        for module in (theirs, ours):
            parametrizations.weight_norm(module, "weight_hh_l0")
    assert_same(theirs, ours, torch.randn(steps, 2, FEATURES, dtype=torch.float64))


@pytest.mark.parametrize("cls", CLASSES)
def test_a_module_keeps_its_class_by_all_that_it_says(cls: Any, ran: list[Any]) -> None:
    module, classes = cls(), list(Registered.classes)
    attributes, text, parameters = set(vars(module)), repr(module), list(module.parameters())
    assert st.explain(module)[0].replaced
    assert type(module) is cls
    assert quietly(module) is module
    assert isinstance(module, cls)
    assert (type(module).__name__, type(module).__module__, repr(module)) == (cls.__name__, cls.__module__, text)
    assert [a is b for a, b in zip(parameters, module.parameters(), strict=True)] == [True] * 4
    assert list(module.state_dict()) == list(cls().state_dict())
    module(torch.randn(LONG, 2, FEATURES))[0].sum().backward()
    assert ran == [module]
    assert type(quietly(cls())) is type(module)
    assert Registered.classes == classes
    assert st.restore(st.restore(module)) is module
    assert type(module) is cls
    assert set(vars(module)) == attributes
    module(torch.randn(LONG, 2, FEATURES))
    assert ran == [module]


@pytest.mark.parametrize("make", COPIES)
@pytest.mark.parametrize("cls", CLASSES)
def test_copies_are_accelerated_and_their_own(cls: Any, make: Any, ran: list[Any]) -> None:
    module = quietly(cls())
    module(torch.randn(12, 2, FEATURES))[0].sum().backward()
    other = make(module)
    ran.clear()
    other(torch.randn(12, 2, FEATURES))
    assert ran == [other]
    assert dispatch_of(other).module is other
    st.restore(other)
    assert type(other) is cls
    assert dispatch_of(module).module is module
    if make is dumped:  # a restored one is a pickle without this library
        assert b"sparsebp" not in pickle.dumps(other)


def test_a_copy_of_the_attributes_runs_its_own_weights() -> None:
    """As replicas of `torch.nn.DataParallel` are made."""
    module = quietly(Doubled())
    replica = module._replicate_for_data_parallel()
    replica._parameters = {name: 2 * value for name, value in module._parameters.items()}
    plain = Doubled()
    plain._parameters = {name: nn.Parameter(value) for name, value in replica._parameters.items()}
    x = torch.randn(LONG, 2, FEATURES)
    torch.testing.assert_close(replica(x)[0], plain(x)[0])
    assert dispatch_of(replica).module is replica


class Forgetful(Named):
    """Copies without the attributes that it does not know, or reduces to another class."""

    def __getstate__(self) -> Any:
        return {name: value for name, value in vars(self).items() if not name.startswith("_sparsebp")}

    def __reduce__(self) -> Any:
        return (nn.GRU, (FEATURES, HIDDEN)) if self.name == "other" else super().__reduce__()


def test_copies_of_a_class_that_decides_itself(ran: list[Any]) -> None:
    other = copy.deepcopy(quietly(Forgetful()))
    other(torch.randn(12, 2, FEATURES))
    assert ran == []
    assert dispatch_of(other) is None
    assert type(st.restore(other)) is Forgetful
    assert type(dumped(quietly(Forgetful("other")))) is nn.GRU


@pytest.mark.parametrize("first", ["accelerated", "parametrized"])
@pytest.mark.parametrize("last", ["restored", "removed"])
def test_parametrizations(first: str, last: str, ran: list[Any]) -> None:
    module, x = Doubled(), torch.randn(LONG, 2, FEATURES)
    if first == "accelerated":
        quietly(module)
    parametrizations.weight_norm(module, "weight_hh_l0")
    if first == "parametrized":
        quietly(module)
    other = copy.deepcopy(module)  # of the same class
    module(x), other(x)
    assert ran == [module, other]
    ran.clear()
    if last == "restored":
        st.restore(module)
        module(x)
        assert ran == []
        assert parametrize.is_parametrized(module, "weight_hh_l0")
        parametrize.remove_parametrizations(module, "weight_hh_l0")
    else:
        parametrize.remove_parametrizations(module, "weight_hh_l0")
        module(x)
        assert ran == [module]
        st.restore(module)
    assert type(module) is Doubled


def test_pruning_and_functional_calls() -> None:
    theirs = Doubled(dtype=torch.float64)
    ours = quietly(copy.deepcopy(theirs))
    x = torch.randn(40, 2, FEATURES, dtype=torch.float64)
    changed = {name: 2 * value for name, value in theirs.named_parameters()}
    torch.testing.assert_close(
        torch.func.functional_call(ours, changed, (x,)), torch.func.functional_call(theirs, changed, (x,))
    )
    for module in (theirs, ours):
        prune.l1_unstructured(module, "weight_hh_l0", 0.5)
    assert_same(theirs, ours, x)


def test_explain_tells_of_the_inner_call(ran: list[Any]) -> None:
    module = Padded()
    x = {"x": torch.randn(LONG, 2, FEATURES), "lengths": torch.tensor([LONG, 4])}
    for model in (module, quietly(module)):
        (told,) = st.explain(model, x)
        assert told.replaced
        assert told.module == "Padded"
        assert re.search(f"float32 GRU, packed, .* T = {LONG}", told.reason)
    st.restore(module)
    assert type(module) is Padded
    st.explain(module, x)
    assert type(module) is Padded
    ran.clear()
    module(x)
    assert ran == []


class Unrelated(nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:
        return input, hx


class Direct(nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:
        return nn.GRU.forward(self, input, hx)


class Unchecked(nn.GRU):
    def check_forward_args(self, *args: Any) -> None:
        pass


class Refusing(type):
    def mro(cls) -> Any:
        if any(base.__name__ == "Refused" for base in cls.__bases__):
            raise TypeError("no subclass")
        return super().mro()


class Refused(nn.GRU, metaclass=Refusing):
    pass


@pytest.mark.parametrize(("cls", "reason"), [
    (Unrelated, "super"), (Direct, "super"), (Unchecked, "its own check_forward_args"), (Refused, "no subclass"),
])  # fmt: skip
def test_what_is_left_alone(cls: Any, reason: str) -> None:
    module = cls(FEATURES, HIDDEN)
    with pytest.warns(UserWarning, match=f"accelerate does not change the model .{cls.__name__}.*{reason}") as caught:
        st.accelerate(module)
    assert len(caught) == 1
    assert type(module) is cls
    assert not st.explain(module)[0].replaced


def test_a_subclass_of_a_cell() -> None:
    class Cell(nn.LSTMCell):
        def forward(self, input: Any, hx: Any = None) -> Any:
            return super().forward(2 * input, hx)

    theirs = Cell(FEATURES, HIDDEN, dtype=torch.float64)
    ours = quietly(copy.deepcopy(theirs), faster_only=False)
    assert_same(theirs, ours, torch.randn(2, FEATURES, dtype=torch.float64))
    assert dispatch_of(ours) is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripts_and_graphs() -> None:
    module = quietly(Doubled())
    with pytest.raises(OptionError, match=r"restore\(model\)"):
        torch.jit.script(module)
    x = torch.randn(LONG, 2, FEATURES)
    assert "aten::lstm" in str(torch.jit.trace(module, x).inlined_graph)
    torch.testing.assert_close(torch.compile(module, backend="eager")(x)[0], module(x)[0])
    torch._dynamo.reset()


def test_a_class_of_main_goes_to_other_processes(tmp_path: Any) -> None:
    """Pickled, and spawned with shared weights."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
        import io, pickle, torch, sparsebp.torch as st

        class Layer(torch.nn.GRU):
            def forward(self, input, hx=None):
                return super().forward(2 * input, hx)

        def double(layer):
            with torch.no_grad():
                layer.weight_hh_l0.mul_(2)

        if __name__ == "__main__":
            layer = st.accelerate(Layer(3, 4)).share_memory()
            x = torch.randn(40, 2, 3)
            torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), layer(x))
            before = layer.weight_hh_l0.detach().clone()
            process = torch.multiprocessing.get_context("spawn").Process(target=double, args=(layer,))
            process.start(), process.join()
            print(torch.equal(layer.weight_hh_l0, 2 * before))
    """)
    )
    result = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=False)
    assert result.stdout == "True\n", result.stderr


# ---- per-sample gradients -------------------------------------------------------------------------------------------


class Last(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(FEATURES, HIDDEN, batch_first=True, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.layer(x)[0]


@pytest.mark.parametrize("faster_only", [True, False])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM, partial(Named, "a")])
def test_expanded_weights_are_pytorchs(kind: Any, called: bool, faster_only: bool) -> None:
    if isinstance(kind, partial):
        kind = lambda *_, **options: Named("a", **options)  # noqa: E731
    theirs = Last(kind)
    ours, x = quietly(copy.deepcopy(theirs), faster_only=faster_only), torch.randn(5, 40, FEATURES).double()
    for model in (theirs, ours):
        if called:
            model(x)
        call_for_per_sample_grads(model, batch_size=5, loss_reduction="sum")(x).square().sum().backward()
    for found, want in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found.grad_sample, want.grad_sample)
    ours(x).sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_mapped_gradients_are_those_of_each_sample() -> None:
    ours = quietly(Last(nn.LSTM))
    weights, x = dict(ours.named_parameters()), torch.randn(3, 7, FEATURES).double()

    def loss(weights: Any, x: Any) -> Any:
        return torch.func.functional_call(ours, weights, (x,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for sample in range(3):
        want = torch.autograd.grad(loss(weights, x[sample]), list(weights.values()))
        torch.testing.assert_close([found[name][sample] for name in weights], list(want))


# ---- what has no recurrent layer of torch.nn ------------------------------------------------------------------------


class DPLSTM(nn.Module):
    """Stands for Opacus' layer."""

    __module__ = "opacus.layers.dp_rnn"

    def __init__(self) -> None:
        super().__init__()
        self.cell = DPLSTMCell()


class DPLSTMCell(nn.Module):
    __module__ = "opacus.layers.dp_rnn"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("model", "said"), [
    (lambda: nn.Sequential(nn.Linear(1, 1)), "does nothing: Sequential has no RNN, GRU or LSTM of torch.nn"),
    (lambda: torch.jit.script(nn.Linear(1, 1)), "does nothing"),
    (lambda: torch.jit.script(nn.Sequential(nn.GRU(3, 4))), "the model .RecursiveScriptModule.: TorchScript"),
    (lambda: nn.Sequential(torch.jit.trace(nn.LSTM(3, 4), torch.ones(1, 1, 3))), "0 .*: TorchScript"),
    (lambda: nn.Sequential(DPLSTM()), "0 .DPLSTM.: Opacus .*vmap"),
])  # fmt: skip
def test_one_warning_says_why_nothing_is_accelerated(model: Any, said: str) -> None:
    module = model()
    with pytest.warns(UserWarning, match=f"accelerate .*{said}") as caught:
        assert st.accelerate(module) is module
    assert len(caught) == 1
    assert [outcome.replaced for outcome in st.explain(module)] == [False] * ("nothing" not in said)
    assert st.restore(module) is module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripts_of_other_layers_are_no_matter() -> None:
    quietly(nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.GRU(3, 4)))
