"""`accelerate`, `restore` and `explain`: a forward that picks the faster way for every call of a model of PyTorch."""

from __future__ import annotations

import contextlib
import copyreg
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch.nn import Module, RNNBase

from sparsebp.core.errors import OptionError
from sparsebp.torch.graph_breaks import breaks_graphs
from sparsebp.torch.modules import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell, with_lengths
from sparsebp.torch.one_step import OF_CELLS, OneStep
from sparsebp.torch.rule import Way, way_of
from sparsebp.torch.subclasses import (
    FORWARD,
    accelerated_class,
    class_of,
    forward_of,
    is_derived,
    kind_of,
    obstacle,
    set_class,
)

# An accelerated module picks the faster of this library's kernels and PyTorch's forward at every call.
#
# A module of a torch.nn class keeps it: its `forward` is a `Dispatch` in its ``__dict__``. In a subclass, a `Dispatch`
# is what ``super().forward`` calls, see `sparsebp.torch.subclasses`. The length of the sequences, and whether they are
# packed, is known at the call. `way_of` decides by shapes, dtypes, the mode and this module's table alone, and both
# ways compute the same up to rounding.

OURS: dict[type[Module], type[Module]] = {
    torch.nn.RNN: RNN,
    torch.nn.GRU: GRU,
    torch.nn.LSTM: LSTM,
    torch.nn.RNNCell: RNNCell,
    torch.nn.GRUCell: GRUCell,
    torch.nn.LSTMCell: LSTMCell,
}
"""This library's class for each class of torch.nn."""


class Dispatch:
    """The forward of an accelerated module, in the place of the bound method of its class."""

    def __init__(self, module: Module, always: bool) -> None:
        kind = kind_of(type(module))
        self.module, self.always = module, always
        self._theirs: Any = kind
        self._ours: Any = OURS[kind]
        self._cell = issubclass(kind, torch.nn.RNNCellBase)
        self._one_step = OneStep(self._cell)
        self.__name__, self.__code__ = "forward", kind.forward.__code__  # torch.export names inputs by them

    # graphs end at every torch.nn.GRU; its callees must not become graphs
    @partial(breaks_graphs, reason="Before torch.export(strict=True), call sparsebp.torch.restore(model)")
    def __call__(self, input: Any, hx: Any = None, *, lengths: Any = None) -> Any:
        """Run a call by whichever forward was measured to be faster; `lengths` as for `sparsebp.torch.GRU`."""
        if lengths is not None:
            return with_lengths(cast(RNNBase, self.module), self, input, hx, lengths)
        found = self._one_step(self.module, input, hx)
        if found is not None:
            return found
        kind = self._ours if self._way_of_steps(input).ours else self._theirs
        return kind.forward(self.module, input, hx)

    def way(self, input: Any, hx: Any = None) -> Way:
        """Return the way that a call goes."""
        case = self._one_step.case(self.module, input, hx)
        return Way(True, case) if case else self._way_of_steps(input)

    def _way_of_steps(self, input: Any) -> Way:
        return _OF_CELLS if self._cell and not self.always else way_of(self.module, input, self.always)

    def __reduce__(self) -> Any:
        return Dispatch, (self.module, self.always)

    def of(self, module: Module) -> Dispatch:
        """Return the same for another module."""
        return Dispatch(module, self.always)

    def replicate(self) -> Module:
        """Return a replica of the module for one device of `torch.nn.DataParallel`, with its own forward."""
        replica = type(self.module)._replicate_for_data_parallel(self.module)
        attach(replica, self.always)
        return replica

    def refuse_scripting(self) -> NoReturn:
        """Raise: TorchScript compiles the source of a module's class, so it cannot use this forward."""
        raise OptionError("TorchScript compiles PyTorch's own forward alone", expected="a model not accelerated",
                          got=f"an accelerated {self.module._get_name()}",
                          remedy="Call sparsebp.torch.restore(model) first, or use torch.jit.trace")  # fmt: skip


def attach(module: Module, always: bool) -> None:
    """Give a module of torch.nn, or of a subclass, a forward that dispatches."""
    cls, forward = class_of(module), Dispatch(module, always)
    if cls in OURS:
        module.__dict__.update(zip(ATTRIBUTES, (forward, forward.replicate, forward.refuse_scripting), strict=True))
    else:
        set_class(module, accelerated_class(cls))
        module.__dict__[FORWARD] = forward


def detach(module: Module) -> None:
    """Remove the forward that dispatches, if there is one."""
    module.__dict__.pop(FORWARD, None)
    if is_derived(module):
        set_class(module, class_of(module))
    elif dispatch_of(module) is not None:
        for name in ATTRIBUTES:
            del module.__dict__[name]


