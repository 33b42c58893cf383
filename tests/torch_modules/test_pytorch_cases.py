"""PyTorch's cases for its recurrent modules, ``torch.testing._internal.common_modules``, run with ours."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sparsebp.torch as st  # noqa: E402
from torch_cases import load  # noqa: E402
from torch_modules_reference import assert_same, run, tensors  # noqa: E402

NAMES = ["RNN", "GRU", "LSTM", "RNNCell", "GRUCell", "LSTMCell"]


def module_info(name: str) -> Any:
    (found,) = (info for info in load("common_modules").module_db if info.module_cls is getattr(torch.nn, name))
    return found


def cases(name: str, **options: Any) -> list[Any]:
    """Return the cases, those with packed sequences among them."""
    info = module_info(name)
    packed = {"with_packed_sequence": True} if name in ("RNN", "GRU") else {}
    return list(
        info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=True, training=True, **packed, **options
        )
    )


def build(name: str, case: Any) -> tuple[Any, Any]:
    args, kwargs = case.constructor_input.args, {**case.constructor_input.kwargs, "dtype": torch.float64}
    theirs, ours = getattr(torch.nn, name)(*args, **kwargs), getattr(st, name)(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    return theirs, ours


@pytest.mark.parametrize("name", NAMES)
def test_forward_gradients_and_references(name: str) -> None:
    for case in cases(name):
        theirs, ours = build(name, case)
        arguments = case.forward_input.args
        assert_same(theirs, ours, *arguments)
        packed = isinstance(arguments[0], torch.nn.utils.rnn.PackedSequence)
        if case.reference_fn is not None and not packed:
            expected = tensors(case.reference_fn(ours, *arguments))
            torch.testing.assert_close(tensors(ours(*arguments)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_copies_pickles_and_views(name: str) -> None:
    for case in cases(name)[:4]:
        _, ours = build(name, case)
        arguments = case.forward_input.args
        for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours).double()):
            assert repr(copied) == repr(ours)
            assert_same(ours, copied, *arguments)
        spread = copy.deepcopy(ours)
        for parameter in spread.parameters():
            parameter.data = _spread(parameter.data)
        expected, got = run(ours, *arguments), run(spread, *(_spread_all(a) for a in arguments))
        torch.testing.assert_close(got, expected)


def _spread(tensor: Any) -> Any:
    return torch.stack([tensor, tensor], -1)[..., 0]  # no two neighbours are neighbours in memory


def _spread_all(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _spread(value.detach()).requires_grad_(value.requires_grad)
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return value._replace(data=_spread_all(value.data))
    return tuple(_spread_all(part) for part in value)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_first_and_second_order(name: str) -> None:
    for case in cases(name)[-1:]:  # a packed one of both directions; of an LSTM one with a projection
        _, ours = build(name, case)
        arguments = list(tensors(case.forward_input.args))
        names = [key for key, _ in ours.named_parameters()]

        def function(*values: Any, ours: Any = ours, case: Any = case, names: list[str] = names) -> Any:
            inputs = iter(values)
            given = [_refilled(a, inputs) for a in case.forward_input.args]
            return tuple(tensors(torch.func.functional_call(ours, dict(zip(names, inputs, strict=True)), tuple(given))))

        inputs = [t.detach().clone().requires_grad_() for t in (*arguments, *ours.parameters())]
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def _refilled(value: Any, tensors: Any) -> Any:
    """Return an argument with the next tensors in the place of its own."""
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return value._replace(data=next(tensors))
    return next(tensors) if isinstance(value, torch.Tensor) else tuple(next(tensors) for _ in value)


@pytest.mark.parametrize("name", NAMES)
def test_errors(name: str) -> None:
    info = module_info(name)
    found = info.module_error_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=True)
    for case in found:
        construct, forward = case.module_error_input.constructor_input, case.module_error_input.forward_input
        with pytest.raises(case.error_type, match=case.error_regex):
            module = getattr(st, name)(*construct.args, **construct.kwargs)
            if forward is not None:
                if "dtype" not in construct.kwargs:
                    module = module.double()
                module(*forward.args, **forward.kwargs)
