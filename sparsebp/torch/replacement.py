"""Putting this library's modules in the place of PyTorch's inside a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import NamedTuple, TypeVar, cast

import torch
from torch.nn import Module

from sparsebp.core.errors import OptionError
from sparsebp.torch.cells import GRUCell, LSTMCell, RNNCell
from sparsebp.torch.checks import DEVICES, DTYPES
from sparsebp.torch.choosing import Choosing, ChoosingGRU, ChoosingLSTM, ChoosingRNN
from sparsebp.torch.layers import GRU, LSTM, RNN
from sparsebp.torch.limits import obstacle_of_size

M = TypeVar("M", bound=Module)

OURS: dict[type[Module], type[Module]] = {
    torch.nn.RNN: RNN,
    torch.nn.GRU: GRU,
    torch.nn.LSTM: LSTM,
    torch.nn.RNNCell: RNNCell,
    torch.nn.GRUCell: GRUCell,
    torch.nn.LSTMCell: LSTMCell,
}
CHOOSING: dict[type[Module], type[Module]] = {
    torch.nn.RNN: ChoosingRNN,
    torch.nn.GRU: ChoosingGRU,
    torch.nn.LSTM: ChoosingLSTM,
}
"""What takes their place by default: it leaves calls to PyTorch that PyTorch is the faster at."""


class Outcome(NamedTuple):
    """What `accelerate` does with one recurrent module of a model.

    Attributes
    ----------
    name
        Where it is in the model, as in ``model.named_modules()``; empty for the model itself.
    module
        What it is: ``"GRU"``.
    replaced
        Whether it is run by this library's kernels.
    reason
        Why not; empty if it is.
    """

    name: str
    module: str
    replaced: bool
    reason: str = ""


def accelerate(model: M, *, faster_only: bool = True) -> M:
    """Let this library's kernels run every torch.nn.RNN, GRU and LSTM, and cell, inside a model, or the model itself.

    Each module stays the same object and changes its class alone, to the one of the same name in `sparsebp.torch`: so
    parameters, hooks, the mode, and whoever else refers to it stay as they are. What would not be computed rightly, or
    never faster, is left alone, with one warning that says why; `explain` tells beforehand. Of what is replaced, calls
    that PyTorch was measured to be faster at still run PyTorch's forward: sequences of few steps, and those of one
    length through an LSTM in float32.

    Parameters
    ----------
    model
        Changed in place.
    faster_only
        Leave modules and calls to PyTorch where the kernels were measured to be no faster, see `sparsebp.torch.limits`.
        False: run every call by the kernels, for second derivatives, `torch.func` or compiled graphs.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    OptionError
        It is no `torch.nn.Module`.
    """
    left = []
    for name, module, reason in _recurrent_modules(model, faster_only):
        if reason:
            left.append(f"{name or 'the model'} ({type(module).__name__}): {reason}")
        elif type(module) in OURS:
            kind = type(module)
            module.__class__ = CHOOSING.get(kind, OURS[kind]) if faster_only else OURS[kind]
        elif not faster_only and type(module) in CHOOSING.values():
            module.__class__ = OURS[cast(Choosing, module).plain]
    if left:
        warnings.warn("accelerate leaves alone " + "; ".join(left), stacklevel=2)
    return model


def explain(model: Module, *, faster_only: bool = True) -> list[Outcome]:
    """Return what `accelerate` does, or did, with each recurrent module of a model; nothing is changed.

    Parameters
    ----------
    model, faster_only
        As for `accelerate`.

    Raises
    ------
    OptionError
        It is no `torch.nn.Module`.
    """
    return [
        Outcome(name, module._get_name(), not reason, reason)
        for name, module, reason in _recurrent_modules(model, faster_only)
    ]


def _recurrent_modules(model: Module, faster_only: bool) -> Iterator[tuple[str, Module, str]]:
    """Yield each recurrent module once, with its name and what speaks against its replacement."""
    if not isinstance(model, Module):
        raise OptionError("There is nothing to accelerate", expected="a torch.nn.Module", got=type(model).__name__,
                          remedy="Pass the model")  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
            yield name, module, _obstacle(module, faster_only)


def _obstacle(module: Module, faster_only: bool) -> str:
    """Say why a recurrent module has to stay as it is; empty if it need not, or is one of ours."""
    kind = type(module)
    if isinstance(module, tuple(OURS.values())):
        return ""
    if kind not in OURS:
        return "a class of its own, whose forward may be another; parametrize or derive from sparsebp.torch's instead"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    parameter = next(module.parameters(), None)
    if parameter is not None and (parameter.dtype not in DTYPES or parameter.device.type not in DEVICES):
        return f"no kernels for {parameter.dtype} on {parameter.device}"
    if not faster_only:
        return ""
    in_float64 = parameter is not None and parameter.dtype == torch.float64
    return obstacle_of_size(kind.__name__, int(module.hidden_size), in_float64)  # type: ignore[arg-type]
