"""How layers, losses, optimizers and trainers show themselves: as the call that would build them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_ABSENT = object()
# Where and from which numbers an object was built says little about it.
_UNSHOWN = frozenset({"self", "device", "rng", "size_average", "reduce", "inplace"})


def call_text(owner: Any, unshown: Iterable[str] = (), given: Mapping[str, Any] | None = None) -> str:
    """Return the constructor's call: required arguments by position, options by name unless they have their default.

    Parameters
    ----------
    owner
        An object that keeps its constructor's arguments as attributes of the same names; others are left out.
    unshown
        Further arguments to leave out.
    given
        Values of arguments that are not attributes of `owner`.
    """
    left_out = _UNSHOWN.union(unshown)
    texts = []
    for name, parameter in inspect.signature(type(owner).__init__).parameters.items():
        if name in left_out or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = (given or {}).get(name, _ABSENT)
        if value is _ABSENT:
            value = _attribute(owner, name)
        required = parameter.default is parameter.empty
        if isinstance(parameter.default, bool) and (value is None or _is_array(value)):
            value = value is not None  # a layer's `bias` is the array
        if value is _ABSENT or (not required and _same(value, parameter.default)):
            continue
        by_position = required and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        texts.append(value_text(value) if by_position else f"{name}={value_text(value)}")
    return f"{type(owner).__name__}({', '.join(texts)})"


def nested(head: str, parts: Iterable[tuple[str, Any]]) -> str:
    """Return `head` with a line for every named part before its closing parenthesis, as PyTorch shows a model."""
    lines = [textwrap.indent(f"({name}): {part!r}", "  ") for name, part in parts]
    opening = head[:-1] + ("" if head.endswith("()") else ",")
    return "\n".join([opening, *lines, ")"]) if lines else head


def value_text(value: Any) -> str:
    """Return a short text of an argument: of an array its shape, of a function its name."""
    if _is_array(value):
        return f"<{value.dtype} array {tuple(value.shape)}>"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.dtype):
        return value.name
    if (callable(value) and type(value).__repr__ is object.__repr__) or inspect.isroutine(value):
        return getattr(value, "__name__", type(value).__name__)
    return repr(value)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute, or _ABSENT: an object that is half built has a text, too."""
    try:
        return getattr(owner, name, _ABSENT)
    except Exception:
        return _ABSENT


def _same(value: Any, default: Any) -> bool:
    """Whether a kept value says what the default says: (1, 1) is 1."""
    if isinstance(value, tuple) and not isinstance(default, tuple):
        return all(_same(part, default) for part in value)
    if default is None and isinstance(value, (tuple, Mapping)):
        return not value
    if isinstance(default, type) and issubclass(default, np.generic):
        return value is None or np.dtype(value) == np.dtype(default)
    if _is_array(value):
        return False
    return type(value) is type(default) and bool(value == default)
