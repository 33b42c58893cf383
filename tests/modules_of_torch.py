"""PyTorch's own module cases, run on ours: every constructor, input, gradient and refused input."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from sparsebp import nn
from sparsebp.core.errors import SparseBPError
from sparsebp.nn.loss import Loss
from sparsebp.nn.recurrent.cell_layers import RecurrentCell
from torch_cases import load

CLOSE = {torch.float64: {"rtol": 1e-9, "atol": 1e-10}, torch.float32: {"rtol": 3e-4, "atol": 3e-5}}


@functools.cache
def infos() -> dict[str, Any]:
    """Return PyTorch's `ModuleInfo` of every module whose name we have. Its lists are slow to import."""
    found = load("common_modules").module_db
    return {info.module_cls.__name__: info for info in found if hasattr(nn, info.module_cls.__name__)}


def outcomes(name: str, dtype: torch.dtype, training: bool) -> Iterator[tuple[str, str, str]]:
    """Yield for every case of a module its description, what came of it, and why."""
    torch.manual_seed(0)
    info = infos()[name]
    given = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": training}
    for case in info.module_inputs_func(info, **given):
        yield case.desc, *_outcome(info.module_cls, case, dtype, training)
    if info.module_error_inputs_func is not None:
        for case in info.module_error_inputs_func(info, **given):
            yield f"refuses: {case.error_regex}", *_refusal(name, case, dtype, training)


def counts(name: str) -> tuple[Counter[str], list[str]]:
    """Return how many cases of a module came to what, and a line for each that is not right."""
    found: Counter[str] = Counter()
    lines = []
    runs = [(torch.float64, True), (torch.float32, True)]
    for dtype, training in [*runs, (torch.float64, False)] if infos()[name].train_and_eval_differ else runs:
        for case, outcome, why in outcomes(name, dtype, training):
            found[outcome] += 1
            if outcome not in ("right", "refuses as well"):
                lines.append(f"{name} {case or '-'} ({dtype}, training={training}): {outcome}: {why}")
    return found, lines


def _outcome(cls: Any, case: Any, dtype: torch.dtype, training: bool) -> tuple[str, str]:
    twin = cls(*case.constructor_input.args, **case.constructor_input.kwargs).to(dtype).train(training)
    with torch.no_grad():
        for param in twin.parameters():
            param.uniform_(-1, 1)
    try:
        layer = _made(cls.__name__, case.constructor_input, dtype)
        if isinstance(layer, Loss):
            _compare_loss(twin, layer, case, dtype)
        else:
            layer.load_state_dict({key: value.numpy(force=True) for key, value in twin.state_dict().items()})
            _compare_layer(twin, layer.train(training), case, dtype)
    except SparseBPError as error:
        return "refused", str(error)
    except TypeError as error:
        return "lacks an argument" if "argument" in str(error) else "raw error", str(error)
    except AssertionError as error:
        return "wrong", str(error)
    except Exception as error:
        return "raw error", repr(error)
    return "right", ""


def _refusal(name: str, case: Any, dtype: torch.dtype, training: bool) -> tuple[str, str]:
    inner = case.module_error_input
    try:
        layer = _made(name, inner.constructor_input, dtype)
        if case.error_on.name != "CONSTRUCTION_ERROR":
            layer = layer if isinstance(layer, Loss) else layer.train(training)
            layer.forward(*_ours(inner.forward_input.args), **_ours(inner.forward_input.kwargs))
    except SparseBPError:
        return "refuses as well", ""
    except Exception as error:
        return "raw error", repr(error)
    return "accepted", str(case.error_regex)


def _made(name: str, given: Any, dtype: torch.dtype) -> Any:
    make = getattr(nn, name)
    options = _ours(given.kwargs)
    known = inspect.signature(make).parameters
    if "dtype" in known or "options" in known:
        options["dtype"] = str(dtype).removeprefix("torch.")
    return make(*_ours(given.args), **options)


