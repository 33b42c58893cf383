"""Letting this library's kernels run the recurrent modules inside a model of PyTorch, and saying what they run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.nn import Module, RNNBase
from torch.nn.utils.parametrize import type_before_parametrizations

from sparsebp.core.errors import OptionError
from sparsebp.torch.calls import with_lengths
from sparsebp.torch.dispatch import OURS, Way, attach, detach, dispatch_of, way_of
from sparsebp.torch.limits import OF_CELLS

M = TypeVar("M", bound=Module)


class Outcome(NamedTuple):
    """What `accelerate` does with one recurrent module of a model, or with one call of it.

    Attributes
    ----------
    name
        Where it is in the model, as in ``model.named_modules()``; empty for the model itself.
    module
        What it is: ``"GRU"``.
    replaced
        Whether its calls may be run by this library's kernels. With an input: whether they run this call.
    reason
        Why, or why not: ``"PyTorch's forward: float32 LSTM, T = 200 < 256"``.
    """

    name: str
    module: str
    replaced: bool
    reason: str = ""


def accelerate(model: M, *, faster_only: bool = True) -> M:
    """Let this library's kernels run every torch.nn.RNN, GRU and LSTM inside a model, or the model itself.

    Each module stays the same object of the same class, with another ``forward``: so parameters, hooks, the mode, and
    whoever else refers to it stay as they are, and `torch.nn.Module.apply` and `quantize_dynamic` know it. Every call
    goes the way that was measured to be the faster one for its shapes and dtype, by the kernels or by PyTorch's own
    forward; `explain` tells which, and `restore` undoes it. What would not be computed rightly is left alone, with one
    warning that says why.

    Parameters
    ----------
    model
        Changed in place.
    faster_only
        False: run every call by the kernels that they can run, also where they are slower, and those of cells.

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
    for name, module in _recurrent_modules(model, "accelerate"):
        reason = _obstacle(module, faster_only)
        if reason:
            left.append(f"{name or 'the model'} ({type(module).__name__}): {reason}")
        elif not isinstance(module, _ALL_OURS) and (dispatch_of(module) is None or not faster_only):
            attach(module, not faster_only)
    if left:
        warnings.warn("accelerate leaves alone " + "; ".join(left), stacklevel=2)
    return model


def restore(model: M) -> M:
    """Undo `accelerate`: every accelerated module inside a model, or the model itself, has PyTorch's forward again.

    Parameters
    ----------
    model
        Changed in place.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    OptionError
        It is no `torch.nn.Module`.
    """
    for _, module in _recurrent_modules(model, "restore"):
        detach(module)
    return model


def explain(model: Module, *inputs: Any, faster_only: bool = True, **named: Any) -> list[Outcome]:
    """Say what `accelerate` does, or did, with each recurrent module of a model; with an input, with each call of it.

    Parameters
    ----------
    model
        A model, accelerated or not. It is not changed.
    *inputs, **named
        What to call the model with. It is called once, in its mode and with gradients or without as they are now; what
        that changes in its buffers and in PyTorch's random numbers is put back. Left out: nothing is called.
    faster_only
        As for `accelerate`, for modules that are not accelerated.

    Returns
    -------
    list of Outcome
        One a module, in the order of ``model.named_modules()``; with an input one a call, in the order of the calls.

    Raises
    ------
    OptionError
        It is no `torch.nn.Module`.
    """
    modules = {
        module: Outcome(name, module._get_name(), not reason, reason or _WITHOUT_INPUT)
        for name, module in _recurrent_modules(model, "explain")
        for reason in (_obstacle(module, faster_only),)
    }
    if not inputs and not named:
        return list(modules.values())
    calls: list[Outcome] = []

    def note(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outcome = modules[module]
        if outcome.replaced:
            way = _way(module, args, kwargs, faster_only)
            outcome = outcome._replace(replaced=way.ours, reason=str(way))
        calls.append(outcome)

    with contextlib.ExitStack() as stack:
        for module in modules:
            hook = module.register_forward_pre_hook(note, with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(_left_as_it_is(model))
        model(*inputs, **named)
    return calls


_ALL_OURS = tuple(OURS.values())
_WITHOUT_INPUT = "each call goes the faster way; explain(model, input) says which"


def _way(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], faster_only: bool) -> Way:
    """Return the way of a call, as the module's forward decides."""
    if isinstance(module, _ALL_OURS):
        return Way(True, f"the module is a sparsebp.torch.{module._get_name()}")
    input, lengths, dispatch = args[0] if args else kwargs["input"], kwargs.get("lengths"), dispatch_of(module)
    if lengths is not None:  # the forward gets these packed
        packed: list[Any] = []

        def keep(*call: Any) -> Any:
            packed.append(call[0])
            return call

        with_lengths(cast(RNNBase, module), keep, input, None, lengths)
        input = packed[0]
    return way_of(module, input, not faster_only if dispatch is None else dispatch.always)


@contextlib.contextmanager
def _left_as_it_is(model: Module) -> Iterator[None]:
    """Put back what a call of the model changes in its buffers and in PyTorch's random numbers.

    Only what did change is written to, past the count of versions: a graph of the user's may hold the buffers, batch
    normalisation does not count either, and not all of them can be written.
    """
    named = [(module, dict(module._buffers)) for module in model.modules()]  # a call may assign another tensor
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, buffers in named:
            module._buffers.update(buffers)
        for buffer, values in before:
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                if not _equal(buffer, values):
                    buffer.data.copy_(values)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two tensors hold the same; NaN is the same as NaN."""
    if a.layout is not torch.strided:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _recurrent_modules(model: Module, action: str) -> Iterator[tuple[str, Module]]:
    """Yield each recurrent module once, with its name; `action` is what there is nothing to do for otherwise."""
    if not isinstance(model, Module):
        raise OptionError(f"There is nothing to {action}", expected="a torch.nn.Module", got=type(model).__name__,
                          remedy="Pass the model")  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
            yield name, module


def _obstacle(module: Module, faster_only: bool) -> str:
    """Say why a recurrent module has to stay as it is; empty if it need not, or is one of ours."""
    kind = type_before_parametrizations(module)
    if dispatch_of(module) is not None or isinstance(module, _ALL_OURS):
        return ""
    if kind not in OURS:
        return "a class of its own, whose forward may be another; derive it from sparsebp.torch's instead"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if faster_only and issubclass(kind, torch.nn.RNNCellBase):
        return f"{OF_CELLS} (faster_only=False replaces it)"
    return ""
