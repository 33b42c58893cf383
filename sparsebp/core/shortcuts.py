"""Whether a layer's shortcuts still match its methods: a program may override some methods and inherit the rest.

In addition to `forward` and backward (`input_grad` and `weight_grad`, or `gradients`), a layer may do the same work in
another form: the Jacobian, two layers in one pass, a gradient as two factors. Such a shortcut was written for certain
methods. If a subclass, or an assignment to an object or a class, replaces one of them, the inherited shortcut computes
something else.

So callers of a shortcut ask `belongs` first, and else call the methods. A class that restates an inherited shortcut
(``jacobian_t = nn.Linear.jacobian_t``) declares it valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from sparsebp.core.errors import OptionError

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
    "lone": ("input_grad", "gradients"),
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


class _Written:
    """The methods with which a class was written, and the known answers about its shortcuts."""

    __slots__ = ("answers", "is_base", "methods")

    def __init__(self, methods: Mapping[str, Any], is_base: bool) -> None:
        self.methods, self.is_base = methods, is_base
        self.answers: dict[Any, tuple[Sequence[str], Callable[[type], Any], Any, bool]] = {}


def record(kind: type, *, is_base: bool = False) -> None:
    """Record the methods of a class as written; later assignments count as replacements."""
    # A class decorator may call this again. is_base: its shortcuts are defaults that are right for any layer.
    names = {*METHODS, *_INNER, *STANDS_FOR}
    kind._written = _Written({name: getattr(kind, name, None) for name in names}, is_base)  # type: ignore[attr-defined]


def only_described(method: T) -> T:
    """Mark a method of a base class that says what an override does: no class has the shortcut by inheriting it."""
    method.only_described = True  # type: ignore[attr-defined]
    return method


def defines(kind: Any, shortcut: str) -> bool:
    """Whether a class, or an object, has a shortcut, its own or an inherited one."""
    found = getattr(kind, shortcut, None)
    return found is not None and not getattr(found, "only_described", False)


def belongs(layer: Any, shortcut: str, methods: Sequence[str] | None = None) -> bool:
    """Whether a layer has a shortcut that was written for its current methods (None: those in `STANDS_FOR`)."""
    kind = type(layer)
    try:  # runs several times per layer and step
        names, methods_of, seen, answer = kind.__dict__["_written"].answers[shortcut, methods]
        if methods_of(kind) == seen and layer.__dict__.keys().isdisjoint(names):
            return bool(answer)
    except KeyError:
        pass
    return _found(layer, kind, shortcut, methods)


def _found(layer: Any, kind: type, shortcut: str, given: Sequence[str] | None) -> bool:
    """Compute `belongs` without the recorded answers, and record the answer."""
    methods = STANDS_FOR[shortcut] if given is None else given
    has = defines(kind, shortcut)
    own: Mapping[str, Any] = getattr(layer, "__dict__", {})
    if shortcut in own:  # assigned to the object last
        return defines(layer, shortcut)
    if not own.keys().isdisjoint(methods):
        return has and any(written.is_base and getattr(kind, shortcut) is written.methods[shortcut]
                           for written in _records(kind))  # fmt: skip
    names = (shortcut, *methods)
    found = has and _belongs(kind, shortcut, methods)
    written = kind.__dict__.get("_written")  # None: not derived from our base, so it may change unnoticed
    if written is not None and all(hasattr(kind, name) for name in names):
        methods_of = attrgetter(*names)
        written.answers[shortcut, given] = names, methods_of, methods_of(kind), found
    return found


def _records(kind: type) -> Iterator[_Written]:
    """Yield the records of a class and its bases."""
    return (vars(cls)["_written"] for cls in kind.__mro__ if "_written" in vars(cls))


def _belongs(kind: type, shortcut: str, methods: Sequence[str]) -> bool:
    home = next(cls for cls in kind.__mro__ if shortcut in vars(cls))
    written = vars(home).get("_written")
    if written is not None and (written.is_base or getattr(home, shortcut) is not written.methods[shortcut]):
        return True  # valid for any layer, or assigned by hand
    for cls in reversed(kind.__mro__):  # the first class with the shortcut and all methods
        whole = not getattr(cls, "__abstractmethods__", None) and all(hasattr(cls, name) for name in methods)
        if whole and issubclass(cls, home):
            written = vars(cls).get("_written")
            then = [getattr(cls, name) for name in methods] if written is None else map(written.methods.get, methods)
            return list(then) == [getattr(kind, name) for name in methods]
    return True  # no such methods could have been replaced


def says(layer: Any, name: str) -> bool:
    """Whether a layer has an answer of its own, or of its class, in place of the base class's default."""
    if name in getattr(layer, "__dict__", ()):
        return True
    home = next((cls for cls in type(layer).__mro__ if name in vars(cls)), None)
    written = None if home is None else vars(home).get("_written")
    return home is not None and not (written is not None and written.is_base)


def is_lone(layer: Any, saved: Any, shape: Sequence[int]) -> bool:
    """Whether a forward had an unbatched sample, by the layer's method or else by the shape of x."""
    known = belongs(layer, "lone")
    if not known or (getattr(layer, "children", None) and says(layer, "sample_axes") and not says(layer, "lone")):
        return hasattr(layer, "lone") and len(shape) <= getattr(layer, "sample_axes", 1)
    return bool(layer.lone(saved))


def may_be_lone(layer: Any, shape: Sequence[int]) -> bool:
    """Whether x may be an unbatched sample, by its axes, for a layer inside one that does not say."""
    if not getattr(layer, "children", None) or says(layer, "lone") or says(layer, "sample_axes"):
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