def _ours(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy(force=True).copy()
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return {key: _ours(each) for key, each in value.items()}
    return type(value)(map(_ours, value)) if isinstance(value, (tuple, list)) else value


def _arguments(case: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return what goes to forward, new leaves; its first argument has another name in some modules of torch."""
    kwargs = {key: _leaf(value) for key, value in case.forward_input.kwargs.items()}
    args = [_leaf(value) for value in case.forward_input.args]
    return ([kwargs.pop("input")] if "input" in kwargs else args), kwargs


def _leaf(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_leaf, value))
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _compare_loss(twin: Any, loss: Any, case: Any, dtype: torch.dtype) -> None:
    (prediction, target), _ = _arguments(case)
    want = twin(prediction, target)
    gy = torch.randn_like(want)
    want.backward(gy)
    value, saved = loss.forward(_ours(prediction), _ours(target))
    assert np.shape(value) == tuple(want.shape) and isinstance(value, np.ndarray if loss.reduction == "none" else float)
    _close(value, want, dtype, "loss")
    array = gy.numpy(force=True) if loss.reduction == "none" else float(gy)
    _close(loss.input_grad(saved, array), prediction.grad, dtype, "gradient")


def _compare_layer(twin: Any, layer: Any, case: Any, dtype: torch.dtype) -> None:
    args, kwargs = _arguments(case)
    output = twin(*args, **kwargs)
    want, *more = output if isinstance(output, tuple) else (output,)
    y, saved = layer.forward(*_ours(args), **_ours(kwargs))
    _close(y, want, dtype, "output")
    for found, other in zip(_more(layer, saved), more, strict=False):
        _compare_more(found, other, dtype)
    if (isinstance(layer, nn.MultiheadAttention) or hasattr(layer, "indices")) and more:
        _compare_more(layer(*_ours(args), **_ours(kwargs))[1], more[0], dtype)
    gy = torch.randn_like(want)
    want.backward(gy)
    g = layer.gradients(_ours(gy), saved)
    if args[0].is_floating_point():
        _close(g.input, args[0].grad, dtype, "gradient at the input")
    if len(args) > 2:
        _compare_more((g.key, g.value), tuple(arg.grad for arg in args[1:]), dtype)
    elif len(args) > 1:
        state = args[1] if isinstance(args[1], tuple) else args[1:]
        names = ("hidden", "cell") if isinstance(layer, RecurrentCell) else ("h0", "c0")
        for arg, name in zip(state, names, strict=False):
            _close(getattr(g, name), arg.grad, dtype, name)
    params = {name: param for name, param in twin.named_parameters() if param.grad is not None}
    assert layer.parameters().keys() >= params.keys(), list(params)
    for name, param in params.items():
        _close(g.weights[name], param.grad, dtype, name)
    for name, buffer in twin.named_buffers():
        _close(layer.state_dict()[name], buffer, dtype, name)


def _more(layer: Any, saved: Any) -> tuple[Any, ...]:
    """Return what torch returns beside the output, of what ours keeps."""
    if hasattr(layer, "weights"):
        return (layer.weights(saved),)
    if hasattr(layer, "indices"):
        return (layer.indices(saved),)
    if hasattr(saved, "c_n"):
        return ((saved.h_n, saved.c_n),)
    return (saved.h_n,) if hasattr(saved, "h_n") else ()


def _compare_more(found: Any, want: Any, dtype: torch.dtype) -> None:
    if isinstance(want, tuple):
        for one, other in zip(found, want, strict=True):
            _compare_more(one, other, dtype)
    elif want is not None:
        _close(found, want, dtype, "more")


def _close(found: Any, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    expected = want.numpy(force=True)
    assert np.shape(found) == expected.shape, f"{what}: shape {np.shape(found)}, torch has {expected.shape}"
    assert isinstance(found, float) or found.dtype == expected.dtype, f"{what}: {found.dtype}"
    np.testing.assert_allclose(found, expected, err_msg=what, **CLOSE[dtype])