def dispatch_of(module: Module) -> Dispatch | None:
    """Return the forward of an accelerated module; None for any other."""
    forward = forward_of(module) or module.__dict__.get("forward")
    return forward if isinstance(forward, Dispatch) else None


ATTRIBUTES = ("forward", "_replicate_for_data_parallel", "__prepare_scriptable__")
"""Attributes set by `attach`, which PyTorch looks up on the module before its class."""


def _reduce(module: Module) -> Any:
    """Reduce a module for `copy` and `pickle`, with a new `Dispatch` for an accelerated copy.

    A shallow copy would otherwise share it, and with it the module that it runs.
    """
    reduced: Any = object.__reduce_ex__(module, 2)
    forward = dispatch_of(module)
    if forward is None:
        return reduced
    state = {name: value for name, value in reduced[2].items() if name not in ATTRIBUTES}
    return _accelerated, (type(module), forward.always), state


def _accelerated(kind: type[Module], always: bool) -> Module:
    """Return a module without its state, whose forward dispatches."""
    module = kind.__new__(kind)
    attach(module, always)
    return module


for _kind in OURS:
    copyreg.pickle(_kind, _reduce)


M = TypeVar("M", bound=Module)


class Outcome(NamedTuple):
    """The effect of `accelerate` on one recurrent module of a model, or on one of its calls.

    Attributes
    ----------
    name
        Name in ``model.named_modules()``; empty for the model itself.
    module
        Its class: ``"GRU"``.
    replaced
        Whether this library's kernels may run its calls or, with an input, whether they run this call.
    reason
        Why, or why not: ``"PyTorch's forward: float32 LSTM, T = 200 < 256"``.
    """

    name: str
    module: str
    replaced: bool
    reason: str = ""


def accelerate(model: M, *, faster_only: bool = True) -> M:
    """Let this library's kernels run every torch.nn.RNN, GRU, LSTM and cell inside a model, or the model itself.

    Each module stays the same object of the same class with another ``forward``, so parameters, hooks, the mode and
    references to it stay valid, and `torch.nn.Module.apply` and `quantize_dynamic` recognise it. A module of a subclass
    gets a class of the same name derived from its own, in which ``super().forward`` goes the way of a call. Every call
    goes the way that was measured to be faster for its shapes and dtype, by the kernels or by PyTorch's forward;
    `explain` says which, and `restore` undoes it. Modules that cannot be replaced safely are left alone, with one
    warning; another says that a model has no such module.

    Parameters
    ----------
    model
        Changed in place.
    faster_only
        False: run every call that the kernels can run, even where they are slower.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    OptionError
        `model` is not a `torch.nn.Module`.
    """
    left, modules = [], list(_recurrent_modules(model, "accelerate"))
    for name, module in modules:
        reason = _replacement_obstacle(module)
        if reason:
            left.append(f"{name or 'the model'} ({type(module).__name__}): {reason}")
        elif not isinstance(module, _ALL_OURS) and (dispatch_of(module) is None or not faster_only):
            attach(module, not faster_only)
    if left:
        warnings.warn("accelerate does not change " + "; ".join(left), stacklevel=2)
    if not modules:
        nothing = f"accelerate does nothing: {type(model).__name__} has no RNN, GRU or LSTM of torch.nn"
        warnings.warn(nothing, stacklevel=2)
    return model


def restore(model: M) -> M:
    """Undo `accelerate` in place: give each accelerated module inside a model PyTorch's forward again; return `model`.

    Raises
    ------
    OptionError
        `model` is not a `torch.nn.Module`.
    """
    for _, module in _recurrent_modules(model, "restore"):
        detach(module)
    return model


def explain(model: Module, *inputs: Any, faster_only: bool = True, **named: Any) -> list[Outcome]:
    """Say what `accelerate` does, or did, with each recurrent module of a model; with an input, with each of its calls.

    Parameters
    ----------
    model
        A model, accelerated or not. It is not changed.
    *inputs, **named
        Arguments for one call of the model, in its current mode, with gradients or without as set now. Changes of
        buffers and of PyTorch's random numbers are undone. Without arguments nothing is called.
    faster_only
        As for `accelerate`, for modules that are not accelerated.

    Returns
    -------
    list of Outcome
        One per module, in the order of ``model.named_modules()``; with an input one per call, in order.

    Raises
    ------
    OptionError
        `model` is not a `torch.nn.Module`.
    """
    modules = {
        module: Outcome(name, module._get_name(), not reason, reason or _WITHOUT_INPUT)
        for name, module in _recurrent_modules(model, "explain")
        for reason in (_replacement_obstacle(module),)
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
        for module, outcome in modules.items():
            if outcome.replaced and not isinstance(module, _ALL_OURS) and class_of(module) not in OURS:
                stack.enter_context(_inside(module, note))
            elif not isinstance(module, torch.jit.ScriptModule):
                hook = module.register_forward_pre_hook(note, with_kwargs=True)
                stack.callback(hook.remove)
        stack.enter_context(_left_as_it_is(model))
        model(*inputs, **named)
    return calls


_ALL_OURS = tuple(OURS.values())
_OF_CELLS = Way(False, OF_CELLS)
_WITHOUT_INPUT = "each call uses whichever was measured to be faster; explain(model, input) says which"


def _way(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], faster_only: bool) -> Way:
    """Return the way that the module's forward takes for a call."""
    if isinstance(module, _ALL_OURS):
        return Way(True, f"the module is a sparsebp.torch.{module._get_name()}")
    input, lengths, dispatch = args[0] if args else kwargs["input"], kwargs.get("lengths"), dispatch_of(module)
    if lengths is not None:  # the forward gets a packed sequence
        packed: list[Any] = []

        def keep(*call: Any) -> Any:
            packed.append(call[0])
            return call

        with_lengths(cast(RNNBase, module), keep, input, None, lengths)
        input = packed[0]
    hx = args[1] if len(args) > 1 else kwargs.get("hx")
    return (dispatch or Dispatch(module, not faster_only)).way(input, hx)


