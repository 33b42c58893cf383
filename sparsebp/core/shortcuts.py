"""Which shortcuts of a layer still match its methods: a program may override some methods and inherit the rest.

In addition to `forward` and backward (`input_grad` and `weight_grad`, or `gradients`), a layer may do the same work in
another form: the Jacobian, two layers in one pass, a gradient as two factors. Such a shortcut was written for certain
methods. If a subclass, or an assignment to an object or a class, replaces one of them, the inherited shortcut computes
something else.

So a class says in `valid_shortcuts` which of them hold: when it is made, and whenever one of these attributes is
assigned. An object with methods of its own says it in its place. A class that restates an inherited shortcut
(``jacobian_t = nn.Linear.jacobian_t``) declares it valid.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sparsebp.core.absent import recipe_of
from sparsebp.core.errors import OptionError
from sparsebp.core.packed import packed, passes_by

T = TypeVar("T")

METHODS = ("forward", "gradients", "input_grad", "weight_grad")
_INNER = ("function", "slope")  # from which elementwise layers make their methods
STANDS_FOR: Mapping[str, Sequence[str]] = {
    "gradients": ("input_grad", "weight_grad"),
    # In place of I.
    "jacobian_t": ("input_grad", "gradients"),
    "input_grad_work": ("input_grad", "gradients"),
    "inside": ("input_grad", "gradients", "slope"),
    "kernel_slope": ("function", "slope"),
    "kernel_grad": ("function", "slope"),
    # These read what forward saved for I.
    "couples_samples": ("input_grad", "gradients"),
    "unbatched": ("input_grad", "gradients"),
    "choices": ("input_grad", "weight_grad", "gradients"),
    # In place of W.
    "weight_grad_factors": ("weight_grad", "gradients"),
    "weight_grad_products": ("weight_grad", "gradients"),
    # In place of F.
    "forward_between": ("forward",),
    "limits": ("forward", "function"),
    "forward_time_major": ("forward",),
    "stream": ("forward",),
    # In place of all.
    "replayable": METHODS,
    "capture_obstacle": METHODS,
    "gradients_between": ("input_grad", "weight_grad", "gradients"),
    "gradients_at_last": ("input_grad", "weight_grad", "gradients"),
    "stages": METHODS,
}
"""The methods that each shortcut replaces."""


_WATCHED = frozenset((*METHODS, *_INNER, *STANDS_FOR))


class LayerType(abc.ABCMeta):
    """The type of layer classes."""

    # The first class of this type is the base of all layers: its shortcuts are right for any layer.

    _written: Mapping[str, Any]
    valid_shortcuts: frozenset[str]

    def __init__(cls, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        record(cls)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What a class takes is what its ``__init__`` takes."""
        first, *others = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        return inspect.Signature(others if first.name == "self" else [first, *others])

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Build a layer."""
        recipe = recipe_of(cls, args, options)
        layer = super().__call__(*args, **options)
        if recipe is not None:
            recipe.drop(layer)
        return layer

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _WATCHED:
            _say(cls)

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        if name in _WATCHED:
            _say(cls)


def record(kind: LayerType) -> None:
    """Record the methods of a class as written: shortcuts and methods assigned from now on are replacements."""
    # A class decorator calls this again.
    kind._written = {name: getattr(kind, name, None) for name in _WATCHED}
    _say(kind)


def _say(kind: Any) -> None:
    """Let a class and those derived from it say which shortcuts hold."""
    kind.valid_shortcuts = frozenset(name for name in STANDS_FOR if _holds(kind, name))
    for derived in kind.__subclasses__():
        _say(derived)


def say_own(layer: Any, name: str) -> None:
    """Let an object whose attribute of that name has been assigned or deleted say which shortcuts hold for it."""
    if name in _WATCHED:
        own = vars(layer)
        if own.keys().isdisjoint(_WATCHED):
            own.pop("valid_shortcuts", None)
        else:
            own["valid_shortcuts"] = _OfObject(layer)


class _OfObject:
    """The shortcuts of an object that has methods of its own, or is no layer of ours: found each time."""

    __slots__ = ("_layer",)

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __contains__(self, shortcut: str) -> bool:
        layer, kind, own = self._layer, type(self._layer), getattr(self._layer, "__dict__", {})
        if shortcut in own:  # assigned last
            return defines(layer, shortcut)
        if own.keys().isdisjoint(STANDS_FOR[shortcut]):
            return _holds(kind, shortcut)
        return defines(kind, shortcut) and any(
            _is_base(cls) and getattr(kind, shortcut) is vars(cls)["_written"][shortcut] for cls in kind.__mro__
        )


def shortcuts_of(layer: Any) -> Any:
    """Return the container of the shortcuts that hold for a layer, or for any object that has methods of one."""
    known = getattr(layer, "valid_shortcuts", None)
    return _OfObject(layer) if known is None else known


def only_described(method: T) -> T:
    """Mark a method of a base class that says what an override does: no class has the shortcut by inheriting it."""
    method.only_described = True  # type: ignore[attr-defined]
    return method


def defines(kind: Any, shortcut: str) -> bool:
    """Whether a class, or an object, has a shortcut, its own or an inherited one."""
    found = getattr(kind, shortcut, None)
    return found is not None and not getattr(found, "only_described", False)


def _holds(kind: Any, shortcut: str) -> bool:
    """Whether a class has a shortcut, which was written for the methods that it has now."""
    if not defines(kind, shortcut):
        return False
    methods, home = [name for name in STANDS_FOR[shortcut] if hasattr(kind, name)], _home(kind, shortcut)
    if isinstance(home, LayerType) and (_is_base(home) or getattr(home, shortcut) is not home._written[shortcut]):
        return True  # valid for any layer, or assigned by hand
    for cls in reversed(kind.__mro__):  # the first class with the shortcut and all methods
        whole = not getattr(cls, "__abstractmethods__", None) and all(hasattr(cls, name) for name in methods)
        if whole and issubclass(cls, home):
            then = [cls._written[name] if isinstance(cls, LayerType) else getattr(cls, name) for name in methods]
            return then == [getattr(kind, name) for name in methods]
    return True  # no such methods could have been replaced


def _home(kind: Any, name: str) -> Any:
    return next((cls for cls in kind.__mro__ if name in vars(cls)), None)


def _is_base(kind: type) -> bool:
    return isinstance(kind, LayerType) and not any(isinstance(cls, LayerType) for cls in kind.__bases__)


def says(layer: Any, name: str) -> bool:
    """Whether a layer has an answer of its own, or of its class, in place of the base class's default."""
    if name in getattr(layer, "__dict__", ()):
        return True
    home = _home(type(layer), name)
    return home is not None and not _is_base(home)


