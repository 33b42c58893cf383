"""Subclasses of torch.nn's recurrent modules: a forward between the subclass and PyTorch's."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from sparsebp.torch.graph_breaks import breaks_graphs

# A subclass may have a forward that calls ``super().forward``. So an accelerated module of it gets a class derived from
# its own, in whose method resolution order a class with another forward comes right before torch.nn's. Parametrizations
# change the class of a module too. The class has the subclass' name and adds no attributes to modules. Making it calls
# nothing of the subclass, neither its metaclass nor ``__init_subclass__``.

KINDS: tuple[type[Module], ...] = (
    torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM, torch.nn.RNNCell, torch.nn.GRUCell, torch.nn.LSTMCell,
)  # fmt: skip
FORWARD = "_sparsebp_forward"
"""Attribute of a module: what its class' forward calls in the place of PyTorch's."""


class _Accelerated(Module):
    """The first base of all classes made here."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep it from the subclass, which may register those that derive from it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce a module as one of the user's class, to be accelerated again."""
        reduced: Any = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        make, args, *state = reduced
        ours, theirs = type(self), _their_class(type(self))
        make, *args = (theirs if part is ours else part for part in (make, *args))
        return (_again, (theirs, make, *args), *state)

    def __prepare_scriptable__(self) -> Any:
        """Refuse `torch.jit.script` of an accelerated module."""
        forward = forward_of(self)
        return self if forward is None else forward.refuse_scripting()


def _again(cls: type[Module], make: Any, *args: Any) -> Any:
    module = make(*args)
    if type(module) is cls:
        set_class(module, accelerated_class(cls))
    return module


def forward_of(module: Any) -> Any:
    """Return what `FORWARD` is for a module: its own, even if it was copied with the other attributes."""
    run = module.__dict__.get(FORWARD)
    if run is not None and run.module is not module:
        run = module.__dict__[FORWARD] = run.of(module)
    return run


def _between(kind: Any) -> Any:
    """Return the forward that comes before that of a class of torch.nn."""

    def forward(self: Any, input: Any, hx: Any = None, **lengths: Any) -> Any:
        run = forward_of(self)
        if run is None:  # restored, but the class is shared with another module
            return kind.forward(self, input, hx, **lengths)
        return run(input, hx, **lengths)

    return breaks_graphs(forward, "Before torch.export(strict=True), call sparsebp.torch.restore(model)")


_BETWEEN = {kind: type(kind.__name__, (kind,), {"__slots__": (), "forward": _between(kind)}) for kind in KINDS}
"""For each class of torch.nn the one that comes right before it."""


def kind_of(cls: type) -> type[Module]:
    """Return the class of torch.nn that a class is, or derives from."""
    return next(kind for kind in cls.__mro__ if kind in KINDS)


def accelerated_class(cls: type) -> type:
    """Return the class of accelerated modules of a subclass, the same one every time."""
    made: type
    for made in type.__subclasses__(cls):
        if made.__bases__[0] is _Accelerated:
            return made
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (_Accelerated, cls, _BETWEEN[kind_of(cls)])
    return type.__new__(type(cls), cls.__name__, bases, {**names, "__slots__": ()})


def _their_class(cls: type) -> type:
    return cls.__bases__[1] if cls.__bases__[0] is _Accelerated else cls


def class_of(module: Module) -> type:
    """Return the class that the user gave a module: not a parametrization's, nor one made here."""
    return _their_class(type_before_parametrizations(module))


def is_derived(module: Module) -> bool:
    """Whether a module has a class made here."""
    return class_of(module) is not type_before_parametrizations(module)


def set_class(module: Module, cls: type) -> None:
    """Give a module another class; under a parametrization, whose class it keeps, another base class."""
    if is_parametrized(module):
        type(module).__bases__ = (cls,)
    else:
        object.__setattr__(module, "__class__", cls)


def obstacle(cls: type) -> str:
    """Return why modules of a subclass cannot be accelerated; empty if they can."""
    own = list(_own_classes(cls))
    for name in _HELPERS:
        if any(name in vars(c) for c in own):
            return f"its class has its own {name}, which the kernels do not call"
    if any("forward" in vars(c) for c in own) and not any(_calls_super(c) for c in own):
        return "its forward does not call super().forward; derive its class from sparsebp.torch's instead"
    try:
        accelerated_class(cls)
    except Exception as error:  # of a metaclass
        return f"no class can be derived from its own ({type(error).__name__}: {error})"
    return ""


_HELPERS = (
    "_flat_weights", "_init_flat_weights", "_update_flat_weights", "_weights_have_changed", "all_weights",
    "check_forward_args", "check_hidden_size", "check_input", "get_expected_cell_size", "get_expected_hidden_size",
    "permute_hidden",
)  # fmt: skip
"""Methods and attributes of torch.nn's classes that PyTorch's forward uses."""


def _own_classes(cls: type) -> Iterator[type]:
    """Yield the classes that come before torch.nn's."""
    for c in cls.__mro__:
        if c in KINDS:
            return
        yield c


def _calls_super(cls: type) -> bool:
    """Whether a function of a class may call ``super().forward``; a forward without Python code may."""
    for name, value in vars(cls).items():
        function = inspect.unwrap(value) if callable(value) else value
        code = getattr(function, "__code__", None)
        if code is None:
            if name == "forward":
                return True
        elif any({"super", "forward"} <= set(part.co_names) for part in _codes(code)):
            return True
    return False


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