@contextlib.contextmanager
def _inside(module: Module, note: Callable[..., None]) -> Iterator[None]:
    """Call `note` when the forward of a subclass calls PyTorch's, whose arguments may be others than its own."""
    before = dispatch_of(module)
    run = before or partial(kind_of(type(module)).forward, module)
    if before is None:
        attach(module, False)
    module.__dict__[FORWARD] = _Noted(module, run, note)
    try:
        yield
    finally:
        module.__dict__[FORWARD] = before
        if before is None:
            detach(module)


class _Noted(Dispatch):
    """Tells of a call, and runs it as another would."""

    def __init__(self, module: Module, run: Callable[..., Any], note: Callable[..., None]) -> None:
        super().__init__(module, False)
        self._run, self._note = run, note

    def __call__(self, input: Any, hx: Any = None, **lengths: Any) -> Any:
        """Run the call."""
        self._note(self.module, (input, hx), lengths)
        return self._run(input, hx, **lengths)


@contextlib.contextmanager
def _left_as_it_is(model: Module) -> Iterator[None]:
    """Undo what a call of the model changes in its buffers and in PyTorch's random numbers.

    Only changed values are written, without counting a version: a graph of the user may hold the buffers, and not all
    buffers are writeable.
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
    """Whether two tensors hold the same values; NaN equals NaN."""
    if a.layout is not torch.strided:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _recurrent_modules(model: Module, action: str) -> Iterator[tuple[str, Module]]:
    """Yield each recurrent module once, with its name; `action` is for the message."""
    if not isinstance(model, Module):
        raise OptionError(f"There is nothing to {action}", expected="a torch.nn.Module", got=type(model).__name__)
    done: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(done):
            continue
        closed = isinstance(module, torch.jit.ScriptModule) or _is_of_opacus(module)
        if closed:  # what is inside is no module of its own
            done = (*done, name and f"{name}.")
        if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)) or (closed and _runs_recurrences(module)):
            yield name, module


def _is_of_opacus(module: Module) -> bool:
    """Whether it is a recurrent layer for differential privacy, of modules for which Opacus has rules."""
    return any(c.__module__.startswith("opacus.") and c.__name__ in _OF_OPACUS for c in type(module).__mro__)


_OF_OPACUS = tuple(f"DP{kind.__name__}" for kind in OURS)
_OF_SCRIPTS = tuple(f"aten::{name}" for name in ("rnn_tanh", "rnn_relu", "gru", "lstm"))


def _runs_recurrences(module: Module) -> bool:
    """Whether a layer of Opacus, or a script, runs a recurrent layer."""
    if not isinstance(module, torch.jit.ScriptModule):
        return True
    graph = getattr(module, "inlined_graph", None)
    return graph is not None and any(graph.findNode(kind) for kind in _OF_SCRIPTS)


def _replacement_obstacle(module: Module) -> str:
    """Return why a recurrent module cannot be replaced; empty if it can be, or is one of ours."""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript has compiled it, with PyTorch's operators; accelerate the model instead of its script"
    if _is_of_opacus(module):
        return ("Opacus builds it from Linear layers, for a gradient per sample; the kernels run torch.nn's classes, "
                "whose gradients per sample torch.func.vmap(torch.func.grad(...)) computes")  # fmt: skip
    kind = class_of(module)
    if dispatch_of(module) is not None or isinstance(module, _ALL_OURS):
        return ""
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if kind not in OURS:
        if not any(issubclass(kind, one) for one in OURS):
            return "its class does not derive from torch.nn's RNN, GRU or LSTM"
        reason = obstacle(kind)
        if reason:
            return reason
    return ""
