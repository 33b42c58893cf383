"""Whether a layer's methods belong together: a program may override some of them and inherit the rest.

Beside `forward` and the way back (`input_grad` and `weight_grad`, or `gradients`) a layer may have methods that do the
same work in another form: the Jacobian, two layers in one pass, a gradient as two factors. Such a shortcut was written
for certain methods. It counts as long as the layer still has exactly these: a subclass, or an assignment to an object
or to a class, may have replaced one of them and left the shortcut as it is, which then computes something else.

Whoever would call a shortcut asks `belongs`, and where the answer is no calls the methods themselves. A class that
restates what it inherits (``jacobian_t = nn.Linear.jacobian_t``) says that it still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

METHODS = ("forward", "gradients", "input_grad", "weight_grad")
_INNER = ("function", "slope")  # what elementwise layers make their methods of
STANDS_FOR: Mapping[str, Sequence[str]] = {
    "gradients": ("input_grad", "weight_grad"),
    # In place of I.
    "jacobian_t": ("input_grad", "gradients"),
    "input_grad_work": ("input_grad", "gradients"),
    "inside": ("input_grad", "gradients", "slope"),
    "kernel_slope": ("function", "slope"),
    # They read what forward saved for I.
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
    "gradients_between": ("input_grad", "weight_grad", "gradients"),
    "stages": METHODS,
}
"""The methods in whose place each shortcut is called."""


class _Written:
    """What a class was written with, and what was found out about its shortcuts since."""

    __slots__ = ("answers", "is_base", "methods")

    def __init__(self, methods: Mapping[str, Any], is_base: bool) -> None:
        self.methods, self.is_base = methods, is_base
        self.answers: dict[Any, tuple[Sequence[str], Callable[[type], Any], Any, bool]] = {}


def record(kind: type, *, is_base: bool = False) -> None:
    """Note the methods of a class as it was written; what is assigned to it later has replaced them."""
    # kind: A class; its own decorator may call this again.
    # is_base: Whether its shortcuts are defaults that are right for any layer.
    names = {*METHODS, *_INNER, *STANDS_FOR}
    kind._written = _Written({name: getattr(kind, name, None) for name in names}, is_base)  # type: ignore[attr-defined]


def belongs(layer: Any, shortcut: str, methods: Sequence[str] | None = None) -> bool:
    """Whether a layer has a method `shortcut` that was written for the methods that it has."""
    # layer: Any object.
    # shortcut: A name in `STANDS_FOR`.
    # methods: Those in whose place it is called here; None: as `STANDS_FOR` says.
    kind = type(layer)
    try:  # asked several times a layer and step
        names, methods_of, seen, answer = kind.__dict__["_written"].answers[shortcut, methods]
        if methods_of(kind) == seen and layer.__dict__.keys().isdisjoint(names):
            return bool(answer)
    except KeyError:
        pass
    return _found(layer, kind, shortcut, methods)


def _found(layer: Any, kind: type, shortcut: str, given: Sequence[str] | None) -> bool:
    """Return what `belongs` does, without what is known of the class, and note it there."""
    methods = STANDS_FOR[shortcut] if given is None else given
    own: Mapping[str, Any] = getattr(layer, "__dict__", {})
    if shortcut in own:  # put there after everything else
        return own[shortcut] is not None
    if not own.keys().isdisjoint(methods):
        return any(written.is_base and getattr(kind, shortcut, None) is written.methods[shortcut]
                   for written in _records(kind))  # fmt: skip
    names = (shortcut, *methods)
    found = getattr(kind, shortcut, None) is not None and _belongs(kind, shortcut, methods)
    written = kind.__dict__.get("_written")  # none: not of this package's base, it may change without a trace
    if written is not None and all(hasattr(kind, name) for name in names):
        methods_of = attrgetter(*names)
        written.answers[shortcut, given] = names, methods_of, methods_of(kind), found
    return found


def _records(kind: type) -> Iterator[_Written]:
    """Yield what is known of a class and of its bases."""
    return (vars(cls)["_written"] for cls in kind.__mro__ if "_written" in vars(cls))


def _belongs(kind: type, shortcut: str, methods: Sequence[str]) -> bool:
    home = next(cls for cls in kind.__mro__ if shortcut in vars(cls))
    written = vars(home).get("_written")
    if written is not None and (written.is_base or getattr(home, shortcut) is not written.methods[shortcut]):
        return True  # right for any layer, or assigned by hand
    for cls in reversed(kind.__mro__):  # the first one with both: `home`, one that makes it whole, or that mixes it in
        whole = not getattr(cls, "__abstractmethods__", None) and all(hasattr(cls, name) for name in methods)
        if whole and issubclass(cls, home):
            written = vars(cls).get("_written")
            then = [getattr(cls, name) for name in methods] if written is None else map(written.methods.get, methods)
            return list(then) == [getattr(kind, name) for name in methods]
    return True  # there are no such methods that could have been replaced


def is_lone(layer: Any, saved: Any, shape: Sequence[int]) -> bool:
    """Whether a forward had a lone sample, without the batch axis; told from the shape of x where no method says so."""
    if belongs(layer, "lone"):
        return bool(layer.lone(saved))
    return hasattr(layer, "lone") and len(shape) <= getattr(layer, "sample_axes", 1)