def is_unbatched(layer: Any, saved: Any, shape: Sequence[int]) -> bool:
    """Whether a forward had an unbatched sample, by the layer's method or else by the shape of x."""
    axes_alone = getattr(layer, "children", None) and says(layer, "sample_axes") and not says(layer, "unbatched")
    if axes_alone or "unbatched" not in shortcuts_of(layer):
        return hasattr(layer, "unbatched") and len(shape) <= getattr(layer, "sample_axes", 1)
    return bool(layer.unbatched(saved))


def may_be_unbatched(layer: Any, shape: Sequence[int]) -> bool:
    """Whether x may be an unbatched sample, by its axes, for a layer inside one that does not say."""
    if not getattr(layer, "children", None) or says(layer, "unbatched") or says(layer, "sample_axes"):
        return False
    return any(len(shape) == inner.sample_axes > 1 for _, inner in layer.modules())


def batch_axes_of(layer: Any) -> tuple[int, int] | None:
    """Return where a layer has the batch in its input and output; None if it does not say."""
    try:
        axes: tuple[int, int] = getattr(layer, "batch_axes", (0, 0))
    except OptionError:
        return None
    return axes


def forward_of(layer: Any, x: Any, *more: Any, **options: Any) -> tuple[Any, Any]:
    """Return ``layer.forward(x)``, checked to be an array and the values saved for the backward."""
    if passes_by(layer, x):
        y, saved = forward_of(layer, x.x, *more, **options)
        return packed(x.names, (y, *x.stashed)), saved
    try:
        found = layer.forward(x, *more, **options)
    except RecursionError:
        if hasattr(layer, "modules"):
            list(layer.modules())  # raises a clearer error if the layer contains itself
        raise
    if not isinstance(found, tuple) or len(found) != 2 or not hasattr(found[0], "dtype"):
        raise OptionError(f"{type(layer).__name__}.forward does not return what it should",
                          expected="(output, saved): an array, and what the backward needs, or None",
                          got=_described(found), remedy="Write: return y, saved")  # fmt: skip
    y, saved = found
    return y, saved


def _described(value: Any) -> str:
    inner = f" of {', '.join(type(entry).__name__ for entry in value[:4])}" if isinstance(value, tuple) else ""
    return f"{type(value).__name__}{inner}"
